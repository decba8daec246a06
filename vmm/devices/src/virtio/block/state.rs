//! State shared by a disk's device, its workers and its handles.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use tracing::error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;

use super::flush::Flushes;
use super::metrics::BlockMetrics;
use super::request::{Limits, MAX_RANGE_SECTORS, MAX_RANGES};
use super::serial::serial_number;
use crate::disk::range::SECTOR_BYTES;
use crate::disk::{BlockDevice, Geometry, ResizeError};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::persist::FirstFailure;

/// Length of `struct virtio_blk_config` up to the last supported field (virtio 1.3, 5.2.4).
const CONFIG_LEN: usize = 60;
/// Offset of `writeback`, the only field that drivers write.
const WRITEBACK_AT: u64 = 32;
/// Descriptors that a request needs in addition to its data: one for the header and one for the
/// status byte.
const OTHER_DESCRIPTORS: u16 = 2;

/// Properties of a disk that are independent of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskShape {
    /// Id in logs, metrics and the API.
    pub id: String,
    /// Serial number for the guest. [`serial_number`] shortens it if needed.
    pub serial: String,
    pub queues: u16,
    /// Number of descriptors in each queue. A power of two, at least 4.
    pub queue_size: u16,
    /// Refuse writes by the guest even if the content is writable.
    pub read_only: bool,
}

/// Handling of writes that find no space in a pool.
pub struct FullHandler {
    /// Writes wait until [`BlockHandle::retry_writes`](super::BlockHandle::retry_writes) is called.
    /// Otherwise they fail.
    pub waits: bool,
    /// Called for each write that fails, and for the first of those that wait.
    pub notify: Box<dyn Fn() + Send + Sync>,
}

pub(super) struct Disk {
    shape: DiskShape,
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    /// True if the driver has enabled the write cache. Without the cache, each write is made
    /// durable before it is answered.
    write_back: AtomicBool,
    /// Interrupt of the active driver. `None` if no driver is active.
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    metrics: Arc<BlockMetrics>,
    flushes: Arc<Flushes>,
    failure: FirstFailure,
    on_full: OnceLock<FullHandler>,
    /// Wakes the workers whose writes wait for space.
    waiting: Mutex<Vec<Arc<EventFd>>>,
}

impl Disk {
    pub(super) fn new(shape: DiskShape, device: Arc<dyn BlockDevice>) -> Self {
        let mut geometry = device.geometry();
        geometry.read_only |= shape.read_only;
        let (interrupt, metrics) = (Mutex::default(), Arc::new(BlockMetrics::default()));
        metrics.size_bytes.store(device.size_bytes(), Ordering::Relaxed);
        let (write_back, flushes, failure) =
            (AtomicBool::new(true), Arc::default(), FirstFailure::default());
        let (on_full, waiting) = (OnceLock::new(), Mutex::default());
        Self {
            shape,
            device,
            geometry,
            write_back,
            interrupt,
            metrics,
            flushes,
            failure,
            on_full,
            waiting,
        }
    }

    pub(super) fn shape(&self) -> &DiskShape {
        &self.shape
    }

    pub(super) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Error of the first failed flush.
    pub(super) fn failure(&self) -> &FirstFailure {
        &self.failure
    }

    pub(super) fn metrics(&self) -> &Arc<BlockMetrics> {
        &self.metrics
    }

    /// Offered features (5.2.3).
    pub(super) fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_TOPOLOGY
            | 1 << VIRTIO_BLK_F_FLUSH;
        if self.shape.queues > 1 {
            features |= 1 << VIRTIO_BLK_F_MQ;
        }
        if self.geometry.read_only {
            return features | 1 << VIRTIO_BLK_F_RO;
        }
        features |= 1 << VIRTIO_BLK_F_CONFIG_WCE | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
        if self.geometry.discard {
            features |= 1 << VIRTIO_BLK_F_DISCARD;
        }
        features
    }

    /// Returns the limits for requests of a driver that has negotiated `features`.
    pub(super) fn limits(&self, features: u64) -> Limits {
        Limits {
            capacity_bytes: self.device.size_bytes(),
            block_bytes: self.geometry.block_bytes,
            read_only: self.geometry.read_only,
            discard: features & (1 << VIRTIO_BLK_F_DISCARD) != 0,
            write_zeroes: features & (1 << VIRTIO_BLK_F_WRITE_ZEROES) != 0,
            max_descriptors: self.shape.queue_size,
        }
    }

    /// Returns true if a write must be durable before it is answered, because the driver has
    /// switched the cache off or has not negotiated FLUSH (5.2.6.2).
    pub(super) fn writes_through(&self, features: u64) -> bool {
        // A write completes before it loads the mode here, and `write_config` stores the new mode
        // before it flushes. Therefore either the flush covers the write, or this load returns the
        // new mode.
        fence(Ordering::SeqCst);
        let flushes = features & (1 << VIRTIO_BLK_F_FLUSH) != 0;
        let chooses = features & (1 << VIRTIO_BLK_F_CONFIG_WCE) != 0;
        if chooses { !self.write_back.load(Ordering::Acquire) } else { !flushes }
    }

    pub(super) fn config(&self) -> [u8; CONFIG_LEN] {
        let Geometry { block_bytes, physical_block_bytes, .. } = self.geometry;
        let physical_blocks = physical_block_bytes / block_bytes;
        let mut config = [0; CONFIG_LEN];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.device.size_bytes() / SECTOR_BYTES).to_le_bytes());
        put(12, &u32::from(self.shape.queue_size - OTHER_DESCRIPTORS).to_le_bytes());
        put(20, &block_bytes.to_le_bytes());
        put(24, &[physical_blocks.trailing_zeros() as u8, 0]);
        put(26, &(physical_blocks as u16).to_le_bytes());
        put(32, &[u8::from(self.write_back.load(Ordering::Acquire))]);
        put(34, &self.shape.queues.to_le_bytes());
        put(36, &MAX_RANGE_SECTORS.to_le_bytes());
        put(40, &MAX_RANGES.to_le_bytes());
        put(44, &(physical_block_bytes / SECTOR_BYTES as u32).to_le_bytes());
        put(48, &MAX_RANGE_SECTORS.to_le_bytes());
        put(52, &MAX_RANGES.to_le_bytes());
        put(56, &[u8::from(self.geometry.unmap)]);
        config
    }

    /// Handles a driver's write to the configuration.
    ///
    /// After a driver has switched the cache off, it sends no more flushes. The switch therefore
    /// makes all earlier writes durable, and each write in progress flushes after its transfer
    /// ([`Job::next`](super::job::Job::next)).
    ///
    /// Virtio requires less: if a write was completed while the cache was on, the driver must flush
    /// it (virtio 1.3, 5.2.6.2). However, Linux sends no flush after this call (cache_type_store in
    /// drivers/block/virtio_blk.c: the block layer drops flushes for a disk without a cache). A
    /// later fsync in the guest may send no write either, because its data was already written
    /// back. Then no flush would ever cover the data.
    ///
    /// This call blocks the vCPU and all other accesses to the function's registers. Most guests
    /// never switch the cache off or do so only once.
    pub(super) fn write_config(&self, offset: u64, data: &[u8]) {
        let (WRITEBACK_AT, [mode @ (0 | 1)]) = (offset, data) else { return };
        let write_back = *mode == 1;
        if self.write_back.swap(write_back, Ordering::SeqCst) && !write_back {
            // The error needs no handling: a failed flush makes the disk read-only, so the next
            // write fails.
            let _ = self.flush();
        }
    }

    /// Sets the initial cache mode after feature negotiation. The cache is on if the driver can
    /// flush it (5.2.5.2). The driver may change the mode later.
    pub(super) fn agree(&self, features: u64) {
        self.write_back.store(features & (1 << VIRTIO_BLK_F_FLUSH) != 0, Ordering::Release);
    }

    /// Resets the state that the driver has changed.
    pub(super) fn forget_driver(&self) {
        self.write_back.store(true, Ordering::Release);
        *self.interrupt.lock() = None;
        self.waiting.lock().clear();
    }

    pub(super) fn set_on_full(&self, handler: FullHandler) {
        // A device has one handler, which is set before it is attached.
        let _ = self.on_full.set(handler);
    }

    /// Handles a write that found no space. Returns true if the write must wait until
    /// [`Self::retry_writes`] signals `retry`.
    pub(super) fn lacks_space(&self, retry: &Arc<EventFd>) -> bool {
        self.metrics.full_writes.fetch_add(1, Ordering::Relaxed);
        let Some(FullHandler { waits, notify }) = self.on_full.get() else { return false };
        let mut waiting = self.waiting.lock();
        let is_first = waiting.is_empty();
        if *waits && !waiting.iter().any(|other| Arc::ptr_eq(other, retry)) {
            waiting.push(Arc::clone(retry));
        }
        drop(waiting);
        if is_first {
            notify();
        }
        *waits
    }

    /// Returns true if writes wait for space.
    pub(super) fn has_waiting_writes(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// Retries the waiting writes.
    pub(super) fn retry_writes(&self) {
        for retry in self.waiting.lock().drain(..) {
            // The counter of the event cannot overflow, because the worker resets it.
            let _ = retry.write(1);
        }
    }

    /// Stores the interrupt of the active driver.
    pub(super) fn set_driver(&self, interrupt: Arc<dyn VirtioInterrupt>) {
        *self.interrupt.lock() = Some(interrupt);
    }

    /// Serial number, padded with zeros.
    pub(super) fn serial(&self) -> [u8; VIRTIO_BLK_ID_BYTES as usize] {
        let mut serial = [0; VIRTIO_BLK_ID_BYTES as usize];
        let text = serial_number(&self.shape.serial);
        serial[..text.len()].copy_from_slice(text.as_bytes());
        serial
    }

    /// Flushes in progress, from all queues.
    pub(super) fn flushes(&self) -> &Arc<Flushes> {
        &self.flushes
    }

    /// Makes all earlier writes durable. Waits until all overlapping flushes have ended.
    pub(super) fn flush(&self) -> std::io::Result<()> {
        let (begin, ticket) = (Instant::now(), self.flushes.begin());
        let result = self.device.flush();
        self.flushed(begin, &result);
        let answered = ticket.end();
        result?;
        self.flushes.wait(answered);
        self.flush_result()
    }

    /// Records the result of a flush that was sent to the media at `begin`.
    ///
    /// After a failed flush the content of the media is unknown, but the kernel may report success
    /// for the next flush. The disk therefore refuses writes until it is opened again.
    pub(super) fn flushed(&self, begin: Instant, result: &std::io::Result<()>) {
        self.metrics.flushes.observe(begin.elapsed());
        let Err(err) = result else { return };
        self.failure.record(err);
        if !self.metrics.read_only.swap(true, Ordering::AcqRel) {
            error!(disk = self.shape.id, %err, "Flush failed; the disk refuses all later writes");
        }
    }

    /// Result of a successful flush, after all flushes that overlapped with it have ended. The
    /// result is an error if one of them has failed.
    pub(super) fn flush_result(&self) -> std::io::Result<()> {
        match self.has_failed() {
            true => Err(std::io::Error::other("a concurrent flush failed")),
            false => Ok(()),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.metrics.read_only.load(Ordering::Acquire)
    }

    /// Resizes the disk and notifies the driver.
    pub(super) fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.device.resize(wanted_bytes)?;
        self.metrics.size_bytes.store(self.device.size_bytes(), Ordering::Relaxed);
        let interrupt = self.interrupt.lock().clone();
        if let Some(interrupt) = interrupt
            && let Err(err) = interrupt.signal_config()
        {
            rate_limited!(warn, disk = self.shape.id, %err, "Cannot notify the driver of the new disk size");
        }
        Ok(())
    }
}
