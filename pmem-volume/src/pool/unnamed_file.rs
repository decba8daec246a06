//! A file that gets its name when it is finished: a crash while it is being made leaves nothing behind.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::PoolError;

/// A file without its name.
pub(super) struct Unnamed {
    pub(super) file: File,
    /// Where the file system cannot make nameless files: a name to be changed, or removed on failure.
    temporary: Option<PathBuf>,
}

impl Unnamed {
    /// Makes a file in the folder in which `path` will be. There must be nothing at `path`.
    pub(super) fn in_folder_of(path: &Path) -> Result<Self, PoolError> {
        let file_error = |source| PoolError::File { path: path.to_owned(), action: "create", source };
        match path.symlink_metadata() {
            Ok(_) => return Err(PoolError::AlreadyExists { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(file_error(error)),
        }
        let folder = folder_of(path);
        if folder.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Err(PoolError::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
        }
        // A device whose name is wrong would become a file in the host's memory.
        if folder.canonicalize().is_ok_and(|folder| folder == Path::new("/dev")) {
            return Err(PoolError::NoDevice { path: path.to_owned() });
        }
        match options().custom_flags(libc::O_TMPFILE).open(folder) {
            Ok(file) => Ok(Self { file, temporary: None }),
            // What open(2) says of kernels and file systems that do not know O_TMPFILE.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) =>
            {
                Self::with_temporary_name(path).map_err(file_error)
            }
            Err(error) => Err(file_error(error)),
        }
    }

    fn with_temporary_name(path: &Path) -> io::Result<Self> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".new-{}", std::process::id()));
        let temporary = folder_of(path).join(name);
        let file = options().create_new(true).open(&temporary)?;
        Ok(Self { file, temporary: Some(temporary) })
    }

    /// Gives the file its name, which must not be taken, and makes the name durable.
    pub(super) fn name(mut self, path: &Path) -> Result<(), PoolError> {
        let named = match &self.temporary {
            Some(temporary) => rename_to_new(temporary, path),
            None => link(&self.file, path),
        };
        named.map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => PoolError::AlreadyExists { path: path.to_owned() },
            _ => PoolError::File { path: path.to_owned(), action: "name", source },
        })?;
        self.temporary = None;
        let synced = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
        synced.map_err(|source| {
            // A name that may not last is worse than none.
            let _ = fs::remove_file(path);
            PoolError::File { path: path.to_owned(), action: "persist the name of", source }
        })
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let _ = fs::remove_file(temporary);
        }
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Names a file that has none. By its descriptor, which before Linux 6.10 only a privileged process may do, or else
/// through /proc, which may not be mounted (open(2), O_TMPFILE).
fn link(file: &File, path: &Path) -> io::Result<()> {
    let target = c_path(path)?;
    let link_at = |folder, source: &CString, flags| {
        // SAFETY: both are C strings that outlive the call; the descriptor lives as long as `file`.
        match unsafe { libc::linkat(folder, source.as_ptr(), libc::AT_FDCWD, target.as_ptr(), flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let by_descriptor = link_at(file.as_raw_fd(), &CString::default(), libc::AT_EMPTY_PATH);
    match by_descriptor {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let source = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            link_at(libc::AT_FDCWD, &source, libc::AT_SYMLINK_FOLLOW)
        }
        result => result,
    }
}

/// Renames without taking anybody's place.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    let (source, target) = (c_path(from)?, c_path(to)?);
    let (here, flags) = (libc::AT_FDCWD, libc::RENAME_NOREPLACE);
    // SAFETY: both are C strings that outlive the call.
    match unsafe { libc::renameat2(here, source.as_ptr(), here, target.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    const KINDS: [fn(&Path) -> Unnamed; 2] =
        [|path| Unnamed::in_folder_of(path).unwrap(), |path| Unnamed::with_temporary_name(path).unwrap()];

    #[test]
    fn both_kinds_of_nameless_files_get_their_name_and_leave_nothing_else() {
        for folder in ["/dev/shm".into(), std::env::current_dir().unwrap()] {
            let folder = tempfile::TempDir::new_in(folder).unwrap();
            let path = folder.path().join("pool");
            for make in KINDS {
                let mut unnamed = make(&path);
                unnamed.file.write_all(b"done").unwrap();
                unnamed.name(&path).unwrap();
                assert_eq!(names_in(folder.path()), ["pool"]);
                assert_eq!(fs::read(&path).unwrap(), b"done");
                fs::remove_file(&path).unwrap();
                drop(make(&path));
                assert!(names_in(folder.path()).is_empty());
            }
        }
    }

    #[test]
    fn a_name_that_was_taken_meanwhile_is_not_taken_over() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        for make in KINDS {
            let unnamed = make(&path);
            fs::write(&path, b"somebody's").unwrap();
            assert!(matches!(unnamed.name(&path), Err(PoolError::AlreadyExists { .. })));
            assert_eq!(fs::read(&path).unwrap(), b"somebody's");
            assert_eq!(names_in(folder.path()), ["pool"]);
            fs::remove_file(&path).unwrap();
        }
    }
}
