//! `fixed`: one size, whatever the guest says.

use foreshore_proto::Measure;

use super::Decision;
use crate::HostView;
use crate::params::params;
use crate::plan::Reason;

params! {
    /// Parameters of `fixed`.
    pub struct Params {
        /// The hotplugged memory to keep, all zones together.
        size_bytes: "size", Blocks, 0 => 1 << 46, 0;
    }
}

/// Wants the one size. It needs no report.
pub fn decide(params: &Params, host: &HostView) -> Decision {
    let there = host.requested_bytes() == params.size_bytes;
    Decision {
        want_bytes: (!there).then_some(params.size_bytes),
        near: None,
        from: None,
        reason: if there { Reason::Enough } else { Reason::FixedSize },
        pressure: false,
        watermark_bytes: 0,
        watermark_of: Measure::default(),
    }
}
