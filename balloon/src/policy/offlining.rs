//! Memory that the guest is about to unplug.

/// Estimates how much memory the guest is about to unplug. Linux first removes a block from free
/// memory, and from the total only at the end. Therefore, while memory has to be unplugged, a rise
/// of used memory up to that amount is taken to be memory that is being unplugged. If the guest
/// really uses more memory instead, the memory that has to be unplugged is still present to serve
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OffliningMemory {
    /// Used memory at the last time when no memory was being unplugged.
    baseline_bytes: Option<i128>,
}

impl OffliningMemory {
    /// Creates the state after the source of reports has changed. `used_bytes` is the used memory
    /// in the first report from the new source. It includes the `offlining_bytes` that are being
    /// unplugged.
    pub(crate) fn after_source_change(used_bytes: i128, offlining_bytes: u64) -> Self {
        OffliningMemory { baseline_bytes: Some(used_bytes - i128::from(offlining_bytes)) }
    }

    /// Updates the estimate from a report with `used_bytes`. `pending_unplug_bytes` are online but
    /// not requested. Returns the part of `pending_unplug_bytes` that is being unplugged.
    pub(crate) fn learn(&mut self, used_bytes: i128, pending_unplug_bytes: u64) -> u64 {
        if pending_unplug_bytes == 0 {
            self.baseline_bytes = Some(used_bytes);
        }
        let increase_bytes = used_bytes - *self.baseline_bytes.get_or_insert(used_bytes);
        u64::try_from(increase_bytes).unwrap_or(0).min(pending_unplug_bytes)
    }
}
