//! Check that free chunks read as zeros. The next owner of a chunk depends on it, and must not be
//! able to read data of an earlier owner.

use std::ops::Range;

use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::{ChunkId, Run};

/// Number of bytes per read.
const READ_BYTES: u64 = 256 << 10;

/// Finds data in free chunks.
pub(in crate::pool) struct ContentFinder {
    zeros: Vec<u8>,
    bytes: Vec<u8>,
}

impl ContentFinder {
    pub(in crate::pool) fn new() -> Self {
        let zeros = vec![0; READ_BYTES as usize];
        Self { bytes: zeros.clone(), zeros }
    }

    /// Reads a run of chunks, except for its holes. `found` receives each chunk that contains data,
    /// and `on_checked` the number of bytes examined so far.
    pub(in crate::pool) fn search(
        &mut self,
        media: &dyn Media,
        run: Run,
        on_checked: &mut dyn FnMut(u64),
        found: &mut dyn FnMut(ChunkId),
    ) -> Result<(), MediaError> {
        let Range { start, end } = run.byte_range();
        let mut at = start;
        while at < end {
            let Some(data) = media.next_data(at..end)? else { break };
            let chunk = ChunkId((data.start / CHUNK_BYTES) as u32);
            let chunk_end = chunk.offset_bytes() + CHUNK_BYTES;
            let piece_end = data.end.min(chunk_end).min(data.start + READ_BYTES);
            let length = (piece_end - data.start) as usize;
            media.read(data.start, &mut self.bytes[..length])?;
            let is_zero = self.bytes[..length] == self.zeros[..length];
            if !is_zero {
                found(chunk);
            }
            // A single nonzero byte is sufficient, so the rest of the chunk is skipped.
            at = if is_zero { piece_end } else { chunk_end };
            on_checked(at - start);
        }
        on_checked(end - start);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::MemoryMedia;
    use crate::media::simulator::Simulator;

    /// Searches all chunks except the first. Returns the chunks that contain data, and the reported
    /// numbers of examined bytes.
    fn found(media: &dyn Media) -> (Vec<u32>, Vec<u64>) {
        let run = Run { start: ChunkId(1), chunks: (media.len_bytes() / CHUNK_BYTES) as u32 - 1 };
        let (mut found, mut reported) = (vec![], vec![]);
        ContentFinder::new()
            .search(media, run, &mut |bytes| reported.push(bytes), &mut |chunk| found.push(chunk.0))
            .unwrap();
        (found, reported)
    }

    #[test]
    fn any_byte_of_a_chunk_is_found_and_each_chunk_once() {
        let media: [Box<dyn Media>; 2] = [
            Box::new(MemoryMedia::new(6 * CHUNK_BYTES)),
            Box::new(Simulator::new(6 * CHUNK_BYTES)),
        ];
        for media in media {
            assert_eq!(found(media.as_ref()).0, [0; 0]);
            let put = |at: u64| media.store_word(at, 1 << 56).unwrap();
            // Chunk 0 is not part of the run.
            let places = [
                0,
                CHUNK_BYTES,
                2 * CHUNK_BYTES - 8,
                4 * CHUNK_BYTES - 8,
                5 * CHUNK_BYTES + READ_BYTES,
            ];
            places.into_iter().for_each(put);
            let (chunks, reported) = found(media.as_ref());
            assert_eq!(chunks, [1, 3, 5]);
            assert!(
                reported.is_sorted() && reported.last() == Some(&(5 * CHUNK_BYTES)),
                "{reported:?}"
            );
        }
    }
}
