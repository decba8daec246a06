//! Records that are stored in two copies: superblocks and volume records.
//!
//! An update writes and persists the first copy, then the second. After any crash, at least one
//! copy is whole, and the newer whole copy is used. Between updates, either copy may be damaged
//! without losing information.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::media::{Media, MediaError};
use crate::pool::format::layout::{
    SUPERBLOCK_MAGIC, SuperblockBytes, VOLUME_MAGIC, VolumeRecordBytes,
};

/// Record that contains a magic, a sequence number, and a CRC-32 in its last 8 bytes.
pub(crate) trait Mirrored:
    Clone + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned
{
    const MAGIC: [u8; 8];
    fn magic(&self) -> [u8; 8];
    fn sequence(&self) -> u64;
}

impl Mirrored for SuperblockBytes {
    const MAGIC: [u8; 8] = SUPERBLOCK_MAGIC;
    fn magic(&self) -> [u8; 8] {
        self.magic
    }
    fn sequence(&self) -> u64 {
        self.sequence.get()
    }
}

impl Mirrored for VolumeRecordBytes {
    const MAGIC: [u8; 8] = VOLUME_MAGIC;
    fn magic(&self) -> [u8; 8] {
        self.magic
    }
    fn sequence(&self) -> u64 {
        self.sequence.get()
    }
}

/// Result of the comparison of two copies.
#[derive(Clone, Debug)]
pub(crate) enum Copies<T> {
    /// Both copies are whole and equal.
    Agree(T),
    /// A crash happened between the two writes. `current` is used, and the other copy is older.
    Stale { current: T, stale: usize },
    /// One copy is damaged or partially written. `current` is the other one.
    Damaged { current: T, damaged: usize },
    /// Neither copy is trustworthy.
    Lost,
}

fn checksum<T: Mirrored>(record: &T) -> u64 {
    let bytes = record.as_bytes();
    u64::from(crc32fast::hash(&bytes[..bytes.len() - 8]))
}

/// Sets the checksum of a record. All other fields must already be set.
pub(crate) fn seal<T: Mirrored>(record: &mut T) {
    let checksum = checksum(record);
    let bytes = record.as_mut_bytes();
    let at = bytes.len() - 8;
    bytes[at..].copy_from_slice(&checksum.to_le_bytes());
}

/// Checks the magic and the checksum.
pub(crate) fn is_whole<T: Mirrored>(record: &T) -> bool {
    let bytes = record.as_bytes();
    record.magic() == T::MAGIC && bytes[bytes.len() - 8..] == checksum(record).to_le_bytes()
}

/// Selects the copy to use.
pub(crate) fn choose<T: Mirrored>(copies: [T; 2]) -> Copies<T> {
    let whole = [is_whole(&copies[0]), is_whole(&copies[1])];
    let [first, second] = copies;
    match whole {
        [true, true] if first.sequence() > second.sequence() => {
            Copies::Stale { current: first, stale: 1 }
        }
        [true, true] if first.sequence() < second.sequence() => {
            Copies::Stale { current: second, stale: 0 }
        }
        [true, true] if first.as_bytes() == second.as_bytes() => Copies::Agree(first),
        // Neither pool code nor a crash can produce different records with the same sequence
        // number.
        [true, true] => Copies::Lost,
        [true, false] => Copies::Damaged { current: first, damaged: 1 },
        [false, true] => Copies::Damaged { current: second, damaged: 0 },
        [false, false] => Copies::Lost,
    }
}

pub(crate) fn read<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
) -> Result<Copies<T>, MediaError> {
    read_copies(media, offsets).map(choose)
}

pub(crate) fn read_copies<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
) -> Result<[T; 2], MediaError> {
    let mut copies = [T::new_zeroed(), T::new_zeroed()];
    for (copy, offset) in copies.iter_mut().zip(offsets) {
        media.read(offset, copy.as_mut_bytes())?;
    }
    Ok(copies)
}

/// Maximum number of words in which two damaged copies may differ. Every combination of these words
/// is tried.
const MAX_DIFFERING_WORDS: usize = 12;

/// Combines two damaged copies into a whole record. Each word in which they differ is taken from
/// one of the copies. Returns `None` if no combination is whole, or if several are.
pub(crate) fn merge<T: Mirrored>(copies: &[T; 2]) -> Option<T> {
    let (first, _) = copies[0].as_bytes().as_chunks::<8>();
    let (second, _) = copies[1].as_bytes().as_chunks::<8>();
    let differing: Vec<usize> = (0..first.len()).filter(|at| first[*at] != second[*at]).collect();
    if differing.len() > MAX_DIFFERING_WORDS {
        return None;
    }
    let candidate = |choice: usize| {
        let mut merged = copies[0].clone();
        for (_, at) in differing.iter().enumerate().filter(|(bit, _)| choice >> bit & 1 == 1) {
            merged.as_mut_bytes()[at * 8..at * 8 + 8].copy_from_slice(&second[*at]);
        }
        is_whole(&merged).then_some(merged)
    };
    let mut whole = (0..1usize << differing.len()).filter_map(candidate);
    let merged = whole.next()?;
    whole.next().is_none().then_some(merged)
}

/// Writes both copies, one after the other. When the call returns, they are durable. The record
/// must be sealed.
///
/// 1. Write the first copy and persist it. From here on, the new record is used.
/// 2. Write the second copy and persist it. From here on, either copy may be damaged without losing
///    information.
pub(crate) fn write<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
    record: &T,
) -> Result<(), MediaError> {
    assert!(is_whole(record), "only sealed records are written");
    for offset in offsets {
        write_copy(media, offset, record)?;
    }
    Ok(())
}

/// Returns the offsets of both copies in the order in which they must be written if one of them may
/// be damaged. The copy in use is written last, when the other one is already whole.
pub(crate) fn copy_in_use_last<T: Mirrored>(
    media: &dyn Media,
    offsets: [u64; 2],
) -> Result<[u64; 2], MediaError> {
    let [first, second] = offsets;
    Ok(match read::<T>(media, offsets)? {
        Copies::Stale { stale: 1, .. } | Copies::Damaged { damaged: 1, .. } => [second, first],
        _ => offsets,
    })
}

/// Writes one copy. When the call returns, it is durable.
pub(crate) fn write_copy<T: Mirrored>(
    media: &dyn Media,
    offset: u64,
    record: &T,
) -> Result<(), MediaError> {
    media.store(offset, record.as_bytes())?;
    media.persist_range(offset..offset + size_of::<T>() as u64)
}

/// Returns the words in which a copy on the media differs from the record, as offsets and new
/// values.
pub(crate) fn changed_words<T: Mirrored>(
    media: &dyn Media,
    offset: u64,
    record: &T,
) -> Result<Vec<(u64, u64)>, MediaError> {
    assert!(is_whole(record), "only sealed records are written");
    let mut current = T::new_zeroed();
    media.read(offset, current.as_mut_bytes())?;
    let (old, _) = current.as_bytes().as_chunks::<8>();
    let (new, _) = record.as_bytes().as_chunks::<8>();
    let pairs = (offset..).step_by(8).zip(old.iter().zip(new));
    Ok(pairs
        .filter(|(_, (old, new))| old != new)
        .map(|(at, (_, new))| (at, u64::from_le_bytes(*new)))
        .collect())
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn record(sequence: u64, size_bytes: u64) -> VolumeRecordBytes {
        let mut record = VolumeRecordBytes::new_zeroed();
        record.magic = VOLUME_MAGIC;
        record.sequence.set(sequence);
        record.size_bytes.set(size_bytes);
        seal(&mut record);
        record
    }

    fn torn() -> VolumeRecordBytes {
        let mut torn = record(9, 9);
        torn.size_bytes.set(10);
        torn
    }

    #[test]
    fn copies_damaged_in_different_words_are_merged() {
        let good = record(3, 7);
        let mut copies = [good.clone(), good.clone()];
        copies[0].as_mut_bytes()[48] ^= 1;
        copies[0].as_mut_bytes()[100] ^= 1;
        copies[1].as_mut_bytes()[248] ^= 1;
        assert_eq!(merge(&copies).unwrap().as_bytes(), good.as_bytes());
        copies[1].as_mut_bytes()[101] ^= 1;
        assert!(merge(&copies).is_none(), "the same word in both");
        assert!(merge(&[record(1, 5), record(1, 6)]).is_none(), "two whole ones");
    }

    #[test]
    fn newer_whole_copy_counts() {
        assert!(
            matches!(choose([record(1, 5), record(1, 5)]), Copies::Agree(r) if r.size_bytes == 5)
        );
        assert!(matches!(choose([record(2, 6), record(1, 5)]),
            Copies::Stale { current, stale: 1 } if current.size_bytes == 6));
        assert!(matches!(choose([record(1, 5), record(2, 6)]),
            Copies::Stale { current, stale: 0 } if current.size_bytes == 6));
        assert!(matches!(choose([torn(), record(1, 5)]),
            Copies::Damaged { current, damaged: 0 } if current.size_bytes == 5));
        assert!(matches!(choose([record(1, 5), torn()]),
            Copies::Damaged { current, damaged: 1 } if current.size_bytes == 5));
        assert!(matches!(choose([torn(), torn()]), Copies::Lost));
        assert!(matches!(choose([record(1, 5), record(1, 6)]), Copies::Lost));
    }
}
