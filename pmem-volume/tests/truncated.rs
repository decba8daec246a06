//! Tests that truncate the file of an open pool. Every call should return an error, the process
//! should survive, and the file should not change.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pmem_volume::{CHUNK_BYTES, OpenMode, Pool, PoolError, Shrink, VolumeFormat, VolumeSize};

const MIB: u64 = 1 << 20;

/// Returns a folder on tmpfs, and the current folder, which is probably on a disk.
fn folders() -> Vec<PathBuf> {
    vec!["/dev/shm".into(), std::env::current_dir().unwrap()]
}

/// Creates a pool with two volumes and lent memory.
fn new_pool(folder: &Path) -> (Arc<Pool>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let pool = Pool::create(&folder.path().join("pool"), 64 * MIB, 0).unwrap();
    pool.create_volume("btt", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
    pool.create_volume("raw", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    (pool, folder)
}

type Call = fn(&Arc<Pool>) -> Result<(), PoolError>;

/// Calls that access the tables of the pool. Each is the first call on a separate pool.
const CALLS: [(&str, Call); 6] = [
    ("lending", |pool| pool.alloc_memory(2 * MIB).map(drop)),
    ("making a raw volume", |pool| {
        pool.create_volume("c", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).map(drop)
    }),
    ("making a BTT volume", |pool| {
        pool.create_volume("c", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).map(drop)
    }),
    ("deleting", |pool| pool.delete_volume("raw")),
    ("renaming", |pool| pool.rename_volume("raw", "new").map(drop)),
    ("resizing", |pool| {
        pool.resize_volume("raw", VolumeSize::Bytes(6 * MIB), Shrink::Refuse).map(drop)
    }),
];

/// Truncates the file, calls `call`, and checks the state of the pool.
fn assert_fails(
    pool: &Arc<Pool>,
    name: &str,
    cut_to_bytes: u64,
    call: impl FnOnce(&Arc<Pool>) -> Result<(), PoolError>,
) {
    let file: File = OpenOptions::new().write(true).open(pool.path()).unwrap();
    file.set_len(cut_to_bytes).unwrap();
    let error = call(pool).unwrap_err();
    let case = format!("{name}, {}, cut to {cut_to_bytes:#x}: {error}", pool.durability().name());
    assert!(matches!(error, PoolError::Media(_)), "{case}");
    assert!(!pool.is_writable(), "{case}");
    let cause = pool.info().latched.expect(&case);
    assert!(
        cause.contains("the file was truncated") || cause.contains("failed to fill"),
        "{case}: {cause}"
    );
    assert!(matches!(pool.alloc_memory(2 * MIB), Err(PoolError::Latched { .. })), "{case}");
    assert_eq!(file.metadata().unwrap().len(), cut_to_bytes, "{case}");
}

#[test]
fn call_on_a_pool_without_its_tables_fails_and_the_process_survives() {
    for folder in folders() {
        // Truncates the file to nothing, then without the chunk table and half of the volume table,
        // and then without only the chunk table.
        for cut_to_bytes in [0, 1 << 20, CHUNK_BYTES] {
            for (name, call) in CALLS {
                let renames = matches!(name, "renaming");
                if cut_to_bytes == CHUNK_BYTES && renames {
                    continue;
                }
                let (pool, _folder) = new_pool(&folder);
                assert_fails(&pool, name, cut_to_bytes, call);
            }
            let (pool, _folder) = new_pool(&folder);
            let lent = pool.alloc_memory(8 * MIB).unwrap();
            assert_fails(&pool, "taking back", cut_to_bytes, |pool| pool.free_memory(&lent));
        }
    }
}

/// A check changes nothing, so the pool remains writable. The next call that needs its tables
/// fails.
#[test]
fn check_reports_the_truncation_without_changes() {
    for folder in folders() {
        let (pool, _folder) = new_pool(&folder);
        OpenOptions::new().write(true).open(pool.path()).unwrap().set_len(0).unwrap();
        let error = pool.check().unwrap_err();
        assert!(matches!(error, PoolError::Media(_)), "{error}");
        assert!(pool.is_writable() && pool.info().latched.is_none());
        assert_fails(&pool, "lending after a check", 0, |pool| {
            pool.alloc_memory(2 * MIB).map(drop)
        });
    }
}

#[test]
fn truncated_chunks_are_not_freed_and_the_file_is_not_lengthened() {
    for folder in folders() {
        let (pool, _folder) = new_pool(&folder);
        let lent = pool.alloc_memory(8 * MIB).unwrap();
        let first = lent.iter().map(|extent| extent.offset_bytes()).min().unwrap();
        let free_bytes = pool.info().free_bytes;
        pool.free_memory(&lent).unwrap();
        assert_fails(&pool, "erasing", first, |pool| pool.scrub_all());
        assert_eq!(pool.info().free_bytes, free_bytes);
    }
}

#[test]
fn flush_of_a_truncated_volume_fails() {
    let (pool, _folder) = new_pool(&std::env::current_dir().unwrap());
    if pool.durability() != pmem_volume::Durability::PageCache {
        eprintln!("skipped: files are {}, so a flush does nothing", pool.durability().name());
        return;
    }
    let volume = pool.open_volume("raw").unwrap();
    let cut_to_bytes = volume.extents()[0].offset_bytes();
    assert_fails(&pool, "flushing", cut_to_bytes, |_| volume.flush_guest_stores(0..4096));
}

#[test]
fn pool_open_for_reading_reports_the_truncation() {
    for folder in folders() {
        let (pool, _folder) = new_pool(&folder);
        let path = pool.path().to_owned();
        drop(pool);
        let pool = Pool::open(&path, OpenMode::ReadOnly).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(CHUNK_BYTES).unwrap();
        assert!(matches!(pool.check(), Err(PoolError::Media(_))));
        assert!(matches!(Pool::open(&path, OpenMode::Peek), Err(PoolError::Truncated { .. })));
    }
}
