//! Opening of a pool. The opening finds the superblock, redoes a committed transaction, and marks
//! unfinished changes for erasing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::alloc::buddy::Buddy;
use super::alloc::recall::Recall;
use super::alloc::scrub_queue::ScrubQueue;
use super::file::blocks;
use super::file::mark::Mark;
use super::file::open_steps::{Opened, select_superblock};
use super::findings::{Finding, Severity};
use super::format::layout::{SUPERBLOCK_OFFSETS, SuperblockBytes, VolumeRecordBytes};
use super::format::mirrored::{self, Mirrored};
use super::format::superblock::{Superblock, allow_thin_volumes, rewrite};
use super::format::table::{ChunkTable, Owner};
use super::redo_log::{self, LogState, Redone};
use super::scan::{Scan, make_durable, scan};
use super::volume::split;
use super::{Counts, OpenMode, Pool, PoolError, State, VolumeSums};
use crate::media::{FileMedia, Media, MediaError};

/// Number of attempts to peek at a pool while another process changes it.
const PEEK_ATTEMPTS: u32 = 5;

impl Pool {
    /// Opens a pool. Opening for writing also redoes a committed transaction, and rewrites damaged
    /// copies from good ones. It marks chunks for erasing that were lent or partly allocated at the
    /// time of a crash.
    pub fn open(path: &Path, mode: OpenMode) -> Result<Arc<Pool>, PoolError> {
        let mut attempts = if mode == OpenMode::Peek { PEEK_ATTEMPTS } else { 1 };
        loop {
            attempts -= 1;
            match Self::open_once(path, mode) {
                Err(PoolError::SuperblocksDamaged { .. }) if attempts > 0 => {}
                Ok(pool)
                    if attempts > 0
                        && pool
                            .findings_at_open()
                            .iter()
                            .any(|f| f.severity() > Severity::Note) => {}
                result => return result,
            }
        }
    }

    fn open_once(path: &Path, mode: OpenMode) -> Result<Arc<Pool>, PoolError> {
        let opened = Opened::new(path, mode)?;
        let copies = opened.read_copies(path)?;
        let (superblock, findings) = select_superblock(path, copies, opened.length, mode)
            .map_err(|error| opened.detect_lost_superblocks(error))?;
        let writable = mode == OpenMode::ReadWrite;
        if writable {
            opened.forget_clean_pages(&superblock.regions());
        }
        let media = FileMedia::new(opened.file, superblock.size_bytes(), writable)?
            .thin(superblock.is_thin);
        let mut findings = findings;
        findings.extend(blocks::check_blocks(path, &media, writable)?);
        Self::from_media(path.to_owned(), mode, media, superblock, findings)
    }

    /// Opens a pool for writing. Its stores are persisted as on `dax-sync` media
    /// ([`FileMedia::with_dax_persists`]). For benchmarks.
    #[doc(hidden)]
    pub fn open_with_dax_persists(path: &Path) -> Result<Arc<Pool>, PoolError> {
        Pool::open_on(path, FileMedia::with_dax_persists)
    }
}

impl<M: Media> Pool<M> {
    /// Opens a pool for writing on media that `media` creates from its file. For benchmarks and
    /// tests.
    #[doc(hidden)]
    pub fn open_on(
        path: &Path,
        media: impl FnOnce(FileMedia) -> M,
    ) -> Result<Arc<Self>, PoolError> {
        let mode = OpenMode::ReadWrite;
        let opened = Opened::new(path, mode)?;
        let copies = opened.read_copies(path)?;
        let (superblock, findings) = select_superblock(path, copies, opened.length, mode)?;
        let media = media(FileMedia::new(opened.file, superblock.size_bytes(), true)?);
        Self::from_media(path.to_owned(), mode, media, superblock, findings)
    }

    /// Completes the opening of a pool, based on its media and superblock.
    ///
    /// 1. Examine all metadata as it will be after a committed transaction is redone. Stop if it is
    ///    not trustworthy. The pool has not been changed up to this step.
    /// 2. Make all metadata durable, because the following steps depend on it.
    /// 3. Set the feature bit for thin volumes if it is missing, and redo the transaction.
    /// 4. Correct copies and wear words, mark chunks for erasing, and finish splits and growth.
    ///    Each step may be repeated after a crash.
    pub(super) fn from_media(
        path: PathBuf,
        mode: OpenMode,
        media: M,
        superblock: Superblock,
        findings: Vec<Finding>,
    ) -> Result<Arc<Self>, PoolError> {
        Self::from_media_with(path, mode, media, superblock, findings, &BTreeMap::new())
    }

    /// Opens a pool as [`Self::from_media`] does. A pool that is open for reading also uses the
    /// `planned` words as if they had been stored.
    pub(super) fn from_media_with(
        path: PathBuf,
        mode: OpenMode,
        pool_media: M,
        superblock: Superblock,
        mut findings: Vec<Finding>,
        planned: &BTreeMap<u64, u64>,
    ) -> Result<Arc<Self>, PoolError> {
        let media = &pool_media;
        let writable = mode == OpenMode::ReadWrite;
        let log = redo_log::read(&Redone::with(media, planned), &superblock)?;
        let mut words = log.words();
        words.extend(planned);
        match &log {
            LogState::Empty => {}
            LogState::Damaged(reason) => findings.push(Finding::LogDamaged { reason }),
            LogState::Committed(entries) => {
                findings.push(Finding::LogPending { entries: entries.len() })
            }
        }
        let mut scan = scan(&Redone::with(media, &words), &superblock)?;
        findings.append(&mut scan.findings);
        findings.extend(find_missing_feature(&superblock, &scan));
        check_no_fatal(&path, writable, &findings)?;
        if writable {
            make_durable(media, &superblock)?;
        }
        let mut superblock = superblock;
        if writable && findings.iter().any(|f| matches!(f, Finding::ThinFeatureMissing { .. })) {
            superblock = allow_thin_volumes(media, &superblock)?;
        }
        if let (true, LogState::Committed(entries)) = (writable, &log) {
            redo_log::replay(media, &superblock, entries)?;
        }
        if writable {
            correct_metadata(media, &superblock, &findings, &mut scan)?;
            split::finish(media, &superblock, &mut scan.volumes)?;
            if superblock.growing_to_bytes > 0 {
                superblock = cancel_growth(media, &superblock)?;
            }
        }
        if let (true, Some(media)) = (writable, media.as_file()) {
            // Errors are ignored. Without a mark, the only risk is that a pool that is not open may
            // be attached to a guest as a disk.
            let _ = Mark::Pool.set(media.file());
        }
        let state = State::new(&superblock, scan, findings);
        let totals = Mutex::new(state.totals());
        Ok(Arc::new(Pool {
            path,
            mode,
            media: pool_media,
            superblock: Mutex::new(superblock),
            redo: if writable { BTreeMap::new() } else { words },
            latched: OnceLock::new(),
            state: Mutex::new(state),
            totals,
            scrubbed: Condvar::new(),
            recalled: Condvar::new(),
            scrubbed_chunks: AtomicU64::new(0),
            on_demand_chunks: AtomicU64::new(0),
            scrub_wake: Arc::default(),
        }))
    }
}

impl State {
    fn new(superblock: &Superblock, mut scan: Scan, findings: Vec<Finding>) -> Self {
        let buddy = Buddy::new(std::mem::take(&mut scan.wear), std::mem::take(&mut scan.free));
        let mut scrub = ScrubQueue::default();
        scan.to_scrub.iter().for_each(|run| scrub.add(*run));
        let volume = scan.volumes.values().map(|v| v.allocated()).sum();
        let mut counts = Counts {
            total: superblock.chunks,
            metadata: scan.metadata_chunks,
            memory: scan.lent.iter().map(|run| run.chunks).sum(),
            volume,
            scrubbing: scan.to_scrub.iter().map(|run| run.chunks).sum(),
            retired: scan.retired_chunks,
            damaged: 0,
        };
        let known_chunks =
            counts.metadata + counts.memory + counts.volume + counts.scrubbing + counts.retired;
        counts.damaged = superblock.chunks - known_chunks - buddy.free_chunks();
        let volume_sums = VolumeSums::of(&scan.volumes);
        State {
            buddy,
            volumes: scan.volumes,
            open_volumes: vec![],
            volume_sums,
            counts,
            recall: Recall::default(),
            scrub,
            findings,
        }
    }
}

/// Finds a thin volume in a pool without the feature bit for thin volumes. Neither this version nor
/// a crash leaves such a pool.
fn find_missing_feature(superblock: &Superblock, scan: &Scan) -> Option<Finding> {
    let thin = scan.volumes.values().find(|volume| volume.record.thin)?;
    let name = thin.record.name.to_string();
    (!superblock.has_thin_volumes).then_some(Finding::ThinFeatureMissing { name })
}

fn check_no_fatal(path: &Path, writable: bool, findings: &[Finding]) -> Result<(), PoolError> {
    match findings.iter().find(|f| f.severity() == Severity::Fatal) {
        Some(first) if writable => Err(PoolError::Damaged {
            path: path.to_owned(),
            first: Box::new(first.clone()),
            count: findings
                .iter()
                .filter(|f| f.severity() > Severity::Note)
                .map(Finding::count)
                .sum(),
        }),
        _ => Ok(()),
    }
}

/// Rewrites damaged and stale copies, and marks chunks for erasing.
fn correct_metadata(
    media: &dyn Media,
    superblock: &Superblock,
    findings: &[Finding],
    scan: &mut Scan,
) -> Result<(), MediaError> {
    // The copy is transferred as bytes, because a good copy may have compatible features that this
    // version does not know.
    for finding in findings {
        if let Finding::SuperblockCopy { copy } | Finding::SuperblockStale { copy } = finding {
            restore_copy::<SuperblockBytes>(media, SUPERBLOCK_OFFSETS, *copy)?;
        }
    }
    for (slot, copy) in &scan.copies_to_restore {
        restore_copy::<VolumeRecordBytes>(media, superblock.volume_record_offsets(*slot), *copy)?;
    }
    let table = ChunkTable::new(superblock);
    for chunk in scan.bad_wear.iter().chain(&scan.stale_copies).flat_map(|run| run.ids()) {
        table.correct_wear(media, chunk)?;
    }
    mark_to_scrub(media, table, scan)
}

/// Marks chunks for erasing that a crash left behind. The marks are made durable before any other
/// change, because slots and indexes in leftover words may be reused. The erasure itself can happen
/// later.
fn mark_to_scrub(media: &dyn Media, table: ChunkTable, scan: &mut Scan) -> Result<(), MediaError> {
    scan.to_scrub.append(&mut scan.lent);
    // Words that are already *scrub* are stored again. After a failed write-back, a file system may
    // keep the page, marked as clean, and never write it. A store marks the page as dirty.
    for chunk in scan.to_scrub.iter().flat_map(|run| run.ids()) {
        table.set_owner(media, chunk, Owner::Scrub)?;
    }
    // Copies must be durable before volumes get data and indexes are reused, because a repair would
    // trust stale copies.
    let stored = scan.to_scrub.iter().chain(&scan.stale_copies).chain(&scan.bad_wear);
    let entries: Vec<_> = stored.map(|run| table.byte_range(*run)).collect();
    media.persist(&entries)
}

/// Undoes step 1 of a growth: truncates the file to the pool's size, and then clears the
/// announcement. The sequence number in `current` is the one before or after the announcement.
pub(super) fn cancel_growth(
    media: &dyn Media,
    current: &Superblock,
) -> Result<Superblock, MediaError> {
    media.truncate_tail()?;
    let sequence = current.sequence.wrapping_add(2);
    let cancelled = Superblock { sequence, growing_to_bytes: 0, ..current.clone() };
    rewrite(media, &cancelled)?;
    Ok(cancelled)
}

/// Rewrites one copy of a record with the content of the other.
fn restore_copy<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
    copy: usize,
) -> Result<(), MediaError> {
    let mut good = T::new_zeroed();
    media.read(offsets[1 - copy], good.as_mut_bytes())?;
    mirrored::write_copy(media, offsets[copy], &good)
}
