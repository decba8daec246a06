//! A console's output file of limited size.
//!
//! A guest can write any amount of output. When the file reaches its size limit, it is renamed to
//! `PATH.1`, which replaces an older `PATH.1`. Output continues in a new file. If that is not
//! possible, for example because `PATH.1` belongs to another program, the file is emptied instead,
//! so that the limit always holds.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::mem;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pmem_volume::file_mode::PRIVATE_MODE;
use pmem_volume::pool::lock::{LockKind, try_lock};
use pmem_volume::pool::mark::Mark;
use prometheus_client::registry::Unit;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;
use tracing::warn;

use crate::file_id::link_target;
use crate::log::rate_limited;
use crate::metrics::{Expose, Exposition, Family, one};
use crate::output_file::admit;
use crate::throttle::ThrottleMetrics;

/// Suffix of a file that has reached its limit.
const OLDER: &str = ".1";
/// Suffix of the new file until the old file was renamed.
const NEWER: &str = ".new";
/// The file's length is read again after this fraction of the limit was written. It is not read on
/// each write, because fstat takes longer than writing a short line.
const UNREAD_PART: u64 = 64;

/// Counters of a console's file.
#[derive(Debug, Default)]
pub struct ConsoleFileMetrics {
    /// Number of times that the file has reached its limit.
    pub rotations: AtomicU64,
    /// Bytes of earlier output that were removed to keep the limit.
    pub discarded_bytes: AtomicU64,
    /// Writes that were delayed because they exceeded the rate limit.
    pub throttled: ThrottleMetrics,
}

/// Reason why a file is emptied instead of renamed.
#[derive(Debug, Error)]
enum RotateError {
    /// The path cannot be determined, for example because the file was removed before.
    #[error("the path of the file is unknown")]
    NoPath,
    #[error("{0:?} was replaced by another file")]
    Replaced(PathBuf),
    /// The file is not the output of a VMM.
    #[error("{0:?} exists and is not the output of a VMM")]
    NotOutput(PathBuf),
    #[error("{0:?} is in use")]
    InUse(PathBuf),
    #[error("{call}: {source}")]
    Io {
        call: &'static str,
        /// Reason of the operating system.
        source: io::Error,
    },
}

impl ConsoleFileMetrics {
    fn discard(&self, bytes: u64) {
        self.discarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> RotateError {
    move |source| RotateError::Io { call, source }
}

/// Identity of a file, independent of its path.
pub(super) type FileId = (u64, u64);

pub(super) fn id_of(metadata: &Metadata) -> FileId {
    (metadata.dev(), metadata.ino())
}

/// Output file of a console. Clones write to the same file, because a serial port and a console may
/// share one.
#[derive(Clone, Debug)]
pub(super) struct RotatedFile {
    current: Arc<Mutex<Current>>,
    metrics: Arc<ConsoleFileMetrics>,
}

/// Additional paths that rotation of the file at `path` uses: the renamed file, and the new file
/// before it is renamed.
pub fn rotation_paths(path: &Path) -> [PathBuf; 2] {
    // Resolves links, because opening or creating the file follows them.
    let target = fs::canonicalize(path).ok().or_else(|| link_target(path));
    let path = target.unwrap_or_else(|| path.to_owned());
    [OLDER, NEWER].map(|suffix| with_suffix(&path, suffix))
}

#[derive(Debug)]
struct Current {
    file: File,
    /// Path with symbolic links resolved, if it is known.
    path: Option<PathBuf>,
    max_bytes: Option<u64>,
    /// The file that was last renamed, if it has no mark. The file is kept open so that its
    /// inode number is not reused.
    older: Option<File>,
    length: Length,
}

/// Last known length of the file. Other programs may empty the file or append to it.
#[derive(Debug)]
struct Length {
    bytes: u64,
    /// Bytes that were written since the length was last read.
    unread_bytes: u64,
}

impl Length {
    const UNKNOWN: Self = Self { bytes: 0, unread_bytes: u64::MAX };
    const EMPTY: Self = Self { bytes: 0, unread_bytes: 0 };

    /// Returns the length of the file. Reads it again if the file seems to be full.
    fn of(&mut self, file: &File, max_bytes: u64) -> io::Result<u64> {
        if self.bytes >= max_bytes || self.unread_bytes >= max_bytes / UNREAD_PART {
            *self = Self { bytes: file.metadata()?.len(), unread_bytes: 0 };
        }
        Ok(self.bytes)
    }

    fn add(&mut self, written: usize) {
        self.bytes = self.bytes.saturating_add(written as u64);
        self.unread_bytes = self.unread_bytes.saturating_add(written as u64);
    }
}

impl RotatedFile {
    /// Limits `file`, which was opened as `path`, to `max_bytes`.
    pub(super) fn new(file: File, path: &Path, max_bytes: Option<u64>) -> Self {
        let path = fs::canonicalize(path).ok();
        let current = Current { file, path, max_bytes, older: None, length: Length::UNKNOWN };
        Self { current: Arc::new(Mutex::new(current)), metrics: Arc::default() }
    }

    /// Returns the same file for another console. The lower of the two limits applies.
    pub(super) fn share(&self, max_bytes: Option<u64>) -> Self {
        let mut current = self.current.lock();
        current.max_bytes = current.max_bytes.into_iter().chain(max_bytes).min();
        Self { current: Arc::clone(&self.current), metrics: Arc::default() }
    }

    pub(super) fn metrics(&self) -> Arc<ConsoleFileMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Returns true if `id` is the file that is currently written to.
    pub(super) fn is(&self, id: FileId) -> io::Result<bool> {
        Ok(id_of(&self.current.lock().file.metadata()?) == id)
    }
}

impl Write for RotatedFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let current = &mut *self.current.lock();
        let Some(max_bytes) = current.max_bytes else { return current.file.write(data) };
        if current.length.of(&current.file, max_bytes)? >= max_bytes {
            self.metrics.rotations.fetch_add(1, Ordering::Relaxed);
            current.start_new_file(&self.metrics)?;
            current.length = Length::EMPTY;
        }
        let room = usize::try_from(max_bytes - current.length.bytes).unwrap_or(usize::MAX);
        let written = current.file.write(&data[..data.len().min(room)])?;
        current.length.add(written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.current.lock().file.flush()
    }
}

impl Current {
    /// Continues with an empty file, either a new one or the same one.
    fn start_new_file(&mut self, metrics: &ConsoleFileMetrics) -> io::Result<()> {
        if let Err(err) = self.rename_by(metrics, |from, to| fs::rename(from, to)) {
            rate_limited!(
                warn,
                path = ?self.path,
                %err,
                "Console file reached its limit and is emptied, because it cannot be renamed to {OLDER}"
            );
            let bytes = self.file.metadata()?.len();
            self.file.set_len(0)?;
            metrics.discard(bytes);
        }
        Ok(())
    }

    /// Renames the file with `rename` and starts another. Counts the bytes in files that are
    /// removed or replaced.
    fn rename_by(
        &mut self,
        metrics: &ConsoleFileMetrics,
        rename: impl Fn(&Path, &Path) -> io::Result<()>,
    ) -> Result<(), RotateError> {
        let path = self.path.clone().ok_or(RotateError::NoPath)?;
        let (older, newer) = (with_suffix(&path, OLDER), with_suffix(&path, NEWER));
        let open_file = self.file.metadata().map_err(failed("fstat"))?;
        // The last rotation could not rename the new file to `PATH`.
        if is_free(&path) && is_at(&newer, &open_file) {
            rename(&newer, &path).map_err(failed("rename"))?;
        }
        if !is_at(&path, &open_file) {
            return Err(RotateError::Replaced(path));
        }
        let older_bytes = replaceable_bytes(&older, self.older.as_ref())?;
        // An earlier VMM may have left `PATH.new` behind because another program had taken the
        // path.
        let newer_bytes = replaceable_bytes(&newer, self.older.as_ref())?;
        if fs::remove_file(&newer).is_ok() {
            metrics.discard(newer_bytes);
        }
        // Creates the new file before the renames, so that neither file is changed if this fails.
        let file = create_like(&newer, &open_file)?;
        rename(&path, &older).map_err(|err| {
            let _ = fs::remove_file(&newer);
            failed("rename")(err)
        })?;
        metrics.discard(older_bytes);
        // The earlier output is now `PATH.1`, so this file must no longer be written or emptied.
        self.older = hold_unmarked(mem::replace(&mut self.file, file));
        if let Err(err) = rename(&newer, &path) {
            rate_limited!(warn, ?path, %err, "Console file reached its limit and continues as {newer:?}");
        }
        Ok(())
    }
}

/// Renames `PATH.new`, if an earlier VMM has left it behind, to `path`, unless `path` exists.
/// `path` may be a symbolic link to the missing file.
pub(super) fn adopt_newer(path: &Path) {
    let Some(path) = link_target(path) else { return };
    let newer = with_suffix(&path, NEWER);
    if !is_free(&path) || is_free(&newer) {
        return;
    }
    let renamed = replaceable_bytes(&newer, None)
        .and_then(|_| fs::rename(&newer, &path).map_err(failed("rename")));
    if let Err(err) = renamed {
        warn!(%err, "Cannot rename the console file {newer:?} to {path:?}");
    }
}

/// Returns `file` if it has no mark by which a later rotation could recognize it. Otherwise closes
/// it, so that removing the file frees its space.
fn hold_unmarked(file: File) -> Option<File> {
    if has_mark(&file) {
        return None;
    }
    // If the lock remained, it would look like a lock of another VMM.
    match flock(&file, FlockOperation::Unlock) {
        Ok(()) => Some(file),
        Err(_) => None,
    }
}

/// Returns true if a mark shows that the file is the output of a VMM. File systems without extended
/// attributes have no marks.
fn has_mark(file: &File) -> bool {
    matches!(Mark::of(file), Ok(Some(Mark::Output)))
}

/// Checks that the file at `path` is the output of a VMM or the file `known`, so that it may be
/// replaced. Returns its size, or 0 for a missing file.
fn replaceable_bytes(path: &Path, known: Option<&File>) -> Result<u64, RotateError> {
    let named = match fs::symlink_metadata(path) {
        Ok(named) => named,
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(err) => return Err(failed("lstat")(err)),
    };
    if !named.is_file() {
        return Err(RotateError::NotOutput(path.to_owned()));
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed("open"))?;
    let opened = file.metadata().map_err(failed("fstat"))?;
    let known = known.map(File::metadata).transpose().map_err(failed("fstat"))?;
    if !has_mark(&file) && known.map(|known| id_of(&known)) != Some(id_of(&opened)) {
        return Err(RotateError::NotOutput(path.to_owned()));
    }
    match try_lock(&file, LockKind::Exclusive).map_err(failed("flock"))? {
        Ok(()) => Ok(opened.len()),
        Err(_) => Err(RotateError::InUse(path.to_owned())),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    OsString::from_iter([path.as_os_str(), suffix.as_ref()]).into()
}

fn is_free(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|err| err.kind() == io::ErrorKind::NotFound)
}

/// Returns true if `path` is `file` itself, and not a link to it.
fn is_at(path: &Path, file: &Metadata) -> bool {
    fs::symlink_metadata(path).is_ok_and(|named| id_of(&named) == id_of(file))
}

/// Creates a file with the owner, group and mode of `other`, so that the same users can read it.
fn create_like(path: &Path, other: &Metadata) -> Result<File, RotateError> {
    let mut options = OpenOptions::new();
    options.append(true).create_new(true).mode(PRIVATE_MODE);
    let file = options.open(path).map_err(failed("open"))?;
    // Setting a group fails if the VMM is not a member. The file then remains private.
    if fchown(&file, Some(other.uid()), Some(other.gid())).is_ok() {
        file.set_permissions(other.permissions()).map_err(failed("fchmod"))?;
    }
    admit(&file, path).map_err(|err| failed("flock")(err.into()))?;
    Ok(file)
}

/// Counters of a console's output file.
#[derive(Debug)]
pub struct ConsoleFileSource {
    /// Name of the console.
    pub device: &'static str,
    pub counters: Arc<ConsoleFileMetrics>,
}

impl Expose for ConsoleFileSource {
    fn expose(&self, out: &mut Exposition) {
        let get =
            |counter: &AtomicU64| [(one("device", self.device), counter.load(Ordering::Relaxed))];
        out.counters(
            Family(
                "console_file_rotations",
                "Times that a console file reached its size limit.",
                None,
            ),
            get(&self.counters.rotations),
        );
        out.counters(
            Family(
                "console_file_discarded",
                "Earlier output removed because a console file reached its size limit.",
                Some(Unit::Bytes),
            ),
            get(&self.counters.discarded_bytes),
        );
        out.seconds_total(
            "console_file_throttled",
            "Time by which the rate limit of a console file delayed its output.",
            [(one("device", self.device), self.counters.throttled.delay().as_secs_f64())],
        );
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use tempfile::TempDir;

    use super::*;

    const MAX: u64 = 100;

    fn open(path: &Path) -> File {
        let file = File::options().append(true).create(true).open(path).unwrap();
        admit(&file, path).unwrap();
        file
    }

    fn console() -> (TempDir, PathBuf, RotatedFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial.log");
        let file = RotatedFile::new(open(&path), &path, Some(MAX));
        (folder, path, file)
    }

    fn older(path: &Path) -> PathBuf {
        format!("{}{OLDER}", path.display()).into()
    }

    fn counts(file: &RotatedFile) -> (u64, u64) {
        let metrics = file.metrics();
        (metrics.rotations.load(Ordering::Relaxed), metrics.discarded_bytes.load(Ordering::Relaxed))
    }

    fn folder_bytes(folder: &Path) -> u64 {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    }

    #[test]
    fn guest_that_writes_without_end_fills_two_files() {
        let (folder, path, mut file) = console();
        let text: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
        for part in text.chunks(33) {
            file.write_all(part).unwrap();
            assert!(folder_bytes(folder.path()) <= 2 * MAX);
        }
        // The files contain the last bytes, in order.
        let remaining = [fs::read(older(&path)).unwrap(), fs::read(&path).unwrap()].concat();
        assert!(remaining.len() as u64 > MAX && text.ends_with(&remaining));
        assert_eq!(counts(&file), (99, text.len() as u64 - remaining.len() as u64));
    }

    #[test]
    fn file_without_limit_grows() {
        let (folder, path, _) = console();
        let mut file = RotatedFile::new(open(&path), &path, None);
        file.write_all(&[b'x'; 1000]).unwrap();
        assert_eq!((folder_bytes(folder.path()), counts(&file)), (1000, (0, 0)));
    }

    #[test]
    fn new_file_has_the_permissions_and_the_lock_of_the_old_one() {
        let (_folder, path, mut file) = console();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        file.write_all(&[b'x'; 150]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(pmem_volume::pool::ownership::claim(&path, true, 0).is_err());
        assert_eq!(Mark::of(&open(&path)).unwrap(), Some(Mark::Output));
    }

    #[test]
    fn file_of_another_program_is_not_replaced_and_the_limit_holds() {
        for is_link in [false, true] {
            let (folder, path, mut file) = console();
            let other = if is_link { folder.path().join("other") } else { older(&path) };
            fs::write(&other, "precious").unwrap();
            if is_link {
                symlink(&other, older(&path)).unwrap();
            }
            for _ in 0..50 {
                file.write_all(&[b'x'; 33]).unwrap();
                assert!(fs::metadata(&path).unwrap().len() <= MAX);
            }
            assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
            assert_eq!(counts(&file), (16, 1600));
        }
    }

    #[test]
    fn older_file_stays_if_no_new_one_can_be_made() {
        let (folder, path, mut file) = console();
        file.write_all(&[b'x'; 150]).unwrap();
        fs::create_dir(folder.path().join("serial.log.new")).unwrap();
        file.write_all(&[b'y'; 100]).unwrap();
        assert_eq!(fs::read(older(&path)).unwrap(), [b'x'; 100]);
        assert_eq!(fs::read(&path).unwrap(), [b'y'; 50]);
        assert_eq!(counts(&file), (2, 100));
    }

    /// Renames a file, but fails for the new file of a rotation.
    fn rename_but_newer(from: &Path, to: &Path) -> io::Result<()> {
        match from.ends_with("serial.log.new") {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => fs::rename(from, to),
        }
    }

    #[test]
    fn earlier_output_stays_if_the_new_file_gets_no_name() {
        let (folder, path, mut file) = console();
        let newer = folder.path().join("serial.log.new");
        file.write_all(&[b'x'; 100]).unwrap();
        file.current.lock().rename_by(&file.metrics, rename_but_newer).unwrap();
        file.current.lock().length = Length::EMPTY;
        file.write_all(&[b'y'; 100]).unwrap();
        assert!(!path.exists());
        assert_eq!(fs::read(older(&path)).unwrap(), [b'x'; 100]);
        assert_eq!(fs::read(&newer).unwrap(), [b'y'; 100]);
        // The next rotation renames both files.
        file.write_all(&[b'z'; 50]).unwrap();
        assert_eq!(fs::read(older(&path)).unwrap(), [b'y'; 100]);
        assert_eq!(fs::read(&path).unwrap(), [b'z'; 50]);
        assert!(!newer.exists());
        assert_eq!(counts(&file), (1, 100));
    }

    #[test]
    fn older_file_stays_if_the_file_cannot_be_renamed() {
        let (folder, path, mut file) = console();
        file.write_all(&[b'x'; 150]).unwrap();
        let refuse = |_: &Path, _: &Path| Err(io::ErrorKind::StorageFull.into());
        let error = file.current.lock().rename_by(&file.metrics, refuse).unwrap_err().to_string();
        assert!(error.starts_with("rename: "), "{error}");
        assert_eq!(fs::read(older(&path)).unwrap(), [b'x'; 100]);
        assert_eq!(fs::read(&path).unwrap(), [b'x'; 50]);
        assert!(!folder.path().join("serial.log.new").exists());
        assert_eq!(counts(&file), (1, 0));
        // Output continues in the file, which can be renamed later.
        file.write_all(&[b'y'; 100]).unwrap();
        assert_eq!(fs::read(older(&path)).unwrap(), [[b'x'; 50], [b'y'; 50]].concat());
        assert_eq!(fs::read(&path).unwrap(), [b'y'; 50]);
    }

    /// Removes a file's mark, as if the file system did not support extended attributes.
    fn remove_mark(path: &Path) {
        rustix::fs::removexattr(path, c"user.foreshore").unwrap();
    }

    #[test]
    fn older_file_of_this_console_is_replaced_without_a_mark() {
        let (folder, path, mut file) = console();
        remove_mark(&path);
        file.write_all(&[b'x'; 150]).unwrap();
        remove_mark(&path);
        file.write_all(&[b'y'; 100]).unwrap();
        assert_eq!(fs::read(older(&path)).unwrap(), [[b'x'; 50], [b'y'; 50]].concat());
        // Replaces the file with another file without a mark.
        let other = folder.path().join("other");
        fs::write(&other, "precious").unwrap();
        fs::rename(&other, older(&path)).unwrap();
        file.write_all(&[b'z'; 100]).unwrap();
        assert_eq!(fs::read_to_string(older(&path)).unwrap(), "precious");
    }

    /// Returns true if this process has the file open, so that its inode number is not reused.
    fn is_held(id: FileId) -> bool {
        let descriptors = fs::read_dir("/proc/self/fd").unwrap();
        descriptors
            .flatten()
            .any(|entry| fs::metadata(entry.path()).is_ok_and(|open| id_of(&open) == id))
    }

    #[test]
    fn number_of_removed_older_file_is_not_reused_while_it_has_no_mark() {
        let (_folder, path, mut file) = console();
        remove_mark(&path);
        file.write_all(&[b'x'; 150]).unwrap();
        let unmarked = id_of(&fs::metadata(older(&path)).unwrap());
        fs::remove_file(older(&path)).unwrap();
        fs::write(older(&path), "precious").unwrap();
        assert!(is_held(unmarked));
        file.write_all(&[b'y'; 100]).unwrap();
        assert_eq!(fs::read_to_string(older(&path)).unwrap(), "precious");
        // A file with a mark is not kept open, so removing it frees its space.
        fs::remove_file(older(&path)).unwrap();
        file.write_all(&[b'z'; 100]).unwrap();
        let marked = id_of(&fs::metadata(older(&path)).unwrap());
        assert!(!is_held(marked));
    }

    #[test]
    fn earlier_output_stays_while_the_new_file_gets_no_name() {
        let (folder, path, mut file) = console();
        file.write_all(&[b'x'; 100]).unwrap();
        file.current.lock().rename_by(&file.metrics, rename_but_newer).unwrap();
        for _ in 0..3 {
            file.current.lock().rename_by(&file.metrics, rename_but_newer).unwrap_err();
        }
        assert_eq!(fs::read(older(&path)).unwrap(), [b'x'; 100]);
        // Even if another program has taken the path, the limit is observed.
        fs::write(&path, "another").unwrap();
        file.write_all(&[b'y'; 1000]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "another");
        assert_eq!(fs::read(older(&path)).unwrap(), [b'x'; 100]);
        assert!(fs::metadata(folder.path().join("serial.log.new")).unwrap().len() <= MAX);
    }

    #[test]
    fn new_file_that_an_earlier_vmm_left_behind_gets_its_name() {
        for (is_link, is_continued) in [(false, false), (false, true), (true, true)] {
            let (folder, path, mut file) = console();
            let newer = folder.path().join("serial.log.new");
            file.write_all(&[b'x'; 100]).unwrap();
            file.current.lock().rename_by(&file.metrics, rename_but_newer).unwrap();
            file.current.lock().length = Length::EMPTY;
            file.write_all(&[b'y'; 70]).unwrap();
            let named = if is_link { folder.path().join("link") } else { path.clone() };
            if is_link {
                symlink("serial.log", &named).unwrap();
            }
            // Another VMM is still writing to the file.
            adopt_newer(&named);
            assert!(newer.exists() && !path.exists());
            drop(file);
            adopt_newer(&named);
            assert!(!newer.exists());
            assert_eq!(fs::read(&named).unwrap(), [b'y'; 70]);
            if is_continued {
                let mut file = RotatedFile::new(open(&named), &named, Some(MAX));
                file.write_all(&[b'z'; 50]).unwrap();
                assert_eq!(fs::read(&path).unwrap(), [b'z'; 20]);
                assert_eq!(counts(&file), (1, 100));
                assert!(
                    folder_bytes(folder.path())
                        <= 2 * MAX + named.symlink_metadata().unwrap().len()
                );
            }
        }
    }

    #[test]
    fn new_file_that_was_left_behind_beside_another_is_removed_and_counted() {
        let (folder, path, mut file) = console();
        let newer = folder.path().join("serial.log.new");
        open(&newer).write_all(&[b'y'; 70]).unwrap();
        adopt_newer(&path);
        assert!(newer.exists(), "the path has no file");
        file.write_all(&[b'x'; 150]).unwrap();
        assert_eq!(counts(&file), (1, 70));
        assert!(!newer.exists() && fs::read(&path).unwrap() == [b'x'; 50]);
        // The file of another program is neither renamed nor removed.
        fs::remove_file(&path).unwrap();
        fs::write(&newer, "another").unwrap();
        adopt_newer(&path);
        assert!(!path.exists() && fs::read_to_string(&newer).unwrap() == "another");
    }

    #[test]
    fn limit_holds_although_the_length_is_not_read_with_each_write() {
        const MAX: u64 = 6400;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial.log");
        let mut file = RotatedFile::new(open(&path), &path, Some(MAX));
        let len = || fs::metadata(&path).unwrap().len();
        // After another program has emptied the file, it is not full.
        file.write_all(&[b'x'; MAX as usize - 1]).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        file.write_all(&[b'y'; 50]).unwrap();
        assert_eq!((len(), counts(&file)), (50, (0, 0)));
        // The length was just read and the file seems to be full, so the length is read again.
        file.write_all(&vec![b'y'; MAX as usize - 100]).unwrap();
        file.write_all(&[b'y'; 50]).unwrap();
        assert_eq!((len(), file.current.lock().length.unread_bytes), (MAX, 50));
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        file.write_all(&[b'y'; 50]).unwrap();
        assert_eq!((len(), counts(&file)), (50, (0, 0)));
        // After another program has appended to the file, it is full earlier, within the precision
        // of `UNREAD_PART`.
        let mut other = File::options().append(true).open(&path).unwrap();
        while counts(&file).0 == 0 {
            other.write_all(&[b'z'; 50]).unwrap();
            file.write_all(&[b'y'; 50]).unwrap();
            assert!(len() <= MAX + 2 * MAX / UNREAD_PART, "{}", len());
        }
        assert_eq!(len(), 50);
    }

    #[test]
    fn file_that_another_console_writes_is_not_replaced() {
        let (_folder, path, mut file) = console();
        let mut other = open(&older(&path));
        other.write_all(b"of another console").unwrap();
        file.write_all(&[b'x'; 150]).unwrap();
        assert_eq!(fs::read_to_string(older(&path)).unwrap(), "of another console");
        drop(other);
        file.write_all(&[b'x'; 100]).unwrap();
        assert_eq!(fs::metadata(older(&path)).unwrap().len(), MAX);
    }

    #[test]
    fn renamed_or_removed_file_is_limited() {
        let (folder, path, mut file) = console();
        let moved = folder.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        fs::write(&path, "another").unwrap();
        file.write_all(&[b'x'; 150]).unwrap();
        assert_eq!(fs::metadata(&moved).unwrap().len(), 50);
        assert_eq!(fs::read_to_string(&path).unwrap(), "another");
        fs::remove_file(&moved).unwrap();
        file.write_all(&[b'x'; 1000]).unwrap();
        assert!(file.current.lock().file.metadata().unwrap().len() <= MAX);
    }

    #[test]
    fn consoles_that_share_a_file_continue_in_the_same_one() {
        let (folder, path, mut file) = console();
        let mut other = file.share(Some(50));
        assert!(other.is(id_of(&fs::metadata(&path).unwrap())).unwrap());
        for _ in 0..20 {
            file.write_all(&[b'a'; 10]).unwrap();
            other.write_all(&[b'b'; 10]).unwrap();
            assert!(folder_bytes(folder.path()) <= 100, "the lower limit");
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains('a') && text.contains('b'), "{text}");
    }

    #[test]
    fn link_stays_and_its_target_is_renamed() {
        let (folder, path, _) = console();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        let mut file = RotatedFile::new(open(&link), &link, Some(MAX));
        file.write_all(&[b'x'; 150]).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::metadata(older(&path)).unwrap().len(), MAX);
        assert_eq!(fs::metadata(&link).unwrap().len(), 50);
    }
}
