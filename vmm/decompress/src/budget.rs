//! Limit of the work that a decoder does for each block or table, however few bytes it has.
//!
//! Building a table takes as long for a block of one byte as for a block of 128 KiB. A payload of
//! tiny blocks could therefore occupy a CPU for minutes.

use thiserror::Error;

/// Added to the size of a payload, so that a small one can have some blocks with large tables.
const SPARE_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("it needs more than {max_steps} {unit} for {bytes} bytes of input and output")]
pub(crate) struct OverBudget {
    max_steps: u64,
    unit: &'static str,
    bytes: u64,
}

/// Steps that a decoder may still carry out.
#[derive(Debug)]
pub(crate) struct Budget {
    used_steps: u64,
    max_steps: u64,
    unit: &'static str,
    bytes: u64,
}

impl Budget {
    /// Returns the budget for unpacking `stream_bytes` to `output_bytes`. Each KiB of both permits
    /// `steps_per_kib` steps.
    pub(crate) fn new(
        unit: &'static str,
        steps_per_kib: u64,
        stream_bytes: usize,
        output_bytes: usize,
    ) -> Self {
        let bytes = stream_bytes as u64 + output_bytes as u64;
        let max_steps = (bytes + SPARE_BYTES).saturating_mul(steps_per_kib) >> 10;
        Self { used_steps: 0, max_steps, unit, bytes }
    }

    pub(crate) fn spend(&mut self, steps: u64) -> Result<(), OverBudget> {
        self.used_steps = self.used_steps.saturating_add(steps);
        let Self { used_steps, max_steps, unit, bytes } = *self;
        match used_steps <= max_steps {
            true => Ok(()),
            false => Err(OverBudget { max_steps, unit, bytes }),
        }
    }

    #[cfg(test)]
    pub(crate) fn used_steps(&self) -> u64 {
        self.used_steps
    }
}
