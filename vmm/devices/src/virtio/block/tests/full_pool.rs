//! Tests of writes that find no space in a pool.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use tempfile::TempDir;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};

use super::fake::{Call, TIMEOUT};
use super::volume::new_pool;
use super::*;
use crate::event_loop::EventLoopHandle;
use crate::pool::{PmPool, VolumeFormat, VolumeOptions};
use crate::virtio::block::FullHandler;

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
