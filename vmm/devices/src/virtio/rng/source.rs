//! Sources of entropy.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

/// Devices of the kernel's generator. The devices are replaced by getrandom(2), which needs no
/// file.
const KERNEL_DEVICES: [&str; 2] = ["/dev/urandom", "/dev/random"];

#[derive(Debug, Error)]
#[error("cannot open the entropy source {path:?}")]
pub struct SourceError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Entropy source: the kernel's generator or a file, for example the device of a hardware
/// generator.
#[derive(Debug)]
pub enum EntropySource {
    /// The kernel's generator, through getrandom(2).
    Kernel,
    /// A file that was opened for non-blocking reads.
    File(File),
}

impl EntropySource {
    /// Opens the source of `--rng src=`.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        if KERNEL_DEVICES.iter().any(|device| Path::new(device) == path) {
            return Ok(Self::Kernel);
        }
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        match file {
            Ok(file) => Ok(Self::File(file)),
            Err(source) => Err(SourceError { path: path.to_owned(), source }),
        }
    }

    /// Duplicates the handle on the source.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Kernel => Self::Kernel,
            Self::File(file) => Self::File(file.try_clone()?),
        })
    }

    /// Reads at least one byte. Fails with `WouldBlock` if no byte is available yet.
    pub(super) fn fill(&mut self, data: &mut [u8]) -> io::Result<usize> {
        let len = match self {
            Self::Kernel => getrandom(data, GetRandomFlags::empty())?,
            Self::File(file) => file.read(data)?,
        };
        if len == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_devices_use_getrandom() {
        for device in KERNEL_DEVICES {
            let mut source = EntropySource::open(Path::new(device)).unwrap();
            assert!(matches!(source, EntropySource::Kernel));
            let mut data = [0; 64];
            assert_eq!(source.fill(&mut data).unwrap(), 64);
            assert_ne!(data, [0; 64]);
        }
    }

    #[test]
    fn missing_source_is_named() {
        let error = EntropySource::open(Path::new("/nowhere/rng")).unwrap_err();
        assert_eq!(error.to_string(), r#"cannot open the entropy source "/nowhere/rng""#);
    }

    #[test]
    fn end_of_a_file_is_an_error() {
        let mut source = EntropySource::File(tempfile::tempfile().unwrap());
        assert_eq!(source.fill(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
