//! File that gets its name only when it is complete. A crash before that leaves no file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};
use rustix::io::Errno;
use thiserror::Error;
use uuid::Uuid;

/// File without a name.
#[derive(Debug)]
pub struct UnnamedFile {
    /// The file itself, open for reading and writing.
    pub file: File,
    /// Temporary name, used if the file system cannot create unnamed files. It is replaced by the
    /// final name, or removed on failure.
    temporary: Option<PathBuf>,
}

/// Action if a file with the name already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfExists {
    /// The existing file is kept, and naming fails.
    Fail,
    /// The new file atomically replaces it.
    Replace,
}

/// Failure to name a file. With [`IfExists::Fail`], the file no longer exists. With
/// [`IfExists::Replace`], it may already have its name, but the name may not be durable.
#[derive(Debug, Error)]
#[error("cannot {action} the file")]
pub struct NamingError {
    /// Failed action.
    pub action: &'static str,
    /// Cause.
    #[source]
    pub source: io::Error,
}

impl UnnamedFile {
    /// Creates a file in the folder of `path`, without following links. It has no name by which
    /// another process could open it. If the file system cannot create unnamed files, it has an
    /// unpredictable name instead.
    pub fn in_folder_of(path: &Path, mode: u32) -> io::Result<Self> {
        match options(mode).custom_flags(libc::O_TMPFILE).open(folder_of(path)) {
            Ok(file) => Ok(Self { file, temporary: None }),
            // Errors of kernels and file systems that do not support O_TMPFILE (open(2)).
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)
                ) =>
            {
                Self::with_temporary_name(path, mode)
            }
            Err(error) => Err(error),
        }
    }

    fn with_temporary_name(path: &Path, mode: u32) -> io::Result<Self> {
        let temporary = temporary_name(path);
        // O_EXCL does not follow a link at the end of the path (open(2)).
        let file = options(mode).create_new(true).open(&temporary)?;
        Ok(Self { file, temporary: Some(temporary) })
    }

    /// Gives the file its name, and makes the name durable. The caller must have made the content
    /// durable.
    pub fn name(mut self, path: &Path, if_exists: IfExists) -> Result<(), NamingError> {
        self.link_name(path, if_exists).map_err(|source| NamingError { action: "name", source })?;
        let synced = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
        synced.map_err(|source| {
            if if_exists == IfExists::Fail {
                // No name is better than a name that might not be durable.
                let _ = fs::remove_file(path);
            }
            NamingError { action: "persist the name of", source }
        })
    }

    fn link_name(&mut self, path: &Path, if_exists: IfExists) -> io::Result<()> {
        match (&self.temporary, if_exists) {
            (None, IfExists::Fail) => return link(&self.file, path),
            (Some(temporary), IfExists::Fail) => rename_no_replace(temporary, path)?,
            (Some(temporary), IfExists::Replace) => fs::rename(temporary, path)?,
            (None, IfExists::Replace) => {
                // No system call can link a file over an existing one.
                let temporary = temporary_name(path);
                link(&self.file, &temporary)?;
                self.temporary = Some(temporary.clone());
                fs::rename(temporary, path)?;
            }
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for UnnamedFile {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Returns an unpredictable name in the folder of `path`, so that no other process can create a
/// file with this name first.
fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", Uuid::new_v4().simple()));
    folder_of(path).join(name)
}

fn options(mode: u32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(mode);
    options
}

/// Returns the folder that contains `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives an unnamed file its name through its descriptor. Before Linux 6.10, only a privileged
/// process may do so. The alternative is through /proc, which may not be mounted (open(2),
/// O_TMPFILE).
fn link(file: &File, path: &Path) -> io::Result<()> {
    match linkat(file, "", CWD, path, AtFlags::EMPTY_PATH) {
        Err(Errno::NOENT) => {
            let source = format!("/proc/self/fd/{}", file.as_raw_fd());
            Ok(linkat(CWD, source, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
        }
        result => Ok(result?),
    }
}

/// Renames without replacing an existing file.
fn rename_no_replace(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    const KINDS: [fn(&Path) -> UnnamedFile; 2] = [
        |path| UnnamedFile::in_folder_of(path, 0o600).unwrap(),
        |path| UnnamedFile::with_temporary_name(path, 0o600).unwrap(),
    ];

    #[test]
    fn both_kinds_of_unnamed_files_get_their_name_and_leave_nothing_else() {
        for folder in ["/dev/shm".into(), std::env::current_dir().unwrap()] {
            let folder = tempfile::TempDir::new_in(folder).unwrap();
            let path = folder.path().join("pool");
            for make in KINDS {
                let mut unnamed = make(&path);
                unnamed.file.write_all(b"done").unwrap();
                unnamed.name(&path, IfExists::Fail).unwrap();
                assert_eq!(names_in(folder.path()), ["pool"]);
                assert_eq!(fs::read(&path).unwrap(), b"done");
                fs::remove_file(&path).unwrap();
                drop(make(&path));
                assert!(names_in(folder.path()).is_empty());
            }
        }
    }

    #[test]
    fn existing_file_is_not_replaced_by_default() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        for make in KINDS {
            let unnamed = make(&path);
            fs::write(&path, b"somebody's").unwrap();
            let error = unnamed.name(&path, IfExists::Fail).unwrap_err();
            assert_eq!(error.source.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&path).unwrap(), b"somebody's");
            assert_eq!(names_in(folder.path()), ["pool"]);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn existing_file_is_replaced_in_one_step_on_request() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("image");
        for make in KINDS {
            fs::write(&path, b"old").unwrap();
            let old = File::open(&path).unwrap();
            let mut unnamed = make(&path);
            unnamed.file.write_all(b"new").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"old");
            unnamed.name(&path, IfExists::Replace).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"new");
            assert_eq!(io::read_to_string(&old).unwrap(), "old", "the name refers to another file");
            assert_eq!(names_in(folder.path()), ["image"]);
            // A file that cannot be replaced is kept, and no temporary file remains.
            let unnamed = make(&path);
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            unnamed.name(&path, IfExists::Replace).unwrap_err();
            assert_eq!(names_in(folder.path()), ["image"]);
            fs::remove_dir(&path).unwrap();
        }
    }
}
