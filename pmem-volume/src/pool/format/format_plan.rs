//! Chunks that a thin volume needs for the metadata of its BTT.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;

use crate::CHUNK_BYTES;
use crate::btt::{self, Layout};
use crate::media::{Durability, Media, MediaError, is_zero};
use crate::pool::format::volume_record::VolumeRecord;

const NO_PANIC: &str = "no code panics while holding the lock";

/// Media that reads as zeros. It only records the chunks that stores would change.
pub(in crate::pool) struct StoredChunks {
    len_bytes: u64,
    indexes: Mutex<BTreeSet<u32>>,
}

/// Returns the indexes of the chunks to which `format` stores anything other than zeros, in a
/// volume of `len_bytes` that reads as zeros.
pub(in crate::pool) fn stored_indexes(
    len_bytes: u64,
    format: impl FnOnce(&StoredChunks) -> Result<(), MediaError>,
) -> Vec<u32> {
    let chunks = StoredChunks { len_bytes, indexes: Mutex::default() };
    format(&chunks).expect("this media cannot fail");
    chunks.indexes.into_inner().expect(NO_PANIC).into_iter().collect()
}

/// Returns the indexes of the chunks that contain the metadata of a new BTT in a volume. The size
/// must allow a BTT.
pub(in crate::pool) fn btt_indexes(record: &VolumeRecord) -> Vec<u32> {
    let size_bytes = record.size_bytes();
    let layout = Layout::new(size_bytes, btt::SECTOR_BYTES, record.uuid)
        .expect("the size was checked when the record was parsed");
    stored_indexes(size_bytes, |media| layout.format(media))
}

impl Media for StoredChunks {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), MediaError> {
        into.fill(0);
        Ok(())
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let mut at = offset_bytes;
        let mut rest = bytes;
        while !rest.is_empty() {
            let length = (CHUNK_BYTES - at % CHUNK_BYTES).min(rest.len() as u64);
            let (now, later) = rest.split_at(length as usize);
            if !is_zero(now) {
                self.indexes.lock().expect(NO_PANIC).insert((at / CHUNK_BYTES) as u32);
            }
            (at, rest) = (at + length, later);
        }
        Ok(())
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.store(offset_bytes, &word.to_le_bytes())
    }

    fn persist(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn store_across_chunks_needs_only_those_with_data() {
        let mut bytes = vec![0; 2 * CHUNK_BYTES as usize];
        *bytes.last_mut().unwrap() = 1;
        let indexes = stored_indexes(8 * CHUNK_BYTES, |media| {
            media.store(CHUNK_BYTES + 8, &bytes)?;
            media.store_word(5 * CHUNK_BYTES, 0)
        });
        assert_eq!(indexes, [3]);
    }

    #[test]
    fn new_btt_of_a_large_volume_needs_few_chunks() {
        let layout = Layout::new(1 << 40, btt::SECTOR_BYTES, Uuid::nil()).unwrap();
        let indexes = stored_indexes(1 << 40, |media| layout.format(media));
        // The first chunk, the end of the first arena and start of the second, and the end.
        assert!(indexes.len() <= 5 && indexes[0] == 0, "{indexes:?}");
        let last = ((1u64 << 40) / CHUNK_BYTES - 1) as u32;
        assert_eq!(indexes.last(), Some(&last));
    }
}
