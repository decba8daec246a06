//! Tests of files that are not pools, or no longer are. Each kind should cause a specific error
//! with a remedy, and should not be changed.

use super::damage::with_superblock;
use super::*;
use crate::btt;
use crate::media::MemoryMedia;

const POOL_BYTES: u64 = 16 * MIB;

/// Returns all bytes and properties of the file.
fn whole(fixture: &Fixture) -> (Vec<u8>, (Vec<u8>, u64, u64)) {
    (fs::read(fixture.path()).unwrap(), fixture.image())
}

/// Checks that every operation on the path is refused with the same words and changes nothing.
fn refused(fixture: &Fixture, case: &str, words: &[&str]) {
    let before = whole(fixture);
    let path = fixture.path();
    let open = |mode| Pool::open(&path, mode).map(drop).unwrap_err().to_string();
    let errors = [
        open(OpenMode::ReadWrite),
        open(OpenMode::ReadOnly),
        open(OpenMode::Peek),
        Pool::grow(&path, 2 * POOL_BYTES).map(drop).unwrap_err().to_string(),
        Pool::repair(&path, true).unwrap_err().to_string(),
        Pool::repair(&path, false).unwrap_err().to_string(),
    ];
    for error in errors {
        assert!(error.contains("nothing was changed"), "{case}: {error}");
        for word in words {
            assert!(error.contains(word), "{case}: {error:?} lacks {word:?}");
        }
    }
    assert!(before == whole(fixture), "{case}: the file has changed");
}

/// Returns the start of an ext4 file system as mke2fs writes it: block size, inodes, magic, state.
fn ext4_head() -> Vec<u8> {
    let mut head = vec![0; 4 * MIB as usize];
    head[1024..1032].copy_from_slice(&[0, 0, 1, 0, 0, 0, 4, 0]);
    head[1080..1084].copy_from_slice(&[0x53, 0xef, 1, 0]);
    head[8192..16384].fill(0xff);
    head
}

/// Returns the bytes of a BTT volume that is not in a pool.
fn btt_raw() -> Vec<u8> {
    let media = MemoryMedia::new(18 * MIB);
    btt::Layout::new(18 * MIB, btt::SECTOR_BYTES, uuid::Uuid::from_u128(3))
        .unwrap()
        .format(&media)
        .unwrap();
    media.to_bytes()
}

#[test]
fn other_files_are_identified_and_unchanged() {
    let text = "A quick brown fox jumps over the lazy dog.\n".repeat(100_000).into_bytes();
    let xfs = [&b"XFSB"[..], &[0x10; 8192]].concat();
    let ones = vec![0xff; POOL_BYTES as usize];
    for (case, bytes, words) in [
        ("nothing", vec![], "it has 0 bytes"),
        ("one byte", vec![b'F'], "it has 1 bytes"),
        ("zeros", vec![0; POOL_BYTES as usize], "starts with zeros"),
        ("ones", ones, "no superblock"),
        ("text", text, "no superblock"),
        ("ext4", ext4_head(), "ext4 file system"),
        ("XFS", xfs, "an XFS file system"),
        ("a BTT without its pool", btt_raw(), "starts with zeros"),
        ("a program", fs::read("/proc/self/exe").unwrap(), "no superblock"),
    ] {
        let fixture = Fixture::new();
        fs::write(fixture.path(), bytes).unwrap();
        refused(&fixture, case, &["not a pool: ", words]);
    }
}

#[test]
fn truncated_or_lengthened_pool_is_refused_and_unchanged() {
    let fixture = Fixture::new();
    drop(fixture.create(POOL_BYTES, 0));
    let good = fs::read(fixture.path()).unwrap();
    let cuts = [
        4096,
        4097,
        64 << 10,
        MIB,
        2 * MIB - 1,
        2 * MIB,
        4 * MIB,
        POOL_BYTES - 4096,
        POOL_BYTES - 1,
    ];
    for bytes in cuts {
        fs::write(fixture.path(), &good[..bytes as usize]).unwrap();
        let numbers = [&*format!("has {bytes} bytes"), "16777216", "cut short", "Restore"];
        refused(&fixture, &format!("cut to {bytes}"), &numbers);
    }
    for bytes in [0, 1, 4095] {
        fs::write(fixture.path(), &good[..bytes]).unwrap();
        refused(&fixture, &format!("cut to {bytes}"), &["not a pool: "]);
    }
    for more in [1, 4096, CHUNK_BYTES] {
        let mut bytes = good.clone();
        bytes.resize(good.len() + more as usize, 0x5a);
        fs::write(fixture.path(), bytes).unwrap();
        refused(&fixture, &format!("{more} bytes longer"), &["16777216", "truncate -s 16777216"]);
    }
    // Pool at a wrong offset. Either a header precedes it, or its first part is missing.
    fs::write(fixture.path(), [&[0; 512], &good[..]].concat()).unwrap();
    refused(&fixture, "shifted", &["not a pool: "]);
    fs::write(fixture.path(), &good).unwrap();
    assert!(fixture.check().is_clean());
}

#[test]
fn error_of_other_versions_and_features_names_the_program() {
    let fixture = Fixture::new();
    drop(fixture.create(POOL_BYTES, 0));
    with_superblock(&fixture, |s| s.version.set(2));
    refused(&fixture, "newer", &["format version 2", "supports version 1", "newer program"]);
    with_superblock(&fixture, |s| s.version.set(0));
    refused(&fixture, "older", &["format version 0", "supports version 1", "older program"]);
    with_superblock(&fixture, |s| {
        s.version.set(1);
        s.features_incompatible.set(1 << 63);
    });
    refused(&fixture, "features", &["0x8000000000000000", "newer program"]);
    with_superblock(&fixture, |s| {
        s.features_incompatible.set(0);
        s.chunk_bytes.set(4096);
    });
    refused(&fixture, "invalid content", &["invalid content", "Restore"]);
}

#[test]
fn errors_of_names_and_sizes_have_the_rule() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("a", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let before = whole(&fixture);
    let assert_text = |error: PoolError, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
    };
    let create = |name: &str, size_bytes| {
        pool.create_volume(name, VolumeSize::Bytes(size_bytes), VolumeFormat::Raw).unwrap_err()
    };
    assert_text(create("", 2 * MIB), &["must not be empty"]);
    assert_text(create(&"ä".repeat(33), 2 * MIB), &["66 bytes", "the maximum is 64"]);
    assert_text(create("a/b", 2 * MIB), &["'/'", "use letters, digits"]);
    assert_text(create("a\0b", 2 * MIB), &["'\\0'", "use letters, digits"]);
    assert_text(create("a", 2 * MIB), &["\"a\"", "already exists", "choose another name"]);
    assert_text(pool.rename_volume("a", "a").unwrap_err(), &["already has that name"]);
    for size_bytes in [0, 1, 4096, 2 * MIB - 1, 2 * MIB + 1, 3 * MIB] {
        assert_text(
            create("b", size_bytes),
            &["volume size", &size_bytes.to_string(), "multiple of 2 MiB"],
        );
        let error = pool.alloc_memory(size_bytes).unwrap_err();
        assert_text(error, &["memory size", &size_bytes.to_string(), "multiple of 2 MiB"]);
    }
    assert_text(create("b", 64 * MIB), &["the pool is full", "64 MiB requested", "58 MiB free"]);
    assert!(before == whole(&fixture));
}
