//! State of a virtio balloon. This module does no I/O.

/// Page size in the protocol, regardless of the guest's page size (virtio 1.3, 5.5.6).
pub(super) const PAGE_BYTES: u64 = 4096;
/// Length of the configuration (virtio 1.3, 5.5.4).
pub(super) const CONFIG_BYTES: usize = 16;
/// Position of `actual`, the only field that drivers write.
const ACTUAL: std::ops::Range<usize> = 4..8;

/// Meaning of a size reported by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActualChange {
    /// The driver moves toward the target or has reached it.
    Followed,
    /// The guest was out of memory and deflated this many bytes without a request. The device does
    /// not request these bytes again.
    Deflated(u64),
}

#[derive(Clone, Debug)]
pub(super) struct BalloonState {
    /// Largest size that may be requested.
    max_bytes: u64,
    /// Block size. If the guest deflates without a request, the device lowers the target to a
    /// multiple of this size.
    block_bytes: u64,
    target_bytes: u64,
    /// Size reported by the driver.
    actual_pages: u32,
    deflates_on_oom: bool,
    /// Previous, lower target, if the driver was still deflating toward it when the current target
    /// was set. The driver completes its current step, reports the size once, and only then reads
    /// the new target.
    turned_from: Option<u64>,
    /// Target before the driver's last report, if the driver reported that it emptied the balloon
    /// without a request. Otherwise `None`.
    emptied_from: Option<u64>,
}

impl BalloonState {
    /// Creates an empty balloon with a maximum target of `max_bytes`.
    pub(super) fn new(max_bytes: u64, block_bytes: u64) -> Self {
        assert!(max_bytes.is_multiple_of(block_bytes) && block_bytes.is_multiple_of(PAGE_BYTES));
        assert!(
            max_bytes / PAGE_BYTES <= u64::from(u32::MAX),
            "more than the configuration space can express"
        );
        Self {
            max_bytes,
            block_bytes,
            target_bytes: 0,
            actual_pages: 0,
            deflates_on_oom: false,
            turned_from: None,
            emptied_from: None,
        }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(super) fn target_bytes(&self) -> u64 {
        self.target_bytes
    }

    pub(super) fn actual_bytes(&self) -> u64 {
        u64::from(self.actual_pages) * PAGE_BYTES
    }

    /// Returns true if the guest deflates the balloon when it is out of memory.
    pub(super) fn deflates_on_oom(&self) -> bool {
        self.deflates_on_oom
    }

    /// Sets the target. The caller must have checked it.
    pub(super) fn set_target(&mut self, bytes: u64) {
        assert!(bytes <= self.max_bytes && bytes.is_multiple_of(self.block_bytes));
        if bytes > self.target_bytes && self.actual_bytes() > self.target_bytes {
            self.turned_from = Some(self.target_bytes);
        }
        self.target_bytes = bytes;
        self.emptied_from = None;
    }

    /// Prepares the state for a new driver. Each driver begins with an empty balloon.
    pub(super) fn start(&mut self, deflates_on_oom: bool) {
        self.actual_pages = 0;
        self.deflates_on_oom = deflates_on_oom;
        self.turned_from = None;
        self.emptied_from = None;
    }

    /// Handles a reset by the driver. The guest may use all memory of its balloon again. The target
    /// is retained for the next driver, for example after a kexec. If a driver empties its balloon
    /// and then resets the device, the guest was not out of memory. The driver was unloaded, or the
    /// guest hibernates (`remove_common` in Linux's drivers/virtio/virtio_balloon.c).
    pub(super) fn end(&mut self) {
        self.target_bytes = self.emptied_from.unwrap_or(self.target_bytes);
        self.start(false);
    }

    pub(super) fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[..4].copy_from_slice(&((self.target_bytes / PAGE_BYTES) as u32).to_le_bytes());
        config[ACTUAL].copy_from_slice(&self.actual_pages.to_le_bytes());
        config
    }

    /// Handles a driver's write to the configuration. Ignores writes to all fields except `actual`,
    /// and repeated values.
    pub(super) fn write_config(&mut self, offset: u64, data: &[u8]) -> Option<ActualChange> {
        let mut config = self.config();
        let at = usize::try_from(offset).ok().filter(|at| *at < ACTUAL.end)?;
        let end = at.saturating_add(data.len()).min(ACTUAL.end);
        if end <= ACTUAL.start {
            return None;
        }
        config[at..end].copy_from_slice(&data[..end - at]);
        let actual = config[ACTUAL].try_into().expect("four bytes");
        let pages = u32::from_le_bytes(actual);
        (pages != self.actual_pages).then(|| self.set_actual(pages))
    }

    fn set_actual(&mut self, pages: u32) -> ActualChange {
        let before_bytes = self.actual_bytes();
        self.actual_pages = pages;
        self.emptied_from = None;
        let actual_bytes = self.actual_bytes();
        // A driver that follows the target never deflates below it, except to complete a step that
        // it began before the target was raised. In all other cases the guest was out of memory. A
        // repeated request for the same size would take away the memory that the guest has just
        // deflated. Clients can raise the target again if they need that memory.
        let was_requested =
            self.turned_from.take().is_some_and(|lower_bytes| actual_bytes >= lower_bytes);
        if self.deflates_on_oom
            && !was_requested
            && actual_bytes < before_bytes
            && actual_bytes < self.target_bytes
        {
            self.emptied_from = (actual_bytes == 0).then_some(self.target_bytes);
            self.target_bytes = actual_bytes - actual_bytes % self.block_bytes;
            return ActualChange::Deflated(before_bytes - actual_bytes);
        }
        ActualChange::Followed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 2 << 20;

    fn state(deflates_on_oom: bool) -> BalloonState {
        let mut state = BalloonState::new(100 * BLOCK, BLOCK);
        state.start(deflates_on_oom);
        state
    }

    fn report(state: &mut BalloonState, bytes: u64) -> ActualChange {
        state.write_config(4, &((bytes / PAGE_BYTES) as u32).to_le_bytes()).unwrap()
    }

    #[test]
    fn configuration_has_the_layout_of_the_specification() {
        let mut state = state(false);
        state.set_target(8 * BLOCK);
        assert_eq!(report(&mut state, 3 * BLOCK), ActualChange::Followed);
        let config = state.config();
        assert_eq!(config[..4], (8 * 512u32).to_le_bytes());
        assert_eq!(config[4..8], (3 * 512u32).to_le_bytes());
        assert_eq!(config[8..], [0; 8]);
    }

    #[test]
    fn driver_writes_only_its_own_field() {
        let mut state = state(false);
        state.set_target(BLOCK);
        for (offset, len) in [(0, 4), (3, 1), (8, 4), (12, 4), (u64::MAX, 4), (100, 4), (4, 0)] {
            assert_eq!(state.write_config(offset, &[0xff; 4][..len]), None, "{offset}");
        }
        assert_eq!((state.target_bytes(), state.actual_bytes()), (BLOCK, 0));
        // The driver writes the field in pieces, and then with an access that extends beyond both
        // ends of the field.
        assert!(state.write_config(6, &[1]).is_some());
        assert_eq!(state.actual_bytes(), 0x1_0000 * PAGE_BYTES);
        assert!(state.write_config(0, &[2; 12]).is_some());
        assert_eq!((state.target_bytes(), state.actual_bytes()), (BLOCK, 0x0202_0202 * PAGE_BYTES));
    }

    #[test]
    fn memory_deflated_by_the_guest_is_not_requested_again() {
        let mut state = state(true);
        state.set_target(8 * BLOCK);
        assert_eq!(report(&mut state, 8 * BLOCK), ActualChange::Followed);
        // Linux deflates 1 MiB at a time.
        assert_eq!(report(&mut state, 8 * BLOCK - BLOCK / 2), ActualChange::Deflated(BLOCK / 2));
        assert_eq!(state.target_bytes(), 7 * BLOCK);
        // The driver follows the new target.
        assert_eq!(report(&mut state, 7 * BLOCK), ActualChange::Followed);
        assert_eq!(state.target_bytes(), 7 * BLOCK);
        state.set_target(20 * BLOCK);
        assert_eq!(report(&mut state, 9 * BLOCK), ActualChange::Followed);
        // The guest deflates while the driver is still inflating toward the target.
        assert_eq!(report(&mut state, 8 * BLOCK), ActualChange::Deflated(BLOCK));
        assert_eq!(state.target_bytes(), 8 * BLOCK);
    }

    #[test]
    fn driver_completes_its_step_after_the_target_rises() {
        let mut state = state(true);
        state.set_target(8 * BLOCK);
        report(&mut state, 8 * BLOCK);
        state.set_target(4 * BLOCK);
        assert_eq!(report(&mut state, 7 * BLOCK), ActualChange::Followed);
        state.set_target(10 * BLOCK);
        state.set_target(12 * BLOCK);
        assert_eq!(
            report(&mut state, 6 * BLOCK),
            ActualChange::Followed,
            "the driver had been deflating to 4"
        );
        assert_eq!(state.target_bytes(), 12 * BLOCK);
        // A second report below the target is not part of the earlier step.
        assert_eq!(report(&mut state, 5 * BLOCK), ActualChange::Deflated(BLOCK));
        // The driver deflates below every requested target.
        state.set_target(2 * BLOCK);
        state.set_target(12 * BLOCK);
        assert_eq!(report(&mut state, BLOCK), ActualChange::Deflated(4 * BLOCK));
        // The driver has begun to inflate again, so a smaller size means that the guest is out of
        // memory.
        state.set_target(0);
        state.set_target(12 * BLOCK);
        assert_eq!(report(&mut state, 2 * BLOCK), ActualChange::Followed);
        assert_eq!(report(&mut state, BLOCK), ActualChange::Deflated(BLOCK));
    }

    #[test]
    fn repeated_size_has_no_effect() {
        let mut state = state(true);
        report(&mut state, BLOCK);
        let repeated = ((BLOCK / PAGE_BYTES) as u32).to_le_bytes();
        assert_eq!(state.write_config(4, &repeated), None);
        assert_eq!(state.write_config(5, &repeated[1..3]), None);
    }

    #[test]
    fn deflation_without_the_feature_keeps_the_target() {
        let mut state = state(false);
        state.set_target(8 * BLOCK);
        report(&mut state, 8 * BLOCK);
        assert_eq!(report(&mut state, 0), ActualChange::Followed);
        assert_eq!(state.target_bytes(), 8 * BLOCK);
    }

    #[test]
    fn target_outlives_the_driver_unlike_the_balloon() {
        let mut state = state(true);
        state.set_target(8 * BLOCK);
        report(&mut state, 8 * BLOCK);
        state.end();
        assert_eq!((state.target_bytes(), state.actual_bytes()), (8 * BLOCK, 0));
        assert!(!state.deflates_on_oom());
    }

    #[test]
    fn unloaded_driver_keeps_the_target() {
        let mut state = state(true);
        state.set_target(8 * BLOCK);
        report(&mut state, 8 * BLOCK);
        // The driver empties the balloon, reports this once, and resets the device.
        assert_eq!(report(&mut state, 0), ActualChange::Deflated(8 * BLOCK));
        assert_eq!(state.target_bytes(), 0, "no size is requested yet");
        state.end();
        assert_eq!((state.target_bytes(), state.actual_bytes()), (8 * BLOCK, 0));
        // The balloon of the next driver is only partly inflated.
        state.start(true);
        report(&mut state, 3 * BLOCK);
        report(&mut state, 0);
        state.end();
        assert_eq!(state.target_bytes(), 8 * BLOCK);
    }

    #[test]
    fn reboot_after_deflation_requests_at_most_one_block() {
        let mut state = state(true);
        state.set_target(8 * BLOCK);
        report(&mut state, 8 * BLOCK);
        for half in (0..16).rev() {
            report(&mut state, half * BLOCK / 2);
        }
        assert_eq!(state.target_bytes(), 0);
        let mut rebooted = state.clone();
        rebooted.end();
        assert!(rebooted.target_bytes() <= BLOCK, "{rebooted:?}");
        // A later target or report replaces the earlier one.
        state.set_target(2 * BLOCK);
        state.end();
        assert_eq!(state.target_bytes(), 2 * BLOCK);
        state.start(true);
        report(&mut state, 2 * BLOCK);
        report(&mut state, 0);
        state.set_target(0);
        state.end();
        assert_eq!(state.target_bytes(), 0);
    }
}
