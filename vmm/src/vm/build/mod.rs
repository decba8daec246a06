//! From a configuration to a machine: what it needs of the host, and how it is put together.

pub(super) mod builder;
pub mod kvm;
pub(super) mod named_twice;
pub(crate) mod resources;
pub(crate) mod taps;
pub(super) mod zones;
