//! Errors of requests to the governor.

use balloon::governor::ResizeTargetError;
use balloon::params::{ParamError, Unit};
use foreshore_config::ConfigError;
use foreshore_types::size::Size;
use thiserror::Error;

/// Error of a request to the governor.
#[derive(Debug, Error)]
pub enum GovernorError {
    #[error("no resizable zone: {id:?}; vm.memory lists the zones")]
    NoSuchZone { id: String },
    #[error("zone {id:?} cannot be resized: {reason}")]
    NotResizable { id: String, reason: ResizeTargetError },
    #[error(transparent)]
    AboveZones(#[from] AboveZones),
    #[error(transparent)]
    Parameter(#[from] ParamError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

#[derive(Debug, Error)]
#[error("{name} is {}, must be at most {}, the maximum of all zones together", Unit::Bytes.show(*.bytes), Unit::Bytes.show(*.most_bytes))]
pub struct AboveZones {
    pub name: &'static str,
    pub bytes: u64,
    pub most_bytes: u64,
}

/// The guest has no room for the page descriptors of a DIMM (rule 4 in docs/reference/policies.md).
#[derive(Debug, Error)]
#[error(
    "no room for the page descriptors of {}, at most for those of {}",
    Size(*dimm_bytes),
    Size(*most_bytes)
)]
pub struct DescriptorLack {
    pub dimm_bytes: u64,
    /// Amount of memory for which the guest has room for page descriptors.
    pub most_bytes: u64,
}
