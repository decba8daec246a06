//! Search for nonzero bytes.

use super::{Media, MediaError};
use crate::progress::{OnProgress, Progress, Task};

/// Number of bytes that are read at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Returns true if all bytes are zeros.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| *word == [0; 8]) && rest.iter().all(|byte| *byte == 0)
}

/// Returns true if any byte of the media is not zero. Holes are skipped.
pub fn holds_bytes(media: &impl Media, progress: OnProgress<'_>) -> Result<bool, MediaError> {
    let total_bytes = media.len_bytes();
    let mut piece = vec![0; PIECE_BYTES as usize];
    let mut at = 0;
    while at < total_bytes {
        progress(Progress { task: Task::Check, done_bytes: at, total_bytes });
        let Some(data) = media.next_data(at..total_bytes)? else { break };
        let bytes = &mut piece[..(data.end - data.start).min(PIECE_BYTES) as usize];
        media.read(data.start, bytes)?;
        if !is_zero(bytes) {
            return Ok(true);
        }
        at = data.start + bytes.len() as u64;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::MemoryMedia;
    use crate::progress::ignore_progress;

    #[test]
    fn zeros_of_any_length_are_zeros() {
        assert!(is_zero(&[0; 4099]) && is_zero(&[]));
        assert!(!is_zero(&[0, 0, 0, 0, 0, 0, 0, 0, 1]) && !is_zero(&[0, 1, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn a_single_byte_anywhere_is_found() {
        const SIZE: u64 = 5 << 19;
        assert!(!holds_bytes(&MemoryMedia::new(SIZE), &mut ignore_progress).unwrap());
        for at in [0, PIECE_BYTES - 1, PIECE_BYTES, SIZE - 1] {
            let media = MemoryMedia::new(SIZE);
            media.store(at, &[1]).unwrap();
            assert!(holds_bytes(&media, &mut ignore_progress).unwrap(), "byte {at}");
        }
    }
}
