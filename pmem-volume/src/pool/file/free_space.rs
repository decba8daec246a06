//! Room in the file system below a pool whose free chunks are holes.

use crate::btt::ARENA_MAX_BYTES;
use crate::media::Media;
use crate::pool::create::FileSystem;
use crate::pool::{Pool, PoolError, bytes};

/// Pages of the pool's tables that making a volume may store to for the first time.
const TABLES_BYTES: u64 = 128 << 10;

/// What formatting an arena of a BTT stores: two info blocks and the log of 256 lanes, in whole
/// pages.
const ARENA_FORMAT_BYTES: u64 = 32 << 10;

fn format_bytes(chunks: u32) -> u64 {
    bytes(chunks).div_ceil(ARENA_MAX_BYTES) * ARENA_FORMAT_BYTES
}

impl<M: Media> Pool<M> {
    /// Is there room for what making a volume of so many chunks stores? If not, a store would find
    /// no block, which the kernel answers with SIGBUS and not with a reason.
    pub(in crate::pool) fn check_format_room(&self, chunks: u32) -> Result<(), PoolError> {
        self.check_room(TABLES_BYTES + format_bytes(chunks))
    }

    /// The same for parts of so many chunks each.
    pub(in crate::pool) fn check_split_room(&self, parts: &[u32]) -> Result<(), PoolError> {
        let of_parts = parts.iter().map(|chunks| format_bytes(*chunks));
        self.check_room(TABLES_BYTES + of_parts.sum::<u64>())
    }

    fn check_room(&self, needed_bytes: u64) -> Result<(), PoolError> {
        let Some(media) = self.media().as_file() else { return Ok(()) };
        if !self.is_thin() {
            return Ok(());
        }
        let file_system = FileSystem::of(media.file()).map_err(|source| PoolError::File {
            path: self.path.clone(),
            action: "look at the file system of",
            source,
        })?;
        // A tmpfs without a limit shows no size.
        if file_system.total_bytes > 0 && file_system.free_bytes < needed_bytes {
            let free_bytes = file_system.free_bytes;
            return Err(PoolError::FileSystemFull {
                path: self.path.clone(),
                needed_bytes,
                free_bytes,
            });
        }
        Ok(())
    }
}
