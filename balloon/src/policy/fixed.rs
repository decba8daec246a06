//! `fixed`: one size, whatever the guest says.

use serde::Serialize;

use super::Decision;
use crate::plan::Reason;
use crate::units::in_range;
use crate::{BLOCK_BYTES, HostView, ParamError};

/// Parameters of `fixed`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Params {
    /// The hotplugged memory to keep, all zones together.
    pub size_bytes: u64,
}

impl Params {
    /// Checks every parameter against its bounds.
    pub fn validate(&self) -> Result<(), ParamError> {
        in_range("size", self.size_bytes, 0, 1 << 46)?;
        in_range("size modulo 2 MiB", self.size_bytes % BLOCK_BYTES, 0, 0)
    }
}

/// Wants the one size. It needs no report.
pub fn decide(params: &Params, host: &HostView) -> Decision {
    let there = host.requested_bytes() == params.size_bytes;
    Decision {
        want_bytes: (!there).then_some(params.size_bytes),
        near: None,
        reason: if there { Reason::Enough } else { Reason::FixedSize },
        pressure: false,
        watermark_bytes: 0,
    }
}
