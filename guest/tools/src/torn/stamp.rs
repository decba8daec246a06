//! Self-describing content of sectors.
//!
//! Each cache line of a sector begins with the version and the sector's number. Words that depend
//! only on their position follow, and the last word of the sector is a checksum of all others. A
//! new version changes one word of each line, and the checksum. Therefore, a writer spends most of
//! its time writing, and each line shows which write it belongs to.

use std::fmt;

pub const SECTOR_BYTES: usize = 4096;

const WORD_BYTES: usize = 8;
const WORDS: usize = SECTOR_BYTES / WORD_BYTES;
const LINE_WORDS: usize = 8;
const CHECKSUM: usize = WORDS - 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// All lines have the same version. Version 0 is a sector of zeros that has never been written.
    Whole(u64),
    /// All lines have one version, but belong to another sector.
    Misplaced {
        sector: u64,
    },
    Torn(Lines),
}

/// Versions of the lines in a torn sector. Adjacent lines of the same version are grouped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lines(Vec<(u64, usize)>);

impl fmt::Display for Lines {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = 0;
        for (version, count) in &self.0 {
            let separator = if first == 0 { "" } else { ", " };
            write!(
                formatter,
                "{separator}lines {first} to {} of version {version}",
                first + count - 1
            )?;
            first += count;
        }
        Ok(())
    }
}

/// Content of a sector. A new stamp has version 0.
pub struct Stamp {
    sector: u64,
    /// Part of the checksum that comes from the constant words.
    base: u64,
}

impl Stamp {
    /// Writes everything except the version to the buffer of a sector.
    pub fn new(sector: u64, buffer: &mut [u8]) -> Self {
        for index in 0..CHECKSUM {
            put(buffer, index, fixed_word(sector, index));
        }
        Self { sector, base: checksum(buffer) }
    }

    /// Sets the version in a buffer that [`Stamp::new`] has filled.
    pub fn set_version(&self, version: u64, buffer: &mut [u8]) {
        debug_assert_eq!(word(buffer, 1), self.sector);
        let mut sum = self.base;
        for index in (0..WORDS).step_by(LINE_WORDS) {
            put(buffer, index, version);
            sum = sum.wrapping_add(share(index, version));
        }
        put(buffer, CHECKSUM, sum);
    }
}

pub fn read(sector: u64, bytes: &[u8]) -> Content {
    assert_eq!(bytes.len(), SECTOR_BYTES);
    if bytes.iter().all(|byte| *byte == 0) {
        return Content::Whole(0);
    }
    let (version, found) = (word(bytes, 0), word(bytes, 1));
    let one_version = (0..WORDS).step_by(LINE_WORDS).all(|index| word(bytes, index) == version);
    match word(bytes, CHECKSUM) == checksum(bytes) && one_version && version != 0 {
        true if found == sector => Content::Whole(version),
        true => Content::Misplaced { sector: found },
        false => Content::Torn(lines(bytes)),
    }
}

fn lines(bytes: &[u8]) -> Lines {
    let mut lines: Vec<(u64, usize)> = Vec::new();
    for version in (0..WORDS).step_by(LINE_WORDS).map(|index| word(bytes, index)) {
        match lines.last_mut() {
            Some((last, count)) if *last == version => *count += 1,
            _ => lines.push((version, 1)),
        }
    }
    Lines(lines)
}

/// Returns the value of a constant word, or 0 for a word that depends on the version.
fn fixed_word(sector: u64, index: usize) -> u64 {
    match index % LINE_WORDS {
        0 => 0,
        1 => sector,
        // Multipliers of splitmix64's finalizer. They make neighboring words unrelated.
        _ => {
            let mixed =
                (sector << 16 ^ index as u64).wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (mixed ^ mixed >> 31).wrapping_mul(0x94d0_49bb_1331_11eb)
        }
    }
}

/// Returns the sum over all words except the last. Each word is multiplied by a different odd
/// number. A mix of lines from two versions does not have the sum of either version: it differs by
/// the difference of the versions, multiplied by the sum of the factors of the other version's
/// lines. This sum is not zero and is much smaller than a word.
fn checksum(bytes: &[u8]) -> u64 {
    (0..CHECKSUM).fold(0, |sum, index| sum.wrapping_add(share(index, word(bytes, index))))
}

fn share(index: usize, word: u64) -> u64 {
    word.wrapping_mul(2 * index as u64 + 1)
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let word = &bytes[index * WORD_BYTES..][..WORD_BYTES];
    u64::from_le_bytes(word.try_into().expect("a word has eight bytes"))
}

fn put(buffer: &mut [u8], index: usize, word: u64) {
    buffer[index * WORD_BYTES..][..WORD_BYTES].copy_from_slice(&word.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(number: u64, version: u64) -> Vec<u8> {
        let mut buffer = vec![0; SECTOR_BYTES];
        let stamp = Stamp::new(number, &mut buffer);
        // The previous version leaves nothing in the buffer.
        stamp.set_version(version + 7, &mut buffer);
        stamp.set_version(version, &mut buffer);
        buffer
    }

    #[test]
    fn written_versions_are_read() {
        assert_eq!(read(300, &sector(300, 5)), Content::Whole(5));
        assert_eq!(read(300, &vec![0; SECTOR_BYTES]), Content::Whole(0));
        assert_eq!(read(300, &sector(301, 5)), Content::Misplaced { sector: 301 });
    }

    #[test]
    fn mix_of_two_versions_at_any_word_is_torn() {
        let (old, new) = (sector(300, 41), sector(300, 42));
        for tear in 1..WORDS {
            let mut torn = new.clone();
            torn[tear * WORD_BYTES..].copy_from_slice(&old[tear * WORD_BYTES..]);
            let found = read(300, &torn);
            assert!(matches!(found, Content::Torn(_)), "torn at word {tear} it reads as {found:?}");
        }
    }

    #[test]
    fn line_of_another_version_is_detected() {
        let (old, new) = (sector(300, 41), sector(300, 42));
        for line in (0..SECTOR_BYTES).step_by(LINE_WORDS * WORD_BYTES) {
            let mut torn = new.clone();
            torn[line..line + 64].copy_from_slice(&old[line..line + 64]);
            assert!(matches!(read(300, &torn), Content::Torn(_)), "line at {line}");
        }
    }

    #[test]
    fn changed_bit_and_missing_line_are_detected() {
        let whole = sector(300, 5);
        for byte in 0..SECTOR_BYTES {
            let mut changed = whole.clone();
            changed[byte] ^= 0x10;
            assert_ne!(read(300, &changed), Content::Whole(5), "byte {byte}");
        }
        let mut zeroed = whole;
        zeroed[64..128].fill(0);
        assert!(matches!(read(300, &zeroed), Content::Torn(_)));
    }

    #[test]
    fn torn_sector_names_its_lines() {
        let mut torn = sector(300, 42);
        torn[1280..].copy_from_slice(&sector(300, 41)[1280..]);
        let Content::Torn(lines) = read(300, &torn) else { panic!("not torn") };
        assert_eq!(lines.to_string(), "lines 0 to 19 of version 42, lines 20 to 63 of version 41");
    }
}
