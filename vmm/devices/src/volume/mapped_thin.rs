//! Thin volumes that are mapped into guest memory, for commands that release their space.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pmem_volume::btt::GuestAccess;
use pmem_volume::media::MediaError;

use crate::device::{TrimCommand, TrimVolume};
use crate::memory::holes::{ChunkAccess, HoleMetrics};
use crate::pool::PoolVolume;

/// Thin volume whose guest fills holes. The value does not keep the volume open.
pub(super) struct MappedThinVolume {
    pub name: String,
    pub volume: Weak<dyn PoolVolume>,
    pub access: ChunkAccess,
    pub metrics: Arc<HoleMetrics>,
}

/// Access of the guest while its command holds the space that it has reported.
struct AccessDuringCommand<'a> {
    access: ChunkAccess,
    command: &'a mut dyn TrimCommand,
}

impl GuestAccess for AccessDuringCommand<'_> {
    fn withdraw(&mut self, units: &[Range<u64>]) -> Result<(), MediaError> {
        self.access.withdraw(units)
    }

    fn give_back(&mut self, units: &[Range<u64>]) -> Result<(), MediaError> {
        self.access.give_back(units)
    }

    fn may_continue(&self) -> bool {
        self.command.may_continue()
    }

    fn confirm(&mut self) -> bool {
        self.command.confirm()
    }
}

impl TrimVolume for MappedThinVolume {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_attached(&self) -> bool {
        self.volume.strong_count() > 0
    }

    fn btt_uuid(&self) -> Option<String> {
        self.volume.upgrade()?.btt_uuid()
    }

    fn release_reported(
        &self,
        free: &[Range<u64>],
        command: &mut dyn TrimCommand,
    ) -> Result<u64, MediaError> {
        let Some(volume) = self.volume.upgrade() else { return Ok(0) };
        let mut access = AccessDuringCommand { access: self.access.clone(), command };
        let released_bytes = volume.release_reported(free, &mut access)?;
        self.metrics.released_bytes.fetch_add(released_bytes, Ordering::Relaxed);
        Ok(released_bytes)
    }
}
