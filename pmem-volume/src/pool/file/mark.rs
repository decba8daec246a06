//! Marks of files, which are extended attributes that the host sets. A guest can write to the
//! content of a file but not to its attributes. Therefore, the mark is evidence of how the host
//! uses the file, regardless of its content.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use thiserror::Error;

/// Name of the mark's attribute, and name of a test attribute. The test attribute reveals if a file
/// supports attributes.
struct Attribute {
    name: &'static CStr,
    probe: &'static CStr,
}

/// Regular files support user attributes. Device nodes, and files on tmpfs before Linux 6.6,
/// support only trusted attributes. These require CAP_SYS_ADMIN (xattr(7)), which the VMM drops.
const ATTRIBUTES: [Attribute; 2] = [
    Attribute { name: c"user.foreshore", probe: c"user.foreshore.probe" },
    Attribute { name: c"trusted.foreshore", probe: c"trusted.foreshore.probe" },
];

/// Reason why a file cannot be marked. A separate error type, because a mark is optional and its
/// failure is at most logged.
#[derive(Debug, Error)]
pub enum MarkError {
    /// The file system has no attributes that this user may set.
    #[error("the file system does not support extended attributes")]
    Unsupported,
    /// The file has a mark of another release, which is not replaced.
    #[error("the file has a mark of another release")]
    Unknown,
    /// The existing mark cannot be read, so it is not replaced.
    #[error("fgetxattr: {0}")]
    Read(io::Error),
    /// A system call failed.
    #[error("fsetxattr: {0}")]
    Io(io::Error),
}

/// Purpose for which the host uses a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// File of a pool.
    Pool,
    /// Output of a VMM or of its guest, for example of a serial port.
    Output,
    /// Memory of a guest, initially zeroed.
    Memory,
    /// Disk or pmem device of a guest.
    Disk,
    /// Purpose that this release does not know. This mark is never set, replaced or removed.
    Unknown,
}

impl Mark {
    const VALUES: [(Self, &'static [u8]); 4] = [
        (Self::Pool, b"pool"),
        (Self::Output, b"output"),
        (Self::Memory, b"memory"),
        (Self::Disk, b"disk"),
    ];

    /// Reads the mark of a file. Returns `None` if the file system does not support attributes.
    pub fn of(file: &File) -> io::Result<Option<Self>> {
        for attribute in &ATTRIBUTES {
            if let Some(mark) = Self::in_attribute(file, attribute.name)? {
                return Ok(Some(mark));
            }
        }
        Ok(None)
    }

    fn in_attribute(file: &File, name: &CStr) -> io::Result<Option<Self>> {
        let mut value = [0_u8; 8];
        let find_mark = |value| Self::VALUES.into_iter().find(|(_, known)| *known == value);
        match fgetxattr(file, name, &mut value) {
            Ok(len) => Ok(Some(find_mark(&value[..len]).map_or(Self::Unknown, |(mark, _)| mark))),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            // The value is longer than that of any known mark.
            Err(Errno::RANGE) => Ok(Some(Self::Unknown)),
            Err(error) => Err(error.into()),
        }
    }

    /// Marks a file. Replaces an existing mark unless that mark is unknown.
    pub fn set(self, file: &File) -> Result<(), MarkError> {
        let (_, value) =
            Self::VALUES.into_iter().find(|(mark, _)| *mark == self).expect("a known mark is set");
        match Self::of(file).map_err(MarkError::Read)? {
            Some(Self::Unknown) => return Err(MarkError::Unknown),
            Some(mark) if mark == self => return Ok(()),
            _ => {}
        }
        let [user, trusted] = &ATTRIBUTES;
        let Err(error) = store(file, user.name, value, XattrFlags::empty()) else { return Ok(()) };
        let is_unsupported = |error: &io::Error| error.raw_os_error() == Some(libc::EOPNOTSUPP);
        match store(file, trusted.name, value, XattrFlags::empty()) {
            Ok(()) => Ok(()),
            _ if !is_unsupported(&error) => Err(MarkError::Io(error)),
            // Only root can set trusted attributes.
            Err(error)
                if is_unsupported(&error) || error.kind() == io::ErrorKind::PermissionDenied =>
            {
                Err(MarkError::Unsupported)
            }
            Err(error) => Err(MarkError::Io(error)),
        }
    }

    /// Returns the name of the attribute that can mark this file, or `None` if the file cannot be
    /// marked. File systems and security modules may allow only reading of attributes. Therefore,
    /// the function sets a test attribute and removes it again. The test attribute has a separate
    /// name, because a crash in between would leave it behind.
    pub fn settable_attribute(file: &File) -> Option<&'static str> {
        let can_have = |probe: &CStr| match store(file, probe, b"", XattrFlags::CREATE) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => false,
            Ok(()) | Err(_) => {
                let _ = fremovexattr(file, probe);
                true
            }
        };
        let attribute = ATTRIBUTES.iter().find(|attribute| can_have(attribute.probe))?;
        attribute.name.to_str().ok()
    }
}

/// Gives a file a mark that only another release knows.
#[cfg(test)]
pub(in crate::pool) fn set_unknown(file: &File, value: &[u8]) {
    let name = Mark::settable_attribute(file).unwrap();
    let attribute =
        ATTRIBUTES.iter().find(|attribute| attribute.name.to_str() == Ok(name)).unwrap();
    store(file, attribute.name, value, XattrFlags::CREATE).unwrap();
}

fn store(file: &File, name: &CStr, value: &[u8], flags: XattrFlags) -> io::Result<()> {
    Ok(fsetxattr(file, name, value, flags)?)
}

#[cfg(test)]
mod tests {
    use rustix::fs::flistxattr;

    use super::*;

    #[test]
    fn mark_persists_outside_the_content() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Mark::of(file.as_file()).unwrap(), None);
        for (mark, _) in Mark::VALUES {
            mark.set(file.as_file()).unwrap();
            assert_eq!(Mark::of(&File::open(file.path()).unwrap()).unwrap(), Some(mark));
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 0);
        let copy = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(copy.path(), std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(Mark::of(copy.as_file()).unwrap(), None);
    }

    /// Returns the names of all attributes of a file.
    fn attributes(file: &File) -> String {
        let mut names = [0_u8; 1024];
        let len = flistxattr(file, &mut names).unwrap();
        String::from_utf8(names[..len].to_vec()).unwrap()
    }

    fn attribute_of(file: &File) -> &'static Attribute {
        let name = Mark::settable_attribute(file).unwrap();
        ATTRIBUTES.iter().find(|attribute| attribute.name.to_str() == Ok(name)).unwrap()
    }

    #[test]
    fn probe_is_not_a_mark_and_is_removed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let file = file.as_file();
        let attribute = attribute_of(file);
        assert!(!attributes(file).contains("foreshore"), "{}", attributes(file));
        // Simulates an attribute that a test left behind between its two calls.
        store(file, attribute.probe, b"", XattrFlags::empty()).unwrap();
        assert_eq!(Mark::of(file).unwrap(), None);
        assert_eq!(attribute_of(file).name, attribute.name);
        assert!(!attributes(file).contains("foreshore"), "{}", attributes(file));
        for (mark, _) in Mark::VALUES {
            mark.set(file).unwrap();
            Mark::settable_attribute(file).unwrap();
            assert_eq!(Mark::of(file).unwrap(), Some(mark), "the probe leaves a mark");
        }
    }

    #[test]
    fn mark_of_another_release_is_kept() {
        for value in [&b""[..], b"volume", b"eightlet", b"longer than any known mark"] {
            let file = tempfile::NamedTempFile::new().unwrap();
            let file = file.as_file();
            let name = attribute_of(file).name;
            set_unknown(file, value);
            assert_eq!(Mark::of(file).unwrap(), Some(Mark::Unknown));
            for (mark, _) in Mark::VALUES {
                assert!(matches!(mark.set(file), Err(MarkError::Unknown)));
            }
            Mark::settable_attribute(file).unwrap();
            let mut kept = [0_u8; 100];
            let len = fgetxattr(file, name, &mut kept).unwrap();
            assert_eq!(&kept[..len], value);
        }
    }

    #[test]
    fn file_system_without_attributes_has_no_marks() {
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!((Mark::of(&file).unwrap(), Mark::settable_attribute(&file)), (None, None));
        assert!(matches!(Mark::Disk.set(&file), Err(MarkError::Unsupported)));
    }

    #[test]
    fn failed_access_to_a_mark_is_an_error() {
        // The kernel refuses descriptors with O_PATH (EBADF).
        use std::os::unix::fs::OpenOptionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(file.path()).unwrap();
        assert_eq!(Mark::of(&file).unwrap_err().raw_os_error(), Some(libc::EBADF));
        let error = Mark::Disk.set(&file).unwrap_err();
        assert!(
            matches!(&error, MarkError::Read(source) if source.raw_os_error() == Some(libc::EBADF)),
            "{error}"
        );
        let error = store(&file, ATTRIBUTES[0].name, b"disk", XattrFlags::empty()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
