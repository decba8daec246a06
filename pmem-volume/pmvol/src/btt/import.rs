//! A volume's sectors from an image file.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Cursor, IsTerminal, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, bail};
use foreshore_types::size::Size;
use pmem_volume::btt::Engine;
use pmem_volume::media::is_zero;
use pmem_volume::progress::{OnProgress, Progress, Task};
use rustix::io::Errno;
use serde::Serialize;

use super::args::{ImageFormat, ImportOptions, Place};
use super::image::{QCOW2_NEEDS_FILE, converted, is_stdio, require_qemu_img};
use super::media::{Media, holds_data};
use super::qcow2;
use super::sectors::read_full;
use crate::commands::Outcome;
use crate::meter::watched;
use crate::print::print;

/// Copied in one go.
const PIECE_BYTES: u64 = 1 << 20;
/// A raw volume is written in units of this size, and made durable after so many bytes.
const PAGE_BYTES: u64 = 4096;
const PERSIST_BYTES: u64 = 64 << 20;

/// An import that has ended.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    place: &'a Place,
    image: &'a Path,
    #[serde(flatten)]
    filled: Filled,
}

/// Bytes that an image had.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Filled {
    image_bytes: u64,
    data_bytes: u64,
}

impl Filled {
    pub(crate) fn text(self) -> String {
        format!(
            "{}, of which {} are data",
            Size(self.image_bytes).rounded(),
            Size(self.data_bytes).rounded()
        )
    }
}

pub(crate) fn import(place: &Place, options: &ImportOptions) -> anyhow::Result<Outcome> {
    let ImportOptions { from, format, force, output } = options;
    let source = Source::open(from, *format)?;
    // Before anything long is begun.
    let media = Media::change(place)?;
    let target = Target::of(&media)?;
    source.check_room(place, target.len_bytes())?;
    let holds_data = watched(|progress| holds_data(&media, progress))?;
    if holds_data && !force {
        bail!("{} holds data; --force replaces it all", place.name());
    }
    let filled = target.fill(place, source.unpacked()?, holds_data).with_context(|| {
        format!("{} has a part of the image; import it again with --force", place.name())
    })?;
    let report = Report { place, image: from, filled };
    let text = format!("{} imported to {}: {}", source_name(from), place.name(), filled.text());
    print(output, &report, |out| writeln!(out, "{text}"))?;
    Ok(Outcome::Done)
}

/// Fills a volume that was just created.
pub(crate) fn fill(media: &Media, place: &Place, source: Source<'_>) -> anyhow::Result<Filled> {
    Target::of(media)?.fill(place, source, false)
}

fn source_name(path: &Path) -> String {
    if is_stdio(path) { "stdin".to_owned() } else { path.display().to_string() }
}

/// An image to read.
pub(crate) struct Source<'a> {
    path: &'a Path,
    input: Input,
    format: ImageFormat,
}

enum Input {
    File {
        file: File,
        /// Of what is in it.
        len_bytes: u64,
    },
    /// Raw bytes up to the end of stdin.
    Stream(Box<dyn Read>),
}

impl<'a> Source<'a> {
    pub(crate) fn open(path: &'a Path, format: Option<ImageFormat>) -> anyhow::Result<Self> {
        if is_stdio(path) {
            let input = Input::Stream(open_stdin(format)?);
            return Ok(Self { path, input, format: ImageFormat::Raw });
        }
        let failed = || format!("cannot read {}", path.display());
        if !std::fs::metadata(path).with_context(failed)?.is_file() {
            bail!("{}: it is no regular file, and an image is one", path.display());
        }
        let file = File::open(path).with_context(failed)?;
        if format.is_none() && qcow2::begins_as_qcow2(&file).with_context(failed)? {
            bail!("{}: {BEGINS_AS_QCOW2}, or --format qcow2 to unpack it", path.display());
        }
        let format = format.unwrap_or(ImageFormat::Raw);
        let len_bytes = match format {
            ImageFormat::Raw => file.metadata().with_context(failed)?.len(),
            ImageFormat::Qcow2 => {
                require_qemu_img()?;
                qcow2::check(&file).with_context(|| format!("{}", path.display()))?
            }
        };
        Ok(Self { path, input: Input::File { file, len_bytes }, format })
    }

    /// Bytes of the unpacked image. `None`: a stream has to be read to know it.
    pub(crate) fn len_bytes(&self) -> Option<u64> {
        match self.input {
            Input::File { len_bytes, .. } => Some(len_bytes),
            Input::Stream(_) => None,
        }
    }

    fn check_room(&self, place: &Place, room_bytes: u64) -> anyhow::Result<()> {
        match self.len_bytes() {
            Some(len_bytes) if len_bytes > room_bytes => bail!(
                "{}: the image has {len_bytes} bytes ({}), and {} has room for {room_bytes} ({})",
                self.path.display(),
                Size(len_bytes).rounded(),
                place.name(),
                Size(room_bytes).rounded()
            ),
            _ => Ok(()),
        }
    }

    /// The same as raw bytes: qcow2 is unpacked to a file beside it, which is gone when it is
    /// closed.
    pub(crate) fn unpacked(self) -> anyhow::Result<Self> {
        let Self { path, input: Input::File { file, len_bytes }, format: ImageFormat::Qcow2 } =
            self
        else {
            return Ok(self);
        };
        let raw = watched(|progress| {
            converted((&file, ImageFormat::Qcow2), ImageFormat::Raw, path, len_bytes, progress)
        })?;
        let file = raw.file.try_clone().context("cannot keep what was unpacked")?;
        let len_bytes = file.metadata().context("cannot look at what was unpacked")?.len();
        Ok(Self { path, input: Input::File { file, len_bytes }, format: ImageFormat::Raw })
    }
}

const BEGINS_AS_QCOW2: &str = "it begins as a qcow2 image does, which may as well be what a guest has written to its \
                               disk; say --format raw to take its bytes as they are";

/// stdin, in front of its first byte. An empty one is refused: most likely, the program that writes
/// to it has failed.
fn open_stdin(format: Option<ImageFormat>) -> anyhow::Result<Box<dyn Read>> {
    if format == Some(ImageFormat::Qcow2) {
        bail!("--from -: {QCOW2_NEEDS_FILE}");
    }
    let mut stdin = io::stdin();
    if stdin.is_terminal() {
        bail!("--from -: stdin is a terminal; redirect it from a file or a pipe");
    }
    let mut first = vec![0; qcow2::MAGIC.len()];
    let length = read_full(&mut stdin, &mut first).context("cannot read stdin")?;
    first.truncate(length);
    if first.is_empty() {
        bail!("--from -: stdin has no data; look for an error of the program that writes to it");
    }
    if format.is_none() && first == qcow2::MAGIC {
        bail!("--from -: {BEGINS_AS_QCOW2}, or use a file with --format qcow2 to unpack it");
    }
    Ok(Box::new(Cursor::new(first).chain(stdin)))
}

/// What is written to: sectors of a BTT, or a raw volume's bytes.
struct Target<'a> {
    to: To<'a>,
    /// Written and not durable yet, from the first byte to the last.
    pending: RefCell<Pending>,
}

enum To<'a> {
    Sectors(Box<Engine<&'a Media>>),
    Bytes(&'a Media),
}

/// Writes that are made durable together, and holes between them.
#[derive(Default)]
struct Pending {
    range: Range<u64>,
    written_bytes: u64,
}

impl Pending {
    /// One more write. What is to be made durable now, if it is enough.
    fn add(&mut self, range: Range<u64>) -> Option<Range<u64>> {
        self.written_bytes += range.end - range.start;
        self.range = match self.range.is_empty() {
            true => range,
            false => self.range.start.min(range.start)..self.range.end.max(range.end),
        };
        let is_enough = self.written_bytes >= PERSIST_BYTES;
        is_enough.then(|| std::mem::take(self).range)
    }
}

impl<'a> Target<'a> {
    fn of(media: &'a Media) -> anyhow::Result<Self> {
        if media.is_raw() {
            return Ok(Self::new(To::Bytes(media)));
        }
        Ok(Self::new(To::Sectors(Box::new(Engine::open(media)?))))
    }

    fn new(to: To<'a>) -> Self {
        Self { to, pending: RefCell::default() }
    }

    fn unit_bytes(&self) -> u64 {
        match &self.to {
            To::Sectors(engine) => u64::from(engine.sector_bytes()),
            To::Bytes(_) => PAGE_BYTES,
        }
    }

    fn len_bytes(&self) -> u64 {
        match &self.to {
            To::Sectors(engine) => engine.sectors() * self.unit_bytes(),
            To::Bytes(media) => media.len_bytes(),
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        match &self.to {
            To::Sectors(engine) => Ok(engine.write(at / self.unit_bytes(), bytes)?),
            To::Bytes(media) => {
                media.store(at, bytes)?;
                // Not all at the end: what a page cache has not written yet is memory.
                match self.pending.borrow_mut().add(at..at + bytes.len() as u64) {
                    Some(range) => Ok(media.persist(std::slice::from_ref(&range))?),
                    None => Ok(()),
                }
            }
        }
    }

    fn zero(&self, range: Range<u64>) -> anyhow::Result<()> {
        match &self.to {
            To::Sectors(engine) => {
                let unit_bytes = self.unit_bytes();
                Ok(engine.write_zeroes(range.start / unit_bytes..range.end / unit_bytes)?)
            }
            To::Bytes(_) => {
                let zeros = vec![0; PIECE_BYTES as usize];
                let mut at = range.start;
                while at < range.end {
                    let length = (range.end - at).min(PIECE_BYTES);
                    self.write(at, &zeros[..length as usize])?;
                    at += length;
                }
                Ok(())
            }
        }
    }

    /// Copies an image, and makes it durable also if a part of it cannot be read.
    fn fill(
        &self,
        place: &Place,
        mut source: Source<'_>,
        holds_data: bool,
    ) -> anyhow::Result<Filled> {
        // qemu-img has seen the image later than `Source::open`.
        source.check_room(place, self.len_bytes())?;
        watched(|progress| {
            Copy { target: self, holds_data, image_bytes: 0, data_bytes: 0 }
                .run(&mut source.input, progress)
        })
    }

    /// Makes everything durable, for whichever driver comes next.
    fn settle(&self) -> anyhow::Result<()> {
        match &self.to {
            To::Sectors(engine) => Ok(engine.settle()?),
            To::Bytes(media) => Ok(media.persist(std::slice::from_ref(&(0..media.len_bytes())))?),
        }
    }
}

struct Copy<'a> {
    target: &'a Target<'a>,
    /// What is not written must become zeros.
    holds_data: bool,
    image_bytes: u64,
    data_bytes: u64,
}

impl Copy<'_> {
    /// Copies everything. If it fails, what was copied is there to stay as well.
    fn run(mut self, input: &mut Input, progress: OnProgress<'_>) -> anyhow::Result<Filled> {
        let copied = match input {
            Input::File { file, len_bytes } => self.copy_file(file, *len_bytes, progress),
            Input::Stream(stream) => self.copy_stream(stream, progress),
        };
        let settled = self.target.settle();
        copied?;
        settled?;
        let total_bytes = self.target.len_bytes();
        progress(Progress { task: Task::Copy, done_bytes: total_bytes, total_bytes });
        // The last sector is filled up.
        let data_bytes = self.data_bytes.min(self.image_bytes);
        Ok(Filled { image_bytes: self.image_bytes, data_bytes })
    }

    fn copy_file(
        &mut self,
        file: &File,
        len_bytes: u64,
        progress: OnProgress<'_>,
    ) -> anyhow::Result<()> {
        self.image_bytes = len_bytes;
        let total_bytes = self.target.len_bytes();
        let mut at = 0;
        while at < len_bytes {
            progress(Progress { task: Task::Copy, done_bytes: at, total_bytes });
            // Data that starts within a piece: its zeros are found by looking at them.
            let data = next_data(file, at, len_bytes).context("cannot look for holes")?;
            let start = data.unwrap_or(len_bytes) / PIECE_BYTES * PIECE_BYTES;
            if data.is_none() || start > at {
                let end = if data.is_none() { total_bytes } else { start };
                self.skip(at..end)?;
                at = end;
                continue;
            }
            let mut bytes = vec![0; (len_bytes - at).min(PIECE_BYTES) as usize];
            file.read_exact_at(&mut bytes, at).context("cannot read the image")?;
            at += self.put(at, bytes)?;
        }
        self.skip(at..total_bytes)
    }

    fn copy_stream(
        &mut self,
        stream: &mut dyn Read,
        progress: OnProgress<'_>,
    ) -> anyhow::Result<()> {
        let total_bytes = self.target.len_bytes();
        let mut at = 0;
        loop {
            progress(Progress { task: Task::Copy, done_bytes: at.min(total_bytes), total_bytes });
            let mut bytes = vec![0; PIECE_BYTES as usize];
            let length = read_full(stream, &mut bytes).context("cannot read stdin")?;
            bytes.truncate(length);
            if length == 0 {
                return self.skip(at..total_bytes);
            }
            if at + length as u64 > total_bytes {
                bail!("stdin has more than the {total_bytes} bytes that the volume has room for");
            }
            self.image_bytes += length as u64;
            at += self.put(at, bytes)?;
        }
    }

    /// Writes a piece of the image, whose last sector may be a part of one. Returns the bytes of
    /// all its sectors.
    fn put(&mut self, at: u64, mut bytes: Vec<u8>) -> anyhow::Result<u64> {
        let unit_bytes = self.target.unit_bytes() as usize;
        bytes.resize(bytes.len().next_multiple_of(unit_bytes), 0);
        let units: Vec<_> = bytes.chunks(unit_bytes).collect();
        let mut from = 0;
        for run in units.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let end = from + run.len() * unit_bytes;
            let (start, stop) = (at + from as u64, at + end as u64);
            if is_zero(run[0]) {
                self.skip(start..stop)?;
            } else {
                self.target.write(start, &bytes[from..end])?;
                self.data_bytes += (end - from) as u64;
            }
            from = end;
        }
        Ok(bytes.len() as u64)
    }

    /// A range of zeros, which need nothing where nothing was written.
    fn skip(&self, range: Range<u64>) -> anyhow::Result<()> {
        if self.holds_data && !range.is_empty() { self.target.zero(range) } else { Ok(()) }
    }
}

/// Where data starts at or behind a place. `None`: there is only a hole.
fn next_data(file: &File, from: u64, len_bytes: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(from)) {
        Ok(at) => Ok(Some(at).filter(|at| *at < len_bytes)),
        Err(Errno::NXIO) => Ok(None),
        // The file system does not report holes.
        Err(Errno::INVAL) => Ok(Some(from)),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_made_durable_in_batches_also_with_holes_between_them() {
        let mut pending = Pending::default();
        let mut durable = Vec::new();
        let written: Vec<_> = (0..300)
            .map(|number| number * 3 * PIECE_BYTES..(number * 3 + 1) * PIECE_BYTES)
            .collect();
        for (number, range) in written.iter().enumerate() {
            durable.extend(pending.add(range.clone()));
            let reached = durable.last().map_or(0, |range: &Range<u64>| range.end);
            let left =
                written[..=number].iter().filter(|range| range.start >= reached).count() as u64;
            assert!(left * PIECE_BYTES < PERSIST_BYTES, "{left} pieces are not durable");
        }
        let per_batch = (PERSIST_BYTES / PIECE_BYTES) as usize;
        assert_eq!(durable.len(), written.len() / per_batch);
        assert!(written[..durable.len() * per_batch].iter().all(|range| {
            durable.iter().any(|batch| batch.start <= range.start && range.end <= batch.end)
        }));
    }
}
