//! Read-only scan of a pool's tables. The read-only scan finds the owner of each chunk, and all
//! inconsistencies.

use std::collections::{BTreeMap, BTreeSet};

use super::findings::{Finding, Findings};
use super::format::chunk::{ChunkId, Run, push_chunk, runs};
use super::format::format_plan::btt_indexes;
use super::format::layout::VolumeRecordBytes;
use super::format::mirrored::{self, Copies};
use super::format::superblock::Superblock;
use super::format::table::{BadWord, ChunkTable, Entry, Owner, Slot, copy_of};
use super::format::volume_record::VolumeRecord;
use crate::media::{Media, MediaError};

/// Existing volume and its chunks. The list contains only existing chunks. The size in a record is
/// untrusted, so it must not determine how much memory is allocated.
#[derive(Debug)]
pub(crate) struct VolumeEntry {
    pub(crate) record: VolumeRecord,
    /// Logical index of each chunk, with the chunk, sorted by index.
    pub(crate) chunks: Vec<(u32, ChunkId)>,
}

impl VolumeEntry {
    /// Returns the number of the volume's chunks.
    pub(crate) fn allocated(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Returns the number of chunks that the volume was promised: its reserve, or the allocated
    /// chunks if they are more.
    pub(crate) fn promised(&self) -> u32 {
        self.promised_with(0)
    }

    /// Returns the result of [`Self::promised`] after `added` chunks are allocated to the volume.
    pub(crate) fn promised_with(&self, added: u32) -> u32 {
        self.record.reserve_chunks.max(self.allocated() + added)
    }

    /// Returns the chunks of the volume in logical order.
    pub(crate) fn chunk_ids(&self) -> impl Iterator<Item = ChunkId> {
        self.chunks.iter().map(|(_, chunk)| *chunk)
    }
}

/// Result of a scan.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) findings: Vec<Finding>,
    /// Findings while the scan is running.
    found: Findings,
    pub(crate) volumes: BTreeMap<Slot, VolumeEntry>,
    pub(crate) free: Vec<Run>,
    /// Lent chunks. If the pool is not in use, they must be erased and freed.
    pub(crate) lent: Vec<Run>,
    /// Unscrubbed and leftover chunks, which must be erased and freed.
    pub(crate) to_scrub: Vec<Run>,
    pub(crate) metadata_chunks: u32,
    pub(crate) retired_chunks: u32,
    /// Copies of volume records that must be rewritten from the other copy.
    pub(crate) copies_to_restore: Vec<(Slot, usize)>,
    /// Number of uses of each chunk.
    pub(crate) wear: Vec<u32>,
    /// Chunks with a damaged wear word. Their number of uses restarts at zero.
    pub(crate) bad_wear: Vec<Run>,
    /// Chunks whose wear word lacks a copy of their owner, because of a crash between the two
    /// words, or because a repair or an older program has stored only one of them.
    pub(crate) stale_copies: Vec<Run>,
    /// Parts of split volumes. The key contains the slot of the split volume and the index of the
    /// part's first chunk there. The value contains the end index in the split volume and the slot
    /// of the part.
    parts: BTreeMap<(Slot, u32), (u32, Slot)>,
    /// Sum of the chunks of thin parts whose BTT is not written. The parts of a split volume are
    /// together not larger than the pool.
    unformatted_chunks: u64,
}

/// Chunks grouped by the state of their owner words, in the order of the table.
#[derive(Default)]
struct ChunkLists {
    free: Vec<Run>,
    lent: Vec<ChunkId>,
    unscrubbed: Vec<ChunkId>,
    leftover: Vec<ChunkId>,
}

/// Reads the volume tables and the chunk table. The log must be empty or replayed.
pub(crate) fn scan(media: &dyn Media, superblock: &Superblock) -> Result<Scan, MediaError> {
    let mut scan = Scan::default();
    // Slots whose record is untrustworthy. Chunks with these slots must not be used.
    let invalid_slots = scan.read_volumes(media, superblock)?;
    scan.read_chunks(media, superblock, &invalid_slots)?;
    scan.sort_indexes();
    scan.findings = std::mem::take(&mut scan.found).into_list();
    Ok(scan)
}

impl Scan {
    fn read_volumes(
        &mut self,
        media: &dyn Media,
        superblock: &Superblock,
    ) -> Result<BTreeSet<Slot>, MediaError> {
        let mut invalid_slots = BTreeSet::new();
        let mut names = BTreeSet::new();
        for slot in superblock.slots() {
            let copies =
                mirrored::read::<VolumeRecordBytes>(media, superblock.volume_record_offsets(slot))?;
            let bytes = match copies {
                Copies::Agree(bytes) => bytes,
                Copies::Stale { current, stale: copy } => {
                    self.found.add(Finding::VolumeRecordStale { slot: slot.0, copy });
                    self.copies_to_restore.push((slot, copy));
                    current
                }
                Copies::Damaged { current, damaged: copy } => {
                    self.found.add(Finding::VolumeRecordCopy { slot: slot.0, copy });
                    self.copies_to_restore.push((slot, copy));
                    current
                }
                Copies::Lost => {
                    self.found.add(Finding::VolumeRecordLost { slot: slot.0 });
                    invalid_slots.insert(slot);
                    continue;
                }
            };
            let record = match VolumeRecord::parse(slot, &bytes) {
                Ok(None) => continue,
                Ok(Some(record)) => self.check_size(&record, superblock).map(|()| record),
                Err(error) => Err(error.to_string()),
            };
            let record = match record {
                Ok(record) => record,
                Err(reason) => {
                    self.found.add(Finding::VolumeRecordInvalid { slot: slot.0, reason });
                    invalid_slots.insert(slot);
                    continue;
                }
            };
            if !names.insert(record.name.clone()) {
                self.found.add(Finding::VolumeNameTwice { name: record.name.to_string() });
            }
            if let Some(part) = record.part {
                self.found.add(Finding::SplitUnfinished { name: record.name.to_string() });
                if part.origin != slot {
                    let end = part.index.saturating_add(record.chunks);
                    self.parts.insert((part.origin, part.index), (end, slot));
                }
            }
            self.volumes.insert(slot, VolumeEntry { record, chunks: Vec::new() });
        }
        Ok(invalid_slots)
    }

    /// Checks that the pool can have a volume with this record. Only a thin volume may be larger
    /// than the pool. The exception is a part whose BTT is not written, because finding its
    /// metadata takes time in proportion to its size.
    fn check_size(&mut self, record: &VolumeRecord, superblock: &Superblock) -> Result<(), String> {
        let is_unformatted = record.part.is_some_and(|part| part.is_unformatted);
        let chunks = match (record.thin, is_unformatted) {
            (false, _) => u64::from(record.chunks),
            (true, false) => return Ok(()),
            (true, true) => {
                self.unformatted_chunks += u64::from(record.chunks);
                self.unformatted_chunks
            }
        };
        if chunks <= u64::from(superblock.chunks) {
            return Ok(());
        }
        Err(format!("{chunks} chunks in a pool of {}", superblock.chunks))
    }

    fn read_chunks(
        &mut self,
        media: &dyn Media,
        superblock: &Superblock,
        invalid_slots: &BTreeSet<Slot>,
    ) -> Result<(), MediaError> {
        let table = ChunkTable::new(superblock);
        let mut found = ChunkLists::default();
        self.wear.reserve_exact(table.entries() as usize);
        for piece in table.pieces() {
            for (chunk, entry) in piece.ids().zip(table.read_entries(media, piece)?) {
                self.sort_wear(chunk, entry);
                self.sort_owner(chunk, entry.owner, superblock, invalid_slots, &mut found);
            }
        }
        let ChunkLists { free, lent, unscrubbed, leftover } = found;
        let count = |chunks: &Vec<ChunkId>| chunks.len() as u32;
        let counted = [
            Finding::StillLent { chunks: count(&lent) },
            Finding::Unscrubbed { chunks: count(&unscrubbed) },
            Finding::Leftover { chunks: count(&leftover) },
        ];
        counted.into_iter().filter(|f| !f.has_zero_count()).for_each(|f| self.found.add(f));
        self.lent = runs(lent);
        let mut to_scrub = [unscrubbed, leftover].concat();
        to_scrub.sort_unstable();
        self.to_scrub = runs(to_scrub);
        self.free = free;
        Ok(())
    }

    fn sort_wear(&mut self, chunk: ChunkId, Entry { owner, wear }: Entry) {
        self.wear.push(wear.map_or(0, |word| word.uses));
        match (owner, wear) {
            (_, Err(bad)) => {
                push_chunk(&mut self.bad_wear, chunk);
                self.found.add(Finding::WearWord { chunk, word: bad.0 });
            }
            (Ok(owner), Ok(wear)) if wear.owner != copy_of(owner) => {
                push_chunk(&mut self.stale_copies, chunk);
            }
            _ => {}
        }
    }

    fn sort_owner(
        &mut self,
        chunk: ChunkId,
        owner: Result<Owner, BadWord>,
        superblock: &Superblock,
        invalid_slots: &BTreeSet<Slot>,
        found: &mut ChunkLists,
    ) {
        let owner = match owner {
            Ok(owner) => owner,
            Err(bad) => {
                self.found.add(Finding::OwnerWord { chunk, word: bad.0 });
                return;
            }
        };
        if superblock.is_metadata(chunk) {
            self.metadata_chunks += 1;
            if owner != Owner::Metadata {
                self.found.add(Finding::MetadataTaken { chunk, marked: owner.to_string() });
            }
            return;
        }
        match owner {
            Owner::Free => push_chunk(&mut found.free, chunk),
            Owner::Memory => found.lent.push(chunk),
            Owner::Scrub => found.unscrubbed.push(chunk),
            Owner::Retired => self.retired_chunks += 1,
            // The chunk table was moved. A crash happened before or after the superblock with the
            // new table was written.
            Owner::Metadata => found.leftover.push(chunk),
            Owner::Volume { slot, .. } if invalid_slots.contains(&slot) => {}
            // Pool code never writes such a word. Therefore, it is not a leftover, and the chunk
            // may belong to a volume.
            Owner::Volume { slot, .. } if u32::from(slot.0) >= superblock.volume_slots => {
                let slots = superblock.volume_slots;
                self.found.add(Finding::SlotOutside { chunk, slot: slot.0, slots });
            }
            Owner::Volume { slot, index } => {
                if !self.assign_chunk(slot, index, chunk) {
                    found.leftover.push(chunk);
                }
            }
        }
    }

    /// Assigns a chunk to its volume. Returns false if the volume does not exist or ends before
    /// this index. In that case, the operation that marked the chunk is unfinished, or the
    /// operation that removed the chunk is finished.
    fn assign_chunk(&mut self, slot: Slot, index: u32, chunk: ChunkId) -> bool {
        self.add_chunk(slot, index, chunk) || self.assign_to_part(slot, index, chunk)
    }

    fn add_chunk(&mut self, slot: Slot, index: u32, chunk: ChunkId) -> bool {
        let Some(volume) = self.volumes.get_mut(&slot) else { return false };
        let exists = index < volume.record.chunks;
        if exists {
            volume.chunks.push((index, chunk));
        }
        exists
    }

    /// Assigns a chunk to a part of a split volume if its owner word still refers to the split
    /// volume.
    fn assign_to_part(&mut self, origin: Slot, index: u32, chunk: ChunkId) -> bool {
        self.in_part(origin, index).is_some_and(|(slot, index)| self.add_chunk(slot, index, chunk))
    }

    /// Returns the slot of the part that contains an index of a split volume, and the index in the
    /// part. Only parts of unfinished splits are found.
    pub(crate) fn in_part(&self, origin: Slot, index: u32) -> Option<(Slot, u32)> {
        let ((_, start), (end, slot)) =
            self.parts.range((origin, 0)..=(origin, index)).next_back()?;
        (index < *end).then_some((*slot, index - start))
    }

    /// Sorts each volume's chunks, and finds indexes that have two chunks or none.
    fn sort_indexes(&mut self) {
        for volume in self.volumes.values_mut() {
            let name = || volume.record.name.to_string();
            volume.chunks.sort_unstable();
            let findings = &mut self.found;
            volume.chunks.dedup_by(|second, first| {
                let twice = first.0 == second.0;
                if twice {
                    let index = first.0;
                    findings.add(Finding::IndexTwice {
                        name: name(),
                        index,
                        first: first.1,
                        second: second.1,
                    });
                }
                twice
            });
            if let Some(missing) = missing_metadata(volume) {
                findings.add(missing);
            }
            let missing = volume.record.chunks - volume.chunks.len() as u32;
            if missing > 0 && !volume.record.thin {
                // The indexes are sorted and unique. The first gap therefore precedes the first
                // index that differs from its position.
                let in_place = |(position, (index, _)): &(usize, &(u32, ChunkId))| {
                    *position == *index as usize
                };
                let first_index =
                    volume.chunks.iter().enumerate().take_while(in_place).count() as u32;
                let chunks = volume.record.chunks;
                findings.add(Finding::IndexMissing { name: name(), missing, chunks, first_index });
            }
        }
    }
}

/// Finds the chunks that the new BTT of a thin part lacks. A split adds them before it begins.
pub(in crate::pool) fn missing_metadata(volume: &VolumeEntry) -> Option<Finding> {
    let record = &volume.record;
    if !record.thin || record.part.is_none_or(|part| !part.is_unformatted) {
        return None;
    }
    let lacks = |index: &u32| volume.chunks.binary_search_by_key(index, |(at, _)| *at).is_err();
    let missing: Vec<u32> = btt_indexes(record).into_iter().filter(lacks).collect();
    let first_index = *missing.first()?;
    let (name, chunks) = (record.name.to_string(), record.chunks);
    Some(Finding::IndexMissing { name, missing: missing.len() as u32, chunks, first_index })
}

/// Makes the visible metadata durable. The stores of a killed process are visible but not
/// necessarily durable. Without this step, a power loss could undo such a store but keep a change
/// that is based on it, for example a copy rewritten from a record or a redone transaction.
pub(super) fn make_durable(media: &dyn Media, superblock: &Superblock) -> Result<(), MediaError> {
    media.persist(&superblock.regions())
}
