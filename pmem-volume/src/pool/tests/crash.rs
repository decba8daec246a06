//! Enumerated crashes of the pool. At every persist of an operation, every possible crash image is
//! opened and verified.
//!
//! 1. The volumes are exactly those before or after the operation.
//! 2. Their content is complete.
//! 3. Free chunks read as zeros. All other chunks without an owner are free after they are erased.
//! 4. A check finds nothing.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

pub(super) use super::campaign::{Replay, report_images, verify_each};
use super::*;
use crate::btt;
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::pool::format::table::Owner;

const CHUNKS: u32 = 14;
const SLOTS: u32 = 3;

/// Size of each volume in chunks, by name.
pub(super) type Volumes = BTreeMap<String, u32>;

/// Creates a small pool with few slots, so that an image opens quickly.
fn new_pool() -> (Simulator, Arc<OtherPool>) {
    new_pool_with(|_| {})
}

/// Creates a small pool. `change` may modify its superblock.
pub(super) fn new_pool_with(change: impl Fn(&mut Superblock)) -> (Simulator, Arc<OtherPool>) {
    new_pool_of(CHUNKS, change)
}

pub(super) fn new_pool_of(
    chunks: u32,
    change: impl Fn(&mut Superblock),
) -> (Simulator, Arc<OtherPool>) {
    let media = Simulator::new(u64::from(chunks) * CHUNK_BYTES);
    let mut superblock = create::plan(media.len_bytes(), 0, Uuid::from_u128(1), 1).unwrap();
    superblock.volume_slots = SLOTS;
    change(&mut superblock);
    create::write_empty_pool(&media, &superblock).unwrap();
    let pool = open(&media).unwrap();
    (media, pool)
}

/// Opens a crash image. The size of the pool is determined from its superblocks and the length of
/// the file.
pub(super) fn open(image: &Simulator) -> Result<Arc<OtherPool>, PoolError> {
    open_for(image, OpenMode::ReadWrite)
}

pub(super) fn open_for(image: &Simulator, mode: OpenMode) -> Result<Arc<OtherPool>, PoolError> {
    let mut copies = [layout::SuperblockBytes::new_zeroed(), layout::SuperblockBytes::new_zeroed()];
    for (copy, offset) in copies.iter_mut().zip(layout::SUPERBLOCK_OFFSETS) {
        image.read(offset, copy.as_mut_bytes())?;
    }
    let path = Path::new("simulated");
    let length = open_steps::Length::File(image.file_bytes());
    let (superblock, findings) = open_steps::select_superblock(path, copies, length, mode)?;
    image.set_len(superblock.size_bytes());
    let media: Box<dyn Media> = Box::new(image.clone());
    Pool::from_media(path.to_owned(), mode, media, superblock, findings)
}

/// Returns the content at the start of a volume's chunk.
fn mark_of(volume: Uuid, index: u32) -> u64 {
    (volume.as_u64_pair().0 | 1).wrapping_mul(u64::from(index) + 1)
}

/// Writes to a volume as a guest would, and flushes it.
pub(super) fn fill_volume(media: &Simulator, pool: &Arc<OtherPool>, name: &str) {
    fill_volume_from(media, pool, name, 0);
}

pub(super) fn fill_volume_from(media: &Simulator, pool: &Arc<OtherPool>, name: &str, from: u32) {
    let volume = pool.open_volume(name).unwrap();
    if volume.info().thin {
        return fill_words(&volume, from, true);
    }
    for (index, chunk) in places(&volume).into_iter().filter(|(index, _)| *index >= from) {
        media.store_word(chunk.offset_bytes(), mark_of(volume.info().uuid, index)).unwrap();
        media.persist_range(chunk.offset_bytes()..chunk.offset_bytes() + 8).unwrap();
    }
}

/// Stores the marks of a volume as the VMM would. Only even indexes get one if `is_sparse`, so that
/// the others may remain holes.
pub(super) fn fill_words(volume: &OtherVolume, from: u32, is_sparse: bool) {
    let chunks = (volume.size_bytes() / CHUNK_BYTES) as u32;
    for index in (from..chunks).filter(|index| !is_sparse || index.is_multiple_of(2)) {
        let at = u64::from(index) * CHUNK_BYTES;
        volume.store_word(at, mark_of(volume.info().uuid, index)).unwrap();
        volume.persist_range(at..at + 8).unwrap();
    }
}

/// Returns the chunks of a volume by index.
pub(super) fn places(volume: &OtherVolume) -> Vec<(u32, ChunkId)> {
    let extents = volume.allocated_extents();
    extents.iter().flat_map(|extent| (extent.index..).zip(extent.run.ids())).collect()
}

/// Writes to lent memory as a guest would, without a persist. The host may still write it back.
pub(super) fn fill_memory(media: &Simulator, extents: &[Extent]) {
    for chunk in extents.iter().flat_map(|extent| extent.run().ids()) {
        media.store_word(chunk.offset_bytes() + 64, 0xdead_beef).unwrap();
        media.store_word(chunk.offset_bytes() + CHUNK_BYTES - 8, 0xdead_beef).unwrap();
    }
}

pub(super) fn volumes_of(pool: &OtherPool) -> Volumes {
    pool.volumes().into_iter().map(|v| (v.name, (v.size_bytes / CHUNK_BYTES) as u32)).collect()
}

/// Expected content of a volume. Its first `chunks` chunks contain the marks of the volume
/// `origin`, starting with that volume's chunk `first`. `origin` is the volume itself, unless it is
/// a part of a split volume. All other chunks read as zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marked {
    pub(super) chunks: u32,
    pub(super) origin: Uuid,
    pub(super) first: u32,
    /// Only the chunks with an even index in the origin contain a mark.
    pub(super) is_sparse: bool,
}

impl Marked {
    pub(super) fn own(volume: &VolumeInfo, chunks: u32) -> Self {
        Self { chunks, origin: volume.uuid, first: 0, is_sparse: volume.thin }
    }

    /// Returns the word at the start of a chunk, or `None` if the chunk reads as zeros.
    fn word(&self, index: u32) -> Option<u64> {
        let of_origin = self.first + index;
        let is_marked = index < self.chunks && (!self.is_sparse || of_origin.is_multiple_of(2));
        is_marked.then(|| mark_of(self.origin, of_origin))
    }
}

/// Expected content by UUID. A volume without an entry was never written.
pub(super) type Marks = BTreeMap<Uuid, Marked>;

/// Adds the parts of a volume that was or will be split, with their marks. The volume keeps its own
/// entry, because it may still exist.
pub(super) fn split_marks(marks: &mut Marks, whole: Uuid, parts: &[VolumeInfo]) {
    let Some(of) = marks.get(&whole).copied() else { return };
    let mut index = 0;
    for part in parts.iter().filter(|part| part.format == VolumeFormat::Raw) {
        let length = (part.size_bytes / CHUNK_BYTES) as u32;
        let chunks = of.chunks.saturating_sub(index).min(length);
        marks.insert(part.uuid, Marked { chunks, first: of.first + index, ..of });
        index += length;
    }
}

/// Writes to blocks of a BTT volume that contain no sector. A guest's driver or a discarded sector
/// may leave such data.
pub(super) fn fill_blocks(media: &Simulator, pool: &Arc<OtherPool>, name: &str) {
    let volume = pool.open_volume(name).unwrap();
    for (_, chunk) in places(&volume) {
        // In volumes of this size, the middle of a chunk contains only blocks.
        let at = chunk.offset_bytes() + CHUNK_BYTES / 2;
        media.store_word(at, 0x01dc_07e7).unwrap();
        media.persist_range(at..at + 8).unwrap();
    }
}

/// Returns the number of nonzero words in each chunk of a new BTT volume.
fn fresh_words(size_bytes: u64, uuid: Uuid) -> Vec<usize> {
    let fresh = Simulator::new(size_bytes);
    btt::Layout::new(size_bytes, btt::SECTOR_BYTES, uuid).unwrap().format(&fresh).unwrap();
    let starts = (0..size_bytes).step_by(CHUNK_BYTES as usize);
    starts.map(|start| fresh.dirty_words(start..start + CHUNK_BYTES)).collect()
}

/// Results of [`fresh_words`] by the size and UUID of the volume.
type FreshWords = HashMap<(u64, Uuid), Rc<[usize]>>;

thread_local! {
    /// Cache of [`fresh_words`], because thousands of images contain the same new volume.
    static FRESH_WORDS: RefCell<FreshWords> = RefCell::default();
}

/// Checks that a BTT volume has exactly the bytes of a new one.
pub(super) fn verify_fresh(image: &Simulator, volume: &OtherVolume) -> Result<(), String> {
    let info = volume.info();
    let fresh = FRESH_WORDS.with_borrow_mut(|cache| {
        let entry = cache.entry((info.size_bytes, info.uuid));
        Rc::clone(entry.or_insert_with(|| fresh_words(info.size_bytes, info.uuid).into()))
    });
    let places: BTreeMap<_, _> = places(volume).into_iter().collect();
    for (index, expected) in (0..).zip(fresh.iter().copied()) {
        let words = |chunk: &ChunkId| image.dirty_words(Extent::chunk(*chunk).run().byte_range());
        let found = places.get(&index).map_or(0, words);
        if found != expected {
            return Err(format!(
                "chunk {index} of the new BTT {} has {found} words instead of {expected}: old content",
                info.name
            ));
        }
    }
    Ok(())
}

/// Verifies an image. Its volumes should match one of `allowed`, and raw ones should have all of
/// their content.
pub(super) fn verify(image: &Simulator, allowed: &[&Volumes]) -> Result<(), String> {
    verify_content(image, allowed, &|volume| Some(Marked::own(volume, u32::MAX)))
}

/// Verifies an image. Its volumes should match one of `allowed`, and contain the data that `marks`
/// describes.
pub(super) fn verify_marked(
    image: &Simulator,
    allowed: &[&Volumes],
    marks: &Marks,
) -> Result<(), String> {
    verify_content(image, allowed, &|volume| marks.get(&volume.uuid).copied())
}

fn verify_content(
    image: &Simulator,
    allowed: &[&Volumes],
    marked: &dyn Fn(&VolumeInfo) -> Option<Marked>,
) -> Result<(), String> {
    let features = writer_features(image);
    let pool = open(image).map_err(|error| format!("does not open: {error}"))?;
    let has_thin = pool.volumes().iter().any(|volume| volume.thin);
    if has_thin && features.iter().any(|bits| bits & layout::FEATURE_THIN_VOLUMES == 0) {
        return Err(format!("has a thin volume, but the superblocks have features {features:?}"));
    }
    // Scrub first, so that the following checks detect wrongly erased content of a volume.
    scrub(image, &pool)?;
    let volumes = volumes_of(&pool);
    if !allowed.contains(&&volumes) {
        return Err(format!("has volumes {volumes:?}, but only {allowed:?} are allowed"));
    }
    for name in volumes.keys() {
        let volume = pool.open_volume(name).map_err(|error| error.to_string())?;
        let marked = marked(volume.info());
        if volume.info().format == VolumeFormat::Btt && marked.is_none() {
            verify_fresh(image, &volume)?;
        }
        if volume.info().format == VolumeFormat::Raw {
            verify_raw(image, &volume, marked.unwrap_or(Marked::own(volume.info(), 0)))?;
        }
    }
    verify_space(image, &pool)
}

fn verify_raw(image: &Simulator, volume: &OtherVolume, marked: Marked) -> Result<(), String> {
    let name = &volume.info().name;
    let places: BTreeMap<_, _> = places(volume).into_iter().collect();
    for index in 0..(volume.size_bytes() / CHUNK_BYTES) as u32 {
        let word = volume.load_word(u64::from(index) * CHUNK_BYTES).unwrap();
        match (marked.word(index), places.get(&index)) {
            (Some(mark), _) if word != mark => {
                return Err(format!("volume {name} has lost chunk {index}: {word:#x}"));
            }
            (None, Some(chunk))
                if image.dirty_words(Extent::chunk(*chunk).run().byte_range()) > 0 =>
            {
                return Err(format!("volume {name} exposes the old content of chunk {chunk}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the features for writers in each copy of the superblock that is whole.
pub(super) fn writer_features(media: &dyn Media) -> Vec<u64> {
    let mut copies = [layout::SuperblockBytes::new_zeroed(), layout::SuperblockBytes::new_zeroed()];
    for (copy, at) in copies.iter_mut().zip(layout::SUPERBLOCK_OFFSETS) {
        media.read(at, copy.as_mut_bytes()).unwrap();
    }
    let whole = copies.iter().filter(|copy| mirrored::is_whole(*copy));
    whole.map(|copy| copy.features_read_only.get()).collect()
}

/// Checks that free chunks are zero.
fn verify_free(image: &Simulator, pool: &OtherPool) -> Result<(), String> {
    let table = ChunkTable::new(&pool.superblock());
    for chunk in (0..table.entries()).map(ChunkId) {
        let is_free = table.owner(image, chunk).unwrap() == Ok(Owner::Free);
        if is_free && image.dirty_words(Extent::chunk(chunk).run().byte_range()) > 0 {
            return Err(format!("free chunk {chunk} has old content"));
        }
    }
    Ok(())
}

/// Erases waiting chunks. Before and after this, checks that free chunks are zero.
fn scrub(image: &Simulator, pool: &OtherPool) -> Result<(), String> {
    verify_free(image, pool)?;
    if pool.info().scrubbing_bytes > 0 {
        pool.scrub_all().map_err(|error| error.to_string())?;
        verify_free(image, pool)?;
    }
    Ok(())
}

/// Checks that all chunks without an owner are free and zero after they are erased.
pub(super) fn verify_space(image: &Simulator, pool: &Arc<OtherPool>) -> Result<(), String> {
    scrub(image, pool)?;
    let owned: u64 = pool.volumes().iter().map(|volume| volume.allocated_bytes).sum();
    let info = pool.info();
    let metadata_bytes = u64::from(pool.superblock().metadata_chunks()) * CHUNK_BYTES;
    let free = info.total_bytes - metadata_bytes - owned;
    if image.file_bytes() != info.total_bytes {
        return Err(format!(
            "the file has {} bytes but the pool has {}",
            image.file_bytes(),
            info.total_bytes
        ));
    }
    if info.free_bytes != free {
        return Err(format!("{} bytes are free instead of {free}", info.free_bytes));
    }
    let report = pool.check().map_err(|error| error.to_string())?;
    for VolumeCheck { name, btt, unusable } in &report.volumes {
        if let Some(btt) = btt.as_ref().filter(|btt| !btt.is_clean()) {
            return Err(format!("BTT of {name}: {btt:?}"));
        }
        if let Some(reason) = unusable {
            return Err(format!("{name} is unusable: {reason}"));
        }
    }
    if report.pool.is_empty() { Ok(()) } else { Err(format!("check finds {:?}", report.pool)) }
}

/// Opens every image of every point. Returns their number.
pub(super) fn verify_points(
    points: &[CrashPoint],
    bound: usize,
    allowed: &[&Volumes],
    random: &mut Random,
) -> Result<usize, String> {
    verify_each(points, bound, random, &|image| verify(image, allowed))
}

#[test]
fn rename_that_writes_both_copies_at_once_is_detected() {
    let (media, pool) = new_pool();
    pool.create_volume("v", VolumeSize::Bytes(2 * CHUNK_BYTES), VolumeFormat::Raw).unwrap();
    fill_volume(&media, &pool, "v");
    let before = volumes_of(&pool);
    media.record();
    let slot = table::Slot(0);
    let old = pool.lock_state().volumes[&slot].record.clone();
    let name: VolumeName = "w".parse().unwrap();
    let record = volume_record::VolumeRecord { sequence: old.sequence + 1, name, ..old }.to_bytes();
    let offsets = pool.superblock().volume_record_offsets(slot);
    for offset in offsets {
        media.store(offset, record.as_bytes()).unwrap();
        // Omitted: the persist of the first copy before the second one is written.
    }
    media.persist(&offsets.map(|at| at..at + 256)).unwrap();
    let points = media.take_points();
    let after = Volumes::from([("w".to_owned(), 2)]);
    let error = verify_points(&points, 256, &[&before, &after], &mut Random::new(21))
        .expect_err("the wrong order was not detected");
    assert!(error.contains("damaged"), "{error}");
}

/// Runs `wrong` on a pool with a volume `v` of two chunks. Expects the verification of a crash
/// during `wrong` to fail.
pub(super) fn must_be_detected(wrong: impl Fn(&Simulator, &Arc<OtherPool>)) -> String {
    let (media, pool) = new_pool();
    pool.create_volume("v", VolumeSize::Bytes(2 * CHUNK_BYTES), VolumeFormat::Raw).unwrap();
    fill_volume(&media, &pool, "v");
    let volumes = volumes_of(&pool);
    media.record();
    wrong(&media, &pool);
    let points = media.take_points();
    verify_points(&points, 64, &[&volumes, &Volumes::new()], &mut Random::new(9))
        .expect_err("the wrong order was not detected, so the other tests prove nothing")
}

#[test]
fn lending_before_the_mark_is_durable_is_detected() {
    let error = must_be_detected(|media, pool| {
        let chunk = ChunkId(10);
        pool.table().set_owner(media, chunk, Owner::Memory).unwrap();
        // Omitted: the persist.
        fill_memory(media, &[Extent::chunk(chunk)]);
    });
    assert!(error.contains("old content"), "{error}");
}

#[test]
fn erasing_a_volume_before_its_record_is_detected() {
    let error = must_be_detected(|media, pool| {
        let run = pool.open_volume("v").unwrap().extents()[0].run;
        media.erase(&[run.byte_range()]).unwrap();
        let empty = volume_record::empty_record(table::Slot(0), 9);
        mirrored::write(media, pool.superblock().volume_record_offsets(table::Slot(0)), &empty)
            .unwrap();
    });
    assert!(error.contains("has lost chunk"), "{error}");
}

#[test]
fn record_before_its_chunks_is_detected() {
    let error = must_be_detected(|media, pool| {
        let slot = table::Slot(0);
        let empty = volume_record::empty_record(slot, 9);
        pool.delete_volume("v").unwrap();
        let mut record = volume_record::VolumeRecord {
            sequence: 10,
            slot,
            name: "v".parse().unwrap(),
            uuid: Uuid::nil(),
            format: VolumeFormat::Raw,
            thin: false,
            part: None,
            chunks: 2,
            reserve_chunks: 2,
            created_unix_s: 1,
        };
        record.sequence = empty.sequence.get() + 1;
        mirrored::write(media, pool.superblock().volume_record_offsets(slot), &record.to_bytes())
            .unwrap();
        let run = Run { start: ChunkId(6), chunks: 2 };
        pool.mark(&[run], |index| Owner::Volume { slot, index }).unwrap();
    });
    assert!(
        error.contains("does not open") && error.contains("lacks 2 of its 2 chunks"),
        "{error}"
    );
}
