//! Memory that the guest is about to give back.

/// Linux takes a block that is to go out of what is free first, and out of the total only at the
/// end. A rise in use while memory is to go is taken for that, as far as it goes: if it is use
/// after all, what was to go is still there to serve it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OffliningMemory {
    /// What was used when nothing was on its way back.
    still_bytes: Option<i128>,
}

impl OffliningMemory {
    /// State after a change of the reporter. `used_bytes` is the used memory in the first report of
    /// the new one, and includes the `offlining_bytes` that are about to go offline.
    pub(crate) fn continued(used_bytes: i128, offlining_bytes: u64) -> Self {
        OffliningMemory { still_bytes: Some(used_bytes - i128::from(offlining_bytes)) }
    }

    /// Takes what a report shows as used while `to_go_bytes` are online and no longer requested,
    /// and says how much of it is on its way out.
    pub(crate) fn learn(&mut self, used_bytes: i128, to_go_bytes: u64) -> u64 {
        if to_go_bytes == 0 {
            self.still_bytes = Some(used_bytes);
        }
        let risen_bytes = used_bytes - *self.still_bytes.get_or_insert(used_bytes);
        u64::try_from(risen_bytes).unwrap_or(0).min(to_go_bytes)
    }
}
