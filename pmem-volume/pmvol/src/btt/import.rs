//! Import of a volume's sectors from an image file.

use std::fs::File;
use std::io::{self, Cursor, IsTerminal, Read};
use std::mem;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, bail};
use foreshore_types::size::Size;
use pmem_volume::btt::{BulkLoad, Engine};
use pmem_volume::media::{self, MediaError, Pending, is_zero};
use pmem_volume::progress::{OnProgress, Progress, Task};
use rustix::io::Errno;
use serde::Serialize;

use super::args::{ImageFormat, ImportOptions, Location};
use super::image::{convert, is_stdio, require_qemu_img};
use super::media::{Media, holds_data};
use super::qcow2;
use super::sectors::read_full;
use crate::commands::Outcome;
use crate::meter::with_meter;
use crate::print::print;

/// Number of bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// A raw volume is written in pages of this size, and made durable after each `PERSIST_BYTES`.
const PAGE_BYTES: u64 = 4096;
const PERSIST_BYTES: u64 = 64 << 20;

/// Report of an import.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    location: &'a Location,
    image: &'a Path,
    #[serde(flatten)]
    filled: ImportSizes,
}

/// Sizes of the image from which a volume was filled.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct ImportSizes {
    image_bytes: u64,
    data_bytes: u64,
}

impl ImportSizes {
    pub(crate) fn text(self) -> String {
        format!(
            "{}, of which {} are data",
            Size(self.image_bytes).rounded(),
            Size(self.data_bytes).rounded()
        )
    }
}

pub(crate) fn import(location: &Location, options: &ImportOptions) -> anyhow::Result<Outcome> {
    let ImportOptions { from, format, force, output } = options;
    let source = Source::open(from, *format)?;
    // Checked before any long work.
    let media = Media::open_read_write(location)?;
    let target = Target::of(&media)?;
    source.check_image_fits(location, target.len_bytes())?;
    let holds_data = with_meter(|progress| holds_data(&media, progress))?;
    if holds_data {
        target.check_writable(location)?;
    }
    if holds_data && !force {
        bail!("{} holds data; --force replaces it all", location.name());
    }
    let target = if holds_data { target } else { target.empty() };
    let filled = target.fill(location, source.unpacked()?, holds_data).with_context(|| {
        format!(
            "{} contains only a part of the image; import it again with --force",
            location.name()
        )
    })?;
    let report = Report { location, image: from, filled };
    let text = format!("{} imported to {}: {}", source_name(from), location.name(), filled.text());
    print(output, &report, |out| writeln!(out, "{text}"))?;
    Ok(Outcome::Done)
}

/// Fills a volume that was just created.
pub(crate) fn fill(
    media: &Media,
    location: &Location,
    source: Source<'_>,
) -> anyhow::Result<ImportSizes> {
    Target::of(media)?.empty().fill(location, source, false)
}

fn source_name(path: &Path) -> String {
    if is_stdio(path) { "stdin".to_owned() } else { path.display().to_string() }
}

/// Image to read.
pub(crate) struct Source<'a> {
    path: &'a Path,
    input: Input,
    format: ImageFormat,
}

enum Input {
    File {
        file: File,
        /// Size of the unpacked image.
        len_bytes: u64,
    },
    /// Raw bytes until the end of stdin.
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
            bail!("{}: not a regular file, as an image must be", path.display());
        }
        let file = File::open(path).with_context(failed)?;
        if format.is_none() && qcow2::is_qcow2(&file).with_context(failed)? {
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

    /// Returns the size of the unpacked image, or `None` for a stream, because its length is
    /// unknown until its end.
    pub(crate) fn len_bytes(&self) -> Option<u64> {
        match self.input {
            Input::File { len_bytes, .. } => Some(len_bytes),
            Input::Stream(_) => None,
        }
    }

    fn check_image_fits(&self, location: &Location, room_bytes: u64) -> anyhow::Result<()> {
        match self.len_bytes() {
            Some(len_bytes) if len_bytes > room_bytes => bail!(
                "{}: the image has {len_bytes} bytes ({}), and {} has room for {room_bytes} ({})",
                self.path.display(),
                Size(len_bytes).rounded(),
                location.name(),
                Size(room_bytes).rounded()
            ),
            _ => Ok(()),
        }
    }

    /// Unpacks a qcow2 image to a raw file in the same folder. The raw file has no name, and
    /// disappears when it is closed.
    pub(crate) fn unpacked(self) -> anyhow::Result<Self> {
        let Self { path, input: Input::File { file, len_bytes }, format: ImageFormat::Qcow2 } =
            self
        else {
            return Ok(self);
        };
        let raw = with_meter(|progress| {
            convert((&file, ImageFormat::Qcow2), ImageFormat::Raw, path, len_bytes, progress)
        })?;
        let file = raw.file.try_clone().context("cannot keep the unpacked image open")?;
        let len_bytes = file.metadata().context("cannot inspect the unpacked image")?.len();
        Ok(Self { path, input: Input::File { file, len_bytes }, format: ImageFormat::Raw })
    }
}

const BEGINS_AS_QCOW2: &str = "it begins like a qcow2 image, but a guest may have written these bytes to a raw disk; use \
                               --format raw to import the bytes unchanged";

/// Opens stdin for reading. An empty stream is refused, because the program that writes to it has
/// probably failed.
fn open_stdin(format: Option<ImageFormat>) -> anyhow::Result<Box<dyn Read>> {
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

/// Destination of an import.
enum Target<'a> {
    /// A BTT that may hold data.
    Sectors(Box<Engine<&'a Media>>),
    /// An empty BTT, which is filled in bulk. `None` once it is full.
    Empty(Option<Box<BulkLoad<&'a Media>>>),
    /// A raw volume.
    Bytes(Bytes<&'a Media>),
}

/// Raw volume, with the ranges that were written but are not durable yet.
struct Bytes<M> {
    media: M,
    pending: Pending,
    pending_bytes: u64,
}

impl<M: media::Media> Bytes<M> {
    /// Writes, and flushes all earlier writes once they exceed a limit. Dirty pages of a page cache
    /// occupy memory.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.store_bulk(at, bytes, &mut self.pending)?;
        self.pending_bytes += bytes.len() as u64;
        if self.pending_bytes >= PERSIST_BYTES { self.persist() } else { Ok(()) }
    }

    fn persist(&mut self) -> Result<(), MediaError> {
        self.pending_bytes = 0;
        self.media.end_persist(&mem::take(&mut self.pending))
    }
}

impl<'a> Target<'a> {
    fn of(media: &'a Media) -> anyhow::Result<Self> {
        if media.is_raw() {
            let (pending, pending_bytes) = (Pending::default(), 0);
            return Ok(Target::Bytes(Bytes { media, pending, pending_bytes }));
        }
        Ok(Target::Sectors(Box::new(Engine::open(media)?)))
    }

    /// Switches to bulk loading if the target is a BTT. Its volume must hold no data.
    fn empty(self) -> Self {
        match self {
            Target::Sectors(engine) => match engine.into_bulk_load() {
                Ok(load) => Target::Empty(Some(Box::new(load))),
                Err(engine) => Target::Sectors(engine),
            },
            other => other,
        }
    }

    fn engine(&self) -> Option<&Engine<&'a Media>> {
        match self {
            Target::Sectors(engine) => Some(engine),
            Target::Empty(load) => load.as_ref().map(|load| load.engine()),
            Target::Bytes(_) => None,
        }
    }

    /// Fails if an arena is read-only. An import into a volume that holds data writes to every
    /// arena.
    fn check_writable(&self, location: &Location) -> anyhow::Result<()> {
        let arenas = self.engine().map(Engine::arenas).unwrap_or_default();
        for (number, arena) in arenas.into_iter().enumerate() {
            if let Some(reason) = arena.read_only {
                bail!(
                    "{}: arena {number} is read-only: {reason}; see `pmvol btt check` and `pmvol btt repair`",
                    location.name()
                );
            }
        }
        Ok(())
    }

    fn unit_bytes(&self) -> u64 {
        self.engine().map_or(PAGE_BYTES, |engine| u64::from(engine.sector_bytes()))
    }

    fn len_bytes(&self) -> u64 {
        match self {
            Target::Bytes(Bytes { media, .. }) => media.len_bytes(),
            _ => self.engine().map_or(0, Engine::sectors) * self.unit_bytes(),
        }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let sector = at / self.unit_bytes();
        match self {
            Target::Sectors(engine) => engine.write(sector, bytes)?,
            Target::Empty(load) => {
                load.as_mut().expect("it is taken at the end").write(sector, bytes)?;
            }
            Target::Bytes(raw) => raw.write(at, bytes)?,
        }
        Ok(())
    }

    /// Writes zeros to a range of a volume that holds data.
    fn zero(&mut self, range: Range<u64>) -> anyhow::Result<()> {
        if let Target::Sectors(engine) = self {
            let unit_bytes = u64::from(engine.sector_bytes());
            return Ok(engine.write_zeroes(range.start / unit_bytes..range.end / unit_bytes)?);
        }
        let zeros = vec![0; PIECE_BYTES as usize];
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(PIECE_BYTES);
            self.write(at, &zeros[..length as usize])?;
            at += length;
        }
        Ok(())
    }

    /// Copies an image and makes the copy durable, even if a part of the image cannot be read.
    fn fill(
        mut self,
        location: &Location,
        mut source: Source<'_>,
        holds_data: bool,
    ) -> anyhow::Result<ImportSizes> {
        // qemu-img examined the image later than `Source::open`, so the size may differ.
        source.check_image_fits(location, self.len_bytes())?;
        with_meter(|progress| {
            let copy = Copy { target: &mut self, holds_data, image_bytes: 0, data_bytes: 0 };
            copy.run(&mut source.input, progress)
        })
    }

    /// Makes all data durable, so that the next driver finds it.
    fn quiesce(&mut self) -> anyhow::Result<()> {
        match self {
            Target::Sectors(engine) => engine.quiesce()?,
            Target::Empty(load) => {
                load.take().expect("it is taken once").finish()?.quiesce()?;
            }
            Target::Bytes(raw) => {
                raw.persist()?;
                // Zeros that the volume already had were not stored, and may not be durable yet.
                raw.media.persist_range(0..raw.media.len_bytes())?;
            }
        }
        Ok(())
    }
}

struct Copy<'a, 'b> {
    target: &'a mut Target<'b>,
    /// Unwritten sectors must be zeroed.
    holds_data: bool,
    image_bytes: u64,
    data_bytes: u64,
}

impl Copy<'_, '_> {
    /// Copies the whole image. If it fails, the part that was copied is kept.
    fn run(mut self, input: &mut Input, progress: OnProgress<'_>) -> anyhow::Result<ImportSizes> {
        let total_bytes = self.target.len_bytes();
        let copied = match input {
            Input::File { file, len_bytes } => self.copy_file(file, *len_bytes, progress),
            Input::Stream(stream) => self.copy_stream(stream, progress),
        };
        let quiesced = self.target.quiesce();
        copied?;
        quiesced?;
        progress(Progress { task: Task::Copy, done_bytes: total_bytes, total_bytes });
        // The last sector is padded.
        let data_bytes = self.data_bytes.min(self.image_bytes);
        Ok(ImportSizes { image_bytes: self.image_bytes, data_bytes })
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
            // If data starts within a piece, its leading zeros are found when the piece is read.
            let data = next_data(file, at, len_bytes).context("cannot search for holes")?;
            let start = data.unwrap_or(len_bytes) / PIECE_BYTES * PIECE_BYTES;
            if data.is_none() || start > at {
                let end = if data.is_none() { total_bytes } else { start };
                self.skip(at..end)?;
                at = end;
                continue;
            }
            let mut bytes = vec![0; (len_bytes - at).min(PIECE_BYTES) as usize];
            file.read_exact_at(&mut bytes, at).context("cannot read the image")?;
            at += self.write_piece(at, bytes)?;
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
            at += self.write_piece(at, bytes)?;
        }
    }

    /// Writes a piece of the image, whose last sector may be incomplete. Returns the number of
    /// bytes in all its sectors.
    fn write_piece(&mut self, at: u64, mut bytes: Vec<u8>) -> anyhow::Result<u64> {
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

    /// Skips a range of zeros. Zeros are written only if the volume may hold other data there.
    fn skip(&mut self, range: Range<u64>) -> anyhow::Result<()> {
        if self.holds_data && !range.is_empty() { self.target.zero(range) } else { Ok(()) }
    }
}

/// Returns the next offset with data at or after `from`, or `None` if only a hole follows.
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
    use std::sync::Mutex;

    use pmem_volume::Durability;

    use super::*;

    /// Media that record the ranges that were stored but are not durable yet.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<Range<u64>>>);

    impl media::Media for Recorder {
        fn len_bytes(&self) -> u64 {
            1 << 40
        }

        fn durability(&self) -> Durability {
            Durability::PageCache
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), MediaError> {
            panic!("nothing is read")
        }

        fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
            self.0.lock().unwrap().push(offset_bytes..offset_bytes + bytes.len() as u64);
            Ok(())
        }

        fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
            self.0.lock().unwrap().retain(|stored| !ranges.contains(stored));
            Ok(())
        }
    }

    #[test]
    fn writes_to_a_raw_volume_are_persisted_in_batches_and_at_the_end() {
        let piece = vec![0; PIECE_BYTES as usize];
        let mut raw =
            Bytes { media: Recorder::default(), pending: Pending::default(), pending_bytes: 0 };
        let per_batch = (PERSIST_BYTES / PIECE_BYTES) as usize;
        for number in 0..300 {
            raw.write(number as u64 * 3 * PIECE_BYTES, &piece).unwrap();
            assert_eq!(raw.media.0.lock().unwrap().len(), (number + 1) % per_batch);
        }
        raw.persist().unwrap();
        assert!(raw.media.0.lock().unwrap().is_empty());
    }
}
