//! Single sectors, to and from the shell.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, bail};
use pmem_volume::btt::{Engine, Reader};

use super::args::Place;
use super::export::{LostSectors, say_troubles};
use super::media::Media;
use crate::commands::{Outcome, outcome};
use crate::print::{Out, emit};

/// Sectors are read and written in pieces of so many bytes.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes in a line of hexadecimal.
const LINE_BYTES: usize = 16;

pub(super) fn read(place: &Place, first: u64, count: u64, hex: bool) -> anyhow::Result<Outcome> {
    let media = Media::look(place)?;
    media.require_btt()?;
    let (reader, troubles) = Reader::open_damaged(&media)?;
    say_troubles(&troubles);
    let (sectors, sector_bytes) = (reader.sectors(), reader.sector_bytes() as usize);
    let end = first.saturating_add(count);
    if end > sectors {
        bail!("sectors {first} to {} are not in the volume, which has {sectors}", end.saturating_sub(1));
    }
    let hex = hex || io::stdout().is_terminal();
    let mut lost = LostSectors::default();
    emit(|out| {
        let mut piece = vec![0; PIECE_BYTES];
        let mut at = first;
        while at < end {
            let now = (end - at).min((PIECE_BYTES / sector_bytes) as u64);
            let bytes = &mut piece[..now as usize * sector_bytes];
            reader.read_many(at, bytes, &mut |sector, why| lost.add(sector, &why));
            match hex {
                true => print_hex(out, at * sector_bytes as u64, bytes)?,
                false => out.write_all(bytes)?,
            }
            at += now;
        }
        if hex { writeln!(out, "{:08x}", end * sector_bytes as u64) } else { Ok(()) }
    })?;
    lost.say();
    Ok(outcome(lost.is_empty() && troubles.is_empty()))
}

/// As `hexdump -C` does, with places in the volume as a guest sees it; lines like the one before are left out, and a star
/// stands for them.
fn print_hex(out: Out<'_>, first: u64, bytes: &[u8]) -> io::Result<()> {
    let mut before: Option<&[u8]> = None;
    let mut is_starred = false;
    for (number, line) in bytes.chunks(LINE_BYTES).enumerate() {
        if before == Some(line) {
            if !is_starred {
                writeln!(out, "*")?;
            }
            is_starred = true;
            continue;
        }
        (before, is_starred) = (Some(line), false);
        let text: String = line
            .iter()
            .map(|b| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '.' })
            .collect();
        let numbers: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(out, "{:08x}  {}  |{text}|", first + (number * LINE_BYTES) as u64, numbers.join(" "))?;
    }
    Ok(())
}

pub(super) fn write(place: &Place, first: u64, from: Option<&Path>) -> anyhow::Result<Outcome> {
    let mut source: Box<dyn Read> = match from {
        Some(path) => Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?),
        None => Box::new(io::stdin()),
    };
    let media = Media::change(place)?;
    media.require_btt()?;
    let engine = Engine::open(&media)?;
    let written = write_all(&engine, first, &mut *source);
    // Also of what was written before something failed, whichever driver comes next.
    let settled = engine.settle();
    let count = written?;
    settled?;
    emit(|out| writeln!(out, "{count} sector(s) written from sector {first} on"))?;
    Ok(Outcome::Done)
}

/// Writes all that comes, and returns how many sectors that was.
fn write_all(engine: &Engine<&Media>, first: u64, source: &mut dyn Read) -> anyhow::Result<u64> {
    let sector_bytes = engine.sector_bytes() as usize;
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = first;
    loop {
        let length = fill(source, &mut piece).context("cannot read what is to be written")?;
        let whole = length / sector_bytes * sector_bytes;
        engine.write(at, &piece[..whole])?;
        at += (whole / sector_bytes) as u64;
        if whole < length {
            bail!(
                "{} bytes at the end are no whole sector of {sector_bytes}; {} sector(s) before them were written",
                length - whole,
                at - first
            );
        }
        if length < piece.len() {
            return Ok(at - first);
        }
    }
}

/// Reads until the buffer is full, or nothing more comes.
fn fill(source: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
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
        let mut bytes = vec![0; 64];
        bytes[..5].copy_from_slice(b"A~\nz ");
        let mut text = Vec::new();
        print_hex(&mut text, 0x1000, &bytes).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "00001000  41 7e 0a 7a 20 00 00 00 00 00 00 00 00 00 00 00  |A~.z ...........|");
        assert_eq!(lines[2..], ["*"]);
    }
}
