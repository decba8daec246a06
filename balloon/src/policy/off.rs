//! `off`: reports are accepted and shown, but no decisions are made.

use super::Decision;
use crate::plan::Reason;

/// Leaves the size unchanged.
pub fn decide() -> Decision {
    Decision::hold(Reason::Off)
}
