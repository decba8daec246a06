//! Tests of pools whose file has lost file system blocks.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use super::*;
use crate::media::Media;
use crate::pool::layout::SUPERBLOCK_OFFSETS;

/// Creates a pool of 32 MiB on a disk. Its volume has data at the start.
fn pool_on_disk() -> (TempDir, PathBuf) {
    let folder = TempDir::new_in(".").unwrap();
    let path = folder.path().join("pool");
    let pool = Pool::create(&path, 32 << 20, 8 << 20).unwrap();
    pool.create_volume("data", VolumeSize::Bytes(8 << 20), VolumeFormat::Raw).unwrap();
    let volume = pool.open_volume("data").unwrap();
    let at = volume.extents()[0].offset_bytes();
    pool.media().store(at, &[0x5a; 4096]).unwrap();
    (folder, path)
}

fn allocated_bytes(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// Returns the number of bytes without blocks according to `findings`.
fn lost_bytes(findings: &[Finding]) -> u64 {
    let lost = |finding: &Finding| match finding {
        Finding::BlocksLost { hole_bytes, shared_bytes } => hole_bytes + shared_bytes,
        _ => 0,
    };
    findings.iter().map(lost).sum()
}

#[test]
fn pool_with_lost_blocks_reports_them_and_gets_new_ones() {
    let (folder, original) = pool_on_disk();
    assert!(allocated_bytes(&original) >= 32 << 20);
    let open = |path: &Path| Pool::open(path, OpenMode::ReadOnly).unwrap();
    assert_eq!(lost_bytes(&open(&original).findings_at_open()), 0);
    let run = |program: &str, arguments: &[&str]| {
        Command::new(program)
            .args(arguments)
            .current_dir(folder.path())
            .status()
            .is_ok_and(|s| s.success())
    };
    assert!(run("cp", &["--sparse=always", "--reflink=never", "pool", "copy"]));
    assert!(run("cp", &["--sparse=never", "--reflink=never", "pool", "dug"]));
    assert!(run("fallocate", &["--dig-holes", "dug"]));
    for name in ["copy", "dug"] {
        let path = folder.path().join(name);
        assert!(allocated_bytes(&path) < 8 << 20, "{name} is not sparse");
        // Opening for reading reports the loss and changes nothing.
        let pool = open(&path);
        let lost = lost_bytes(&pool.findings_at_open());
        assert!(lost > 24 << 20, "{name} lacks {lost}");
        let report = pool.check().unwrap();
        assert!(!report.is_clean() && lost_bytes(&report.pool) == lost, "{:?}", report.pool);
        drop(pool);
        assert!(allocated_bytes(&path) < 8 << 20);
        let pool = Pool::open(&path, OpenMode::ReadWrite).unwrap();
        assert_eq!(lost_bytes(&pool.findings_at_open()), lost, "a VMM logs it");
        assert!(allocated_bytes(&path) >= 32 << 20, "{name} has {}", allocated_bytes(&path));
        let mut bytes = [0; 4096];
        pool.open_volume("data").unwrap().read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x5a; 4096]);
        drop(pool);
        let pool = open(&path);
        assert!(lost_bytes(&pool.findings_at_open()) == 0 && pool.check().unwrap().is_clean());
    }
}

#[test]
fn repair_allocates_lost_blocks() {
    let (folder, original) = pool_on_disk();
    let path = folder.path().join("copy");
    let copied =
        Command::new("cp").arg("--sparse=always").args([&original, &path]).status().unwrap();
    assert!(copied.success() && allocated_bytes(&path) < 8 << 20);
    assert!(
        Pool::repair(&path, true).unwrap().mended.iter().any(|line| line.contains("lacks blocks"))
    );
    assert!(allocated_bytes(&path) < 8 << 20, "a dry run allocates none");
    assert!(Pool::repair(&path, false).unwrap().left.is_empty());
    assert!(allocated_bytes(&path) >= 32 << 20);
}

#[test]
fn thin_pool_has_lost_nothing() {
    let folder = TempDir::new_in(".").unwrap();
    let path = folder.path().join("pool");
    let options =
        CreateOptions { size_bytes: Some(32 << 20), thin: true, ..CreateOptions::default() };
    drop(Pool::create_with(&path, options).unwrap());
    let pool = Pool::open(&path, OpenMode::ReadWrite).unwrap();
    assert_eq!(lost_bytes(&pool.findings_at_open()), 0);
    assert!(allocated_bytes(&path) < 16 << 20);
}

#[test]
fn pool_without_room_for_its_blocks_is_opened_read_only() {
    let folder = TempDir::new_in(".").unwrap();
    let path = folder.path().join("pool");
    let free_bytes =
        super::super::file::free_space::FileSystem::of(&File::open(folder.path()).unwrap())
            .unwrap()
            .free_bytes;
    let size_bytes = (free_bytes + (4 << 30)).next_multiple_of(CHUNK_BYTES);
    let options =
        CreateOptions { size_bytes: Some(size_bytes), thin: true, ..CreateOptions::default() };
    match Pool::create_with(&path, options) {
        Ok(pool) => {
            // Simulates a sparse copy of a pool that is not thin.
            let solid = Superblock { is_thin: false, sequence: 100, ..pool.superblock() };
            mirrored::write(pool.media(), SUPERBLOCK_OFFSETS, &solid.to_bytes()).unwrap();
        }
        Err(PoolError::Size { .. }) => {
            return eprintln!("skipped: files here cannot exceed the free space");
        }
        Err(error) => panic!("{error}"),
    }
    let before = allocated_bytes(&path);
    let text = match Pool::open(&path, OpenMode::ReadWrite) {
        Err(error @ PoolError::BlocksLost { .. }) => {
            let text = foreshore_types::chain(&error);
            let reason = error.source().expect("the file system's reason").to_string();
            assert_eq!(text.matches(&reason).count(), 1, "{text}");
            text
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the open succeeded"),
    };
    for word in ["lacks", "sparse copy", "free", "free more space"] {
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
    assert_eq!(allocated_bytes(&path), before, "no block is allocated");
    let pool = Pool::open(&path, OpenMode::ReadOnly).unwrap();
    assert!(lost_bytes(&pool.findings_at_open()) > free_bytes);
}
