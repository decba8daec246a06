//! Deletion of a volume with missing chunks. These chunks are unknown, so a pool with such a volume
//! opens only for reading. Giving up the remaining data of the volume makes the pool usable again.

use std::collections::BTreeMap;

use super::repair::Mending;
use crate::media::{Media, MediaError};
use crate::pool::format::layout::VolumeRecordBytes;
use crate::pool::format::mirrored::{self, Copies};
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{ChunkTable, Owner, Slot, encode_owner};
use crate::pool::format::volume_record::empty_record;
use crate::pool::redo_log::{self, LogState, Redone};
use crate::pool::scan::{Scan, VolumeEntry, scan};
use crate::pool::{PoolError, Run};

/// Deletes a volume with missing chunks. A dry run only returns the change, and treats `planned`
/// words as if they had been stored. Returns `None` if the log is damaged, because it may contain
/// the volume's record.
///
/// 1. Redo a committed transaction, as opening the pool would.
/// 2. Mark all free chunks as *scrub* and persist the marks. Any of them may be a missing chunk of
///    the volume, and so may contain data. After a crash here, the volume still exists, and opening
///    still refuses the pool.
/// 3. Write an empty record. From here on, the volume's chunks are leftovers, which the next open
///    marks for erasing.
pub(in crate::pool) fn give_up(
    media: &dyn Media,
    superblock: &Superblock,
    name: &str,
    planned: &BTreeMap<u64, u64>,
    dry_run: bool,
) -> Result<Option<Mending>, PoolError> {
    let log = redo_log::read(&Redone::with(media, planned), superblock)?;
    if matches!(log, LogState::Damaged(_)) {
        return Ok(None);
    }
    let mut words = log.words();
    words.extend(planned);
    let view = Redone::with(media, &words);
    let seen = scan(&view, superblock)?;
    let (slot, volume) = lacking(&seen, name)?;
    let empty = empty_record(slot, volume.record.sequence.wrapping_add(1));
    let offsets = whole_one_last(&view, superblock.volume_record_offsets(slot))?;
    let has_chunks = volume.record.chunks;
    let what = format!(
        "volume {name:?}, which lacks {} of its {has_chunks} chunks, is discarded, and free chunks are erased again",
        has_chunks - volume.allocated()
    );
    let mut changed = Vec::new();
    if dry_run {
        changed.extend(words.iter().map(|(at, word)| (*at, *word)));
        changed.push((redo_log::magic_and_commit(superblock).1, 0));
        changed.extend(free_to_scrub(superblock, &seen));
        for offset in offsets {
            changed.extend(mirrored::changed_words(&view, offset, &empty)?);
        }
    } else {
        if let LogState::Committed(entries) = &log {
            redo_log::replay(media, superblock, entries)?;
        }
        for (at, word) in free_to_scrub(superblock, &seen) {
            media.store_word(at, word)?;
        }
        let table = ChunkTable::new(superblock);
        media.persist(&seen.free.iter().map(|run| table.byte_range(*run)).collect::<Vec<_>>())?;
        mirrored::write(media, offsets, &empty)?;
    }
    Ok(Some(Mending { what, words: changed }))
}

/// Finds the volume with this name and missing chunks.
fn lacking<'a>(seen: &'a Scan, name: &str) -> Result<(Slot, &'a VolumeEntry), PoolError> {
    let mut named =
        seen.volumes.iter().filter(|(_, volume)| volume.record.name.as_str() == name).peekable();
    if named.peek().is_none() {
        let known = seen.volumes.values().map(|volume| volume.record.name.to_string()).collect();
        return Err(PoolError::NoSuchVolume { name: name.to_owned(), known });
    }
    // A thin volume may be complete although chunks are missing.
    let lacks =
        |volume: &VolumeEntry| !volume.record.thin && volume.allocated() < volume.record.chunks;
    let found = named.find(|(_, volume)| lacks(volume)).map(|(slot, volume)| (*slot, volume));
    found.ok_or_else(|| PoolError::VolumeLacksNothing { name: name.to_owned() })
}

/// Returns the offsets of both copies in the order of writing. The copy that is in use is written
/// last, when the other one is already whole.
fn whole_one_last(media: &dyn Media, offsets: [u64; 2]) -> Result<[u64; 2], MediaError> {
    let [first, second] = offsets;
    Ok(match mirrored::read::<VolumeRecordBytes>(media, offsets)? {
        Copies::Stale { stale: 1, .. } | Copies::Damaged { damaged: 1, .. } => [second, first],
        _ => offsets,
    })
}

fn free_to_scrub(superblock: &Superblock, seen: &Scan) -> impl Iterator<Item = (u64, u64)> {
    let table = ChunkTable::new(superblock);
    seen.free.iter().flat_map(|run| run.ids()).map(move |chunk| {
        (table.byte_range(Run { start: chunk, chunks: 1 }).start, encode_owner(chunk, Owner::Scrub))
    })
}
