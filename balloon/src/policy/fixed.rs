//! `fixed`: keeps one size and ignores reports.

use super::Decision;
use crate::HostView;
use crate::params::params;
use crate::plan::Reason;

params! {
    /// Parameters of `fixed`.
    pub struct Params {
        /// Memory of all zones together, including the part of boot memory that a balloon can take.
        size_bytes: "size", Blocks, 0 => 1 << 46, 0;
    }
}

/// Requests the configured size. It needs no report.
pub fn decide(params: &Params, host: &HostView) -> Decision {
    match host.requested_bytes() == params.size_bytes {
        true => Decision::hold(Reason::Enough),
        false => Decision::want(params.size_bytes, Reason::FixedSize),
    }
}
