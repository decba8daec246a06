//! Flushes that overlap, of which one is told of an error.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_bindings::virtio_blk::*;

use super::*;
use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{Geometry, ResizeError};
use crate::event_loop::EventLoopHandle;
use crate::virtio::block::Kind;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const PATIENCE: Duration = Duration::from_secs(60);

/// A store whose flushes, in their order, are answered by the test.
struct Asking {
    begun: Mutex<Sender<()>>,
    answers: Mutex<Vec<Receiver<io::Result<()>>>>,
}

impl BlockDevice for Asking {
    fn geometry(&self) -> Geometry {
        Fake::new(0).geometry
    }
    fn size_bytes(&self) -> u64 {
        1 << 20
    }
    fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Ok(())
    }
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        let answer = self.answers.lock().remove(0);
        self.begun.lock().send(()).unwrap();
        answer.recv_timeout(PATIENCE).unwrap()
    }
    fn discard(&self, _: DiskRange) -> io::Result<()> {
        Ok(())
    }
    fn write_zeroes(&self, _: DiskRange, _: Unmap) -> io::Result<()> {
        Ok(())
    }
    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        Ok(())
    }
}

/// A disk with two queues, word of each flush that begins, and the answers to the first `N`.
fn rig<const N: usize>() -> (Rig, Receiver<()>, [Sender<io::Result<()>>; N]) {
    let (begun, has_begun) = channel();
    let (senders, answers): (Vec<_>, Vec<_>) = (0..N).map(|_| channel()).unzip();
    let asking = Asking { begun: Mutex::new(begun), answers: Mutex::new(answers) };
    let device = Block::new(DiskShape { queues: 2, ..shape() }, Arc::new(asking)).unwrap();
    let features = device.features();
    (Rig::with(device, features), has_begun, senders.try_into().unwrap())
}

fn error() -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::EIO))
}

/// Where the status of a queue's request is.
fn status_at(queue: usize) -> u64 {
    STATUS + 1 + queue as u64
}

fn add(rig: &mut Rig, queue: usize, kind: u32, status: u64) {
    let header = HEADER + 0x10 * u64::from(kind);
    rig.driver.write(header, &[&kind.to_le_bytes()[..], &[0; 12]].concat());
    rig.driver.write(status, &[UNTOUCHED]);
    rig.driver.add(queue, &[Buffer::Out(header, 16), Buffer::In(status, 1)]);
    rig.driver.kick(queue);
}

fn status(rig: &Rig, queue: usize) -> u8 {
    rig.driver.read(status_at(queue), 1)[0]
}

/// Two flushes overlap, one in each queue, and the second is answered first.
fn two_overlap(first: io::Result<()>, second: io::Result<()>) -> [u8; 2] {
    let (mut rig, has_begun, answers) = rig::<2>();
    for queue in 0..2 {
        add(&mut rig, queue, VIRTIO_BLK_T_FLUSH, status_at(queue));
        has_begun.recv_timeout(PATIENCE).unwrap();
    }
    let is_good = second.is_ok();
    answers[1].send(second).unwrap();
    // The queue has seen that answer when it has answered something else behind it.
    while rig.metrics().flushes.count() == 0 {
        thread::yield_now();
    }
    if is_good {
        add(&mut rig, 1, VIRTIO_BLK_T_GET_ID, STATUS);
        rig.driver.wait_used(1);
        assert_eq!(rig.status(), OK);
        assert_eq!(status(&rig, 1), UNTOUCHED, "the other may be told of its error");
    }
    answers[0].send(first).unwrap();
    rig.driver.wait_used(0);
    rig.driver.wait_used(1);
    [0, 1].map(|queue| status(&rig, queue))
}

#[test]
fn both_of_two_flushes_fail_whichever_of_them_is_told() {
    assert_eq!(two_overlap(error(), Ok(())), [IOERR, IOERR]);
    assert_eq!(two_overlap(Ok(()), error()), [IOERR, IOERR]);
    assert_eq!(two_overlap(Ok(()), Ok(())), [OK, OK]);
}

#[test]
fn a_driver_that_switches_the_cache_off_may_get_the_error_of_a_flush() {
    let (mut rig, has_begun, answers) = rig::<2>();
    add(&mut rig, 0, VIRTIO_BLK_T_FLUSH, status_at(0));
    has_begun.recv_timeout(PATIENCE).unwrap();
    thread::scope(|scope| {
        let device = &mut rig.device;
        let switch = scope.spawn(move || device.write_config(32, &[0]));
        has_begun.recv_timeout(PATIENCE).unwrap();
        answers[1].send(error()).unwrap();
        switch.join().unwrap();
    });
    answers[0].send(Ok(())).unwrap();
    rig.driver.wait_used(0);
    assert_eq!(status(&rig, 0), IOERR);
}

#[test]
fn an_error_that_nobody_waits_for_any_more_is_remembered() {
    let (mut rig, has_begun, answers) = rig::<1>();
    add(&mut rig, 0, VIRTIO_BLK_T_FLUSH, status_at(0));
    has_begun.recv_timeout(PATIENCE).unwrap();
    let stop = Arc::clone(&rig.device.stop);
    thread::scope(|scope| {
        let device = &mut rig.device;
        let reset = scope.spawn(move || device.reset());
        while !stop.load(Ordering::Acquire) {
            thread::yield_now();
        }
        answers[0].send(error()).unwrap();
        reset.join().unwrap();
    });
    assert!(rig.metrics().read_only.load(Ordering::Relaxed));
    let activation = rig.driver.activation(rig.device.features());
    rig.device.activate(activation).unwrap();
    assert_eq!(rig.write(0, &[1; 512]), IOERR);
    assert_eq!(rig.metrics().failed(Kind::Write), 1);
}

#[test]
fn a_queue_is_held_when_what_it_has_taken_is_answered_and_takes_no_more() {
    let (mut rig, has_begun, answers) = rig::<2>();
    for queue in 0..2 {
        add(&mut rig, queue, VIRTIO_BLK_T_FLUSH, status_at(queue));
        has_begun.recv_timeout(PATIENCE).unwrap();
    }
    // 1. The second is done, and waits for the first, which is not.
    answers[1].send(Ok(())).unwrap();
    while rig.metrics().flushes.count() == 0 {
        thread::yield_now();
    }
    add(&mut rig, 1, VIRTIO_BLK_T_GET_ID, STATUS);
    rig.driver.wait_used(1);
    let loops = rig.device.loops();
    let (gate, began) = (loops[1].gate(), Instant::now());
    while !gate.is_busy() {
        assert!(began.elapsed() < PATIENCE, "the loop does not know of a request that was taken");
        thread::yield_now();
    }
    loops.iter().for_each(EventLoopHandle::hold);
    answers[0].send(Ok(())).unwrap();
    loops.iter().for_each(EventLoopHandle::wait_until_held);
    assert_eq!([0, 1].map(|queue| status(&rig, queue)), [OK, OK]);
    rig.driver.wait_used(1);
    // 2. What comes now is for later.
    add(&mut rig, 1, VIRTIO_BLK_T_GET_ID, STATUS);
    assert_eq!((rig.driver.used(1), rig.status()), (None, UNTOUCHED));
    loops.iter().for_each(EventLoopHandle::release);
    rig.driver.wait_used(1);
    assert_eq!(rig.status(), OK);
}
