//! Tests of pool files with arbitrary content and correct checksums. Opening and checking should
//! return a result.

use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::pool::format::table::{Owner, Slot, encode_owner};
use crate::pool::layout::{
    CHUNK_TABLE_OFFSET, LOG_OFFSET, SUPERBLOCK_OFFSETS, SuperblockBytes, VOLUME_RECORD_BYTES,
    VOLUME_TABLE_OFFSETS, VolumeRecordBytes,
};

const POOL_BYTES: u64 = 32 * MIB;

#[derive(Clone, Debug)]
enum Change {
    /// Changes a word in both superblocks, with correct checksums.
    Superblock { word: usize, value: u64 },
    /// Changes a word in both copies of a volume record, with correct checksums.
    Record { slot: u64, word: usize, value: u64 },
    /// Replaces an owner word.
    Owner { chunk: u32, slot: u16, index: u32, kind: u8 },
    /// Changes a word anywhere in the metadata.
    Anything { word: u64, value: u64 },
    /// Changes a word in the first volume's BTT: in an info block, the map or the flog.
    Btt { word: u64, value: u64 },
    /// Writes a committed transaction.
    Log { words: Vec<(u64, u64)> },
}

/// Values that are likely to cause errors.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        0..100u64,
        any::<u64>(),
        (0..64u32).prop_map(|shift| 1 << shift),
        (0..50u64).prop_map(|chunks| chunks * CHUNK_BYTES),
        (0..64u32, 0..3u64).prop_map(|(shift, less)| (1u64 << shift).wrapping_sub(less)),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (1..20usize, value()).prop_map(|(word, value)| Change::Superblock { word, value }),
        (0..4u64, 1..31usize, value()).prop_map(|(slot, word, value)| Change::Record {
            slot,
            word,
            value
        }),
        (0..16u32, 0..4u16, 0..12u32, 0..6u8)
            .prop_map(|(chunk, slot, index, kind)| Change::Owner { chunk, slot, index, kind }),
        (0..(4 * MIB / 8), value()).prop_map(|(word, value)| Change::Anything { word, value }),
        (0..(18 * MIB / 8), value()).prop_map(|(word, value)| Change::Btt { word, value }),
        prop::collection::vec((value(), value()), 0..5).prop_map(|words| Change::Log { words }),
    ]
}

fn seal_at<T: mirrored::Mirrored>(bytes: &mut [u8], at: u64, word: usize, value: u64) {
    let range = at as usize..at as usize + size_of::<T>();
    let mut record = T::read_from_bytes(&bytes[range.clone()]).unwrap();
    record.as_mut_bytes()[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
    mirrored::seal(&mut record);
    bytes[range].copy_from_slice(record.as_bytes());
}

fn apply(change: &Change, bytes: &mut [u8], superblock: &Superblock) {
    match change {
        Change::Superblock { word, value } => {
            SUPERBLOCK_OFFSETS
                .iter()
                .for_each(|at| seal_at::<SuperblockBytes>(bytes, *at, *word, *value));
        }
        Change::Record { slot, word, value } => VOLUME_TABLE_OFFSETS.iter().for_each(|table| {
            seal_at::<VolumeRecordBytes>(bytes, table + slot * VOLUME_RECORD_BYTES, *word, *value);
        }),
        Change::Owner { chunk, slot, index, kind } => {
            let owner = [
                Owner::Free,
                Owner::Metadata,
                Owner::Volume { slot: Slot(*slot), index: *index },
                Owner::Memory,
                Owner::Scrub,
                Owner::Retired,
            ][usize::from(*kind)];
            let at = (CHUNK_TABLE_OFFSET + u64::from(*chunk) * 16) as usize;
            bytes[at..at + 8].copy_from_slice(&encode_owner(ChunkId(*chunk), owner).to_le_bytes());
        }
        Change::Anything { word, value } => {
            bytes[*word as usize * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        Change::Btt { word, value } => {
            bytes[2 * CHUNK_BYTES as usize + *word as usize * 8..][..8]
                .copy_from_slice(&value.to_le_bytes());
        }
        Change::Log { words } => {
            // Copies only the log, because copying the whole media would be slow.
            let media = crate::media::simulator::Simulator::new(POOL_BYTES);
            redo_log::write_for_test(&media, superblock, words);
            let log = &mut bytes[LOG_OFFSET as usize..][..4096];
            media.read(LOG_OFFSET, log).unwrap();
        }
    }
}

/// Checks that a repair makes the changes that its dry run reported. If no damage remains, the pool
/// should open and be clean.
fn repair_a_copy(bytes: &[u8], dry: Result<RepairReport, PoolError>) -> Result<(), TestCaseError> {
    let copy = Fixture::new();
    fs::write(copy.path(), bytes).unwrap();
    match (dry, Pool::repair(&copy.path(), false)) {
        (Ok(dry), Ok(done)) => {
            prop_assert_eq!(dry.left.is_empty(), done.left.is_empty(), "{:?} and {:?}", dry, done);
            if done.left.is_empty() {
                drop(copy.open());
                let report = copy.check();
                prop_assert!(report.is_clean(), "{:?} after {:?}", report, done);
            }
        }
        (Err(_), Err(_)) => {
            prop_assert!(
                bytes == fs::read(copy.path()).unwrap(),
                "a refused repair changed the media"
            );
        }
        (dry, done) => prop_assert!(false, "{:?} and {:?}", dry, done),
    }
    Ok(())
}

/// In a sparse file, the superblock assigns almost all space to the log, and a transaction fills
/// it.
#[test]
fn huge_log_is_refused_before_it_is_read() {
    const HUGE_BYTES: u64 = 8 << 40;
    let fixture = Fixture::new();
    let mut superblock = create::plan(HUGE_BYTES, 0, uuid::Uuid::from_u128(1), 1).unwrap();
    superblock.log_offset = superblock.metadata_bytes();
    superblock.log_bytes = HUGE_BYTES - superblock.log_offset;
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(fixture.path()).unwrap();
    file.set_len(HUGE_BYTES).unwrap();
    for at in SUPERBLOCK_OFFSETS {
        file.write_all_at(superblock.to_bytes().as_bytes(), at).unwrap();
    }
    let mut log = redo_log::empty_header();
    log.entries.set(superblock.log_bytes / 16 - 8);
    log.commit.set(layout::LOG_COMMITTED);
    file.write_all_at(log.as_bytes(), superblock.log_offset).unwrap();
    for mode in [OpenMode::Peek, OpenMode::ReadOnly, OpenMode::ReadWrite] {
        let error = fixture.open_error(mode);
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(source.starts_with("superblock field log_bytes is "), "{error}: {source}");
    }
    assert!(Pool::repair(&fixture.path(), false).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn hostile_pool_is_opened_or_refused(changes in prop::collection::vec(change(), 1..6)) {
        let fixture = Fixture::new();
        let pool = fixture.create(POOL_BYTES, 4 * MIB);
        pool.create_volume("btt", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
        pool.create_volume("raw", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
        pool.alloc_memory(4 * MIB).unwrap();
        let superblock = pool.superblock();
        drop(pool);
        let mut bytes = fs::read(fixture.path()).unwrap();
        changes.iter().for_each(|change| apply(change, &mut bytes, &superblock));
        fs::write(fixture.path(), &bytes).unwrap();

        for mode in [OpenMode::Peek, OpenMode::ReadOnly] {
            if let Ok(pool) = Pool::open(&fixture.path(), mode) {
                assert_states_add_up(&pool.info());
                pool.check().unwrap();
            }
        }
        let dry = Pool::repair(&fixture.path(), true);
        prop_assert!(bytes == fs::read(fixture.path()).unwrap(), "the check changed the media");
        repair_a_copy(&bytes, dry)?;
        match Pool::open(&fixture.path(), OpenMode::ReadWrite) {
            Err(_) => prop_assert!(bytes == fs::read(fixture.path()).unwrap(), "a refused open changed the media"),
            Ok(pool) => {
                assert_states_add_up(&pool.info());
                let lent = pool.alloc_memory(2 * MIB).ok();
                pool.free_memory(&lent.unwrap_or_default()).unwrap();
                for volume in pool.volumes() {
                    let _ = pool.rename_volume(&volume.name, "renamed");
                    let _ = pool.rename_volume("renamed", &volume.name);
                    for size in [VolumeSize::Bytes(2 * MIB), VolumeSize::Remaining] {
                        let _ = pool.resize_volume(&volume.name, size, Shrink::Allow);
                        assert_states_add_up(&pool.info());
                    }
                    if pool.open_volume(&volume.name).is_ok() {
                        pool.delete_volume(&volume.name).unwrap();
                    }
                }
                drop(pool);
                // The corrections should be permanent.
                let pool = Pool::open(&fixture.path(), OpenMode::ReadWrite).unwrap();
                assert_states_add_up(&pool.info());
                drop(pool);
                if let Ok(pool) = Pool::grow(&fixture.path(), POOL_BYTES + 20 * MIB) {
                    assert_states_add_up(&pool.info());
                }
            }
        }
    }
}

/// In a sparse file, the chunk table is a hole. All its words are bad, so they are read more than
/// once.
#[test]
fn reading_holes_allocates_no_blocks() {
    let fixture = Fixture::new();
    let size_bytes = 1 << 40;
    let file =
        OpenOptions::new().create_new(true).read(true).write(true).open(fixture.path()).unwrap();
    file.set_len(size_bytes).unwrap();
    let chunks = (size_bytes / CHUNK_BYTES) as u32;
    let superblock = Superblock::new(uuid::Uuid::from_u128(1), 1, chunks, 0);
    for at in SUPERBLOCK_OFFSETS {
        file.write_all_at(superblock.to_bytes().as_bytes(), at).unwrap();
    }
    let blocks = || file.metadata().unwrap().blocks();
    let before = blocks();
    let checked = Pool::open(&fixture.path(), OpenMode::Peek).map(|pool| pool.check().map(drop));
    assert_eq!(blocks(), before, "{checked:?}");
}
