//! Tests of the device with a simulated kernel that records calls.

use std::os::unix::net::UnixDatagram;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::engine::Setup;
use super::engine::fake::{FakeRings, Record};
use super::*;
use crate::virtio::VirtioDevice;
use crate::virtio::net::tap::fake::FakeTap;
use crate::virtio::net::{Net, NetShape};
use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

/// A queue pair that was passed to the simulated kernel.
struct Pair {
    record: Arc<Mutex<Record>>,
    features: u64,
    calls: [EventFd; 2],
    errors: [EventFd; 2],
}

impl Pair {
    fn of(setup: &Setup<'_>) -> Self {
        let copies = |events: [&EventFd; 2]| events.map(|event| event.try_clone().unwrap());
        Self {
            record: Arc::default(),
            features: setup.features,
            calls: copies(setup.calls),
            errors: copies(setup.errors),
        }
    }

    fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.record.lock().calls)
    }
}

struct Rig {
    net: Net,
    driver: TestDriver,
    tap: FakeTap,
    _host: Vec<UnixDatagram>,
    pairs: Arc<Mutex<Vec<Pair>>>,
}

impl Rig {
    fn new() -> Self {
        let (tap, host) = FakeTap::new(2);
        let pairs = Arc::<Mutex<Vec<Pair>>>::default();
        let recorded = Arc::clone(&pairs);
        let connect: Connect = Arc::new(move |setup: Setup<'_>| {
            let pair = Pair::of(&setup);
            let rings = Box::new(FakeRings(Arc::clone(&pair.record)));
            recorded.lock().push(pair);
            Ok(rings as _)
        });
        let net = Net::with(shape(), Arc::new(tap.clone()), Some(connect)).unwrap();
        let mut rig = Self { net, driver: TestDriver::new(5), tap, _host: host, pairs };
        rig.activate();
        rig
    }

    fn activate(&mut self) {
        let activation = self.driver.activation(self.net.features());
        self.net.activate(activation).unwrap();
    }

    fn take_calls(&self, pair: usize) -> Vec<String> {
        self.pairs.lock()[pair].take_calls()
    }

    /// Sets the number of active pairs through the control queue.
    fn use_pairs(&mut self, pairs: u8) {
        self.driver.write(BUFFERS, &[4, 0, pairs, 0]);
        self.driver.add(4, &[Buffer::Out(BUFFERS, 4), Buffer::In(BUFFERS + 64, 1)]);
        self.driver.kick(4);
        self.driver.wait_used(4);
        assert_eq!(self.driver.read(BUFFERS + 64, 1), [0]);
    }

    fn is_up(&self) -> bool {
        let mut status = [0; 2];
        self.net.read_config(6, &mut status);
        status[0] == 1
    }

    /// Waits for the next calls that concern a pair.
    fn wait_calls(&self, pair: usize) -> Vec<String> {
        wait(|| {
            let calls = self.take_calls(pair);
            (!calls.is_empty()).then_some(calls)
        })
    }
}

fn shape() -> NetShape {
    NetShape {
        id: "_net0".to_owned(),
        mac: [2, 0, 0, 0, 0, 1],
        mtu: None,
        pairs: 2,
        queue_size: 32,
        csum: true,
        tso: true,
        ufo: true,
    }
}

fn wait<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    loop {
        match poll() {
            Some(found) => return found,
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn pairs_are_attached_while_the_driver_uses_them() {
    let mut rig = Rig::new();
    assert_eq!((rig.take_calls(0), rig.take_calls(1)), (vec!["attach".to_owned()], Vec::new()));
    assert_eq!(rig.pairs.lock()[0].features, rig.net.features());
    // The device answers a command only after it has taken effect.
    rig.use_pairs(2);
    assert_eq!(rig.take_calls(1), ["attach"]);
    rig.use_pairs(1);
    assert_eq!(rig.take_calls(1), ["detach"]);
    assert_eq!(rig.take_calls(0), Vec::<String>::new());
    rig.net.reset();
    assert_eq!(rig.take_calls(0), ["detach", "closed"]);
    assert_eq!(rig.take_calls(1), ["detach", "closed"]);
    rig.activate();
    assert_eq!(rig.pairs.lock().len(), 4);
    assert_eq!((rig.take_calls(2), rig.take_calls(3)), (vec!["attach".to_owned()], Vec::new()));
}

#[test]
fn pairs_are_detached_while_their_thread_is_held() {
    let rig = Rig::new();
    rig.take_calls(0);
    let loops = rig.net.loops();
    assert_eq!(loops.len(), 1);
    loops[0].hold();
    loops[0].wait_until_held();
    assert_eq!(rig.take_calls(0), ["detach"]);
    loops[0].release();
    assert_eq!(rig.wait_calls(0), ["attach"]);
}

#[test]
fn interrupts_without_an_irqfd_are_delivered_by_the_worker() {
    let rig = Rig::new();
    for queue in 0..4 {
        rig.pairs.lock()[queue / 2].calls[queue % 2].write(1).unwrap();
        wait(|| rig.driver.interrupted(queue).then_some(()));
    }
}

#[test]
fn error_of_the_kernel_ends_a_pair_until_a_reset() {
    for queue in 0..2 {
        let mut rig = Rig::new();
        rig.take_calls(0);
        rig.pairs.lock()[0].errors[queue].write(1).unwrap();
        wait(|| (rig.driver.resets_needed() == 1).then_some(()));
        assert_eq!(rig.take_calls(0), ["detach", "closed"]);
        assert_eq!(rig.net.metrics().broken_queues.load(Ordering::Relaxed), 1);
        rig.net.reset();
        rig.activate();
        assert_eq!(rig.take_calls(2), ["attach"]);
    }
}

#[test]
fn failed_attach_needs_a_reset() {
    let mut rig = Rig::new();
    rig.pairs.lock()[1].record.lock().refuse = true;
    rig.use_pairs(2);
    wait(|| (rig.driver.resets_needed() == 1).then_some(()));
    assert_eq!(rig.take_calls(1), ["attach", "closed"]);
}

#[test]
fn removed_interface_is_reported_as_link_down() {
    let rig = Rig::new();
    rig.take_calls(0);
    rig.tap.is_gone.store(true, Ordering::Relaxed);
    rig.pairs.lock()[0].errors[1].write(1).unwrap();
    wait(|| (!rig.is_up()).then_some(()));
    assert_eq!(rig.take_calls(0), ["detach", "closed"]);
    assert_eq!(rig.driver.resets_needed(), 0);
}

#[test]
fn interface_removed_during_a_pause_is_reported_as_link_down() {
    let rig = Rig::new();
    let loops = rig.net.loops();
    loops[0].hold();
    loops[0].wait_until_held();
    rig.tap.is_gone.store(true, Ordering::Relaxed);
    // Makes the next attach fail, as in the kernel, which polls the interface when it is attached.
    rig.pairs.lock()[0].record.lock().refuse = true;
    loops[0].release();
    wait(|| (!rig.is_up()).then_some(()));
    assert_eq!(rig.take_calls(0), ["attach", "detach", "attach", "closed"]);
    assert_eq!(rig.driver.resets_needed(), 0);
}

#[test]
fn device_removed_during_a_pause_is_not_attached_again() {
    let mut rig = Rig::new();
    let loops = rig.net.loops();
    loops[0].hold();
    loops[0].wait_until_held();
    loops[0].dismiss();
    rig.net.reset();
    assert_eq!(rig.take_calls(0), ["attach", "detach", "detach", "closed"]);
}

#[test]
fn error_of_an_inactive_pair_is_ignored() {
    let mut rig = Rig::new();
    rig.pairs.lock()[1].errors[1].write(1).unwrap();
    // When the device answers this command, it has already handled the error, or will do so before
    // the next command.
    rig.use_pairs(1);
    rig.use_pairs(2);
    assert_eq!(rig.take_calls(1), ["attach"]);
    assert_eq!(rig.driver.resets_needed(), 0);
}

#[test]
fn pair_that_the_kernel_refuses_needs_a_reset() {
    let connect: Connect = Arc::new(|_: Setup<'_>| Err(VhostError::Ranges { ranges: 0 }));
    let mut net = Net::with(shape(), Arc::new(FakeTap::new(2).0), Some(connect)).unwrap();
    let mut driver = TestDriver::new(5);
    for round in 1..3 {
        net.activate(driver.activation(net.features())).unwrap();
        assert_eq!(driver.resets_needed(), 2 * round, "both pairs");
        net.reset();
    }
}

#[test]
fn kernel_with_zero_copy_is_not_used() {
    assert!(check_zero_copy(Ok("0\n".to_owned())).is_ok());
    for value in ["1\n", "", "-1"] {
        assert!(matches!(check_zero_copy(Ok(value.to_owned())), Err(VhostError::ZeroCopy { .. })));
    }
    let unknown = check_zero_copy(Err(io::ErrorKind::NotFound.into()));
    assert!(matches!(unknown, Err(VhostError::ZeroCopyUnknown(_))));
}

#[test]
fn kernel_without_the_offered_features_is_not_used() {
    assert!(check_features(RING_FEATURES | 1 << 26).is_ok());
    let missing = 1 << VIRTIO_F_VERSION_1;
    let error = check_features(RING_FEATURES & !missing).unwrap_err();
    assert!(
        matches!(error, VhostError::Features { missing: found } if found == missing),
        "{error}"
    );
}
