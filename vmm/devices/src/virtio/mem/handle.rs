//! Interface of a virtio-mem device for the rest of the VMM. The interface sets requested sizes and
//! reports events.

use std::sync::Arc;

use balloon::{DriverState, UNSUPPORTED_DRIVER, ZoneSizes};
use parking_lot::Mutex;
use thiserror::Error;
use tracing::{debug, error};

use super::metrics::{FailureReason, MemMetrics};
use super::state::MemState;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::zone::ZoneSpec;
use crate::virtio::zone_device::ZoneDevice;

/// Event of a zone's hotplug part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemEvent {
    /// The guest's driver is active.
    DriverPresent,
    /// The device has refused the guest's driver, because the driver does not support a required
    /// feature.
    DriverUnsupported,
    /// The device has withdrawn the request, because it refused the driver.
    Withdrawn {
        /// New requested size.
        requested_bytes: u64,
    },
    /// The guest's driver has reset the device. No blocks are plugged or unplugged until a driver
    /// is active again.
    DriverGone,
    /// Blocks were plugged or unplugged.
    SizeChanged {
        /// Plugged size.
        plugged_bytes: u64,
        requested_bytes: u64,
    },
    /// Exactly the requested size is plugged. Not reported if the requested size was lowered
    /// because the host failed.
    TargetReached { requested_bytes: u64 },
    /// The guest has no room for the page descriptors of the requested size.
    Held {
        /// Size that is now requested from the guest.
        requested_bytes: u64,
    },
    /// The host could not execute a request of the driver.
    HostFailure {
        reason: FailureReason,
        plugged_bytes: u64,
        /// New requested size. After a failed plug it is limited to the size that the host can
        /// provide.
        requested_bytes: u64,
    },
}

/// Callback for events. The callback receives the zone's id and runs on threads of the device, so
/// it must return quickly and must not take a guard of guest memory.
pub type MemObserver = Arc<dyn Fn(&str, MemEvent) + Send + Sync>;

/// Reason to reject a requested size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestSizeError {
    #[error("size {bytes} of zone {zone:?} exceeds the maximum {max_bytes}")]
    TooLarge {
        zone: String,
        /// Requested size.
        bytes: u64,
        max_bytes: u64,
    },
    #[error("zone {zone:?} cannot be resized: {UNSUPPORTED_DRIVER}")]
    UnsupportedDriver { zone: String },
    /// The size is not a multiple of the block size.
    #[error("size {bytes} of zone {zone:?} is not a multiple of the block size {block_bytes}")]
    Unaligned {
        zone: String,
        /// Requested size.
        bytes: u64,
        block_bytes: u64,
    },
}

/// State shared by a virtio-mem device, its worker and its handles.
pub(super) struct Shared {
    pub(super) zone: ZoneSpec,
    pub(super) state: Mutex<MemState>,
    /// Interrupt of the active driver. `None` if no driver is active.
    pub(super) interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    pub(super) metrics: Arc<MemMetrics>,
    pub(super) observer: MemObserver,
}

impl Shared {
    /// Calls the observer. The caller must not hold a lock.
    pub(super) fn report(&self, event: MemEvent) {
        (self.observer)(&self.zone.id, event);
    }

    /// Reports the plugged and requested sizes after a change.
    pub(super) fn report_sizes(&self) {
        let (plugged_bytes, requested_bytes, reached) = {
            let state = self.state.lock();
            (state.plugged_bytes(), state.requested_bytes(), state.is_reached())
        };
        self.report(MemEvent::SizeChanged { plugged_bytes, requested_bytes });
        if reached {
            self.report(MemEvent::TargetReached { requested_bytes });
        }
    }

    /// Records that the device has refused the driver, and withdraws the current request.
    pub(super) fn refuse_driver(&self) {
        let withdrawn = {
            let mut state = self.state.lock();
            if !state.refuse_driver() {
                return;
            }
            state.is_withdrawn().then_some(state.requested_bytes())
        };
        self.report(MemEvent::DriverUnsupported);
        if let Some(requested_bytes) = withdrawn {
            self.report(MemEvent::Withdrawn { requested_bytes });
        }
    }

    /// Notifies the active driver that the configuration has changed. Does nothing without a
    /// driver, because each driver reads the configuration when it starts.
    pub(super) fn signal_config(&self) {
        let interrupt = self.interrupt.lock().clone();
        if let Some(interrupt) = interrupt
            && let Err(err) = interrupt.signal_config()
        {
            rate_limited!(warn, zone = %self.zone.id, %err, "Cannot notify the driver of a new requested size");
        }
    }
}

/// Handle to a virtio-mem device that any thread can use. The handle is cheap to clone and does not
/// keep guest memory mapped.
#[derive(Clone)]
pub struct MemHandle {
    pub(super) shared: Arc<Shared>,
}

impl MemHandle {
    pub fn zone(&self) -> &ZoneSpec {
        &self.shared.zone
    }

    /// Requests that the driver plug or unplug memory until `bytes` are plugged. Returns
    /// immediately, and events report the progress. If the driver is waiting for its next retry, a
    /// repeated request makes it retry immediately, like [`ZoneDevice::remind`].
    pub fn request_size(&self, bytes: u64) -> Result<(), RequestSizeError> {
        self.request_step(bytes, bytes)
    }

    /// Requests the smaller of `bytes` and `goal_bytes` as a step toward `goal_bytes`. The request
    /// is reported as reached only when the goal is plugged.
    pub fn request_step(&self, bytes: u64, goal_bytes: u64) -> Result<(), RequestSizeError> {
        let bytes = bytes.min(goal_bytes);
        let reached = {
            let mut state = self.shared.state.lock();
            check_size(&self.shared.zone.id, &state, goal_bytes)?;
            check_size(&self.shared.zone.id, &state, bytes)?;
            let is_no_change =
                [bytes, goal_bytes].iter().all(|bytes| *bytes == state.plugged_bytes());
            if state.driver() == DriverState::Unsupported && !is_no_change {
                return Err(RequestSizeError::UnsupportedDriver {
                    zone: self.shared.zone.id.clone(),
                });
            }
            state.set_requested(bytes, goal_bytes);
            state.is_reached()
        };
        if reached {
            self.shared.report(MemEvent::TargetReached { requested_bytes: bytes });
        }
        self.shared.signal_config();
        Ok(())
    }

    pub fn metrics(&self) -> Arc<MemMetrics> {
        Arc::clone(&self.shared.metrics)
    }
}

impl ZoneDevice for MemHandle {
    fn sizes(&self) -> ZoneSizes {
        let ZoneSpec { tier, guest_node, .. } = *self.zone();
        let state = self.shared.state.lock();
        ZoneSizes {
            guest_numa_node: guest_node,
            block_bytes: state.block_bytes(),
            requested_bytes: state.requested_bytes(),
            plugged_bytes: state.plugged_bytes(),
            driver: state.driver(),
            held_bytes: state.held_bytes(),
            shortfall: state.shortfall(),
            is_withdrawn: state.is_withdrawn(),
            ..ZoneSizes::empty(0, tier, state.max_bytes())
        }
    }

    fn request(&self, size_bytes: u64) {
        ZoneDevice::request_step(self, size_bytes, size_bytes);
    }

    fn request_step(&self, size_bytes: u64, goal_bytes: u64) {
        match MemHandle::request_step(self, size_bytes, goal_bytes) {
            Ok(()) => {}
            // The device has refused the driver since the governor read the sizes.
            Err(err @ RequestSizeError::UnsupportedDriver { .. }) => {
                debug!(%err, "Zone not resized")
            }
            // The controller must request multiples of the block size within the bounds, so any
            // other size is a bug in the controller.
            Err(err) => error!(%err, "Governor requested an invalid zone size"),
        }
    }

    /// A driver that would retry a failed request only after 50 to 300 seconds retries it
    /// immediately.
    fn remind(&self) {
        self.shared.signal_config();
    }

    fn report_held(&self) {
        let requested_bytes = self.shared.state.lock().requested_bytes();
        self.shared.report(MemEvent::Held { requested_bytes });
    }
}

fn check_size(zone: &str, state: &MemState, bytes: u64) -> Result<(), RequestSizeError> {
    let (max_bytes, block_bytes) = (state.max_bytes(), state.block_bytes());
    if bytes > max_bytes {
        return Err(RequestSizeError::TooLarge { zone: zone.to_owned(), bytes, max_bytes });
    }
    if !bytes.is_multiple_of(block_bytes) {
        return Err(RequestSizeError::Unaligned { zone: zone.to_owned(), bytes, block_bytes });
    }
    Ok(())
}
