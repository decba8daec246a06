//! Construction of a machine from a configuration.

mod builder;
pub(crate) mod factory;
