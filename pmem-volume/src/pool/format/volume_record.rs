//! Verified volume records, and rules for volume names.

use foreshore_types::VolumeFormat;
use thiserror::Error;
use uuid::Uuid;
use zerocopy::FromZeros;

use super::layout::{
    MAX_CHUNKS, MAX_NAME_BYTES, VOLUME_EMPTY, VOLUME_FLAG_PART, VOLUME_FLAG_THIN,
    VOLUME_FLAG_UNFORMATTED, VOLUME_FORMAT_BTT, VOLUME_FORMAT_RAW, VOLUME_LIVE, VOLUME_MAGIC,
    VolumeRecordBytes,
};
use super::table::Slot;
use crate::CHUNK_BYTES;
use crate::btt::MIN_VOLUME_BYTES;
use crate::pool::format::mirrored;

/// Name of a volume. The name has 1 to 64 bytes, and needs no quoting in a flag or a shell.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeName(String);

/// Reason why a volume name is invalid. A separate error type, because configurations are parsed
/// before a pool is open.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum NameError {
    #[error("a volume name must not be empty")]
    Empty,
    #[error("volume name {name:?} has {length_bytes} bytes; the maximum is {MAX_NAME_BYTES}")]
    TooLong { name: String, length_bytes: usize },
    /// The name contains a character that flags, shells or paths treat specially.
    #[error("volume name {name:?} contains {character:?}; use letters, digits and . _ -")]
    Character { name: String, character: char },
    /// The name looks like a flag or a hidden file.
    #[error(
        "volume name {name:?} must not start with {character:?}; start with a letter, a digit or _"
    )]
    Start { name: String, character: char },
    #[error("the stored volume name is not UTF-8, or has bytes after its end")]
    NotText,
}

impl VolumeName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for VolumeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for VolumeName {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(NameError::TooLong { name: name.to_owned(), length_bytes: name.len() });
        }
        let is_wrong = |(at, c): &(usize, char)| {
            !(c.is_alphanumeric() || *c == '_' || (*at > 0 && (*c == '.' || *c == '-')))
        };
        match name.char_indices().find(is_wrong) {
            Some((0, character @ ('.' | '-'))) => {
                Err(NameError::Start { name: name.to_owned(), character })
            }
            Some((_, character)) => Err(NameError::Character { name: name.to_owned(), character }),
            None => Ok(Self(name.to_owned())),
        }
    }
}

/// Invalid field in a volume record whose checksum is correct.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum VolumeRecordError {
    #[error("its slot number is {0}")]
    Slot(u32),
    #[error("its state is empty, but it describes a volume")]
    NotEmpty,
    #[error("state {0} is unknown")]
    State(u8),
    #[error("format {0} is unknown")]
    Format(u8),
    #[error("flags {0:#x} are unknown")]
    Flags(u64),
    #[error("size {0:#x} is not a multiple of 2 MiB between 2 MiB and 512 TiB")]
    Size(u64),
    #[error("its origin, chunk {index} of slot {slot}, is invalid")]
    Origin { slot: u32, index: u32 },
    #[error("it is not part of another volume, but its origin is chunk {index} of slot {slot}")]
    NoPart { slot: u32, index: u32 },
    #[error("its BTT is marked as unwritten, but its format or size allows none")]
    NoBtt,
    #[error(
        "{0:#x} bytes are not guaranteed, but only thin volumes allow this, in multiples of 2 MiB up to their size"
    )]
    Unreserved(u64),
    /// The name in the record is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
}

/// Record of an existing volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeRecord {
    pub(crate) sequence: u64,
    pub(crate) slot: Slot,
    pub(crate) name: VolumeName,
    pub(crate) uuid: Uuid,
    pub(crate) format: VolumeFormat,
    pub(crate) thin: bool,
    /// Set for a part of a split volume until the split is finished.
    pub(crate) part: Option<Part>,
    pub(crate) chunks: u32,
    /// Guaranteed chunks. Equal to `chunks` unless the volume is thin.
    pub(crate) reserve_chunks: u32,
    pub(crate) created_unix_s: u64,
}

/// Remaining work for a part of a split volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Slot of the split volume. Chunks past the end of its first part belong to other parts.
    pub(crate) origin: Slot,
    /// Index of the part's first chunk in the split volume.
    pub(crate) index: u32,
    /// The BTT of the part is not written yet.
    pub(crate) is_unformatted: bool,
}

/// Returns the record of an empty slot, with its checksum.
pub(crate) fn empty_record(slot: Slot, sequence: u64) -> VolumeRecordBytes {
    let mut bytes = VolumeRecordBytes::new_zeroed();
    bytes.magic = VOLUME_MAGIC;
    bytes.sequence.set(sequence);
    bytes.slot.set(u32::from(slot.0));
    bytes.state = VOLUME_EMPTY;
    mirrored::seal(&mut bytes);
    bytes
}

impl VolumeRecord {
    pub(crate) fn size_bytes(&self) -> u64 {
        u64::from(self.chunks) * CHUNK_BYTES
    }

    pub(crate) fn reserve_bytes(&self) -> u64 {
        u64::from(self.reserve_chunks) * CHUNK_BYTES
    }

    /// Returns the record with another size. If all of the volume was guaranteed, this stays so.
    pub(crate) fn resized(&self, sequence: u64, chunks: u32) -> Self {
        let is_whole = self.reserve_chunks == self.chunks;
        let reserve_chunks = if is_whole { chunks } else { self.reserve_chunks.min(chunks) };
        Self { sequence, chunks, reserve_chunks, ..self.clone() }
    }

    /// Returns the record in the media format, with its checksum.
    pub(crate) fn to_bytes(&self) -> VolumeRecordBytes {
        let mut bytes = empty_record(self.slot, self.sequence);
        bytes.state = VOLUME_LIVE;
        bytes.format = match self.format {
            VolumeFormat::Btt => VOLUME_FORMAT_BTT,
            VolumeFormat::Raw => VOLUME_FORMAT_RAW,
        };
        let mut flags = if self.thin { VOLUME_FLAG_THIN } else { 0 };
        if let Some(part) = self.part {
            flags |=
                VOLUME_FLAG_PART | if part.is_unformatted { VOLUME_FLAG_UNFORMATTED } else { 0 };
            bytes.origin_slot.set(u32::from(part.origin.0));
            bytes.origin_index.set(part.index);
        }
        bytes.flags.set(flags);
        bytes.uuid = self.uuid.into_bytes();
        bytes.size_bytes.set(self.size_bytes());
        bytes.unreserved_bytes.set(self.size_bytes() - self.reserve_bytes());
        bytes.created_unix_s.set(self.created_unix_s);
        let name = self.name.as_str().as_bytes();
        bytes.name_bytes = name.len() as u8;
        bytes.name[..name.len()].copy_from_slice(name);
        mirrored::seal(&mut bytes);
        bytes
    }

    /// Verifies a record whose checksum is correct. Returns `None` for an empty slot.
    pub(crate) fn parse(
        slot: Slot,
        bytes: &VolumeRecordBytes,
    ) -> Result<Option<Self>, VolumeRecordError> {
        if bytes.slot != u32::from(slot.0) {
            return Err(VolumeRecordError::Slot(bytes.slot.get()));
        }
        match bytes.state {
            // If a volume's record were wrongly marked as empty, its chunks would be erased.
            VOLUME_EMPTY if describes_a_volume(bytes) => return Err(VolumeRecordError::NotEmpty),
            VOLUME_EMPTY => return Ok(None),
            VOLUME_LIVE => {}
            other => return Err(VolumeRecordError::State(other)),
        }
        let format = match bytes.format {
            VOLUME_FORMAT_BTT => VolumeFormat::Btt,
            VOLUME_FORMAT_RAW => VolumeFormat::Raw,
            other => return Err(VolumeRecordError::Format(other)),
        };
        let flags = bytes.flags.get();
        let part = match flags & !VOLUME_FLAG_THIN {
            0 => no_part(bytes)?,
            of_part @ (VOLUME_FLAG_PART | FLAGS_UNFORMATTED) => {
                Some(parse_part(slot, bytes, of_part == FLAGS_UNFORMATTED)?)
            }
            _ => return Err(VolumeRecordError::Flags(flags)),
        };
        let size = bytes.size_bytes.get();
        let chunks = size / CHUNK_BYTES;
        if !size.is_multiple_of(CHUNK_BYTES) || chunks == 0 || chunks > MAX_CHUNKS {
            return Err(VolumeRecordError::Size(size));
        }
        let thin = flags & VOLUME_FLAG_THIN != 0;
        let unreserved = bytes.unreserved_bytes.get();
        let most = if thin { size } else { 0 };
        if !unreserved.is_multiple_of(CHUNK_BYTES) || unreserved > most {
            return Err(VolumeRecordError::Unreserved(unreserved));
        }
        let is_unformatted = part.is_some_and(|part| part.is_unformatted);
        if is_unformatted && (format != VolumeFormat::Btt || size < MIN_VOLUME_BYTES) {
            return Err(VolumeRecordError::NoBtt);
        }
        let length = usize::from(bytes.name_bytes);
        let name = bytes.name.get(..length).ok_or(NameError::NotText)?;
        if bytes.name[length..].iter().any(|b| *b != 0) {
            return Err(NameError::NotText.into());
        }
        let name = std::str::from_utf8(name).map_err(|_| NameError::NotText)?.parse()?;
        Ok(Some(Self {
            sequence: bytes.sequence.get(),
            slot,
            name,
            uuid: Uuid::from_bytes(bytes.uuid),
            format,
            thin,
            part,
            chunks: chunks as u32,
            reserve_chunks: ((size - unreserved) / CHUNK_BYTES) as u32,
            created_unix_s: bytes.created_unix_s.get(),
        }))
    }
}

const FLAGS_UNFORMATTED: u64 = VOLUME_FLAG_PART | VOLUME_FLAG_UNFORMATTED;

/// Returns the part that the record in slot `own` describes. Only the first part is in the slot of
/// the split volume.
fn parse_part(
    own: Slot,
    bytes: &VolumeRecordBytes,
    is_unformatted: bool,
) -> Result<Part, VolumeRecordError> {
    let (slot, index) = (bytes.origin_slot.get(), bytes.origin_index.get());
    let origin =
        u16::try_from(slot).map(Slot).map_err(|_| VolumeRecordError::Origin { slot, index })?;
    if u64::from(index) >= MAX_CHUNKS || (origin == own) != (index == 0) {
        return Err(VolumeRecordError::Origin { slot, index });
    }
    Ok(Part { origin, index, is_unformatted })
}

fn no_part(bytes: &VolumeRecordBytes) -> Result<Option<Part>, VolumeRecordError> {
    match (bytes.origin_slot.get(), bytes.origin_index.get()) {
        (0, 0) => Ok(None),
        (slot, index) => Err(VolumeRecordError::NoPart { slot, index }),
    }
}

/// Returns true if a record contains data that the record of an empty slot does not.
fn describes_a_volume(bytes: &VolumeRecordBytes) -> bool {
    let numbers = [bytes.flags, bytes.size_bytes, bytes.created_unix_s, bytes.unreserved_bytes];
    let places = [bytes.origin_slot, bytes.origin_index];
    let texts = [&bytes.uuid[..], &bytes.name, &[bytes.format, bytes.name_bytes]];
    numbers.iter().any(|number| number.get() != 0)
        || places.iter().any(|place| place.get() != 0)
        || texts.concat().iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> VolumeRecord {
        VolumeRecord {
            sequence: 3,
            slot: Slot(9),
            name: "daten-größe_1.x".parse().unwrap(),
            uuid: Uuid::from_u128(11),
            format: VolumeFormat::Raw,
            thin: false,
            part: None,
            chunks: 12,
            reserve_chunks: 12,
            created_unix_s: 1,
        }
    }

    #[test]
    fn record_survives_encoding_and_decoding() {
        assert_eq!(VolumeRecord::parse(Slot(9), &sample().to_bytes()), Ok(Some(sample())));
        for (origin, index, is_unformatted) in [(3, 77, false), (3, 77, true), (9, 0, true)] {
            let part = Some(Part { origin: Slot(origin), index, is_unformatted });
            for thin in [false, true] {
                let record = VolumeRecord { format: VolumeFormat::Btt, thin, part, ..sample() };
                assert_eq!(VolumeRecord::parse(Slot(9), &record.to_bytes()), Ok(Some(record)));
            }
        }
        for reserve_chunks in [0, 5, 12] {
            let thin = VolumeRecord { thin: true, reserve_chunks, ..sample() };
            assert_eq!(VolumeRecord::parse(Slot(9), &thin.to_bytes()), Ok(Some(thin)));
        }
        assert_eq!(VolumeRecord::parse(Slot(4), &empty_record(Slot(4), 8)), Ok(None));
    }

    #[test]
    fn names_that_would_need_quoting_are_refused() {
        let refused = |name: &str| name.parse::<VolumeName>().unwrap_err();
        assert_eq!(refused(""), NameError::Empty);
        assert!(matches!(refused(&"x".repeat(65)), NameError::TooLong { length_bytes: 65, .. }));
        for (name, wrong) in [("a b", ' '), ("a,b", ','), ("a=b", '='), ("a/b", '/'), ("a\n", '\n')]
        {
            assert!(
                matches!(refused(name), NameError::Character { character, .. } if character == wrong),
                "{name:?}"
            );
        }
        for (name, wrong) in [(".a", '.'), ("-a", '-'), ("../x", '.')] {
            assert!(
                matches!(refused(name), NameError::Start { character, .. } if character == wrong),
                "{name:?}"
            );
        }
        assert!("x".repeat(64).parse::<VolumeName>().is_ok());
    }

    #[test]
    fn error_has_the_reason_for_an_impossible_record() {
        let broken = |change: fn(&mut VolumeRecordBytes)| {
            let mut bytes = sample().to_bytes();
            change(&mut bytes);
            VolumeRecord::parse(Slot(9), &bytes).unwrap_err()
        };
        assert_eq!(broken(|b| b.slot.set(8)), VolumeRecordError::Slot(8));
        assert_eq!(broken(|b| b.state = 2), VolumeRecordError::State(2));
        assert_eq!(broken(|b| b.state = 0), VolumeRecordError::NotEmpty);
        assert_eq!(broken(|b| b.format = 0), VolumeRecordError::Format(0));
        for flags in [4, 5, 8, 9] {
            let mut bytes = sample().to_bytes();
            bytes.flags.set(flags);
            let error = VolumeRecord::parse(Slot(9), &bytes).unwrap_err();
            assert_eq!(error, VolumeRecordError::Flags(flags));
        }
        assert_eq!(
            broken(|b| {
                b.flags.set(6);
                b.origin_slot.set(9);
            }),
            VolumeRecordError::NoBtt
        );
        assert_eq!(
            broken(|b| {
                b.flags.set(2);
                b.origin_slot.set(1 << 16);
            }),
            VolumeRecordError::Origin { slot: 1 << 16, index: 0 }
        );
        // Only the first part is in the slot of the split volume.
        let part_of = |slot: u32, index: u32| {
            let mut bytes = sample().to_bytes();
            bytes.flags.set(2);
            bytes.origin_slot.set(slot);
            bytes.origin_index.set(index);
            VolumeRecord::parse(Slot(9), &bytes)
        };
        for (slot, index) in [(9, 1), (8, 0)] {
            assert_eq!(part_of(slot, index), Err(VolumeRecordError::Origin { slot, index }));
        }
        assert!(part_of(9, 0).is_ok() && part_of(8, 1).is_ok());
        assert_eq!(
            broken(|b| b.origin_slot.set(4)),
            VolumeRecordError::NoPart { slot: 4, index: 0 }
        );
        assert_eq!(
            broken(|b| b.origin_index.set(7)),
            VolumeRecordError::NoPart { slot: 0, index: 7 }
        );
        let mut empty = empty_record(Slot(9), 8);
        empty.origin_index.set(1);
        assert_eq!(VolumeRecord::parse(Slot(9), &empty), Err(VolumeRecordError::NotEmpty));
        assert_eq!(broken(|b| b.size_bytes.set(5)), VolumeRecordError::Size(5));
        assert_eq!(broken(|b| b.size_bytes.set(0)), VolumeRecordError::Size(0));
        assert_eq!(
            broken(|b| b.unreserved_bytes.set(CHUNK_BYTES)),
            VolumeRecordError::Unreserved(CHUNK_BYTES)
        );
        for unreserved in [1, 13 * CHUNK_BYTES] {
            let mut bytes = VolumeRecord { thin: true, ..sample() }.to_bytes();
            bytes.unreserved_bytes.set(unreserved);
            let error = VolumeRecord::parse(Slot(9), &bytes).unwrap_err();
            assert_eq!(error, VolumeRecordError::Unreserved(unreserved));
        }
        assert_eq!(broken(|b| b.name_bytes = 65), VolumeRecordError::Name(NameError::NotText));
        assert_eq!(broken(|b| b.name_bytes = 3), VolumeRecordError::Name(NameError::NotText));
        assert_eq!(broken(|b| b.name[0] = 0xff), VolumeRecordError::Name(NameError::NotText));
    }
}
