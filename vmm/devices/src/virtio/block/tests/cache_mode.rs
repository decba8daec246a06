//! Tests of writes that are in progress while the driver switches the write cache off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use parking_lot::Mutex;
use virtio_bindings::virtio_blk::*;

use super::fake::{Call, TIMEOUT};
use super::*;
use crate::virtio::block::job::PIECE_BYTES_MAX;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const WRITEBACK_AT: u64 = 32;
const DISK_BYTES: usize = 4 << 20;
/// Length of the guest's buffer. A write uses the buffer several times.
const BUFFER_BYTES: u32 = 0x4_0000;

/// Sends a write that the device divides into `pieces` steps.
fn send_write(rig: &mut Rig, pieces: u64) {
    rig.write_header(VIRTIO_BLK_T_OUT, 0);
    let buffers = (pieces - 1) * PIECE_BYTES_MAX / u64::from(BUFFER_BYTES) + 1;
    let mut chain = vec![Buffer::Out(HEADER, 16)];
    chain.extend((0..buffers).map(|_| Buffer::Out(DATA, BUFFER_BYTES)));
    chain.push(Buffer::In(STATUS, 1));
    rig.driver.add(0, &chain);
    rig.driver.kick(0);
}

#[test]
fn write_that_ends_during_the_flush_of_the_switch_has_its_own_flush() {
    let fake = Arc::new(Fake::with_rings(DISK_BYTES));
    let mut rig = Rig::new(fake.clone());
    let ring = fake.ring(0);
    send_write(&mut rig, 1);
    ring.wait_for(1);
    let (written, at_ring) = (Arc::clone(&fake), Arc::clone(&ring));
    let is_switched = AtomicBool::new(false);
    fake.set_hook(move |call| {
        if call == Call::Flush && !is_switched.swap(true, Ordering::Relaxed) {
            // The write ends during the flush of the mode switch. The end of the write is the
            // device's last chance to notice that the write must be flushed.
            at_ring.end(&written, 0, Ok(()));
            at_ring.wait_for(1);
            at_ring.end(&written, 0, Ok(()));
        }
        Ok(())
    });
    rig.device.write_config(WRITEBACK_AT, &[0]);
    // The old hook holds a reference to the disk, so it is replaced.
    fake.set_hook(|_| Ok(()));
    rig.driver.wait_used(0);
    assert_eq!((rig.status(), fake.is_dirty()), (OK, false));
    assert_eq!(fake.flushes.load(Ordering::Relaxed), 2);
}

#[test]
fn write_of_several_pieces_is_durable_if_the_cache_is_off_at_its_end() {
    for switch_before in 1..=3 {
        let fake = Arc::new(Fake::with_rings(DISK_BYTES));
        let mut rig = Rig::new(fake.clone());
        let ring = fake.ring(0);
        send_write(&mut rig, 3);
        for piece in 1..=3 {
            ring.wait_for(1);
            if piece == switch_before {
                rig.device.write_config(WRITEBACK_AT, &[0]);
            }
            ring.end(&fake, 0, Ok(()));
        }
        ring.wait_for(1);
        assert_eq!((rig.driver.used(0), fake.is_dirty()), (None, true), "{switch_before}");
        ring.end(&fake, 0, Ok(()));
        rig.driver.wait_used(0);
        assert_eq!((rig.status(), fake.is_dirty()), (OK, false), "{switch_before}");
    }
}

#[test]
fn write_by_calls_is_durable_if_the_cache_is_off_at_its_end() {
    for pieces in 1..=3 {
        let fake = Arc::new(Fake::new(DISK_BYTES));
        let mut rig = Rig::new(fake.clone());
        let (begins, begun) = channel();
        let (go_on, may_go_on) = channel();
        let may_go_on = Mutex::new(may_go_on);
        fake.set_hook(move |call| {
            if call == Call::Write {
                begins.send(()).unwrap();
                may_go_on.lock().recv_timeout(TIMEOUT).unwrap();
            }
            Ok(())
        });
        send_write(&mut rig, pieces);
        for piece in 1..=pieces {
            begun.recv_timeout(TIMEOUT).unwrap();
            if piece == pieces {
                rig.device.write_config(WRITEBACK_AT, &[0]);
                assert_eq!(fake.flushes.load(Ordering::Relaxed), 1);
            }
            go_on.send(()).unwrap();
        }
        rig.driver.wait_used(0);
        assert_eq!((rig.status(), fake.is_dirty()), (OK, false), "{pieces}");
        assert_eq!(fake.flushes.load(Ordering::Relaxed), 2, "{pieces}");
    }
}
