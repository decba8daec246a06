//! The redo log: a transaction of many words that counts as a whole or not at all.
//!
//! No operation of this version needs one (each commits by a single word or record), so the log of a pool it wrote is
//! empty. Replay is here from the start, so that a pool on which a later version died opens here all the same.

use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::layout::{LOG_COMMITTED, LOG_MAGIC, LogEntryBytes, LogHeaderBytes};
use super::superblock::Superblock;
use crate::media::{Durability, Media, MediaError};

/// What the log holds.
#[derive(Debug)]
pub(crate) enum LogState {
    /// No transaction.
    Empty,
    /// A committed transaction: these words are to be stored.
    Committed(Vec<LogEntryBytes>),
    /// A commit word without a transaction that fits it.
    Damaged(&'static str),
}

/// The log's head for a new pool.
pub(crate) fn empty_header() -> LogHeaderBytes {
    let mut header = LogHeaderBytes::new_zeroed();
    header.magic = LOG_MAGIC;
    header
}

fn checksum(header: &LogHeaderBytes, entries: &[LogEntryBytes]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header.magic);
    crc.update(header.entries.as_bytes());
    crc.update(entries.as_bytes());
    crc.finalize()
}

/// Reads and verifies the log.
pub(crate) fn read(media: &dyn Media, superblock: &Superblock) -> Result<LogState, MediaError> {
    const HEADER_BYTES: u64 = size_of::<LogHeaderBytes>() as u64;
    const ENTRY_BYTES: u64 = size_of::<LogEntryBytes>() as u64;
    if superblock.log_bytes < HEADER_BYTES {
        return Ok(LogState::Empty);
    }
    let mut header = LogHeaderBytes::new_zeroed();
    media.read(superblock.log_offset, header.as_mut_bytes())?;
    if header.magic != LOG_MAGIC {
        return Ok(LogState::Damaged("its magic is wrong"));
    }
    if header.commit == 0 {
        return Ok(LogState::Empty);
    }
    let count = header.entries.get();
    if count > (superblock.log_bytes - HEADER_BYTES) / ENTRY_BYTES {
        return Ok(LogState::Damaged("it has more entries than there is room for"));
    }
    let mut bytes = vec![0; (count * ENTRY_BYTES) as usize];
    media.read(superblock.log_offset + HEADER_BYTES, &mut bytes)?;
    let entries =
        <[LogEntryBytes]>::ref_from_bytes(&bytes).expect("a multiple of an entry, which needs no alignment");
    let crc = checksum(&header, entries);
    if header.checksum != u64::from(crc) || header.commit != LOG_COMMITTED | u64::from(crc) {
        return Ok(LogState::Damaged("its checksum is wrong"));
    }
    let tables = superblock.tables();
    let is_allowed = |entry: &LogEntryBytes| {
        let offset = entry.offset.get();
        offset.is_multiple_of(8) && tables.iter().any(|t| t.start <= offset && offset < t.end)
    };
    if !entries.iter().all(is_allowed) {
        return Ok(LogState::Damaged("it stores outside the tables"));
    }
    Ok(LogState::Committed(entries.to_vec()))
}

/// The media as it will be when a committed transaction has been redone. For looking only: whether the pool can be
/// believed is decided before anything is stored.
pub(crate) struct Redone<'a> {
    media: &'a dyn Media,
    words: BTreeMap<u64, u64>,
}

impl<'a> Redone<'a> {
    pub(crate) fn new(media: &'a dyn Media, log: &LogState) -> Self {
        let entries = match log {
            LogState::Committed(entries) => entries.as_slice(),
            LogState::Empty | LogState::Damaged(_) => &[],
        };
        Self { media, words: entries.iter().map(|entry| (entry.offset.get(), entry.word.get())).collect() }
    }
}

impl Media for Redone<'_> {
    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }

    fn durability(&self) -> Durability {
        self.media.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.media.read(offset_bytes, into)?;
        let end = offset_bytes + into.len() as u64;
        for (at, word) in self.words.range(offset_bytes.saturating_sub(7)..end) {
            for (byte_at, byte) in (*at..).zip(word.to_le_bytes()) {
                if (offset_bytes..end).contains(&byte_at) {
                    into[(byte_at - offset_bytes) as usize] = byte;
                }
            }
        }
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        match self.words.get(&offset_bytes) {
            Some(word) => Ok(*word),
            None => self.media.load_word(offset_bytes),
        }
    }

    fn store(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    fn store_word(&self, _: u64, _: u64) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    fn persist(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    fn erase(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }
}

/// Stores the words of a committed transaction and empties the log. Doing it again changes nothing.
///
/// 1. The words, persist.
/// 2. Commit word zero, persist: only now is the log free for another transaction.
pub(crate) fn replay(
    media: &dyn Media,
    superblock: &Superblock,
    entries: &[LogEntryBytes],
) -> Result<(), MediaError> {
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        let offset = entry.offset.get();
        media.store_word(offset, entry.word.get())?;
        ranges.push(offset..offset + 8);
    }
    media.persist(&ranges)?;
    let commit = superblock.log_offset + std::mem::offset_of!(LogHeaderBytes, commit) as u64;
    media.store_word(commit, 0)?;
    media.persist_range(commit..commit + 8)
}

/// Writes a committed transaction, as a later version would leave it behind at a crash.
#[cfg(test)]
pub(crate) fn write_for_test(media: &dyn Media, superblock: &Superblock, words: &[(u64, u64)]) {
    let entries: Vec<_> = words
        .iter()
        .map(|(offset, word)| LogEntryBytes { offset: (*offset).into(), word: (*word).into() })
        .collect();
    let mut header = empty_header();
    header.entries.set(entries.len() as u64);
    let crc = u64::from(checksum(&header, &entries));
    header.checksum.set(crc);
    header.commit.set(LOG_COMMITTED | crc);
    media.store(superblock.log_offset + size_of::<LogHeaderBytes>() as u64, entries.as_bytes()).unwrap();
    media.store(superblock.log_offset, header.as_bytes()).unwrap();
}
