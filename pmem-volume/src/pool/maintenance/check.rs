//! Complete check of a pool and its volumes, from the media alone. Changes nothing. A failed read
//! does not make the pool read-only, because durability does not depend on it.

use std::sync::Arc;

use foreshore_types::VolumeFormat;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use super::free_content::ContentFinder;
use crate::btt;
use crate::media::Media;
use crate::pool::findings::{Finding, Findings, Severity};
use crate::pool::format::chunk::{ChunkId, Run, runs};
use crate::pool::format::table::Owner;
use crate::pool::redo_log::{self, Redone};
use crate::pool::scan::scan;
use crate::pool::volume::{Space, VolumeInfo, volume_extents};
use crate::pool::{Pool, PoolError, bytes};
use crate::progress::{OnProgress, Progress, Task, unheard};

/// Chunks that are read in one go while nobody can change anything: some ten milliseconds.
const LOCKED_CHUNKS: u32 = 32;

/// How often a volume that is in use is looked at again when something seems to be wrong.
const LOOKS_AGAIN: u32 = 3;

/// What a check found.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// About the pool itself.
    pub pool: Vec<Finding>,
    /// About each volume.
    pub volumes: Vec<VolumeCheck>,
    /// Of so much of the pool nobody can say whose it is: of a volume whose record is lost, for
    /// instance.
    pub damaged_bytes: u64,
}

/// What a check found in a volume.
#[derive(Debug, Serialize)]
pub struct VolumeCheck {
    /// The volume.
    pub name: String,
    /// Its BTT, if it has one that could be looked at.
    pub btt: Option<btt::Report>,
    /// Why it could not be looked at.
    pub unusable: Option<String>,
}

impl CheckReport {
    /// Is everything as it should be, apart from what a crash leaves behind by design?
    pub fn is_clean(&self) -> bool {
        self.pool.iter().all(|finding| finding.severity() == Severity::Note)
            && self
                .volumes
                .iter()
                .all(|v| v.unusable.is_none() && v.btt.as_ref().is_none_or(btt::Report::is_clean))
    }

    /// How many things are damaged.
    pub fn damaged(&self) -> u64 {
        let pool = self.pool.iter().filter(|finding| finding.severity() > Severity::Note).count();
        let of_volume = |volume: &VolumeCheck| match (&volume.btt, &volume.unusable) {
            (_, Some(_)) => 1,
            (Some(btt), None) => btt.arenas.iter().map(|arena| arena.findings_total).sum(),
            (None, None) => 0,
        };
        pool as u64 + self.volumes.iter().map(of_volume).sum::<u64>()
    }

    /// How much waits to be erased, if nobody has the pool: what somebody has lent does not wait.
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

/// Free space and volumes that are checked one after the other, as one task.
pub(in crate::pool) struct Checking<'a> {
    done_bytes: u64,
    total_bytes: u64,
    progress: OnProgress<'a>,
}

impl<'a> Checking<'a> {
    /// `free_bytes`: how much free space is checked before the volumes.
    pub(in crate::pool) fn new(
        free_bytes: u64,
        volumes: &[VolumeInfo],
        progress: OnProgress<'a>,
    ) -> Self {
        let total_bytes = free_bytes + volumes.iter().map(|volume| volume.size_bytes).sum::<u64>();
        Self { done_bytes: 0, total_bytes, progress }
    }

    /// Lets the next volume be checked, by somebody who says up to where it is.
    pub(in crate::pool) fn volume<T>(
        &mut self,
        info: &VolumeInfo,
        check: impl FnOnce(&mut dyn FnMut(u64)) -> T,
    ) -> T {
        self.part(info.size_bytes, check)
    }

    /// The same with the next so many bytes.
    pub(in crate::pool) fn part<T>(
        &mut self,
        size_bytes: u64,
        check: impl FnOnce(&mut dyn FnMut(u64)) -> T,
    ) -> T {
        self.say(0);
        let checked = check(&mut |reached| self.say(reached.min(size_bytes)));
        self.done_bytes += size_bytes;
        self.say(0);
        checked
    }

    fn say(&mut self, more_bytes: u64) {
        let done_bytes = self.done_bytes + more_bytes;
        (self.progress)(Progress { task: Task::Check, done_bytes, total_bytes: self.total_bytes });
    }
}

impl<M: Media> Pool<M> {
    /// Checks tables, volumes, and that free chunks read as zeros. What was found and put right at
    /// open is not reported again; open the pool for reading to see the media as it was left.
    pub fn check(self: &Arc<Self>) -> Result<CheckReport, PoolError> {
        self.check_with(&mut unheard)
    }

    /// The same; `progress` hears how far free space and volumes are checked.
    pub fn check_with(
        self: &Arc<Self>,
        progress: OnProgress<'_>,
    ) -> Result<CheckReport, PoolError> {
        let mut pool = Vec::new();
        let mut free;
        {
            // Nothing changes while the state is locked.
            let state = self.lock_state();
            if self.mode != crate::pool::OpenMode::ReadWrite {
                // Superblocks and log were looked at when the pool was opened, and nobody has
                // changed them since.
                pool.extend(state.findings.iter().filter(|f| is_of_open(f)).cloned());
            }
            let log = redo_log::read(self.media(), &self.superblock)?;
            let media = Redone::new(self.media(), &log);
            let scan = scan(&media, &self.superblock)?;
            let mut found = scan.findings;
            free = scan.free;
            if self.mode == crate::pool::OpenMode::ReadWrite {
                // Memory that this process has lent is as it should be.
                found.retain(|f| {
                    !matches!(f, Finding::StillLent { .. } | Finding::Unscrubbed { .. })
                });
            }
            pool.append(&mut found);
        }
        if self.mode == crate::pool::OpenMode::Peek {
            // Somebody else may have got and written them by the time that they are read.
            free.clear();
        }
        let volumes = self.volumes();
        let free_bytes = free.iter().map(|run| run.len_bytes()).sum();
        let mut checking = Checking::new(free_bytes, &volumes, progress);
        pool.append(&mut self.check_free(&free, &mut checking)?);
        let check = |info| checking.volume(info, |reached| self.check_volume(info, reached));
        let volumes = volumes.iter().map(check).collect();
        Ok(CheckReport { damaged_bytes: self.info().damaged_bytes, pool, volumes })
    }

    /// Checks one volume's BTT; `progress` hears how far it is. `None`: a raw volume has nothing to
    /// check.
    pub fn check_volume_with(
        self: &Arc<Self>,
        name: &str,
        progress: OnProgress<'_>,
    ) -> Result<Option<btt::Report>, PoolError> {
        let volume = self.open_volume(name)?;
        let info = volume.info().clone();
        Ok(Checking::new(0, std::slice::from_ref(&info), progress)
            .volume(&info, |reached| volume.check_btt_with(reached)))
    }

    /// Free chunks that do not read as zeros.
    fn check_free(
        &self,
        free: &[Run],
        checking: &mut Checking<'_>,
    ) -> Result<Vec<Finding>, PoolError> {
        let mut finder = ContentFinder::new();
        let mut found = Findings::default();
        let mut name = |chunk| found.add(Finding::NotErased { chunk });
        for run in free {
            checking.part(run.len_bytes(), |reached| match self.mode {
                crate::pool::OpenMode::ReadWrite => {
                    self.look_while_free(*run, &mut finder, reached, &mut name)
                }
                _ => Ok(finder.look(self.media(), *run, reached, &mut name)?),
            })?;
        }
        Ok(found.into_list())
    }

    /// Looks at what is left of a run that was free. As long as the state is locked, nobody gets
    /// any of it; so that is never long.
    fn look_while_free(
        &self,
        run: Run,
        finder: &mut ContentFinder,
        reached: &mut dyn FnMut(u64),
        name: &mut dyn FnMut(ChunkId),
    ) -> Result<(), PoolError> {
        let mut at = run.start;
        while at < run.end() {
            let chunks = LOCKED_CHUNKS.min(run.end().0 - at.0);
            let _state = self.lock_state();
            for chunk in (Run { start: at, chunks }).ids() {
                if self.table.owner(self.media(), chunk)? == Ok(Owner::Free) {
                    let one = Run { start: chunk, chunks: 1 };
                    finder.look(self.media(), one, &mut |_| {}, name)?;
                }
            }
            at = at.plus(chunks);
            reached(Run { start: run.start, chunks: at.0 - run.start.0 }.len_bytes());
        }
        Ok(())
    }

    /// A volume that somebody in this process has open, and may write meanwhile: what is found
    /// every time counts.
    fn check_in_use(
        &self,
        name: &str,
        reached: &mut dyn FnMut(u64),
    ) -> Result<btt::Report, PoolError> {
        let extents = {
            let state = self.lock_state();
            let entry = &state.volumes[&state.require_volume(name)?];
            entry.check_usable()?;
            volume_extents(&runs(entry.chunk_ids()))
        };
        let space = Space { media: self.media(), extents: &extents };
        let mut found = btt::check_with(&space, reached);
        for _ in 0..LOOKS_AGAIN {
            if found.is_clean() {
                break;
            }
            found.keep_common(&btt::check(&space));
        }
        Ok(found)
    }

    fn check_volume(
        self: &Arc<Self>,
        info: &VolumeInfo,
        reached: &mut dyn FnMut(u64),
    ) -> VolumeCheck {
        let result = match info.format {
            VolumeFormat::Raw => Ok(None),
            VolumeFormat::Btt => match self.open_volume(&info.name) {
                Err(PoolError::VolumeInUse { .. }) => {
                    self.check_in_use(&info.name, reached).map(Some)
                }
                opened => opened.map(|volume| volume.check_btt_with(reached)),
            },
        };
        let (btt, unusable) = match result {
            Ok(btt) => (btt, None),
            // What is not there yet is no damage; the pool's findings have it.
            Err(PoolError::VolumeUnfinished { .. }) => (None, None),
            Err(PoolError::Media(error)) => (None, Some(foreshore_types::chain(&error))),
            // Who checks knows the rest.
            Err(PoolError::VolumeUnusable { reason, .. }) => (None, Some(reason)),
            Err(error) => (None, Some(foreshore_types::chain(&error))),
        };
        VolumeCheck { name: info.name.clone(), btt, unusable }
    }
}

fn is_of_open(finding: &Finding) -> bool {
    matches!(
        finding,
        Finding::SuperblockCopy { .. }
            | Finding::SuperblockStale { .. }
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
