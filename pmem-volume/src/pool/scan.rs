//! One pass over a pool's tables: who owns what, and what is not as it should be. It changes
//! nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::findings::{Finding, Findings};
use super::format::chunk::{ChunkId, Run, push, runs};
use super::format::layout::VolumeRecordBytes;
use super::format::mirrored::{self, Copies};
use super::format::superblock::Superblock;
use super::format::table::{BadWord, ChunkTable, Owner, Slot};
use super::format::volume_record::VolumeRecord;
use crate::media::{Media, MediaError};

/// A live volume and its chunks. What a record says is no reason to reserve memory: only chunks
/// that are there are listed.
#[derive(Debug)]
pub(crate) struct VolumeEntry {
    pub(crate) record: VolumeRecord,
    /// Logical index and chunk, by index.
    pub(crate) chunks: Vec<(u32, ChunkId)>,
}

impl VolumeEntry {
    /// Chunks that the volume has.
    pub(crate) fn allocated(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Chunks that the volume has, in its order.
    pub(crate) fn chunk_ids(&self) -> impl Iterator<Item = ChunkId> {
        self.chunks.iter().map(|(_, chunk)| *chunk)
    }
}

/// What the tables say.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) findings: Vec<Finding>,
    /// The same, while it goes on.
    found: Findings,
    pub(crate) volumes: BTreeMap<Slot, VolumeEntry>,
    pub(crate) free: Vec<Run>,
    /// Lent. If nobody has the pool open: to be erased, then free.
    pub(crate) lent: Vec<Run>,
    /// Unscrubbed or left over: to be erased, then free.
    pub(crate) to_scrub: Vec<Run>,
    pub(crate) metadata_chunks: u32,
    pub(crate) retired_chunks: u32,
    /// Copies of volume records to be written again from the other one.
    pub(crate) to_heal: Vec<(Slot, usize)>,
    /// How often each chunk was used.
    pub(crate) wear: Vec<u32>,
    /// Wear words to be started anew.
    pub(crate) bad_wear: Vec<Run>,
    /// Parts of volumes that were split, by the place of the first chunk in the other volume:
    /// where that ends, and whose it is.
    parts: BTreeMap<(Slot, u32), (u32, Slot)>,
}

/// Chunks by what their owner words say, in the order of the table.
#[derive(Default)]
struct Found {
    free: Vec<Run>,
    lent: Vec<ChunkId>,
    unscrubbed: Vec<ChunkId>,
    leftover: Vec<ChunkId>,
}

/// Reads the volume tables and the chunk table. The log must be empty or replayed.
pub(crate) fn scan(media: &dyn Media, superblock: &Superblock) -> Result<Scan, MediaError> {
    let mut scan = Scan::default();
    // Slots whose record cannot be believed: their chunks are nobody's to take.
    let unknown = scan.read_volumes(media, superblock)?;
    scan.read_chunks(media, superblock, &unknown)?;
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
        let mut unknown = BTreeSet::new();
        let mut names = BTreeSet::new();
        for slot in superblock.slots() {
            let copies =
                mirrored::read::<VolumeRecordBytes>(media, superblock.volume_record_offsets(slot))?;
            let bytes = match copies {
                Copies::Agree(bytes) => bytes,
                Copies::Stale { current, stale: copy } => {
                    self.found.add(Finding::VolumeRecordStale { slot: slot.0, copy });
                    self.to_heal.push((slot, copy));
                    current
                }
                Copies::Damaged { current, damaged: copy } => {
                    self.found.add(Finding::VolumeRecordCopy { slot: slot.0, copy });
                    self.to_heal.push((slot, copy));
                    current
                }
                Copies::Lost => {
                    self.found.add(Finding::VolumeRecordLost { slot: slot.0 });
                    unknown.insert(slot);
                    continue;
                }
            };
            let record = match VolumeRecord::parse(slot, &bytes) {
                Ok(None) => continue,
                Ok(Some(record)) if record.chunks <= superblock.chunks || record.thin => record,
                Ok(Some(record)) => {
                    let reason =
                        format!("{} chunks in a pool of {}", record.chunks, superblock.chunks);
                    self.found.add(Finding::VolumeRecordInvalid { slot: slot.0, reason });
                    unknown.insert(slot);
                    continue;
                }
                Err(error) => {
                    self.found.add(Finding::VolumeRecordInvalid {
                        slot: slot.0,
                        reason: error.to_string(),
                    });
                    unknown.insert(slot);
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
        Ok(unknown)
    }

    fn read_chunks(
        &mut self,
        media: &dyn Media,
        superblock: &Superblock,
        unknown: &BTreeSet<Slot>,
    ) -> Result<(), MediaError> {
        let table = ChunkTable::new(superblock);
        let mut found = Found::default();
        self.wear.reserve_exact(table.entries() as usize);
        for piece in table.pieces() {
            for (chunk, entry) in piece.ids().zip(table.read_entries(media, piece)?) {
                self.sort_wear(chunk, entry.wear);
                self.sort_owner(chunk, entry.owner, superblock, unknown, &mut found);
            }
        }
        let Found { free, lent, unscrubbed, leftover } = found;
        let count = |chunks: &Vec<ChunkId>| chunks.len() as u32;
        let counted = [
            Finding::StillLent { chunks: count(&lent) },
            Finding::Unscrubbed { chunks: count(&unscrubbed) },
            Finding::Leftover { chunks: count(&leftover) },
        ];
        counted.into_iter().filter(|f| !f.is_about_nothing()).for_each(|f| self.found.add(f));
        self.lent = runs(lent);
        let mut to_scrub = [unscrubbed, leftover].concat();
        to_scrub.sort_unstable();
        self.to_scrub = runs(to_scrub);
        self.free = free;
        Ok(())
    }

    fn sort_wear(&mut self, chunk: ChunkId, wear: Result<u32, BadWord>) {
        self.wear.push(wear.unwrap_or(0));
        if let Err(bad) = wear {
            push(&mut self.bad_wear, chunk);
            self.found.add(Finding::WearWord { chunk, word: bad.0 });
        }
    }

    fn sort_owner(
        &mut self,
        chunk: ChunkId,
        owner: Result<Owner, BadWord>,
        superblock: &Superblock,
        unknown: &BTreeSet<Slot>,
        found: &mut Found,
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
            Owner::Free => push(&mut found.free, chunk),
            Owner::Memory => found.lent.push(chunk),
            Owner::Scrub => found.unscrubbed.push(chunk),
            Owner::Retired => self.retired_chunks += 1,
            // A table was moved and a crash came before the superblock named the new one, or after.
            Owner::Metadata => found.leftover.push(chunk),
            Owner::Volume { slot, .. } if unknown.contains(&slot) => {}
            // Nothing that this code does leaves such a word: it is no left-over, and may be
            // somebody's.
            Owner::Volume { slot, .. } if u32::from(slot.0) >= superblock.volume_slots => {
                let slots = superblock.volume_slots;
                self.found.add(Finding::SlotOutside { chunk, slot: slot.0, slots });
            }
            Owner::Volume { slot, index } => {
                if !self.claim(slot, index, chunk) {
                    found.leftover.push(chunk);
                }
            }
        }
    }

    /// Puts a chunk into its volume. False: there is no such volume, or it ends before this index;
    /// the operation that marked the chunk did not finish, or one that took it away did.
    fn claim(&mut self, slot: Slot, index: u32, chunk: ChunkId) -> bool {
        self.put(slot, index, chunk) || self.claim_for_part(slot, index, chunk)
    }

    fn put(&mut self, slot: Slot, index: u32, chunk: ChunkId) -> bool {
        let Some(volume) = self.volumes.get_mut(&slot) else { return false };
        let exists = index < volume.record.chunks;
        if exists {
            volume.chunks.push((index, chunk));
        }
        exists
    }

    /// A volume was split, and the chunk is still named as it was before.
    fn claim_for_part(&mut self, origin: Slot, index: u32, chunk: ChunkId) -> bool {
        let Some((start, (end, slot))) =
            self.parts.range((origin, 0)..=(origin, index)).next_back()
        else {
            return false;
        };
        let (start, end, slot) = (start.1, *end, *slot);
        index < end && self.put(slot, index - start, chunk)
    }

    /// Puts each volume's chunks in order, and finds indexes that two chunks have, or none.
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
            let missing = volume.record.chunks - volume.chunks.len() as u32;
            if missing > 0 && !volume.record.thin {
                // Sorted and each there once: the first that is not in its place has the gap before
                // it.
                let in_place =
                    |(place, (index, _)): &(usize, &(u32, ChunkId))| *place == *index as usize;
                let first_index =
                    volume.chunks.iter().enumerate().take_while(in_place).count() as u32;
                let chunks = volume.record.chunks;
                findings.add(Finding::IndexMissing { name: name(), missing, chunks, first_index });
            }
        }
    }
}

/// Makes the pool's own data durable as it is seen. What a process stored that was killed is seen,
/// and need not be durable: a copy written again from such a record, a word taken for *scrub*
/// because it reads so, or a transaction redone could outlive what it is based on when the power
/// goes.
pub(super) fn make_durable(media: &dyn Media, superblock: &Superblock) -> Result<(), MediaError> {
    media.persist(&superblock.regions())
}
