//! Fuzz targets for pools with arbitrary content, in a file on tmpfs.

use std::fs::{File, OpenOptions};
use std::mem::{offset_of, size_of};
use std::path::PathBuf;
use std::sync::OnceLock;

use pmem_volume::media::{Media, MediaError};
use pmem_volume::pool::layout::{
    CHUNK_TABLE_OFFSET, LOG_COMMITTED, LOG_MAGIC, LOG_OFFSET, LogHeaderBytes, SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS, SuperblockBytes, VOLUME_RECORD_BYTES, VOLUME_TABLE_OFFSETS,
};
use pmem_volume::pool::{PoolInfo, RepairReport};
use pmem_volume::{OpenMode, Pool, PoolError, Shrink, VolumeFormat, VolumeOptions, VolumeSize};

use super::cursor::Cursor;
use super::image::{CHUNK_BYTES, Image};

const CHUNKS: u64 = 30;
const METADATA_BYTES: u64 = 2 * CHUNK_BYTES;
/// Number of slots, which is small so that a pool opens quickly.
const SLOTS: u32 = 8;
const MAX_EDITS: usize = 48;

/// File that all runs of a process use, and its content before the edits of the fuzzer.
struct TestPool {
    folder: tempfile::TempDir,
    file: File,
    base: Image,
    /// Offset of the BTT volume in the file.
    btt_offset: u64,
    btt_bytes: u64,
}

impl TestPool {
    /// Calls `run` with the file of this thread. Each thread has its own, because tests run on
    /// several threads.
    fn with<T>(run: impl FnOnce(&TestPool) -> T) -> T {
        thread_local! { static TEST_POOL: OnceLock<TestPool> = const { OnceLock::new() } }
        TEST_POOL.with(|test_pool| run(test_pool.get_or_init(TestPool::new)))
    }

    /// Creates a pool with volumes of both formats, a thin volume and lent memory.
    fn new() -> Self {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        let pool = Pool::create(&path, CHUNKS * CHUNK_BYTES, 2 * CHUNK_BYTES).unwrap();
        for (name, chunks, format) in [("btt", 9, VolumeFormat::Btt), ("raw", 3, VolumeFormat::Raw)]
        {
            pool.create_volume(name, VolumeSize::Bytes(chunks * CHUNK_BYTES), format).unwrap();
        }
        let size = VolumeSize::Bytes(10 * CHUNK_BYTES);
        let thin =
            VolumeOptions { size, format: VolumeFormat::Btt, thin: true, reserve_bytes: None };
        pool.create_volume_with("thin", thin).unwrap();
        pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
        let place = pool.open_volume("btt").unwrap().extents()[0];
        drop(pool);
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut base = Image::of_file(&file).unwrap();
        for table in VOLUME_TABLE_OFFSETS {
            let behind = table + u64::from(SLOTS) * VOLUME_RECORD_BYTES;
            base.write(behind, &vec![0; (table + (256 << 10) - behind) as usize]);
        }
        let at = offset_of!(SuperblockBytes, volume_slots) as u64;
        for copy in SUPERBLOCK_OFFSETS {
            base.write(copy + at, &SLOTS.to_le_bytes());
            seal(&mut base, copy, SUPERBLOCK_BYTES);
        }
        base.to_file(&file).unwrap();
        let base = Image::of_file(&file).unwrap();
        assert!(Pool::open(&path, OpenMode::ReadOnly).unwrap().check().unwrap().is_clean());
        Self { folder, file, base, btt_offset: place.offset_bytes(), btt_bytes: place.len_bytes() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("pool")
    }

    fn assert_unchanged(&self, image: &Image, what: &str) {
        assert!(*image == Image::of_file(&self.file).unwrap(), "{what} changed the media");
    }

    /// Returns the pool with the edits of the fuzzer, or the bytes of the fuzzer themselves.
    fn image(&self, data: &[u8]) -> Image {
        let mut from = Cursor::new(data);
        let mut image = self.base.clone();
        if from.number(1) == 0xff {
            let bytes = from.take(1 << 20);
            image.set_len(0);
            image.set_len(bytes.len() as u64);
            image.write(0, bytes);
            return image;
        }
        for _ in 0..MAX_EDITS {
            if from.is_empty() {
                break;
            }
            self.edit(&mut image, &mut from);
        }
        image
    }

    fn edit(&self, image: &mut Image, from: &mut Cursor<'_>) {
        match from.number(1) % 12 {
            0 => image.write_word(from.below(METADATA_BYTES / 8) * 8, from.value()),
            1 => self.edit_copies(image, from, SUPERBLOCK_OFFSETS, SUPERBLOCK_BYTES),
            2 => {
                let slot = from.below(u64::from(SLOTS)) * VOLUME_RECORD_BYTES;
                let copies = VOLUME_TABLE_OFFSETS.map(|table| table + slot);
                self.edit_copies(image, from, copies, VOLUME_RECORD_BYTES);
            }
            3 | 4 => {
                let chunk = from.below(CHUNKS) as u32;
                let (index, slot, state) =
                    (from.number(2), from.below(u64::from(SLOTS) + 1), from.below(16));
                let low = index & 0xfff | slot << 28 | state << 44;
                image.write_word(
                    CHUNK_TABLE_OFFSET + u64::from(chunk) * 16,
                    seal_word(chunk, 0, low),
                );
            }
            5 => {
                let chunk = from.below(CHUNKS) as u32;
                let low = from.value() & 0xffff_ffff_ffff;
                image.write_word(
                    CHUNK_TABLE_OFFSET + u64::from(chunk) * 16 + 8,
                    seal_word(chunk, 1, low),
                );
            }
            6 => image.write_word(CHUNK_TABLE_OFFSET + from.below(CHUNKS * 2) * 8, from.value()),
            7 => {
                image.write_word(self.btt_offset + from.below(self.btt_bytes / 8) * 8, from.value())
            }
            8 => {
                let info = self.btt_offset + [4096, self.btt_bytes - 4096][from.below(2) as usize];
                let at = info + from.below(16) * 8;
                image.write_word(at, from.value());
                super::btt::seal_info(image, info);
            }
            9 => write_transaction(image, from),
            10 => image.set_len(match from.number(1) % 4 {
                0 => from.below(64) * CHUNK_BYTES,
                1 => CHUNKS * CHUNK_BYTES - from.below(1 << 22),
                _ => CHUNKS * CHUNK_BYTES + from.below(1 << 24),
            }),
            _ => {
                let (at, count) = (from.below(METADATA_BYTES), from.number(1) as usize);
                let bytes = from.take(count);
                image.write(at, bytes);
            }
        }
    }

    /// Changes a word in one or both copies of a record. The checksum may or may not be updated.
    fn edit_copies(&self, image: &mut Image, from: &mut Cursor<'_>, copies: [u64; 2], bytes: u64) {
        let how = from.number(1);
        // In most cases, the word contains a field.
        let words = if how & 8 == 0 { bytes.min(160) / 8 } else { bytes / 8 };
        let (word, half, value) = (from.below(words) * 8, how & 16 != 0, from.value());
        for (_, start) in copies.iter().enumerate().filter(|(copy, _)| how >> copy & 1 == 0) {
            match half {
                true => image.write(start + word + (value >> 32 & 7), &value.to_le_bytes()[..1]),
                false => image.write_word(start + word, value),
            }
            if how & 4 == 0 {
                seal(image, *start, bytes);
            }
        }
    }
}

/// Stores the CRC-32 in the last 8 bytes.
fn seal(image: &mut Image, start: u64, bytes: u64) {
    let mut record = vec![0; bytes as usize - 8];
    image.read(start, &mut record);
    image.write_word(start + bytes - 8, u64::from(crc32fast::hash(&record)));
}

/// Adds the CRC-16 to an owner word (kind 0) or a wear word (kind 1), as described in
/// docs/reference/format.md.
fn seal_word(chunk: u32, kind: u8, low: u64) -> u64 {
    let mut crc: u16 = 0xffff;
    for byte in low.to_le_bytes()[..6].iter().chain(&chunk.to_le_bytes()).chain(&[kind]) {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 };
        }
    }
    u64::from(crc) << 48 | low
}

fn write_transaction(image: &mut Image, from: &mut Cursor<'_>) {
    let entries = from.below(9);
    let mut bytes = Vec::new();
    for _ in 0..entries {
        let at = match from.number(1) % 3 {
            0 => CHUNK_TABLE_OFFSET + from.below(CHUNKS * 2) * 8,
            1 => VOLUME_TABLE_OFFSETS[0] + from.below(u64::from(SLOTS) * 32) * 8,
            _ => from.value(),
        };
        bytes.extend_from_slice(&at.to_le_bytes());
        bytes.extend_from_slice(&from.value().to_le_bytes());
    }
    let crc = crc32fast::hash(&[&LOG_MAGIC[..], &entries.to_le_bytes(), &bytes].concat());
    image.write(LOG_OFFSET, &LOG_MAGIC);
    image.write_word(LOG_OFFSET + offset_of!(LogHeaderBytes, entries) as u64, entries);
    image.write_word(LOG_OFFSET + offset_of!(LogHeaderBytes, checksum) as u64, u64::from(crc));
    image.write_word(
        LOG_OFFSET + offset_of!(LogHeaderBytes, commit) as u64,
        LOG_COMMITTED | u64::from(crc),
    );
    image.write(LOG_OFFSET + size_of::<LogHeaderBytes>() as u64, &bytes);
}

fn assert_adds_up(info: &PoolInfo) {
    let parts = [
        info.metadata_bytes,
        info.volume_bytes,
        info.memory_bytes,
        info.scrubbing_bytes,
        info.damaged_bytes,
        info.retired_bytes,
        info.free_bytes,
    ];
    assert_eq!(parts.iter().sum::<u64>(), info.total_bytes, "{info:?}");
    assert!(info.lendable_bytes <= info.free_bytes + info.scrubbing_bytes, "{info:?}");
    let accounts =
        [info.reserved_bytes, info.memory_bytes, info.lendable_bytes, info.damaged_bytes];
    assert_eq!(accounts.iter().sum::<u64>(), info.usable_bytes(), "{info:?}");
}

/// Opens arbitrary bytes as a pool. The bytes may not change if the pool is opened for reading, or
/// if it cannot be opened. A pool that was opened for writing works and can be opened again.
pub(crate) fn pool_open(data: &[u8]) {
    TestPool::with(|test_pool| {
        let (image, path) = (test_pool.image(data), test_pool.path());
        image.to_file(&test_pool.file).unwrap();
        for mode in [OpenMode::Peek, OpenMode::ReadOnly] {
            if let Ok(pool) = Pool::open(&path, mode) {
                assert_adds_up(&pool.info());
                pool.check().unwrap();
            }
        }
        test_pool.assert_unchanged(&image, "looking");
        match Pool::open(&path, OpenMode::ReadWrite) {
            Ok(pool) => use_pool(test_pool, &image, &pool),
            Err(PoolError::Media(error)) => panic!("the media is tmpfs: {error}"),
            Err(_) => return test_pool.assert_unchanged(&image, "a refused open"),
        }
        // The corrections should be permanent.
        let again = Pool::open(&path, OpenMode::ReadWrite).unwrap();
        assert_adds_up(&again.info());
        assert_eq!(again.info().memory_bytes, 0);
        let size_bytes = again.info().total_bytes + 3 * CHUNK_BYTES;
        drop(again);
        if let Ok(pool) = Pool::grow(&path, size_bytes) {
            assert_adds_up(&pool.info());
        }
    });
}

/// Returns true if the fuzzer may have marked the chunk as free, directly, in a transaction or in
/// another table. Free chunks should read as zeros.
fn marked_free(image: &Image, chunk: u32) -> bool {
    let word = |at: u64| u64::from_le_bytes(image.bytes(at));
    let table = offset_of!(SuperblockBytes, chunk_table_offset) as u64;
    word(CHUNK_TABLE_OFFSET + u64::from(chunk) * 16) >> 44 & 0xf == 1
        || word(LOG_OFFSET + offset_of!(LogHeaderBytes, commit) as u64) != 0
        || SUPERBLOCK_OFFSETS.iter().any(|copy| word(copy + table) != CHUNK_TABLE_OFFSET)
}

/// Performs all operations that the pool allows.
fn use_pool(test_pool: &TestPool, before: &Image, pool: &std::sync::Arc<Pool>) {
    assert_adds_up(&pool.info());
    pool.check().unwrap();
    let lent = pool.alloc_memory(CHUNK_BYTES).ok();
    let _ = pool.create_volume("new", VolumeSize::Bytes(CHUNK_BYTES), VolumeFormat::Raw);
    for extent in lent.iter().flatten().filter(|extent| !marked_free(before, extent.start.0)) {
        let image = Image::of_file(&test_pool.file).unwrap();
        assert!(
            image.is_zero(extent.offset_bytes(), extent.len_bytes()),
            "lent memory has old content"
        );
    }
    pool.free_memory(&lent.unwrap_or_default()).unwrap();
    let waiting_bytes = pool.info().scrubbing_bytes;
    assert_eq!(pool.scrub_some(CHUNK_BYTES).unwrap(), waiting_bytes.min(CHUNK_BYTES));
    for volume in pool.volumes() {
        store_in_each_chunk(pool, &volume.name);
        let _ = pool.rename_volume(&volume.name, "renamed");
        let _ = pool.rename_volume("renamed", &volume.name);
        for size in [VolumeSize::Bytes(2 * CHUNK_BYTES), VolumeSize::Remaining] {
            let _ = pool.resize_volume(&volume.name, size, Shrink::Allow);
            assert_adds_up(&pool.info());
        }
        for thin in [true, false] {
            let _ = pool.convert_volume(&volume.name, thin);
            assert_adds_up(&pool.info());
        }
        if pool.open_volume(&volume.name).is_ok() {
            pool.delete_volume(&volume.name).unwrap();
        }
    }
    assert_adds_up(&pool.info());
    assert!(pool.is_writable(), "{:?}", pool.info().latched);
}

/// Stores a word into each chunk of a volume, which fills the holes of a thin volume.
fn store_in_each_chunk(pool: &std::sync::Arc<Pool>, name: &str) {
    let Ok(volume) = pool.open_volume(name) else { return };
    let chunks = volume.size_bytes() / CHUNK_BYTES;
    for chunk in 0..chunks.min(2 * CHUNKS) {
        match volume.store_word(chunk * CHUNK_BYTES, 7) {
            Ok(()) => assert_eq!(volume.load_word(chunk * CHUNK_BYTES).unwrap(), 7),
            Err(MediaError::Full { .. }) => assert!(volume.info().thin),
            Err(error) => panic!("the media is tmpfs: {error}"),
        }
    }
    assert_adds_up(&pool.info());
}

/// Repairs arbitrary bytes as a pool. A dry run should change nothing, and should report the same
/// result as the repair. If no damage remains, the pool should be clean.
pub(crate) fn repair(data: &[u8]) {
    TestPool::with(|test_pool| {
        let (image, path) = (test_pool.image(data), test_pool.path());
        image.to_file(&test_pool.file).unwrap();
        let dry: Result<RepairReport, _> = Pool::repair(&path, true);
        test_pool.assert_unchanged(&image, "a dry run");
        match (dry, Pool::repair(&path, false)) {
            (Ok(dry), Ok(done)) => {
                assert_eq!(dry.left.is_empty(), done.left.is_empty(), "{dry:?} and {done:?}");
                if done.left.is_empty() {
                    drop(Pool::open(&path, OpenMode::ReadWrite).unwrap());
                    let report = Pool::open(&path, OpenMode::ReadOnly).unwrap().check().unwrap();
                    assert!(report.is_clean(), "{report:?} after {done:?}");
                }
            }
            (Err(_), Err(_)) => test_pool.assert_unchanged(&image, "a refused repair"),
            (dry, done) => panic!("{dry:?} and {done:?}"),
        }
    });
}
