//! A VMM's run: from a validated command line to its end.

use super::owner::RunError;
use super::request::VmError;
use crate::config::Launch;

/// Runs the VM until it ends.
pub fn run(_launch: Launch) -> Result<(), RunError> {
    Err(RunError::Boot(VmError::Failed("this build cannot boot a VM yet".to_owned())))
}
