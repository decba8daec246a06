//! Tests of sparse files whose metadata claims many TiB. Checking and repairing them should use
//! little memory.

use std::process::Command;

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::*;
use crate::pool::format::table::{Owner, Slot, encode_owner};
use crate::pool::format::volume_record::VolumeRecord;

const HUGE_BYTES: u64 = 2 << 40;
/// Limit of resident memory. A list with 4 bytes for each chunk takes 4 MiB. The program itself
/// uses about 10 MiB.
const MAX_RESIDENT_BYTES: u64 = 64 << 20;
const POOL_VARIABLE: &str = "PMEM_VOLUME_HUGE_TEST_POOL";

/// Creates a pool that has only superblocks and a log.
fn claim(fixture: &Fixture) -> (fs::File, Superblock) {
    let superblock = create::plan(HUGE_BYTES, 0, Uuid::from_u128(1), 1).unwrap();
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(fixture.path()).unwrap();
    file.set_len(HUGE_BYTES).unwrap();
    for at in layout::SUPERBLOCK_OFFSETS {
        file.write_all_at(superblock.to_bytes().as_bytes(), at).unwrap();
    }
    file.write_all_at(redo_log::empty_header().as_bytes(), superblock.log_offset).unwrap();
    (file, superblock)
}

/// Fills each slot with a volume that claims the size of the whole pool.
fn claim_volumes(file: &fs::File, superblock: &Superblock) {
    for slot in superblock.slots() {
        let record = VolumeRecord {
            sequence: 1,
            slot,
            name: format!("v{}", slot.0).parse().unwrap(),
            uuid: Uuid::nil(),
            format: VolumeFormat::Raw,
            thin: false,
            part: None,
            chunks: superblock.chunks,
            reserve_chunks: superblock.chunks,
            created_unix_s: 1,
        };
        for at in superblock.volume_record_offsets(slot) {
            file.write_all_at(record.to_bytes().as_bytes(), at).unwrap();
        }
    }
}

fn claim_owners(file: &fs::File, superblock: &Superblock, owner: impl Fn(u32) -> Owner) {
    let words =
        (0..superblock.chunks).map(ChunkId).map(|chunk| encode_owner(chunk, owner(chunk.0)));
    let bytes: Vec<u8> = words.flat_map(|word| [word, 0]).flat_map(u64::to_le_bytes).collect();
    file.write_all_at(&bytes, superblock.chunk_table_offset).unwrap();
}

/// Not a test of its own. It performs the operations in a separate process, so that their memory
/// use can be measured.
#[test]
fn process_that_checks_a_huge_pool() {
    let Some(path) = std::env::var_os(POOL_VARIABLE).map(PathBuf::from) else { return };
    for mode in [OpenMode::Peek, OpenMode::ReadOnly] {
        let report = Pool::open(&path, mode).unwrap().check().unwrap();
        assert!(!report.is_clean());
        // Only some findings of each kind are listed.
        assert!(report.pool.len() < 1000, "{} findings", report.pool.len());
    }
    for dry_run in [true, false] {
        let report = Pool::repair(&path, dry_run).unwrap();
        assert!(
            !report.left.is_empty() && report.left.len() < 2000,
            "{} are left",
            report.left.len()
        );
    }
    assert!(Pool::open(&path, OpenMode::ReadWrite).is_err());
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib << 10 < MAX_RESIDENT_BYTES, "it used {peak_kib} KiB");
}

fn assert_takes_little(case: &str, make: impl FnOnce(&fs::File, &Superblock)) {
    let fixture = Fixture::new();
    let (file, superblock) = claim(&fixture);
    make(&file, &superblock);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pool::tests::huge::process_that_checks_a_huge_pool", "--nocapture"])
        .env(POOL_VARIABLE, fixture.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{case}: {}", String::from_utf8_lossy(&child.stderr));
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"), "{case}: nothing was run");
}

#[test]
fn table_in_a_hole_uses_little_memory() {
    assert_takes_little("no owners", |_, _| {});
}

#[test]
fn volumes_without_chunks_use_little_memory() {
    assert_takes_little("volumes", claim_volumes);
}

#[test]
fn chunks_of_missing_slots_use_little_memory() {
    assert_takes_little("slots", |file, superblock| {
        claim_owners(file, superblock, |index| Owner::Volume { slot: Slot(u16::MAX), index });
    });
}

#[test]
fn chunks_with_one_index_use_little_memory() {
    assert_takes_little("indexes", |file, superblock| {
        claim_volumes(file, superblock);
        claim_owners(file, superblock, |_| Owner::Volume { slot: Slot(0), index: 0 });
    });
}
