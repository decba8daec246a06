//! Crashes with a lost owner word. Repair should restore the owner from its copy, so that no volume
//! loses data or gets that of another owner.

use super::campaign::{Replay, verify_each};
use super::crash::{fill_memory, new_pool_of, open};
use super::crash_each::bytes;
use super::repair::entry;
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::table::{Owner, Slot, WearWord, decode_wear, encode_wear};
use crate::pool::maintenance::repair::fix_metadata;

const CHUNKS: u32 = 12;
const INDEXES: u64 = 4;
/// Words in the chunks of the volumes `v` and `w`.
const MARKS: [(&str, u64); 2] = [("v", 0x5eed_0001), ("w", 0x5eed_0002)];

fn create_thin(pool: &Arc<OtherPool>, name: &str) {
    let options = VolumeOptions {
        size: bytes(INDEXES),
        format: VolumeFormat::Raw,
        thin: true,
        reserve_bytes: None,
    };
    pool.create_volume_with(name, options).unwrap();
}

/// Stores the mark of a volume at an index, and returns the chunk.
fn store_mark(pool: &Arc<OtherPool>, (name, mark): (&str, u64), index: u32) -> ChunkId {
    let at = u64::from(index) * CHUNK_BYTES;
    let volume = pool.open_volume(name).unwrap();
    volume.store_word(at, mark).unwrap();
    volume.persist_range(at..at + 8).unwrap();
    ChunkId((volume.chunk_offset(index).unwrap() / CHUNK_BYTES) as u32)
}

/// Creates a pool with the thin volume `v`, which has two chunks with data, and returns the second.
fn with_thin_volume() -> (Simulator, Arc<OtherPool>, ChunkId) {
    let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 2);
    create_thin(&pool, "v");
    store_mark(&pool, MARKS[0], 0);
    let chunk = store_mark(&pool, MARKS[0], 1);
    (media, pool, chunk)
}

/// Deletes `v` and creates `w` in its slot. `between` runs before the slot is reused.
fn reuse_slot(pool: &Arc<OtherPool>, between: impl Fn()) {
    pool.delete_volume("v").unwrap();
    between();
    create_thin(pool, "w");
    store_mark(pool, MARKS[1], 2);
}

fn copy_of(image: &Simulator) -> Simulator {
    image.record();
    let now = image.take_points().pop().expect("one for now");
    now.images(1, &mut Random::new(0)).pop().expect("an image")
}

/// Destroys each owner word in turn, and repairs the pool. Checks that it opens, and that volumes
/// contain only their own data and all data that was durable before the crash.
fn verify_lost_words(
    image: &Simulator,
    superblock: &Superblock,
    durable: &[(&str, u64)],
) -> Result<(), String> {
    for chunk in 2..CHUNKS {
        let image = copy_of(image);
        image.store_word(entry(chunk), 0).unwrap();
        fix_metadata(&image, superblock, false).map_err(|error| error.to_string())?;
        let pool = open(&image).map_err(|error| format!("lost word of {chunk}: {error}"))?;
        for (name, mark) in MARKS {
            let Ok(volume) = pool.open_volume(name) else { continue };
            for index in 0..INDEXES {
                let word = volume.load_word(index * CHUNK_BYTES).unwrap();
                let is_durable = durable.contains(&(name, index));
                if word != mark && (word != 0 || is_durable) {
                    return Err(format!("lost word of {chunk}: {name} has {word:#x} at {index}"));
                }
            }
        }
    }
    Ok(())
}

fn verify_points(media: &Simulator, superblock: &Superblock) -> Result<usize, String> {
    let verify = |image: &Simulator| verify_lost_words(image, superblock, &[("v", 0)]);
    verify_each(&media.take_points(), 24, &mut Random::new(5), &verify)
}

#[test]
fn lost_word_after_a_crash_neither_loses_nor_exposes_data() {
    let (media, pool, _) = with_thin_volume();
    media.record();
    let volume = pool.open_volume("v").unwrap();
    volume.release(std::slice::from_ref(&(CHUNK_BYTES..2 * CHUNK_BYTES)), &|_| false).unwrap();
    drop(volume);
    let memory = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
    fill_memory(&media, &memory);
    pool.free_memory(&memory).unwrap();
    pool.scrub_some(2 * CHUNK_BYTES).unwrap();
    reuse_slot(&pool, || assert!(pool.scrub_some(CHUNK_BYTES).is_ok()));
    let images = verify_points(&media, &pool.superblock()).unwrap();
    Replay::from_environment().count(images, 250);
    verify_lost_words(&media, &pool.superblock(), &[("w", 2)]).unwrap();
}

/// Returns the wear word of a chunk, which contains the copy of its owner.
fn wear_word(media: &Simulator, chunk: ChunkId) -> u64 {
    media.load_word(entry(chunk.0) + 8).unwrap()
}

#[test]
fn release_that_keeps_the_old_copy_is_detected() {
    let (media, pool, chunk) = with_thin_volume();
    let old = wear_word(&media, chunk);
    media.record();
    reuse_slot(&pool, || media.store_word(entry(chunk.0) + 8, old).unwrap());
    let error = verify_points(&media, &pool.superblock()).expect_err("not detected");
    assert!(error.contains("w has 0x5eed0001 at 1"), "{error}");
}

#[test]
fn open_corrects_a_copy_that_a_crash_left() {
    let (media, pool, chunk) = with_thin_volume();
    let (old, superblock) = (wear_word(&media, chunk), pool.superblock());
    pool.delete_volume("v").unwrap();
    drop(pool);
    media.store_word(entry(chunk.0) + 8, old).unwrap();
    media.persist_range(0..media.len_bytes()).unwrap();
    for is_corrected in [true, false] {
        let media = copy_of(&media);
        media.record();
        let pool = open(&media).unwrap();
        let copy = pool.table().wear(&media, chunk).unwrap().unwrap().owner;
        assert_eq!(copy, Some(Owner::Scrub));
        if !is_corrected {
            media.store_word(entry(chunk.0) + 8, old).unwrap();
        }
        create_thin(&pool, "w");
        store_mark(&pool, MARKS[1], 2);
        assert_eq!(verify_points(&media, &superblock).is_ok(), is_corrected);
    }
}

/// The chunk belongs to `v`, but its copy is that of a free chunk. When the pool is open, the
/// volume may get data. After a power cut, a repair would trust a stale copy and erase the data.
#[test]
fn corrected_copy_is_durable_when_the_pool_is_open() {
    let (media, pool, chunk) = with_thin_volume();
    let stale = WearWord { uses: 1, owner: Some(Owner::Free) };
    drop(pool);
    media.store_word(entry(chunk.0) + 8, encode_wear(chunk, stale)).unwrap();
    media.persist_range(0..media.len_bytes()).unwrap();
    for is_persisted in [true, false] {
        let media = copy_of(&media);
        media.record();
        let pool = open(&media).unwrap();
        if !is_persisted {
            media.store_word(entry(chunk.0) + 8, encode_wear(chunk, stale)).unwrap();
            media.persist_range(0..media.len_bytes()).unwrap();
            pool.table().correct_wear(&media, chunk).unwrap();
        }
        media.record();
        let now = media.take_points().pop().expect("one for now");
        let images = now.images(16, &mut Random::new(3));
        let owner = Owner::Volume { slot: Slot(0), index: 1 };
        let is_right = |image: &Simulator| {
            decode_wear(chunk, wear_word(image, chunk)).unwrap().owner == Some(owner)
        };
        assert_eq!(images.iter().all(is_right), is_persisted);
    }
}
