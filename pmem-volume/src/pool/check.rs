//! A full look at a pool and every volume in it, from the media alone. Nothing is changed.

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use super::findings::{Finding, Severity};
use super::redo_log::{self, Redone};
use super::scan::scan;
use super::volume_record::VolumeFormat;
use super::{Pool, PoolError};
use crate::btt;
use std::sync::Arc;

/// What a check found.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// About the pool itself.
    pub pool: Vec<Finding>,
    /// About each volume.
    pub volumes: Vec<VolumeCheck>,
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
}

impl Pool {
    /// Checks tables and volumes. What was found and put right at open is not reported again; open the pool for
    /// reading to see the media as it was left.
    pub fn check(self: &Arc<Self>) -> Result<CheckReport, PoolError> {
        let mut pool = Vec::new();
        {
            // Nothing changes while the state is locked.
            let state = self.lock_state();
            if self.mode != super::OpenMode::ReadWrite {
                // Superblocks and log were looked at when the pool was opened, and nobody has changed them since.
                pool.extend(state.findings.iter().filter(|f| is_of_open(f)).cloned());
            }
            let log = self.latch(redo_log::read(self.media(), &self.superblock))?;
            let media = Redone::new(self.media(), &log);
            let mut found = self.latch(scan(&media, &self.superblock))?.findings;
            if self.mode == super::OpenMode::ReadWrite {
                // Memory that this process has lent is as it should be.
                found.retain(|f| !matches!(f, Finding::StillLent { .. } | Finding::Unscrubbed { .. }));
            }
            pool.append(&mut found);
        }
        let volumes =
            self.volumes().into_iter().map(|info| self.check_volume(&info.name, info.format)).collect();
        Ok(CheckReport { pool, volumes })
    }

    fn check_volume(self: &Arc<Self>, name: &str, format: VolumeFormat) -> VolumeCheck {
        let result = match format {
            VolumeFormat::Raw => Ok(None),
            VolumeFormat::Btt => self.open_volume(name).and_then(|volume| volume.check_btt()),
        };
        let (btt, unusable) = match result {
            Ok(btt) => (btt, None),
            Err(PoolError::Media(error)) => (None, Some(error.to_string())),
            Err(error) => (None, Some(error.to_string())),
        };
        VolumeCheck { name: name.to_owned(), btt, unusable }
    }
}

fn is_of_open(finding: &Finding) -> bool {
    matches!(
        finding,
        Finding::SuperblockCopy { .. }
            | Finding::SuperblockStale { .. }
            | Finding::GrowthUnfinished { .. }
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
