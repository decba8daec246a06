//! Interface of the governor to the device of a zone.

use balloon::ZoneSizes;

/// Device of a zone's hotplug part.
pub trait ZoneDevice: Send + Sync {
    /// Present sizes. The governor replaces the zone's number, tier and node by its own.
    fn sizes(&self) -> ZoneSizes;

    /// Requests that the guest have `size_bytes` plugged: a multiple of the block size, at most the
    /// region's size. A configuration change notifies the guest, which follows when it can.
    fn request(&self, size_bytes: u64);

    /// Requests `size_bytes` as a step towards `goal_bytes`. A device whose memory needs no page
    /// descriptors has one step.
    fn request_step(&self, _size_bytes: u64, goal_bytes: u64) {
        self.request(goal_bytes);
    }

    /// Notifies the guest of the requested size again. A driver that waits for its next try then
    /// tries at once.
    fn remind(&self);

    /// Reports that a goal is out of reach, because the guest has no room for page descriptors.
    fn report_held(&self) {}
}
