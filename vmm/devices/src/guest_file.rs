//! Checks of files that a guest can write: disks and pmem devices. The VMM never gives a guest
//! write access to a pool.
//!
//! A guest can write the bytes of a pool to its disk, and this must not prevent a later start. The
//! VMM therefore marks files that guests write, and does not examine the bytes of a file that is
//! marked as a disk. A file that is marked for another use is served, with a warning if it contains
//! a pool. An unmarked file that contains a pool is a copy of a pool, or a copy of a disk to which
//! a guest has written a pool. Only the user of the host can distinguish the two.

use std::fs::File;
use std::path::{Path, PathBuf};

use pmem_volume::pool::mark::Mark;
use pmem_volume::pool::ownership::{PoolContent, pool_content};
use thiserror::Error;
use tracing::warn;

use crate::file_mark;

/// Reason to refuse a file that a guest would write.
#[derive(Debug, Error)]
pub enum GuestFileError {
    #[error(
        "{path:?} is marked as a pool; attach its volumes with --pm-volume pool={}",
        path.display()
    )]
    MarkedPool { path: PathBuf },
    /// A file without a mark that contains a pool, for example a copy of a pool's file.
    #[error(
        "{path:?} holds a pool and is not marked as a disk; attach its volumes with \
         --pm-volume pool={}; if a guest wrote the pool to this disk, allow it with \
         `setfattr -n {attribute} -v disk {path:?}` or image_type=raw of --disk",
        path.display()
    )]
    UnmarkedPool {
        path: PathBuf,
        /// Name of the extended attribute for the mark.
        attribute: &'static str,
    },
}

/// Access to a file by a guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestAccess {
    /// Set if the guest's writes go to the file.
    pub is_writable: bool,
    /// Set if the user has declared the file as a raw image.
    pub is_declared_raw: bool,
}

/// Decision on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Serve,
    /// The file contains a pool. Serve its bytes, with a warning.
    ServePool,
    RefuseMarked,
    /// The file contains a pool and has no mark. It is served nevertheless if it cannot be marked.
    RefuseUnmarked,
}

/// Decides on a file by its mark. Also considers its `content`, unless the file is marked as a disk
/// or declared as a raw image. A missing mark is a reason for refusal only for regular files,
/// because marks on other files do not last. For example, the host recreates device nodes at each
/// boot.
fn decide(
    mark: Option<Mark>,
    is_file: bool,
    access: GuestAccess,
    content: impl FnOnce() -> PoolContent,
) -> Decision {
    let is_marked_pool = mark == Some(Mark::Pool) && access.is_writable;
    if mark == Some(Mark::Disk) || (access.is_declared_raw && !is_marked_pool) {
        return Decision::Serve;
    }
    match content() {
        PoolContent::NoPool => Decision::Serve,
        // The file may still contain the pool, and the guest would destroy it.
        _ if is_marked_pool => Decision::RefuseMarked,
        PoolContent::Unreadable => Decision::Serve,
        PoolContent::Pool if mark.is_none() && is_file && access.is_writable => {
            Decision::RefuseUnmarked
        }
        PoolContent::Pool => Decision::ServePool,
    }
}

/// Checks that `file`, which was opened from `path`, may be attached to a guest. If a file cannot
/// be marked, it is not refused for having no mark.
pub(crate) fn check(file: &File, path: &Path, access: GuestAccess) -> Result<(), GuestFileError> {
    // If the mark cannot be read, a file that contains a pool is refused as if it had no mark.
    let mark = Mark::of(file).unwrap_or(None);
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    match decide(mark, is_file, access, || pool_content(file, path)) {
        Decision::Serve => return Ok(()),
        Decision::ServePool => {}
        Decision::RefuseMarked => return Err(GuestFileError::MarkedPool { path: path.to_owned() }),
        Decision::RefuseUnmarked => {
            if let Some(attribute) = Mark::settable_attribute(file) {
                return Err(GuestFileError::UnmarkedPool { path: path.to_owned(), attribute });
            }
        }
    }
    warn!(
        ?path,
        "File holds a pool and is served as raw bytes; attach its volumes with --pm-volume"
    );
    Ok(())
}

/// Returns true if the file was attached as a disk before. A guest may have written any bytes to
/// such a file.
pub(crate) fn is_marked(file: &File) -> bool {
    matches!(Mark::of(file), Ok(Some(Mark::Disk)))
}

/// Marks a file that a guest is about to write.
pub(crate) fn mark(file: &File, path: &Path) {
    file_mark::set(Mark::Disk, file, path);
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::OpenOptionsExt;

    use pmem_volume::{OpenMode, Pool};

    use super::*;

    const WRITABLE: GuestAccess = GuestAccess { is_writable: true, is_declared_raw: false };
    const READABLE: GuestAccess = GuestAccess { is_writable: false, ..WRITABLE };
    const RAW: GuestAccess = GuestAccess { is_declared_raw: true, ..WRITABLE };

    /// Creates a pool, and a copy of it without the mark.
    fn pool_and_copy(folder: &Path) -> [PathBuf; 2] {
        let [pool, copy] = ["pool", "copy"].map(|name| folder.join(name));
        drop(Pool::create(&pool, 16 << 20, 0).unwrap());
        fs::copy(&pool, &copy).unwrap();
        [pool, copy]
    }

    fn check_path(path: &Path, access: GuestAccess) -> Result<(), String> {
        check(&File::open(path).unwrap(), path, access).map_err(|error| error.to_string())
    }

    const MARKS: [Option<Mark>; 6] = [
        None,
        Some(Mark::Disk),
        Some(Mark::Pool),
        Some(Mark::Output),
        Some(Mark::Memory),
        Some(Mark::Unknown),
    ];
    const CONTENTS: [PoolContent; 3] =
        [PoolContent::NoPool, PoolContent::Pool, PoolContent::Unreadable];

    /// Input of a decision in a test.
    #[derive(Clone, Copy, Debug)]
    struct Case {
        mark: Option<Mark>,
        is_file: bool,
        access: GuestAccess,
        content: PoolContent,
    }

    impl Case {
        fn decide(self) -> Decision {
            decide(self.mark, self.is_file, self.access, || self.content)
        }
    }

    /// Checks the decisions for every mark and content. The columns of the table correspond to
    /// [`CONTENTS`].
    fn check_decisions(decide: fn(Case) -> Decision) -> Result<(), String> {
        use Decision::{RefuseMarked, RefuseUnmarked, Serve, ServePool};
        let expected = |mark, is_file, access: GuestAccess| match (mark, access.is_writable) {
            (Some(Mark::Pool), true) => [Serve, RefuseMarked, RefuseMarked],
            _ if access.is_declared_raw => [Serve; 3],
            (Some(Mark::Disk), _) => [Serve; 3],
            (None, true) if is_file => [Serve, RefuseUnmarked, Serve],
            _ => [Serve, ServePool, Serve],
        };
        let readable_raw = GuestAccess { is_declared_raw: true, ..READABLE };
        for mark in MARKS {
            for (is_file, access) in [true, false].into_iter().flat_map(|is_file| {
                [WRITABLE, READABLE, RAW, readable_raw].map(|access| (is_file, access))
            }) {
                let decisions =
                    CONTENTS.map(|content| decide(Case { mark, is_file, access, content }));
                if decisions != expected(mark, is_file, access) {
                    return Err(format!("{mark:?}, {is_file}, {access:?}: {decisions:?}"));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn decision_follows_the_mark_and_then_the_content() {
        check_decisions(Case::decide).unwrap();
        type Broken = fn(Case) -> Decision;
        let broken: [(&str, Broken); 9] = [
            ("marks are ignored", |case| Case { mark: None, ..case }.decide()),
            ("a missing mark counts as a pool's", |case| {
                Case { mark: case.mark.or(Some(Mark::Pool)), ..case }.decide()
            }),
            ("a missing mark counts as a disk's", |case| {
                Case { mark: case.mark.or(Some(Mark::Disk)), ..case }.decide()
            }),
            ("the guest's bytes decide instead of the mark", |case| match case.content {
                PoolContent::Pool => Case { mark: Some(Mark::Pool), ..case }.decide(),
                _ => case.decide(),
            }),
            ("a mark of another release is ignored", |case| {
                Case { mark: case.mark.filter(|mark| *mark != Mark::Unknown), ..case }.decide()
            }),
            ("a removed device counts as one without a pool", |case| match case.content {
                PoolContent::Unreadable => Case { content: PoolContent::NoPool, ..case }.decide(),
                _ => case.decide(),
            }),
            ("unreadable bytes count as a pool", |case| match case.content {
                PoolContent::Unreadable => Case { content: PoolContent::Pool, ..case }.decide(),
                _ => case.decide(),
            }),
            ("a declaration overrides the mark of a pool", |case| {
                Case { mark: case.mark.filter(|_| !case.access.is_declared_raw), ..case }.decide()
            }),
            ("a device needs a mark", |case| Case { is_file: true, ..case }.decide()),
        ];
        for (name, decide) in broken {
            assert!(check_decisions(decide).is_err(), "{name}");
        }
    }

    #[test]
    fn content_of_a_disk_is_not_examined() {
        for (mark, access) in
            [(Some(Mark::Disk), WRITABLE), (Some(Mark::Disk), READABLE), (None, RAW)]
        {
            let decision = decide(mark, true, access, || panic!("the content was examined"));
            assert_eq!(decision, Decision::Serve);
        }
    }

    #[test]
    fn pool_is_not_writable_until_the_user_declares_a_disk() {
        let folder = tempfile::tempdir().unwrap();
        let [pool, copy] = pool_and_copy(folder.path());
        for access in [WRITABLE, RAW] {
            assert!(check_path(&pool, access).unwrap_err().contains("is marked as a pool"));
        }
        // The check does not mark the file, so the second attempt fails as well.
        for _ in 0..2 {
            let error = check_path(&copy, WRITABLE).unwrap_err();
            assert!(error.contains("setfattr -n user.foreshore -v disk \"/"), "{error}");
        }
        for path in [&pool, &copy] {
            check_path(path, READABLE).unwrap();
        }
        check_path(&copy, RAW).unwrap();
        mark(&File::open(&copy).unwrap(), &copy);
        check_path(&copy, WRITABLE).unwrap();
    }

    #[test]
    fn disk_with_a_pool_written_by_the_guest_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let [_, copy] = pool_and_copy(folder.path());
        let bytes = fs::read(&copy).unwrap();
        // Tests a file that was a pool until the user emptied it, and files that were marked for
        // other uses.
        for before in [None, Some(Mark::Pool), Some(Mark::Output), Some(Mark::Memory)] {
            let disk = folder.path().join("disk");
            let file = File::create(&disk).unwrap();
            before.map_or(Ok(()), |before| before.set(&file)).unwrap();
            check_path(&disk, WRITABLE).unwrap();
            mark(&file, &disk);
            fs::write(&disk, &bytes).unwrap();
            check_path(&disk, WRITABLE).unwrap();
            // Opening the file as a pool on the host marks it as a pool again.
            drop(Pool::open(&disk, OpenMode::ReadWrite).unwrap());
            check_path(&disk, WRITABLE).unwrap_err();
            fs::remove_file(&disk).unwrap();
        }
    }

    #[test]
    fn pool_copied_onto_a_disk_is_a_pool_once_it_is_removed_first_or_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [pool, _] = pool_and_copy(folder.path());
        for is_removed in [true, false] {
            let disk = folder.path().join("disk");
            mark(&File::create(&disk).unwrap(), &disk);
            if is_removed {
                fs::remove_file(&disk).unwrap();
            }
            // Writing to an existing file keeps its mark. A new file has no mark.
            fs::write(&disk, fs::read(&pool).unwrap()).unwrap();
            assert_eq!(check_path(&disk, WRITABLE).is_err(), is_removed);
            drop(Pool::open(&disk, OpenMode::ReadWrite).unwrap());
            check_path(&disk, RAW).unwrap_err();
        }
    }

    #[test]
    fn file_with_a_mark_of_another_release_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let [_, copy] = pool_and_copy(folder.path());
        let file = File::open(&copy).unwrap();
        let name = Mark::settable_attribute(&file).unwrap();
        rustix::fs::fsetxattr(&file, name, b"new", rustix::fs::XattrFlags::CREATE).unwrap();
        check_path(&copy, WRITABLE).unwrap();
        mark(&file, &copy);
        assert_eq!(Mark::of(&file).unwrap(), Some(Mark::Unknown));
    }

    #[test]
    fn file_that_cannot_be_marked_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let [_, copy] = pool_and_copy(folder.path());
        // An O_PATH descriptor gives no access to extended attributes, as if the file system did
        // not support them.
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(&copy).unwrap();
        mark(&file, &copy);
        check(&file, &copy, WRITABLE).unwrap();
        assert_eq!(Mark::of(&File::open(&copy).unwrap()).unwrap(), None);
    }
}
