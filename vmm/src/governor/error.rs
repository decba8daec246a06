//! Errors of requests to the governor.

use balloon::governor::ResizeTargetError;
use balloon::params::{ParamError, Unit};
use foreshore_config::ConfigError;
use thiserror::Error;

/// Error of a request to the governor.
#[derive(Debug, Error)]
pub enum GovernorError {
    #[error("There is no zone {id:?} that can be resized")]
    NoSuchZone { id: String },
    #[error("Zone {id:?} cannot be resized: {reason}")]
    NotResizable { id: String, reason: ResizeTargetError },
    #[error(transparent)]
    AboveZones(#[from] AboveZones),
    #[error(transparent)]
    Parameter(#[from] ParamError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

#[derive(Debug, Error)]
#[error("{name} is {}, must be at most {}, which is what all zones can have", Unit::Bytes.show(*.bytes), Unit::Bytes.show(*.most_bytes))]
pub struct AboveZones {
    pub name: &'static str,
    pub bytes: u64,
    pub most_bytes: u64,
}
