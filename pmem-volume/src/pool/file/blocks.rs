//! File system blocks of a pool file. All blocks are allocated unless the pool is thin, so that no
//! store fails because the file system is full.

use std::io;
use std::path::Path;

use super::free_space::FileSystem;
use crate::media::{FileMedia, Media, MissingBlocks, allocate_missing_blocks, copy_on_write};
use crate::pool::findings::Finding;
use crate::pool::{Pool, PoolError};

/// Finds missing blocks in the file of a pool. Opening the pool for writing allocates them, or
/// fails.
pub(in crate::pool) fn check_blocks(
    path: &Path,
    media: &FileMedia,
    writable: bool,
) -> Result<Vec<Finding>, PoolError> {
    let mut findings = Vec::new();
    if !media.requires_blocks() {
        return Ok(findings);
    }
    let failed =
        |source| PoolError::File { path: path.to_owned(), action: "inspect the blocks of", source };
    let (file, size_bytes) = (media.file(), media.len_bytes());
    let missing = MissingBlocks::of(file, size_bytes).map_err(failed)?;
    let file_system = copy_on_write(file).map_err(failed)?;
    if let Some(file_system) = file_system {
        findings.push(Finding::CopyOnWrite { file_system });
    }
    // On a copy-on-write file system, a file shares blocks with its snapshots. Allocating new
    // blocks would not change that.
    let missing =
        if file_system.is_some() { MissingBlocks { shared_bytes: 0, ..missing } } else { missing };
    if missing.is_empty() {
        return Ok(findings);
    }
    if writable {
        allocate_missing(path, media, missing)?;
    }
    let MissingBlocks { hole_bytes, shared_bytes } = missing;
    findings.push(Finding::BlocksLost { hole_bytes, shared_bytes });
    Ok(findings)
}

fn allocate_missing(
    path: &Path,
    media: &FileMedia,
    missing: MissingBlocks,
) -> Result<(), PoolError> {
    let (file, size_bytes) = (media.file(), media.len_bytes());
    let free_bytes = FileSystem::of(file).map_or(0, |file_system| file_system.free_bytes);
    let (path, missing_bytes) = (path.to_owned(), missing.bytes());
    let refused = |path, source| PoolError::BlocksLost {
        path,
        missing_bytes,
        size_bytes,
        free_bytes,
        source,
    };
    // Without enough free space, the attempt would fill the file system before it fails.
    if free_bytes < missing_bytes {
        return Err(refused(path, io::Error::from_raw_os_error(libc::ENOSPC)));
    }
    allocate_missing_blocks(file, size_bytes, missing).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
                PoolError::CannotAllocateBlocks { path, missing_bytes, size_bytes }
            }
            _ => refused(path, source),
        }
    })
}

impl Pool {
    /// Returns the name of the pool's file system if even a store to an allocated block can fail
    /// because the file system is full.
    pub fn copy_on_write(&self) -> Option<&'static str> {
        let media = self.media();
        if !media.requires_blocks() {
            return None;
        }
        copy_on_write(media.file()).ok().flatten()
    }
}
