//! Splitting a volume: its chunks become several volumes, each with its own name.
//!
//! A chunk is named by slot and index, and a large volume has more chunks than a transaction has words. So the
//! transaction changes the records alone: from then on the volume is as long as its first part, and each other part's
//! record says from which chunk on it was a part of which volume. A chunk that is still named as it was before belongs to
//! the part that this leads to. Only then are the chunks named anew, and BTTs written; who opens the pool after a crash
//! does it again.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;
use uuid::Uuid;

use super::chunk::runs;
use super::create::unix_now_s;
use super::memory::chunk_count;
use super::scan::VolumeEntry;
use super::superblock::Superblock;
use super::table::{ChunkTable, Owner, Slot};
use super::volume::{Space, VolumeInfo, VolumeSize, volume_extents, volume_info};
use super::volume_record::{Part, VolumeFormat, VolumeName, VolumeRecord};
use super::{Pool, PoolError, State, mirrored, redo_log};
use crate::CHUNK_BYTES;
use crate::btt::{self, Layout};
use crate::media::{Media, MediaError};
use crate::size::display;

/// What becomes of a BTT volume's content. A raw volume's bytes stay, each in its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitContent {
    /// A volume with content is not split.
    Refuse,
    /// Its parts are empty.
    GiveUp,
}

/// Why a volume cannot be split as asked.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SplitError {
    /// One part, or none.
    #[error("{count} part(s) are asked for, and it takes two at least")]
    TooFew {
        /// How many.
        count: usize,
    },
    /// Two parts of one name.
    #[error("two parts are to have the name {name:?}")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// More than one part is to have the rest.
    #[error("only one part can have the rest, and {first:?} and {second:?} are to")]
    RestTwice {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// The parts are not what there is.
    #[error(
        "its parts have {parts_bytes} bytes ({}) together, and it has {volume_bytes} ({}); one of them may have the rest",
        display(*parts_bytes), display(*volume_bytes)
    )]
    Sum {
        /// Of all parts.
        parts_bytes: u64,
        /// Of the volume.
        volume_bytes: u64,
    },
    /// Nothing is left for the part that is to have the rest.
    #[error("nothing is left for {name:?}: the other parts have {parts_bytes} bytes ({})", display(*parts_bytes))]
    NoRest {
        /// Its name.
        name: String,
        /// Of the others.
        parts_bytes: u64,
    },
    /// A part cannot have its size.
    #[error("part {name:?}: {reason}")]
    Size {
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// There is something in it.
    #[error(
        "it holds data, and a BTT cannot be cut: its parts would be empty. --force splits it all the same, and its content is gone"
    )]
    HoldsData,
}

impl Pool {
    /// Splits a volume that nobody in this process has open into volumes of the names and sizes given, in its order;
    /// [`VolumeSize::Remaining`] is what the others leave. One of them may have its name. Raw volumes keep their bytes;
    /// those with a BTT become empty ones, which see nothing of what was there before. After a crash the volume is as it
    /// was, or all parts are there.
    pub fn split_volume(
        &self,
        name: &str,
        parts: &[(String, VolumeSize)],
        content: SplitContent,
    ) -> Result<Vec<VolumeInfo>, PoolError> {
        let mut state = self.lock_for_change()?;
        let slot = state.require_closed_volume(name)?;
        let entry = &state.volumes[&slot];
        entry.check_usable()?;
        let split = |reason| PoolError::Split { name: name.to_owned(), reason };
        let sizes = sizes(parts, entry.record.size_bytes()).map_err(split)?;
        let chunks = check_sizes(parts, &sizes, entry.record.format).map_err(split)?;
        let records = self.plan_parts(&state, slot, parts, &chunks)?;
        if entry.record.format == VolumeFormat::Btt {
            let space = Space { media: self.media(), extents: &volume_extents(&runs(entry.chunk_ids())) };
            if content == SplitContent::Refuse && self.latch_failure(btt::holds_data(&space))? {
                return Err(split(SplitError::HoldsData));
            }
            self.check_split_room(&chunks)?;
        }
        self.split(&mut state, slot, records)
    }

    /// The records of the parts, the first of them in the volume's own slot.
    pub(super) fn plan_parts(
        &self,
        state: &State,
        slot: Slot,
        parts: &[(String, VolumeSize)],
        chunks: &[u32],
    ) -> Result<Vec<VolumeRecord>, PoolError> {
        let old = &state.volumes[&slot].record;
        let is_unformatted = old.format == VolumeFormat::Btt;
        let mut free = self.superblock.slots().filter(|slot| !state.volumes.contains_key(slot));
        let (mut records, mut index) = (Vec::with_capacity(parts.len()), 0);
        for ((name, _), chunks) in parts.iter().zip(chunks) {
            let name: VolumeName = name.parse()?;
            if state.find_volume(name.as_str()).is_some_and(|found| found != slot) {
                return Err(PoolError::VolumeExists { name: name.to_string() });
            }
            let own = if index == 0 { Some(slot) } else { free.next() };
            let own = own.ok_or(PoolError::NoVolumeSlot { limit: self.superblock.volume_slots })?;
            let part = Part { origin: slot, index, is_unformatted };
            records.push(VolumeRecord {
                sequence: self.next_sequence(own)?,
                slot: own,
                name,
                uuid: Uuid::new_v4(),
                format: old.format,
                thin: false,
                part: Some(part),
                chunks: *chunks,
                created_unix_s: unix_now_s(),
            });
            index += chunks;
        }
        redo_log::check_room(&self.superblock, records.len() as u64 * RECORD_WORDS)?;
        Ok(records)
    }

    /// 1. The records of all parts, as one transaction: from here on there are the parts.
    /// 2. Everything that they are still to become.
    fn split(
        &self,
        state: &mut State,
        slot: Slot,
        records: Vec<VolumeRecord>,
    ) -> Result<Vec<VolumeInfo>, PoolError> {
        let words = self.latch(self.split_words(&records))?;
        self.latch(redo_log::commit(self.media(), &self.superblock, &words))?;
        let old = state.volumes.remove(&slot).expect("found by the caller");
        let slots: Vec<_> = records.iter().map(|record| record.slot).collect();
        let mut chunks = old.chunk_ids();
        for record in records {
            let own = (0..).zip(chunks.by_ref().take(record.chunks as usize)).collect();
            state.volumes.insert(record.slot, VolumeEntry { record, chunks: own });
        }
        self.latch(finish(self.media(), &self.superblock, &mut state.volumes))?;
        Ok(slots.iter().map(|slot| volume_info(&state.volumes[slot])).collect())
    }

    /// What changes in the copies of the records.
    pub(super) fn split_words(&self, records: &[VolumeRecord]) -> Result<Vec<(u64, u64)>, MediaError> {
        let mut words = Vec::new();
        for record in records {
            for offset in self.superblock.volume_record_offsets(record.slot) {
                words.extend(mirrored::changed_words(self.media(), offset, &record.to_bytes())?);
            }
        }
        Ok(words)
    }
}

/// Words of a record's two copies.
const RECORD_WORDS: u64 = 2 * super::layout::VOLUME_RECORD_BYTES / 8;

/// Finishes what is left of splits. Doing it again changes nothing.
///
/// 1. Owner words of the parts' chunks, persist: from here on each is named as its part's.
/// 2. BTTs, durable.
/// 3. The records, which say that this is done.
pub(super) fn finish(
    media: &dyn Media,
    superblock: &Superblock,
    volumes: &mut BTreeMap<Slot, VolumeEntry>,
) -> Result<(), MediaError> {
    name_chunks(media, superblock, volumes)?;
    format_parts(media, volumes)?;
    for (slot, volume) in volumes.iter_mut().filter(|(_, volume)| volume.record.part.is_some()) {
        let record = &mut volume.record;
        (record.part, record.sequence) = (None, record.sequence.wrapping_add(1));
        mirrored::write(media, superblock.volume_record_offsets(*slot), &record.to_bytes())?;
    }
    Ok(())
}

pub(super) fn name_chunks(
    media: &dyn Media,
    superblock: &Superblock,
    volumes: &BTreeMap<Slot, VolumeEntry>,
) -> Result<(), MediaError> {
    let table = ChunkTable::new(superblock);
    let mut named = Vec::new();
    for (slot, volume) in volumes {
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

pub(super) fn format_parts(
    media: &dyn Media,
    volumes: &BTreeMap<Slot, VolumeEntry>,
) -> Result<(), MediaError> {
    let is_unformatted = |volume: &&VolumeEntry| volume.record.part.is_some_and(|part| part.is_unformatted);
    for volume in volumes.values().filter(is_unformatted) {
        let record = &volume.record;
        let layout = Layout::new(record.size_bytes(), btt::SECTOR_BYTES, record.uuid)
            .expect("a record that says so was checked to have room");
        layout.format_over(&Space { media, extents: &volume_extents(&runs(volume.chunk_ids())) })?;
    }
    Ok(())
}

/// The sizes of the parts in bytes: together they are the volume.
fn sizes(parts: &[(String, VolumeSize)], volume_bytes: u64) -> Result<Vec<u64>, SplitError> {
    if parts.len() < 2 {
        return Err(SplitError::TooFew { count: parts.len() });
    }
    let mut names = BTreeSet::new();
    if let Some((name, _)) = parts.iter().find(|(name, _)| !names.insert(name)) {
        return Err(SplitError::NameTwice { name: name.clone() });
    }
    let of_rest: Vec<_> = parts.iter().filter(|(_, size)| *size == VolumeSize::Remaining).collect();
    if let [(first, _), (second, _), ..] = of_rest[..] {
        return Err(SplitError::RestTwice { first: first.clone(), second: second.clone() });
    }
    let said = parts.iter().filter_map(|(_, size)| match size {
        VolumeSize::Bytes(bytes) => Some(*bytes),
        VolumeSize::Remaining => None,
    });
    let parts_bytes = said.fold(0u64, u64::saturating_add);
    let rest_bytes = match of_rest.first() {
        Some((name, _)) if parts_bytes >= volume_bytes => {
            return Err(SplitError::NoRest { name: name.clone(), parts_bytes });
        }
        None if parts_bytes != volume_bytes => return Err(SplitError::Sum { parts_bytes, volume_bytes }),
        _ => volume_bytes - parts_bytes,
    };
    let bytes = |(_, size): &(String, VolumeSize)| match size {
        VolumeSize::Bytes(bytes) => *bytes,
        VolumeSize::Remaining => rest_bytes,
    };
    Ok(parts.iter().map(bytes).collect())
}

/// Sizes in chunks, which the format allows.
fn check_sizes(
    parts: &[(String, VolumeSize)],
    sizes: &[u64],
    format: VolumeFormat,
) -> Result<Vec<u32>, SplitError> {
    let check = |((name, _), size_bytes): (&(String, VolumeSize), &u64)| {
        let refused = |reason: String| SplitError::Size { name: name.clone(), reason };
        let chunks = chunk_count("volume size", *size_bytes).map_err(|error| refused(error.to_string()))?;
        if format == VolumeFormat::Btt {
            Layout::new(*size_bytes, btt::SECTOR_BYTES, Uuid::nil())
                .map_err(|error| refused(error.to_string()))?;
        }
        debug_assert_eq!(chunks, Some((*size_bytes / CHUNK_BYTES) as u32));
        chunks.ok_or_else(|| refused("it is larger than any volume".to_owned()))
    };
    parts.iter().zip(sizes).map(check).collect()
}
