//! Tests of concurrent steps in a ring. The tests decide when each step ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use virtio_bindings::virtio_blk::*;

use super::fake::{RingSteps, io_error};
use super::*;
use crate::virtio::block::event::HELD_BYTES_MAX;
use crate::virtio::block::job::{PIECE_BYTES_MAX, RANGE_PIECE_BYTES_MAX};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;

fn rig() -> (Rig, Arc<Fake>, Arc<RingSteps>) {
    let fake = Arc::new(Fake::with_rings(1 << 20));
    let rig = Rig::new(fake.clone());
    let ring = fake.ring(0);
    (rig, fake, ring)
}

#[test]
fn steps_end_in_any_order_and_each_request_has_its_own_result() {
    let (mut rig, fake, ring) = rig();
    let heads: Vec<_> = (0..4)
        .map(|slot| {
            rig.driver.write(data_of(slot), &[1 + slot as u8; 512]);
            rig.send(0, slot, VIRTIO_BLK_T_OUT, slot)
        })
        .collect();
    ring.wait_for(4);
    let mut left = vec![0, 1, 2, 3];
    for (nth, result, status) in
        [(2, Ok(()), OK), (0, io_error(), IOERR), (1, Ok(()), OK), (0, Ok(()), OK)]
    {
        let slot = left.remove(nth);
        ring.end(&fake, nth, result);
        assert_eq!(rig.driver.wait_used(0), (heads[slot], 1));
        assert_eq!(rig.status_of(slot as u64), status);
        assert!(left.iter().all(|slot| rig.status_of(*slot as u64) == UNTOUCHED));
    }
    let sectors: Vec<_> = fake.bytes.lock().chunks(512).map(|sector| sector[0]).take(4).collect();
    assert_eq!(sectors, [0, 2, 3, 4]);
}

#[test]
fn flush_and_write_that_overlap_do_not_wait_for_each_other() {
    const SLOTS: [(u64, u32); 2] = [(0, VIRTIO_BLK_T_OUT), (1, VIRTIO_BLK_T_FLUSH)];
    for first in [0, 1] {
        let (mut rig, fake, ring) = rig();
        let heads = SLOTS.map(|(slot, kind)| rig.send(0, slot, kind, 0));
        ring.wait_for(2);
        for (nth, slot) in [(first, first), (0, 1 - first)] {
            ring.end(&fake, nth, Ok(()));
            assert_eq!(rig.driver.wait_used(0), (heads[slot], 1));
            assert_eq!(rig.status_of(slot as u64), OK);
        }
        // A flush covers only writes that ended before it.
        assert_eq!(fake.is_dirty(), first == 1);
    }
}

#[test]
fn flushes_of_one_queue_that_overlap_share_their_error() {
    for (first, failing) in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)] {
        let (mut rig, fake, ring) = rig();
        for slot in [0, 1] {
            rig.send(0, slot, VIRTIO_BLK_T_FLUSH, 0);
            ring.wait_for(1 + slot as usize);
        }
        let result = |slot| if slot == failing { io_error() } else { Ok(()) };
        ring.end(&fake, first, result(first));
        while rig.metrics().flushes.count() == 0 {
            thread::yield_now();
        }
        if first != failing {
            // The queue answers this later request only after it has processed the end of the
            // flush.
            rig.send(0, 2, VIRTIO_BLK_T_GET_ID, 0);
            rig.driver.wait_used(0);
            assert_eq!([0, 1, 2].map(|slot| rig.status_of(slot)), [UNTOUCHED, UNTOUCHED, OK]);
        }
        ring.end(&fake, 0, result(1 - first));
        for _ in 0..2 {
            rig.driver.wait_used(0);
        }
        let status = if failing < 2 { IOERR } else { OK };
        assert_eq!([0, 1].map(|slot| rig.status_of(slot)), [status; 2], "{first}, {failing}");
    }
}

#[test]
fn write_is_durable_if_the_cache_is_off_at_its_end() {
    // No case switches the cache on during a write, because virtio does not define whether such a
    // write must be durable.
    for (before, after) in [(0, 0), (1, 0), (1, 1)] {
        let (mut rig, fake, ring) = rig();
        rig.device.write_config(32, &[before]);
        rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
        ring.wait_for(1);
        rig.device.write_config(32, &[after]);
        ring.end(&fake, 0, Ok(()));
        if after == 0 {
            ring.wait_for(1);
            assert_eq!((rig.driver.used(0), fake.is_dirty()), (None, true), "{before}");
            ring.end(&fake, 0, Ok(()));
        }
        rig.driver.wait_used(0);
        assert_eq!((rig.status_of(0), fake.is_dirty()), (OK, after == 1), "{before}");
    }
}

#[test]
fn durable_write_beside_a_failed_flush_is_an_error() {
    let (mut rig, fake, ring) = rig();
    rig.device.write_config(32, &[0]);
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
    rig.send(0, 1, VIRTIO_BLK_T_FLUSH, 0);
    ring.wait_for(2);
    ring.end(&fake, 1, io_error());
    rig.driver.wait_used(0);
    assert_eq!([0, 1].map(|slot| rig.status_of(slot)), [UNTOUCHED, IOERR]);
    for _ in ["write", "its flush"] {
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
    }
    rig.driver.wait_used(0);
    assert_eq!(rig.status_of(0), IOERR);
}

#[test]
fn queue_zeroes_no_more_than_its_limit_at_a_time() {
    let mut fake = Fake::without_memory(1 << 30);
    fake.has_rings = true;
    let fake = Arc::new(fake);
    let mut rig = Rig::new(fake.clone());
    let ring = fake.ring(0);
    // The range is 8 MiB long, which makes two pieces.
    let list = [&0u64.to_le_bytes()[..], &(1u32 << 14).to_le_bytes(), &[0; 4]].concat();
    rig.driver.write(DATA, &list);
    rig.write_header(VIRTIO_BLK_T_WRITE_ZEROES, 0);
    let chain = [Buffer::Out(HEADER, 16), Buffer::Out(DATA, 16), Buffer::In(STATUS, 1)];
    let requests = 10;
    for _ in 0..requests {
        rig.driver.add(0, &chain);
    }
    rig.driver.kick(0);
    for _ in 0..2 * requests {
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
    }
    (0..requests).for_each(|_| assert_eq!(rig.driver.wait_used(0).1, 1));
    let max_steps = ring.max_in_flight.load(Ordering::Relaxed) as u64;
    assert_eq!(max_steps * RANGE_PIECE_BYTES_MAX, HELD_BYTES_MAX);
}

#[test]
fn queue_exceeds_its_limit_by_less_than_one_piece() {
    let mut fake = Fake::without_memory(1 << 30);
    fake.has_rings = true;
    let fake = Arc::new(fake);
    let mut rig = Rig::new(fake.clone());
    let ring = fake.ring(0);
    // All writes use the same 1 MiB of data, because the driver has no more memory.
    rig.write_header(VIRTIO_BLK_T_OUT, 0);
    let write =
        [Buffer::Out(HEADER, 16), Buffer::Out(0, PIECE_BYTES_MAX as u32), Buffer::In(STATUS, 1)];
    let head = rig.driver.add(0, &write);
    let writes = (HELD_BYTES_MAX / PIECE_BYTES_MAX - 1) as usize;
    (1..writes).for_each(|_| rig.driver.add_again(0, head));
    let list = [&0u64.to_le_bytes()[..], &(1u32 << 13).to_le_bytes(), &[0; 4]].concat();
    rig.driver.write(DATA, &list);
    let header = [&VIRTIO_BLK_T_WRITE_ZEROES.to_le_bytes()[..], &[0; 12]].concat();
    rig.driver.write(HEADER + 0x10, &header);
    let zeroes = [Buffer::Out(HEADER + 0x10, 16), Buffer::Out(DATA, 16), Buffer::In(STATUS, 1)];
    rig.driver.add(0, &zeroes);
    // The queue has reached its limit, so the last write must wait.
    rig.driver.add_again(0, head);
    rig.driver.kick(0);
    assert_eq!(ring.wait_for(writes + 1), writes + 1);
    for _ in 0..writes + 2 {
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
        rig.driver.wait_used(0);
        assert_eq!(rig.status(), OK);
    }
    assert_eq!(ring.max_in_flight.load(Ordering::Relaxed), writes + 1);
}

#[test]
fn metric_shows_that_a_ring_is_given_up() {
    let (mut rig, fake, ring) = rig();
    let metrics = rig.metrics();
    assert!(metrics.io_uring.load(Ordering::Relaxed));
    ring.give_up();
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
    ring.wait_for(1);
    ring.end(&fake, 0, Ok(()));
    rig.driver.wait_used(0);
    assert!(!metrics.io_uring.load(Ordering::Relaxed));
}

#[test]
fn metric_shows_a_ring_only_if_all_queues_have_one() {
    for (without, all) in [(0, true), (1, false)] {
        let fake = Arc::new(Fake::with_rings(1 << 20));
        fake.without_ring.store(without, Ordering::Relaxed);
        let mut rig = Rig::shaped(DiskShape { queues: 2, ..shape() }, fake.clone());
        let metrics = rig.metrics();
        assert_eq!(metrics.io_uring.load(Ordering::Relaxed), all);
        rig.device.reset();
        let activation = rig.driver.activation(rig.device.features());
        rig.device.activate(activation).unwrap();
        assert_eq!(metrics.io_uring.load(Ordering::Relaxed), all, "after a reset");
        // The other queue retains its ring.
        let ring = fake.ring(0);
        ring.give_up();
        rig.send(usize::from(without > 0), 0, VIRTIO_BLK_T_OUT, 0);
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
        rig.driver.wait_used(usize::from(without > 0));
        assert!(!metrics.io_uring.load(Ordering::Relaxed));
    }
}

#[test]
fn reset_keeps_rings_that_the_kernel_accepts() {
    let (mut rig, fake, ring) = rig();
    let reactivate = |rig: &mut Rig| {
        rig.device.reset();
        rig.driver = TestDriver::new(1);
        let activation = rig.driver.activation(rig.device.features());
        rig.device.activate(activation).unwrap();
    };
    // A write that is in flight ends before the reset does.
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
    ring.wait_for(1);
    std::thread::scope(|scope| {
        scope.spawn(|| ring.end(&fake, 0, Ok(())));
        reactivate(&mut rig);
    });
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
    ring.wait_for(1);
    ring.end(&fake, 0, Ok(()));
    rig.driver.wait_used(0);
    assert_eq!(rig.status_of(0), OK);
    ring.give_up();
    reactivate(&mut rig);
    // Blocking calls execute the request.
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 0);
    rig.driver.wait_used(0);
    assert_eq!((rig.status_of(0), fake.ring_count()), (OK, 1));
}

#[test]
fn memory_can_be_plugged_while_a_ring_is_at_work() {
    let (mut rig, fake, ring) = rig();
    // The test deadlocks if the device holds a guard of guest memory during a call of the ring.
    ring.plug_during_calls(rig.view.clone());
    // A request with two ranges needs two steps.
    let range = |sector: u64| [&sector.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    rig.driver.write(DATA, &[range(8), range(16)].concat());
    rig.write_header(VIRTIO_BLK_T_WRITE_ZEROES, 0);
    let zeroes = [Buffer::Out(HEADER, 16), Buffer::Out(DATA, 32), Buffer::In(STATUS, 1)];
    rig.driver.add(0, &zeroes);
    rig.driver.kick(0);
    for _ in 0..2 {
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
    }
    assert_eq!((rig.driver.wait_used(0).1, rig.status_of(0)), (1, OK));
    for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_FLUSH] {
        rig.send(0, 0, kind, 0);
        ring.wait_for(1);
        ring.end(&fake, 0, Ok(()));
        rig.driver.wait_used(0);
        assert_eq!(rig.status_of(0), OK);
    }
}
