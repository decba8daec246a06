//! Repair of a pool that does not open, or that opens with damage. The repair uses only information
//! on the media.
//!
//! There are four sources of information: the other copy of a record, a damaged word that passes
//! its checksum after one bit is flipped, the copy of a chunk's owner in its wear word, and
//! elimination after all other chunks are accounted for. The checksum makes the result of a flip
//! unique. If none of these sources explains some damage, that damage is not changed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use foreshore_types::VolumeFormat;
use serde::Serialize;

use super::check::CheckProgress;
use crate::btt::{self, GiveUp};
use crate::media::{FileMedia, Media, MediaError};
use crate::pool::alloc::free_content::ContentFinder;
use crate::pool::file::blocks;
use crate::pool::file::open_steps::{Opened, select_superblock};
use crate::pool::findings::{Finding, Findings, Severity};
use crate::pool::format::chunk::{ChunkId, Run};
use crate::pool::format::layout::{SUPERBLOCK_OFFSETS, SuperblockBytes, VolumeRecordBytes};
use crate::pool::format::mirrored::{self, Copies, Mirrored};
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{ChunkTable, Entry, Owner, Slot, decode_owner, encode_owner};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::redo_log::{self, LogState, Redone};
use crate::pool::scan::{Scan, VolumeEntry, make_durable, scan};
use crate::pool::volume::{Volume, VolumeInfo};
use crate::pool::{OpenMode, Pool, PoolError};
use crate::progress::{OnProgress, ignore_progress};

/// Changes that a repair has made, or that a dry run would make.
#[derive(Debug, Default, Serialize)]
pub struct RepairReport {
    /// Repaired damage and cleared leftovers of a crash.
    pub mended: Vec<String>,
    /// Remaining damage, which could not be repaired from information on the media.
    pub left: Vec<String>,
    /// Volumes with missing chunks for an unknown reason, and thin volumes that may own a chunk
    /// with a damaged owner word. A repair deletes such a volume only if the caller names it.
    pub incomplete_volumes: Vec<String>,
}

/// Maximum number of damaged owner words that are repaired. If more are damaged, a part of the
/// table is lost or the pool is crafted. The limit also bounds the memory use of the repair.
const MAX_OWNER_FIXES: usize = 1 << 16;

/// A single repair, as a list of words to store.
#[derive(Debug)]
pub(in crate::pool) struct Fix {
    pub(in crate::pool) description: String,
    pub(in crate::pool) words: Vec<(u64, u64)>,
}

impl Fix {
    /// Stores the words. When the call returns, they are durable.
    pub(in crate::pool) fn store(&self, media: &dyn Media) -> Result<(), MediaError> {
        for (at, word) in &self.words {
            media.store_word(*at, *word)?;
        }
        let ranges: Vec<_> = self.words.iter().map(|(at, _)| *at..*at + 8).collect();
        media.persist(&ranges)
    }
}

impl Pool {
    /// Repairs a pool that is not in use. It makes all corrections that opening makes, repairs
    /// damage that the sources of this module explain, and restores info blocks of BTTs. A dry run
    /// only reports the changes.
    pub fn repair(path: &Path, dry_run: bool) -> Result<RepairReport, PoolError> {
        Self::repair_with(path, dry_run, None, &mut ignore_progress)
    }

    /// Repairs a pool as [`Pool::repair`] does. In addition, deletes the volume `give_up`, which
    /// must have missing chunks, and erases all free chunks again. `progress` receives the progress
    /// of checking free space, erasing waiting chunks and checking volumes.
    pub fn repair_with(
        path: &Path,
        dry_run: bool,
        give_up: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<RepairReport, PoolError> {
        let mode = if dry_run { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
        let opened = Opened::new(path, mode)?;
        let mut report = RepairReport::default();
        let (superblock, mut findings, merged) = select_superblock_for_repair(path, &opened)?;
        if !dry_run {
            opened.forget_clean_pages(&superblock.regions());
        }
        let media = FileMedia::new(opened.file, superblock.size_bytes(), !dry_run)?;
        let media = media.thin(superblock.is_thin);
        findings.extend(blocks::check_blocks(path, &media, !dry_run)?);
        if !dry_run {
            make_durable(&media, &superblock)?;
        }
        // Performed even if the log is damaged, because transactions never store into superblocks.
        if let Some(merged) = &merged {
            let fix = fix_superblocks(&media, merged)?;
            if !dry_run {
                fix.store(&media)?;
            }
            report.mended.push(fix.description);
        }
        let mut planned = fix_tables(&media, &superblock, give_up, dry_run, &mut report.mended)?;
        let (fix, not_erased) = fix_free_chunks(&media, &superblock, &planned, progress)?;
        if let Some(fix) = fix {
            report.mended.push(fix.description.clone());
            match dry_run {
                true => planned.extend(fix.words),
                false => fix.store(&media)?,
            }
        }
        let opened =
            Self::from_media_with(path.to_owned(), mode, media, superblock, findings, &planned);
        match opened {
            Ok(pool) => {
                pool.finish_repair(dry_run, progress, &mut report)?;
                report.left.extend(not_erased.iter().map(Finding::to_string));
            }
            Err(PoolError::Damaged { .. }) => {
                let pool = Self::open(path, OpenMode::ReadOnly)?;
                let found = pool.check()?;
                let left = found.pool.iter().filter(|finding| !is_fixed_at_open(finding));
                left.for_each(|finding| report.add_remaining(finding));
                report.add_suspects(&pool);
            }
            Err(error) => return Err(error),
        }
        Ok(report)
    }

    /// Reports the corrections that opening has made, and repairs the volumes. The tables must have
    /// been repaired.
    fn finish_repair(
        self: &Arc<Self>,
        dry_run: bool,
        progress: OnProgress<'_>,
        report: &mut RepairReport,
    ) -> Result<(), PoolError> {
        if !dry_run {
            self.scrub_all_with(progress)?;
        }
        for finding in self.findings_at_open() {
            match is_fixed_at_open(&finding) {
                true => report.mended.push(finding.to_string()),
                false => report.add_remaining(&finding),
            }
        }
        report.add_suspects(self);
        let volumes = self.volumes();
        let mut check_progress = CheckProgress::new(0, &volumes, progress);
        for info in &volumes {
            check_progress.volume(info, |on_checked| match self.open_volume(&info.name) {
                Ok(volume) => self.fix_btt(&volume, dry_run, on_checked, report),
                Err(error) => {
                    report.left.push(foreshore_types::chain(&error));
                    Ok(())
                }
            })?;
        }
        Ok(())
    }

    /// Repairs a BTT. Info blocks are restored from their copies, and the map and the flog from
    /// each other.
    fn fix_btt(
        &self,
        volume: &Volume,
        dry_run: bool,
        on_checked: &mut dyn FnMut(u64),
        report: &mut RepairReport,
    ) -> Result<(), PoolError> {
        if volume.info().format != VolumeFormat::Btt {
            return Ok(());
        }
        let repair = btt::plan_repair(volume, GiveUp::Nothing, on_checked)?;
        let prefix = format!("volume {}: ", volume.info().name);
        report.add_btt(&prefix, &repair);
        if !dry_run {
            repair.apply(volume)?;
        }
        Ok(())
    }
}

/// Selects the superblock. If neither copy is whole, the third value is the combination of both. A
/// dry run refuses the same pools as a repair.
fn select_superblock_for_repair(
    path: &Path,
    opened: &Opened,
) -> Result<(Superblock, Vec<Finding>, Option<SuperblockBytes>), PoolError> {
    let copies = opened.read_copies(path)?;
    let select = |copies| select_superblock(path, copies, opened.length, OpenMode::ReadWrite);
    match select(copies.clone()) {
        Err(PoolError::SuperblocksDamaged { path }) => {
            let merged = mirrored::merge(&copies).ok_or(PoolError::SuperblocksDamaged { path })?;
            let (superblock, findings) = select([merged.clone(), merged.clone()])?;
            Ok((superblock, findings, Some(merged)))
        }
        result => result
            .map(|(superblock, findings)| (superblock, findings, None))
            .map_err(|error| opened.detect_lost_superblocks(error)),
    }
}

impl RepairReport {
    fn add_remaining(&mut self, finding: &Finding) {
        let mut text = finding.to_string();
        if let Finding::IndexMissing { name, .. } = finding {
            self.incomplete_volumes.push(name.clone());
            text += "; their location is unknown";
        }
        self.left.push(text);
    }

    /// Adds the thin volumes that may own a chunk with a damaged owner word.
    fn add_suspects(&mut self, pool: &Pool) {
        if pool.info().damaged_bytes == 0 {
            return;
        }
        let has_holes =
            |volume: &VolumeInfo| volume.thin && volume.allocated_bytes < volume.size_bytes;
        let suspects = pool.volumes().into_iter().filter(has_holes);
        self.incomplete_volumes.extend(suspects.map(|volume| volume.name));
    }

    /// Adds the repairs and the remaining damage of a BTT to the report.
    pub fn add_btt(&mut self, prefix: &str, repair: &btt::Repair) {
        let in_arena =
            |arena: usize, text: &dyn std::fmt::Display| format!("{prefix}arena {arena}: {text}");
        self.mended.extend(repair.fixes.iter().map(|fix| in_arena(fix.arena, &fix.description)));
        for (number, arena) in repair.report_after.arenas.iter().enumerate() {
            self.left.extend(arena.findings.iter().map(|finding| in_arena(number, finding)));
            let more = arena.findings_total - arena.findings.len() as u64;
            if more > 0 {
                self.left.push(in_arena(number, &format_args!("and {more} more")));
            }
        }
    }
}

/// Repairs the tables, and deletes a volume that is given up. Returns the words that a dry run
/// would have stored.
pub(in crate::pool) fn fix_tables(
    media: &dyn Media,
    superblock: &Superblock,
    give_up: Option<&str>,
    dry_run: bool,
    mended: &mut Vec<String>,
) -> Result<BTreeMap<u64, u64>, PoolError> {
    let mut planned = BTreeMap::new();
    let mut record = |fix: Fix, planned: &mut BTreeMap<u64, u64>| {
        mended.push(fix.description);
        if dry_run {
            planned.extend(fix.words);
        }
    };
    for fix in fix_metadata(media, superblock, dry_run)? {
        record(fix, &mut planned);
    }
    let Some(name) = give_up else { return Ok(planned) };
    if let Some(given_up) =
        super::discard_damaged::discard_damaged(media, superblock, name, &planned, dry_run)?
    {
        record(given_up, &mut planned);
        // Once this volume is deleted, its gaps no longer prevent the repair of other words.
        let rest = match dry_run {
            true => fix_metadata(&Redone::with(media, &planned), superblock, true)?,
            false => fix_metadata(media, superblock, false)?,
        };
        rest.into_iter().for_each(|fix| record(fix, &mut planned));
    }
    Ok(planned)
}

/// Returns true if opening the pool for writing corrects the finding.
fn is_fixed_at_open(finding: &Finding) -> bool {
    finding.severity() != Severity::Fatal && !matches!(finding, Finding::NotErased { .. })
}

/// Determines the repairs, and stores them durably unless this is a dry run. Every stored word has
/// its final value, so after a crash there is less to repair.
pub(in crate::pool) fn fix_metadata(
    media: &dyn Media,
    superblock: &Superblock,
    dry_run: bool,
) -> Result<Vec<Fix>, MediaError> {
    let mut fixes = fix_log(media, superblock)?;
    let log = match fixes.is_empty() {
        true => redo_log::read(media, superblock)?,
        false => LogState::Empty,
    };
    // The transaction may have been committed. Chunks that look unused may therefore belong to its
    // records.
    if matches!(log, LogState::Damaged(_)) {
        return Ok(vec![]);
    }
    let mut words = log.words();
    fixes.extend(fix_records(&Redone::with(media, &words), superblock)?);
    words.extend(fixes.iter().flat_map(|fix| fix.words.clone()));
    // The owners of chunks are determined from the repaired records.
    let view = Redone::with(media, &words);
    let scan = scan(&view, superblock)?;
    fixes.extend(fix_owners(&view, superblock, &scan)?);
    if !dry_run {
        // Redo a committed transaction first. Otherwise, the next open would overwrite the repaired
        // words with it.
        if let (LogState::Committed(entries), false) = (&log, fixes.is_empty()) {
            redo_log::replay(media, superblock, entries)?;
        }
        for fix in &fixes {
            fix.store(media)?;
        }
    }
    Ok(fixes)
}

/// Repairs a log without a transaction if a single bit of its magic or commit word is wrong. A
/// transaction that may have been committed is not changed. Redoing an old transaction would undo
/// later changes.
fn fix_log(media: &dyn Media, superblock: &Superblock) -> Result<Vec<Fix>, MediaError> {
    let (magic_at, commit_at) = redo_log::magic_and_commit(superblock);
    if !matches!(redo_log::read(media, superblock)?, LogState::Damaged(_)) {
        return Ok(vec![]);
    }
    let magic = u64::from_le_bytes(crate::pool::format::layout::LOG_MAGIC);
    let wrong = [
        (magic_at, media.load_word(magic_at)? ^ magic, magic),
        (commit_at, media.load_word(commit_at)?, 0),
    ];
    if wrong.iter().map(|(_, bits, _)| bits.count_ones()).sum::<u32>() > 1 {
        return Ok(vec![]);
    }
    let words =
        wrong.iter().filter(|(_, bits, _)| *bits != 0).map(|(at, _, word)| (*at, *word)).collect();
    Ok(vec![Fix { description: "the header of the empty log has one wrong bit".to_owned(), words }])
}

/// Repairs the superblocks if both copies are damaged in different words.
pub(in crate::pool) fn fix_superblocks(
    media: &dyn Media,
    merged: &SuperblockBytes,
) -> Result<Fix, MediaError> {
    let description = "both superblocks are damaged; their intact parts are combined".to_owned();
    fix_copies(media, SUPERBLOCK_OFFSETS, merged, description)
}

/// Replaces both copies of a record with their combination. Only wrong words are stored, and no
/// store can tear. After a crash with any subset of these stores, the copies differ in no more
/// words than before, and still combine to the same record.
fn fix_copies<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
    merged: &T,
    description: String,
) -> Result<Fix, MediaError> {
    let mut words = mirrored::changed_words(media, offsets[0], merged)?;
    words.extend(mirrored::changed_words(media, offsets[1], merged)?);
    Ok(Fix { description, words })
}

/// Repairs volume records if both copies are damaged in different words.
fn fix_records(media: &dyn Media, superblock: &Superblock) -> Result<Vec<Fix>, MediaError> {
    let mut fixes = Vec::new();
    for slot in superblock.slots() {
        let offsets = superblock.volume_record_offsets(slot);
        if !matches!(mirrored::read::<VolumeRecordBytes>(media, offsets)?, Copies::Lost) {
            continue;
        }
        let copies = mirrored::read_copies::<VolumeRecordBytes>(media, offsets)?;
        let Some(merged) = mirrored::merge(&copies) else { continue };
        if VolumeRecord::parse(slot, &merged).is_err() {
            continue;
        }
        let description = format!(
            "both copies of volume record {} are damaged; their intact parts are combined",
            slot.0
        );
        fixes.push(fix_copies(media, offsets, &merged, description)?);
    }
    Ok(fixes)
}

/// Repairs owner words. A chunk of a volume must never be treated as unused. Therefore, while a
/// volume has a gap or may have a hidden one, only two kinds of words are repaired: those that fill
/// gaps or holes, and those of chunks that are unused according to their copies. If a thin volume
/// has a hole, a chunk with data may belong there, unless a flipped bit or its copy explains its
/// word. The other words remain damaged, so opening refuses the pool and erases nothing. If very
/// many words are damaged, none of them is repaired.
pub(in crate::pool) fn fix_owners(
    media: &dyn Media,
    superblock: &Superblock,
    scan: &Scan,
) -> Result<Vec<Fix>, MediaError> {
    fix_owners_with(media, superblock, scan, unique_claims)
}

/// Missing indexes, each with the chunk that fills it.
type Claims = BTreeMap<(Slot, u32), ChunkId>;

/// Repairs owner words as [`fix_owners`] does. `choose` selects the chunks for missing indexes.
pub(in crate::pool) fn fix_owners_with(
    media: &dyn Media,
    superblock: &Superblock,
    scan: &Scan,
    choose: fn(&Suspects, &[&Gaps]) -> Claims,
) -> Result<Vec<Fix>, MediaError> {
    let table = ChunkTable::new(superblock);
    let mut fixes = Vec::new();
    let mut add_fix = |chunk: ChunkId, owner: Owner, why: &str| {
        let volume = match owner {
            Owner::Volume { slot, .. } => scan.volumes.get(&slot),
            _ => None,
        };
        let is = match (owner, volume) {
            (Owner::Volume { index, .. }, Some(volume)) => {
                format!("chunk {index} of volume {}", volume.record.name)
            }
            (Owner::Scrub, _) => "to be erased".to_owned(),
            (owner, _) => owner.to_string(),
        };
        let description = format!("the owner word of chunk {chunk} is wrong; {why}: {is}");
        let words = vec![owner_word(superblock, chunk, owner)];
        fixes.push(Fix { description, words });
    };
    let mut bad = Suspects::new();
    let mut own = Vec::new();
    for piece in table.pieces() {
        for (chunk, entry) in piece.ids().zip(table.read_entries(media, piece)?) {
            if superblock.is_metadata(chunk) {
                own.extend(Some(chunk).filter(|_| entry.owner != Ok(Owner::Metadata)));
            } else if let Some(suspect) = Suspect::of(chunk, entry, scan) {
                bad.insert(chunk, suspect);
            }
        }
        if own.len() + bad.len() > MAX_OWNER_FIXES {
            return Ok(vec![]);
        }
    }
    for chunk in own {
        add_fix(chunk, Owner::Metadata, "according to the superblock");
    }
    // 1. Fill gaps and holes that a single chunk claims. If a crash keeps only some of these words,
    //    the others remain as they were.
    let (mut gaps, mut holes) = (Gaps::of(scan), Gaps::holes_of(scan));
    for ((slot, index), chunk) in choose(&bad, &[&gaps, &holes]) {
        add_fix(chunk, Owner::Volume { slot, index }, bad[&chunk].why());
        let missing = if gaps.contains(slot, index) { &mut gaps } else { &mut holes };
        missing.fill(slot, index);
        bad.remove(&chunk);
    }
    // 2. Repair chunks that were unused according to their copies. This is correct even if volumes
    //    lack other chunks.
    let mut finder = ContentFinder::new();
    bad.retain(|chunk, suspect| {
        let unused = suspect.unused_by_copy(|| reads_as_zeros(media, *chunk, &mut finder));
        unused.into_iter().for_each(|owner| add_fix(*chunk, owner, suspect.why()));
        unused.is_none()
    });
    // 3. Repair the remaining chunks if all others are accounted for.
    let mut rest = bad.into_iter();
    match (has_no_hidden_gap(scan), gaps.count()) {
        (true, 0) => {
            for (chunk, suspect) in rest {
                let corrected = suspect.corrected.filter(|_| suspect.owner().is_some());
                let (owner, why) = owner_without_gaps(corrected);
                let is_sure = owner != Owner::Scrub
                    || matches!(corrected, Some(Owner::Free | Owner::Scrub))
                    || holes.count() == 0
                    || reads_as_zeros(media, chunk, &mut finder);
                if is_sure {
                    add_fix(chunk, owner, why);
                }
            }
        }
        // The chunk of a damaged word could also belong to a hole.
        (true, 1) if holes.count() == 0 => {
            let (slot, index) = gaps.first().expect("the count is 1");
            if let (Some((chunk, suspect)), None) = (rest.next(), rest.next())
                && suspect.is_unexplained()
            {
                let owner = Owner::Volume { slot, index };
                add_fix(chunk, owner, "the chunk fills the only gap");
            }
        }
        _ => {}
    }
    Ok(fixes)
}

/// Chunks with damaged owner words.
pub(in crate::pool) type Suspects = BTreeMap<ChunkId, Suspect>;

/// Chunk with a damaged owner word.
pub(in crate::pool) struct Suspect {
    /// Owner after one bit of the word is flipped.
    corrected: Option<Owner>,
    /// Copy of the owner in the wear word.
    copy: Option<Owner>,
}

impl Suspect {
    /// Returns `None` if the owner word is valid. Words and copies that still name the volume of an
    /// unfinished split are interpreted as those of its parts.
    fn of(chunk: ChunkId, entry: Entry, scan: &Scan) -> Option<Self> {
        let word = entry.owner.err()?;
        let after_split = |owner| match owner {
            Owner::Volume { slot, index } => scan
                .in_part(slot, index)
                .map_or(owner, |(slot, index)| Owner::Volume { slot, index }),
            _ => owner,
        };
        let copy = entry.wear.ok().and_then(|wear| wear.owner).map(after_split);
        Some(Self { corrected: correct_one_bit(chunk, word.0).map(after_split), copy })
    }

    /// Returns the owner that the entry names. If a flipped bit and the copy contradict each other,
    /// neither is trusted.
    fn owner(&self) -> Option<Owner> {
        match (self.corrected, self.copy) {
            (Some(corrected), Some(copy)) => Some(copy).filter(|copy| *copy == corrected),
            (corrected, copy) => corrected.or(copy),
        }
    }

    /// Returns the new owner of a chunk that belonged to no volume according to its copy and, if a
    /// flipped bit names an owner, also to that. A copy alone does not explain a *free* chunk with
    /// data.
    fn unused_by_copy(&self, reads_as_zeros: impl FnOnce() -> bool) -> Option<Owner> {
        match (self.corrected, self.copy?) {
            (_, Owner::Volume { .. }) | (Some(Owner::Volume { .. }), _) => None,
            (Some(Owner::Retired), _) | (None, Owner::Retired) => Some(Owner::Retired),
            (_, Owner::Retired) => None,
            (None, Owner::Free) => reads_as_zeros().then_some(Owner::Scrub),
            // In each of these states, the content of the chunk is not needed.
            (_, Owner::Free | Owner::Metadata | Owner::Memory | Owner::Scrub) => Some(Owner::Scrub),
        }
    }

    /// Returns true if the entry names no owner.
    fn is_unexplained(&self) -> bool {
        self.corrected.is_none() && self.copy.is_none()
    }

    /// Reason for choosing the named owner.
    fn why(&self) -> &'static str {
        match self.corrected {
            Some(_) => "correction of one bit makes it valid",
            None => "the wear word contains a copy of the owner",
        }
    }
}

/// Returns true if a chunk is readable and contains only zeros. An unreadable chunk may contain
/// data.
fn reads_as_zeros(media: &dyn Media, chunk: ChunkId, finder: &mut ContentFinder) -> bool {
    let mut is_zero = true;
    let run = Run { start: chunk, chunks: 1 };
    finder.search(media, run, &mut |_| {}, &mut |_| is_zero = false).is_ok() && is_zero
}

/// Returns true if no volume except a thin one can have a hidden gap. A lost record could own any
/// chunk.
fn has_no_hidden_gap(scan: &Scan) -> bool {
    let hides_chunks = |finding: &Finding| {
        matches!(
            finding,
            Finding::VolumeRecordLost { .. }
                | Finding::VolumeRecordInvalid { .. }
                | Finding::IndexTwice { .. }
        )
    };
    !scan.findings.iter().any(hides_chunks)
}

/// Returns the owner of a damaged chunk if no volume has a gap. `corrected` is the chunk's word
/// after one bit is flipped.
fn owner_without_gaps(corrected: Option<Owner>) -> (Owner, &'static str) {
    match corrected {
        // The volume already has a chunk at this index, or ends before it.
        Some(Owner::Volume { .. }) | None => (Owner::Scrub, "no volume lacks a chunk"),
        // Erased again, because nothing proves that the chunk was erased.
        Some(Owner::Free) => (Owner::Scrub, "correction of one bit makes it free"),
        Some(owner) => (owner, "correction of one bit makes it valid"),
    }
}

/// Returns the missing indexes that exactly one chunk claims. If the flipped bit and the copy of a
/// chunk name different owners, neither this chunk nor another gets their indexes.
fn unique_claims(bad: &Suspects, gaps: &[&Gaps]) -> Claims {
    let claims = all_claims(bad, gaps).into_iter();
    let sole = |((slot, index), chunks): ((Slot, u32), Vec<ChunkId>)| {
        let is_claimed = bad[&chunks[0]].owner() == Some(Owner::Volume { slot, index });
        (chunks.len() == 1 && is_claimed).then_some(((slot, index), chunks[0]))
    };
    claims.filter_map(sole).collect()
}

/// Broken variant for tests, in which the first claim to each index counts.
#[cfg(test)]
pub(in crate::pool) fn first_claims(bad: &Suspects, gaps: &[&Gaps]) -> Claims {
    all_claims(bad, gaps).into_iter().map(|(gap, chunks)| (gap, chunks[0])).collect()
}

/// Returns the chunks whose flipped bit or copy names each missing index.
fn all_claims(bad: &Suspects, gaps: &[&Gaps]) -> BTreeMap<(Slot, u32), Vec<ChunkId>> {
    let mut claims = BTreeMap::<_, Vec<ChunkId>>::new();
    for (chunk, suspect) in bad {
        for owner in [suspect.corrected, suspect.copy].into_iter().flatten() {
            let Owner::Volume { slot, index } = owner else { continue };
            if gaps.iter().any(|gaps| gaps.contains(slot, index)) {
                let chunks = claims.entry((slot, index)).or_default();
                chunks.retain(|other| other != chunk);
                chunks.push(*chunk);
            }
        }
    }
    claims
}

/// Missing indexes of volumes. They are stored as ranges, because an untrusted record may claim any
/// number of chunks.
pub(in crate::pool) struct Gaps {
    ranges: BTreeMap<Slot, Vec<Range<u32>>>,
    filled: BTreeSet<(Slot, u32)>,
}

impl Gaps {
    fn of(scan: &Scan) -> Self {
        Self::of_volumes(scan, false)
    }

    /// Returns the holes of thin volumes. Any of them may have lost its chunk.
    fn holes_of(scan: &Scan) -> Self {
        Self::of_volumes(scan, true)
    }

    fn of_volumes(scan: &Scan, thin: bool) -> Self {
        let volumes = scan.volumes.iter().filter(|(_, volume)| volume.record.thin == thin);
        let ranges = volumes.map(|(slot, volume)| (*slot, gaps_in(volume))).collect();
        Self { ranges, filled: BTreeSet::new() }
    }

    fn count(&self) -> u64 {
        let all: u64 =
            self.ranges.values().flatten().map(|range| u64::from(range.end - range.start)).sum();
        all - self.filled.len() as u64
    }

    fn contains(&self, slot: Slot, index: u32) -> bool {
        let ranges = self.ranges.get(&slot).map_or(&[][..], Vec::as_slice);
        let at = ranges.partition_point(|range| range.end <= index);
        ranges.get(at).is_some_and(|range| range.contains(&index))
            && !self.filled.contains(&(slot, index))
    }

    /// Marks a gap as filled.
    fn fill(&mut self, slot: Slot, index: u32) {
        assert!(self.contains(slot, index), "{slot:?} does not lack {index}");
        self.filled.insert((slot, index));
    }

    fn first(&self) -> Option<(Slot, u32)> {
        let all = self
            .ranges
            .iter()
            .flat_map(|(slot, ranges)| ranges.iter().cloned().map(|range| (*slot, range)));
        let mut indexes = all.flat_map(|(slot, range)| range.map(move |index| (slot, index)));
        indexes.find(|gap| !self.filled.contains(gap))
    }
}

/// Returns the gaps between the chunks of a volume, whose indexes are sorted and unique.
fn gaps_in(volume: &VolumeEntry) -> Vec<Range<u32>> {
    let mut ranges = Vec::new();
    let mut next = 0;
    for index in volume.chunks.iter().map(|(index, _)| *index).chain([volume.record.chunks]) {
        if next < index {
            ranges.push(next..index);
        }
        next = index + 1;
    }
    ranges
}

/// Marks free chunks that contain data for erasing. If a hole may have lost them, they are retired
/// instead, because opening accepts holes, and the chunks would be handed out. If a gap may have
/// lost them, they are not changed, and are returned as findings: opening refuses the pool.
pub(in crate::pool) fn fix_free_chunks(
    media: &dyn Media,
    superblock: &Superblock,
    planned: &BTreeMap<u64, u64>,
    progress: OnProgress<'_>,
) -> Result<(Option<Fix>, Vec<Finding>), MediaError> {
    let log = redo_log::read(&Redone::with(media, planned), superblock)?;
    let mut words = log.words();
    words.extend(planned);
    let scan = scan(&Redone::with(media, &words), superblock)?;
    let mut finder = ContentFinder::new();
    let mut chunks = Vec::new();
    let mut check_progress =
        CheckProgress::new(scan.free.iter().map(|run| run.len_bytes()).sum(), &[], progress);
    for run in &scan.free {
        check_progress.part(run.len_bytes(), |on_checked| {
            finder.search(media, *run, on_checked, &mut |chunk| chunks.push(chunk))
        })?;
    }
    let Some(first) = chunks.first() else { return Ok((None, vec![])) };
    let has_no_gap = !matches!(log, LogState::Damaged(_))
        && has_no_hidden_gap(&scan)
        && Gaps::of(&scan).count() == 0
        && scan.findings.iter().all(|finding| finding.severity() != Severity::Fatal);
    if !has_no_gap {
        let mut left = Findings::default();
        chunks.into_iter().for_each(|chunk| left.add(Finding::NotErased { chunk }));
        return Ok((None, left.into_list()));
    }
    let (owner, result) = match Gaps::holes_of(&scan).count() {
        0 => (Owner::Scrub, "old content and are erased"),
        _ => (Owner::Retired, "data that a thin volume may have lost, and are put out of use"),
    };
    let description = format!("{} free chunk(s) hold {result}; the first is {first}", chunks.len());
    let words = chunks.iter().map(|chunk| owner_word(superblock, *chunk, owner)).collect();
    Ok((Some(Fix { description, words }), vec![]))
}

/// Returns the offset and the new value of an owner word. Its copy is not changed, because a crash
/// could leave a new copy that contradicts the damaged word. Open corrects copies.
fn owner_word(superblock: &Superblock, chunk: ChunkId, owner: Owner) -> (u64, u64) {
    let at = ChunkTable::new(superblock).byte_range(Run { start: chunk, chunks: 1 }).start;
    (at, encode_owner(chunk, owner))
}

/// Returns the owner after one bit of a word is flipped. The checksum makes the result unique.
/// Words of all zeros or all ones are excluded, because lost words read as such, and for some
/// chunks they differ from a valid word in a single bit.
pub(in crate::pool) fn correct_one_bit(chunk: ChunkId, word: u64) -> Option<Owner> {
    if word == 0 || word == !0 {
        return None;
    }
    let mut whole = (0..64).filter_map(|bit| decode_owner(chunk, word ^ 1 << bit).ok());
    let owner = whole.next()?;
    whole.next().is_none().then_some(owner)
}
