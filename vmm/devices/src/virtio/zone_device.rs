//! Interface through which the governor controls the device of a zone.

use balloon::ZoneSizes;

/// Device that resizes a zone.
pub trait ZoneDevice: Send + Sync {
    /// Current sizes. The governor replaces the zone's number, tier and node with its own values.
    fn sizes(&self) -> ZoneSizes;

    /// Requests that the guest plug or unplug blocks until `size_bytes` are plugged. The size must
    /// be a multiple of the block size and at most the region's size. A configuration change
    /// notifies the guest, which may take any time to reach the size.
    fn request(&self, size_bytes: u64);

    /// Requests `size_bytes` as a step toward `goal_bytes`. A device whose memory needs no page
    /// descriptors requests the goal in one step.
    fn request_step(&self, _size_bytes: u64, goal_bytes: u64) {
        self.request(goal_bytes);
    }

    /// Notifies the guest of the requested size again. A driver that is waiting for its next retry
    /// then retries immediately.
    fn remind(&self);

    /// Reports that the goal cannot be reached because the guest has no room for page descriptors.
    fn report_held(&self) {}
}
