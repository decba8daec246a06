//! Lines that the guest's writer prints.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail};

/// Range of sectors of a writer. Each thread has its own part, and the parts are adjacent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    pub first: u64,
    pub per_thread: u64,
    pub threads: u64,
}

impl Area {
    pub fn sectors(&self) -> u64 {
        self.per_thread * self.threads
    }

    pub fn sector(&self, index: usize) -> u64 {
        self.first + index as u64
    }

    pub fn index(&self, sector: u64) -> Option<usize> {
        let index = sector.checked_sub(self.first).filter(|index| *index < self.sectors())?;
        usize::try_from(index).ok()
    }

    /// Returns the thread to which the sector with this index belongs.
    pub fn thread(&self, index: usize) -> usize {
        index / self.per_thread as usize
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    Found {
        thread: usize,
        versions: Vec<u64>,
    },
    /// A flush has completed after these sectors were written.
    Flushed(FlushedRange),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushedRange {
    pub first: u64,
    pub count: u64,
    /// Version of these sectors, unless a newer version has been written.
    pub version: u64,
}

impl fmt::Display for Line {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Found { thread, versions } => {
                write!(formatter, "found {thread}")?;
                versions.iter().try_for_each(|version| write!(formatter, " {version}"))
            }
            Self::Flushed(FlushedRange { first, count, version }) => {
                write!(formatter, "flushed {first} {count} {version}")
            }
        }
    }
}

impl FromStr for Line {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let mut words = line.split(' ');
        let kind = words.next();
        let numbers: Vec<u64> = words
            .map(|word| {
                word.parse().with_context(|| format!("{word:?} is not a number in {line:?}"))
            })
            .collect::<Result<_>>()?;
        match (kind, numbers.as_slice()) {
            (Some("found"), [thread, versions @ ..]) => {
                Ok(Self::Found { thread: usize::try_from(*thread)?, versions: versions.to_vec() })
            }
            (Some("flushed"), &[first, count, version]) => {
                Ok(Self::Flushed(FlushedRange { first, count, version }))
            }
            _ => bail!("Not a line of the writer: {line:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_formatting() {
        for line in [
            Line::Found { thread: 3, versions: vec![0, 17, 4] },
            Line::Flushed(FlushedRange { first: 256, count: 12, version: 99 }),
        ] {
            assert_eq!(line.to_string().parse::<Line>().unwrap(), line);
        }
        // A line that was cut off by the kill is not an acknowledgment.
        for wrong in ["", "flushed 256 12", "flushed 256 12 9x", "found", "flushed 1 2 3 4"] {
            assert!(wrong.parse::<Line>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_area_counts_its_sectors() {
        let area = Area { first: 256, per_thread: 64, threads: 4 };
        assert_eq!((area.sectors(), area.sector(3), area.index(259)), (256, 259, Some(3)));
        assert_eq!((area.index(255), area.index(512), area.thread(64)), (None, None, 1));
    }
}
