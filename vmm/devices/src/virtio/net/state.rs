//! State shared by a network device and its workers.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::header::Offloads;
use super::metrics::NetMetrics;
use super::tap::HostInterface;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;

/// Length of `struct virtio_net_config` up to the last supported field (virtio 1.3, 5.1.4).
const CONFIG_LEN: usize = 12;

/// Properties of a network device that do not depend on its tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetShape {
    /// Id in logs, metrics, thread names and the API.
    pub id: String,
    pub mac: [u8; 6],
    /// Maximum payload of a frame that is offered to the driver. `None` to offer no MTU.
    pub mtu: Option<u16>,
    pub pairs: u16,
    pub queue_size: u16,
    /// Offer checksum offloads.
    pub csum: bool,
    /// Offer TCP segmentation offload. Requires `csum`.
    pub tso: bool,
    pub ufo: bool,
}

/// Queue pair served by vhost-net in the kernel instead of a worker thread.
pub(super) trait PairBackend: Send + Sync {
    /// Activates or deactivates the pair. When this returns, the kernel has started or stopped
    /// using the pair's queue of the interface.
    fn use_pair(&self, is_active: bool);
}

pub(super) struct Interface {
    shape: NetShape,
    host: Arc<dyn HostInterface>,
    metrics: Arc<NetMetrics>,
    /// Number of active pairs, which receive frames. The driver sets it (5.1.6.5.5).
    active_pairs: AtomicU16,
    /// Events by pair. Signaled after `active_pairs` has changed.
    wakes: Vec<EventFd>,
    backends: Mutex<Vec<(u16, Weak<dyn PairBackend>)>>,
    is_up: AtomicBool,
    /// Interrupt of the active driver. `None` if no driver is active.
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

impl Interface {
    /// Creates the state. `host` is the host side of the interface.
    pub(super) fn new(shape: NetShape, host: Arc<dyn HostInterface>) -> io::Result<Self> {
        let wake = |_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let wakes = (0..shape.pairs).map(wake).collect::<Result<_, _>>()?;
        let (metrics, backends, interrupt) = (Arc::default(), Mutex::default(), Mutex::default());
        let (active_pairs, is_up) = (AtomicU16::new(0), AtomicBool::new(true));
        Ok(Self { shape, host, metrics, active_pairs, wakes, backends, is_up, interrupt })
    }

    pub(super) fn shape(&self) -> &NetShape {
        &self.shape
    }

    pub(super) fn host(&self) -> &dyn HostInterface {
        &*self.host
    }

    pub(super) fn metrics(&self) -> &Arc<NetMetrics> {
        &self.metrics
    }

    /// Offered features (5.1.3).
    pub(super) fn features(&self) -> u64 {
        let NetShape { csum, tso, ufo, mtu, pairs, .. } = self.shape;
        let bits = |on: bool, bits: &[u32]| {
            bits.iter().filter(|_| on).fold(0, |all, bit| all | 1u64 << bit)
        };
        bits(
            true,
            &[
                VIRTIO_F_VERSION_1,
                VIRTIO_RING_F_INDIRECT_DESC,
                VIRTIO_RING_F_EVENT_IDX,
                VIRTIO_NET_F_MAC,
                VIRTIO_NET_F_STATUS,
                VIRTIO_NET_F_MRG_RXBUF,
                VIRTIO_NET_F_CTRL_VQ,
            ],
        ) | bits(
            csum,
            &[VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS],
        ) | bits(
            csum && tso,
            &[
                VIRTIO_NET_F_HOST_TSO4,
                VIRTIO_NET_F_HOST_TSO6,
                VIRTIO_NET_F_HOST_ECN,
                VIRTIO_NET_F_GUEST_TSO4,
                VIRTIO_NET_F_GUEST_TSO6,
                VIRTIO_NET_F_GUEST_ECN,
            ],
        ) | bits(csum && ufo, &[VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_GUEST_UFO])
            | bits(mtu.is_some(), &[VIRTIO_NET_F_MTU])
            | bits(pairs > 1, &[VIRTIO_NET_F_MQ])
    }

    /// Checks that all prerequisites of each negotiated feature are negotiated as well (5.1.3.1).
    pub(super) fn accepts(features: u64) -> bool {
        let has = |bit: u32| features & 1 << bit != 0;
        let control = [VIRTIO_NET_F_MQ, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS];
        has(VIRTIO_F_VERSION_1)
            && Offloads::of_driver(features).is_consistent()
            && Offloads::of_device(features).is_consistent()
            && (has(VIRTIO_NET_F_CTRL_VQ) || !control.into_iter().any(has))
    }

    /// Returns the index of the control queue, which depends on the negotiated `features` (5.1.2).
    pub(super) fn control_queue(&self, features: u64) -> Option<u16> {
        let has = |bit: u32| features & 1 << bit != 0;
        let pairs = if has(VIRTIO_NET_F_MQ) { self.shape.pairs } else { 1 };
        has(VIRTIO_NET_F_CTRL_VQ).then_some(2 * pairs)
    }

    pub(super) fn config(&self) -> [u8; CONFIG_LEN] {
        let mut config = [0; CONFIG_LEN];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        let status =
            if self.is_up.load(Ordering::Acquire) { VIRTIO_NET_S_LINK_UP as u16 } else { 0 };
        put(0, &self.shape.mac);
        put(6, &status.to_le_bytes());
        put(8, &self.shape.pairs.to_le_bytes());
        put(10, &self.shape.mtu.unwrap_or(0).to_le_bytes());
        config
    }

    /// Returns true if the pair is active and receives frames.
    pub(super) fn is_active(&self, pair: u16) -> bool {
        pair < self.active_pairs.load(Ordering::Acquire)
    }

    /// Activates the first `pairs` pairs and deactivates the others. Each queue is attached before
    /// its worker reads it, and is detached only after the worker has stopped reading it. Otherwise
    /// a read would fail as if the interface had been removed.
    pub(super) fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        let before = self.active_pairs.fetch_min(pairs, Ordering::AcqRel);
        // Pairs are deactivated before the queues are detached. If vhost-net sent on a detached
        // queue, buffers of the driver would be lost.
        self.notify_backends();
        let result = self.host.set_pairs(pairs);
        let now = if result.is_ok() { pairs } else { before.min(pairs) };
        self.active_pairs.store(now, Ordering::Release);
        self.notify_backends();
        for wake in &self.wakes {
            // The write fails only if the event's counter is full. In that case the worker is
            // already awake.
            let _ = wake.write(1);
        }
        result
    }

    /// Registers `backend` and immediately calls it with the state of `pair`. It is called again
    /// after each change, until it is dropped.
    pub(super) fn add_backend(&self, pair: u16, backend: &Arc<dyn PairBackend>) {
        let mut backends = self.backends.lock();
        backends.retain(|(_, known)| known.strong_count() > 0);
        backends.push((pair, Arc::downgrade(backend)));
        backend.use_pair(self.is_active(pair));
    }

    fn notify_backends(&self) {
        for (pair, backend) in &*self.backends.lock() {
            if let Some(backend) = backend.upgrade() {
                backend.use_pair(self.is_active(*pair));
            }
        }
    }

    /// Returns the event that is signaled when [`Interface::is_active`] may have changed.
    pub(super) fn wake(&self, pair: u16) -> &EventFd {
        &self.wakes[usize::from(pair)]
    }

    /// Reports to the driver that the link is down, because the host's interface was removed.
    pub(super) fn set_link_down(&self) {
        if self.is_up.swap(false, Ordering::AcqRel) {
            let id = &self.shape.id;
            rate_limited!(warn, net = id, "Host interface was removed; the link is down");
            let interrupt = self.interrupt.lock().clone();
            if let Some(interrupt) = interrupt
                && let Err(err) = interrupt.signal_config()
            {
                rate_limited!(warn, net = id, %err, "Cannot notify the driver that the link is down");
            }
        }
    }

    /// Stores the interrupt of the active driver.
    pub(super) fn set_driver(&self, interrupt: Arc<dyn VirtioInterrupt>) {
        *self.interrupt.lock() = Some(interrupt);
    }

    /// Removes the interrupt after a reset.
    pub(super) fn forget_driver(&self) {
        *self.interrupt.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tap::fake::FakeTap;
    use super::*;

    fn shape() -> NetShape {
        NetShape {
            id: "_net0".to_owned(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: Some(1500),
            pairs: 4,
            queue_size: 256,
            csum: true,
            tso: true,
            ufo: true,
        }
    }

    fn interface(shape: NetShape) -> Interface {
        Interface::new(shape, Arc::new(FakeTap::new(4).0)).unwrap()
    }

    #[test]
    fn configuration_has_the_layout_of_the_specification() {
        let net = interface(shape());
        assert_eq!(net.config(), [2, 0, 0, 0, 0, 1, 1, 0, 4, 0, 0xdc, 5]);
        net.set_link_down();
        assert_eq!(net.config()[6], 0);
    }

    #[test]
    fn queue_is_attached_before_and_detached_after_its_use() {
        struct FakeBackend(FakeTap, Mutex<Vec<(bool, u16)>>);
        impl PairBackend for FakeBackend {
            fn use_pair(&self, is_active: bool) {
                self.1.lock().push((is_active, *self.0.pairs.lock()));
            }
        }
        let tap = FakeTap::new(4).0;
        let net = Interface::new(shape(), Arc::new(tap.clone())).unwrap();
        net.set_pairs(4).unwrap();
        let backend = Arc::new(FakeBackend(tap, Mutex::default()));
        net.add_backend(3, &(Arc::clone(&backend) as _));
        let notified = || std::mem::take(&mut *backend.1.lock());
        assert_eq!(notified(), [(true, 4)]);
        net.set_pairs(2).unwrap();
        assert_eq!(notified(), [(false, 4), (false, 2)]);
        net.set_pairs(4).unwrap();
        assert_eq!(notified(), [(false, 2), (true, 4)]);
    }

    #[test]
    fn features_are_offered_only_with_those_that_they_require() {
        let all = interface(shape()).features();
        for shape in [
            shape(),
            NetShape { csum: false, ..shape() },
            NetShape { tso: false, ufo: false, ..shape() },
            NetShape { mtu: None, pairs: 1, ..shape() },
        ] {
            let features = interface(shape.clone()).features();
            assert!(Interface::accepts(features), "{shape:?}");
            assert_eq!(features & 1 << VIRTIO_NET_F_MQ != 0, shape.pairs > 1);
            assert_eq!(features & 1 << VIRTIO_NET_F_MTU != 0, shape.mtu.is_some());
            assert_eq!(features & 1 << VIRTIO_NET_F_HOST_TSO4 != 0, shape.csum && shape.tso);
        }
        for without in
            [VIRTIO_F_VERSION_1, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_CTRL_VQ]
        {
            assert!(!Interface::accepts(all & !(1 << without)), "without {without}");
        }
        assert!(Interface::accepts(all & !(1 << VIRTIO_NET_F_MQ)));
    }

    #[test]
    fn control_queue_follows_the_negotiated_pairs() {
        let net = interface(shape());
        let all = net.features();
        assert_eq!(net.control_queue(all), Some(8));
        assert_eq!(net.control_queue(all & !(1 << VIRTIO_NET_F_MQ)), Some(2));
        assert_eq!(net.control_queue(all & !(1 << VIRTIO_NET_F_CTRL_VQ)), None);
    }
}
