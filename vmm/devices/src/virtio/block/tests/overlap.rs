//! Tests of two overlapping flushes on a disk with two queues. One of the flushes fails. The tests
//! run with and without rings.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use virtio_bindings::virtio_blk::*;

use super::fake::{Call, TIMEOUT, io_error};
use super::*;
use crate::event_loop::EventLoopHandle;
use crate::virtio::block::Kind;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;

/// A disk with two queues. Tests decide when the flush of each queue ends.
struct Flushes {
    rig: Rig,
    fake: Arc<Fake>,
    by_ring: bool,
    /// Receives a message when a flush without a ring begins.
    begun: Receiver<()>,
    /// Send the results of flushes without a ring, in the order in which the flushes begin.
    results: Vec<Sender<io::Result<()>>>,
}

impl Flushes {
    fn new(by_ring: bool) -> Self {
        let fake = Arc::new(if by_ring { Fake::with_rings(1 << 20) } else { Fake::new(1 << 20) });
        let (begins, begun) = channel();
        let (results, answers): (Vec<_>, Vec<_>) = (0..2).map(|_| channel()).unzip();
        let (begins, answers) = (Mutex::new(begins), Mutex::new(answers));
        if !by_ring {
            fake.set_hook(move |call| {
                if call != Call::Flush {
                    return Ok(());
                }
                let answer: Receiver<_> = answers.lock().remove(0);
                begins.lock().send(()).unwrap();
                answer.recv_timeout(TIMEOUT).unwrap()
            });
        }
        let rig = Rig::shaped(DiskShape { queues: 2, ..shape() }, fake.clone());
        Self { rig, fake, by_ring, begun, results }
    }

    /// Sends a flush to a queue. The request uses the slot with the queue's number.
    fn begin(&mut self, queue: usize) {
        self.rig.send(queue, queue as u64, VIRTIO_BLK_T_FLUSH, 0);
        if self.by_ring {
            self.fake.ring(queue).wait_for(1);
        } else {
            self.begun.recv_timeout(TIMEOUT).unwrap();
        }
    }

    fn end(&self, queue: usize, result: io::Result<()>) {
        if self.by_ring {
            self.fake.ring(queue).end(&self.fake, 0, result);
        } else {
            self.results[queue].send(result).unwrap();
        }
    }

    /// Waits until the disk has counted the flush that ended first.
    fn wait_for_flush(&self) {
        while self.rig.metrics().flushes.count() == 0 {
            thread::yield_now();
        }
    }

    fn statuses(&self) -> [u8; 2] {
        [0, 1].map(|slot| self.rig.status_of(slot))
    }
}

/// Runs two overlapping flushes, one in each queue. The second one ends first. Returns the statuses
/// of both.
fn two_overlap(by_ring: bool, first: io::Result<()>, second: io::Result<()>) -> [u8; 2] {
    let mut flushes = Flushes::new(by_ring);
    (0..2).for_each(|queue| flushes.begin(queue));
    let is_good = second.is_ok();
    flushes.end(1, second);
    flushes.wait_for_flush();
    if is_good {
        // The queue answers this later request only after it has processed the end of the flush.
        flushes.rig.send(1, 2, VIRTIO_BLK_T_GET_ID, 0);
        flushes.rig.driver.wait_used(1);
        assert_eq!(flushes.rig.status_of(2), OK);
        assert_eq!(flushes.statuses()[1], UNTOUCHED, "the other flush may have received the error");
    }
    flushes.end(0, first);
    for queue in 0..2 {
        flushes.rig.driver.wait_used(queue);
    }
    flushes.statuses()
}

#[test]
fn both_of_two_flushes_fail_whichever_has_the_error() {
    for by_ring in [false, true] {
        assert_eq!(two_overlap(by_ring, io_error(), Ok(())), [IOERR, IOERR]);
        assert_eq!(two_overlap(by_ring, Ok(()), io_error()), [IOERR, IOERR]);
        assert_eq!(two_overlap(by_ring, Ok(()), Ok(())), [OK, OK]);
    }
}

#[test]
fn flush_that_overlaps_the_cache_switch_may_get_its_error() {
    for by_ring in [false, true] {
        let mut flushes = Flushes::new(by_ring);
        flushes.begin(0);
        flushes.fake.set_hook(|_| io_error());
        flushes.rig.device.write_config(32, &[0]);
        flushes.fake.set_hook(|_| Ok(()));
        flushes.end(0, Ok(()));
        flushes.rig.driver.wait_used(0);
        assert_eq!(flushes.statuses()[0], IOERR, "{by_ring}");
    }
}

#[test]
fn error_of_a_flush_during_a_reset_is_recorded() {
    for by_ring in [false, true] {
        let mut flushes = Flushes::new(by_ring);
        flushes.begin(0);
        let stop = Arc::clone(&flushes.rig.device.stop);
        thread::scope(|scope| {
            let Flushes { rig, fake, results, .. } = &mut flushes;
            let reset = scope.spawn(|| rig.device.reset());
            while !stop.load(Ordering::Acquire) {
                thread::yield_now();
            }
            match by_ring {
                true => fake.ring(0).end(fake, 0, io_error()),
                false => results[0].send(io_error()).unwrap(),
            }
            reset.join().unwrap();
        });
        let rig = &mut flushes.rig;
        assert!(rig.metrics().read_only.load(Ordering::Relaxed));
        let activation = rig.driver.activation(rig.device.features());
        rig.device.activate(activation).unwrap();
        assert_eq!(rig.write(0, &[1; 512]), IOERR);
        assert_eq!(rig.metrics().failed(Kind::Write), 1);
    }
}

#[test]
fn held_queue_answers_open_requests_and_takes_no_more() {
    for by_ring in [false, true] {
        let mut flushes = Flushes::new(by_ring);
        (0..2).for_each(|queue| flushes.begin(queue));
        // 1. The second flush has ended, but it waits for the first one, which is still in
        //    progress.
        flushes.end(1, Ok(()));
        flushes.wait_for_flush();
        flushes.rig.send(1, 2, VIRTIO_BLK_T_GET_ID, 0);
        flushes.rig.driver.wait_used(1);
        let loops = flushes.rig.device.loops();
        let (gate, began) = (loops[1].gate(), Instant::now());
        while !gate.is_busy() {
            assert!(
                began.elapsed() < TIMEOUT,
                "the event loop does not wait for a request in progress"
            );
            thread::yield_now();
        }
        loops.iter().for_each(EventLoopHandle::hold);
        flushes.end(0, Ok(()));
        loops.iter().for_each(EventLoopHandle::wait_until_held);
        assert_eq!(flushes.statuses(), [OK, OK]);
        let rig = &mut flushes.rig;
        rig.driver.wait_used(1);
        // 2. A request that arrives while the VM is paused waits in the ring.
        rig.send(1, 2, VIRTIO_BLK_T_GET_ID, 0);
        assert_eq!((rig.driver.used(1), rig.status_of(2)), (None, UNTOUCHED));
        loops.iter().for_each(EventLoopHandle::release);
        rig.driver.wait_used(1);
        assert_eq!(rig.status_of(2), OK);
    }
}
