//! Tests of the limits on how long a guest's requests can keep the device busy.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use virtio_bindings::virtio_blk::*;

use super::fake::{Call, TIMEOUT};
use super::*;
use crate::virtio::block::job::RANGE_PIECE_BYTES_MAX;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const DISK_BYTES: u64 = 1 << 40;

fn ranges(list: &[(u64, u32)]) -> Vec<u8> {
    let one = |(sector, sectors): &(u64, u32)| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
    };
    list.iter().flat_map(one).collect()
}

/// Creates a large disk on which the test controls discards and zeroing. When such a call begins,
/// it sends its length in bytes and then waits for a message from the returned sender. After the
/// sender is dropped, calls no longer wait.
fn slow_disk() -> (Rig, Receiver<u64>, Sender<()>) {
    let (begun, has_begun) = channel();
    let (go_on, goes_on) = channel();
    let (begun, goes_on) = (Mutex::new(begun), Mutex::new(goes_on));
    let fake = Fake::without_memory(DISK_BYTES);
    fake.set_hook(move |call| {
        if let Call::Discard(len_bytes) | Call::WriteZeroes(len_bytes) = call {
            let _ = begun.lock().send(len_bytes);
            let _ = goes_on.lock().recv();
        }
        Ok(())
    });
    (Rig::new(Arc::new(fake)), has_begun, go_on)
}

#[test]
fn reset_waits_for_one_step_of_a_request_of_64_gib() {
    for kind in [VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD] {
        let (mut rig, has_begun, go_on) = slow_disk();
        let list: Vec<_> = (0..32).map(|nth| (nth << 22, 1 << 22)).collect();
        rig.driver.write(DATA, &ranges(&list));
        rig.write_header(kind, 0);
        // Adds several requests, which the device could all begin.
        for _ in 0..8 {
            let chain = [Buffer::Out(HEADER, 16), Buffer::Out(DATA, 512), Buffer::In(STATUS, 1)];
            rig.driver.add(0, &chain);
        }
        rig.driver.kick(0);
        let len = has_begun.recv_timeout(TIMEOUT).unwrap();
        assert!(len <= RANGE_PIECE_BYTES_MAX, "{len} bytes at once");
        let stop = Arc::clone(&rig.device.stop);
        thread::scope(|scope| {
            let device = &mut rig.device;
            let reset = scope.spawn(move || device.reset());
            while !stop.load(Ordering::Acquire) {
                thread::yield_now();
            }
            // Dropping the sender lets all further steps complete without waiting.
            drop(go_on);
            reset.join().unwrap();
        });
        assert_eq!(has_begun.try_iter().count(), 0, "steps began before the reset returned");
        assert_eq!(rig.status(), UNTOUCHED);
    }
}

#[test]
fn read_behind_a_long_discard_is_answered_before_its_end() {
    let (mut rig, has_begun, go_on) = slow_disk();
    rig.driver.write(DATA, &ranges(&[(0, 1 << 22)]));
    rig.write_header(VIRTIO_BLK_T_DISCARD, 0);
    let chain = [Buffer::Out(HEADER, 16), Buffer::Out(DATA, 16), Buffer::In(STATUS, 1)];
    let discard = rig.driver.add(0, &chain);
    // A header that is all zeros requests a read from the first sector.
    let (header, sector, status) = (DATA + 0x1000, DATA + 0x2000, DATA + 0x3000);
    let chain = [Buffer::Out(header, 16), Buffer::In(sector, 512), Buffer::In(status, 1)];
    let read = rig.driver.add(0, &chain);
    rig.driver.kick(0);
    for _ in 0..2 {
        has_begun.recv_timeout(TIMEOUT).unwrap();
        go_on.send(()).unwrap();
    }
    // The read should be answered while the third step is still in progress.
    assert_eq!(rig.driver.wait_used(0), (read, 513));
    has_begun.recv_timeout(TIMEOUT).unwrap();
    assert_eq!((rig.driver.used(0), rig.status()), (None, UNTOUCHED));
    drop(go_on);
    assert_eq!((rig.driver.wait_used(0), rig.status()), ((discard, 1), OK));
}

#[test]
fn thread_is_idle_after_an_invalid_index_until_a_reset() {
    let (mut rig, _) = Rig::fake(1 << 20);
    let metrics = rig.metrics();
    let passes = || metrics.passes.load(Ordering::Relaxed);
    let wait = |description: &str, is_true: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !is_true() {
            assert!(begin.elapsed() < TIMEOUT, "{description}");
            thread::yield_now();
        }
    };
    rig.driver.jump(0, 33);
    rig.driver.kick(0);
    wait("the device did not reject the ring", &|| {
        metrics.broken_queues.load(Ordering::Relaxed) == 1
    });
    let mut allowed = passes() + 1;
    for _ in 0..3 {
        let before = passes();
        rig.driver.kick_spuriously(0);
        allowed += 1;
        wait("a notification was not handled", &|| passes() > before);
    }
    assert_eq!(rig.driver.resets_needed(), 1);
    // After the reset, the thread makes no more passes over the queue.
    rig.device.reset();
    assert!(passes() <= allowed, "{} passes and not {allowed}: the thread is busy", passes());
    let activation = rig.driver.activation(rig.device.features());
    rig.device.activate(activation).unwrap();
    assert_eq!(rig.write(0, &[1; 512]), OK);
}
