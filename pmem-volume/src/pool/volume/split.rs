//! Split of a volume into several volumes, each with its own name and a part of the chunks.
//!
//! An owner word contains a slot and an index. A large volume has more chunks than fit into one
//! transaction, so the transaction changes only the records. After the transaction, the original
//! volume is only as long as the first part. The record of each other part refers to the original
//! slot and to the index of the part's first chunk there. If a chunk still has its old owner word,
//! it belongs to the part that covers its index.
//!
//! The parts of a thin volume are thin, and its holes remain holes. Before the transaction, the
//! holes that the BTTs of the parts need get chunks.
//!
//! The owner words are changed after the transaction. Then the chunks of BTT parts are erased,
//! because a guest that maps such a part can read all bytes below the BTT. Finally, the new BTTs
//! are written. After a crash, the next open repeats these steps.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use foreshore_types::VolumeFormat;
use uuid::Uuid;

use super::{Search, Space, VolumeInfo, VolumeSize, volume_info};
use crate::btt::{self, Layout};
use crate::media::{Media, MediaError};
use crate::pool::alloc::memory::chunk_count;
use crate::pool::error::SplitError;
use crate::pool::format::chunk::{ChunkId, Run, runs};
use crate::pool::format::format_plan::btt_indexes;
use crate::pool::format::mirrored;
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{ChunkTable, Owner, Slot};
use crate::pool::format::volume_record::{Part, VolumeName, VolumeRecord};
use crate::pool::redo_log;
use crate::pool::scan::VolumeEntry;
use crate::pool::{Pool, PoolError, State, bytes, unix_now_s};
use crate::progress::{OnProgress, Progress, Task, ignore_progress};

/// Permission to discard the content of a BTT volume. A raw volume keeps its bytes, divided among
/// its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitContent {
    /// Refuses to split a volume that holds data.
    Refuse,
    /// Discards the content, so that all parts are empty.
    Discard,
}

impl<M: Media> Pool<M> {
    /// Splits a volume that is not open in this process into volumes with the given names and
    /// sizes. The parts receive the chunks of the volume in the given order.
    /// [`VolumeSize::Remaining`] means the remaining size. One part may keep the name of the
    /// volume. Raw volumes keep their bytes. Parts with a BTT are erased and start empty. After a
    /// crash, either the volume is unchanged or all parts exist.
    pub fn split_volume(
        &self,
        name: &str,
        parts: &[(String, VolumeSize)],
        content: SplitContent,
    ) -> Result<Vec<VolumeInfo>, PoolError> {
        self.split_volume_with(name, parts, content, &mut ignore_progress)
    }

    /// Splits a volume as [`Pool::split_volume`] does, and reports the progress of erasing to
    /// `progress`. During the erasing, other threads may use the pool, but not the parts.
    pub fn split_volume_with(
        &self,
        name: &str,
        parts: &[(String, VolumeSize)],
        content: SplitContent,
        progress: OnProgress<'_>,
    ) -> Result<Vec<VolumeInfo>, PoolError> {
        let mut state = self.lock_for_change()?;
        // Plan again after each unlock, because the state may have changed in the meantime.
        let SplitPlan { slot, records, holes } = loop {
            let plan = self.plan_split(&state, name, parts, content)?;
            match state.missing_clean(plan.holes.len() as u32) {
                0 => break plan,
                missing if missing > state.scrub.pending() => {
                    return Err(state.pool_full(bytes(plan.holes.len() as u32)));
                }
                missing => state = self.erase_some(state, missing)?,
            }
        };
        // The volume is still whole, so a crash only leaves it with fewer holes.
        self.add_chunks(&mut state, slot, &holes, Search::Best)?;
        let slots = self.split(&mut state, slot, records)?;
        drop(state);
        let erased = self.erase_parts(&slots, progress);
        let mut state = self.lock_state();
        let finished = erased.and_then(|()| self.finish_parts(&mut state, &slots));
        state.open_volumes.retain(|slot| !slots.contains(slot));
        finished.map(|()| slots.iter().map(|slot| volume_info(&state.volumes[slot])).collect())
    }

    /// Plans a split, or returns the reason for a refusal.
    fn plan_split(
        &self,
        state: &State,
        name: &str,
        parts: &[(String, VolumeSize)],
        content: SplitContent,
    ) -> Result<SplitPlan, PoolError> {
        let slot = state.require_closed_volume(name)?;
        let entry = &state.volumes[&slot];
        entry.check_usable()?;
        let split = |reason| PoolError::Split { name: name.to_owned(), reason };
        let sizes = sizes(parts, entry.record.size_bytes()).map_err(split)?;
        let chunks = check_sizes(parts, &sizes, entry.record.format).map_err(split)?;
        let mut records = self.plan_parts(state, slot, parts, &chunks)?;
        if entry.record.format == VolumeFormat::Btt {
            let extents = entry.extents();
            let size_bytes = entry.record.size_bytes();
            let space = Space::with_holes(self.media(), &extents, size_bytes);
            if content == SplitContent::Refuse && self.latch_failure(btt::holds_data(&space))? {
                return Err(PoolError::SplitHoldsData { name: name.to_owned() });
            }
            self.check_split_space(&chunks)?;
        }
        let is_hole = |index: &u32| entry.chunk_at(*index).is_none();
        let holes: Vec<_> = records.iter().flat_map(metadata_indexes).filter(is_hole).collect();
        state.check_promise(entry.promised(), entry.promised_with(holes.len() as u32))?;
        share_reserve(entry, &holes, &mut records);
        Ok(SplitPlan { slot, records, holes })
    }

    /// Returns the records of the parts. The first part keeps the slot of the volume.
    pub(in crate::pool) fn plan_parts(
        &self,
        state: &State,
        slot: Slot,
        parts: &[(String, VolumeSize)],
        chunks: &[u32],
    ) -> Result<Vec<VolumeRecord>, PoolError> {
        let old = &state.volumes[&slot].record;
        let is_unformatted = old.format == VolumeFormat::Btt;
        let mut free = self.superblock().slots().filter(|slot| !state.volumes.contains_key(slot));
        let (mut records, mut index) = (Vec::with_capacity(parts.len()), 0);
        for ((name, _), chunks) in parts.iter().zip(chunks) {
            let name: VolumeName = name.parse()?;
            if state.find_volume(name.as_str()).is_some_and(|found| found != slot) {
                return Err(PoolError::VolumeExists { name: name.to_string() });
            }
            let own = if index == 0 { Some(slot) } else { free.next() };
            let own =
                own.ok_or(PoolError::NoVolumeSlot { limit: self.superblock().volume_slots })?;
            let part = Part { origin: slot, index, is_unformatted };
            records.push(VolumeRecord {
                sequence: self.next_sequence(own)?,
                slot: own,
                name,
                uuid: Uuid::new_v4(),
                format: old.format,
                thin: old.thin,
                part: Some(part),
                chunks: *chunks,
                reserve_chunks: *chunks,
                created_unix_s: unix_now_s(),
            });
            index += chunks;
        }
        redo_log::check_capacity(&self.superblock(), records.len() as u64 * RECORD_WORDS)?;
        Ok(records)
    }

    /// 1. Write the records of all parts in one transaction. From here on, the parts exist.
    /// 2. Store the owner words of their chunks and persist them.
    ///
    /// Until the split is finished, the parts cannot be opened, changed or deleted.
    fn split(
        &self,
        state: &mut State,
        slot: Slot,
        records: Vec<VolumeRecord>,
    ) -> Result<Vec<Slot>, PoolError> {
        let words = self.latch(self.split_words(&records))?;
        self.latch(redo_log::commit(self.media(), &self.superblock(), &words))?;
        let old = state.remove_volume(slot);
        let slots: Vec<_> = records.iter().map(|record| record.slot).collect();
        let mut chunks = old.chunks.into_iter().peekable();
        for record in records {
            let first = first_index(&record);
            let is_own = |(index, _): &(u32, ChunkId)| *index < first + record.chunks;
            let own = std::iter::from_fn(|| chunks.next_if(is_own));
            let own = own.map(|(index, chunk)| (index - first, chunk)).collect();
            state.insert_volume(VolumeEntry { record, chunks: own });
        }
        self.latch(store_part_owners(self.media(), &self.superblock(), &state.volumes, &slots))?;
        state.open_volumes.extend(&slots);
        Ok(slots)
    }

    /// 3. Erase the chunks of parts with a BTT, durably. Erasing takes long, so the state is not
    ///    locked during this step.
    fn erase_parts(&self, slots: &[Slot], progress: OnProgress<'_>) -> Result<(), PoolError> {
        let runs = unformatted_runs(&self.lock_state().volumes, slots);
        let total_bytes = runs.iter().map(|run| run.len_bytes()).sum();
        let mut done_bytes = 0;
        for batch in batches(&runs) {
            progress(Progress { task: Task::Erase, done_bytes, total_bytes });
            self.latch(self.media().erase(&batch))?;
            done_bytes += batch.iter().map(|range| range.end - range.start).sum::<u64>();
        }
        if total_bytes > 0 {
            progress(Progress { task: Task::Erase, done_bytes, total_bytes });
        }
        Ok(())
    }

    /// 4. Write the BTTs, then the records.
    fn finish_parts(&self, state: &mut State, slots: &[Slot]) -> Result<(), PoolError> {
        self.latch(format_parts(self.media(), &state.volumes, slots))?;
        self.latch(finish_records(self.media(), &self.superblock(), &mut state.volumes, slots))
    }

    /// Returns the words that change in both copies of the records.
    pub(in crate::pool) fn split_words(
        &self,
        records: &[VolumeRecord],
    ) -> Result<Vec<(u64, u64)>, MediaError> {
        let mut words = Vec::new();
        for record in records {
            for offset in self.superblock().volume_record_offsets(record.slot) {
                words.extend(mirrored::changed_words(self.media(), offset, &record.to_bytes())?);
            }
        }
        Ok(words)
    }
}

/// Validated plan for a split.
struct SplitPlan {
    slot: Slot,
    records: Vec<VolumeRecord>,
    /// Holes of a thin volume that get chunks first, because the BTTs of the parts need them. The
    /// next open, which completes a split after a crash, can then write the BTTs.
    holes: Vec<u32>,
}

/// Returns the indexes in the split volume of the chunks that get the metadata of the part's BTT.
fn metadata_indexes(part: &VolumeRecord) -> Vec<u32> {
    let Part { index, is_unformatted, .. } = part.part.expect("planned as a part");
    match is_unformatted {
        true => btt_indexes(part).into_iter().map(|own| index + own).collect(),
        false => vec![],
    }
}

/// Divides the reserve of a volume among its parts. A part gets its allocated chunks, and the rest
/// in the order of the parts, so that the sum of the promises stays the same.
fn share_reserve(entry: &VolumeEntry, holes: &[u32], parts: &mut [VolumeRecord]) {
    let mut rest = entry.promised_with(holes.len() as u32);
    let allocated = entry.chunks.iter().map(|(index, _)| *index).chain(holes.iter().copied());
    let mut counts = vec![0; parts.len()];
    for index in allocated {
        let part = parts.partition_point(|part| first_index(part) <= index) - 1;
        counts[part] += 1;
        rest -= 1;
    }
    for (part, allocated) in parts.iter_mut().zip(counts) {
        let unallocated = rest.min(part.chunks - allocated);
        part.reserve_chunks = allocated + unallocated;
        rest -= unallocated;
    }
}

fn first_index(part: &VolumeRecord) -> u32 {
    part.part.expect("planned as a part").index
}

/// Number of words in both copies of a record.
const RECORD_WORDS: u64 = 2 * crate::pool::format::layout::VOLUME_RECORD_BYTES / 8;

/// Number of chunks erased per batch (256 MiB). On a disk, each batch ends with a barrier.
const BATCH_CHUNKS: u32 = 128;

/// Finishes splits that a crash interrupted. It may be called repeatedly.
///
/// 1. Store the owner words of the parts' chunks and persist them. From here on, they contain the
///    slots of the parts.
/// 2. Erase the chunks of parts with a BTT, durably.
/// 3. Write the BTTs, durably.
/// 4. Write the records, which completes the split.
pub(in crate::pool) fn finish(
    media: &dyn Media,
    superblock: &Superblock,
    volumes: &mut BTreeMap<Slot, VolumeEntry>,
) -> Result<(), MediaError> {
    let slots: Vec<_> = volumes
        .iter()
        .filter(|(_, volume)| volume.record.part.is_some())
        .map(|(slot, _)| *slot)
        .collect();
    store_part_owners(media, superblock, volumes, &slots)?;
    batches(&unformatted_runs(volumes, &slots)).iter().try_for_each(|batch| media.erase(batch))?;
    format_parts(media, volumes, &slots)?;
    finish_records(media, superblock, volumes, &slots)
}

pub(in crate::pool) fn store_part_owners(
    media: &dyn Media,
    superblock: &Superblock,
    volumes: &BTreeMap<Slot, VolumeEntry>,
    slots: &[Slot],
) -> Result<(), MediaError> {
    let table = ChunkTable::new(superblock);
    let mut named = Vec::new();
    for slot in slots {
        let volume = &volumes[slot];
        if volume.record.part.is_none_or(|part| part.origin == *slot) {
            continue;
        }
        for (index, chunk) in &volume.chunks {
            table.set_owner(media, *chunk, Owner::Volume { slot: *slot, index: *index })?;
        }
        named.extend(runs(volume.chunk_ids()).into_iter().map(|run| table.byte_range(run)));
    }
    if named.is_empty() { Ok(()) } else { media.persist(&named) }
}

/// Returns the parts whose BTT has not been written yet.
fn unformatted<'a>(
    volumes: &'a BTreeMap<Slot, VolumeEntry>,
    slots: &'a [Slot],
) -> impl Iterator<Item = &'a VolumeEntry> {
    let is_unformatted =
        |volume: &&VolumeEntry| volume.record.part.is_some_and(|part| part.is_unformatted);
    slots.iter().map(|slot| &volumes[slot]).filter(is_unformatted)
}

/// Chunks that must be erased.
pub(in crate::pool) fn unformatted_runs(
    volumes: &BTreeMap<Slot, VolumeEntry>,
    slots: &[Slot],
) -> Vec<Run> {
    unformatted(volumes, slots).flat_map(|volume| runs(volume.chunk_ids())).collect()
}

/// Groups runs into batches. Each batch is erased in a single operation.
pub(in crate::pool) fn batches(runs: &[Run]) -> Vec<Vec<Range<u64>>> {
    let mut batches: Vec<Vec<Range<u64>>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut rest = *run;
        while rest.chunks > 0 {
            if room == 0 {
                batches.push(Vec::new());
                room = BATCH_CHUNKS;
            }
            let now = Run { start: rest.start, chunks: rest.chunks.min(room) };
            batches.last_mut().expect("the last batch has space").push(now.byte_range());
            rest = Run { start: now.end(), chunks: rest.chunks - now.chunks };
            room -= now.chunks;
        }
    }
    batches
}

pub(in crate::pool) fn format_parts(
    media: &dyn Media,
    volumes: &BTreeMap<Slot, VolumeEntry>,
    slots: &[Slot],
) -> Result<(), MediaError> {
    for volume in unformatted(volumes, slots) {
        let record = &volume.record;
        let layout = Layout::new(record.size_bytes(), btt::SECTOR_BYTES, record.uuid)
            .expect("the size was checked when the record was parsed");
        // The chunks that get metadata are present, even in a thin volume.
        layout.format(&Space::with_holes(media, &volume.extents(), record.size_bytes()))?;
    }
    Ok(())
}

pub(in crate::pool) fn finish_records(
    media: &dyn Media,
    superblock: &Superblock,
    volumes: &mut BTreeMap<Slot, VolumeEntry>,
    slots: &[Slot],
) -> Result<(), MediaError> {
    for slot in slots {
        let record = &mut volumes.get_mut(slot).expect("a part is a volume").record;
        (record.part, record.sequence) = (None, record.sequence.wrapping_add(1));
        mirrored::write(media, superblock.volume_record_offsets(*slot), &record.to_bytes())?;
    }
    Ok(())
}

/// Checks the parts of a split, as far as this does not depend on the volume.
pub fn check_parts(parts: &[(String, VolumeSize)]) -> Result<(), SplitError> {
    if parts.len() < 2 {
        return Err(SplitError::TooFew { count: parts.len() });
    }
    let mut names = BTreeSet::new();
    if let Some((name, _)) = parts.iter().find(|(name, _)| !names.insert(name)) {
        return Err(SplitError::NameTwice { name: name.clone() });
    }
    let remaining_parts: Vec<_> =
        parts.iter().filter(|(_, size)| *size == VolumeSize::Remaining).collect();
    if let [(first, _), (second, _), ..] = remaining_parts[..] {
        return Err(SplitError::RestTwice { first: first.clone(), second: second.clone() });
    }
    for (name, size) in parts {
        if let VolumeSize::Bytes(bytes) = size {
            part_chunks(name, *bytes)?;
        }
    }
    Ok(())
}

/// Returns the sizes of the parts in bytes. Their sum must equal the size of the volume.
fn sizes(parts: &[(String, VolumeSize)], volume_bytes: u64) -> Result<Vec<u64>, SplitError> {
    check_parts(parts)?;
    let fixed_sizes = parts.iter().filter_map(|(_, size)| match size {
        VolumeSize::Bytes(bytes) => Some(*bytes),
        VolumeSize::Remaining => None,
    });
    let parts_bytes = fixed_sizes.fold(0u64, u64::saturating_add);
    let remaining = parts.iter().find(|(_, size)| *size == VolumeSize::Remaining);
    let rest_bytes = match remaining {
        Some((name, _)) if parts_bytes >= volume_bytes => {
            return Err(SplitError::NoRest { name: name.clone(), parts_bytes });
        }
        None if parts_bytes != volume_bytes => {
            return Err(SplitError::Sum { parts_bytes, volume_bytes });
        }
        _ => volume_bytes - parts_bytes,
    };
    let bytes = |(_, size): &(String, VolumeSize)| match size {
        VolumeSize::Bytes(bytes) => *bytes,
        VolumeSize::Remaining => rest_bytes,
    };
    Ok(parts.iter().map(bytes).collect())
}

/// Checks that the format allows the sizes, and converts them to chunks.
fn check_sizes(
    parts: &[(String, VolumeSize)],
    sizes: &[u64],
    format: VolumeFormat,
) -> Result<Vec<u32>, SplitError> {
    let check = |((name, _), size_bytes): (&(String, VolumeSize), &u64)| {
        let chunks = part_chunks(name, *size_bytes)?;
        if format == VolumeFormat::Btt {
            Layout::new(*size_bytes, btt::SECTOR_BYTES, Uuid::nil()).map_err(|error| {
                SplitError::Size { name: name.clone(), reason: error.to_string() }
            })?;
        }
        Ok(chunks)
    };
    parts.iter().zip(sizes).map(check).collect()
}

/// Converts the size of a part to chunks.
fn part_chunks(name: &str, size_bytes: u64) -> Result<u32, SplitError> {
    let refused = |reason: String| SplitError::Size { name: name.to_owned(), reason };
    let chunks =
        chunk_count("volume size", size_bytes).map_err(|error| refused(error.to_string()))?;
    chunks.ok_or_else(|| refused("the size exceeds that of any volume".to_owned()))
}
