//! Tests of thin volumes.

use super::campaign::{Replay, verify_each};
use super::crash::{new_pool_of, open, open_for, writer_features as features};
use super::hooked::{self, Hooked};
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::media::{MediaError, Pending};
use crate::pool::format::superblock::{allow_thin_volumes, rewrite};
use crate::pool::format::table::Slot;
use crate::pool::format::volume_record::{Part, VolumeRecord};
use crate::pool::layout::{FEATURE_THIN_VOLUMES, SUPERBLOCK_OFFSETS};

fn new_pool() -> (Simulator, Arc<OtherPool>) {
    new_pool_of(12, |superblock| {
        superblock.volume_slots = 4;
        superblock.log_bytes = 4096;
    })
}

/// Returns the record of a thin raw volume.
fn record(chunks: u32) -> VolumeRecord {
    VolumeRecord {
        sequence: 1,
        slot: Slot(0),
        name: "thin".parse().unwrap(),
        uuid: Uuid::from_u128(2),
        format: VolumeFormat::Raw,
        thin: true,
        part: None,
        chunks,
        reserve_chunks: chunks,
        created_unix_s: 1,
    }
}

#[test]
fn feature_bit_is_set_in_one_step() {
    let (media, pool) = new_pool();
    media.record();
    let superblock = allow_thin_volumes(&media, &pool.superblock()).unwrap();
    assert!(superblock.has_thin_volumes);
    assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    let verify = |image: &Simulator| {
        let pool = open(image).map_err(|error| error.to_string())?;
        let is_set = pool.superblock().has_thin_volumes;
        let expected = if is_set { FEATURE_THIN_VOLUMES } else { 0 };
        match features(image) {
            copies if copies == [expected; 2] => Ok(()),
            copies => Err(format!("after the open, the copies have {copies:?}")),
        }
    };
    let images = verify_each(&media.take_points(), 200, &mut Random::new(1), &verify).unwrap();
    Replay::from_environment().count(images, 10);
    // A second call changes nothing.
    let before = media.digest();
    allow_thin_volumes(&media, &superblock).unwrap();
    assert!(before == media.digest());
}

/// The damaged copy is written first, so that one copy is whole at any time.
#[test]
fn feature_bit_is_set_although_a_copy_is_damaged() {
    for damaged in SUPERBLOCK_OFFSETS {
        let (media, pool) = new_pool();
        media.store_word(damaged + 80, 9).unwrap();
        media.persist_range(0..media.len_bytes()).unwrap();
        media.record();
        allow_thin_volumes(&media, &pool.superblock()).unwrap();
        let opens = |image: &Simulator| open(image).map(drop).map_err(|error| error.to_string());
        verify_each(&media.take_points(), 200, &mut Random::new(1), &opens).unwrap();
        assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    }
}

/// The superblock in memory is older than the one with the feature bit. Two different copies with
/// the same sequence number would both count as damaged.
#[test]
fn superblock_is_updated_after_the_feature_bit_was_set() {
    let (media, pool) = new_pool();
    allow_thin_volumes(&media, &pool.superblock()).unwrap();
    media.record();
    let sequence = pool.superblock().sequence + 1;
    let newer = Superblock { sequence, strg_bytes: CHUNK_BYTES, ..pool.superblock() };
    rewrite(&media, &newer).unwrap();
    let opens = |image: &Simulator| match open(image) {
        Ok(pool) if pool.superblock().has_thin_volumes => Ok(()),
        other => Err(format!("{other:?}")),
    };
    verify_each(&media.take_points(), 200, &mut Random::new(1), &opens).unwrap();
    assert_eq!(open(&media).unwrap().superblock().strg_bytes, CHUNK_BYTES);
}

/// Both copies are damaged after the pool was opened, and the first thin volume is younger too.
#[test]
fn feature_bit_is_kept_if_both_copies_are_damaged() {
    let (media, pool) = new_pool();
    let size = VolumeSize::Bytes(CHUNK_BYTES);
    let options =
        VolumeOptions { size, format: VolumeFormat::Raw, thin: true, reserve_bytes: None };
    pool.create_volume_with("thin", options).unwrap();
    SUPERBLOCK_OFFSETS.iter().for_each(|at| media.store_word(at + 80, 9).unwrap());
    let old = pool.superblock();
    let new = grow::plan(&old, 16 * CHUNK_BYTES).unwrap();
    grow::announce_growth(&media, &old, &new).unwrap();
    assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
}

#[test]
fn missing_feature_bit_of_a_thin_volume_is_set_by_the_next_open() {
    let (media, pool) = new_pool();
    let record = record(3);
    let offsets = pool.superblock().volume_record_offsets(record.slot);
    mirrored::write(&media, offsets, &record.to_bytes()).unwrap();
    drop(pool);
    let finding = Finding::ThinFeatureMissing { name: "thin".to_owned() };
    let reader = open_for(&media, OpenMode::ReadOnly).unwrap();
    assert_eq!(reader.check().unwrap().pool, std::slice::from_ref(&finding));
    assert_eq!(features(&media), [0; 2]);
    drop(reader);
    assert_eq!(open(&media).unwrap().findings_at_open(), [finding]);
    assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    let pool = open(&media).unwrap();
    assert_eq!((pool.findings_at_open(), pool.check().unwrap().pool), (vec![], vec![]));
}

/// The search for the metadata of a part takes time in proportion to its size.
#[test]
fn unformatted_parts_larger_than_the_pool_are_invalid() {
    for (chunks, first) in [([9, 9], 1), ([1 << 28, 9], 0)] {
        let (media, pool) = new_pool();
        for (slot, (chunks, name)) in (0..).zip(chunks.into_iter().zip(["a", "b"])) {
            let part = Part { origin: Slot(0), index: 9 * slot, is_unformatted: true };
            let record = VolumeRecord {
                slot: Slot(slot as u16),
                name: name.parse().unwrap(),
                format: VolumeFormat::Btt,
                part: Some(part),
                ..record(chunks)
            };
            let offsets = pool.superblock().volume_record_offsets(record.slot);
            mirrored::write(&media, offsets, &record.to_bytes()).unwrap();
        }
        let findings = open_for(&media, OpenMode::Peek).unwrap().findings_at_open();
        let invalid = |slot| move |finding: &Finding| matches!(finding, Finding::VolumeRecordInvalid { slot: s, .. } if *s == slot);
        assert!(findings.iter().any(invalid(first)), "{findings:?}");
        assert_eq!(findings.iter().any(invalid(0)), first == 0, "{findings:?}");
    }
}

/// Programs without the feature see an unknown bit, as this version does with other bits.
#[test]
fn unknown_feature_for_writers_allows_only_reads() {
    let (media, pool) = new_pool();
    let mut bytes = pool.superblock().to_bytes();
    bytes.features_read_only.set(FEATURE_THIN_VOLUMES << 1);
    mirrored::seal(&mut bytes);
    mirrored::write(&media, SUPERBLOCK_OFFSETS, &bytes).unwrap();
    let error = open(&media).unwrap_err();
    assert!(matches!(error, PoolError::Features { features: 2, .. }), "{error}");
    open_for(&media, OpenMode::ReadOnly).unwrap();
}

/// Writes the record of a thin raw volume of `chunks` chunks, which are all holes.
fn with_thin_volume(media: &dyn Media, pool: Arc<OtherPool>, chunks: u32) {
    let record = record(chunks);
    allow_thin_volumes(media, &pool.superblock()).unwrap();
    let offsets = pool.superblock().volume_record_offsets(record.slot);
    mirrored::write(media, offsets, &record.to_bytes()).unwrap();
}

fn open_thin(chunks: u32) -> (Simulator, Arc<OtherPool>, OtherVolume) {
    let (media, pool) = new_pool();
    with_thin_volume(&media, pool, chunks);
    let pool = open(&media).unwrap();
    let volume = pool.open_volume("thin").unwrap();
    (media, pool, volume)
}

fn allocated_chunks(pool: &OtherPool) -> u64 {
    assert_states_add_up(&pool.info());
    pool.info().volume_bytes / CHUNK_BYTES
}

#[test]
fn holes_read_as_zeros_and_calls_that_store_nothing_allocate_nothing() {
    let (media, pool, volume) = open_thin(5);
    assert_eq!((volume.size_bytes(), volume.info().allocated_bytes), (5 * CHUNK_BYTES, 0));
    let before = media.digest();
    let mut bytes = vec![7; 3 * CHUNK_BYTES as usize];
    for read in [Media::read, Media::load] {
        bytes.fill(7);
        read(&volume, 8, &mut bytes).unwrap();
        assert!(crate::media::is_zero(&bytes));
    }
    assert_eq!(volume.load_word(2 * CHUNK_BYTES).unwrap(), 0);
    assert_eq!(volume.next_data(0..5 * CHUNK_BYTES).unwrap(), None);
    volume.prefetch_word(16);
    volume.persist_range(0..5 * CHUNK_BYTES).unwrap();
    let mut pending = Pending::default();
    volume.begin_persist(0..4 * CHUNK_BYTES, &mut pending).unwrap();
    // A hole already reads as zeros, so zeros are not stored.
    volume.store(CHUNK_BYTES - 8, &[0; 16]).unwrap();
    volume.store_word(64, 0).unwrap();
    volume.store_bulk(CHUNK_BYTES - 8, &[0; 16], &mut pending).unwrap();
    volume.end_persist(&pending).unwrap();
    volume.provision(9..9).unwrap();
    volume.flush_guest_stores(0..5 * CHUNK_BYTES).unwrap();
    assert!(pending.ranges().is_empty());
    assert_eq!(allocated_chunks(&pool), 0);
    assert!(before == media.digest());
}

#[test]
fn store_into_a_hole_allocates_its_chunk_durably() {
    type Store = fn(&OtherVolume, u64, &[u8]);
    let store: Store = |volume, at, bytes| {
        volume.store(at, bytes).unwrap();
        volume.persist_range(at..at + bytes.len() as u64).unwrap();
    };
    let store_bulk: Store = |volume, at, bytes| {
        let mut pending = Pending::default();
        volume.store_bulk(at, bytes, &mut pending).unwrap();
        volume.end_persist(&pending).unwrap();
    };
    let store_words: Store = |volume, at, bytes| {
        for (at, word) in (at..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            volume.store_word(at, u64::from_le_bytes(*word)).unwrap();
        }
        volume.persist_range(at..at + bytes.len() as u64).unwrap();
    };
    for store in [store, store_bulk, store_words] {
        let (media, pool, volume) = open_thin(5);
        store(&volume, 4 * CHUNK_BYTES + 8, &[3; 8]);
        assert_eq!(allocated_chunks(&pool), 1);
        // The first half contains zeros, so only chunk 2 is allocated.
        let bytes = [[0; 8], [5; 8]].concat();
        store(&volume, 2 * CHUNK_BYTES - 8, &bytes);
        assert_eq!(allocated_chunks(&pool), 2);
        store(&volume, 3 * CHUNK_BYTES - 8, &[6; 16]);
        assert_eq!(allocated_chunks(&pool), 3);
        media.record();
        drop((volume, pool));
        // The image contains only durable words.
        let image = media.take_points()[0].images(1, &mut Random::new(1)).pop().unwrap();
        let volume = open(&image).unwrap().open_volume("thin").unwrap();
        let word = |at| volume.load_word(at).unwrap().to_le_bytes();
        assert_eq!(volume.info().allocated_bytes, 3 * CHUNK_BYTES);
        assert_eq!(word(4 * CHUNK_BYTES + 8), [3; 8]);
        assert_eq!([word(2 * CHUNK_BYTES - 8), word(2 * CHUNK_BYTES)], [[0; 8], [5; 8]]);
        assert_eq!([word(3 * CHUNK_BYTES - 8), word(3 * CHUNK_BYTES)], [[6; 8]; 2]);
    }
}

/// A guest stores into the chunk through a mapping of the file.
#[test]
fn provisioned_chunk_belongs_to_the_volume_before_its_place_is_known() {
    let (media, pool, volume) = open_thin(5);
    let place = volume.provision_chunk(3).unwrap();
    assert_eq!((volume.provision_chunk(3).unwrap(), allocated_chunks(&pool)), (place, 1));
    media.store_word(place + 8, 7).unwrap();
    media.persist_range(place..place + 16).unwrap();
    media.record();
    drop((volume, pool));
    // The image contains only durable words.
    let image = media.take_points()[0].images(1, &mut Random::new(1)).pop().unwrap();
    let volume = open(&image).unwrap().open_volume("thin").unwrap();
    assert_eq!(volume.info().allocated_bytes, CHUNK_BYTES);
    assert_eq!([0, 8, 16].map(|at| volume.load_word(3 * CHUNK_BYTES + at).unwrap()), [0, 7, 0]);
}

#[test]
fn full_pool_refuses_a_store_into_a_hole_but_no_other_store() {
    // The volume has more chunks than the pool, which has 10 usable ones.
    let (_media, pool, volume) = open_thin(20);
    volume.provision(0..9 * CHUNK_BYTES + 1).unwrap();
    assert_eq!((allocated_chunks(&pool), pool.info().free_bytes), (10, 0));
    let full = |result: Result<(), MediaError>| match result {
        Err(MediaError::Full { needed_bytes, available_bytes: 0 }) => needed_bytes / CHUNK_BYTES,
        other => panic!("{other:?}"),
    };
    assert_eq!(full(volume.provision(9 * CHUNK_BYTES..13 * CHUNK_BYTES)), 3);
    assert_eq!(full(volume.store_word(10 * CHUNK_BYTES, 1)), 1);
    assert_eq!(full(volume.store(10 * CHUNK_BYTES - 8, &[1; 16])), 1);
    assert_eq!(volume.load_word(10 * CHUNK_BYTES - 8).unwrap(), 0, "a part was stored");
    volume.store_word(9 * CHUNK_BYTES, 4).unwrap();
    volume.persist_range(0..20 * CHUNK_BYTES).unwrap();
    assert!(pool.is_writable());
}

#[test]
fn released_chunks_are_holes_that_get_other_chunks() {
    let (_media, pool, volume) = open_thin(5);
    let chunk = |index: u64| index * CHUNK_BYTES..(index + 1) * CHUNK_BYTES;
    for index in 0..4 {
        volume.store_word(index * CHUNK_BYTES, index + 1).unwrap();
    }
    assert_eq!((allocated_chunks(&pool), volume.release_unit_bytes()), (4, Some(CHUNK_BYTES)));
    let places = crash::places(&volume);
    // While the reads are checked, the chunk is already a hole. Chunk 1 stays in use.
    let is_read = |unit: &std::ops::Range<u64>| {
        assert_eq!(volume.load_word(unit.start).unwrap(), 0);
        *unit == chunk(1)
    };
    let kept = volume.release(&[chunk(0), chunk(1), chunk(2), chunk(4)], &is_read).unwrap();
    assert_eq!((kept, allocated_chunks(&pool)), (vec![chunk(1)], 2));
    assert_eq!(volume.allocated_bytes(), 2 * CHUNK_BYTES);
    assert_eq!(volume.released_bytes(), 2 * CHUNK_BYTES);
    let words = || [0, 1, 2, 3].map(|index| volume.load_word(index * CHUNK_BYTES).unwrap());
    assert_eq!(words(), [0, 2, 0, 4]);
    assert_eq!(crash::places(&volume), [places[1], places[3]]);
    // The released chunks wait to be erased.
    assert_eq!(pool.info().scrubbing_bytes, 2 * CHUNK_BYTES);
    volume.provision(0..5 * CHUNK_BYTES).unwrap();
    assert_eq!(words(), [0, 2, 0, 4]);
    assert_eq!(pool.check().unwrap().pool, []);
    drop(volume);
    pool.convert_volume("thin", false).unwrap();
    let volume = pool.open_volume("thin").unwrap();
    assert_eq!(volume.release_unit_bytes(), None);
    assert!(matches!(volume.release(&[chunk(0)], &|_| false), Err(MediaError::ReadOnly)));
}

#[test]
#[should_panic(expected = "is not a chunk")]
fn release_of_a_part_of_a_chunk_panics() {
    let (_media, _pool, volume) = open_thin(5);
    let unit = CHUNK_BYTES / 2..CHUNK_BYTES;
    let _ = volume.release(std::slice::from_ref(&unit), &|_| false);
}

#[test]
fn added_chunks_are_inserted_by_index() {
    let mut random = Random::new(1);
    for _ in 0..200 {
        let [mut chunks, mut added] = [vec![], vec![]];
        for index in 0..random.below(40) as u32 {
            let chunk = (index, ChunkId(random.below(1000) as u32));
            match random.below(3) {
                0 => chunks.push(chunk),
                1 => added.push(chunk),
                _ => {}
            }
        }
        let mut expected = [&chunks[..], &added].concat();
        expected.sort_unstable();
        let mut entry = scan::VolumeEntry { record: record(40), chunks };
        let before = entry.chunks.clone();
        entry.insert_chunks(&added);
        assert_eq!(entry.chunks, expected);
        added.sort_unstable();
        entry.remove_chunks(&added);
        assert_eq!(entry.chunks, before);
    }
}

/// The search takes time in proportion to the pool, and locks the state of a volume in use.
#[test]
fn store_into_a_hole_does_not_search_all_free_chunks() {
    let (_media, pool, volume) = open_thin(8);
    // Each chunk has another index than its place, so that the next place is never free.
    // The state is unlocked again before an assertion fails.
    let searches = || pool.lock_state().buddy.searches();
    for index in [4, 2, 6, 1, 7, 3] {
        let before = searches();
        volume.store_word(index * CHUNK_BYTES, index).unwrap();
        let after = searches();
        assert_eq!(after, before);
    }
    let extents = volume.allocated_extents();
    assert!(extents.len() > 2, "{extents:?}");
    for index in [0, 4, 2, 6, 1, 7, 3] {
        assert_eq!(volume.load_word(index * CHUNK_BYTES).unwrap(), index);
    }
    assert_eq!(pool.check().unwrap().pool, []);
}

/// Chunks that wait to be erased are erased on demand, each hole gets a single chunk, and no other
/// thread waits for the erasure.
#[test]
fn threads_that_fill_the_same_holes_allocate_them_once() {
    let unlocked = Arc::new(Mutex::new(Vec::new()));
    let in_hook: Arc<OnceLock<std::sync::Weak<OtherPool>>> = Arc::default();
    let (log, of_hook) = (Arc::clone(&unlocked), Arc::clone(&in_hook));
    let media = Hooked::new(24 * CHUNK_BYTES, move || {
        if let Some(pool) = of_hook.get().and_then(std::sync::Weak::upgrade) {
            log.lock().unwrap().push(pool.state.try_lock().is_ok());
        }
        Ok(())
    });
    with_thin_volume(&media, hooked::open(media.clone()), 16);
    let pool = hooked::open(media.clone());
    // Waiting chunks are left after memory was lent, returned and lent again.
    let memory = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
    pool.free_memory(&memory).unwrap();
    pool.alloc_memory(pool.info().lendable_bytes).unwrap();
    assert!(pool.info().scrubbing_bytes >= 4 * CHUNK_BYTES);
    let volume = pool.open_volume("thin").unwrap();
    // A single thread: the erasure, then the persist of the owner words.
    assert!(in_hook.set(Arc::downgrade(&pool)).is_ok());
    let clean = pool.info().free_bytes;
    volume.provision(0..clean + 2 * CHUNK_BYTES).unwrap();
    assert_eq!(*unlocked.lock().unwrap(), [true, false]);
    let before = allocated_chunks(&pool);
    let rest = before * CHUNK_BYTES..16 * CHUNK_BYTES;
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (volume, rest) = (&volume, rest.clone());
            scope.spawn(move || {
                volume.provision(rest.clone()).unwrap();
                volume.store_word(rest.start + thread * 8, thread + 1).unwrap();
            });
        }
    });
    assert_eq!(allocated_chunks(&pool), 16);
    for thread in 0..8 {
        assert_eq!(volume.load_word(rest.start + thread * 8).unwrap(), thread + 1);
    }
    assert_eq!(pool.check().unwrap().pool, []);
}

/// Changes the parent UUID of an info block so that its checksum is zero.
fn seal_with_zero(info: &mut [u8; 4096]) {
    info[32..48].fill(0);
    info[4088..].fill(0);
    let (mut low, mut high) = (0u32, 0u32);
    for word in info.as_chunks::<4>().0 {
        low = low.wrapping_add(u32::from_le_bytes(*word));
        high = high.wrapping_add(low);
    }
    // The sum of sums contains word 8 of the 1024 words 1016 times, and word 9 1015 times.
    let first = low.wrapping_mul(1015).wrapping_sub(high);
    info[32..36].copy_from_slice(&first.to_le_bytes());
    info[36..40].copy_from_slice(&low.wrapping_add(first).wrapping_neg().to_le_bytes());
}

/// Start of an arena whose info block spans two chunks.
const IN_TWO_CHUNKS: u64 = 10 * CHUNK_BYTES - 2048;

/// Creates a thin BTT volume of `chunks`, in which another program has placed the arenas after the
/// first one at `starts`. The checksum of the one at [`IN_TWO_CHUNKS`] is zero and in a hole.
fn with_checksum_in_a_hole(chunks: u64, starts: &[u64]) -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(44, |superblock| superblock.volume_slots = 4);
    let size = |chunks| VolumeSize::Bytes(chunks * CHUNK_BYTES);
    let options =
        VolumeOptions { size: size(9), format: VolumeFormat::Btt, thin: true, reserve_bytes: None };
    pool.create_volume_with("v", options).unwrap();
    for chunks in (18..=chunks).step_by(9) {
        pool.resize_volume("v", size(chunks), Shrink::Refuse).unwrap();
    }
    let volume = pool.open_volume("v").unwrap();
    let field = |info: &[u8], at| u64::from_le_bytes(info[at..at + 8].try_into().unwrap());
    const FLOG: usize = 104;
    const COPY: usize = 112;
    let mut arenas = vec![];
    let mut from = 4096;
    for start in std::iter::once(from).chain(starts.iter().copied()) {
        let mut info = [0; 4096];
        volume.read(from, &mut info).unwrap();
        let flog = field(&info, FLOG)..field(&info, COPY);
        let mut flog = vec![0; (flog.end - flog.start) as usize];
        volume.read(from + field(&info, FLOG), &mut flog).unwrap();
        from += field(&info, NEXT);
        arenas.push((start, info, flog));
    }
    for (at, (start, mut info, flog)) in arenas.into_iter().enumerate() {
        let next = starts.get(at).map_or(0, |next| next - start);
        info[NEXT..NEXT + 8].copy_from_slice(&next.to_le_bytes());
        seal_with_zero(&mut info);
        if start != IN_TWO_CHUNKS {
            // Another value of word 8, and the checksum that follows from it.
            let word = u32::from_le_bytes(info[32..36].try_into().unwrap()).wrapping_add(1);
            info[32..36].copy_from_slice(&word.to_le_bytes());
            info[4088..].copy_from_slice(&(1016u64 << 32 | 1).to_le_bytes());
        }
        volume.store(start + field(&info, FLOG), &flog).unwrap();
        for at in [start, start + field(&info, COPY)] {
            volume.store(at, &info).unwrap();
            volume.persist_range(at..at + 4096).unwrap();
        }
    }
    assert!(is_hole(&volume, IN_TWO_CHUNKS + 4088));
    drop(volume);
    (media, pool)
}

/// Offset of the distance to the next arena in an info block.
const NEXT: usize = 80;

fn is_hole(volume: &OtherVolume, at: u64) -> bool {
    let index = (at / CHUNK_BYTES) as u32;
    let extents = volume.allocated_extents();
    !extents.iter().any(|e| (e.index..e.index + e.run.chunks).contains(&index))
}

/// Another program may place an arena so that its info block spans two chunks. If the second half
/// contains only zeros, its chunk may be a hole.
#[test]
fn growth_allocates_a_chunk_for_a_checksum_in_a_hole() {
    let (_media, pool) = with_checksum_in_a_hole(27, &[IN_TWO_CHUNKS]);
    pool.resize_volume("v", VolumeSize::Bytes(36 * CHUNK_BYTES), Shrink::Refuse).unwrap();
    let volume = pool.open_volume("v").unwrap();
    assert_ne!(volume.load_word(IN_TWO_CHUNKS + NEXT as u64).unwrap(), 0, "no arena was added");
    let checksum_at = IN_TWO_CHUNKS + 4088;
    assert!(!is_hole(&volume, checksum_at) && volume.load_word(checksum_at).unwrap() != 0);
}

/// A shrink allocates no chunk for the checksum that changes with the distance to the next arena.
#[test]
fn shrink_before_an_arena_with_a_checksum_in_a_hole_is_refused() {
    let (_media, pool) = with_checksum_in_a_hole(36, &[IN_TWO_CHUNKS, 20 * CHUNK_BYTES]);
    let shrink =
        |chunks| pool.resize_volume("v", VolumeSize::Bytes(chunks * CHUNK_BYTES), Shrink::Allow);
    let error = shrink(20).unwrap_err();
    let PoolError::VolumeUnusable { name, reason } = &error else { panic!("{error:?}") };
    assert_eq!(name, "v");
    assert!(reason.contains("arena 1") && reason.contains("checksum is in a hole"), "{reason}");
    assert_eq!(pool.volumes()[0].size_bytes, 36 * CHUNK_BYTES);
    // The checksum of the first arena is not zero.
    shrink(10).unwrap();
    assert!(pool.check().unwrap().is_clean());
}
