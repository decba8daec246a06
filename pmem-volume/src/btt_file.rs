//! BTT in a separate file or device without a pool, like a namespace of Linux.

use std::fs::OpenOptions;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::media::{FileMedia, Media, MediaError, MediaKind};
use crate::pool::layout::SUPERBLOCK_MAGIC;
use crate::pool::{Holder, LockKind, try_lock};

/// Reason why a file cannot be used as a BTT. A separate error type, because no pool is involved.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum BttFileError {
    #[error("cannot {action} {path}")]
    File {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{path}: {reason}")]
    Unsuitable { path: PathBuf, reason: String },
    #[error("{path} is a pool, and only its volumes have BTTs")]
    Pool { path: PathBuf },
    #[error("{path} is in use by {holder}")]
    InUse { path: PathBuf, holder: Holder },
    #[error("{path} is empty")]
    Empty { path: PathBuf },
    #[error("the media of {path} failed")]
    Media {
        path: PathBuf,
        #[source]
        source: MediaError,
    },
}

/// File that contains a BTT, starting at its first byte. While it is open, it has either many
/// readers or one writer.
pub struct BttFile {
    media: FileMedia,
}

impl BttFile {
    /// Opens a file or device.
    pub fn open(path: &Path, writable: bool) -> Result<Self, BttFileError> {
        let failed =
            |action| move |source| BttFileError::File { path: path.to_owned(), action, source };
        let kind = std::fs::metadata(path).map_err(failed("open"))?.file_type();
        // Prevents hanging on a pipe, and writing to a mounted device.
        let exclusive = if writable && kind.is_block_device() { libc::O_EXCL } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(writable).custom_flags(libc::O_NONBLOCK | exclusive);
        let file = options.open(path).map_err(failed("open"))?;
        let media_kind = MediaKind::of(&file).map_err(|error| BttFileError::Unsuitable {
            path: path.to_owned(),
            reason: foreshore_types::chain(&error),
        })?;
        let lock = if writable { LockKind::Exclusive } else { LockKind::Shared };
        try_lock(&file, lock)
            .map_err(failed("lock"))?
            .map_err(|holder| BttFileError::InUse { path: path.to_owned(), holder })?;
        let len_bytes = media_kind.len_bytes(&file).map_err(failed("find the length of"))? / 8 * 8;
        if len_bytes == 0 {
            return Err(BttFileError::Empty { path: path.to_owned() });
        }
        let media_failed = |source| BttFileError::Media { path: path.to_owned(), source };
        let media = FileMedia::new(file, len_bytes, writable).map_err(media_failed)?;
        let mut magic = [0; SUPERBLOCK_MAGIC.len()];
        Media::read(&media, 0, &mut magic).map_err(media_failed)?;
        if magic == SUPERBLOCK_MAGIC {
            return Err(BttFileError::Pool { path: path.to_owned() });
        }
        Ok(Self { media })
    }
}

impl Deref for BttFile {
    type Target = FileMedia;

    fn deref(&self) -> &FileMedia {
        &self.media
    }
}
