//! The virtio-vsock device: its configuration, activation and reset.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use foreshore_confinement::thread::ThreadKind;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;

use super::event::Worker;
use super::host::{HostSide, VsockError, VsockPorts};
use super::metrics::VsockMetrics;
use super::muxer::{GREETING_TIMEOUT, Muxer, max_sockets};
use super::{EVENT_QUEUE, RX_QUEUE, TX_QUEUE};
use crate::event_loop::{EventLoop, EventLoopHandle};
use crate::open_files;
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

/// The device supports stream sockets (virtio 1.3, 5.10.3).
const VIRTIO_VSOCK_F_STREAM: u32 = 0;

/// Sizes of the receive, transmit and event queues. A Linux guest allocates a page for each receive
/// buffer, so 128 buffers take half a megabyte of its memory. It adds eight buffers to the event
/// queue.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];

/// A virtio socket device.
pub struct VsockDevice {
    cid: u32,
    host: Arc<HostSide>,
    metrics: Arc<VsockMetrics>,
    worker: WorkerSlot,
    /// Dropped after `worker`, which runs on this thread. No other device shares it, because its
    /// seccomp filter allows connections to sockets of the host.
    thread: EventLoop,
    greeting_timeout: Duration,
}

impl VsockDevice {
    /// Creates a device for the guest with context id `cid`. It listens on `socket` immediately.
    pub fn new(cid: u32, socket: &Path, ports: VsockPorts) -> Result<Self, VsockError> {
        // Ids 0 and 1 are reserved, 2 is the host, and the last id is a wildcard (virtio 1.3,
        // 5.10.4).
        if !(3..u32::MAX).contains(&cid) {
            return Err(VsockError::InvalidCid { cid });
        }
        let host = Arc::new(HostSide::bind(socket, ports)?);
        let thread = EventLoop::spawn(ThreadKind::Vsock, "_vsock")?;
        Ok(Self {
            cid,
            host,
            metrics: Arc::default(),
            worker: WorkerSlot::new(thread.handle()),
            thread,
            greeting_timeout: GREETING_TIMEOUT,
        })
    }

    pub fn metrics(&self) -> Arc<VsockMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl VirtioDevice for VsockDevice {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_VSOCK as u16
    }

    fn name(&self) -> &str {
        "vsock"
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_VSOCK_F_STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&u64::from(self.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let event_idx = activation.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let mut rx = activation.take_queue(RX_QUEUE)?;
        let mut tx = activation.take_queue(TX_QUEUE)?;
        rx.queue.set_event_idx(event_idx);
        tx.queue.set_event_idx(event_idx);
        let event = activation.take_queue(EVENT_QUEUE).ok();
        let metrics = Arc::clone(&self.metrics);
        let muxer = Muxer::new(
            self.cid.into(),
            Arc::clone(&self.host),
            Arc::clone(&metrics),
            self.greeting_timeout,
            max_sockets(open_files::limit()),
        );
        let Activation { view, interrupt, .. } = activation;
        let worker = Worker::new(view, interrupt, (rx, tx), event, muxer, metrics)?;
        self.worker.start(Box::new(worker))
    }

    fn loops(&self) -> Vec<EventLoopHandle> {
        vec![self.thread.handle()]
    }

    fn reset(&mut self) {
        // Dropping the worker closes its sockets. Clients on the host then read the end of their
        // streams.
        self.worker.stop();
        self.metrics.connections.set(0);
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
