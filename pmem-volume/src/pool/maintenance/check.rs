//! Complete check of a pool and its volumes, based only on the media. The check changes nothing. A
//! failed read does not make the pool read-only, because it does not affect durability.

use std::sync::Arc;

use foreshore_types::VolumeFormat;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::btt;
use crate::media::Media;
use crate::pool::alloc::free_content::ContentFinder;
use crate::pool::findings::{Finding, Findings, Severity};
use crate::pool::format::chunk::{ChunkId, Run};
use crate::pool::format::table::Owner;
use crate::pool::redo_log::{self, Redone};
use crate::pool::scan::scan;
use crate::pool::volume::{Space, VolumeInfo};
use crate::pool::{Pool, PoolError, bytes};
use crate::progress::{OnProgress, Progress, Task, ignore_progress};

/// Number of chunks that are read while the state is locked, for about 10 ms.
const LOCKED_CHUNKS: u32 = 32;

/// Number of repeated checks of a volume in use if a check finds defects.
const MAX_RECHECKS: u32 = 3;

/// Result of a check.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// Findings about the pool itself.
    pub pool: Vec<Finding>,
    /// Results for each volume.
    pub volumes: Vec<VolumeCheck>,
    /// Bytes whose owner is unknown, for example because the record of a volume is lost.
    pub damaged_bytes: u64,
}

/// Result of the check of a volume.
#[derive(Debug, Serialize)]
pub struct VolumeCheck {
    /// Name of the volume.
    pub name: String,
    /// Report on the volume's BTT, if it has one that could be checked.
    pub btt: Option<btt::Report>,
    /// Reason why the volume could not be checked.
    pub unusable: Option<String>,
}

impl CheckReport {
    /// Returns true if nothing is damaged. Expected leftovers of a crash are not damage.
    pub fn is_clean(&self) -> bool {
        self.pool.iter().all(|finding| finding.severity() == Severity::Note)
            && self
                .volumes
                .iter()
                .all(|v| v.unusable.is_none() && v.btt.as_ref().is_none_or(btt::Report::is_clean))
    }

    /// Returns the number of defects.
    pub fn damaged(&self) -> u64 {
        let pool = self.pool.iter().filter(|finding| finding.severity() > Severity::Note).count();
        let of_volume = |volume: &VolumeCheck| match (&volume.btt, &volume.unusable) {
            (_, Some(_)) => 1,
            (Some(btt), None) => btt.arenas.iter().map(|arena| arena.findings_total).sum(),
            (None, None) => 0,
        };
        pool as u64 + self.volumes.iter().map(of_volume).sum::<u64>()
    }

    /// Returns the number of bytes that must be erased if the pool is not in use. Memory that
    /// another process has borrowed is not included.
    pub fn waiting_bytes(&self) -> u64 {
        let waiting = |finding: &Finding| match finding {
            Finding::StillLent { chunks }
            | Finding::Unscrubbed { chunks }
            | Finding::Leftover { chunks } => *chunks,
            _ => 0,
        };
        bytes(self.pool.iter().map(waiting).sum())
    }
}

/// Progress of a check, as a single task. The check covers the free space first, and then the
/// volumes.
pub(in crate::pool) struct CheckProgress<'a> {
    done_bytes: u64,
    total_bytes: u64,
    progress: OnProgress<'a>,
}

impl<'a> CheckProgress<'a> {
    /// `free_bytes` is the size of the free space, which is checked before the volumes.
    pub(in crate::pool) fn new(
        free_bytes: u64,
        volumes: &[VolumeInfo],
        progress: OnProgress<'a>,
    ) -> Self {
        // The sizes of thin volumes are untrusted, so the sums may not fit.
        let sizes = volumes.iter().map(|volume| volume.size_bytes);
        let total_bytes = sizes.fold(free_bytes, u64::saturating_add);
        Self { done_bytes: 0, total_bytes, progress }
    }

    /// Checks the next volume. `check` reports its position.
    pub(in crate::pool) fn volume<T>(
        &mut self,
        info: &VolumeInfo,
        check: impl FnOnce(&mut dyn FnMut(u64)) -> T,
    ) -> T {
        self.part(info.size_bytes, check)
    }

    /// Checks the next `size_bytes`, like [`Self::volume`].
    pub(in crate::pool) fn part<T>(
        &mut self,
        size_bytes: u64,
        check: impl FnOnce(&mut dyn FnMut(u64)) -> T,
    ) -> T {
        self.report(0);
        let checked = check(&mut |position| self.report(position.min(size_bytes)));
        self.done_bytes = self.done_bytes.saturating_add(size_bytes);
        self.report(0);
        checked
    }

    fn report(&mut self, more_bytes: u64) {
        let done_bytes = self.done_bytes.saturating_add(more_bytes);
        (self.progress)(Progress { task: Task::Check, done_bytes, total_bytes: self.total_bytes });
    }
}

impl<M: Media> Pool<M> {
    /// Checks the tables and volumes, and checks that free chunks read as zeros. Findings that
    /// opening the pool has corrected are not reported again. To examine the media as the last user
    /// left it, open the pool for reading.
    pub fn check(self: &Arc<Self>) -> Result<CheckReport, PoolError> {
        self.check_with(&mut ignore_progress)
    }

    /// Checks a pool as [`Pool::check`] does, and reports the progress to `progress`.
    pub fn check_with(
        self: &Arc<Self>,
        progress: OnProgress<'_>,
    ) -> Result<CheckReport, PoolError> {
        let mut pool = Vec::new();
        let mut free;
        {
            // The state is locked, so the pool does not change during the check.
            let state = self.lock_state();
            if self.mode != crate::pool::OpenMode::ReadWrite {
                // The superblocks and the log were examined when the pool was opened, and have not
                // changed since.
                pool.extend(state.findings.iter().filter(|f| is_found_at_open(f)).cloned());
            }
            let superblock = self.superblock();
            let log = redo_log::read(self.media(), &superblock)?;
            let media = Redone::new(self.media(), &log);
            let scan = scan(&media, &superblock)?;
            let mut found = scan.findings;
            free = scan.free;
            if self.mode == crate::pool::OpenMode::ReadWrite {
                // Memory that this process has lent is not a finding.
                found.retain(|f| {
                    !matches!(f, Finding::StillLent { .. } | Finding::Unscrubbed { .. })
                });
            }
            pool.append(&mut found);
        }
        if self.mode == crate::pool::OpenMode::Peek {
            // Another process may have allocated and written these chunks before they are read.
            free.clear();
        }
        let volumes = self.volumes();
        let free_bytes = free.iter().map(|run| run.len_bytes()).sum();
        let mut check_progress = CheckProgress::new(free_bytes, &volumes, progress);
        pool.append(&mut self.check_free(&free, &mut check_progress)?);
        let check =
            |info| check_progress.volume(info, |on_checked| self.check_volume(info, on_checked));
        let volumes = volumes.iter().map(check).collect();
        Ok(CheckReport { damaged_bytes: self.info().damaged_bytes, pool, volumes })
    }

    /// Checks the BTT of one volume, and reports the progress to `progress`. Returns `None` for a
    /// raw volume.
    pub fn check_volume_with(
        self: &Arc<Self>,
        name: &str,
        progress: OnProgress<'_>,
    ) -> Result<Option<btt::Report>, PoolError> {
        let volume = self.open_volume(name)?;
        let info = volume.info().clone();
        Ok(CheckProgress::new(0, std::slice::from_ref(&info), progress)
            .volume(&info, |on_checked| volume.check_btt_with(on_checked)))
    }

    /// Finds free chunks that do not read as zeros.
    fn check_free(
        &self,
        free: &[Run],
        check_progress: &mut CheckProgress<'_>,
    ) -> Result<Vec<Finding>, PoolError> {
        let mut finder = ContentFinder::new();
        let mut found = Findings::default();
        let mut name = |chunk| found.add(Finding::NotErased { chunk });
        for run in free {
            check_progress.part(run.len_bytes(), |on_checked| match self.mode {
                crate::pool::OpenMode::ReadWrite => {
                    self.search_while_free(*run, &mut finder, on_checked, &mut name)
                }
                _ => Ok(finder.search(self.media(), *run, on_checked, &mut name)?),
            })?;
        }
        Ok(found.into_list())
    }

    /// Checks those chunks of a run that are still free. Locking the state prevents their
    /// allocation, so it is locked only for short periods.
    fn search_while_free(
        &self,
        run: Run,
        finder: &mut ContentFinder,
        on_checked: &mut dyn FnMut(u64),
        name: &mut dyn FnMut(ChunkId),
    ) -> Result<(), PoolError> {
        let mut at = run.start;
        while at < run.end() {
            let chunks = LOCKED_CHUNKS.min(run.end().0 - at.0);
            let _state = self.lock_state();
            let table = self.table();
            for chunk in (Run { start: at, chunks }).ids() {
                if table.owner(self.media(), chunk)? == Ok(Owner::Free) {
                    let one = Run { start: chunk, chunks: 1 };
                    finder.search(self.media(), one, &mut |_| {}, name)?;
                }
            }
            at = at.plus(chunks);
            on_checked(Run { start: run.start, chunks: at.0 - run.start.0 }.len_bytes());
        }
        Ok(())
    }

    /// Checks a volume that is open in this process and may be written concurrently. Only findings
    /// that every repeated check returns are reported.
    fn check_in_use(
        &self,
        name: &str,
        on_checked: &mut dyn FnMut(u64),
    ) -> Result<btt::Report, PoolError> {
        let mut found = self.check_once(name, on_checked)?;
        for _ in 0..MAX_RECHECKS {
            if found.is_clean() {
                break;
            }
            found.retain_common(&self.check_once(name, &mut |_| {})?);
        }
        Ok(found)
    }

    /// Checks the BTT of a volume in use, with the chunks that the volume has now.
    fn check_once(
        &self,
        name: &str,
        on_checked: &mut dyn FnMut(u64),
    ) -> Result<btt::Report, PoolError> {
        let (extents, size_bytes) = {
            let state = self.lock_state();
            let entry = &state.volumes[&state.require_volume(name)?];
            entry.check_usable()?;
            (entry.extents(), entry.record.size_bytes())
        };
        let space = Space::with_holes(self.media(), &extents, size_bytes);
        Ok(btt::check_with(&space, on_checked))
    }

    fn check_volume(
        self: &Arc<Self>,
        info: &VolumeInfo,
        on_checked: &mut dyn FnMut(u64),
    ) -> VolumeCheck {
        let result = match info.format {
            VolumeFormat::Raw => Ok(None),
            VolumeFormat::Btt => match self.open_volume(&info.name) {
                Err(PoolError::VolumeInUse { .. }) => {
                    self.check_in_use(&info.name, on_checked).map(Some)
                }
                opened => opened.map(|volume| volume.check_btt_with(on_checked)),
            },
        };
        let (btt, unusable) = match result {
            Ok(btt) => (btt, None),
            // An unfinished part is not damage of the volume. It is reported as a finding of the
            // pool.
            Err(PoolError::VolumeUnfinished { .. }) => (None, None),
            Err(PoolError::Media(error)) => (None, Some(foreshore_types::chain(&error))),
            // The rest of the error is the name of the volume, which is reported separately.
            Err(PoolError::VolumeUnusable { reason, .. }) => (None, Some(reason)),
            Err(error) => (None, Some(foreshore_types::chain(&error))),
        };
        VolumeCheck { name: info.name.clone(), btt, unusable }
    }
}

fn is_found_at_open(finding: &Finding) -> bool {
    matches!(
        finding,
        Finding::SuperblockCopy { .. }
            | Finding::SuperblockStale { .. }
            | Finding::ThinFeatureMissing { .. }
            | Finding::GrowthUnfinished { .. }
            | Finding::BlocksLost { .. }
            | Finding::CopyOnWrite { .. }
            | Finding::LogPending { .. }
            | Finding::LogDamaged { .. }
    )
}

impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Finding", 2)?;
        fields.serialize_field("severity", &self.severity())?;
        fields.serialize_field("text", &self.to_string())?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::pool::format::layout::MAX_CHUNKS;

    #[test]
    fn progress_of_a_crafted_pool_does_not_overflow() {
        let largest = VolumeInfo {
            name: "v".to_owned(),
            uuid: Uuid::nil(),
            format: VolumeFormat::Btt,
            size_bytes: MAX_CHUNKS * crate::CHUNK_BYTES,
            reserve_bytes: 0,
            allocated_bytes: 0,
            extents: 0,
            thin: true,
        };
        let volumes = vec![largest; (1 << 15) + 1];
        let mut reported = Vec::new();
        let mut progress = |progress: Progress| reported.push(progress.done_bytes);
        let mut check_progress = CheckProgress::new(crate::CHUNK_BYTES, &volumes, &mut progress);
        check_progress.part(crate::CHUNK_BYTES, |_| {});
        for info in &volumes {
            check_progress.volume(info, |on_checked| on_checked(info.size_bytes));
        }
        assert!(reported.is_sorted() && reported.last() == Some(&u64::MAX));
    }
}
