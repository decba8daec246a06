//! `fixed`: one size, whatever the guest says.

use super::Decision;
use crate::HostView;
use crate::params::params;
use crate::plan::Reason;

params! {
    /// Parameters of `fixed`.
    pub struct Params {
        /// The memory to keep, all zones together, what a balloon can take of boot memory among them.
        size_bytes: "size", Blocks, 0 => 1 << 46, 0;
    }
}

/// Wants the one size. It needs no report.
pub fn decide(params: &Params, host: &HostView) -> Decision {
    match host.requested_bytes() == params.size_bytes {
        true => Decision::hold(Reason::Enough),
        false => Decision::want(params.size_bytes, Reason::FixedSize),
    }
}
