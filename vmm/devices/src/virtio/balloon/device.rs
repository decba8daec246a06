//! The virtio-balloon device: its configuration, activation and reset.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::event::{Queues, Worker};
use super::handle::{BalloonHandle, BalloonObserver, Shared};
use super::metrics::BalloonMetrics;
use super::request::MemoryPart;
use super::state::{ActualChange, BalloonState};
use crate::event_loop::EventLoopHandle;
use crate::log::rate_limited;
use crate::memory::backing::Reservation;
use crate::memory::layout::GuestRange;
use crate::memory::zone::ZoneSpec;
use crate::memory::{BLOCK_BYTES, Memory};
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

/// The device has a statistics queue (virtio 1.3, 5.5.3).
pub(super) const F_STATS_VQ: u64 = 1 << 1;
/// The guest may deflate the balloon when it is out of memory.
pub(super) const F_DEFLATE_ON_OOM: u64 = 1 << 2;
/// The device has a free page reporting queue.
pub(super) const F_REPORTING: u64 = 1 << 5;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATS: u16 = 2;
/// Index of the reporting queue in the specification. Drivers such as Linux before 6.11 use a lower
/// index if they do not use all earlier queues.
const REPORTING: u16 = 4;

/// Linux requires 32 entries for free page reporting.
const QUEUE_SIZES: [u16; 5] = [128; 5];

/// Properties of a virtio balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonOptions {
    /// Maximum target: boot memory without the floor.
    pub max_bytes: u64,
    /// Initial target.
    pub target_bytes: u64,
    /// Offers the feature that lets the guest deflate the balloon when it is out of memory.
    pub deflate_on_oom: bool,
    /// Offers free page reporting.
    pub free_page_reporting: bool,
    /// Offers the statistics queue.
    pub statistics: bool,
}

pub struct Balloon {
    name: String,
    options: BalloonOptions,
    shared: Arc<Shared>,
    parts: Arc<MemoryParts>,
    worker: WorkerSlot,
}

/// Parts of guest memory, sorted by address, with their reservations.
pub(super) struct MemoryParts {
    pub(super) parts: Vec<MemoryPart>,
    pub(super) reservations: Vec<Arc<Reservation>>,
}

impl MemoryParts {
    fn new(memory: &Memory) -> Self {
        let mut parts: Vec<_> = memory.placed_parts().collect();
        parts.sort_by_key(|(_, range, _)| range.start);
        Self {
            parts: parts.iter().map(Self::memory_part).collect(),
            reservations: parts.iter().map(|(_, _, reservation)| Arc::clone(reservation)).collect(),
        }
    }

    fn memory_part(
        (zone, range, reservation): &(&ZoneSpec, GuestRange, &Arc<Reservation>),
    ) -> MemoryPart {
        MemoryPart { range: *range, tier: zone.tier, unit_bytes: reservation.discard_unit_bytes() }
    }
}

impl Balloon {
    /// Creates a virtio balloon for `memory`. Its worker runs on `event_loop`.
    ///
    /// # Panics
    /// Panics if a size is not a multiple of the block size or if the target exceeds the maximum.
    /// The validation of the configuration prevents both.
    pub fn new(
        id: &str,
        options: BalloonOptions,
        memory: &Memory,
        event_loop: EventLoopHandle,
        observer: BalloonObserver,
    ) -> Result<(Self, BalloonHandle), std::io::Error> {
        let mut state = BalloonState::new(options.max_bytes, BLOCK_BYTES);
        state.set_target(options.target_bytes);
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            interrupt: Mutex::default(),
            received: Mutex::default(),
            driver_generation: Mutex::default(),
            statistics_request: EventFd::new(EFD_NONBLOCK)?,
            metrics: Arc::new(BalloonMetrics::default()),
            observer,
        });
        shared.report();
        let handle = BalloonHandle { shared: Arc::clone(&shared) };
        let parts = Arc::new(MemoryParts::new(memory));
        let (name, worker) = (id.to_owned(), WorkerSlot::new(event_loop));
        Ok((Self { name, options, shared, parts, worker }, handle))
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_BALLOON as u16
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        let option = |on, feature| if on { feature } else { 0 };
        1 << VIRTIO_F_VERSION_1
            | option(self.options.statistics, F_STATS_VQ)
            | option(self.options.deflate_on_oom, F_DEFLATE_ON_OOM)
            | option(self.options.free_page_reporting, F_REPORTING)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.shared.state.lock().config(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let change = self.shared.state.lock().write_config(offset, data);
        match change {
            None => return,
            Some(ActualChange::Followed) => {}
            Some(ActualChange::Deflated(bytes)) => {
                let emptied = self.shared.state.lock().actual_bytes() == 0;
                rate_limited!(
                    warn,
                    bytes,
                    "{}",
                    match emptied {
                        false => "Guest is out of memory and deflates its balloon",
                        true =>
                            "Guest emptied its balloon: it is out of memory or unloads its driver",
                    }
                );
                self.shared
                    .metrics
                    .oom_deflated_bytes
                    .fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
                // The new target was rounded down to whole blocks, so the driver must deflate a
                // little more.
                self.shared.signal_config();
            }
        }
        self.shared.report();
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let features = activation.features;
        let queues = take_queues(&mut activation)?;
        let Activation { view, interrupt, .. } = activation;
        let worker = Worker {
            view,
            interrupt: Arc::clone(&interrupt),
            queues,
            held: None,
            awaited: true,
            parts: Arc::clone(&self.parts),
            shared: Arc::clone(&self.shared),
        };
        self.shared.state.lock().start(features & F_DEFLATE_ON_OOM != 0);
        *self.shared.driver_generation.lock() += 1;
        *self.shared.interrupt.lock() = Some(interrupt);
        if let Err(err) = self.worker.start(Box::new(worker)) {
            *self.shared.interrupt.lock() = None;
            return Err(err);
        }
        self.shared.report();
        Ok(())
    }

    fn reset(&mut self) {
        if !self.worker.stop() {
            return;
        }
        *self.shared.interrupt.lock() = None;
        *self.shared.received.lock() = None;
        self.shared.state.lock().end();
        self.shared.report();
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        self.reset();
    }
}

/// Takes the queues. The index of the reporting queue varies, because drivers may or may not skip
/// the indices of queues that they do not use.
fn take_queues(activation: &mut Activation) -> Result<Queues, ActivateError> {
    let has = |feature| activation.features & feature != 0;
    let (has_stats, has_reporting) = (has(F_STATS_VQ), has(F_REPORTING));
    let inflate = activation.take_queue(INFLATE)?;
    let deflate = activation.take_queue(DEFLATE)?;
    let stats = if has_stats { Some(activation.take_queue(STATS)?) } else { None };
    let reporting = if has_reporting {
        let first = if has_stats { STATS + 1 } else { STATS };
        let enabled =
            |index: &u16| activation.queues.get(usize::from(*index)).is_some_and(Option::is_some);
        let index = (first..=REPORTING).rev().find(enabled).unwrap_or(REPORTING);
        Some((index, activation.take_queue(index)?))
    } else {
        None
    };
    Ok(Queues { inflate, deflate, stats, reporting })
}
