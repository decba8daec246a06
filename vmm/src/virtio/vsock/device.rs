//! The front of the device: configuration, activation, reset.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use event_manager::SubscriberId;
use tracing::warn;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;

use super::event::Worker;
use super::host::{HostSide, VsockError, VsockPorts};
use super::metrics::VsockMetrics;
use super::muxer::{GREETING_TIMEOUT, Muxer, max_sockets};
use super::{EVENT_QUEUE, RX_QUEUE, TX_QUEUE};
use crate::event_loop::EventLoopHandle;
use crate::open_files;
use crate::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, read_config_bytes};

/// Stream sockets (virtio 1.3, 5.10.3).
const VIRTIO_VSOCK_F_STREAM: u32 = 0;

/// Receive, transmit, event. A Linux guest keeps a page in each receive buffer: 128 are half a megabyte of its
/// memory. It posts eight buffers for events.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];

/// A virtio socket device.
pub struct VsockDevice {
    cid: u32,
    host: Arc<HostSide>,
    event_loop: EventLoopHandle,
    metrics: Arc<VsockMetrics>,
    worker: Option<SubscriberId>,
    greeting_timeout: Duration,
}

impl VsockDevice {
    /// A device for the guest `cid` that listens on `socket` from now on. Its worker runs on `event_loop`; the
    /// device must not be dropped, activated or reset on that loop's thread.
    pub fn new(
        cid: u32,
        socket: &Path,
        ports: VsockPorts,
        event_loop: EventLoopHandle,
    ) -> Result<Self, VsockError> {
        // 0 and 1 are reserved, 2 is the host, the last one means any (virtio 1.3, 5.10.4).
        if !(3..u32::MAX).contains(&cid) {
            return Err(VsockError::InvalidCid { cid });
        }
        let host = Arc::new(HostSide::bind(socket, ports)?);
        Ok(Self {
            cid,
            host,
            event_loop,
            metrics: Arc::default(),
            worker: None,
            greeting_timeout: GREETING_TIMEOUT,
        })
    }

    /// What the device counts.
    pub fn metrics(&self) -> Arc<VsockMetrics> {
        Arc::clone(&self.metrics)
    }
}

fn take(queues: &mut [Option<ActiveQueue>], index: u16) -> Result<ActiveQueue, ActivateError> {
    queues.get_mut(usize::from(index)).and_then(Option::take).ok_or(ActivateError::QueueMissing { index })
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

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        assert!(self.worker.is_none(), "activated twice without a reset");
        let Activation { view, interrupt, mut queues, features } = activation;
        let event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let mut rx = take(&mut queues, RX_QUEUE)?;
        let mut tx = take(&mut queues, TX_QUEUE)?;
        rx.queue.set_event_idx(event_idx);
        tx.queue.set_event_idx(event_idx);
        let event_kick = take(&mut queues, EVENT_QUEUE).ok().map(|queue| queue.kick);
        let metrics = Arc::clone(&self.metrics);
        let muxer = Muxer::new(
            self.cid.into(),
            Arc::clone(&self.host),
            Arc::clone(&metrics),
            self.greeting_timeout,
            max_sockets(open_files::limit()),
        );
        let worker = Worker::new(view, interrupt, (rx, tx), event_kick, muxer, metrics)?;
        self.worker = Some(self.event_loop.add(Box::new(worker))?);
        Ok(())
    }

    fn reset(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        // Dropping the worker closes its sockets; the clients of the host see the end.
        if let Err(err) = self.event_loop.remove(worker) {
            warn!(%err, "The event loop of vsock has ended before the device");
        }
        self.metrics.connections.set(0);
    }
}

impl Drop for VsockDevice {
    fn drop(&mut self) {
        self.reset();
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
