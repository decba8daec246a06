//! `off`: reports are taken and shown, nothing is decided.

use super::Decision;
use crate::plan::Reason;

/// Leaves everything as it is.
pub fn decide() -> Decision {
    Decision::hold(Reason::Off)
}
