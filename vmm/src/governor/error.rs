//! Errors of requests to the governor.

use balloon::UNSUPPORTED_DRIVER;
use balloon::params::ParamError;
use foreshore_config::ConfigError;
use thiserror::Error;

use super::core::AboveZones;

/// Error of a request to the governor.
#[derive(Debug, Error)]
pub enum GovernorError {
    #[error("There is no zone {id:?} that can be resized")]
    NoSuchZone { id: String },
    #[error("Zone {id:?} can have at most {max_bytes} bytes plugged, not {size_bytes}")]
    TooLarge { id: String, size_bytes: u64, max_bytes: u64 },
    #[error("Zone {id:?} is resized in blocks of {block_bytes} bytes; {size_bytes} is not a multiple")]
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
