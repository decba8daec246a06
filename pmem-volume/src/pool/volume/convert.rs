//! Conversion of volumes between thin and thick.

use super::{Search, VolumeInfo, volume_info};
use crate::media::Media;
use crate::pool::alloc::free_content::ContentFinder;
use crate::pool::format::chunk::{ChunkId, Run, runs};
use crate::pool::format::table::Slot;
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::{Pool, PoolError, State, bytes};
use crate::progress::{OnProgress, Progress, Task, ignore_progress};

impl<M: Media> Pool<M> {
    /// Makes a volume thin or thick. It must not be open in this process. Its content and size do
    /// not change.
    ///
    /// A thick volume gets chunks for all of its holes, and all of it is then guaranteed. A thin
    /// volume loses all chunks that read as zeros, even if it was thin before. After a crash, the
    /// call can be repeated.
    pub fn convert_volume(&self, name: &str, thin: bool) -> Result<VolumeInfo, PoolError> {
        self.convert_volume_with(name, thin, &mut ignore_progress)
    }

    /// Converts a volume as [`Pool::convert_volume`] does, and reports the progress of reading a
    /// volume that becomes thin.
    pub fn convert_volume_with(
        &self,
        name: &str,
        thin: bool,
        progress: OnProgress<'_>,
    ) -> Result<VolumeInfo, PoolError> {
        match thin {
            true => self.make_thin(name, progress),
            false => self.make_thick(name),
        }
    }

    /// 1. Allocate chunks for all holes. When their owner words are durable, the volume is still
    ///    thin, but has no hole.
    /// 2. Write the record without the flag. From here on, a missing chunk is damage.
    fn make_thick(&self, name: &str) -> Result<VolumeInfo, PoolError> {
        let mut state = self.lock_for_change()?;
        // Plan again after each unlock, because the state may have changed in the meantime.
        let (slot, holes) = loop {
            let slot = state.require_closed_volume(name)?;
            let entry = &state.volumes[&slot];
            entry.check_usable()?;
            let chunks = entry.record.chunks - entry.allocated();
            // Compared first, because the size of a volume is untrusted.
            state.check_promise(entry.promised(), entry.record.chunks)?;
            if chunks > state.available_chunks() {
                return Err(state.pool_full(bytes(chunks)));
            }
            match state.missing_clean(chunks) {
                0 => break (slot, state.volumes[&slot].holes()),
                missing => state = self.erase_some(state, missing)?,
            }
        };
        self.add_chunks(&mut state, slot, &holes, Search::Best)?;
        self.set_thin(&mut state, slot, false)?;
        Ok(volume_info(&state.volumes[&slot]))
    }

    /// 1. Set the feature bit, and write the record with the flag. From here on, a hole is allowed.
    /// 2. Find the chunks that read as zeros. Reading takes long, so the state is not locked during
    ///    this step, and the volume counts as open.
    /// 3. Release these chunks.
    fn make_thin(&self, name: &str, progress: OnProgress<'_>) -> Result<VolumeInfo, PoolError> {
        let mut state = self.lock_for_change()?;
        let slot = state.require_closed_volume(name)?;
        state.volumes[&slot].check_usable()?;
        self.set_thin(&mut state, slot, true)?;
        let present = runs(state.volumes[&slot].chunk_ids());
        state.open_volumes.push(slot);
        drop(state);
        self.forget_clean_pages(&present);
        let with_data = self.find_data(&present, progress);
        let mut state = self.lock_state();
        state.open_volumes.retain(|open| *open != slot);
        let released = with_data.and_then(|with_data| {
            self.check_not_latched()?;
            self.release_others(&mut state, slot, &with_data)
        });
        released.map(|()| volume_info(&state.volumes[&slot]))
    }

    /// Writes the record with or without the flag of a thin volume, unless it is already correct.
    fn set_thin(&self, state: &mut State, slot: Slot, thin: bool) -> Result<(), PoolError> {
        let old = &state.volumes[&slot].record;
        if old.thin == thin {
            return Ok(());
        }
        let reserve_chunks = if thin { old.reserve_chunks } else { old.chunks };
        let sequence = self.next_sequence(slot)?;
        let record = VolumeRecord { sequence, thin, reserve_chunks, ..old.clone() };
        if thin {
            self.allow_thin_volumes(state)?;
        }
        self.write_record(state, record)
    }

    /// Returns the chunks that do not read as zeros, in the order of `runs`.
    fn find_data(&self, runs: &[Run], progress: OnProgress<'_>) -> Result<Vec<ChunkId>, PoolError> {
        let total_bytes = runs.iter().map(|run| run.len_bytes()).sum();
        let (mut finder, mut found, mut done_bytes) = (ContentFinder::new(), vec![], 0);
        for run in runs {
            let on_checked = &mut |position| {
                let done_bytes = done_bytes + position;
                progress(Progress { task: Task::Check, done_bytes, total_bytes });
            };
            finder.search(self.media(), *run, on_checked, &mut |chunk| found.push(chunk))?;
            done_bytes += run.len_bytes();
        }
        Ok(found)
    }

    /// Releases all chunks of a thin volume except `kept`.
    fn release_others(
        &self,
        state: &mut State,
        slot: Slot,
        kept: &[ChunkId],
    ) -> Result<(), PoolError> {
        let entry = &state.volumes[&slot];
        let kept = std::collections::HashSet::<_>::from_iter(kept);
        let (stay, leave): (Vec<_>, Vec<_>) =
            entry.chunks.iter().partition(|(_, chunk)| kept.contains(chunk));
        state.change_volume(slot, |entry| entry.chunks = stay);
        self.release_chunks(state, &runs(leave.into_iter().map(|(_, chunk)| chunk)))
    }
}
