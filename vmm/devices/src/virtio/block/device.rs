//! The virtio-blk device. It handles the configuration and runs a worker thread for each queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foreshore_confinement::thread::ThreadKind;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::event::Worker;
use super::metrics::BlockMetrics;
use super::ring::IdleExecutor;
use super::state::{Disk, DiskShape, FullHandler};
use crate::device::{DeviceCounters, DeviceHandle};
use crate::disk::{BlockDevice, ResizeError};
use crate::event_loop::{EventLoop, EventLoopError, EventLoopHandle};
use crate::persist::FirstFailure;
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

pub struct Block {
    disk: Arc<Disk>,
    queue_sizes: Vec<u16>,
    /// Workers by queue. Dropped before `threads`, because each worker runs on one of these
    /// threads.
    workers: Vec<WorkerSlot>,
    /// True while a reset waits for the workers to end.
    pub(super) stop: Arc<AtomicBool>,
    threads: Vec<EventLoop>,
    /// Executors by queue.
    executors: Vec<IdleExecutor>,
}

/// Handle to a disk for the rest of the VMM. Cheap to clone.
#[derive(Clone)]
pub struct BlockHandle {
    disk: Arc<Disk>,
}

impl Block {
    /// Creates the device and its threads. `device` provides the content of the disk.
    pub fn new(shape: DiskShape, device: Arc<dyn BlockDevice>) -> Result<Self, EventLoopError> {
        let queue_sizes = vec![shape.queue_size; usize::from(shape.queues)];
        // Thread names match those of Cloud Hypervisor, because tools pin threads by name.
        let thread = |queue| EventLoop::spawn(ThreadKind::Queue, &format!("{}_q{queue}", shape.id));
        let threads: Vec<_> = (0..shape.queues).map(thread).collect::<Result<_, _>>()?;
        let workers = threads.iter().map(|thread| WorkerSlot::new(thread.handle())).collect();
        let executor = |depth: &u16| IdleExecutor::new(Arc::clone(&device).start(*depth));
        let executors = queue_sizes.iter().map(executor).collect();
        let disk = Arc::new(Disk::new(shape, device));
        Ok(Self { disk, queue_sizes, workers, stop: Arc::default(), threads, executors })
    }

    pub fn handle(&self) -> BlockHandle {
        BlockHandle { disk: Arc::clone(&self.disk) }
    }

    /// Sets the handling of writes that find no space. Call this before the device is attached.
    pub fn on_full(&self, handler: FullHandler) {
        self.disk.set_on_full(handler);
    }

    fn start(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { view, interrupt, queues, features } = activation;
        // A worker without an io_uring clears this.
        self.disk.metrics().io_uring.store(true, Ordering::Relaxed);
        let gates = self.threads.iter().map(|thread| thread.handle().gate());
        let parts = self.workers.iter_mut().zip(gates).zip(&self.executors);
        for ((index, queue), ((slot, gate), executor)) in (0..).zip(queues).zip(parts) {
            // A driver may enable fewer queues than the device offers (5.2.5).
            let Some(queue) = queue else { continue };
            let (disk, interrupt) = (Arc::clone(&self.disk), Arc::clone(&interrupt));
            let stop = Arc::clone(&self.stop);
            let shared = (stop, gate, executor.clone());
            let worker =
                Worker::new(disk, view.clone(), interrupt, (index, queue), features, shared)?;
            slot.start(Box::new(worker))?;
        }
        self.disk.set_driver(interrupt);
        Ok(())
    }
}

impl BlockHandle {
    /// Id in logs, metrics and the API.
    pub fn id(&self) -> &str {
        &self.disk.shape().id
    }

    pub fn size_bytes(&self) -> u64 {
        self.disk.device().size_bytes()
    }

    /// Resizes the disk and notifies the guest.
    pub fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.disk.resize(wanted_bytes)
    }

    /// Returns whether the waiting writes may find space now. `None` if no write waits.
    pub fn has_space_for_waiting(&self) -> Option<bool> {
        self.disk.has_waiting_writes().then(|| self.disk.device().has_space())
    }

    /// Retries the writes that wait for space.
    pub fn retry_writes(&self) {
        self.disk.retry_writes();
    }

    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(self.disk.metrics())
    }

    /// Error of the first failed flush.
    pub fn failure(&self) -> FirstFailure {
        self.disk.failure().clone()
    }
}

impl DeviceHandle for BlockHandle {
    fn counters(&self) -> Option<DeviceCounters> {
        Some(self.disk.metrics().counters())
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_BLOCK as u16
    }

    fn name(&self) -> &str {
        &self.disk.shape().id
    }

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn accepts_features(&self, features: u64) -> bool {
        self.disk.agree(features);
        features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.disk.config(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.disk.write_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if !matches!(activation.queues.first(), Some(Some(_))) {
            return Err(ActivateError::QueueMissing { index: 0 });
        }
        let result = self.start(activation);
        if result.is_err() {
            self.reset();
        }
        result
    }

    fn loops(&self) -> Vec<EventLoopHandle> {
        self.threads.iter().map(EventLoop::handle).collect()
    }

    /// Waits only for the steps in progress. The remaining steps of their requests are dropped:
    /// they may cover many gigabytes, no driver waits for the result, and this call blocks a vCPU.
    fn reset(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.workers.iter_mut().for_each(|worker| {
            worker.stop();
        });
        self.stop.store(false, Ordering::Release);
        self.disk.forget_driver();
    }
}
