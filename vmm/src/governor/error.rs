//! Errors of requests to the governor.

use balloon::UNSUPPORTED_DRIVER;
use balloon::params::{ParamError, Unit};
use foreshore_config::ConfigError;
use foreshore_types::size::Size;
use thiserror::Error;

/// Error of a request to the governor.
#[derive(Debug, Error)]
pub enum GovernorError {
    #[error("There is no zone {id:?} that can be resized")]
    NoSuchZone { id: String },
    #[error("Zone {id:?} can have at most {} plugged, not {}", Size(*.max_bytes), Size(*.size_bytes))]
    TooLarge { id: String, size_bytes: u64, max_bytes: u64 },
    #[error("Zone {id:?} is resized in blocks of {}; {} is not a multiple", Size(*.block_bytes), Size(*.size_bytes))]
    NotMultiple { id: String, size_bytes: u64, block_bytes: u64 },
    #[error("Zone {id:?} cannot be resized: {UNSUPPORTED_DRIVER}")]
    UnsupportedDriver { id: String },
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
