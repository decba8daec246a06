//! Identity of files and devices, which may have several paths.

use std::fs::{self, File, Metadata};
use std::iter;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Identity of a file or device on this host, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileId {
    /// A file, identified by its file system and its inode. Hard links, symbolic links and bind
    /// mounts lead to the same inode.
    Inode {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block device, identified by its number. It may have several device nodes.
    Block(u64),
    /// A character device, for example a devdax device.
    Character(u64),
}

impl FileId {
    /// Identity of the object at `path`. `None` if the path does not exist.
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|metadata| Self::from(&metadata))
    }

    /// Identity of an open file.
    pub fn of_open(file: BorrowedFd<'_>) -> Option<Self> {
        let file = File::from(file.try_clone_to_owned().ok()?);
        file.metadata().ok().map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        let kind = metadata.file_type();
        if kind.is_block_device() {
            Self::Block(metadata.rdev())
        } else if kind.is_char_device() {
            Self::Character(metadata.rdev())
        } else {
            Self::Inode { device: metadata.dev(), inode: metadata.ino() }
        }
    }
}

/// Maximum number of symbolic links that the kernel follows (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Returns `path`. If it is a symbolic link, also returns the link's target, and so on.
pub fn links_of(path: &Path) -> impl Iterator<Item = PathBuf> {
    let next = |path: &PathBuf| Some(folder_of(path).join(fs::read_link(path).ok()?));
    iter::successors(Some(path.to_owned()), next).take(1 + MAX_LINKS)
}

/// Path of the file that opening `path` would create: `path`, or the target if it is a symbolic
/// link. `None` if there are too many links.
pub fn link_target(path: &Path) -> Option<PathBuf> {
    links_of(path).last().filter(|path| !path.is_symlink())
}

/// Folder that contains `path`. For a bare name, this is the working directory.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns true if both paths lead to the same object.
pub fn is_same(a: &Path, b: &Path) -> bool {
    a == b || FileId::of(a).is_some_and(|id| FileId::of(b) == Some(id))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_to_a_missing_file_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        symlink("below/second", path("first")).unwrap();
        fs::create_dir(path("below")).unwrap();
        symlink(path("missing"), path("below/second")).unwrap();
        for name in ["first", "below/second", "missing"] {
            assert_eq!(link_target(&path(name)), Some(path("missing")));
        }
        symlink("loop", path("loop")).unwrap();
        assert_eq!(link_target(&path("loop")), None);
        assert_eq!(folder_of(Path::new("name")), Path::new("."));
    }

    #[test]
    fn paths_of_one_object_are_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let [soft, hard, other, missing] =
            ["soft", "hard", "other", "missing"].map(|name| folder.path().join(name));
        File::create(&file).unwrap();
        File::create(&other).unwrap();
        symlink("file", &soft).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        let dotted = folder
            .path()
            .join(".")
            .join("..")
            .join(folder.path().file_name().unwrap())
            .join("file");
        for path in [&soft, &hard, &dotted, &file] {
            assert!(is_same(&file, path), "{}", path.display());
            assert_eq!(FileId::of_open(File::open(path).unwrap().as_fd()), FileId::of(&file));
        }
        for path in [&other, &missing] {
            assert!(!is_same(&file, path), "{}", path.display());
        }
        // Two different missing files are not the same object, but two equal paths are.
        assert!(!is_same(&missing, &folder.path().join("./missing2")));
        assert!(is_same(&missing, &missing));
        assert!(is_same(Path::new("/dev/null"), Path::new("/dev/../dev/null")));
        assert!(!is_same(Path::new("/dev/null"), Path::new("/dev/zero")));
    }
}
