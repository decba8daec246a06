//! Tests of thin volumes that are guaranteed only in part.

use super::campaign::verify_each;
use super::crash::{new_pool_of, open};
use super::crash_each::bytes;
use super::*;
use crate::media::MediaError;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::table::Slot;

/// Size and guaranteed part of each volume, in chunks. Together, the volumes are larger than the
/// pool.
const VOLUMES: [(&str, u64, u64); 2] = [("a", 20, 4), ("b", 20, 6)];
const POOL_CHUNKS: u32 = 20;

fn options(chunks: u64, reserve_chunks: u64) -> VolumeOptions {
    let reserve_bytes = Some(reserve_chunks * CHUNK_BYTES);
    VolumeOptions { size: bytes(chunks), format: VolumeFormat::Raw, thin: true, reserve_bytes }
}

fn overcommitted() -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(POOL_CHUNKS, |superblock| superblock.volume_slots = 4);
    for (name, chunks, reserve_chunks) in VOLUMES {
        pool.create_volume_with(name, options(chunks, reserve_chunks)).unwrap();
    }
    (media, pool)
}

fn chunk(index: u64) -> std::ops::Range<u64> {
    index * CHUNK_BYTES..(index + 1) * CHUNK_BYTES
}

fn is_full<T>(result: &Result<T, MediaError>) -> bool {
    matches!(result, Err(MediaError::Full { .. }))
}

/// Function that allocates a chunk of a volume. Returns true on success.
type Fill = fn(&Arc<OtherPool>, &str, u64) -> bool;

fn fill(pool: &Arc<OtherPool>, name: &str, index: u64) -> bool {
    let filled = pool.open_volume(name).unwrap().provision(chunk(index));
    assert!(filled.is_ok() || is_full(&filled), "{filled:?}");
    filled.is_ok()
}

/// Allocates a chunk as if all of the volume were guaranteed.
fn fill_unchecked(pool: &Arc<OtherPool>, name: &str, index: u64) -> bool {
    let set_reserve = |chunks: Option<u32>| {
        let mut state = pool.lock_state();
        let slot = state.find_volume(name).unwrap();
        let mut before = 0;
        state.change_volume(slot, |entry| {
            before = entry.record.reserve_chunks;
            entry.record.reserve_chunks = chunks.unwrap_or(entry.record.chunks);
        });
        before
    };
    let before = set_reserve(None);
    let filled = fill(pool, name, index);
    set_reserve(Some(before));
    filled
}

/// Writes, discards and plugs memory at random. Then fills each volume up to its reserve.
fn volumes_get_their_reserves(seed: u64, fill_one: Fill) -> bool {
    let (_media, pool) = overcommitted();
    let (mut random, mut lent) = (Random::new(seed), Vec::new());
    for _ in 0..60 {
        let (name, chunks, _) = VOLUMES[random.below(2) as usize];
        let index = random.below(chunks);
        match random.below(8) {
            0 => lent
                .extend(pool.alloc_memory((1 + random.below(4)) * CHUNK_BYTES).unwrap_or_default()),
            1 => pool.free_memory(&std::mem::take(&mut lent)).unwrap(),
            2 | 3 => {
                let volume = pool.open_volume(name).unwrap();
                assert_eq!(volume.release(&[chunk(index)], &|_| false).unwrap(), []);
            }
            _ => drop(fill_one(&pool, name, index)),
        }
    }
    let mut fill_to_reserve = |&(name, chunks, reserve_chunks): &(&str, u64, u64)| {
        let volume = pool.open_volume(name).unwrap();
        let is_reached = || volume.allocated_bytes() >= reserve_chunks * CHUNK_BYTES;
        (0..chunks).all(|index| is_reached() || volume.provision(chunk(index)).is_ok())
    };
    VOLUMES.iter().all(&mut fill_to_reserve)
}

#[test]
fn each_volume_gets_its_reserve_whatever_others_use() {
    assert!((0..200).all(|seed| volumes_get_their_reserves(seed, fill)));
    let broken = (0..200).filter(|seed| !volumes_get_their_reserves(*seed, fill_unchecked));
    assert!(broken.count() > 0, "an allocation of promised chunks was not detected");
}

#[test]
fn write_beyond_the_reserve_uses_only_unpromised_chunks() {
    let (_media, pool) = overcommitted();
    let info = pool.info();
    assert_eq!(info.promised_bytes, 10 * CHUNK_BYTES);
    assert_eq!(info.provisioned_bytes, 40 * CHUNK_BYTES);
    let lent = pool.alloc_memory(info.lendable_bytes - CHUNK_BYTES).unwrap();
    let volume = pool.open_volume("a").unwrap();
    volume.provision(0..5 * CHUNK_BYTES).unwrap();
    assert!(is_full(&volume.provision(chunk(5))));
    assert_eq!(pool.info().needed_bytes(), 6 * CHUNK_BYTES);
    // A release below the reserve frees nothing for others, one above it does.
    let other = pool.open_volume("b").unwrap();
    other.provision(0..6 * CHUNK_BYTES).unwrap();
    assert!(is_full(&other.provision(chunk(6))));
    assert_eq!(volume.release(&[chunk(4)], &|_| false).unwrap(), []);
    other.provision(chunk(6)).unwrap();
    assert_eq!(volume.release(&[chunk(3)], &|_| false).unwrap(), []);
    assert!(is_full(&other.provision(chunk(7))));
    volume.provision(chunk(3)).unwrap();
    // The whole write needs space, not only its part beyond the reserve.
    assert_eq!(volume.release(&[chunk(1)], &|_| false).unwrap(), []);
    assert!(is_full(&volume.provision(0..7 * CHUNK_BYTES)));
    assert!(!volume.has_space() && !other.has_space());
    pool.free_memory(&lent[..1]).unwrap();
    assert!(volume.has_space() && other.has_space());
    volume.provision(0..7 * CHUNK_BYTES).unwrap();
}

#[test]
fn reserve_is_checked_against_size_and_free_space() {
    let (_media, pool) = overcommitted();
    let thick = VolumeOptions { thin: false, ..options(4, 4) };
    for (name, reserve_chunks, expected) in [
        ("a", 21, "reserve 44040192 (42 MiB) exceeds the size of the volume, 40 MiB"),
        ("a", 20, "the pool is full: 32 MiB requested, 36 MiB free"),
    ] {
        let error = pool.set_volume_reserve(name, reserve_chunks * CHUNK_BYTES).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    let error = pool.set_volume_reserve("a", 1).unwrap_err().to_string();
    assert!(error.contains("is not a multiple of 2 MiB"), "{error}");
    let error = pool.create_volume_with("c", thick).unwrap_err();
    assert!(matches!(error, PoolError::NotThin { .. }), "{error}");
    pool.create_volume("c", bytes(2), VolumeFormat::Raw).unwrap();
    let error = pool.set_volume_reserve("c", 0).unwrap_err();
    assert!(matches!(error, PoolError::NotThin { .. }), "{error}");
    assert_eq!(pool.set_volume_reserve("a", 10 * CHUNK_BYTES).unwrap().reserve_bytes, 20 << 20);
    // 18 chunks are usable, 10 + 6 + 2 of them are promised.
    let error = pool.convert_volume("a", false).unwrap_err();
    assert!(matches!(error, PoolError::PoolFull { .. }), "{error}");
}

/// Returns the reserve of each volume, in chunks.
fn reserves(pool: &OtherPool) -> Vec<(String, u64)> {
    pool.volumes().into_iter().map(|v| (v.name, v.reserve_bytes / CHUNK_BYTES)).collect()
}

#[test]
fn reserve_is_kept_by_resizes_renames_and_splits() {
    let (media, pool) = overcommitted();
    let set = |name: &str, chunks: u64| {
        pool.resize_volume(name, bytes(chunks), Shrink::Allow).unwrap();
    };
    set("a", 30);
    set("b", 5);
    pool.rename_volume("a", "c").unwrap();
    // All of `b` is guaranteed now, which stays so.
    set("b", 7);
    let pool = open(&media).unwrap();
    assert_eq!(reserves(&pool), [("b".to_owned(), 7), ("c".to_owned(), 4)]);
    // The parts are promised as much as the volume: 3 chunks that exist, and 1 more.
    let volume = pool.open_volume("c").unwrap();
    volume.provision(20 * CHUNK_BYTES..23 * CHUNK_BYTES).unwrap();
    drop(volume);
    let before = pool.info().promised_bytes;
    let parts = [("c".to_owned(), bytes(10)), ("d".to_owned(), VolumeSize::Remaining)];
    pool.split_volume("c", &parts, SplitContent::Refuse).unwrap();
    assert_eq!(pool.info().promised_bytes, before);
    let expected = [("b", 7), ("c", 1), ("d", 3)].map(|(name, count)| (name.to_owned(), count));
    assert_eq!(reserves(&open(&media).unwrap()), expected);
}

#[test]
fn changed_reserve_survives_a_crash_at_every_persist() {
    let (media, pool) = overcommitted();
    media.record();
    pool.set_volume_reserve("a", CHUNK_BYTES).unwrap();
    let reserve_is = |expected: &[u64]| {
        let expected = expected.to_vec();
        move |image: &Simulator| {
            let pool = open(image).map_err(|error| error.to_string())?;
            let found = pool.lock_state().volumes[&Slot(0)].record.reserve_chunks;
            match expected.contains(&u64::from(found)) {
                true => Ok(()),
                false => Err(format!("the reserve is {found}")),
            }
        }
    };
    let points = media.take_points();
    verify_each(&points, 200, &mut Random::new(1), &reserve_is(&[1, 4])).unwrap();
    // Both values occur, so the test examines crashes before and after the change.
    for only in [1, 4] {
        verify_each(&points, 200, &mut Random::new(1), &reserve_is(&[only])).unwrap_err();
    }
}
