//! Golden image of the format. Pools of this version must be readable forever, and the format must
//! not change by accident.
//!
//! The image is stored as text. To show the changes, run the test with `PMEM_VOLUME_WRITE_GOLDEN=1`
//! and compare the files. If the format has changed, its version must change too, unless readers of
//! this version ignore the difference.

use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::btt;
use crate::media::MemoryMedia;
use crate::pool::format::superblock::Superblock;
use crate::pool::format::table::{Owner, Slot};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::layout::SuperblockBytes;
use crate::test_image::{from_text, to_text};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/pool/tests/pool-v1.golden");
const POOL_BYTES: u64 = 32 * MIB;

/// Builds a pool with lent memory, a chunk that waits to be scrubbed, a retired chunk, a BTT volume
/// and a raw one.
fn build() -> MemoryMedia {
    let media = MemoryMedia::new(POOL_BYTES);
    let superblock =
        create::plan(POOL_BYTES, 4 * MIB, Uuid::from_u128(0x0123_4567), 1_800_000_000).unwrap();
    create::write_empty_pool(&media, &superblock).unwrap();
    let table = ChunkTable::new(&superblock);
    let volume = |slot, name: &str, format, chunks| VolumeRecord {
        sequence: 1,
        slot: Slot(slot),
        name: name.parse().unwrap(),
        uuid: Uuid::from_u128(0x89ab_cdef + u128::from(slot)),
        format,
        thin: false,
        part: None,
        chunks,
        created_unix_s: 1_800_000_001,
    };
    let (first, second) =
        (volume(0, "data", VolumeFormat::Btt, 9), volume(1, "größe", VolumeFormat::Raw, 1));
    let owners = (2..11)
        .map(|chunk| (chunk, Owner::Volume { slot: Slot(0), index: chunk - 2 }))
        .chain([(11, Owner::Volume { slot: Slot(1), index: 0 })])
        .chain([(12, Owner::Memory), (13, Owner::Scrub), (14, Owner::Retired)]);
    for (chunk, owner) in owners {
        table.set_owner(&media, ChunkId(chunk), owner).unwrap();
        table.set_wear(&media, ChunkId(chunk), chunk * 100).unwrap();
    }
    for record in [&first, &second] {
        mirrored::write(&media, superblock.volume_record_offsets(record.slot), &record.to_bytes())
            .unwrap();
    }
    let part = MemoryMedia::new(first.size_bytes());
    btt::Layout::new(first.size_bytes(), btt::SECTOR_BYTES, first.uuid)
        .unwrap()
        .format(&part)
        .unwrap();
    media.store(2 * CHUNK_BYTES, &part.to_bytes()).unwrap();
    media
}

#[test]
fn this_version_writes_the_golden_image() {
    let text = to_text(&build().to_bytes());
    if std::env::var_os("PMEM_VOLUME_WRITE_GOLDEN").is_some() {
        fs::write(GOLDEN, &text).unwrap();
    }
    assert!(fs::read_to_string(GOLDEN).unwrap() == text, "the format has changed");
}

#[test]
fn this_version_reads_the_golden_image_and_an_older_one() {
    let mut bytes = from_text(&fs::read_to_string(GOLDEN).unwrap(), POOL_BYTES);
    read_golden(&bytes);
    // The first programs for version 1 wrote no MBR.
    for at in crate::pool::layout::SUPERBLOCK_OFFSETS {
        let copy = &mut bytes[at as usize..][..size_of::<SuperblockBytes>()];
        let mut superblock = SuperblockBytes::read_from_bytes(copy).unwrap();
        (superblock.mbr_id, superblock.mbr_signature) = ([0; 4], [0; 2]);
        mirrored::seal(&mut superblock);
        copy.copy_from_slice(superblock.as_bytes());
    }
    read_golden(&bytes);
}

fn read_golden(bytes: &[u8]) {
    let superblock =
        create::plan(POOL_BYTES, 4 * MIB, Uuid::from_u128(0x0123_4567), 1_800_000_000).unwrap();
    for at in crate::pool::layout::SUPERBLOCK_OFFSETS {
        let copy = &bytes[at as usize..][..size_of::<SuperblockBytes>()];
        let copy = SuperblockBytes::read_from_bytes(copy).unwrap();
        assert_eq!(Superblock::parse(&copy), Ok(superblock.clone()));
    }
    let open = |mode| {
        let media: Box<dyn Media> = Box::new(MemoryMedia::from_bytes(bytes));
        Pool::from_media("golden".into(), mode, media, superblock.clone(), vec![]).unwrap()
    };
    let pool = open(OpenMode::ReadOnly);
    let report = pool.check().unwrap();
    assert_eq!(report.pool, [Finding::StillLent { chunks: 1 }, Finding::Unscrubbed { chunks: 1 }]);
    assert!(report.is_clean());
    let volumes: Vec<_> =
        pool.volumes().into_iter().map(|v| (v.name, v.size_bytes, v.format)).collect();
    assert_eq!(
        volumes,
        [
            ("data".into(), 18 * MIB, VolumeFormat::Btt),
            ("größe".into(), 2 * MIB, VolumeFormat::Raw)
        ]
    );
    let pool = open(OpenMode::ReadWrite);
    pool.scrub_all().unwrap();
    let info = pool.info();
    assert_eq!((info.free_bytes, info.memory_bytes, info.retired_bytes), (6 * MIB, 0, 2 * MIB));
    assert_eq!(
        (info.metadata_bytes, info.volume_bytes, info.reserve_bytes),
        (4 * MIB, 20 * MIB, 4 * MIB)
    );
}
