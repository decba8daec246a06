//! Tests of memory that borrows the promised bytes of thin volumes.

use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use super::*;
use crate::media::MediaError;
use crate::pool::alloc::recall::ASK_AGAIN_AFTER;

/// Usable size of the pool, size of the thin volume, and bytes that memory may borrow.
const POOL: u64 = 124 * MIB;
const VOLUME: u64 = 100 * MIB;
const BORROWABLE: u64 = 60 * MIB;
const MIN_FREE: u64 = 32 * MIB;

/// Creates a pool with an empty thin volume, and lends all lendable bytes as memory.
fn pool_with_lent_memory() -> (Fixture, Arc<Pool>, Volume, Vec<Extent>) {
    let fixture = Fixture::new();
    let pool = fixture.create(POOL + 4 * MIB, 0);
    assert_eq!(pool.info().free_bytes, POOL);
    let size = VolumeSize::Bytes(VOLUME);
    pool.create_volume_with(
        "thin",
        VolumeOptions { size, format: VolumeFormat::Raw, thin: true, reserve_bytes: None },
    )
    .unwrap();
    let lendable_bytes = || pool.info().lendable_bytes;
    assert_eq!(lendable_bytes(), POOL - VOLUME);
    pool.lend_promised(Some(MIN_FREE));
    pool.set_borrowable_bytes(VOLUME);
    assert_eq!(lendable_bytes(), POOL - MIN_FREE);
    pool.set_borrowable_bytes(BORROWABLE);
    assert_eq!(lendable_bytes(), POOL - VOLUME + BORROWABLE);
    let lent = pool.alloc_memory(lendable_bytes()).unwrap();
    assert_states_add_up(&pool.info());
    let volume = pool.open_volume("thin").unwrap();
    (fixture, pool, volume, lent)
}

/// Returns lent memory whenever the pool requests it, as a borrower with a limit does. Returns the
/// number of returned bytes.
fn serve(pool: &Pool, lent: &Mutex<Vec<Extent>>) -> u64 {
    let mut returned_bytes = 0;
    while let Some(bytes) = pool.next_recall() {
        let mut lent = lent.lock().unwrap();
        let chunks = (bytes / CHUNK_BYTES) as usize;
        let (returned, rest): (Vec<_>, Vec<_>) = lent
            .iter()
            .flat_map(|extent| extent.run().ids())
            .enumerate()
            .partition(|(position, _)| *position < chunks);
        let extent = |(_, start)| Extent { start, order: 0 };
        let returned: Vec<_> = returned.into_iter().map(extent).collect();
        *lent = rest.into_iter().map(extent).collect();
        returned_bytes += returned.len() as u64 * CHUNK_BYTES;
        assert!(returned_bytes <= BORROWABLE, "{returned_bytes} bytes were recalled");
        pool.free_memory(&returned).unwrap();
        pool.set_borrowable_bytes(BORROWABLE - returned_bytes);
    }
    returned_bytes
}

/// Waits until a write waits for a chunk.
fn wait_for_writer(pool: &Pool) {
    while pool.lock_state().recall.awaited_chunks == 0 {
        assert!(pool.next_recall().is_some());
        thread::yield_now();
    }
}

#[test]
fn writes_get_all_promised_bytes_back() {
    let (_fixture, pool, volume, lent) = pool_with_lent_memory();
    let lent = Mutex::new(lent);
    pool.start_recalls();
    let returned_bytes = thread::scope(|scope| {
        let server = scope.spawn(|| serve(&pool, &lent));
        for offset in (0..VOLUME).step_by(CHUNK_BYTES as usize) {
            volume.store_word(offset, offset + 1).unwrap();
        }
        pool.end_recalls();
        server.join().unwrap()
    });
    assert_eq!(returned_bytes, BORROWABLE);
    assert_eq!(pool.info().volume_bytes, VOLUME);
    for offset in (0..VOLUME).step_by(CHUNK_BYTES as usize) {
        assert_eq!(volume.load_word(offset).unwrap(), offset + 1);
    }
    // All bytes are allocated, so nothing is left to borrow.
    assert_eq!(pool.info().lendable_bytes, 0);
    assert_states_add_up(&pool.info());
}

#[test]
fn chunks_are_recalled_before_a_write_waits() {
    let (_fixture, pool, volume, lent) = pool_with_lent_memory();
    let free_bytes = pool.info().free_bytes;
    assert_eq!(free_bytes, VOLUME - BORROWABLE);
    // No chunk is recalled while enough are free.
    volume.provision(0..free_bytes - MIN_FREE).unwrap();
    pool.start_recalls();
    assert_eq!(pool.lock_state().shortage_chunks(), 0);
    volume.provision(0..free_bytes - MIN_FREE + 1).unwrap();
    assert_eq!(pool.next_recall(), Some(CHUNK_BYTES));
    pool.free_memory(&[Extent { start: lent[0].start, order: 0 }]).unwrap();
    assert_eq!(pool.lock_state().shortage_chunks(), 0);
}

/// The pool fails while a write waits and no other thread uses the pool.
#[test]
fn waiting_write_fails_when_the_pool_is_latched() {
    let (_fixture, pool, volume, _lent) = pool_with_lent_memory();
    volume.provision(0..pool.info().free_bytes).unwrap();
    pool.start_recalls();
    thread::scope(|scope| {
        let write = scope.spawn(|| volume.store_word(VOLUME - CHUNK_BYTES, 1));
        wait_for_writer(&pool);
        pool.set_latched(&MediaError::ReadOnly);
        let server = scope.spawn(|| pool.next_recall());
        assert!(matches!(write.join().unwrap(), Err(MediaError::Latched { .. })));
        pool.end_recalls();
        server.join().unwrap();
    });
}

#[test]
fn write_fails_if_the_borrower_refuses_and_succeeds_later() {
    let (_fixture, pool, volume, lent) = pool_with_lent_memory();
    let free_bytes = pool.info().free_bytes;
    let full = |result| matches!(result, Err(MediaError::Full { .. }));
    // No thread serves recalls.
    volume.provision(0..free_bytes).unwrap();
    assert!(full(volume.store_word(free_bytes, 1)));
    pool.start_recalls();
    thread::scope(|scope| {
        let refused = scope.spawn(|| {
            wait_for_writer(&pool);
            pool.refuse_recall();
        });
        assert!(full(volume.store_word(free_bytes, 1)));
        refused.join().unwrap();
        // The next write does not ask again until something changes.
        assert!(full(volume.store_word(free_bytes, 1)));
        // A write that waits should ask again after a time, for example if DRAM was missing.
        assert!(!volume.has_space());
        let long_ago = Instant::now().checked_sub(ASK_AGAIN_AFTER);
        pool.lock_state().recall.refused_at = Some(long_ago.expect("after the host's boot"));
        assert!(volume.has_space());
        pool.set_borrowable_bytes(BORROWABLE);
        let served = scope.spawn(|| {
            assert!(pool.next_recall().is_some());
            pool.free_memory(&[Extent { start: lent[0].start, order: 0 }]).unwrap();
        });
        volume.store_word(free_bytes, 1).unwrap();
        served.join().unwrap();
        // A waiting write fails when the borrower ends.
        let ended = scope.spawn(|| {
            wait_for_writer(&pool);
            pool.end_recalls();
            assert_eq!(pool.next_recall(), None);
        });
        assert!(full(volume.store_word(free_bytes + CHUNK_BYTES, 1)));
        ended.join().unwrap();
    });
    assert!(pool.is_writable());
}
