//! Test media with holes, like a thin volume of a pool.
//!
//! The wrapped media contains the bytes, followed by a table with a word for each chunk. A chunk is
//! a hole while its word is zero. The word becomes durable before the chunk is used. Therefore, a
//! crash image of the wrapped media also determines its holes.

use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Durability, Media, MediaError, Pending, assert_inside, wait_for_reads};

/// Word of another owner in a released chunk.
const REUSED: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Media with holes. Unless it is strict, a store into a hole allocates space.
pub(crate) struct ThinMedia<M> {
    media: M,
    len_bytes: u64,
    chunk_bytes: u64,
    /// True for each chunk that has space.
    chunks: Box<[AtomicBool]>,
    /// Number of chunks that can still get space. Locked during allocations.
    available_chunks: Mutex<u64>,
    /// Panics at a store into a hole.
    is_strict: bool,
    /// Stores data of another owner in released chunks.
    reuses_chunks: bool,
    accesses: Mutex<Accesses>,
    /// Number of calls of [`Media::provision`].
    provisions: AtomicU64,
}

/// Ranges that were accessed, in order.
#[derive(Debug, Default)]
pub(crate) struct Accesses {
    pub(crate) read: Vec<Range<u64>>,
    pub(crate) persisted: Vec<Range<u64>>,
}

impl<M: Media> ThinMedia<M> {
    /// Returns the size that the wrapped media needs.
    pub(crate) fn wrapped_bytes(len_bytes: u64, chunk_bytes: u64) -> u64 {
        len_bytes + len_bytes.div_ceil(chunk_bytes) * 8
    }

    /// Opens media of [`ThinMedia::wrapped_bytes`]. Zeroed media has only holes. Like the tables of
    /// a pool, the table is persisted, because a process that was killed may have stored it.
    pub(crate) fn new(media: M, len_bytes: u64, chunk_bytes: u64) -> Self {
        let chunks = len_bytes.div_ceil(chunk_bytes);
        let thin = Self {
            media,
            len_bytes,
            chunk_bytes,
            chunks: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            available_chunks: Mutex::new(u64::MAX),
            is_strict: false,
            reuses_chunks: false,
            accesses: Mutex::default(),
            provisions: AtomicU64::new(0),
        };
        let mut table = thin.table_at(0)..thin.table_at(chunks);
        thin.media.persist_range(table.clone()).unwrap();
        while let Some(data) = thin.media.next_data(table.clone()).unwrap() {
            for at in (data.start / 8 * 8..data.end).step_by(8) {
                let has_space = thin.media.load_word(at).unwrap() != 0;
                thin.chunks[((at - len_bytes) / 8) as usize].store(has_space, Ordering::Relaxed);
            }
            table.start = data.end;
        }
        thin
    }

    /// Makes a store into a hole panic, because the caller should have provisioned the hole.
    pub(crate) fn strict(self) -> Self {
        Self { is_strict: true, ..self }
    }

    /// Makes released chunks contain data of another owner, durably.
    pub(crate) fn with_reuse(self) -> Self {
        Self { reuses_chunks: true, ..self }
    }

    /// Limits the number of chunks that can still get space.
    pub(crate) fn set_available_chunks(&self, chunks: u64) {
        *self.available() = chunks;
    }

    /// Returns the chunks that have space.
    pub(crate) fn allocated(&self) -> Vec<u64> {
        (0..self.chunks.len() as u64).filter(|chunk| self.has_space(*chunk)).collect()
    }

    /// Returns the number of chunks without space in a range.
    pub(crate) fn holes_in(&self, range: Range<u64>) -> usize {
        self.chunks_of(&range).filter(|chunk| !self.has_space(*chunk)).count()
    }

    pub(crate) fn take_accesses(&self) -> Accesses {
        std::mem::take(&mut self.accesses.lock().unwrap())
    }

    /// Returns the number of calls of [`Media::provision`].
    pub(crate) fn provisions(&self) -> u64 {
        self.provisions.load(Ordering::Relaxed)
    }

    fn available(&self) -> MutexGuard<'_, u64> {
        self.available_chunks.lock().unwrap()
    }

    /// Returns the offset of a chunk's word in the table.
    fn table_at(&self, chunk: u64) -> u64 {
        self.len_bytes + chunk * 8
    }

    fn chunks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.chunk_bytes..range.end.div_ceil(self.chunk_bytes)
    }

    fn has_space(&self, chunk: u64) -> bool {
        self.chunks[chunk as usize].load(Ordering::Acquire)
    }

    /// Erases what a released chunk or a crash left in holes, because new space reads as zeros.
    fn erase(&self, holes: &[u64]) -> Result<(), MediaError> {
        for chunk in holes {
            let range =
                chunk * self.chunk_bytes..((chunk + 1) * self.chunk_bytes).min(self.len_bytes);
            // Zeros may be visible but not durable after a kill.
            if self.reuses_chunks || self.media.next_data(range.clone())?.is_some() {
                self.media.store(range.start, &vec![0; (range.end - range.start) as usize])?;
                self.media.persist_range(range)?;
            }
        }
        Ok(())
    }

    /// Turns a chunk into a hole unless it is still being read. Its space then contains data of
    /// another owner. Returns true if it is a hole.
    fn release_chunk(&self, unit: &Range<u64>, is_read: &dyn Fn(&Range<u64>) -> bool) -> bool {
        let chunk = unit.start / self.chunk_bytes;
        let whole = chunk * self.chunk_bytes..((chunk + 1) * self.chunk_bytes);
        assert_eq!(*unit, whole, "a unit is a chunk");
        let mut available = self.available();
        if !self.chunks[chunk as usize].swap(false, Ordering::SeqCst) {
            return true;
        }
        if !wait_for_reads(|| is_read(unit)) {
            self.chunks[chunk as usize].store(true, Ordering::SeqCst);
            return false;
        }
        let word = self.table_at(chunk);
        self.media.store_word(word, 0).unwrap();
        self.media.persist_range(word..word + 8).unwrap();
        if self.reuses_chunks {
            for at in unit.clone().step_by(512) {
                self.media.store_word(at, REUSED).unwrap();
            }
            self.media.persist_range(unit.clone()).unwrap();
        }
        *available = available.saturating_add(1);
        true
    }

    /// Allocates space for all holes of a range, or for none of them.
    fn allocate(&self, range: &Range<u64>) -> Result<(), MediaError> {
        let mut available = self.available();
        let holes: Vec<u64> =
            self.chunks_of(range).filter(|chunk| !self.has_space(*chunk)).collect();
        let Some(left) = available.checked_sub(holes.len() as u64) else {
            return Err(MediaError::Full {
                needed_bytes: holes.len() as u64 * self.chunk_bytes,
                available_bytes: *available * self.chunk_bytes,
            });
        };
        if holes.is_empty() {
            return Ok(());
        }
        *available = left;
        self.erase(&holes)?;
        holes.iter().try_for_each(|chunk| self.media.store_word(self.table_at(*chunk), 1))?;
        let words: Vec<_> =
            holes.iter().map(|chunk| self.table_at(*chunk)..self.table_at(chunk + 1)).collect();
        self.media.persist(&words)?;
        holes.iter().for_each(|chunk| self.chunks[*chunk as usize].store(true, Ordering::Release));
        Ok(())
    }

    fn prepare_store(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediaError> {
        assert_inside(offset_bytes, length_bytes, self.len_bytes);
        let range = offset_bytes..offset_bytes + length_bytes;
        if self.is_strict {
            let mut chunks = self.chunks_of(&range);
            assert!(chunks.all(|chunk| self.has_space(chunk)), "store into a hole: {range:#x?}");
            return Ok(());
        }
        self.allocate(&range)
    }

    fn record_read(&self, offset_bytes: u64, length_bytes: u64) {
        let range = offset_bytes..offset_bytes + length_bytes;
        self.accesses.lock().unwrap().read.push(range);
    }

    fn record_persist(&self, ranges: &[Range<u64>]) {
        self.accesses.lock().unwrap().persisted.extend_from_slice(ranges);
    }
}

impl<M: Media> Media for ThinMedia<M> {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn durability(&self) -> Durability {
        self.media.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, into.len() as u64, self.len_bytes);
        self.record_read(offset_bytes, into.len() as u64);
        let range = offset_bytes..offset_bytes + into.len() as u64;
        let holes = self.chunks_of(&range).filter(|chunk| !self.has_space(*chunk));
        let holes: Vec<u64> = holes.collect();
        self.media.read(offset_bytes, into)?;
        for chunk in holes {
            // A hole may contain bytes of another owner, or bytes that were stored before a crash.
            let start = range.start.max(chunk * self.chunk_bytes) - offset_bytes;
            let end = range.end.min((chunk + 1) * self.chunk_bytes) - offset_bytes;
            into[start as usize..end as usize].fill(0);
        }
        Ok(())
    }

    /// All bytes of a chunk with space count as data, as on PM.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        let mut chunks = self.chunks_of(&range);
        let Some(first) = chunks.find(|chunk| self.has_space(*chunk)) else { return Ok(None) };
        let end = chunks.find(|chunk| !self.has_space(*chunk)).unwrap_or(chunks.end);
        let start = range.start.max(first * self.chunk_bytes);
        Ok(Some(start..range.end.min(end * self.chunk_bytes)))
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        assert_inside(offset_bytes, 8, self.len_bytes);
        self.record_read(offset_bytes, 8);
        match self.has_space(offset_bytes / self.chunk_bytes) {
            true => self.media.load_word(offset_bytes),
            false => Ok(0),
        }
    }

    fn provision(&self, range: Range<u64>) -> Result<(), MediaError> {
        self.provisions.fetch_add(1, Ordering::Relaxed);
        self.allocate(&range)
    }

    fn release_unit_bytes(&self) -> Option<u64> {
        Some(self.chunk_bytes)
    }

    fn release(
        &self,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        Ok(units.iter().filter(|unit| !self.release_chunk(unit, is_read)).cloned().collect())
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.prepare_store(offset_bytes, bytes.len() as u64)?;
        self.media.store(offset_bytes, bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.prepare_store(offset_bytes, 8)?;
        self.media.store_word(offset_bytes, word)
    }

    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.prepare_store(offset_bytes, bytes.len() as u64)?;
        self.media.store_bulk(offset_bytes, bytes, pending)
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        self.record_persist(slice::from_ref(&range));
        self.media.begin_persist(range, pending)
    }

    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        self.media.end_persist(pending)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.record_persist(ranges);
        self.media.persist(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::MemoryMedia;

    const LEN: u64 = 512;
    const CHUNK: u64 = 64;

    fn wrapped() -> MemoryMedia {
        MemoryMedia::new(ThinMedia::<MemoryMedia>::wrapped_bytes(LEN, CHUNK))
    }

    #[test]
    fn store_into_a_hole_gives_it_space_that_reads_as_zeros() {
        let media = wrapped();
        let thin = ThinMedia::new(&media, LEN, CHUNK);
        assert_eq!(thin.next_data(0..LEN).unwrap(), None);
        thin.store(120, &[7; 16]).unwrap();
        thin.store_word(448, 9).unwrap();
        assert_eq!((thin.allocated(), thin.provisions()), (vec![1, 2, 7], 0));
        assert_eq!(thin.next_data(0..LEN).unwrap(), Some(64..192));
        assert_eq!(thin.next_data(100..130).unwrap(), Some(100..130));
        assert_eq!(thin.next_data(192..LEN).unwrap(), Some(448..LEN));
        assert_eq!([0..64, 0..65, 0..LEN, 64..190].map(|range| thin.holes_in(range)), [1, 1, 5, 0]);
        let mut bytes = [0xee; LEN as usize];
        thin.read(0, &mut bytes).unwrap();
        let nonzero = |range: Range<usize>| bytes[range].iter().filter(|byte| **byte != 0).count();
        assert_eq!((nonzero(120..136), nonzero(448..456), nonzero(0..512)), (16, 1, 17));
        // The table is part of the wrapped media.
        assert_eq!(ThinMedia::new(&media, LEN, CHUNK).allocated(), [1, 2, 7]);
    }

    #[test]
    fn hole_of_a_crash_image_reads_as_zeros() {
        let media = wrapped();
        media.store_word(64, 5).unwrap();
        let thin = ThinMedia::new(&media, LEN, CHUNK);
        let mut bytes = [0xee; 16];
        thin.read(60, &mut bytes).unwrap();
        assert_eq!((bytes, thin.load_word(64).unwrap()), ([0; 16], 0));
    }

    #[test]
    fn media_without_space_refuses_stores_into_holes_and_no_others() {
        let thin = ThinMedia::new(wrapped(), LEN, CHUNK);
        thin.set_available_chunks(2);
        let result = thin.provision(0..3 * CHUNK);
        assert!(matches!(
            result,
            Err(MediaError::Full { needed_bytes: 192, available_bytes: 128 })
        ));
        assert_eq!(thin.allocated(), [0; 0]);
        thin.provision(CHUNK..3 * CHUNK).unwrap();
        assert!(matches!(thin.store_word(0, 1), Err(MediaError::Full { .. })));
        thin.store_word(CHUNK, 1).unwrap();
        thin.provision(CHUNK..3 * CHUNK).unwrap();
        assert_eq!(thin.provisions(), 3);
    }

    #[test]
    fn released_chunk_is_a_hole_that_gets_zeroed_space_again() {
        let media = wrapped();
        let thin = ThinMedia::new(&media, LEN, CHUNK).with_reuse();
        thin.store(CHUNK, &[7; 2 * CHUNK as usize]).unwrap();
        let unit = CHUNK..2 * CHUNK;
        let release = |is_read| thin.release(slice::from_ref(&unit), &|_| is_read).unwrap();
        assert_eq!((release(true), thin.allocated()), (vec![unit.clone()], vec![1, 2]));
        assert_eq!((release(false), thin.allocated()), (vec![], vec![2]));
        assert_eq!((thin.load_word(CHUNK).unwrap(), media.load_word(CHUNK).unwrap()), (0, REUSED));
        assert_eq!(ThinMedia::new(&media, LEN, CHUNK).allocated(), [2]);
        thin.provision(unit).unwrap();
        assert_eq!([CHUNK, 2 * CHUNK].map(|at| thin.load_word(at).unwrap() == 0), [true, false]);
    }

    #[test]
    fn accesses_are_recorded() {
        let thin = ThinMedia::new(wrapped(), LEN, CHUNK);
        thin.load_word(8).unwrap();
        thin.read(3, &mut [0; 4]).unwrap();
        thin.persist_range(0..8).unwrap();
        let mut pending = Pending::default();
        thin.store_bulk(64, &[1; 8], &mut pending).unwrap();
        thin.begin_persist(64..72, &mut pending).unwrap();
        thin.end_persist(&pending).unwrap();
        let accesses = thin.take_accesses();
        assert_eq!((accesses.read, accesses.persisted), (vec![8..16, 3..7], vec![0..8, 64..72]));
        assert_eq!(thin.take_accesses().read, []);
    }

    #[test]
    #[should_panic(expected = "store into a hole: 0x0..0x8")]
    fn strict_media_panics_at_a_store_that_was_not_provisioned() {
        let thin = ThinMedia::new(wrapped(), LEN, CHUNK).strict();
        thin.provision(CHUNK..2 * CHUNK).unwrap();
        thin.store_word(CHUNK, 1).unwrap();
        let _ = thin.store_word(0, 1);
    }
}
