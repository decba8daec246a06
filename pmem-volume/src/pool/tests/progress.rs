//! Tests of progress reports for long operations.

use super::*;
use crate::pool::CreateOptions;
use crate::progress::{Progress, Task};

/// Checks that all reports belong to one task, start at zero, never decrease, and end at the total.
fn assert_whole(reported: &[Progress], task: Task, total_bytes: u64) {
    let (first, last) = (reported.first().unwrap(), reported.last().unwrap());
    assert_eq!((first.done_bytes, last.done_bytes), (0, total_bytes), "{reported:?}");
    assert!(
        reported.iter().all(|now| now.task == task && now.total_bytes == total_bytes),
        "{reported:?}"
    );
    assert!(reported.is_sorted_by_key(|now| now.done_bytes), "{reported:?}");
}

#[test]
fn erasing_waiting_chunks_reports_progress() {
    let fixture = Fixture::new();
    fixture.create(600 * MIB, 0).alloc_memory(580 * MIB).unwrap();
    let pool = fixture.open();
    let mut reported = vec![];
    pool.scrub_all_with(&mut |now| reported.push(now)).unwrap();
    assert_whole(&reported, Task::Erase, 580 * MIB);
    assert!(reported.len() > 2, "in steps: {reported:?}");
    reported.clear();
    pool.scrub_all_with(&mut |now| reported.push(now)).unwrap();
    assert_whole(&reported, Task::Erase, 0);
}

#[test]
fn only_missing_clean_chunks_are_erased_for_a_volume() {
    let fixture = Fixture::new();
    fixture.create(64 * MIB, 0).alloc_memory(40 * MIB).unwrap();
    let pool = fixture.open();
    let scrub_for = |size| {
        let mut reported = vec![];
        pool.scrub_for(size, &mut |now| reported.push(now)).unwrap();
        (reported, pool.info().scrubbing_bytes / MIB)
    };
    let (reported, waits) = scrub_for(VolumeSize::Bytes(20 * MIB));
    assert_whole(&reported, Task::Erase, 0);
    assert_eq!(waits, 40, "enough clean bytes exist");
    let (reported, waits) = scrub_for(VolumeSize::Bytes(61 * MIB));
    assert_whole(&reported, Task::Erase, 0);
    assert_eq!(waits, 40, "the pool never has so much free space");
    let (reported, waits) = scrub_for(VolumeSize::Bytes(29 * MIB));
    assert_whole(&reported, Task::Erase, 10 * MIB);
    assert_eq!(waits, 30);
    let (reported, waits) = scrub_for(VolumeSize::Remaining);
    assert_whole(&reported, Task::Erase, 30 * MIB);
    assert_eq!(waits, 0);
}

#[test]
fn check_reports_free_space_and_volumes_as_one_task() {
    let fixture = Fixture::new();
    let pool = fixture.create(128 * MIB, 0);
    for (name, format) in
        [("a", VolumeFormat::Btt), ("b", VolumeFormat::Raw), ("c", VolumeFormat::Btt)]
    {
        pool.create_volume(name, VolumeSize::Bytes(32 * MIB), format).unwrap();
    }
    let mut reported = vec![];
    assert!(pool.check_with(&mut |now| reported.push(now)).unwrap().is_clean());
    assert_whole(&reported, Task::Check, (28 + 96) * MIB);
    drop(pool);
    let mut tasks = vec![];
    Pool::repair_with(&fixture.path(), false, None, &mut |now| tasks.push(now)).unwrap();
    let erased = tasks.iter().position(|now| now.task == Task::Erase).unwrap();
    let (free, (erased, checked)) = (&tasks[..erased], tasks[erased..].split_at(1));
    assert_whole(free, Task::Check, 28 * MIB);
    assert_whole(erased, Task::Erase, 0);
    assert_whole(checked, Task::Check, 96 * MIB);
}

#[test]
fn allocation_of_a_file_on_a_disk_reports_progress() {
    let folder = TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    let path = folder.path().join("pool");
    let mut reported = vec![];
    let mut progress = |now| reported.push(now);
    let options = CreateOptions {
        size_bytes: Some(16 * MIB),
        progress: Some(&mut progress),
        ..Default::default()
    };
    let pool = Pool::create_with(&path, options).unwrap();
    if pool.durability() == Durability::Volatile {
        eprintln!("skipped: {} is not on a disk", folder.path().display());
        return;
    }
    drop(pool);
    assert_whole(&reported, Task::Allocate, 16 * MIB);
    reported.clear();
    Pool::grow_with(&path, Some(24 * MIB), false, &mut |now| reported.push(now)).unwrap();
    assert_whole(&reported, Task::Allocate, 8 * MIB);
}
