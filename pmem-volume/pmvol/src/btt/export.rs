//! Export of a volume's sectors to an image file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use foreshore_types::size::Size;
use pmem_volume::btt::{Finding, ReadFailure, Reader};
use pmem_volume::media::is_zero;
use pmem_volume::progress::{OnProgress, Progress, Task};

use serde::Serialize;

use super::args::{ExportOptions, ImageFormat, Location};
use super::image::{check_destination, convert, create_unnamed, is_stdio, name, require_qemu_img};
use super::media::Media;
use crate::commands::{Outcome, outcome};
use crate::meter::with_meter;
use crate::print::{print, print_stderr};

/// Number of bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Aligned zeros of this size become holes. Most file systems have blocks of this size.
const PAGE_BYTES: usize = 4096;
/// Maximum number of unreadable ranges that are listed.
const MAX_LISTED: usize = 50;

/// Report of an export.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    location: &'a Location,
    image: &'a Path,
    size_bytes: u64,
    data_bytes: u64,
    lost_sectors: u64,
    /// True if all sectors were readable and no damage was found.
    complete: bool,
}

pub(crate) fn export(location: &Location, options: &ExportOptions) -> anyhow::Result<Outcome> {
    let ExportOptions { to, format, output, .. } = options;
    let is_stream = is_stdio(to);
    if is_stream {
        check_stdout()?;
    }
    if *format == ImageFormat::Qcow2 {
        require_qemu_img()?;
    }
    let media = Media::open_damaged(location)?;
    let (content, damage) = Content::of(&media)?;
    warn_damage(&damage);
    let mut lost = LostSectors::default();
    let data_bytes = if is_stream {
        with_meter(|progress| stream(&content, &mut lost, progress))?
    } else {
        to_file(&content, location, options, &mut lost)?
    };
    lost.print();
    // Findings alone are a failure too, because the exported data may be outdated.
    let complete = lost.is_empty() && damage.is_empty();
    let report = Report {
        location,
        image: to,
        size_bytes: content.len_bytes(),
        data_bytes,
        lost_sectors: lost.count,
        complete,
    };
    let text = format!(
        "{} exported to {}: {}, of which {} are data",
        location.name(),
        if is_stream { "stdout".into() } else { to.display().to_string() },
        Size(report.size_bytes).rounded(),
        Size(data_bytes).rounded()
    );
    if is_stream {
        print_stderr(format_args!("{text}"));
    } else {
        print(output, &report, |out| writeln!(out, "{text}"))?;
    }
    Ok(outcome(complete))
}

/// Checks that an image can be written to stdout, before any other work.
fn check_stdout() -> anyhow::Result<()> {
    if io::stdout().is_terminal() {
        bail!("--to -: stdout is a terminal; redirect it to a file or a pipe");
    }
    Ok(())
}

fn to_file(
    content: &Content<'_>,
    location: &Location,
    options: &ExportOptions,
    lost: &mut LostSectors,
) -> anyhow::Result<u64> {
    let ExportOptions { to, format, force, .. } = options;
    check_destination(to, *force, location.path())?;
    let raw = create_unnamed(to)?;
    let (image, data_bytes) = with_meter(|progress| {
        let data_bytes = copy(content, &raw.file, lost, &mut *progress)?;
        let image = match format {
            ImageFormat::Raw => raw,
            ImageFormat::Qcow2 => {
                let from = (&raw.file, ImageFormat::Raw);
                convert(from, *format, to, content.len_bytes(), progress)?
            }
        };
        anyhow::Ok((image, data_bytes))
    })?;
    name(image, to, *force)?;
    Ok(data_bytes)
}

type ArenaDamage = Vec<(usize, Finding)>;

/// Content to copy: the sectors of a BTT or the bytes of a raw volume.
enum Content<'a> {
    Sectors(Reader<'a, Media>),
    Bytes(&'a Media),
}

impl<'a> Content<'a> {
    /// Opens the content. Also returns all damage, each with the number of its arena.
    fn of(media: &'a Media) -> anyhow::Result<(Self, ArenaDamage)> {
        if media.is_raw() {
            return Ok((Content::Bytes(media), vec![]));
        }
        let (reader, damage) = Reader::open_damaged(media);
        if reader.sectors() == 0 {
            warn_damage(&damage);
            bail!("no arena is readable");
        }
        Ok((Content::Sectors(reader), damage))
    }

    fn sector_bytes(&self) -> u64 {
        match self {
            Content::Sectors(reader) => u64::from(reader.sector_bytes()),
            Content::Bytes(_) => PAGE_BYTES as u64,
        }
    }

    fn len_bytes(&self) -> u64 {
        match self {
            Content::Sectors(reader) => reader.sectors() * self.sector_bytes(),
            Content::Bytes(media) => media.len_bytes(),
        }
    }

    /// Finds the first byte at or after `at` that may be nonzero, and returns its offset rounded
    /// down. Returns `None` if all remaining bytes are zero.
    fn next_data(&self, at: u64) -> Option<u64> {
        match self {
            Content::Sectors(reader) => {
                let sector = reader.next_data(at / self.sector_bytes()..reader.sectors())?;
                Some(sector * self.sector_bytes())
            }
            Content::Bytes(media) => match media.next_data(at..media.len_bytes()) {
                Ok(data) => data.map(|data| data.start),
                // Reading the sector reports the error.
                Err(_) => Some(at),
            },
        }
    }

    /// Reads whole sectors, and fills unreadable ones with zeros.
    fn read(&self, at: u64, into: &mut [u8], lost: &mut LostSectors) {
        match self {
            Content::Sectors(reader) => {
                reader.read_many(at / self.sector_bytes(), into, &mut |sector, reason| {
                    lost.add(sector, &reason)
                });
            }
            Content::Bytes(media) => {
                if media.read(at, into).is_ok() {
                    return;
                }
                for (page, bytes) in (at / PAGE_BYTES as u64..).zip(into.chunks_mut(PAGE_BYTES)) {
                    if let Err(error) = media.read(page * PAGE_BYTES as u64, bytes) {
                        bytes.fill(0);
                        lost.add(page, &ReadFailure::Media(error));
                    }
                }
            }
        }
    }
}

/// Copies all content, and returns the number of bytes with data.
fn copy(
    content: &Content<'_>,
    image: &File,
    lost: &mut LostSectors,
    progress: OnProgress<'_>,
) -> anyhow::Result<u64> {
    let failed = || "cannot write the image".to_owned();
    let total_bytes = content.len_bytes();
    image.set_len(total_bytes).with_context(failed)?;
    let mut piece = vec![0; PIECE_BYTES as usize];
    let mut data_bytes = 0;
    let mut next = 0;
    while let Some(data_at) =
        Some(next).filter(|at| *at < total_bytes).and_then(|at| content.next_data(at))
    {
        let at = data_at / PIECE_BYTES * PIECE_BYTES;
        next = at + PIECE_BYTES;
        progress(Progress { task: Task::Copy, done_bytes: at, total_bytes });
        let bytes = &mut piece[..(total_bytes - at).min(PIECE_BYTES) as usize];
        content.read(at, bytes, lost);
        let mut page_at = at;
        // Adjacent pages with data become one write.
        for run in
            bytes.chunks(PAGE_BYTES).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b))
        {
            let length: usize = run.iter().map(|page| page.len()).sum();
            if !is_zero(run[0]) {
                let from = (page_at - at) as usize;
                image.write_all_at(&bytes[from..from + length], page_at).with_context(failed)?;
                data_bytes += length as u64;
            }
            page_at += length as u64;
        }
    }
    progress(Progress { task: Task::Copy, done_bytes: total_bytes, total_bytes });
    Ok(data_bytes)
}

/// Writes all content to stdout, including zeros, and returns the number of bytes with data.
fn stream(
    content: &Content<'_>,
    lost: &mut LostSectors,
    progress: OnProgress<'_>,
) -> anyhow::Result<u64> {
    // Bypasses the line buffer of `io::Stdout`.
    let out = io::stdout().as_fd().try_clone_to_owned().context("cannot write to stdout")?;
    let mut out = File::from(out);
    let total_bytes = content.len_bytes();
    let mut piece = vec![0; PIECE_BYTES as usize];
    let (mut data_bytes, mut next) = (0, content.next_data(0).unwrap_or(total_bytes));
    for at in (0..total_bytes).step_by(PIECE_BYTES as usize) {
        progress(Progress { task: Task::Copy, done_bytes: at, total_bytes });
        let bytes = &mut piece[..(total_bytes - at).min(PIECE_BYTES) as usize];
        let end = at + bytes.len() as u64;
        if next < end {
            content.read(at, bytes, lost);
            next = if end < total_bytes { content.next_data(end) } else { None }
                .unwrap_or(total_bytes);
        } else {
            bytes.fill(0);
        }
        out.write_all(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => anyhow!(
                "the reader closed stdout before the end of the image: at most {at} of {total_bytes} bytes were read"
            ),
            _ => anyhow::Error::new(error).context("cannot write the image to stdout"),
        })?;
        data_bytes += bytes
            .chunks(PAGE_BYTES)
            .filter(|page| !is_zero(page))
            .map(|page| page.len() as u64)
            .sum::<u64>();
    }
    progress(Progress { task: Task::Copy, done_bytes: total_bytes, total_bytes });
    Ok(data_bytes)
}

/// Reports damage of the arenas on stderr, and the consequences for their sectors.
pub(super) fn warn_damage(damage: &[(usize, Finding)]) {
    for (arena, finding) in damage {
        print_stderr(format_args!("arena {arena}: {finding}"));
    }
    let mut of_flog: Vec<_> =
        damage.iter().filter(|(_, finding)| finding.may_lose_writes()).map(|(n, _)| *n).collect();
    of_flog.dedup();
    for arena in of_flog {
        print_stderr(format_args!(
            "arena {arena}: sectors that were written last may hold old data, or data of other sectors"
        ));
    }
}

/// Ranges of unreadable sectors, each with the reason for its first sector.
#[derive(Default)]
pub(super) struct LostSectors {
    ranges: BTreeMap<u64, (u64, String)>,
    count: u64,
}

impl LostSectors {
    pub(super) fn add(&mut self, sector: u64, reason: &ReadFailure) {
        self.count += 1;
        let reason = match reason {
            ReadFailure::Media(_) => reason.to_string(),
            reason => format!("they are {reason}"),
        };
        if let Some((_, (end, last_reason))) = self.ranges.range_mut(..sector).next_back()
            && *end == sector
            && kind(last_reason) == kind(&reason)
        {
            *end += 1;
        } else if self.ranges.len() < MAX_LISTED {
            self.ranges.insert(sector, (sector + 1, reason));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn print(&self) {
        for (first, (end, reason)) in &self.ranges {
            match end - first {
                1 => print_stderr(format_args!("sector {first} cannot be read: {reason}")),
                _ => print_stderr(format_args!(
                    "sectors {first} to {} cannot be read: {reason}",
                    end - 1
                )),
            }
        }
        let named: u64 = self.ranges.iter().map(|(first, (end, _))| end - first).sum();
        if self.count > named {
            print_stderr(format_args!("and {} more sectors cannot be read", self.count - named));
        }
        if self.count > 0 {
            print_stderr(format_args!(
                "{} sector(s) could not be read, and are zeros instead",
                self.count
            ));
        }
    }
}

/// Returns the part of a reason without the offset, which errors of media include.
fn kind(reason: &str) -> &str {
    reason.rsplit(':').next().unwrap_or(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_sectors_are_listed_as_ranges() {
        let mut lost = LostSectors::default();
        for sector in [4, 5, 6, 9] {
            lost.add(sector, &ReadFailure::Marked);
        }
        lost.add(10, &ReadFailure::Outside);
        let ranges: Vec<_> = lost.ranges.iter().map(|(first, (end, _))| (*first, *end)).collect();
        assert_eq!(ranges, [(4, 7), (9, 10), (10, 11)]);
        (100..300).step_by(2).for_each(|sector| lost.add(sector, &ReadFailure::Marked));
        assert_eq!((lost.ranges.len(), lost.count), (MAX_LISTED, 105));
    }
}
