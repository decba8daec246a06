//! `off`: accepts and shows reports, but makes no decisions.

use super::Decision;
use crate::plan::Reason;

/// Leaves the size unchanged.
pub fn decide() -> Decision {
    Decision::hold(Reason::Off)
}
