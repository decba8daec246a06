//! Marks that the host puts on files as an extended attribute. A guest writes the bytes of a file and never its attributes, so
//! a mark shows what the host uses a file for whatever the guest has written to it.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Regular files have user attributes. Nodes of devices and files on tmpfs before Linux 6.6 have only trusted ones, which need
/// CAP_SYS_ADMIN (xattr(7)).
const NAMES: [&CStr; 2] = [c"user.foreshore", c"trusted.foreshore"];

/// Use of a file by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A pool.
    Pool,
    /// Output of a VMM or of its guest, such as a serial port's.
    Output,
    /// Memory of a guest, which begins as zeros.
    Memory,
    /// A disk or a pmem device of a guest.
    Disk,
}

impl Mark {
    const ALL: [Self; 4] = [Self::Pool, Self::Output, Self::Memory, Self::Disk];

    const fn value(self) -> &'static [u8] {
        match self {
            Self::Pool => b"pool",
            Self::Output => b"output",
            Self::Memory => b"memory",
            Self::Disk => b"disk",
        }
    }

    /// Reads the mark of a file. A file system without attributes has none.
    pub fn of(file: &File) -> Option<Self> {
        NAMES.iter().find_map(|name| {
            let mut value = [0_u8; 8];
            // SAFETY: the name is a C string; the kernel stores at most as many bytes as `value` has, which outlives the call.
            let len = unsafe {
                libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
            };
            let value = value.get(..usize::try_from(len).ok()?)?;
            Self::ALL.into_iter().find(|mark| mark.value() == value)
        })
    }

    /// Marks a file and replaces its earlier mark.
    pub fn set(self, file: &File) -> io::Result<()> {
        if Self::of(file) == Some(self) {
            return Ok(());
        }
        self.store(file).map(drop)
    }

    /// Returns the name of the attribute that marks this file, which has no mark; `None` if it
    /// cannot be marked. File systems and security modules may allow reading of attributes alone,
    /// so a mark is set and removed again.
    pub fn settable_attribute(file: &File) -> Option<&'static str> {
        let name = Self::Disk.store(file).ok()?;
        // SAFETY: the name is a C string, which outlives the call.
        let failed = unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) };
        if failed == 0 { name.to_str().ok() } else { None }
    }

    /// Sets the first attribute that the file can have. Returns its name.
    fn store(self, file: &File) -> io::Result<&'static CStr> {
        let value = self.value();
        let mut result = Err(io::ErrorKind::Unsupported.into());
        for name in NAMES {
            // SAFETY: the name is a C string, and the kernel reads as many bytes as `value` has. Both outlive the call.
            let failed = unsafe {
                libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
            };
            result = if failed == 0 { return Ok(name) } else { Err(io::Error::last_os_error()) };
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_lasts_and_is_not_part_of_the_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Mark::of(file.as_file()), None);
        for mark in Mark::ALL {
            mark.set(file.as_file()).unwrap();
            assert_eq!(Mark::of(&File::open(file.path()).unwrap()), Some(mark));
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 0);
        let copy = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(copy.path(), std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(Mark::of(copy.as_file()), None);
        let attribute = Mark::settable_attribute(copy.as_file()).unwrap();
        assert!(NAMES.iter().any(|name| name.to_str() == Ok(attribute)));
        assert_eq!(Mark::of(copy.as_file()), None, "the mark is removed again");
    }

    #[test]
    fn file_system_without_attributes_has_no_marks() {
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!((Mark::of(&file), Mark::settable_attribute(&file)), (None, None));
        Mark::Disk.set(&file).unwrap_err();
    }
}
