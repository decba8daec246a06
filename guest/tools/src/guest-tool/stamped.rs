//! Writes stamped sectors until killed, and reports the sectors that have been flushed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::aligned::Aligned;
use guest_tools::content::Bytes;
use guest_tools::torn::report::{Area, FlushedRange, Line};
use guest_tools::torn::stamp::{self, Content, SECTOR_BYTES, Stamp};

pub(crate) struct Target {
    device: String,
    area: Area,
    /// Maximum number of sectors that a thread writes between two flushes.
    longest: u64,
}

impl Target {
    /// `longest` is the maximum number of adjacent sectors that a thread writes before a flush.
    pub(crate) fn new(device: &str, area: Area, longest: u64) -> Result<Self> {
        ensure!(area.threads > 0 && area.per_thread > 0, "area without sectors or threads");
        ensure!(
            (1..=area.per_thread).contains(&longest),
            "longest write is {longest} sectors, must be 1 to {}",
            area.per_thread
        );
        Ok(Self { device: device.to_owned(), area, longest })
    }

    fn open(&self, flags: i32) -> Result<File> {
        let device =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(&self.device);
        device.with_context(|| format!("Cannot open {}", self.device))
    }
}

/// Writes until an error occurs. The last thread writes through the page cache. The others use
/// direct I/O, so that sectors are in flight most of the time.
///
/// A thread writes a stretch of its sectors with a new version, in one or several pieces, flushes,
/// and reports it. It does not write these sectors again before the flush has completed. Therefore,
/// no page in the page cache is modified during its write-back, and the guest itself cannot tear a
/// sector.
pub(crate) fn write(target: &Target, seed: u64) -> Result<()> {
    thread::scope(|scope| {
        for number in 0..target.area.threads {
            scope.spawn(move || {
                if let Err(error) =
                    Writer::open(target, number, seed).and_then(|mut writer| writer.run())
                {
                    // If one thread fails, all threads end, because the failure of a single one
                    // would go unnoticed.
                    eprintln!("guest-tool: thread {number}: {error:#}");
                    std::process::exit(1);
                }
            });
        }
    });
    bail!("all threads have stopped writing")
}

struct Writer<'a> {
    target: &'a Target,
    number: u64,
    file: File,
    random: Bytes,
    memory: Aligned,
    stamps: Vec<Stamp>,
    version: u64,
}

impl<'a> Writer<'a> {
    /// Reads the versions of the thread's sectors, and reports them.
    fn open(target: &'a Target, number: u64, seed: u64) -> Result<Self> {
        let area = target.area;
        let length = usize::try_from(area.per_thread)? * SECTOR_BYTES;
        let mut memory = Aligned::zeroed(length);
        let first = area.first + number * area.per_thread;
        let direct = target.open(libc::O_DIRECT)?;
        direct.read_exact_at(&mut memory, first * SECTOR_BYTES as u64).context("Cannot read")?;
        let sectors = || (first..).zip(memory.chunks_exact(SECTOR_BYTES));
        let versions: Vec<u64> =
            sectors().map(|(sector, bytes)| version_of(sector, bytes)).collect::<Result<_>>()?;
        let version = versions.iter().copied().max().unwrap_or(0);
        print_line(&Line::Found { thread: usize::try_from(number)?, versions })?;
        let sectors = (first..).zip(memory.chunks_exact_mut(SECTOR_BYTES));
        let stamps = sectors.map(|(sector, bytes)| Stamp::new(sector, bytes)).collect();
        let file = if number + 1 < area.threads { direct } else { target.open(0)? };
        let random = Bytes::new(seed ^ number << 48);
        Ok(Self { target, number, file, random, memory, stamps, version })
    }

    fn run(&mut self) -> Result<()> {
        loop {
            let count = 1 + self.random.next_u64() % self.target.longest;
            let start = self.random.next_u64() % (self.target.area.per_thread - count + 1);
            let piece = 1 + self.random.next_u64() % count;
            self.version += 1;
            self.write_range(
                usize::try_from(start)?,
                usize::try_from(count)?,
                usize::try_from(piece)?,
            )?;
            self.file.sync_data().context("Cannot flush")?;
            let first = self.first_sector() + start;
            print_line(&Line::Flushed(FlushedRange { first, count, version: self.version }))?;
        }
    }

    /// Writes `count` of the thread's sectors from `start` on, `piece` sectors per call.
    fn write_range(&mut self, start: usize, count: usize, piece: usize) -> Result<()> {
        let at = self.first_sector() as usize + start;
        let bytes = &mut self.memory[start * SECTOR_BYTES..][..count * SECTOR_BYTES];
        for (stamp, sector) in self.stamps[start..].iter().zip(bytes.chunks_exact_mut(SECTOR_BYTES))
        {
            stamp.set_version(self.version, sector);
        }
        for (index, part) in bytes.chunks(piece * SECTOR_BYTES).enumerate() {
            let sector = at + index * piece;
            let offset = (sector * SECTOR_BYTES) as u64;
            self.file
                .write_all_at(part, offset)
                .with_context(|| format!("Cannot write sector {sector}"))?;
        }
        Ok(())
    }

    fn first_sector(&self) -> u64 {
        self.target.area.first + self.number * self.target.area.per_thread
    }
}

fn version_of(sector: u64, bytes: &[u8]) -> Result<u64> {
    match stamp::read(sector, bytes) {
        Content::Whole(version) => Ok(version),
        Content::Misplaced { sector: found } => bail!("sector {sector} has the content of {found}"),
        Content::Torn(lines) => bail!("sector {sector} is torn: {lines}"),
    }
}

/// Prints a line with a single write, so that lines of several threads do not mix.
fn print_line(line: &Line) -> Result<()> {
    io::stdout()
        .write_all(format!("{line}\n").as_bytes())
        .context("Cannot write to standard output")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: Area = Area { first: 4, per_thread: 8, threads: 2 };

    /// Returns a writer that uses a file's page cache, because not every file system supports
    /// O_DIRECT.
    fn writer<'a>(target: &'a Target, number: u64) -> Writer<'a> {
        let mut memory = Aligned::zeroed(8 * SECTOR_BYTES);
        let first = AREA.first + number * AREA.per_thread;
        let sectors = (first..).zip(memory.chunks_exact_mut(SECTOR_BYTES));
        let stamps = sectors.map(|(sector, bytes)| Stamp::new(sector, bytes)).collect();
        let file = target.open(0).unwrap();
        Writer { target, number, file, random: Bytes::new(1), memory, stamps, version: 0 }
    }

    #[test]
    fn stretch_is_written_to_its_sectors_in_pieces_of_any_size() {
        let path = std::env::temp_dir().join(format!("guest-tool-stamped-{}", std::process::id()));
        File::create(&path).unwrap().set_len(32 * SECTOR_BYTES as u64).unwrap();
        let target = Target::new(path.to_str().unwrap(), AREA, 8).unwrap();
        let mut writer = writer(&target, 1);
        for piece in 1..=5 {
            writer.version += 1;
            writer.write_range(2, 5, piece).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            for (sector, bytes) in (0..).zip(bytes.chunks_exact(SECTOR_BYTES)) {
                let version = if (14..19).contains(&sector) { writer.version } else { 0 };
                assert_eq!(stamp::read(sector, bytes), Content::Whole(version), "sector {sector}");
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn invalid_target_is_refused() {
        for longest in [0, 9] {
            assert!(Target::new("/dev/null", AREA, longest).is_err());
        }
        assert!(Target::new("/dev/null", Area { threads: 0, ..AREA }, 1).is_err());
    }
}
