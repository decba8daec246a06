//! `off`: reports are taken and shown, nothing is decided.

use foreshore_proto::Measure;

use super::Decision;
use crate::plan::Reason;

/// Leaves everything as it is.
pub fn decide() -> Decision {
    Decision {
        want_bytes: None,
        near: None,
        from: None,
        reason: Reason::Off,
        pressure: false,
        watermark_bytes: 0,
        watermark_of: Measure::default(),
    }
}
