//! Files to which consoles write. They remain unchanged if the VM cannot be built.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use pmem_volume::file_mode::PRIVATE_MODE;
use tracing::warn;

use super::config::FileLimits;
use super::file_rate::FileThrottle;
use super::rotated_file::{ConsoleFileSource, RotatedFile, adopt_newer, id_of};
use super::{ConsoleError, ConsoleOutput, Lines, Port};
use crate::output_file::{admit, lock};

/// Action for a file that already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileStart {
    /// Empty the file, for a new VM.
    Empty,
    /// Append to the file, for the same VM after a reboot.
    Continue,
}

/// Console files of a VM that is being built. Dropping this before [`Self::begin`] has succeeded
/// removes files that were created. Existing files are not emptied before `begin`.
pub struct ConsoleFiles {
    start: FileStart,
    opened: Vec<Opened>,
    limited: Vec<(Port, RotatedFile)>,
    lines: Lines,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    /// Path of a file that was created for this VM, with symbolic links resolved if possible.
    made: Option<PathBuf>,
}

impl ConsoleFiles {
    /// Creates an empty set of files. Pseudo terminals and sockets are in `lines` and remain there
    /// even if the VM cannot be built.
    pub fn new(start: FileStart, lines: Lines) -> Self {
        Self { start, opened: Vec::new(), limited: Vec::new(), lines }
    }

    pub(super) fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Opens a file in append mode. The serial port and the virtio console may share the file, and
    /// log files may be truncated while the VM runs.
    pub(super) fn open(&mut self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let (file, is_made) = match options.append(true).open(path) {
            Err(err) if err.kind() == io::ErrorKind::NotFound => {
                (options.create(true).mode(PRIVATE_MODE).open(path)?, true)
            }
            result => (result?, false),
        };
        // Records the created file before any other step can fail, so that it is always removed
        // again.
        let made = is_made.then(|| path.to_owned());
        let opened = self.opened.push_mut(Opened { path: path.to_owned(), file, made });
        if is_made {
            opened.made = Some(fs::canonicalize(path)?);
        }
        match self.start {
            FileStart::Empty => admit(&opened.file, path)?,
            // After a reboot, the file contains the guest's own output, so its content is not
            // checked.
            FileStart::Continue => lock(&opened.file, path)?,
        }
        opened.file.try_clone()
    }

    /// Opens the output file of a console. The limits apply to regular files.
    pub(super) fn output(
        &mut self,
        port: Port,
        path: &Path,
        limits: FileLimits,
    ) -> io::Result<ConsoleOutput> {
        adopt_newer(path);
        let file = self.open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return ConsoleOutput::to(file);
        }
        let mut limited = RotatedFile::new(file, path, limits.max_bytes);
        for (_, other) in &self.limited {
            if other.is(id_of(&metadata))? {
                limited = other.share(limits.max_bytes);
            }
        }
        self.limited.push((port, limited.clone()));
        let throttle = limits.bytes_per_s.map(|rate| {
            let bucket = self.lines.rate_bucket(port, rate, Instant::now());
            FileThrottle::new(bucket, limited.metrics())
        });
        ConsoleOutput::to_rotated(path, limited, throttle)
    }

    /// Counters of the output files.
    pub fn metrics(&self) -> impl Iterator<Item = ConsoleFileSource> {
        self.limited.iter().map(|(port, file)| ConsoleFileSource {
            device: port.label(),
            counters: file.metrics(),
        })
    }

    /// Empties the files if the VM is new. Call this after the VM was built and before it writes
    /// output.
    pub fn begin(mut self) -> Result<(), ConsoleError> {
        if self.start == FileStart::Empty {
            // If one file cannot be emptied, files that were already emptied remain empty.
            self.opened.iter().try_for_each(Opened::empty)?;
        }
        // The files now belong to the VM and are not removed.
        self.opened.clear();
        Ok(())
    }
}

impl Drop for ConsoleFiles {
    fn drop(&mut self) {
        for opened in &self.opened {
            if let Some(made) = &opened.made
                && let Err(err) = opened.remove(made)
            {
                warn!(%err, path = %opened.path.display(), "Cannot remove the console file of a VM that was not created");
            }
        }
    }
}

impl Opened {
    fn empty(&self) -> Result<(), ConsoleError> {
        let empty = || {
            // Pipes and terminals cannot be emptied, and need not be.
            if self.file.metadata()?.is_file() { self.file.set_len(0) } else { Ok(()) }
        };
        empty().map_err(|source| ConsoleError::Empty { path: self.path.clone(), source })
    }

    /// Removes the file if it is still at `path`.
    fn remove(&self, path: &Path) -> io::Result<()> {
        let (open_file, named) = (self.file.metadata()?, fs::symlink_metadata(path)?);
        if (open_file.dev(), open_file.ino()) == (named.dev(), named.ino()) {
            fs::remove_file(path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::num::NonZeroU64;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::super::file_rate::BURST_BYTES;
    use super::*;
    use crate::throttle::NANOS_PER_S;

    const LIMITED: FileLimits = FileLimits { max_bytes: Some(1000), bytes_per_s: None };

    fn files(start: FileStart) -> ConsoleFiles {
        ConsoleFiles::new(start, Lines::default())
    }

    fn folder_with(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn file_is_emptied_only_when_its_vm_begins() {
        let (_folder, path) = folder_with("console", "earlier output");
        let mut files = files(FileStart::Empty);
        let mut file = files.open(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "earlier output");
        files.begin().unwrap();
        file.write_all(b"hello").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "hello");
    }

    #[test]
    fn file_is_continued_after_a_reboot() {
        let (_folder, path) = folder_with("console", "one ");
        let mut files = files(FileStart::Continue);
        let mut file = files.open(&path).unwrap();
        files.begin().unwrap();
        file.write_all(b"two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one two");
    }

    #[test]
    fn failed_build_leaves_files_unchanged() {
        let (folder, old) = folder_with("old", "earlier output");
        let [new, link, target, replaced] =
            ["new", "link", "target", "replaced"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut files = files(FileStart::Empty);
        for path in [&old, &new, &new, &link, &replaced] {
            files.open(path).unwrap();
        }
        fs::remove_file(&replaced).unwrap();
        fs::write(&replaced, "another program's").unwrap();
        drop(files);
        assert_eq!(fs::read_to_string(&old).unwrap(), "earlier output");
        assert!(!new.exists());
        assert!(link.is_symlink() && !target.exists());
        assert_eq!(fs::read_to_string(&replaced).unwrap(), "another program's");
    }

    fn path_of(file: &impl AsRawFd) -> PathBuf {
        format!("/proc/self/fd/{}", file.as_raw_fd()).into()
    }

    #[test]
    fn failure_to_empty_a_file_removes_new_files() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let mut sealed = File::from(memfd_create("console", flags).unwrap());
        sealed.write_all(b"earlier output").unwrap();
        fcntl_add_seals(&sealed, SealFlags::SHRINK).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("new");
        let mut files = files(FileStart::Empty);
        files.open(&new).unwrap();
        files.open(&path_of(&sealed)).unwrap();
        let error = files.begin().unwrap_err();
        assert!(matches!(error, ConsoleError::Empty { path, .. } if path == path_of(&sealed)));
        assert!(!new.exists());
        assert_eq!(fs::read_to_string(path_of(&sealed)).unwrap(), "earlier output");
    }

    #[test]
    fn new_file_with_an_unknown_path_is_removed() {
        // Folder whose path is longer than the kernel can report.
        let folder = tempfile::tempdir().unwrap();
        let mut deep = File::open(folder.path()).unwrap();
        for _ in 0..=libc::PATH_MAX / 200 {
            let below = path_of(&deep).join("x".repeat(200));
            fs::create_dir(&below).unwrap();
            deep = File::open(below).unwrap();
        }
        let new = path_of(&deep).join("new");
        let mut files = files(FileStart::Empty);
        files.open(&new).unwrap_err();
        assert!(new.exists(), "the file was not created");
        drop(files);
        assert!(!new.exists());
    }

    #[test]
    fn pool_is_neither_emptied_nor_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 16 << 20, 0).unwrap());
        let before = fs::read(&path).unwrap();
        let mut console = files(FileStart::Empty);
        let error = console.open(&path).unwrap_err().to_string();
        assert!(error.contains("holds a pool"), "{error}");
        drop(console);
        assert!(fs::read(&path).unwrap() == before);
        // A guest may write the bytes of a pool to its own serial port. Its next VMM still starts.
        let serial = folder.path().join("serial");
        drop(files(FileStart::Empty).open(&serial).unwrap());
        let mut console = files(FileStart::Empty);
        console.open(&serial).unwrap();
        console.begin().unwrap();
        fs::write(&serial, &before).unwrap();
        for start in [FileStart::Continue, FileStart::Empty] {
            let mut console = files(start);
            console.open(&serial).unwrap();
            console.begin().unwrap();
        }
        assert_eq!(fs::metadata(&serial).unwrap().len(), 0);
    }

    #[test]
    fn console_files_have_limits_over_reboots() {
        let (folder, path) = folder_with("console", "earlier output");
        for (start, turns) in [(FileStart::Empty, 1), (FileStart::Continue, 3)] {
            for _ in 0..turns {
                let mut files = files(start);
                let ports = [Port::Serial, Port::Console];
                let outputs = ports.map(|port| files.output(port, &path, LIMITED).unwrap());
                let metrics = files.metrics().collect::<Vec<_>>();
                files.begin().unwrap();
                for mut output in outputs {
                    (0..30).for_each(|_| assert_eq!(output.send(&[b'x'; 100]).len, 0));
                }
                let sizes = fs::read_dir(folder.path()).unwrap();
                let sum: u64 = sizes.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
                assert!(sum > 1000 && sum <= 2000, "{sum}");
                let rotations = metrics
                    .iter()
                    .map(|file| file.counters.rotations.load(Ordering::Relaxed))
                    .sum();
                assert!((5..=6_u64).contains(&rotations), "{rotations}");
            }
        }
    }

    #[test]
    fn reboot_does_not_refill_the_bucket_of_a_console() {
        let (_folder, path) = folder_with("console", "");
        let lines = Lines::default();
        // A rate that is too low to refill tokens during the test.
        let bytes_per_s = NonZeroU64::new(1).unwrap();
        let limits = FileLimits { max_bytes: None, bytes_per_s: Some(bytes_per_s) };
        for start in [FileStart::Empty, FileStart::Continue] {
            let mut files = ConsoleFiles::new(start, lines.clone());
            let mut output = files.output(Port::Serial, &path, limits).unwrap();
            files.begin().unwrap();
            assert_eq!(output.send(&[b'x'; 500_000]).len, 0);
        }
        assert_eq!(fs::metadata(&path).unwrap().len(), 1_000_000);
        let level = lines.rate_bucket(Port::Serial, bytes_per_s, Instant::now()).lock().level;
        assert!(level / NANOS_PER_S < u128::from(BURST_BYTES - 500_000), "{level}");
    }

    #[test]
    fn file_that_an_earlier_vmm_could_not_rename_is_continued_by_a_reboot() {
        let (folder, path) = folder_with("console", "");
        let newer = folder.path().join("console.new");
        drop(files(FileStart::Empty).open(&path).unwrap());
        for (start, text) in [(FileStart::Continue, "of the guest x"), (FileStart::Empty, "x")] {
            fs::rename(&path, &newer).unwrap();
            fs::write(&newer, "of the guest ").unwrap();
            let mut files = files(start);
            let mut output = files.output(Port::Serial, &path, LIMITED).unwrap();
            files.begin().unwrap();
            assert_eq!(output.send(b"x").len, 0);
            drop(output);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert!(!newer.exists());
        }
    }

    #[test]
    fn two_consoles_can_share_a_file() {
        let (_folder, path) = folder_with("console", "earlier output");
        let mut files = files(FileStart::Empty);
        let [mut one, mut two] = [(); 2].map(|()| files.open(&path).unwrap());
        files.begin().unwrap();
        one.write_all(b"one ").unwrap();
        two.write_all(b"two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one two");
    }
}
