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
use crate::pool::format::table::{Owner, Slot, WearWord, decode_wear, encode_wear};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::layout::SuperblockBytes;
use crate::test_image::{from_text, to_text};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/pool/tests/pool-v1.golden");
const GOLDEN_THIN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/pool/tests/pool-v1-thin.golden");
const GOLDEN_RESERVE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/pool/tests/pool-v1-reserve.golden");
/// Written by a program that stored no copies of owners.
const GOLDEN_OLDER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/pool/tests/pool-v1-thin-older.golden");
const POOL_BYTES: u64 = 32 * MIB;

fn superblock_of(has_thin_volumes: bool) -> Superblock {
    let plan = create::plan(POOL_BYTES, 4 * MIB, Uuid::from_u128(0x0123_4567), 1_800_000_000);
    let superblock = Superblock { has_thin_volumes, ..plan.unwrap() };
    match has_thin_volumes {
        // Few slots keep the second image small.
        true => Superblock { volume_slots: 4, ..superblock },
        false => superblock,
    }
}

fn volume(slot: u16, name: &str, format: VolumeFormat, chunks: u32) -> VolumeRecord {
    VolumeRecord {
        sequence: 1,
        slot: Slot(slot),
        name: name.parse().unwrap(),
        uuid: Uuid::from_u128(0x89ab_cdef + u128::from(slot)),
        format,
        thin: false,
        part: None,
        chunks,
        reserve_chunks: chunks,
        created_unix_s: 1_800_000_001,
    }
}

/// Writes a pool with chunks of these owners and these volumes.
fn write_pool(
    media: &MemoryMedia,
    superblock: &Superblock,
    owners: impl IntoIterator<Item = (u32, Owner)>,
    records: &[VolumeRecord],
) {
    create::write_empty_pool(media, superblock).unwrap();
    let table = ChunkTable::new(superblock);
    for (chunk, owner) in owners {
        table.set_entry(media, ChunkId(chunk), owner, chunk * 100).unwrap();
    }
    for record in records {
        mirrored::write(media, superblock.volume_record_offsets(record.slot), &record.to_bytes())
            .unwrap();
    }
}

/// Returns the content of a new BTT volume.
fn new_btt(record: &VolumeRecord) -> Vec<u8> {
    let part = MemoryMedia::new(record.size_bytes());
    btt::Layout::new(record.size_bytes(), btt::SECTOR_BYTES, record.uuid)
        .unwrap()
        .format(&part)
        .unwrap();
    part.to_bytes()
}

/// Builds a pool with lent memory, a chunk that waits to be scrubbed, a retired chunk, a BTT volume
/// and a raw one.
fn build() -> MemoryMedia {
    let media = MemoryMedia::new(POOL_BYTES);
    let (first, second) =
        (volume(0, "data", VolumeFormat::Btt, 9), volume(1, "größe", VolumeFormat::Raw, 1));
    let owners = (2..11)
        .map(|chunk| (chunk, Owner::Volume { slot: Slot(0), index: chunk - 2 }))
        .chain([(11, Owner::Volume { slot: Slot(1), index: 0 })])
        .chain([(12, Owner::Memory), (13, Owner::Scrub), (14, Owner::Retired)]);
    media.store(2 * CHUNK_BYTES, &new_btt(&first)).unwrap();
    write_pool(&media, &superblock_of(false), owners, &[first, second]);
    media
}

/// Builds a pool with a thin BTT volume, which has only its first and last chunk, and a thin raw
/// volume without chunks. These numbers of their chunks are guaranteed.
fn build_thin(reserves: [u32; 2]) -> MemoryMedia {
    let media = MemoryMedia::new(POOL_BYTES);
    let thin = |record, reserve_chunks| VolumeRecord { thin: true, reserve_chunks, ..record };
    let first = thin(volume(0, "data", VolumeFormat::Btt, 9), reserves[0]);
    let second = thin(volume(1, "größe", VolumeFormat::Raw, 3), reserves[1]);
    let places = [(3, 0), (2, 8)];
    let content = new_btt(&first);
    for (chunk, index) in places {
        let bytes = &content[(index * CHUNK_BYTES) as usize..][..CHUNK_BYTES as usize];
        media.store(chunk * CHUNK_BYTES, bytes).unwrap();
    }
    let owners = places
        .map(|(chunk, index)| (chunk as u32, Owner::Volume { slot: Slot(0), index: index as u32 }));
    write_pool(&media, &superblock_of(true), owners, &[first, second]);
    media
}

#[test]
fn this_version_writes_the_golden_images() {
    for (path, media) in
        [(GOLDEN, build()), (GOLDEN_THIN, build_thin([9, 3])), (GOLDEN_RESERVE, build_thin([6, 0]))]
    {
        let text = to_text(&media.to_bytes());
        if std::env::var_os("PMEM_VOLUME_WRITE_GOLDEN").is_some() {
            fs::write(path, &text).unwrap();
        }
        assert!(fs::read_to_string(path).unwrap() == text, "{path}: the format has changed");
    }
}

fn read_image(path: &str) -> Vec<u8> {
    from_text(&fs::read_to_string(path).unwrap(), POOL_BYTES)
}

/// The first programs with thin volumes guaranteed their whole size.
#[test]
fn this_version_reads_the_golden_images_of_thin_volumes() {
    read_golden_of_thin(&read_image(GOLDEN_THIN), [18 * MIB, 6 * MIB]);
    read_golden_of_thin(&read_image(GOLDEN_OLDER), [18 * MIB, 6 * MIB]);
    read_golden_of_thin(&read_image(GOLDEN_RESERVE), [12 * MIB, 0]);
}

#[test]
fn words_without_copies_are_those_of_the_first_programs() {
    assert!(without_copies(&read_image(GOLDEN_THIN)) == read_image(GOLDEN_OLDER));
}

/// Returns the pool as the first programs for version 1 wrote it, without copies of owners.
fn without_copies(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let entries = ChunkTable::new(&superblock_of(false));
    for chunk in (0..entries.entries()).map(ChunkId) {
        let at = entries.byte_range(Run { start: chunk, chunks: 1 }).start as usize + 8;
        let word = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let wear = decode_wear(chunk, word).unwrap();
        assert!(wear.owner.is_some());
        let older = encode_wear(chunk, WearWord { owner: None, ..wear });
        bytes[at..at + 8].copy_from_slice(&older.to_le_bytes());
    }
    bytes
}

fn read_golden_of_thin(bytes: &[u8], reserves: [u64; 2]) {
    let pool = open_golden(bytes, &superblock_of(true), OpenMode::ReadWrite);
    assert_eq!(pool.findings_at_open(), []);
    let volumes: Vec<_> = pool
        .volumes()
        .into_iter()
        .map(|v| (v.name, v.size_bytes, v.reserve_bytes, v.allocated_bytes, v.format))
        .collect();
    assert_eq!(
        volumes,
        [
            ("data".into(), 18 * MIB, reserves[0], 4 * MIB, VolumeFormat::Btt),
            ("größe".into(), 6 * MIB, reserves[1], 0, VolumeFormat::Raw)
        ]
    );
    let info = pool.info();
    assert_eq!(info.promised_bytes, reserves.iter().sum::<u64>());
    assert_eq!((info.provisioned_bytes, info.volume_bytes), (24 * MIB, 4 * MIB));
    let report = pool.check().unwrap();
    assert!(report.pool.is_empty() && report.is_clean(), "{report:?}");
    let place = |name: &str| pool.open_volume(name).unwrap().allocated_extents();
    let extents: Vec<_> = place("data").iter().map(|e| (e.index, e.run.start.0)).collect();
    assert_eq!((extents, place("größe").len()), (vec![(0, 3), (8, 2)], 0));
}

#[test]
fn this_version_reads_the_golden_image_and_an_older_one() {
    let mut bytes = read_image(GOLDEN);
    read_golden(&bytes);
    bytes = without_copies(&bytes);
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

fn open_golden(bytes: &[u8], superblock: &Superblock, mode: OpenMode) -> Arc<OtherPool> {
    for at in crate::pool::layout::SUPERBLOCK_OFFSETS {
        let copy = &bytes[at as usize..][..size_of::<SuperblockBytes>()];
        let copy = SuperblockBytes::read_from_bytes(copy).unwrap();
        assert_eq!(Superblock::parse(&copy).as_ref(), Ok(superblock));
    }
    let media: Box<dyn Media> = Box::new(MemoryMedia::from_bytes(bytes));
    Pool::from_media("golden".into(), mode, media, superblock.clone(), vec![]).unwrap()
}

fn read_golden(bytes: &[u8]) {
    let open = |mode| open_golden(bytes, &superblock_of(false), mode);
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
