//! Tests of pools through the public interface.

mod accounts;
mod bad_input;
mod blocks;
pub(crate) mod campaign;
mod crash;
mod crash_each;
mod crash_grow;
mod crash_kill;
mod crash_lost_words;
mod crash_random;
mod crash_repair;
mod crash_resize;
mod crash_split;
mod crash_thin;
mod damage;
mod devices;
mod discard_damaged;
mod fields;
mod fragmentation;
mod free_content;
mod golden;
mod grow_open;
mod hooked;
mod hostile;
mod huge;
mod injected_bugs;
mod latch;
mod model;
mod persisted_ranges;
mod progress;
mod recall;
mod repair;
mod repair_thin;
mod reserve;
mod scrub;
mod slow;
mod thin;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use super::file::open_steps;
use super::format::{mirrored, table, volume_record};
use super::maintenance::grow;
use super::*;

const MIB: u64 = 1 << 20;

/// Pool on media other than a file.
type OtherPool = Pool<Box<dyn Media>>;
type OtherVolume = Volume<Box<dyn Media>>;

/// Folder on tmpfs for a pool.
struct Fixture {
    folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { folder: TempDir::new_in("/dev/shm").unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("pool")
    }

    fn create(&self, size_bytes: u64, reserve_bytes: u64) -> Arc<Pool> {
        Pool::create(&self.path(), size_bytes, reserve_bytes).unwrap()
    }

    fn open(&self) -> Arc<Pool> {
        Pool::open(&self.path(), OpenMode::ReadWrite).unwrap()
    }

    fn open_error(&self, mode: OpenMode) -> PoolError {
        let before = self.image();
        let error = Pool::open(&self.path(), mode).unwrap_err();
        assert!(before == self.image(), "a refused open changed the media");
        error
    }

    /// Returns the state of the file that tests compare: metadata, length and number of blocks.
    fn image(&self) -> (Vec<u8>, u64, u64) {
        let file = fs::File::open(self.path()).unwrap();
        let metadata = file.metadata().unwrap();
        let mut bytes = vec![0; metadata.len().min(4 * MIB) as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        (bytes, metadata.len(), metadata.blocks())
    }

    fn check(&self) -> CheckReport {
        Pool::open(&self.path(), OpenMode::ReadOnly).unwrap().check().unwrap()
    }

    fn overwrite(&self, offset_bytes: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(self.path()).unwrap();
        file.write_all_at(bytes, offset_bytes).unwrap();
    }

    /// Removes the copy of the owner from a wear word. The first programs wrote none.
    fn remove_copy(&self, chunk: u32) {
        let at = repair::entry(chunk) + 8;
        let file = fs::File::open(self.path()).unwrap();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        let wear = table::decode_wear(ChunkId(chunk), u64::from_le_bytes(word)).unwrap();
        let without = table::WearWord { owner: None, ..wear };
        self.overwrite(at, &table::encode_wear(ChunkId(chunk), without).to_le_bytes());
    }

    /// Destroys an owner word and removes its copy.
    fn lose_owner(&self, chunk: u32) {
        self.overwrite(repair::entry(chunk), &[0; 8]);
        self.remove_copy(chunk);
    }

    fn flip(&self, offset_bytes: u64, bit: u8) {
        let file = OpenOptions::new().read(true).write(true).open(self.path()).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset_bytes).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << bit], offset_bytes).unwrap();
    }
}

fn fill(pool: &Pool, extent: Extent, byte: u8) {
    pool.file()
        .write_all_at(&vec![byte; extent.len_bytes() as usize], extent.offset_bytes())
        .unwrap();
}

fn is_zero(pool: &Pool, extent: Extent) -> bool {
    let mut bytes = vec![0xff; extent.len_bytes() as usize];
    pool.file().read_exact_at(&mut bytes, extent.offset_bytes()).unwrap();
    bytes.iter().all(|b| *b == 0)
}

fn assert_states_add_up(info: &PoolInfo) {
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
}

/// Checks that the usable bytes are reserved, lent, lendable or damaged. Not valid after a failed
/// change.
fn assert_accounts_add_up(info: &PoolInfo) {
    let accounts =
        [info.reserved_bytes, info.memory_bytes, info.lendable_bytes, info.damaged_bytes];
    assert_eq!(accounts.iter().sum::<u64>(), info.usable_bytes(), "{info:?}");
}

#[test]
fn new_pool_is_free_except_for_its_metadata() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 16 * MIB);
    let info = pool.info();
    assert_states_add_up(&info);
    assert_eq!(
        (info.total_bytes, info.metadata_bytes, info.free_bytes),
        (64 * MIB, 4 * MIB, 60 * MIB)
    );
    assert_eq!((info.reserve_bytes, info.lendable_bytes), (16 * MIB, 44 * MIB));
    assert_eq!(info.durability, Durability::Volatile);
    assert_eq!(pool.free_space().largest_free_extent_bytes, 32 * MIB);
    drop(pool);
    assert!(fixture.check().is_clean());
    assert_eq!(fs::metadata(fixture.path()).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn memory_is_lent_in_large_extents_that_merge_again() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let extents = pool.alloc_memory(22 * MIB).unwrap();
    let orders: Vec<_> = extents.iter().map(|e| e.order).collect();
    assert_eq!(orders, [3, 1, 0]);
    assert!(extents.iter().all(|e| is_zero(&pool, *e)));
    assert_eq!(pool.info().memory_bytes, 22 * MIB);
    assert_states_add_up(&pool.info());
    pool.free_memory(&extents).unwrap();
    assert_states_add_up(&pool.info());
    assert_eq!((pool.info().scrubbing_bytes, pool.info().lendable_bytes), (22 * MIB, 60 * MIB));
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().free_bytes, 60 * MIB);
    assert_eq!(pool.free_space().longest_free_run_bytes, 60 * MIB);
}

#[test]
fn part_of_an_extent_can_be_returned() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let extent = pool.alloc_memory(16 * MIB).unwrap()[0];
    let part = Extent::chunk(ChunkId(extent.start.0 + 3));
    pool.free_memory(&[part]).unwrap();
    assert_eq!(pool.info().memory_bytes, 14 * MIB);
    let error = pool.free_memory(&[extent]).unwrap_err();
    assert!(matches!(error, PoolError::NotLent { .. }), "{error}");
    assert_eq!(pool.info().memory_bytes, 14 * MIB, "a refused free changes nothing");
    let rest: Vec<_> = extent.run().ids().map(Extent::chunk).filter(|e| *e != part).collect();
    pool.free_memory(&rest).unwrap();
    assert_eq!(pool.info().memory_bytes, 0);
}

#[test]
fn chunks_that_are_not_lent_cannot_be_returned() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let lent = pool.alloc_memory(2 * MIB).unwrap()[0];
    let metadata = Extent::chunk(ChunkId(0));
    let outside = Extent::chunk(ChunkId(32));
    let far_outside = Extent { start: ChunkId(u32::MAX), order: 10 };
    let too_large = Extent { start: ChunkId(2), order: 200 };
    for wrong in [
        vec![metadata],
        vec![outside],
        vec![far_outside],
        vec![too_large],
        vec![lent, lent],
        vec![lent, metadata],
    ] {
        assert!(matches!(pool.free_memory(&wrong), Err(PoolError::NotLent { .. })), "{wrong:?}");
    }
    pool.free_memory(&[lent]).unwrap();
    assert!(matches!(pool.free_memory(&[lent]), Err(PoolError::NotLent { .. })));
}

#[test]
fn returned_memory_is_erased_and_its_blocks_are_freed() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let blocks_before = pool.file().metadata().unwrap().blocks();
    let extents = pool.alloc_memory(8 * MIB).unwrap();
    extents.iter().for_each(|e| fill(&pool, *e, 0xc5));
    assert!(pool.file().metadata().unwrap().blocks() >= blocks_before + 8 * MIB / 512);
    pool.free_memory(&extents).unwrap();
    assert!(extents.iter().all(|e| !is_zero(&pool, *e)), "erased before a scrub was requested");
    pool.scrub_all().unwrap();
    assert_eq!(pool.scrubbed_bytes(), 8 * MIB);
    assert_eq!(pool.file().metadata().unwrap().blocks(), blocks_before);
    assert!(extents.iter().all(|e| is_zero(&pool, *e)));
}

#[test]
fn strg_is_never_lent_but_usable_by_volumes() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 20 * MIB);
    let error = pool.alloc_memory(42 * MIB).unwrap_err();
    let PoolError::PoolFull { requested_bytes, free_bytes, withheld_bytes } = error else {
        panic!("{error}")
    };
    assert_eq!((requested_bytes, free_bytes, withheld_bytes), (42 * MIB, 60 * MIB, 20 * MIB));
    let memory = pool.alloc_memory(40 * MIB).unwrap();
    let error = pool.alloc_memory(2 * MIB).unwrap_err();
    let PoolError::PoolFull { withheld_bytes, .. } = error else { panic!("{error}") };
    assert_eq!((pool.info().lendable_bytes, withheld_bytes), (0, 20 * MIB));
    pool.create_volume("data", VolumeSize::Bytes(20 * MIB), VolumeFormat::Raw).unwrap();
    pool.free_memory(&memory).unwrap();
    // The bytes of volumes are part of STRG.
    assert_eq!(pool.info().lendable_bytes, 40 * MIB);
    assert_states_add_up(&pool.info());
    pool.delete_volume("data").unwrap();
    pool.scrub_all().unwrap();
    let info = pool.info();
    assert_eq!((info.free_storage_bytes(), info.free_migrate_bytes()), (20 * MIB, 40 * MIB));
}

#[test]
fn memory_lent_at_a_crash_is_erased_and_freed_after_the_next_open() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let extents = pool.alloc_memory(10 * MIB).unwrap();
    extents.iter().for_each(|e| fill(&pool, *e, 0x77));
    // The pool is dropped without returning memory, as when a process is killed.
    drop(pool);
    let report = fixture.check();
    assert_eq!(report.pool, [Finding::StillLent { chunks: 5 }]);
    assert!(report.is_clean(), "a crash leaves no damage");
    let pool = fixture.open();
    assert_eq!((pool.info().memory_bytes, pool.info().scrubbing_bytes), (0, 10 * MIB));
    assert!(extents.iter().all(|e| !is_zero(&pool, *e)), "the open waited for the erasure");
    drop(pool);
    assert_eq!(
        fixture.check().pool,
        [Finding::Unscrubbed { chunks: 5 }],
        "marked again with another mark"
    );
    let pool = fixture.open();
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().free_bytes, 60 * MIB);
    assert!(extents.iter().all(|e| is_zero(&pool, *e)), "former memory is unreadable");
    drop(pool);
    assert_eq!(fixture.check().pool, []);
}

#[test]
fn volume_keeps_its_content_and_its_place() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let made = pool.create_volume("daten", VolumeSize::Bytes(6 * MIB), VolumeFormat::Raw).unwrap();
    let volume = pool.open_volume("daten").unwrap();
    let extents = volume.extents().to_vec();
    assert_eq!(extents.iter().map(|e| e.len_bytes()).sum::<u64>(), 6 * MIB);
    for extent in &extents {
        pool.file()
            .write_all_at(&vec![0x21; extent.len_bytes() as usize], extent.offset_bytes())
            .unwrap();
    }
    volume.flush_guest_stores(0..6 * MIB).unwrap();
    drop((volume, pool));
    let pool = fixture.open();
    assert_eq!(pool.volumes(), [made]);
    let volume = pool.open_volume("daten").unwrap();
    assert_eq!(volume.extents(), extents);
    let mut bytes = vec![0; 6 * MIB as usize];
    Media::read(&volume, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0x21));
}

#[test]
fn deleted_volume_is_erased_and_its_name_is_reusable() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    let volume = pool.open_volume("a").unwrap();
    let place = volume.extents()[0];
    pool.file().write_all_at(&vec![9; 4 * MIB as usize], place.offset_bytes()).unwrap();
    assert!(matches!(pool.delete_volume("a"), Err(PoolError::VolumeInUse { .. })));
    assert!(matches!(pool.open_volume("a"), Err(PoolError::VolumeInUse { .. })));
    drop(volume);
    pool.delete_volume("a").unwrap();
    assert!(matches!(pool.delete_volume("a"), Err(PoolError::NoSuchVolume { .. })));
    pool.scrub_all().unwrap();
    assert!(place.run.extents().all(|e| is_zero(&pool, e)));
    assert_eq!(pool.info().free_bytes, 60 * MIB);
    pool.create_volume("a", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    drop(pool);
    assert_eq!(fixture.check().pool, []);
    assert_eq!(fixture.open().volumes().len(), 1);
}

#[test]
fn renamed_volume_has_only_its_new_name() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let made = pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    pool.create_volume("b", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let place = pool.open_volume("a").unwrap().extents().to_vec();
    let renamed = pool.rename_volume("a", "größe").unwrap();
    assert_eq!(renamed, VolumeInfo { name: "größe".into(), ..made });
    assert!(matches!(pool.open_volume("a"), Err(PoolError::NoSuchVolume { .. })));
    drop(pool);
    assert_eq!(fixture.check().pool, []);
    let pool = fixture.open();
    assert_eq!(pool.volumes()[1], renamed);
    assert_eq!(pool.open_volume("größe").unwrap().extents(), place);

    let before = fixture.image();
    assert!(matches!(pool.rename_volume("größe", "b"), Err(PoolError::VolumeExists { .. })));
    assert!(matches!(pool.rename_volume("b", "b"), Err(PoolError::SameName { .. })));
    assert!(matches!(pool.rename_volume("c", "d"), Err(PoolError::NoSuchVolume { .. })));
    assert!(matches!(pool.rename_volume("b", ""), Err(PoolError::Name(_))));
    assert!(matches!(pool.rename_volume("b", &"x".repeat(65)), Err(PoolError::Name(_))));
    let volume = pool.open_volume("b").unwrap();
    assert!(matches!(pool.rename_volume("b", "d"), Err(PoolError::VolumeInUse { .. })));
    assert!(before == fixture.image());
    drop(volume);
    let reader = Pool::open(&fixture.path(), OpenMode::Peek).unwrap();
    assert!(matches!(reader.rename_volume("b", "d"), Err(PoolError::ReadOnly { .. })));
}

#[test]
fn remaining_uses_all_free_chunks() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 8 * MIB);
    let volume = pool.create_volume("all", VolumeSize::Remaining, VolumeFormat::Btt).unwrap();
    assert_eq!(volume.size_bytes, 60 * MIB);
    assert_eq!(volume.extents, 1);
    let error = pool.create_volume("none", VolumeSize::Remaining, VolumeFormat::Raw).unwrap_err();
    assert!(matches!(error, PoolError::PoolFull { free_bytes: 0, .. }), "{error}");
    assert!(pool.open_volume("all").unwrap().check_btt().unwrap().is_clean());
}

#[test]
fn fragmented_volume_is_read_across_its_extents() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let memory = pool.alloc_memory(60 * MIB).unwrap();
    let every_other: Vec<_> = memory
        .iter()
        .flat_map(|e| e.run().ids())
        .filter(|c| c.0 % 2 == 0)
        .map(Extent::chunk)
        .collect();
    pool.free_memory(&every_other).unwrap();
    let info = pool.create_volume("bits", VolumeSize::Remaining, VolumeFormat::Btt).unwrap();
    assert_eq!(info.extents, 15);
    let volume = pool.open_volume("bits").unwrap();
    assert!(volume.check_btt().unwrap().is_clean());
    for extent in volume.extents() {
        let mark = [extent.index as u8; 16];
        pool.file().write_all_at(&mark, extent.offset_bytes() + extent.len_bytes() - 16).unwrap();
        pool.file().write_all_at(&mark, extent.offset_bytes()).unwrap();
    }
    let mut across = [0; 32];
    Media::read(&volume, 4 * CHUNK_BYTES - 16, &mut across).unwrap();
    assert_eq!(across[..16], [3; 16]);
    assert_eq!(across[16..], [4; 16]);
}

#[test]
fn wrong_sizes_and_names_are_refused_without_changes() {
    let fixture = Fixture::new();
    for (size, strg) in [
        (0, 0),
        (MIB, 0),
        (6 * MIB, 0),
        (MAX_POOL_BYTES + CHUNK_BYTES, 0),
        (64 * MIB, MIB),
        (64 * MIB, 62 * MIB),
    ] {
        let error = Pool::create(&fixture.path(), size, strg).unwrap_err();
        assert!(matches!(error, PoolError::Size { .. }), "{size} {strg}: {error}");
    }
    let error = Pool::create(&fixture.path(), 1 << 45, 0).unwrap_err();
    assert!(matches!(error, PoolError::FileSystemFull { .. }), "{error}");
    assert_eq!(fs::read_dir(fixture.folder.path()).unwrap().count(), 0, "no file remains");

    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("a", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let before = fixture.image();
    let refused = |name: &str, bytes| {
        pool.create_volume(name, VolumeSize::Bytes(bytes), VolumeFormat::Raw).unwrap_err()
    };
    assert!(matches!(refused("b", 0), PoolError::Size { .. }));
    assert!(matches!(refused("b", 3 * MIB), PoolError::Size { .. }));
    assert!(matches!(refused("b", 60 * MIB), PoolError::PoolFull { .. }));
    assert!(matches!(refused("b", u64::MAX - CHUNK_BYTES + 1), PoolError::PoolFull { .. }));
    assert!(matches!(refused("a", 2 * MIB), PoolError::VolumeExists { .. }));
    assert!(matches!(refused("a b", 2 * MIB), PoolError::Name(_)));
    assert!(
        matches!(pool.open_volume("c"), Err(PoolError::NoSuchVolume { existing, .. }) if existing == ["a"])
    );
    assert!(matches!(pool.alloc_memory(0), Err(PoolError::Size { .. })));
    assert!(matches!(pool.alloc_memory(MIB), Err(PoolError::Size { .. })));
    assert!(matches!(
        pool.alloc_memory(u64::MAX - CHUNK_BYTES + 1),
        Err(PoolError::PoolFull { .. })
    ));
    let error =
        pool.create_volume("b", VolumeSize::Bytes(16 * MIB), VolumeFormat::Btt).unwrap_err();
    assert!(matches!(error, PoolError::Btt(_)), "{error}");
    assert!(before == fixture.image());
}

#[test]
fn pool_is_never_created_over_an_existing_file() {
    let fixture = Fixture::new();
    fs::write(fixture.path(), b"precious").unwrap();
    let error = Pool::create(&fixture.path(), 64 * MIB, 0).unwrap_err();
    assert!(matches!(error, PoolError::AlreadyExists { .. }), "{error}");
    assert_eq!(fs::read(fixture.path()).unwrap(), b"precious");
}

#[test]
fn non_pool_is_refused_by_kind() {
    let fixture = Fixture::new();
    assert!(matches!(
        Pool::open(&fixture.path(), OpenMode::ReadOnly),
        Err(PoolError::Missing { .. })
    ));
    assert!(matches!(
        Pool::open(fixture.folder.path(), OpenMode::ReadOnly),
        Err(PoolError::NotAFile { kind: "a directory", .. })
    ));
}

#[test]
fn error_of_a_pool_in_use_names_the_holder() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
        let error = Pool::open(&fixture.path(), mode).unwrap_err();
        let PoolError::InUse { holder, .. } = error else { panic!("{error}") };
        assert_eq!(holder.pid, Some(std::process::id()));
    }
    let peek = Pool::open(&fixture.path(), OpenMode::Peek).unwrap();
    pool.alloc_memory(8 * MIB).unwrap();
    let later = Pool::open(&fixture.path(), OpenMode::Peek).unwrap();
    assert_eq!((peek.info().memory_bytes, later.info().memory_bytes), (0, 8 * MIB));
    assert!(matches!(later.alloc_memory(2 * MIB), Err(PoolError::ReadOnly { .. })));
    assert_eq!(later.holder().unwrap().pid, Some(std::process::id()));
    drop(pool);
    assert_eq!(later.holder(), None);
    fixture.open();
}
