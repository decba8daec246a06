//! Interface of the virtio balloon for the rest of the VMM: targets, sizes and statistics.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use balloon::statistics::Statistics;
use balloon::{DriverState, Tier, ZoneSizes};
use parking_lot::Mutex;
use thiserror::Error;
use tracing::error;
use vmm_sys_util::eventfd::EventFd;

use super::metrics::BalloonMetrics;
use super::state::BalloonState;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::virtio::zone_device::ZoneDevice;

/// Callback after a change of sizes or statistics. The callback is called on threads of vCPUs and
/// of the device, so it must return quickly and must not take a guard of guest memory.
pub type BalloonObserver = Arc<dyn Fn() + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonSizes {
    /// Requested size.
    pub target_bytes: u64,
    /// Size reported by the driver.
    pub actual_bytes: u64,
    /// Largest size that may be requested.
    pub max_bytes: u64,
    /// Block size. Requested sizes are multiples of it.
    pub block_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct ReceivedStatistics {
    pub statistics: Statistics,
    /// Sequence number of these statistics. Each new set has a higher number.
    pub number: u64,
    /// Number of the activation that these statistics belong to. Counters may restart after each
    /// activation.
    pub driver_generation: u64,
    pub at: Instant,
}

/// Reason to reject a requested size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TargetError {
    #[error("balloon size {bytes} exceeds the maximum {max_bytes}")]
    TooLarge {
        /// Requested size.
        bytes: u64,
        max_bytes: u64,
    },
    /// The size is not a multiple of the block size.
    #[error("balloon size {bytes} is not a multiple of {block_bytes}")]
    Unaligned {
        /// Requested size.
        bytes: u64,
        block_bytes: u64,
    },
}

/// State shared by a balloon device, its worker and its handles.
pub(super) struct Shared {
    pub(super) state: Mutex<BalloonState>,
    /// Interrupt of the active driver. `None` if no driver is active.
    pub(super) interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    pub(super) received: Mutex<Option<ReceivedStatistics>>,
    pub(super) driver_generation: Mutex<u64>,
    /// Signaled to request statistics from the driver.
    pub(super) statistics_request: EventFd,
    pub(super) metrics: Arc<BalloonMetrics>,
    pub(super) observer: BalloonObserver,
}

impl Shared {
    /// Updates the metrics and calls the observer. The caller must not hold a lock.
    pub(super) fn report(&self) {
        let (target_bytes, actual_bytes) = {
            let state = self.state.lock();
            (state.target_bytes(), state.actual_bytes())
        };
        self.metrics.target_bytes.store(target_bytes, Ordering::Relaxed);
        self.metrics.actual_bytes.store(actual_bytes, Ordering::Relaxed);
        (self.observer)();
    }

    pub(super) fn record_statistics(&self, statistics: Statistics) {
        for tag in balloon::statistics::Tag::ALL {
            if let Some(value) = statistics.get(tag) {
                self.metrics.set_statistic(tag, value);
            }
        }
        let number = self.metrics.statistics.fetch_add(1, Ordering::Relaxed) + 1;
        let driver_generation = *self.driver_generation.lock();
        *self.received.lock() =
            Some(ReceivedStatistics { statistics, number, driver_generation, at: Instant::now() });
        (self.observer)();
    }

    /// Notifies the active driver that the configuration has changed. Does nothing without a
    /// driver, because each driver reads the configuration when it starts.
    pub(super) fn signal_config(&self) {
        let interrupt = self.interrupt.lock().clone();
        if let Some(interrupt) = interrupt
            && let Err(err) = interrupt.signal_config()
        {
            rate_limited!(warn, %err, "Cannot notify the driver of a new balloon size");
        }
    }
}

/// Handle to a virtio balloon that any thread can use. The handle is cheap to clone and does not
/// keep guest memory mapped.
#[derive(Clone)]
pub struct BalloonHandle {
    pub(super) shared: Arc<Shared>,
}

impl BalloonHandle {
    /// Requests a balloon of `bytes` from the driver. Returns immediately. The observer is called
    /// each time the balloon's size changes.
    pub fn set_target(&self, bytes: u64) -> Result<(), TargetError> {
        {
            let mut state = self.shared.state.lock();
            let (max_bytes, block_bytes) = (state.max_bytes(), state.block_bytes());
            if bytes > max_bytes {
                return Err(TargetError::TooLarge { bytes, max_bytes });
            }
            if !bytes.is_multiple_of(block_bytes) {
                return Err(TargetError::Unaligned { bytes, block_bytes });
            }
            state.set_target(bytes);
        }
        self.shared.report();
        self.shared.signal_config();
        Ok(())
    }

    /// Requested, current and maximum size of the balloon.
    pub fn sizes(&self) -> BalloonSizes {
        let state = self.shared.state.lock();
        BalloonSizes {
            target_bytes: state.target_bytes(),
            actual_bytes: state.actual_bytes(),
            max_bytes: state.max_bytes(),
            block_bytes: state.block_bytes(),
        }
    }

    /// Returns true if the guest deflates the balloon when it is out of memory. Linux then counts
    /// memory in the balloon as used.
    pub fn deflates_on_oom(&self) -> bool {
        self.shared.state.lock().deflates_on_oom()
    }

    /// Requests statistics from the driver. Has no effect while an earlier request is unanswered.
    pub fn request_statistics(&self) {
        // The write fails only if the event's counter is full. In that case a request is already
        // pending.
        let _ = self.shared.statistics_request.write(1);
    }

    /// Latest statistics that the active driver sent.
    pub fn statistics(&self) -> Option<ReceivedStatistics> {
        *self.shared.received.lock()
    }

    /// Returns true if the guest's driver is active. Requests have no effect without an active
    /// driver.
    pub fn driver_present(&self) -> bool {
        self.shared.interrupt.lock().is_some()
    }

    pub fn metrics(&self) -> Arc<BalloonMetrics> {
        Arc::clone(&self.shared.metrics)
    }
}

/// The balloon zone is the part of boot memory that the balloon can inflate into. Memory in the
/// balloon counts as unplugged.
impl ZoneDevice for BalloonHandle {
    fn sizes(&self) -> ZoneSizes {
        let sizes = BalloonHandle::sizes(self);
        ZoneSizes {
            block_bytes: sizes.block_bytes,
            requested_bytes: sizes.max_bytes - sizes.target_bytes,
            plugged_bytes: sizes.max_bytes.saturating_sub(sizes.actual_bytes),
            driver: if self.driver_present() { DriverState::Ready } else { DriverState::Absent },
            ..ZoneSizes::empty(0, Tier::Dram, sizes.max_bytes)
        }
    }

    fn request(&self, size_bytes: u64) {
        let max_bytes = BalloonHandle::sizes(self).max_bytes;
        if let Err(err) = self.set_target(max_bytes.saturating_sub(size_bytes)) {
            error!(%err, "Governor requested an invalid balloon size");
        }
    }

    fn remind(&self) {
        self.shared.signal_config();
    }
}
