//! Conditions that must hold after a crash: every sector is whole, and at least as new as its last
//! acknowledged flush.

use std::fmt;

use anyhow::{Context, Result, ensure};
use guest_tools::torn::report::{Area, FlushedRange};
use guest_tools::torn::stamp::{self, Content, Lines, SECTOR_BYTES};

/// Acknowledged version of each sector.
#[derive(Debug, Clone)]
pub(super) struct Oracle {
    area: Area,
    acknowledged: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    Torn { sector: u64, lines: Lines },
    Lost { sector: u64, found: u64, acknowledged: u64 },
    Misplaced { sector: u64, found: u64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torn { sector, lines } => write!(formatter, "Sector {sector} is torn: {lines}"),
            Self::Lost { sector, found, acknowledged } => write!(
                formatter,
                "Sector {sector} has version {found}, but the flush of version {acknowledged} was acknowledged"
            ),
            Self::Misplaced { sector, found } => {
                write!(formatter, "Sector {sector} has the content of sector {found}")
            }
        }
    }
}

/// Result of comparing the sectors found after a crash with the acknowledgments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Classification {
    /// Version of each sector, by index. `None` for a sector that is not whole.
    pub versions: Vec<Option<u64>>,
    pub faults: Vec<Fault>,
    /// Number of sectors that are newer than their acknowledged version. The crash occurred between
    /// the write and its acknowledgment.
    pub newer: usize,
}

impl Classification {
    pub fn torn(&self) -> usize {
        self.faults.iter().filter(|fault| matches!(fault, Fault::Torn { .. })).count()
    }

    pub fn lost(&self) -> usize {
        self.faults.iter().filter(|fault| matches!(fault, Fault::Lost { .. })).count()
    }

    pub fn ensure_no_faults(&self) -> Result<()> {
        let shown: Vec<String> =
            self.faults.iter().take(SHOWN_FAULTS).map(Fault::to_string).collect();
        ensure!(
            self.faults.is_empty(),
            "{} of {} sectors are wrong:\n{}",
            self.faults.len(),
            self.versions.len(),
            shown.join("\n")
        );
        Ok(())
    }
}

const SHOWN_FAULTS: usize = 10;

impl Oracle {
    pub(super) fn new(area: Area) -> Self {
        Self { area, acknowledged: vec![0; area.sectors() as usize] }
    }

    /// Records a flush that has been acknowledged to the guest.
    pub(super) fn acknowledge(&mut self, flushed: FlushedRange) -> Result<()> {
        for sector in flushed.first..flushed.first.saturating_add(flushed.count) {
            let index = self
                .area
                .index(sector)
                .with_context(|| format!("Sector {sector} has no writer"))?;
            let version = &mut self.acknowledged[index];
            *version = flushed.version.max(*version);
        }
        Ok(())
    }

    pub(super) fn classify(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Classification> {
        let mut classification = Classification::default();
        let mut bytes = vec![0; SECTOR_BYTES];
        for (index, &acknowledged) in self.acknowledged.iter().enumerate() {
            let sector = self.area.sector(index);
            read(sector, &mut bytes).with_context(|| format!("Cannot read sector {sector}"))?;
            let (version, fault) = match stamp::read(sector, &bytes) {
                Content::Whole(found) if found < acknowledged => {
                    (Some(found), Some(Fault::Lost { sector, found, acknowledged }))
                }
                Content::Whole(found) => (Some(found), None),
                Content::Misplaced { sector: found } => {
                    (None, Some(Fault::Misplaced { sector, found }))
                }
                Content::Torn(lines) => (None, Some(Fault::Torn { sector, lines })),
            };
            classification.newer += usize::from(version > Some(acknowledged));
            classification.versions.push(version);
            classification.faults.extend(fault);
        }
        Ok(classification)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_tools::torn::stamp::Stamp;

    const AREA: Area = Area { first: 256, per_thread: 4, threads: 2 };

    fn sector(number: u64, version: u64) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR_BYTES];
        Stamp::new(number, &mut bytes).set_version(version, &mut bytes);
        bytes
    }

    /// Checks sectors in which the version is the sector number minus 250, except for the sector
    /// `exception`.
    fn classified(exception: u64, content: &[u8]) -> Classification {
        let mut oracle = Oracle::new(AREA);
        for first in 256..264 {
            oracle.acknowledge(FlushedRange { first, count: 1, version: first - 250 }).unwrap();
        }
        oracle
            .classify(|number, bytes| {
                let found = if number == exception {
                    content.to_vec()
                } else {
                    sector(number, number - 250)
                };
                bytes.copy_from_slice(&found);
                Ok(())
            })
            .unwrap()
    }

    #[test]
    fn acknowledged_and_newer_versions_are_accepted() {
        let unchanged = classified(258, &sector(258, 8));
        assert!(unchanged.ensure_no_faults().is_ok() && unchanged.newer == 0);
        let newer = classified(258, &sector(258, 9));
        assert!(newer.ensure_no_faults().is_ok() && newer.newer == 1);
        assert_eq!(newer.versions[2], Some(9));
    }

    #[test]
    fn older_torn_and_misplaced_sectors_are_found() {
        let older = classified(258, &sector(258, 7));
        assert_eq!(older.faults, [Fault::Lost { sector: 258, found: 7, acknowledged: 8 }]);
        assert_eq!((older.lost(), older.torn()), (1, 0));
        assert!(older.ensure_no_faults().unwrap_err().to_string().contains("1 of 8 sectors"));
        assert_eq!(classified(258, &[0; SECTOR_BYTES]).lost(), 1);
        let mut torn = sector(258, 8);
        torn[..512].copy_from_slice(&sector(258, 9)[..512]);
        assert_eq!(classified(258, &torn).torn(), 1);
        assert_eq!(
            classified(258, &sector(257, 8)).faults,
            [Fault::Misplaced { sector: 258, found: 257 }]
        );
    }

    #[test]
    fn acknowledgment_of_foreign_sectors_is_an_error() {
        let mut oracle = Oracle::new(AREA);
        assert!(oracle.acknowledge(FlushedRange { first: 262, count: 3, version: 1 }).is_err());
        assert!(oracle.acknowledge(FlushedRange { first: 0, count: 1, version: 1 }).is_err());
    }
}
