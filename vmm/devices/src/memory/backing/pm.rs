//! Backing memory in chunks of a PM pool.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::error;

use super::segments::{Ledger, Segment, Source};
use super::spill::{STEP_BYTES, SpillError, SpilledMemory};
use super::spill_file::PoolChunk;
use super::{Access, Backing, BackingError, MappingBudget, Reservation};
use crate::pool::{CHUNK_BYTES, PmPool, PoolError};

/// Maximum size of a requested extent: 2^10 chunks.
const MAX_EXTENT_BYTES: u64 = CHUNK_BYTES << 10;

/// Chunks of a pool that back a reservation.
///
/// A chunk is returned to the pool only when it is no longer mapped. Otherwise this guest could
/// access memory of another VM. Chunks that cannot be unmapped are kept in the ledger, until a
/// later plug of the same range or the end of the VM unmaps them.
#[derive(Debug)]
pub struct PmBacking {
    pool: Arc<dyn PmPool>,
    reservation: Arc<Reservation>,
    ledger: Ledger,
    /// Extents that are unmapped, but not yet returned to the pool.
    detached: Vec<Range<u64>>,
    /// Memory that was moved. `None` if it must not be moved.
    spilled: Option<SpilledMemory>,
}

impl PmBacking {
    /// Creates a backing for `reservation`, which has no mappings yet.
    pub fn new(
        pool: Arc<dyn PmPool>,
        reservation: Arc<Reservation>,
        budget: Arc<MappingBudget>,
        spilled: Option<SpilledMemory>,
    ) -> Self {
        let ledger = Ledger::new(reservation.len_bytes(), budget);
        Self { pool, reservation, ledger, detached: Vec::new(), spilled }
    }

    /// Allocates chunks for `offset..offset + len`. Extents are as large as the pool and their
    /// alignment in the zone allow, so that host and guest can map them with huge pages.
    fn allocate(&mut self, offset: u64, len: u64) -> Result<Vec<Range<u64>>, BackingError> {
        let mut extents = Vec::new();
        let mut at = offset;
        while at < offset + len {
            let piece = largest_aligned(at, offset + len - at);
            match self.pool.alloc_memory(piece) {
                // Extents are powers of two, largest first, so that each is aligned to its size in
                // the file.
                Ok(mut allocated) => extents.append(&mut allocated),
                Err(err) => {
                    self.give_back(extents);
                    return Err(match err {
                        PoolError::PoolFull { free_bytes, .. } => {
                            self.pool_full(len, free_bytes >= piece)
                        }
                        err => err.into(),
                    });
                }
            }
            at += piece;
        }
        Ok(extents)
    }

    /// Returns the error for a plug of `wanted_bytes`. `is_withheld` is true if enough chunks are
    /// free, but the pool does not lend them.
    fn pool_full(&self, wanted_bytes: u64, is_withheld: bool) -> BackingError {
        let info = self.pool.info();
        let available_bytes = info.lendable_bytes;
        match info.lends_promised() && is_withheld {
            true => BackingError::Storage { wanted_bytes, available_bytes },
            false => BackingError::PoolFull { wanted_bytes, available_bytes },
        }
    }

    /// Maps `extents` next to each other at `offset`. On an error, extents that may still be mapped
    /// are in the ledger, and extents that are not mapped remain in `extents`.
    fn map(
        &mut self,
        offset: u64,
        len: u64,
        extents: &mut Vec<Range<u64>>,
    ) -> Result<(), BackingError> {
        let (pool, reservation) = (&self.pool, &self.reservation);
        self.ledger.map(extents.len(), |segments| {
            let (mut at, mut mapped) = (offset, 0);
            let mut result = Ok(());
            for extent in extents.iter() {
                let len = extent.end - extent.start;
                result = reservation
                    .map_file(at, len, pool.file(), extent.start, Access::ReadWrite)
                    .map_err(|source| BackingError::Map { offset: at, len, source });
                if result.is_err() {
                    break;
                }
                at += len;
                mapped += 1;
            }
            if result.is_err() {
                match reservation.unmap(offset, len) {
                    Ok(()) => mapped = 0,
                    Err(err) => {
                        let pool = self.pool.info().uuid;
                        error!(
                            %pool,
                            offset,
                            len,
                            %err,
                            "Cannot unmap chunks of a failed plug; they stay lent"
                        )
                    }
                }
            }
            at = offset;
            for extent in extents.drain(..mapped) {
                let len = extent.end - extent.start;
                segments.set(at, len, Source::File { offset: extent.start });
                at += len;
            }
            result
        })
    }

    /// Unmaps what an earlier failed plug has left mapped in `offset..offset + len`.
    fn clear(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let before = self.ledger.segments().in_range(offset, len);
        if before.iter().all(|segment| segment.source == Source::Nothing) {
            return Ok(());
        }
        self.detach(offset, len)?;
        self.give_back(Vec::new());
        Ok(())
    }

    /// Moves up to `max_bytes` of plugged memory ([`super::spill`]), but at most
    /// [`STEP_BYTES`]. Returns the bytes that the pool got back: 0 if no memory can be moved. If
    /// pages cannot be copied, a later call tries again.
    pub(super) fn spill(&mut self, max_bytes: u64) -> Result<u64, SpillError> {
        // Memory that is being unplugged needs no move.
        let detached_bytes = self.detached.iter().map(|extent| extent.end - extent.start).sum();
        if detached_bytes > 0 {
            self.free_detached()?;
            return Ok(detached_bytes);
        }
        let Some(Segment { start: offset, len, source }) = self.next_to_spill(max_bytes) else {
            return Ok(0);
        };
        if let Some(spilled) = &self.spilled {
            spilled.check_dram()?;
        }
        let in_file = match source {
            Source::Copying { offset } => offset,
            Source::File { offset: in_file } => {
                let moved_bytes = self.move_to_file(offset, len, in_file)?;
                if moved_bytes > 0 {
                    self.free_detached()?;
                    return Ok(moved_bytes);
                }
                self.map_privately(offset, len, in_file)?;
                in_file
            }
            source => unreachable!("{source:?} is not memory of the pool"),
        };
        // Chunk by chunk, because a page that cannot be copied keeps only its own chunk.
        let mut result = Ok(());
        for at in (0..len).step_by(CHUNK_BYTES as usize) {
            let copied = self.copy(offset + at, in_file + at);
            result = result.and(copied);
        }
        let copied_bytes = self.detached.iter().map(|extent| extent.end - extent.start).sum();
        self.free_detached()?;
        if copied_bytes == 0 { result.map(|()| 0) } else { Ok(copied_bytes) }
    }

    /// Moves chunks to the zone's file, if it has one, and detaches them. Ends at the first chunk
    /// that cannot be moved. Returns the number of moved bytes.
    fn move_to_file(&mut self, offset: u64, len: u64, in_pool: u64) -> Result<u64, SpillError> {
        let Some(spilled) = &self.spilled else { return Ok(0) };
        let Some(file) = &spilled.file else { return Ok(0) };
        for at in (0..len).step_by(CHUNK_BYTES as usize) {
            let from = PoolChunk { file: self.pool.file(), offset: in_pool + at };
            if let Err(err) = file.take(&self.reservation, offset + at, from) {
                spilled.report_failure(&err);
                return Ok(at);
            }
            self.ledger.unmap(|segments| {
                segments.set(offset + at, CHUNK_BYTES, Source::SpillFile);
                Ok(())
            })?;
            spilled.add_to_file(CHUNK_BYTES);
            self.detached.push(in_pool + at..in_pool + at + CHUNK_BYTES);
        }
        Ok(len)
    }

    /// Copies the pages of a chunk that is mapped privately, and detaches the chunk.
    fn copy(&mut self, offset: u64, in_file: u64) -> Result<(), SpillError> {
        let len = CHUNK_BYTES;
        self.reservation.populate(offset, len).map_err(|source| SpillError::Copy {
            offset,
            len,
            source,
        })?;
        self.ledger.unmap(|segments| {
            segments.set(offset, len, Source::Copied { offset: in_file });
            Ok(())
        })?;
        self.detached.push(in_file..in_file + len);
        Ok(())
    }

    /// Returns the part of the zone to move next: the first chunks of the pool, because the guest
    /// unplugs the last ones. Chunks that could not be copied completely follow.
    fn next_to_spill(&self, max_bytes: u64) -> Option<Segment> {
        let spilled = self.spilled.as_ref()?;
        let segments = self.ledger.segments().in_range(0, self.reservation.len_bytes());
        let is_lent = |segment: &&Segment| matches!(segment.source, Source::File { .. });
        let is_copying = |segment: &&Segment| matches!(segment.source, Source::Copying { .. });
        let max_bytes = max_bytes.min(STEP_BYTES).min(spilled.unused_bytes());
        match segments.iter().find(is_lent).filter(|_| max_bytes >= CHUNK_BYTES) {
            Some(segment) => {
                let len = segment.len.min(max_bytes - max_bytes % CHUNK_BYTES);
                Some(Segment { len, ..*segment })
            }
            None => {
                let segment = segments.iter().find(is_copying)?;
                Some(Segment { len: segment.len.min(STEP_BYTES), ..*segment })
            }
        }
    }

    /// Replaces the shared mapping of a part by a private one with the same content. The budget of
    /// mappings never refuses this, because a guest could use it up.
    fn map_privately(&mut self, offset: u64, len: u64, in_file: u64) -> Result<(), BackingError> {
        let (pool, reservation) = (&self.pool, &self.reservation);
        self.ledger.unmap(|segments| {
            let access = Access::ReadWritePrivate;
            reservation.map_file(offset, len, pool.file(), in_file, access).map_err(|source| {
                let chunks = PoolChunk { file: pool.file(), offset: in_file };
                chunks.map_again(reservation, offset, len);
                BackingError::Map { offset, len, source }
            })?;
            segments.set(offset, len, Source::Copying { offset: in_file });
            Ok(())
        })?;
        if let Some(spilled) = &self.spilled {
            spilled.add(len);
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn offset_in_file(&self, offset: u64) -> u64 {
        match self.ledger.segments().in_range(offset, CHUNK_BYTES)[..] {
            [Segment { source: Source::File { offset }, .. }] => offset,
            ref other => panic!("{other:?}"),
        }
    }

    /// Returns chunks to the pool after a failed plug. Chunks that the pool refuses remain
    /// detached.
    fn give_back(&mut self, extents: Vec<Range<u64>>) {
        self.detached.extend(extents);
        if let Err(err) = self.free_detached() {
            let error = foreshore_types::chain(&err);
            let pool = self.pool.info().uuid;
            error!(%pool, error, "Cannot return chunks of a failed plug to the pool; they stay lent");
        }
    }
}

impl Backing for PmBacking {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        self.clear(offset, len)?;
        let mut extents = self.allocate(offset, len)?;
        let mapped = self.map(offset, len, &mut extents);
        match &mapped {
            // tmpfs uses huge pages only if mounted with huge=advise or huge=within_size.
            Ok(()) => self.reservation.advise_huge_pages(offset, len),
            Err(_) => self.give_back(extents),
        }
        mapped
    }

    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let reservation = &self.reservation;
        let before = self.ledger.segments().in_range(offset, len);
        self.ledger.unmap(|segments| {
            reservation.unmap(offset, len).map_err(|source| BackingError::Map {
                offset,
                len,
                source,
            })?;
            segments.set(offset, len, Source::Nothing);
            Ok(())
        })?;
        for Segment { start, len, source } in before {
            if let Source::File { offset } | Source::Copying { offset } = source {
                self.detached.push(offset..offset + len);
            }
            match (source, &self.spilled) {
                (Source::Copying { .. } | Source::Copied { .. }, Some(spilled)) => {
                    spilled.remove(len);
                }
                (Source::SpillFile, Some(spilled)) => spilled.remove_from_file(start, len),
                _ => {}
            }
        }
        Ok(())
    }

    fn free_detached(&mut self) -> Result<(), BackingError> {
        if !self.detached.is_empty() {
            self.pool.free_memory(&self.detached)?;
            self.detached.clear();
        }
        Ok(())
    }
}

impl Drop for PmBacking {
    /// Returns the chunks to the pool, because they would otherwise remain allocated until the pool
    /// is opened again.
    fn drop(&mut self) {
        let result =
            self.detach(0, self.reservation.len_bytes()).and_then(|()| self.free_detached());
        if let Err(err) = result {
            let error = foreshore_types::chain(&err);
            let pool = self.pool.info().uuid;
            error!(%pool, error, "Cannot return lent chunks; the pool frees them when it is opened");
        }
    }
}

/// The device of the zone and the thread that moves memory share a backing.
impl Backing for Arc<Mutex<PmBacking>> {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        self.lock().plug(offset, len)
    }

    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        self.lock().detach(offset, len)
    }

    fn free_detached(&mut self) -> Result<(), BackingError> {
        self.lock().free_detached()
    }
}

/// Largest power of two that divides `at` and exceeds neither `left` nor [`MAX_EXTENT_BYTES`].
fn largest_aligned(at: u64, left: u64) -> u64 {
    let aligned = if at == 0 { MAX_EXTENT_BYTES } else { 1 << at.trailing_zeros() };
    let fits = 1 << left.ilog2();
    aligned.min(fits).min(MAX_EXTENT_BYTES)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::resident::resident_bytes;
    use super::*;
    use crate::pool::fake::FakePool;
    use crate::pool::{LocalPool, VolumeFormat, VolumeOptions};

    const MIB: u64 = 1 << 20;

    fn backing(zone_chunks: u64, pool_chunks: u64) -> (PmBacking, Arc<FakePool>, Arc<Reservation>) {
        let pool = Arc::new(FakePool::new(pool_chunks));
        let reservation = Arc::new(Reservation::new(zone_chunks * CHUNK_BYTES, 1 << 30).unwrap());
        let budget = Arc::new(MappingBudget::new(1000));
        let dyn_pool: Arc<dyn PmPool> = pool.clone();
        (PmBacking::new(dyn_pool, Arc::clone(&reservation), budget, None), pool, reservation)
    }

    fn fill(reservation: &Reservation, offset: u64, len: u64) {
        assert!(offset + len <= reservation.len_bytes());
        // SAFETY: the range is in the reservation, and the test has plugged it.
        unsafe {
            std::ptr::write_bytes((reservation.addr() + offset) as *mut u8, 0x5a, len as usize)
        };
    }

    #[test]
    fn run_in_one_extent_is_one_mapping() {
        let (mut backing, _pool, _reservation) = backing(64, 64);
        backing.plug(0, 64 * CHUNK_BYTES).unwrap();
        assert_eq!(backing.ledger.segments().count(), 1);
    }

    #[test]
    fn unplugged_chunks_are_removed_from_process_and_file() {
        let (mut backing, pool, reservation) = backing(16, 64);
        let range = (reservation.addr(), reservation.len_bytes());
        let blocks = || pool.blocks();
        backing.plug(0, 16 * CHUNK_BYTES).unwrap();
        fill(&reservation, 0, 16 * CHUNK_BYTES);
        assert_eq!(resident_bytes(&[[range]]).unwrap(), [16 * CHUNK_BYTES]);
        assert_eq!(blocks(), 16 * CHUNK_BYTES);
        // Detaches a part of an extent.
        backing.detach(3 * CHUNK_BYTES, 4 * CHUNK_BYTES).unwrap();
        assert_eq!(resident_bytes(&[[range]]).unwrap(), [12 * CHUNK_BYTES]);
        assert_eq!(pool.info().memory_bytes, 16 * CHUNK_BYTES);
        backing.free_detached().unwrap();
        assert_eq!(pool.info().memory_bytes, 12 * CHUNK_BYTES);
        assert_eq!(blocks(), 12 * CHUNK_BYTES);
        drop(backing);
        assert_eq!((pool.info().memory_bytes, blocks()), (0, 0));
        assert_eq!(resident_bytes(&[[range]]).unwrap(), [0]);
    }

    #[test]
    fn pool_on_tmpfs_frees_blocks_and_lends_zeroed_memory() {
        let Ok(folder) = tempfile::TempDir::new_in("/dev/shm") else { return };
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 64 * MIB, 0).unwrap());
        let pool = LocalPool::open(&path, None).unwrap();
        let blocks = || std::fs::metadata(&path).unwrap().blocks() * 512;
        let initial_blocks = blocks();
        let reservation = Arc::new(Reservation::new(32 * MIB, 1 << 30).unwrap());
        let range = (reservation.addr(), reservation.len_bytes());
        let dyn_pool: Arc<dyn PmPool> = pool.clone();
        let budget = Arc::new(MappingBudget::new(1000));
        let mut backing = PmBacking::new(dyn_pool, Arc::clone(&reservation), budget, None);
        for _ in 0..2 {
            backing.plug(0, 32 * MIB).unwrap();
            for offset in (0..32 * MIB).step_by(4096) {
                // SAFETY: the range is in the reservation, and it is plugged.
                let byte =
                    unsafe { std::ptr::read_volatile((reservation.addr() + offset) as *const u8) };
                assert_eq!(byte, 0, "at {offset:#x}");
            }
            fill(&reservation, 0, 32 * MIB);
            assert_eq!(resident_bytes(&[[range]]).unwrap(), [32 * MIB]);
            assert!(blocks() >= initial_blocks + 32 * MIB);
            // Detaches six chunks in the middle, and then the rest in one call.
            backing.detach(6 * MIB, 12 * MIB).unwrap();
            backing.free_detached().unwrap();
            assert_eq!(
                (pool.info().memory_bytes, pool.info().lendable_bytes),
                (20 * MIB, 40 * MIB)
            );
            backing.detach(0, 6 * MIB).unwrap();
            backing.detach(18 * MIB, 14 * MIB).unwrap();
            backing.free_detached().unwrap();
            assert_eq!(resident_bytes(&[[range]]).unwrap(), [0]);
            assert_eq!(pool.info().memory_bytes, 0);
            pool.pool().scrub_all().unwrap();
            assert_eq!(blocks(), initial_blocks);
        }
    }

    #[test]
    fn plug_beyond_the_pool_takes_nothing_and_reports_available_bytes() {
        let (mut backing, pool, _reservation) = backing(16, 6);
        let err = backing.plug(0, 8 * CHUNK_BYTES).unwrap_err();
        assert!(matches!(
            err,
            BackingError::PoolFull { wanted_bytes, available_bytes }
                if wanted_bytes == 8 * CHUNK_BYTES && available_bytes == 6 * CHUNK_BYTES
        ));
        assert_eq!(pool.info().memory_bytes, 0);
        backing.plug(0, 6 * CHUNK_BYTES).unwrap();
    }

    #[test]
    fn plug_of_space_withheld_for_volumes_has_its_own_reason() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 64 * MIB, 0).unwrap());
        let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
        let thick = VolumeOptions::thick(40 * MIB, VolumeFormat::Btt);
        pool.create_volume("thin", VolumeOptions { thin: true, ..thick }).unwrap();
        pool.lend_promised(Some(20 * MIB));
        pool.set_borrowable_bytes(40 * MIB);
        let most = pool.info().lendable_bytes;
        assert!(most + 20 * MIB == pool.info().free_bytes, "{:?}", pool.info());
        let reservation = Arc::new(Reservation::new(128 * MIB, 1 << 30).unwrap());
        let budget = Arc::new(MappingBudget::new(1000));
        let mut backing = PmBacking::new(Arc::clone(&pool), reservation, budget, None);
        let is_lowered = |bytes: u64| bytes == most;
        let err = backing.plug(0, most + 2 * MIB).unwrap_err();
        assert!(
            matches!(err, BackingError::Storage { available_bytes, .. } if is_lowered(available_bytes)),
            "{err}"
        );
        let err = backing.plug(0, 64 * MIB).unwrap_err();
        assert!(
            matches!(err, BackingError::PoolFull { available_bytes, .. } if is_lowered(available_bytes)),
            "{err}"
        );
        backing.plug(0, most).unwrap();
    }

    #[test]
    fn plug_that_fails_halfway_returns_all_chunks() {
        let (mut backing, pool, reservation) = backing(16, 64);
        // Two extents. The first is mapped, mapping the second fails, and unmapping succeeds.
        reservation.script([true, false, true]);
        let err = backing.plug(2 * MIB, 6 * MIB).unwrap_err();
        assert!(matches!(err, BackingError::Map { offset, .. } if offset == 4 * MIB), "{err}");
        assert_eq!(pool.info().memory_bytes, 0);
        assert_eq!(backing.ledger.segments().count(), 1);
        backing.plug(2 * MIB, 6 * MIB).unwrap();
    }

    #[test]
    fn chunks_that_may_still_be_mapped_are_not_returned() {
        let (mut backing, pool, reservation) = backing(16, 64);
        reservation.script([true, false, false]);
        backing.plug(2 * MIB, 6 * MIB).unwrap_err();
        // The extent that was never mapped was returned to the pool. The other one was not.
        assert_eq!(pool.info().memory_bytes, 2 * MIB);
        fill(&reservation, 2 * MIB, 2 * MIB);
        backing.free_detached().unwrap();
        assert_eq!(pool.info().memory_bytes, 2 * MIB);
        // If a range cannot be unmapped, plugging it fails.
        reservation.script([false]);
        backing.plug(2 * MIB, 6 * MIB).unwrap_err();
        assert_eq!(pool.info().memory_bytes, 2 * MIB);
        backing.plug(2 * MIB, 6 * MIB).unwrap();
        assert_eq!(pool.info().memory_bytes, 6 * MIB);
        // SAFETY: the range is in the reservation, and it is plugged.
        let byte = unsafe { std::ptr::read_volatile((reservation.addr() + 2 * MIB) as *const u8) };
        assert_eq!(byte, 0);
        reservation.script([true, false, false]);
        backing.plug(10 * MIB, 6 * MIB).unwrap_err();
        assert_eq!(pool.info().memory_bytes, 8 * MIB);
        drop(backing);
        assert_eq!((pool.info().memory_bytes, pool.dirty_free_bytes()), (0, 0));
    }

    #[test]
    fn extents_are_as_large_as_their_place_allows() {
        assert_eq!(largest_aligned(0, 128 * MIB), 128 * MIB);
        assert_eq!(largest_aligned(0, 8192 * MIB), 2048 * MIB);
        assert_eq!(largest_aligned(2 * MIB, 128 * MIB), 2 * MIB);
        assert_eq!(largest_aligned(128 * MIB, 130 * MIB), 128 * MIB);
        assert_eq!(largest_aligned(1024 * MIB, 3 * MIB), 2 * MIB);
    }
}
