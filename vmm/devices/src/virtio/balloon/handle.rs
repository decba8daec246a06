//! What the rest of the VMM does with a balloon: ask for a size and for statistics, and hear what
//! became of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use balloon::statistics::Statistics;
use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::metrics::BalloonMetrics;
use super::state::BalloonState;
use crate::interrupt::VirtioInterrupt;
use crate::log::sparsely;

/// Is told that sizes or statistics have changed. It is called on vCPUs' and the device's threads:
/// it must return soon, and must not take a guard of guest memory.
pub type BalloonObserver = Arc<dyn Fn() + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonSizes {
    /// What the driver is asked to have in it.
    pub target_bytes: u64,
    /// What it says is in it.
    pub actual_bytes: u64,
    /// The most that may be asked for.
    pub max_bytes: u64,
    /// The unit in which it may be.
    pub block_bytes: u64,
}

/// Statistics as they came.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    /// What the driver says.
    pub statistics: Statistics,
    /// Counts up with every set.
    pub number: u64,
    /// Counts the driver's lives: counters may begin anew with each.
    pub driver_life: u64,
    pub at: Instant,
}

/// Why a size cannot be asked for.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TargetError {
    #[error("a balloon of {bytes} bytes is above its maximum of {max_bytes} bytes")]
    TooLarge {
        /// What was asked for.
        bytes: u64,
        max_bytes: u64,
    },
    /// Not whole blocks.
    #[error("a balloon of {bytes} bytes is not a multiple of {block_bytes} bytes")]
    Unaligned {
        /// What was asked for.
        bytes: u64,
        block_bytes: u64,
    },
}

/// What the front, the worker and the handles of one device share.
pub(super) struct Shared {
    pub(super) state: Mutex<BalloonState>,
    /// Set while the driver is there.
    pub(super) interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    pub(super) heard: Mutex<Option<Heard>>,
    pub(super) driver_life: Mutex<u64>,
    /// Raised to have the driver asked for statistics.
    pub(super) ask: EventFd,
    pub(super) metrics: Arc<BalloonMetrics>,
    pub(super) observer: BalloonObserver,
}

impl Shared {
    /// Shows the sizes in the metrics, and tells the observer. No lock may be held.
    pub(super) fn report(&self) {
        let (target_bytes, actual_bytes) = {
            let state = self.state.lock();
            (state.target_bytes(), state.actual_bytes())
        };
        self.metrics.target_bytes.store(target_bytes, Ordering::Relaxed);
        self.metrics.actual_bytes.store(actual_bytes, Ordering::Relaxed);
        (self.observer)();
    }

    /// Takes statistics as they came.
    pub(super) fn hear(&self, statistics: Statistics) {
        for tag in balloon::statistics::Tag::ALL {
            if let Some(value) = statistics.get(tag) {
                self.metrics.set_statistic(tag, value);
            }
        }
        let number = self.metrics.statistics.fetch_add(1, Ordering::Relaxed) + 1;
        let driver_life = *self.driver_life.lock();
        *self.heard.lock() = Some(Heard { statistics, number, driver_life, at: Instant::now() });
        (self.observer)();
    }

    /// Tells the driver to look at the configuration; without a driver, that is what it begins
    /// with.
    pub(super) fn signal_config(&self) {
        let interrupt = self.interrupt.lock().clone();
        if let Some(interrupt) = interrupt
            && let Err(err) = interrupt.signal_config()
        {
            sparsely!(warn, %err, "The driver cannot be told of a new size of the balloon");
        }
    }
}

/// A handle on a balloon, cheap to clone, for any thread. It keeps none of the VM's memory.
#[derive(Clone)]
pub struct BalloonHandle {
    pub(super) shared: Arc<Shared>,
}

impl BalloonHandle {
    /// Asks the driver to have `bytes` in the balloon. Returns at once; the observer is told how it
    /// goes.
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

    /// Makes the driver look at its target again.
    pub fn kick(&self) {
        self.shared.signal_config();
    }

    /// What is asked for, there, and possible.
    pub fn sizes(&self) -> BalloonSizes {
        let state = self.shared.state.lock();
        BalloonSizes {
            target_bytes: state.target_bytes(),
            actual_bytes: state.actual_bytes(),
            max_bytes: state.max_bytes(),
            block_bytes: state.block_bytes(),
        }
    }

    /// Whether the driver takes pages out of the balloon when the guest has nothing else left: then
    /// Linux counts what is in it as used memory.
    pub fn deflates_on_oom(&self) -> bool {
        self.shared.state.lock().deflates_on_oom()
    }

    /// Asks the driver for statistics; it has nothing to answer by while it has not answered the
    /// last time.
    pub fn ask_statistics(&self) {
        // Fails only when the counter is full, and then it is asked anyway.
        let _ = self.shared.ask.write(1);
    }

    /// The last statistics of the driver that is there.
    pub fn statistics(&self) -> Option<Heard> {
        *self.shared.heard.lock()
    }

    /// Whether the guest's driver works: without it, no request will be followed.
    pub fn driver_present(&self) -> bool {
        self.shared.interrupt.lock().is_some()
    }

    /// What the device counts.
    pub fn metrics(&self) -> Arc<BalloonMetrics> {
        Arc::clone(&self.shared.metrics)
    }
}
