//! Crashes during the growth of a pool. The pool should have its old or new size, and all of its
//! content.

use super::crash::{
    Volumes, fill_volume, new_pool_with, open, report_images, verify_points, volumes_of,
};
use super::*;
use crate::btt::Engine;
use crate::media::simulator::{Random, Simulator};
use crate::progress::ignore_progress;

const CHUNKS: u32 = 14;
const GROWN: u32 = 17;

/// Creates a pool with a volume. Its chunk table is at `table_offset`.
fn with_volume(table_offset: u64) -> (Simulator, Arc<OtherPool>, Volumes) {
    let (media, pool) = new_pool_with(|superblock| superblock.chunk_table_offset = table_offset);
    pool.create_volume("v", VolumeSize::Bytes(4 * CHUNK_BYTES), VolumeFormat::Raw).unwrap();
    fill_volume(&media, &pool, "v");
    let volumes = volumes_of(&pool);
    (media, pool, volumes)
}

/// At this offset, the table ends at the end of its chunk, so it cannot grow in place.
const TABLE_AT_THE_END: u64 = 2 * CHUNK_BYTES - CHUNKS as u64 * 16;

fn new_bytes() -> u64 {
    u64::from(GROWN) * CHUNK_BYTES
}

/// Opens the images, and returns the sizes of their pools.
fn observed_sizes(media: &Simulator, volumes: &Volumes, bound: usize) -> Result<Vec<u64>, String> {
    observed_sizes_with(media, &[volumes], bound)
}

/// Opens the images, whose volumes should match one of `allowed`.
fn observed_sizes_with(
    media: &Simulator,
    allowed: &[&Volumes],
    bound: usize,
) -> Result<Vec<u64>, String> {
    let points = media.take_points();
    let mut random = Random::new(17);
    let images = verify_points(&points, bound, allowed, &mut random)?;
    report_images(images);
    let mut sizes: Vec<u64> = points
        .iter()
        .flat_map(|point| point.images(16, &mut random))
        .map(|image| open(&image).unwrap().info().total_bytes)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

#[test]
fn crash_in_a_growth_leaves_the_old_or_new_size_and_all_volumes() {
    for (table_offset, moves) in [(CHUNK_BYTES, false), (TABLE_AT_THE_END, true)] {
        let (media, pool, volumes) = with_volume(table_offset);
        pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
        let new = grow::plan(&pool.superblock(), new_bytes()).unwrap();
        assert_eq!(new.chunk_table_offset == u64::from(CHUNKS) * CHUNK_BYTES, moves);
        media.record();
        pool.grow_on(new_bytes(), |_| Ok(()), |_| media.extend(new_bytes())).unwrap();
        let sizes = observed_sizes(&media, &volumes, 160).unwrap();
        assert_eq!(sizes, [u64::from(CHUNKS) * CHUNK_BYTES, new_bytes()]);
        assert_eq!(pool.superblock(), new);
        pool.scrub_all().unwrap();
        assert_eq!(pool.info().metadata_bytes, 2 * CHUNK_BYTES, "the old table's chunk is free");
        assert_eq!(pool.check().unwrap().pool, []);
    }
}

/// Creates the first thin volume, and exchanges lent chunks.
fn change_chunks(pool: &OtherPool) {
    let size = VolumeSize::Bytes(10 * CHUNK_BYTES);
    let options =
        VolumeOptions { size, format: VolumeFormat::Btt, thin: true, reserve_bytes: Some(0) };
    pool.create_volume_with("w", options).unwrap();
    let extents = pool.alloc_memory(CHUNK_BYTES).unwrap();
    pool.alloc_memory(CHUNK_BYTES).unwrap();
    pool.free_memory(&extents).unwrap();
}

#[test]
fn changes_during_a_growth_survive_a_crash() {
    for table_offset in [CHUNK_BYTES, TABLE_AT_THE_END] {
        let (media, pool, before) = with_volume(table_offset);
        media.record();
        let grown = pool.grow_on(
            new_bytes(),
            |_| Ok(()),
            |_| {
                change_chunks(&pool);
                media.extend(new_bytes())
            },
        );
        grown.unwrap();
        pool.alloc_memory(pool.info().lendable_bytes).unwrap();
        assert_states_add_up(&pool.info());
        let after = volumes_of(&pool);
        let sizes = observed_sizes_with(&media, &[&before, &after], 160).unwrap();
        assert_eq!(sizes, [u64::from(CHUNKS) * CHUNK_BYTES, new_bytes()]);
        assert_eq!(pool.check().unwrap().pool, []);
    }
}

/// Two clients may request a growth at the same time, after both have read the same size.
#[test]
fn each_growth_extends_the_pool_from_its_present_end() {
    let (media, pool, _) = with_volume(CHUNK_BYTES);
    let end = |chunks: u32| u64::from(chunks) * CHUNK_BYTES;
    let ranges = std::cell::RefCell::new(vec![]);
    let grow_to = |size_bytes| {
        let check = |growth: &grow::Growth| {
            ranges.borrow_mut().push(growth.added());
            Ok(())
        };
        pool.grow_on(size_bytes, check, |growth| {
            ranges.borrow_mut().push(growth.added());
            // A growth in progress refuses others before their checks.
            let second = pool.grow_on(end(GROWN + 1), |_| panic!(), |_| panic!());
            assert!(matches!(second, Err(grow::Failure::Pool(PoolError::Growing { .. }))));
            media.extend(size_bytes)
        })
    };
    grow_to(end(GROWN)).unwrap();
    let lent = pool.alloc_memory(end(3)).unwrap();
    grow_to(end(GROWN + 1)).unwrap();
    let (first, second) = (end(CHUNKS)..end(GROWN), end(GROWN)..end(GROWN + 1));
    assert_eq!(*ranges.borrow(), [first.clone(), first, second.clone(), second]);
    // A smaller size, and one that the check refuses, change nothing.
    assert!(matches!(grow_to(end(GROWN)), Err(grow::Failure::Pool(PoolError::Size { .. }))));
    let refused = |_: &grow::Growth| Err(PoolError::Growing { path: "checked".into() });
    pool.grow_on(end(GROWN + 2), refused, |_| panic!()).unwrap_err();
    assert_eq!(pool.superblock().growing_to_bytes, 0);
    pool.free_memory(&lent).unwrap();
    assert_states_add_up(&pool.info());
    assert_eq!(pool.check().unwrap().pool, []);
}

/// In this order, changes between the copy of a table and the superblock are lost.
#[test]
fn table_that_is_copied_without_the_lock_is_detected() {
    let (media, pool, before) = with_volume(TABLE_AT_THE_END);
    let new = grow::plan(&pool.superblock(), new_bytes()).unwrap();
    media.record();
    let announced = grow::announce_growth(&media, &pool.superblock(), &new).unwrap();
    media.extend(new_bytes()).unwrap();
    grow::write_table(&media, &announced, &new).unwrap();
    let made = VolumeSize::Bytes(2 * CHUNK_BYTES);
    pool.create_volume("w", made, VolumeFormat::Raw).unwrap();
    fill_volume(&media, &pool, "w");
    superblock::rewrite(&media, &new).unwrap();
    let after = volumes_of(&pool);
    observed_sizes_with(&media, &[&before, &after], 64).expect_err("the lost marks");
}

#[test]
fn failed_growth_of_a_file_changes_nothing() {
    let (media, pool, volumes) = with_volume(CHUNK_BYTES);
    media.record();
    let failure = pool.grow_on(
        new_bytes(),
        |_| Ok(()),
        |_| {
            // The disk becomes full after a part of the growth.
            media.extend(new_bytes() - CHUNK_BYTES)?;
            media.set_len(u64::from(CHUNKS) * CHUNK_BYTES);
            Err(std::io::Error::from_raw_os_error(libc::ENOSPC))
        },
    );
    assert!(matches!(failure, Err(grow::Failure::NoSpace { .. })));
    assert_eq!(observed_sizes(&media, &volumes, 64).unwrap(), [u64::from(CHUNKS) * CHUNK_BYTES]);
    let again = open(&media).unwrap();
    assert_eq!(again.findings_at_open(), []);
    assert_eq!(again.superblock().growing_to_bytes, 0);
}

#[test]
fn longer_file_before_its_announcement_is_detected() {
    let (media, pool, volumes) = with_volume(CHUNK_BYTES);
    let new = grow::plan(&pool.superblock(), new_bytes()).unwrap();
    media.record();
    media.extend(new_bytes()).unwrap();
    grow::announce_growth(&media, &pool.superblock(), &new).unwrap();
    grow::write_table(&media, &pool.superblock(), &new).unwrap();
    superblock::rewrite(&media, &new).unwrap();
    let error = observed_sizes(&media, &volumes, 64).expect_err("the wrong order was not detected");
    assert!(error.contains("does not open") && error.contains("Truncate the file"), "{error}");
}

#[test]
fn superblock_before_its_table_is_detected() {
    for table_offset in [CHUNK_BYTES, TABLE_AT_THE_END] {
        let (media, pool, volumes) = with_volume(table_offset);
        let new = grow::plan(&pool.superblock(), new_bytes()).unwrap();
        media.record();
        grow::announce_growth(&media, &pool.superblock(), &new).unwrap();
        media.extend(new_bytes()).unwrap();
        superblock::rewrite(&media, &new).unwrap();
        grow::write_table(&media, &pool.superblock(), &new).unwrap();
        let error =
            observed_sizes(&media, &volumes, 64).expect_err("the wrong order was not detected");
        assert!(error.contains("does not open") && error.contains("owner word"), "{error}");
    }
}

#[test]
fn pool_in_a_file_grows_and_keeps_its_content() {
    for folder in ["/dev/shm".into(), std::env::current_dir().unwrap()] {
        let fixture = Fixture { folder: TempDir::new_in(folder).unwrap() };
        let pool = fixture.create(64 * MIB, 8 * MIB);
        let made = pool.create_volume("a", VolumeSize::Remaining, VolumeFormat::Btt).unwrap();
        let uuid = pool.uuid();
        assert!(matches!(Pool::grow(&fixture.path(), 96 * MIB), Err(PoolError::InUse { .. })));
        drop(pool);
        let before = fixture.image();
        let refused = |bytes| Pool::grow(&fixture.path(), bytes).unwrap_err();
        for bytes in [0, 62 * MIB, 64 * MIB, 65 * MIB, MAX_POOL_BYTES + CHUNK_BYTES] {
            assert!(
                matches!(refused(bytes), PoolError::Size { value, .. } if value == bytes),
                "{bytes}"
            );
        }
        assert!(matches!(refused(MAX_POOL_BYTES), PoolError::FileSystemFull { .. }));
        assert!(before == fixture.image());

        let pool = Pool::grow(&fixture.path(), 96 * MIB).unwrap();
        assert!(matches!(
            Pool::open(&fixture.path(), OpenMode::ReadOnly),
            Err(PoolError::InUse { .. })
        ));
        assert_eq!((pool.uuid(), pool.volumes()), (uuid, vec![made]));
        assert_eq!((pool.info().total_bytes, pool.info().free_bytes), (96 * MIB, 32 * MIB));
        assert_states_add_up(&pool.info());
        pool.alloc_memory(32 * MIB).unwrap();
        drop(pool);
        assert!(fixture.check().is_clean());
        assert_eq!(fixture.image().1, 96 * MIB);
        // Grows again, with an unknown feature in the superblocks.
        super::damage::with_superblock(&fixture, |s| s.features_compatible.set(16));
        let pool = Pool::grow(&fixture.path(), 128 * MIB).unwrap();
        pool.scrub_all().unwrap();
        assert_eq!(pool.info().free_bytes, 64 * MIB);
        drop(pool);
        super::damage::with_superblock(&fixture, |s| assert_eq!(s.features_compatible.get(), 16));
    }
}

#[test]
fn full_pool_grows_while_its_chunks_are_in_use() {
    for folder in ["/dev/shm".into(), std::env::current_dir().unwrap()] {
        let fixture = Fixture { folder: TempDir::new_in(folder).unwrap() };
        let pool = fixture.create(64 * MIB, 0);
        pool.create_volume("v", VolumeSize::Bytes(24 * MIB), VolumeFormat::Btt).unwrap();
        let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
        engine.write(5, &[5; 4096]).unwrap();
        let lent = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
        assert!(matches!(pool.alloc_memory(2 * MIB), Err(PoolError::PoolFull { .. })));
        let refused = |bytes| pool.grow_in_use(Some(bytes), false, &mut ignore_progress);
        for bytes in [0, 64 * MIB, 65 * MIB, MAX_POOL_BYTES + CHUNK_BYTES] {
            assert!(matches!(refused(bytes), Err(PoolError::Size { .. })), "{bytes}");
        }
        assert!(matches!(
            pool.grow_in_use(None, false, &mut ignore_progress),
            Err(PoolError::SizeNeeded { .. })
        ));
        for size_bytes in [70 * MIB, 96 * MIB] {
            pool.grow_in_use(Some(size_bytes), false, &mut ignore_progress).unwrap();
            assert_eq!(pool.info().total_bytes, size_bytes);
            assert_states_add_up(&pool.info());
        }
        assert_eq!(pool.alloc_memory(32 * MIB).unwrap()[0].offset_bytes(), 64 * MIB);
        pool.free_memory(&lent).unwrap();
        engine.write(6, &[6; 4096]).unwrap();
        let mut data = [0; 4096];
        engine.read(5, &mut data).unwrap();
        assert_eq!(data, [5; 4096]);
        drop(engine);
        assert!(pool.check().unwrap().is_clean());
        drop(pool);
        assert_eq!(fixture.open().info().total_bytes, 96 * MIB);
        assert!(fixture.check().is_clean());
    }
}

#[test]
fn table_without_space_moves_to_new_chunks_or_growth_is_refused() {
    let full = Superblock::new(uuid::Uuid::nil(), 0, 131_072, 0);
    let plan = |chunks: u64| grow::plan(&full, chunks * CHUNK_BYTES);
    let error = plan(131_073).unwrap_err();
    assert!(error.to_string().contains("needs 4 MiB of the added space"), "{error}");
    let moved = plan(131_074).unwrap();
    assert_eq!(moved.chunk_table_offset, 131_072 * CHUNK_BYTES);
    assert_eq!(moved.metadata_chunks(), 3);
    let roomy = Superblock::new(uuid::Uuid::nil(), 0, 131_071, 0);
    let stays = grow::plan(&roomy, 131_072 * CHUNK_BYTES).unwrap();
    assert_eq!(stays.chunk_table_offset, roomy.chunk_table_offset);
    // A copy of the volume table follows the chunk table directly, so the chunk table cannot grow
    // in place.
    let mut crowded = Superblock::new(uuid::Uuid::nil(), 0, 100, 0);
    crowded.volume_table_offsets[1] = CHUNK_BYTES + 1600;
    assert_eq!(
        grow::plan(&crowded, 101 * CHUNK_BYTES).unwrap().chunk_table_offset,
        100 * CHUNK_BYTES
    );
}

#[test]
fn interrupted_growth_is_reported_and_undone() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let new = grow::plan(&pool.superblock(), 96 * MIB).unwrap();
    grow::announce_growth(pool.media(), &pool.superblock(), &new).unwrap();
    drop(pool);
    let resize = |bytes| {
        OpenOptions::new().write(true).open(fixture.path()).unwrap().set_len(bytes).unwrap()
    };
    for file_bytes in [64 * MIB, 80 * MIB, 96 * MIB] {
        resize(file_bytes);
        let report = fixture.check();
        assert_eq!(report.pool, [Finding::GrowthUnfinished { to_bytes: 96 * MIB }]);
        assert!(report.is_clean());
        assert_eq!(fixture.image().1, file_bytes, "a check changes nothing");
    }
    resize(98 * MIB);
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Enlarged { .. }));
    resize(96 * MIB);
    assert_eq!(fixture.open().info().total_bytes, 64 * MIB);
    assert_eq!(fixture.image().1, 64 * MIB);
    assert_eq!(fixture.check().pool, []);
}
