//! Redo log for transactions: changes of several words that are committed together.
//!
//! Most operations need no transaction, because a single word or record commits them. Growth of a
//! BTT volume needs one, because the volume's record and the BTT's info blocks must change
//! together. A split needs one because it changes several records.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::CHUNK_BYTES;
use crate::media::{Durability, Media, MediaError, debug_assert_word};
use crate::pool::PoolError;
use crate::pool::format::chunk::ChunkId;
use crate::pool::format::layout::{LOG_COMMITTED, LOG_MAGIC, LogEntryBytes, LogHeaderBytes};
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{ChunkTable, Owner};

#[derive(Debug)]
pub(crate) enum LogState {
    /// The log contains no transaction.
    Empty,
    /// The log contains a committed transaction with these words.
    Committed(Vec<LogEntryBytes>),
    /// The commit word does not match the transaction.
    Damaged(&'static str),
}

/// Returns the log header for a new pool.
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

/// Returns the offsets of the log's magic and commit word.
pub(crate) fn magic_and_commit(superblock: &Superblock) -> (u64, u64) {
    let commit = std::mem::offset_of!(LogHeaderBytes, commit) as u64;
    (superblock.log_offset, superblock.log_offset + commit)
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
        return Ok(LogState::Damaged("it has more entries than fit"));
    }
    let mut bytes = vec![0; (count * ENTRY_BYTES) as usize];
    media.read(superblock.log_offset + HEADER_BYTES, &mut bytes)?;
    let entries = <[LogEntryBytes]>::ref_from_bytes(&bytes)
        .expect("a multiple of an entry, which needs no alignment");
    let crc = checksum(&header, entries);
    if header.checksum != u64::from(crc) || header.commit != LOG_COMMITTED | u64::from(crc) {
        return Ok(LogState::Damaged("its checksum is wrong"));
    }
    for entry in entries {
        if !is_allowed(media, superblock, entry.offset.get())? {
            return Ok(LogState::Damaged("an entry stores outside the tables and the volumes"));
        }
    }
    Ok(LogState::Committed(entries.to_vec()))
}

/// Checks the destination of a store. A transaction may store into tables and into chunks of
/// volumes. It must not store into superblocks, or into free chunks, which read as zeros.
fn is_allowed(media: &dyn Media, superblock: &Superblock, offset: u64) -> Result<bool, MediaError> {
    if !offset.is_multiple_of(8) || offset >= superblock.size_bytes() {
        return Ok(false);
    }
    if superblock.tables().iter().any(|t| t.contains(&offset)) {
        return Ok(true);
    }
    let chunk = ChunkId((offset / CHUNK_BYTES) as u32);
    let owner = ChunkTable::new(superblock).owner(media, chunk)?;
    Ok(matches!(owner, Ok(Owner::Volume { .. })) && !superblock.is_metadata(chunk))
}

/// Media as it will be after a committed transaction has been redone. The media is read-only,
/// because the pool is verified before any store.
pub(crate) struct Redone<'a> {
    media: &'a dyn Media,
    words: Cow<'a, BTreeMap<u64, u64>>,
}

impl<'a> Redone<'a> {
    pub(crate) fn new(media: &'a dyn Media, log: &LogState) -> Self {
        Self { media, words: Cow::Owned(log.words()) }
    }

    /// Creates a view of `media` with the words of a log that was read earlier.
    pub(crate) fn with(media: &'a dyn Media, words: &'a BTreeMap<u64, u64>) -> Self {
        Self { media, words: Cow::Borrowed(words) }
    }
}

impl LogState {
    /// Returns the words of a committed transaction by offset.
    pub(crate) fn words(&self) -> BTreeMap<u64, u64> {
        match self {
            LogState::Committed(entries) => {
                entries.iter().map(|entry| (entry.offset.get(), entry.word.get())).collect()
            }
            LogState::Empty | LogState::Damaged(_) => BTreeMap::new(),
        }
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

    /// The words to redo may be located in a hole.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        if self.words.is_empty() {
            self.media.next_data(range)
        } else {
            Ok(Some(range).filter(|r| !r.is_empty()))
        }
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        match self.words.get(&offset_bytes) {
            Some(word) => Ok(*word),
            None => self.media.load_word(offset_bytes),
        }
    }
}

/// Stores the words of a committed transaction and empties the log. It may be called repeatedly.
///
/// 1. Store the words and persist them.
/// 2. Clear the commit word and persist it. Only now is the log available for another transaction.
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

/// Checks that the log has space for a transaction of `words` words.
pub(crate) fn check_capacity(superblock: &Superblock, words: u64) -> Result<(), PoolError> {
    let needed_bytes =
        size_of::<LogHeaderBytes>() as u64 + words * size_of::<LogEntryBytes>() as u64;
    let log_bytes = superblock.log_bytes;
    if needed_bytes <= log_bytes {
        Ok(())
    } else {
        Err(PoolError::LogTooSmall { log_bytes, needed_bytes })
    }
}

/// Stores all `words` or none of them, durably. The log must be empty and have space for them.
///
/// 1. Store the entries, their number and their checksum, and persist them.
/// 2. Store the commit word and persist it. From here on, the transaction is committed.
/// 3. Replay the transaction, as opening the pool would.
pub(crate) fn commit(
    media: &dyn Media,
    superblock: &Superblock,
    words: &[(u64, u64)],
) -> Result<(), MediaError> {
    let (header, entries) = transaction(words);
    let log = superblock.log_offset;
    let entries_at = log + size_of::<LogHeaderBytes>() as u64;
    let end = entries_at + entries.as_bytes().len() as u64;
    assert!(end <= log + superblock.log_bytes, "the caller checked that the entries fit");
    media.store(entries_at, entries.as_bytes())?;
    media.store(log, LogHeaderBytes { commit: 0.into(), ..header.clone() }.as_bytes())?;
    media.persist_range(log..end)?;
    let commit = log + std::mem::offset_of!(LogHeaderBytes, commit) as u64;
    media.store_word(commit, header.commit.get())?;
    media.persist_range(commit..commit + 8)?;
    replay(media, superblock, &entries)
}

/// Returns the header and entries of a committed transaction.
fn transaction(words: &[(u64, u64)]) -> (LogHeaderBytes, Vec<LogEntryBytes>) {
    let entry = |(offset, word): &(u64, u64)| LogEntryBytes {
        offset: (*offset).into(),
        word: (*word).into(),
    };
    let entries: Vec<_> = words.iter().map(entry).collect();
    let mut header = empty_header();
    header.entries.set(entries.len() as u64);
    let crc = u64::from(checksum(&header, &entries));
    header.checksum.set(crc);
    header.commit.set(LOG_COMMITTED | crc);
    (header, entries)
}

/// Writes a transaction that is committed but not redone, as a crash may leave it.
#[cfg(test)]
pub(crate) fn write_for_test(media: &dyn Media, superblock: &Superblock, words: &[(u64, u64)]) {
    let (header, entries) = transaction(words);
    media
        .store(superblock.log_offset + size_of::<LogHeaderBytes>() as u64, entries.as_bytes())
        .unwrap();
    media.store(superblock.log_offset, header.as_bytes()).unwrap();
}
