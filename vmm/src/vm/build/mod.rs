//! Builds a machine from a configuration: opens the host's resources and creates the parts of the
//! machine.

pub(super) mod builder;
pub mod kvm;
pub(super) mod named_twice;
pub(crate) mod resources;
pub(crate) mod taps;
pub(super) mod zones;
