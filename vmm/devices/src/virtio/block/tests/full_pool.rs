//! Tests of writes that find no space in a pool.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use tempfile::TempDir;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_DISCARD};

use super::fake::{Call, TIMEOUT};
use super::volume::new_pool;
use super::*;
use crate::event_loop::EventLoopHandle;
use crate::pool::{PmPool, VolumeFormat, VolumeOptions};
use crate::virtio::block::FullHandler;
use crate::virtio::block::event::HELD_BYTES_MAX;
use crate::virtio::block::job::PIECE_BYTES_MAX;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const MIB: u64 = 1 << 20;

/// Creates a disk whose writes wait for space or fail. Each call of the handler sends a message.
fn rig(content: Arc<dyn BlockDevice>, waits: bool) -> (Rig, mpsc::Receiver<()>) {
    let device = Block::new(shape(), content).unwrap();
    let (sender, notified) = mpsc::channel();
    device.on_full(FullHandler { waits, notify: Box::new(move || sender.send(()).unwrap()) });
    let features = device.features();
    (Rig::with(device, features), notified)
}

/// Creates the content of a disk that has no space while the flag is set.
fn full_content() -> (Arc<Fake>, Arc<AtomicBool>) {
    let (fake, is_full) = (Arc::new(Fake::new(1 << 20)), Arc::new(AtomicBool::new(true)));
    let full = Arc::clone(&is_full);
    fake.set_hook(move |call| match call {
        Call::Write if full.load(Ordering::SeqCst) => Err(io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    });
    (fake, is_full)
}

#[test]
fn waiting_write_delays_neither_reads_nor_a_pause() {
    let (fake, is_full) = full_content();
    let (mut rig, notified) = rig(fake.clone(), true);
    rig.driver.write(data_of(0), &[7; 512]);
    let write = rig.send(0, 0, VIRTIO_BLK_T_OUT, 3);
    notified.recv_timeout(TIMEOUT).unwrap();
    let read = rig.send(0, 1, VIRTIO_BLK_T_IN, 5);
    assert_eq!(rig.driver.wait_used(0), (read, 513));
    assert_eq!(rig.status_of(0), UNTOUCHED);
    let loops = rig.device.loops();
    loops.iter().for_each(EventLoopHandle::hold);
    loops.iter().for_each(EventLoopHandle::wait_until_held);
    assert_eq!(rig.handle().has_space_for_waiting(), Some(true));
    rig.handle().retry_writes();
    assert_eq!(rig.handle().has_space_for_waiting(), None);
    loops.iter().for_each(EventLoopHandle::release);
    // The retry finds no space either.
    notified.recv_timeout(TIMEOUT).unwrap();
    is_full.store(false, Ordering::SeqCst);
    rig.handle().retry_writes();
    assert_eq!(rig.driver.wait_used(0), (write, 1));
    assert_eq!(rig.status_of(0), OK);
    assert_eq!(fake.bytes.lock()[3 * 512..4 * 512], [7; 512]);
    assert_eq!(rig.metrics().full_writes.load(Ordering::Relaxed), 2);
}

/// Also checks that each retry writes the same pieces again, although all of them together exceed
/// the limit.
#[test]
fn waiting_writes_beyond_the_limit_of_a_queue_delay_neither_reads_nor_discards() {
    let is_full = Arc::new(AtomicBool::new(true));
    let (full, fake) = (Arc::clone(&is_full), Arc::new(Fake::without_memory(1 << 30)));
    fake.set_hook(move |call| match call {
        Call::Write if full.load(Ordering::SeqCst) => Err(io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    });
    let (mut rig, notified) = rig(fake, true);
    let metrics = rig.metrics();
    let full_writes = || metrics.full_writes.load(Ordering::Relaxed);
    // All writes use the same data, because the driver has no more memory.
    rig.write_header(VIRTIO_BLK_T_OUT, 0);
    let data = Buffer::Out(0, PIECE_BYTES_MAX as u32);
    let head = rig.driver.add(0, &[Buffer::Out(HEADER, 16), data, data, Buffer::In(STATUS, 1)]);
    let writes = HELD_BYTES_MAX / PIECE_BYTES_MAX + 4;
    (1..writes).for_each(|_| rig.driver.add_again(0, head));
    rig.driver.kick(0);
    for round in 1..=2 {
        let read = rig.send(0, 0, VIRTIO_BLK_T_IN, 5);
        assert_eq!(rig.driver.wait_used(0), (read, 513));
        rig.driver.write(DATA, &[&[0; 8][..], &8u32.to_le_bytes(), &[0; 4]].concat());
        let header = [&VIRTIO_BLK_T_DISCARD.to_le_bytes()[..], &[0; 12]].concat();
        rig.driver.write(HEADER + 0x10, &header);
        let list = Buffer::Out(DATA, 16);
        let status = Buffer::In(status_at(1), 1);
        let discard = rig.driver.add(0, &[Buffer::Out(HEADER + 0x10, 16), list, status]);
        rig.driver.kick(0);
        assert_eq!(rig.driver.wait_used(0), (discard, 1));
        assert_eq!(rig.status_of(1), OK);
        let begin = Instant::now();
        while full_writes() < round * writes {
            assert!(begin.elapsed() < TIMEOUT, "{} of {writes} writes wait", full_writes());
            thread::yield_now();
        }
        notified.recv_timeout(TIMEOUT).unwrap();
        is_full.store(round == 1, Ordering::SeqCst);
        rig.handle().retry_writes();
    }
    for _ in 0..writes {
        assert_eq!(rig.driver.wait_used(0), (head, 1));
    }
    assert_eq!((rig.status(), full_writes()), (OK, 2 * writes));
    assert_eq!(metrics.written_bytes.load(Ordering::Relaxed), 2 * writes * PIECE_BYTES_MAX);
}

#[test]
fn reset_drops_waiting_writes() {
    let (fake, is_full) = full_content();
    let (mut rig, notified) = rig(fake.clone(), true);
    rig.driver.write(data_of(0), &[7; 512]);
    rig.send(0, 0, VIRTIO_BLK_T_OUT, 3);
    notified.recv_timeout(TIMEOUT).unwrap();
    rig.device.reset();
    is_full.store(false, Ordering::SeqCst);
    assert_eq!(rig.handle().has_space_for_waiting(), None);
    rig.handle().retry_writes();
    assert_eq!((rig.status_of(0), fake.bytes.lock()[3 * 512]), (UNTOUCHED, 0));
}

#[test]
fn write_that_must_not_wait_fails() {
    let (fake, is_full) = full_content();
    let (mut rig, notified) = rig(fake, false);
    for _ in 0..2 {
        assert_eq!(rig.write(0, &[1; 512]), IOERR);
        notified.try_recv().unwrap();
    }
    assert_eq!(rig.handle().has_space_for_waiting(), None);
    is_full.store(false, Ordering::SeqCst);
    assert_eq!(rig.write(0, &[1; 512]), OK);
    assert_eq!(rig.metrics().full_writes.load(Ordering::Relaxed), 2);
}

#[test]
fn overcommitted_volume_continues_when_memory_is_returned() {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let pool = new_pool(&folder);
    let thick = VolumeOptions::thick(100 * MIB, VolumeFormat::Btt);
    let thin = VolumeOptions { thin: true, reserve_bytes: Some(0), ..thick };
    pool.create_volume("thin", thin).unwrap();
    let memory = pool.alloc_memory(16 * MIB).unwrap();
    let disk = pool.open_volume("thin").unwrap().into_disk().unwrap().device;
    let (mut rig, notified) = rig(disk.clone(), true);
    let mut writes = (0..90 * MIB).step_by(1 << 16);
    let full_at = writes.find(|at| disk.write(*at, &vec![5; 1 << 16]).is_err()).unwrap();
    rig.driver.write(DATA, &pattern(4096, 9));
    rig.write_header(VIRTIO_BLK_T_OUT, full_at / 512);
    let chain = [Buffer::Out(HEADER, 16), Buffer::Out(DATA, 4096), Buffer::In(STATUS, 1)];
    rig.driver.add(0, &chain);
    rig.driver.kick(0);
    notified.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(rig.handle().has_space_for_waiting(), Some(false));
    pool.free_memory(&memory).unwrap();
    assert_eq!(rig.handle().has_space_for_waiting(), Some(true));
    rig.handle().retry_writes();
    rig.driver.wait_used(0);
    assert_eq!(rig.status(), OK);
    assert_eq!(rig.read(full_at / 512, 4096), Ok(pattern(4096, 9)));
}
