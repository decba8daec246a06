//! The virtio-net device. It handles the configuration and runs a worker thread for each queue
//! pair. With vhost-net, one thread serves all pairs.

use std::sync::Arc;

use foreshore_confinement::thread::ThreadKind;
use thiserror::Error;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::control::{self, Control};
use super::event::Worker;
use super::header::Offloads;
use super::metrics::NetMetrics;
use super::state::{Interface, NetShape};
use super::tap::HostInterface;
use super::vhost::{self, VhostFiles};
use crate::event_loop::{EventLoop, EventLoopError, EventLoopHandle};
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

/// Error that occurred while creating a device.
#[derive(Debug, Error)]
pub enum NetError {
    /// The thread cannot be created.
    #[error(transparent)]
    Thread(#[from] EventLoopError),
    /// An event cannot be created.
    #[error("cannot set up the device's files")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Vhost(#[from] vhost::VhostError),
}

pub struct Net {
    net: Arc<Interface>,
    /// Function that passes queue pairs to the kernel. `None` if vhost-net is not used.
    kernel: Option<vhost::Connect>,
    queue_sizes: Vec<u16>,
    /// Workers of the queue pairs, followed by the worker of the control queue. Dropped before
    /// `threads`, because each worker runs on one of these threads.
    workers: Vec<WorkerSlot>,
    threads: Vec<EventLoop>,
}

impl Net {
    /// Creates a device and its threads. `host` is the host side of the interface.
    pub fn new(shape: NetShape, host: Arc<dyn HostInterface>) -> Result<Self, NetError> {
        Self::with(shape, host, None)
    }

    /// Creates a device that uses vhost-net: the host's kernel transfers its frames.
    /// [`vhost::probe`] must have succeeded.
    pub fn moved_by_kernel(
        shape: NetShape,
        host: Arc<dyn HostInterface>,
        files: &VhostFiles,
    ) -> Result<Self, NetError> {
        let connect = vhost::connect(shape.pairs, files)?;
        Self::with(shape, host, Some(connect))
    }

    pub(super) fn with(
        shape: NetShape,
        host: Arc<dyn HostInterface>,
        kernel: Option<vhost::Connect>,
    ) -> Result<Self, NetError> {
        let mut queue_sizes = vec![shape.queue_size; 2 * usize::from(shape.pairs)];
        queue_sizes.push(control::QUEUE_SIZE);
        // Thread names match those of Cloud Hypervisor, because tools pin threads by name.
        let thread = |pair| EventLoop::spawn(ThreadKind::Queue, &format!("{}_qp{pair}", shape.id));
        let busy = if kernel.is_some() { 1 } else { shape.pairs };
        let threads: Vec<_> = (0..busy).map(thread).collect::<Result<_, _>>()?;
        let of_pair = |pair: u16| &threads[usize::from(pair) % threads.len()];
        let handles = (0..shape.pairs).map(of_pair).chain(threads.first()).map(EventLoop::handle);
        let workers = handles.map(WorkerSlot::new).collect();
        let net = Arc::new(Interface::new(shape, Arc::clone(&host))?);
        if kernel.is_some() {
            net.metrics().leave_to(&host);
        }
        Ok(Self { net, kernel, queue_sizes, workers, threads })
    }

    pub fn metrics(&self) -> Arc<NetMetrics> {
        Arc::clone(self.net.metrics())
    }

    fn start(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { view, interrupt, mut queues, features } = activation;
        self.net.host().set_offloads(Offloads::of_device(features))?;
        // Only one pair is active until the driver activates more (5.1.6.5.5).
        self.net.set_pairs(1)?;
        self.net.set_driver(Arc::clone(&interrupt));
        let control = self.net.control_queue(features);
        let control =
            control.and_then(|index| Some((index, queues.get_mut(usize::from(index))?.take()?)));
        let mut queues = queues.into_iter();
        for (pair, slot) in (0..self.net.shape().pairs).zip(&mut self.workers) {
            // A driver may enable fewer queues than the device offers. A pair works only if both of
            // its queues are enabled.
            let (Some(Some(receive)), Some(Some(transmit))) = (queues.next(), queues.next()) else {
                continue;
            };
            let (net, guest) = (Arc::clone(&self.net), (view.clone(), Arc::clone(&interrupt)));
            let queues = [receive, transmit];
            slot.start(match self.kernel {
                None => Box::new(Worker::new(net, pair, guest, queues, features)?),
                Some(ref connect) => {
                    let how = (connect, &self.threads[0].handle());
                    Box::new(vhost::Worker::new(net, pair, guest, queues, features, how)?)
                }
            })?;
        }
        if let Some(queue) = control {
            let worker = Control::new(Arc::clone(&self.net), (view, interrupt), queue, features);
            self.workers
                .last_mut()
                .expect("the worker of the control queue")
                .start(Box::new(worker))?;
        }
        Ok(())
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_NET as u16
    }

    fn name(&self) -> &str {
        &self.net.shape().id
    }

    fn features(&self) -> u64 {
        self.net.features()
    }

    fn accepts_features(&self, features: u64) -> bool {
        Interface::accepts(features)
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.net.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        for index in 0..2u16 {
            if !matches!(activation.queues.get(usize::from(index)), Some(Some(_))) {
                return Err(ActivateError::QueueMissing { index });
            }
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

    fn reset(&mut self) {
        // The control queue is stopped first, because its worker wakes the other workers.
        self.workers.iter_mut().rev().for_each(|worker| {
            worker.stop();
        });
        self.net.forget_driver();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use proptest::prelude::*;
    use virtio_bindings::virtio_net::{VIRTIO_NET_F_CSUM, VIRTIO_NET_F_MRG_RXBUF};
    use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
    use vm_memory::GuestAddress;

    use super::super::frames::FRAMES_MAX;
    use super::super::metrics::{Direction, DropReason};
    use super::super::tap::fake::FakeTap;
    use super::*;
    use crate::memory::lost_memory::LossFlag;
    use crate::virtio::testing::{BUFFERS, Buffer, MEMORY_LEN, TestDriver};

    const RECEIVE: usize = 0;
    const TRANSMIT: usize = 1;

    struct Rig {
        net: Net,
        driver: TestDriver,
        tap: FakeTap,
        host: Vec<UnixDatagram>,
        loss: LossFlag,
    }

    fn shape(pairs: u16) -> NetShape {
        NetShape {
            id: "_net0".to_owned(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: None,
            pairs,
            queue_size: 32,
            csum: true,
            tso: true,
            ufo: true,
        }
    }

    impl Rig {
        fn new() -> Self {
            Self::with(1, |features| features)
        }

        /// Creates a device with `pairs` queue pairs. `agree` selects the negotiated features.
        fn with(pairs: u16, agree: impl FnOnce(u64) -> u64) -> Self {
            let (tap, host) = FakeTap::new(pairs);
            let mut net = Net::new(shape(pairs), Arc::new(tap.clone())).unwrap();
            let mut driver = TestDriver::new(2 * usize::from(pairs) + 1);
            let features = agree(net.features());
            let activation = driver.activation(features);
            let loss = activation.view.loss();
            for socket in &host {
                // If the device sends nothing, the timeout makes the test fail instead of block.
                socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            }
            net.activate(activation).unwrap();
            Self { net, driver, tap, host, loss }
        }

        fn send(&mut self, packet: &[u8]) -> (u16, u32) {
            self.driver.write(BUFFERS, packet);
            self.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, packet.len() as u32)]);
            self.driver.kick(TRANSMIT);
            self.driver.wait_used(TRANSMIT)
        }

        fn host_gets(&self) -> Vec<u8> {
            let mut packet = vec![0; 70_000];
            let len = self.host[0].recv(&mut packet).unwrap();
            packet.truncate(len);
            packet
        }

        fn offer(&mut self, at: u64, len: u32) -> u16 {
            self.driver.add(RECEIVE, &[Buffer::In(at, len)])
        }

        fn dropped(&self, direction: Direction, reason: DropReason) -> u64 {
            self.net.metrics().drops(direction, reason)
        }
    }

    /// Returns a frame of `len` bytes with a header that is all zeros.
    fn packet(fill: u8, len: usize) -> Vec<u8> {
        [vec![0; 12], vec![fill; len]].concat()
    }

    #[test]
    fn frames_are_transferred_in_both_directions() {
        let mut rig = Rig::new();
        assert_eq!(rig.send(&packet(1, 60)), (0, 0));
        assert_eq!(rig.host_gets(), packet(1, 60));
        rig.host[0].send(&packet(2, 100)).unwrap();
        rig.offer(BUFFERS, 1600);
        rig.driver.kick(RECEIVE);
        assert_eq!(rig.driver.wait_used(RECEIVE), (0, 112));
        let received = rig.driver.read(BUFFERS, 112);
        assert_eq!(
            (&received[..12], &received[12..]),
            (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0][..], &[2; 100][..])
        );
        let metrics = rig.net.metrics();
        for (direction, bytes) in [(Direction::FromGuest, 60), (Direction::ToGuest, 100)] {
            assert_eq!((metrics.frames(direction), metrics.bytes(direction)), (1, bytes));
        }
        assert_eq!(*rig.tap.offloads.lock(), Offloads::of_device(rig.net.features()));
    }

    #[test]
    fn frames_wait_for_buffers_and_buffers_for_frames() {
        let mut rig = Rig::new();
        for nth in 0..3 {
            rig.host[0].send(&packet(nth, 50)).unwrap();
        }
        for nth in 0..3 {
            rig.offer(BUFFERS + 100 * nth, 62);
            rig.driver.kick(RECEIVE);
            assert_eq!(rig.driver.wait_used(RECEIVE).1, 62);
            assert_eq!(rig.driver.read(BUFFERS + 100 * nth + 12, 50), vec![nth as u8; 50]);
        }
        for nth in 0..3 {
            rig.offer(BUFFERS + 100 * nth, 62);
        }
        rig.driver.kick(RECEIVE);
        for nth in 0..3 {
            rig.host[0].send(&packet(10 + nth, 50)).unwrap();
            rig.driver.wait_used(RECEIVE);
            assert_eq!(
                rig.driver.read(BUFFERS + 100 * u64::from(nth) + 12, 50),
                vec![10 + nth; 50]
            );
        }
    }

    #[test]
    fn buffers_of_a_long_frame_are_published_at_once() {
        let mut rig = Rig::new();
        for nth in 0..4 {
            rig.offer(BUFFERS + 1000 * nth, 1000);
        }
        rig.driver.kick(RECEIVE);
        rig.host[0].send(&packet(7, 3500)).unwrap();
        let lens: Vec<_> = (0..4).map(|_| rig.driver.wait_used(RECEIVE)).collect();
        assert_eq!(lens, [(0, 1000), (1, 1000), (2, 1000), (3, 512)]);
        assert_eq!(rig.driver.read(BUFFERS + 10, 2), [4, 0]);
        assert_eq!(rig.driver.read(BUFFERS + 12, 3500), vec![7; 3500]);
    }

    #[test]
    fn frame_without_merging_uses_one_buffer_or_is_dropped() {
        let mut rig = Rig::with(1, |features| features & !(1 << VIRTIO_NET_F_MRG_RXBUF));
        rig.offer(BUFFERS, 100);
        rig.offer(BUFFERS + 100, 100);
        rig.driver.kick(RECEIVE);
        rig.host[0].send(&packet(1, 150)).unwrap();
        rig.host[0].send(&packet(2, 80)).unwrap();
        assert_eq!(rig.driver.wait_used(RECEIVE), (0, 92));
        assert_eq!(rig.driver.read(BUFFERS + 10, 3), [1, 0, 2]);
        assert_eq!(rig.dropped(Direction::ToGuest, DropReason::Buffers), 1);
    }

    #[test]
    fn frame_with_an_offload_that_was_not_negotiated_is_dropped() {
        let mut rig = Rig::with(1, |features| 1 << 32 | features & 1 << VIRTIO_NET_F_MRG_RXBUF);
        let csum = [vec![1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], vec![5; 60]].concat();
        // 1. The guest sends such a frame.
        rig.send(&csum);
        rig.send(&packet(1, 60));
        assert_eq!(rig.host_gets(), packet(1, 60));
        assert_eq!(rig.net.metrics().bad_requests.load(Ordering::Relaxed), 1);
        // 2. The host sends such a frame before it has applied the negotiated offloads.
        rig.offer(BUFFERS, 100);
        rig.driver.kick(RECEIVE);
        rig.host[0].send(&csum).unwrap();
        rig.host[0].send(&packet(2, 60)).unwrap();
        rig.driver.wait_used(RECEIVE);
        assert_eq!(rig.driver.read(BUFFERS + 12, 60), vec![2; 60]);
        assert_eq!(rig.dropped(Direction::ToGuest, DropReason::Offload), 1);
        assert_eq!(*rig.tap.offloads.lock(), Offloads::default());
    }

    #[test]
    fn frame_copied_from_lost_memory_is_dropped() {
        let mut rig = Rig::new();
        rig.send(&packet(1, 60));
        // A page of guest memory is lost, so the copy may contain zeros.
        rig.loss.raise();
        rig.send(&packet(2, 60));
        assert_eq!(rig.host_gets(), packet(1, 60));
        assert_eq!(rig.dropped(Direction::FromGuest, DropReason::Memory), 1);
    }

    #[test]
    fn invalid_chains_are_returned() {
        let mut rig = Rig::new();
        for buffers in [
            &[Buffer::Out(BUFFERS, 25)][..],
            &[Buffer::In(BUFFERS, 100)],
            &[Buffer::Out(BUFFERS, 60), Buffer::In(BUFFERS, 1)],
            &[Buffer::Out(BUFFERS, 70_000)],
            &[Buffer::Out(MEMORY_LEN, 60)],
            &[Buffer::Out(u64::MAX - 1, 60)],
        ] {
            let head = rig.driver.add(TRANSMIT, buffers);
            rig.driver.kick(TRANSMIT);
            assert_eq!(rig.driver.wait_used(TRANSMIT), (head, 0));
        }
        for buffers in [
            &[Buffer::In(BUFFERS, 11)][..],
            &[Buffer::Out(BUFFERS, 100)],
            &[Buffer::In(MEMORY_LEN, 100)],
        ] {
            let head = rig.driver.add(RECEIVE, buffers);
            rig.driver.kick(RECEIVE);
            rig.host[0].send(&packet(1, 60)).unwrap();
            assert_eq!(rig.driver.wait_used(RECEIVE), (head, 0));
        }
        // Adds a descriptor loop and then a valid chain.
        rig.driver.set_descriptor(TRANSMIT, 8, (BUFFERS, 10, VRING_DESC_F_NEXT, 8));
        rig.driver.add_again(TRANSMIT, 8);
        rig.driver.set_descriptor(
            RECEIVE,
            8,
            (BUFFERS, 10, VRING_DESC_F_NEXT | VRING_DESC_F_WRITE, 8),
        );
        rig.driver.add_again(RECEIVE, 8);
        rig.offer(BUFFERS, 100);
        rig.driver.kick(RECEIVE);
        assert_eq!(rig.driver.wait_used(RECEIVE), (8, 0));
        assert_eq!(rig.driver.wait_used(RECEIVE).1, 72);
        rig.send(&packet(3, 60));
        assert_eq!(rig.driver.wait_used(TRANSMIT).1, 0);
        assert_eq!(rig.host_gets(), packet(3, 60));
        assert_eq!(rig.net.metrics().bad_requests.load(Ordering::Relaxed), 6 + 3 + 2);
    }

    #[test]
    fn invalid_rings_are_ignored_until_a_reset() {
        let mut rig = Rig::new();
        for queue in [RECEIVE, TRANSMIT] {
            rig.driver.jump(queue, 1000);
            rig.driver.kick(queue);
        }
        rig.host[0].send(&packet(1, 60)).unwrap();
        // After the second request for a reset, the device has processed both queues.
        while rig.driver.resets_needed() < 2 {
            std::thread::yield_now();
        }
        rig.net.reset();
        assert_eq!(rig.net.metrics().broken_queues.load(Ordering::Relaxed), 2);
        let activation = rig.driver.activation(rig.net.features());
        rig.net.activate(activation).unwrap();
        rig.send(&packet(2, 60));
        assert_eq!(rig.host_gets(), packet(2, 60));
    }

    #[test]
    fn unwritable_used_rings_do_not_block_the_thread() {
        let mut rig = Rig::new();
        rig.net.reset();
        let mut activation = rig.driver.activation(rig.net.features());
        for queue in activation.queues.iter_mut().flatten() {
            queue.queue.try_set_used_ring_address(GuestAddress(MEMORY_LEN)).unwrap();
        }
        rig.offer(BUFFERS, 1000);
        rig.driver.write(BUFFERS, &packet(1, 60));
        rig.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, 72)]);
        rig.host[0].send(&packet(1, 60)).unwrap();
        rig.host[0].send(&packet(1, 60)).unwrap();
        let before = rig.net.metrics().passes.load(Ordering::Relaxed);
        rig.net.activate(activation).unwrap();
        rig.net.reset();
        let passes = rig.net.metrics().passes.load(Ordering::Relaxed) - before;
        assert!(passes <= 6, "{passes} passes");
        assert!(!rig.driver.interrupted(RECEIVE) && !rig.driver.interrupted(TRANSMIT));
    }

    #[test]
    fn idle_device_makes_no_passes() {
        let mut rig = Rig::new();
        // First provides buffers without frames, and then frames without buffers.
        rig.offer(BUFFERS, 1000);
        rig.driver.kick(RECEIVE);
        for _ in 0..FRAMES_MAX + 10 {
            rig.host[0].send(&packet(1, 60)).ok();
            if rig.driver.used(RECEIVE).is_some() {
                break;
            }
        }
        rig.send(&packet(1, 60));
        let passes = || rig.net.metrics().passes.load(Ordering::Relaxed);
        let mut last = passes();
        // The device is idle once no worker makes a pass over its queue in an interval.
        for _ in 0..1000 {
            std::thread::sleep(Duration::from_millis(5));
            if passes() == last {
                return;
            }
            last = passes();
        }
        panic!("{last} passes without an end");
    }

    #[test]
    fn frames_stay_in_the_ring_if_the_host_has_no_room() {
        let mut rig = Rig::new();
        let mut sent = 0u32;
        // The socket and the device buffer a limited number of frames. The rest remains in the
        // ring.
        let full = packet(9, 4000);
        rig.driver.write(BUFFERS, &full);
        while rig.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, full.len() as u32)]) < 31 {
            sent += 1;
        }
        sent += 1;
        let mut used = 0;
        rig.driver.kick(TRANSMIT);
        for _ in 0..100 {
            while rig.driver.used(TRANSMIT).is_some() {
                used += 1;
            }
            if used < sent {
                break;
            }
            for head in 0..32 {
                rig.driver.add_again(TRANSMIT, head);
            }
            sent += 32;
            rig.driver.kick(TRANSMIT);
            while rig.driver.interrupted(TRANSMIT) {}
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut received = 0;
        while received < sent {
            assert_eq!(rig.host_gets().len(), full.len());
            received += 1;
            while rig.driver.used(TRANSMIT).is_some() {
                used += 1;
            }
        }
        while used < sent {
            rig.driver.wait_used(TRANSMIT);
            used += 1;
        }
        assert_eq!(rig.dropped(Direction::FromGuest, DropReason::Host), 0);
    }

    fn command(rig: &mut Rig, queue: usize, bytes: &[u8]) -> u8 {
        let at = BUFFERS + 0x1000;
        rig.driver.write(at, bytes);
        rig.driver.write(at + 0x100, &[0xee]);
        rig.driver.add(
            queue,
            &[
                Buffer::Out(at, 2),
                Buffer::Out(at + 2, bytes.len() as u32 - 2),
                Buffer::In(at + 0x100, 1),
            ],
        );
        rig.driver.kick(queue);
        assert_eq!(rig.driver.wait_used(queue).1, 1);
        rig.driver.read(at + 0x100, 1)[0]
    }

    #[test]
    fn driver_sets_the_number_of_pairs() {
        let mut rig = Rig::with(3, |features| features);
        assert_eq!(*rig.tap.pairs.lock(), 1);
        // The device does not read a queue that is not attached.
        rig.host[2].send(&packet(3, 60)).unwrap();
        rig.driver.add(4, &[Buffer::In(BUFFERS, 100)]);
        rig.driver.kick(4);
        assert_eq!(command(&mut rig, 6, &[4, 0, 3, 0]), 0);
        assert_eq!(*rig.tap.pairs.lock(), 3);
        assert_eq!(rig.driver.wait_used(4).1, 72);
        assert_eq!(command(&mut rig, 6, &[4, 0, 4, 0]), 1);
        assert_eq!(command(&mut rig, 6, &[4, 0, 0, 0]), 1);
        assert_eq!(command(&mut rig, 6, &[9, 9, 0, 0]), 1);
        assert_eq!(command(&mut rig, 6, &[4, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0]), 1);
        assert_eq!(*rig.tap.pairs.lock(), 3);
        assert_eq!(command(&mut rig, 6, &[4, 0, 2, 0]), 0);
        assert_eq!(*rig.tap.pairs.lock(), 2);
        rig.net.reset();
        let activation = rig.driver.activation(rig.net.features());
        rig.net.activate(activation).unwrap();
        assert_eq!(*rig.tap.pairs.lock(), 1);
    }

    #[test]
    fn driver_sets_its_offloads() {
        let mut rig = Rig::new();
        assert!(rig.tap.offloads.lock().csum);
        assert_eq!(command(&mut rig, 2, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0);
        assert_eq!(*rig.tap.offloads.lock(), Offloads::default());
        assert_eq!(command(&mut rig, 2, &[5, 0, 0x82, 1, 0, 0, 0, 0, 0, 0]), 0);
        let expected = Offloads { csum: true, tso4: true, tso6: true, ecn: false, ufo: false };
        assert_eq!(*rig.tap.offloads.lock(), expected);
        assert_eq!(command(&mut rig, 2, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 1]), 1);
    }

    #[test]
    fn activation_without_its_first_pair_fails() {
        for missing in [0, 1] {
            let mut net = Net::new(shape(1), Arc::new(FakeTap::new(1).0)).unwrap();
            let mut activation = TestDriver::new(3).activation(1 << VIRTIO_NET_F_CSUM);
            activation.queues[usize::from(missing)] = None;
            let error = net.activate(activation).unwrap_err();
            assert!(matches!(error, ActivateError::QueueMissing { index } if index == missing));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// For any sizes of frames and buffers, the guest receives the host's frames unchanged and
        /// in order.
        #[test]
        fn frames_arrive_in_order_in_any_buffers(
            steps in prop::collection::vec((14usize..3000, 200u32..2000), 1..20),
        ) {
            let mut rig = Rig::new();
            let mut buffers = std::collections::HashMap::new();
            for (nth, (len, room)) in steps.iter().enumerate() {
                rig.host[0].send(&packet(nth as u8, *len)).unwrap();
                // Offers exactly as many buffers as the frame needs.
                for part in 0..(len + 12).div_ceil(*room as usize) {
                    let at = BUFFERS + 2048 * part as u64;
                    let head = rig.offer(at, *room);
                    buffers.insert(head, at);
                }
                rig.driver.kick(RECEIVE);
                let (head, first) = rig.driver.wait_used(RECEIVE);
                let mut found = rig.driver.read(buffers[&head], first);
                let count = u16::from_le_bytes([found[10], found[11]]);
                for _ in 1..count {
                    // When the device returns the first buffer of a frame, it has returned all of
                    // them.
                    let (head, len) = rig.driver.used(RECEIVE).unwrap();
                    found.extend(rig.driver.read(buffers[&head], len));
                }
                prop_assert_eq!(&found[12..], &vec![nth as u8; *len][..]);
            }
        }
    }
}
