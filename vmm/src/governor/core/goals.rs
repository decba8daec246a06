//! Sizes that a client requests, or that the configuration has at boot: each is reached in steps (docs/policy.md, rule 4).

use balloon::{DriverState, HostView, TimeMs, ZoneId};
use tracing::info;

use super::Core;
use crate::vm::request::VmError;

impl Core {
    /// Sizes a zone by hand and pins it.
    pub fn resize(&mut self, id: &str, size_bytes: u64, now: TimeMs) -> Result<(), VmError> {
        let zone = self.find_resizable(id, size_bytes)?;
        let host = self.observe(now);
        let index = zone.0 as usize;
        let device = &self.zones[index].zone.device;
        let sizes = device.sizes();
        self.controller.pin(zone, &host, now);
        self.episode.abandoned();
        self.audit.sized_by_hand(index, &self.sizes(), now);
        let requested_bytes = sizes.requested_bytes + sizes.held_bytes;
        // If the device has lowered the last request, the same size is a new request.
        if size_bytes != requested_bytes || sizes.lowered_by().is_some() {
            info!(zone = id, size_bytes, "Resized by hand; the zone is pinned");
            self.controller.set_goal(zone, size_bytes, &host, now);
            self.follow_goals(host, now);
        }
        self.zones[index].asked_bytes = None;
        // Observed now, so that the timeout of the resize begins here.
        self.observe(now);
        self.say_reached();
        Ok(())
    }

    /// Sets the size that a zone has at boot. The policy may change it later.
    pub fn boot_with(&mut self, id: &str, size_bytes: u64, now: TimeMs) -> Result<(), VmError> {
        let zone = self.find_resizable(id, size_bytes)?;
        let host = self.observe(now);
        self.controller.set_goal(zone, size_bytes, &host, now);
        self.follow_goals(host, now);
        self.observe(now);
        Ok(())
    }

    /// Ends the goals of one zone or of all zones at the size that is requested now, because the
    /// controller has dropped them.
    pub(super) fn end_goals(&mut self, id: Option<ZoneId>) {
        for (index, zone) in self.zones.iter().enumerate() {
            let (device, is_ended) = (&zone.zone.device, id.is_none_or(|id| id.0 as usize == index));
            let sizes = device.sizes();
            if is_ended && sizes.held_bytes > 0 {
                device.request_step(sizes.requested_bytes, sizes.requested_bytes);
            }
        }
    }

    /// Checks that a zone can be sized by hand to `size_bytes`.
    pub fn check_resize(&self, id: &str, size_bytes: u64) -> Result<(), VmError> {
        self.find_resizable(id, size_bytes).map(drop)
    }

    /// Finds a zone that can have this size.
    fn find_resizable(&self, id: &str, size_bytes: u64) -> Result<ZoneId, VmError> {
        let zone = self.find(id)?;
        let sizes = self.zones[zone.0 as usize].zone.device.sizes();
        if size_bytes > sizes.max_bytes {
            return Err(VmError::BadRequest(format!(
                "Zone {id:?} can have at most {} bytes plugged, not {size_bytes}",
                sizes.max_bytes
            )));
        }
        if !size_bytes.is_multiple_of(sizes.block_bytes) {
            return Err(VmError::BadRequest(format!(
                "Zone {id:?} is resized in blocks of {} bytes; {size_bytes} is not a multiple",
                sizes.block_bytes
            )));
        }
        if sizes.driver == DriverState::Unsupported && size_bytes != sizes.plugged_bytes {
            return Err(VmError::UnsupportedDriver { zone: id.to_owned() });
        }
        Ok(zone)
    }

    /// Requests as much of the goals as the guest can describe. Returns the host's sizes after the requests.
    pub(super) fn follow_goals(&mut self, host: HostView, now: TimeMs) -> HostView {
        let steps = self.controller.next_steps(&host, now);
        if steps.is_empty() {
            return host;
        }
        for step in steps {
            let device = &self.zones[step.zone.0 as usize].zone.device;
            device.request_step(step.requested_bytes, step.goal_bytes);
        }
        self.observe(now)
    }
}
