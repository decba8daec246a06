//! Deletion of a volume with missing chunks. These chunks are unknown, so a pool with such a volume
//! opens only for reading. A thin volume with holes may be such a volume if a chunk with data has
//! no known owner. Giving up the remaining data of the volume makes the pool usable again.

use std::collections::BTreeMap;

use super::repair::Fix;
use crate::media::Media;
use crate::pool::alloc::free_content::ContentFinder;
use crate::pool::findings::Finding;
use crate::pool::format::layout::VolumeRecordBytes;
use crate::pool::format::mirrored;
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{ChunkTable, Owner, Slot, encode_owner};
use crate::pool::format::volume_record::empty_record;
use crate::pool::redo_log::{self, LogState, Redone};
use crate::pool::scan::{Scan, VolumeEntry, missing_metadata, scan};
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
pub(in crate::pool) fn discard_damaged(
    media: &dyn Media,
    superblock: &Superblock,
    name: &str,
    planned: &BTreeMap<u64, u64>,
    dry_run: bool,
) -> Result<Option<Fix>, PoolError> {
    let log = redo_log::read(&Redone::with(media, planned), superblock)?;
    if matches!(log, LogState::Damaged(_)) {
        return Ok(None);
    }
    let mut words = log.words();
    words.extend(planned);
    let view = Redone::with(media, &words);
    let scan = scan(&view, superblock)?;
    let (slot, volume) = incomplete_volume(&view, &scan, name)?;
    let empty = empty_record(slot, volume.record.sequence.wrapping_add(1));
    let offsets = superblock.volume_record_offsets(slot);
    let offsets = mirrored::copy_in_use_last::<VolumeRecordBytes>(&view, offsets)?;
    let expected_chunks = volume.record.chunks;
    let lacks = match volume.record.thin {
        true => "may lack".to_owned(),
        false => format!("lacks {} of", expected_chunks - volume.allocated()),
    };
    let description = format!(
        "volume {name:?}, which {lacks} its {expected_chunks} chunks, is discarded, and free chunks are erased again"
    );
    let mut changed = Vec::new();
    if dry_run {
        changed.extend(words.iter().map(|(at, word)| (*at, *word)));
        changed.push((redo_log::magic_and_commit(superblock).1, 0));
        changed.extend(scrub_marks(superblock, &scan));
        for offset in offsets {
            changed.extend(mirrored::changed_words(&view, offset, &empty)?);
        }
    } else {
        if let LogState::Committed(entries) = &log {
            redo_log::replay(media, superblock, entries)?;
        }
        for (at, word) in scrub_marks(superblock, &scan) {
            media.store_word(at, word)?;
        }
        let table = ChunkTable::new(superblock);
        media.persist(&scan.free.iter().map(|run| table.byte_range(*run)).collect::<Vec<_>>())?;
        mirrored::write(media, offsets, &empty)?;
    }
    Ok(Some(Fix { description, words: changed }))
}

/// Finds the volume with this name and missing chunks. A hole of a thin volume is a missing chunk
/// if the BTT of an unfinished part needs it. It may be one if a chunk has no known owner but
/// contains data.
fn incomplete_volume<'a>(
    media: &dyn Media,
    scan: &'a Scan,
    name: &str,
) -> Result<(Slot, &'a VolumeEntry), PoolError> {
    let named: Vec<_> =
        scan.volumes.iter().filter(|(_, volume)| volume.record.name.as_str() == name).collect();
    if named.is_empty() {
        let existing = scan.volumes.values().map(|volume| volume.record.name.to_string()).collect();
        return Err(PoolError::NoSuchVolume { name: name.to_owned(), existing });
    }
    let lacks_chunks = |volume: &VolumeEntry| volume.allocated() < volume.record.chunks;
    let mut lacking = named.into_iter().filter(|(_, volume)| lacks_chunks(volume)).peekable();
    let first = lacking.peek().copied();
    let certainly_lacks =
        |volume: &VolumeEntry| !volume.record.thin || missing_metadata(volume).is_some();
    // The check for unknown chunks reads all free space, so it comes last.
    let found = lacking
        .find(|(_, volume)| certainly_lacks(volume))
        .or_else(|| first.filter(|_| has_unknown_chunk(media, scan)));
    let found = found.map(|(slot, volume)| (*slot, volume));
    found.ok_or_else(|| PoolError::VolumeComplete { name: name.to_owned() })
}

/// Returns true if the owner word of a chunk is damaged, or if a free chunk contains data or is
/// unreadable.
fn has_unknown_chunk(media: &dyn Media, scan: &Scan) -> bool {
    let is_unknown = |finding: &Finding| {
        matches!(finding, Finding::OwnerWord { .. } | Finding::SlotOutside { .. })
    };
    let mut finder = ContentFinder::new();
    let mut has_data = |run: &Run| {
        let mut found = false;
        let result = finder.search(media, *run, &mut |_| {}, &mut |_| found = true);
        found || result.is_err()
    };
    scan.findings.iter().any(is_unknown) || scan.free.iter().any(&mut has_data)
}

fn scrub_marks(superblock: &Superblock, scan: &Scan) -> impl Iterator<Item = (u64, u64)> {
    let table = ChunkTable::new(superblock);
    scan.free.iter().flat_map(|run| run.ids()).map(move |chunk| {
        (table.byte_range(Run { start: chunk, chunks: 1 }).start, encode_owner(chunk, Owner::Scrub))
    })
}
