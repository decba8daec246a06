//! Reads and writes of single sectors from the command line.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, bail};
use pmem_volume::btt::{Engine, Reader};
use pmem_volume::progress::{OnProgress, Progress, Task};

use super::args::Location;
use super::export::{LostSectors, warn_damage};
use super::media::Media;
use crate::commands::{Outcome, outcome};
use crate::meter::with_meter;
use crate::print::{Out, emit};

/// Number of bytes that are read or written at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes in a line of hexadecimal.
const LINE_BYTES: usize = 16;

pub(super) fn read(
    location: &Location,
    first: u64,
    count: u64,
    hex: bool,
) -> anyhow::Result<Outcome> {
    let media = Media::open_read_only(location)?;
    media.require_btt()?;
    let (reader, damage) = Reader::open_damaged(&media);
    warn_damage(&damage);
    let sectors = reader.sectors();
    let end = first.saturating_add(count);
    if end > sectors {
        bail!(
            "sectors {first} to {} are not in the volume, which has {sectors} sectors",
            end.saturating_sub(1)
        );
    }
    let is_terminal = io::stdout().is_terminal();
    let range = first..end;
    let print = |progress: OnProgress<'_>| print(&reader, range, hex || is_terminal, progress);
    // On a terminal, a bar would appear between the lines of output.
    let lost = if is_terminal { print(&mut |_| {}) } else { with_meter(print) }?;
    lost.print();
    Ok(outcome(lost.is_empty() && damage.is_empty()))
}

/// Prints existing sectors, and returns the unreadable ones.
fn print(
    reader: &Reader<'_, Media>,
    sectors: Range<u64>,
    hex: bool,
    progress: OnProgress<'_>,
) -> anyhow::Result<LostSectors> {
    let sector_bytes = reader.sector_bytes() as usize;
    let bytes_of = |sectors: u64| sectors * sector_bytes as u64;
    let total_bytes = bytes_of(sectors.end - sectors.start);
    let mut lost = LostSectors::default();
    emit(|out| {
        let mut piece = vec![0; PIECE_BYTES];
        let mut dump = HexDump::new(bytes_of(sectors.start));
        let mut at = sectors.start;
        while at < sectors.end {
            progress(Progress {
                task: Task::Copy,
                done_bytes: bytes_of(at - sectors.start),
                total_bytes,
            });
            let now = (sectors.end - at).min((PIECE_BYTES / sector_bytes) as u64);
            let bytes = &mut piece[..now as usize * sector_bytes];
            reader.read_many(at, bytes, &mut |sector, reason| lost.add(sector, &reason));
            match hex {
                true => dump.print(out, bytes)?,
                false => out.write_all(bytes)?,
            }
            at += now;
        }
        progress(Progress { task: Task::Copy, done_bytes: total_bytes, total_bytes });
        if hex { writeln!(out, "{:08x}", bytes_of(sectors.end)) } else { Ok(()) }
    })?;
    Ok(lost)
}

/// Dump in the format of `hexdump -C`, with offsets as seen by the guest. Repeated lines are
/// replaced by a single star.
struct HexDump {
    /// Offset of the next line.
    at: u64,
    before: Option<[u8; LINE_BYTES]>,
    is_starred: bool,
}

impl HexDump {
    fn new(first: u64) -> Self {
        Self { at: first, before: None, is_starred: false }
    }

    /// Prints whole lines that follow the previous ones.
    fn print(&mut self, out: Out<'_>, bytes: &[u8]) -> io::Result<()> {
        let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
        assert!(rest.is_empty(), "sectors are whole lines");
        for line in lines {
            let at = self.at;
            self.at += LINE_BYTES as u64;
            if self.before == Some(*line) {
                if !self.is_starred {
                    writeln!(out, "*")?;
                }
                self.is_starred = true;
                continue;
            }
            (self.before, self.is_starred) = (Some(*line), false);
            let shown =
                |b: &u8| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '.' };
            let text: String = line.iter().map(shown).collect();
            let numbers: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(out, "{at:08x}  {}  |{text}|", numbers.join(" "))?;
        }
        Ok(())
    }
}

pub(super) fn write(
    location: &Location,
    first: u64,
    from: Option<&Path>,
) -> anyhow::Result<Outcome> {
    let (mut source, source_bytes): (Box<dyn Read>, _) = match from {
        Some(path) => {
            let failed = || format!("cannot open {}", path.display());
            let file = File::open(path).with_context(failed)?;
            let metadata = file.metadata().with_context(failed)?;
            (Box::new(file), metadata.is_file().then_some(metadata.len()))
        }
        None => (Box::new(io::stdin()), None),
    };
    let media = Media::open_read_write(location)?;
    media.require_btt()?;
    let engine = Engine::open(&media)?;
    let sector_bytes = engine.sector_bytes() as usize;
    if let Some(bytes) = source_bytes
        && !bytes.is_multiple_of(sector_bytes as u64)
    {
        bail!(
            "{bytes} bytes are not a multiple of the sector size, {sector_bytes}; nothing was written"
        );
    }
    let sectors = with_meter(|progress| {
        let mut written = WriteProgress { sectors: 0, has_started: false, sector_bytes };
        let copied = written.copy(&engine, first, &mut *source, &mut |done_bytes| {
            // The length of a pipe is unknown.
            if let Some(total_bytes) = source_bytes {
                progress(Progress {
                    task: Task::Copy,
                    done_bytes: done_bytes.min(total_bytes),
                    total_bytes,
                });
            }
        });
        // Earlier writes must also be durable if a later one failed, so that the next driver finds
        // them.
        let quiesced = engine.quiesce();
        copied
            .and_then(|()| Ok(quiesced?))
            .with_context(|| written.describe(first))
            .map(|()| written.sectors)
    })?;
    emit(|out| writeln!(out, "{sectors} sector(s) written from sector {first} on"))?;
    Ok(Outcome::Done)
}

/// Progress of a write, used also after an error.
struct WriteProgress {
    sectors: u64,
    has_started: bool,
    sector_bytes: usize,
}

impl WriteProgress {
    /// Writes all input in pieces. Each piece is durable before the next one is written.
    fn copy(
        &mut self,
        engine: &Engine<&Media>,
        first: u64,
        source: &mut dyn Read,
        done: &mut dyn FnMut(u64),
    ) -> anyhow::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let length = read_full(source, &mut piece).context("cannot read the data to write")?;
            let whole = length / self.sector_bytes * self.sector_bytes;
            if length == 0 && !self.has_started {
                bail!("there is no data to write");
            }
            self.has_started |= whole > 0;
            engine.write(first + self.sectors, &piece[..whole])?;
            self.sectors += (whole / self.sector_bytes) as u64;
            done(self.sectors * self.sector_bytes as u64);
            if whole < length {
                bail!(
                    "the last {} bytes are less than a sector of {}",
                    length - whole,
                    self.sector_bytes
                );
            }
            if length < piece.len() {
                return Ok(());
            }
        }
    }

    /// A failed piece may have been written partially.
    fn describe(&self, first: u64) -> String {
        match self.sectors {
            0 if !self.has_started => "nothing was written".to_owned(),
            0 => format!("an unknown number of sectors was written, from sector {first} on"),
            sectors => {
                format!("{sectors} sector(s) were written, {first} to {}", first + sectors - 1)
            }
        }
    }
}

/// Reads until the buffer is full or the input ends.
pub(super) fn read_full(source: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match source.read(&mut into[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_has_addresses_text_and_stars() {
        let mut bytes = [0; 64];
        bytes[..5].copy_from_slice(b"A~\nz ");
        let mut text = Vec::new();
        let mut dump = HexDump::new(0x1000);
        // One of the pieces ends within a run of repeated lines.
        bytes
            .chunks(32)
            .chain([&[0; 32][..], &[1; 16]])
            .for_each(|piece| dump.print(&mut text, piece).unwrap());
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "00001000  41 7e 0a 7a 20 00 00 00 00 00 00 00 00 00 00 00  |A~.z ...........|"
        );
        assert!(lines[1].starts_with("00001010  00 00") && lines[2] == "*");
        assert!(lines[3].starts_with("00001060  01 01") && lines.len() == 4, "{lines:?}");
    }
}
