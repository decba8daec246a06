//! Memory that the guest is about to unplug.

/// Estimate of the memory on its way out of the guest. Linux removes a block from free memory
/// first, and from the total only at the end. Therefore, while memory has to be unplugged, a rise
/// of used memory counts as memory on its way out, up to that amount. If the rise is real use
/// instead, the memory that has to be unplugged is still there to serve it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OffliningMemory {
    /// Used memory when no memory was on its way out.
    still_bytes: Option<i128>,
}

impl OffliningMemory {
    /// Creates the state after a change of the reporter. `used_bytes` is the used memory in the
    /// first report of the new one, and includes the `offlining_bytes` that are about to go
    /// offline.
    pub(crate) fn continued(used_bytes: i128, offlining_bytes: u64) -> Self {
        OffliningMemory { still_bytes: Some(used_bytes - i128::from(offlining_bytes)) }
    }

    /// Learns from a report with `used_bytes`, while `to_go_bytes` are online but no longer
    /// requested. Returns the part of them that is on its way out.
    pub(crate) fn learn(&mut self, used_bytes: i128, to_go_bytes: u64) -> u64 {
        if to_go_bytes == 0 {
            self.still_bytes = Some(used_bytes);
        }
        let risen_bytes = used_bytes - *self.still_bytes.get_or_insert(used_bytes);
        u64::try_from(risen_bytes).unwrap_or(0).min(to_go_bytes)
    }
}
