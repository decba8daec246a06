//! Tests of background erasing: operations that wait for it, and operations that do not.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::hooked::{Hooked, open};
use super::slow::{Barrier, Gate, TIMEOUT, state_bytes};
use super::*;
use crate::media::MediaError;
use crate::pool::alloc::pacer::{MAX_DEBT, Pacer};
use crate::pool::alloc::scrubber::next_wait;

/// Creates a pool with 36 MiB of usable space. Returns it with a barrier that precedes each persist
/// and erase.
fn slow_pool() -> (Arc<OtherPool>, Arc<Barrier>) {
    let barrier = Barrier::new();
    let media = Hooked::new(40 * MIB, {
        let barrier = Arc::clone(&barrier);
        move || {
            barrier.pass();
            Ok(())
        }
    });
    (open(media), barrier)
}

/// Lends and returns memory, so that it waits to be erased.
fn return_without_scrub(pool: &Pool<impl Media>, size_bytes: u64) {
    let memory = pool.alloc_memory(size_bytes).unwrap();
    pool.free_memory(&memory).unwrap();
}

/// Waits until the scrubber has erased all chunks, without erasing any itself.
fn wait_until_clean(pool: &Arc<Pool<impl Media + 'static>>) {
    let (done, clean) = mpsc::channel();
    let waiter = Arc::clone(pool);
    thread::spawn(move || {
        let mut state = waiter.lock_state();
        while state.scrub.pending() > 0 {
            state = state.wait(&waiter.scrubbed);
        }
        drop(state);
        drop(waiter);
        let _ = done.send(());
    });
    clean.recv_timeout(TIMEOUT).expect("no thread erases");
}

/// Returns the kernel's ID of the calling thread.
fn this_task() -> i32 {
    // SAFETY: gettid() takes no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Waits until a thread of this process has answered or sleeps. A thread that sleeps without an
/// answer is waiting for an event.
fn poll_unless_asleep<T>(task: i32, answer: impl Fn() -> Option<T>) -> Option<T> {
    loop {
        let stat = fs::read_to_string(format!("/proc/self/task/{task}/stat"));
        // The state follows the name in `number (name) state ...`, and S means that the thread
        // waits for an event (proc_pid_stat(5)). A thread that has ended has no state.
        let is_asleep = stat
            .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S")));
        // Read after the state, so that an answer sent before the thread fell asleep is not missed.
        match answer() {
            Some(answer) => return Some(answer),
            None if is_asleep => return None,
            None => thread::yield_now(),
        }
    }
}

#[test]
fn clean_chunks_are_lent_while_a_scrub_hangs() {
    let (pool, barrier) = slow_pool();
    return_without_scrub(&pool, 6 * MIB);
    barrier.set(Gate::Armed);
    thread::scope(|scope| {
        let scrub = scope.spawn(|| pool.scrub_some(4 * MIB).unwrap());
        barrier.wait_until_shut();
        let (answer, answered) = mpsc::channel();
        let change = &pool;
        scope.spawn(move || {
            let memory = change.alloc_memory(26 * MIB);
            let volume = change.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw);
            answer.send((memory.map(drop), volume.map(drop))).unwrap();
        });
        let done = answered.recv_timeout(TIMEOUT);
        let during = state_bytes(&pool.info());
        barrier.set(Gate::Open);
        assert_eq!(scrub.join().unwrap(), 4 * MIB);
        assert!(
            matches!(done, Ok((Ok(()), Ok(())))),
            "the chunks must wait for the scrub: {done:?}"
        );
        assert_eq!(during, [26, 4, 0, 6]);
    });
    assert_eq!(state_bytes(&pool.info()), [26, 4, 4, 2]);
}

#[test]
fn allocation_waits_only_for_needed_chunks_in_flight() {
    let (pool, barrier) = slow_pool();
    return_without_scrub(&pool, 10 * MIB);
    barrier.set(Gate::Armed);
    thread::scope(|scope| {
        let scrub = scope.spawn(|| pool.scrub_some(8 * MIB).unwrap());
        barrier.wait_until_shut();
        let (answer, answered) = mpsc::channel();
        let (task, tasks) = mpsc::channel();
        let change = &pool;
        scope.spawn(move || {
            task.send(this_task()).unwrap();
            answer.send(change.alloc_memory(32 * MIB).map(drop)).unwrap();
        });
        // Either the thread has answered, or it sleeps because it must wait.
        let early =
            poll_unless_asleep(tasks.recv_timeout(TIMEOUT).unwrap(), || answered.try_recv().ok());
        barrier.set(Gate::Open);
        scrub.join().unwrap();
        assert!(early.is_none(), "lent before it was erased: {early:?}");
        answered.recv_timeout(TIMEOUT).expect("it hangs").unwrap();
    });
    // The chunks in flight were sufficient, so the last chunk is still waiting.
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([32, 0, 2, 2], 8 * MIB));
}

#[test]
fn only_missing_clean_chunks_are_erased_on_demand() {
    let (pool, _barrier) = slow_pool();
    return_without_scrub(&pool, 20 * MIB);
    assert_eq!(pool.info().lendable_bytes, 36 * MIB);
    let memory = pool.alloc_memory(22 * MIB).unwrap();
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([22, 0, 0, 14], 6 * MIB));
    pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([22, 4, 0, 10], 10 * MIB));
    pool.resize_volume("a", VolumeSize::Bytes(8 * MIB), Shrink::Refuse).unwrap();
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([22, 8, 0, 6], 14 * MIB));
    pool.free_memory(&memory).unwrap();
    // The request is too large even if all waiting chunks were erased, so none of them is erased.
    let error = pool.alloc_memory(30 * MIB).unwrap_err();
    assert!(
        matches!(error, PoolError::PoolFull { free_bytes, .. } if free_bytes == 28 * MIB),
        "{error}"
    );
    let create = |size| pool.create_volume("b", size, VolumeFormat::Raw);
    let error = create(VolumeSize::Bytes(30 * MIB)).unwrap_err();
    assert!(
        matches!(error, PoolError::PoolFull { free_bytes, .. } if free_bytes == 28 * MIB),
        "{error}"
    );
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([0, 8, 0, 28], 14 * MIB));
    // `Remaining` includes chunks that wait to be erased.
    assert_eq!(create(VolumeSize::Remaining).unwrap().size_bytes, 28 * MIB);
    assert_eq!(state_bytes(&pool.info()), [0, 36, 0, 0]);
    assert_eq!(pool.check().unwrap().pool, []);
}

#[test]
fn small_clean_extents_are_lent_before_waiting_chunks_are_erased() {
    let (pool, _barrier) = slow_pool();
    let memory = pool.alloc_memory(36 * MIB).unwrap();
    let chunks: Vec<_> = memory.iter().flat_map(|e| e.run().ids()).map(Extent::chunk).collect();
    let (odd, even): (Vec<_>, Vec<_>) =
        chunks.into_iter().partition(|extent| extent.start.0 % 2 == 1);
    pool.free_memory(&odd).unwrap();
    pool.scrub_all().unwrap();
    pool.free_memory(&even).unwrap();
    let pieces = pool.alloc_memory(8 * MIB).unwrap();
    assert!(pieces.iter().all(|piece| piece.order == 0), "{pieces:?}");
    assert_eq!((state_bytes(&pool.info()), pool.scrubbed_bytes()), ([8, 0, 10, 18], 18 * MIB));
}

#[test]
fn waiting_chunks_count_towards_the_reserve() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 20 * MIB);
    return_without_scrub(&pool, 40 * MIB);
    assert_eq!((pool.info().free_bytes, pool.info().lendable_bytes), (20 * MIB, 40 * MIB));
    // Clean chunks are lent, because waiting chunks are enough for the reservation.
    let memory = pool.alloc_memory(20 * MIB).unwrap();
    assert_eq!((pool.scrubbed_bytes(), pool.info().lendable_bytes), (0, 20 * MIB));
    assert!(matches!(pool.alloc_memory(22 * MIB), Err(PoolError::PoolFull { .. })));
    pool.alloc_memory(20 * MIB).unwrap();
    assert_eq!((pool.scrubbed_bytes(), pool.info().lendable_bytes), (20 * MIB, 0));
    let error = pool.alloc_memory(2 * MIB).unwrap_err();
    let PoolError::PoolFull { free_bytes, withheld_bytes, .. } = error else { panic!("{error}") };
    assert_eq!((free_bytes, withheld_bytes), (20 * MIB, 20 * MIB));
    pool.create_volume("a", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    assert!(memory.iter().all(|extent| is_zero(&pool, *extent)));
    assert_states_add_up(&pool.info());
}

#[test]
fn opening_a_pool_erases_nothing() {
    let calls = Arc::new(AtomicU32::new(0));
    let media = Hooked::new(40 * MIB, {
        let calls = Arc::clone(&calls);
        move || {
            calls.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    });
    let pool = open(media.clone());
    let memory = pool.alloc_memory(30 * MIB).unwrap();
    media.store_word(memory[0].offset_bytes(), 7).unwrap();
    drop(pool);
    calls.store(0, Ordering::SeqCst);
    let pool = open(media.clone());
    assert_eq!(
        calls.load(Ordering::SeqCst),
        2,
        "two persists: of the scan, and of the chunks to erase"
    );
    assert_eq!(state_bytes(&pool.info()), [0, 0, 6, 30]);
    assert_eq!(media.load_word(memory[0].offset_bytes()).unwrap(), 7);
    drop(pool);
    assert_eq!(state_bytes(&open(media.clone()).info()), [0, 0, 6, 30]);
    assert_eq!(calls.load(Ordering::SeqCst), 4, "the next open does no more");
}

#[test]
fn readers_see_waiting_chunks_but_cannot_erase_them() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let memory = pool.alloc_memory(10 * MIB).unwrap();
    pool.free_memory(&memory[..1]).unwrap();
    let peek = Pool::open(&fixture.path(), OpenMode::Peek).unwrap();
    assert_eq!((peek.info().memory_bytes, peek.info().scrubbing_bytes), (2 * MIB, 8 * MIB));
    assert_eq!(peek.info().lendable_bytes, pool.info().lendable_bytes);
    assert!(matches!(peek.scrub_some(u64::MAX), Err(PoolError::ReadOnly { .. })));
    assert!(matches!(peek.scrub_all(), Err(PoolError::ReadOnly { .. })));
    assert_eq!(peek.info().scrubbing_bytes, 8 * MIB);
}

/// Lowest limit. After its first batch, which has one chunk, the scrubber pauses for weeks.
const CRAWL: Option<NonZeroU64> = NonZeroU64::new(1);

#[test]
fn scrubber_keeps_its_limit_and_accepts_another_during_a_pause() {
    let (pool, _barrier) = slow_pool();
    return_without_scrub(&pool, 20 * MIB);
    let scrubber = Scrubber::start(&pool, CRAWL, || ()).unwrap();
    // The scrubber is erasing the first chunk. An allocation that needs more than the clean chunks
    // does not wait until all others are erased.
    let memory = pool.alloc_memory(30 * MIB).unwrap();
    let scrubbed = pool.scrubbed_bytes();
    assert!((14 * MIB..=16 * MIB).contains(&scrubbed), "{scrubbed}");
    drop(scrubber);
    // At most one more chunk was erased.
    assert!(pool.scrubbed_bytes() <= 16 * MIB);
    assert!(pool.info().scrubbing_bytes >= 4 * MIB);
    let scrubber = Scrubber::start(&pool, CRAWL, || ()).unwrap();
    pool.free_memory(&memory).unwrap();
    scrubber.set_bytes_per_s(None);
    wait_until_clean(&pool);
    assert_eq!(state_bytes(&pool.info()), [0, 0, 36, 0]);
    // Chunks that are queued later wake the scrubber.
    return_without_scrub(&pool, 4 * MIB);
    wait_until_clean(&pool);
}

#[test]
fn erasures_on_demand_count_towards_the_limit() {
    let (pool, _barrier) = slow_pool();
    let mut pacer = Pacer::new(None);
    let rate = NonZeroU64::new(2 * MIB);
    return_without_scrub(&pool, 20 * MIB);
    assert_eq!(next_wait(&pool, &mut pacer, rate, Duration::ZERO), Duration::ZERO);
    // 16 MiB of these chunks are clean, and the others are erased on demand.
    pool.alloc_memory(22 * MIB).unwrap();
    assert_eq!(pool.scrubbed_bytes(), 6 * MIB);
    let s = Duration::from_secs;
    assert_eq!(next_wait(&pool, &mut pacer, rate, s(1)), s(3));
    // Erasures on demand are counted only once.
    assert_eq!(next_wait(&pool, &mut pacer, rate, s(3)), s(1));
    pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(next_wait(&pool, &mut pacer, rate, s(4)), s(2));
    assert_eq!(next_wait(&pool, &mut pacer, None, s(4)), Duration::ZERO);
}

#[test]
fn erasures_before_the_scrubber_starts_do_not_count_towards_its_limit() {
    let (pool, _barrier) = slow_pool();
    return_without_scrub(&pool, 36 * MIB);
    pool.scrub_all().unwrap();
    return_without_scrub(&pool, CHUNK_BYTES);
    let began = Instant::now();
    let _scrubber = Scrubber::start(&pool, CRAWL, || ()).unwrap();
    wait_until_clean(&pool);
    // The 36 MiB that were erased earlier do not delay the first batch.
    assert!(began.elapsed() < MAX_DEBT);
}

#[test]
fn scrubber_on_tmpfs_is_unlimited_and_ends_after_the_last_hole() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let at_rest = pool.file().metadata().unwrap().blocks();
    let used = |pool: &Arc<Pool>| {
        let memory = pool.alloc_memory(40 * MIB).unwrap();
        memory.iter().for_each(|extent| fill(pool, *extent, 0x5a));
        pool.free_memory(&memory).unwrap();
    };
    let scrubber = Scrubber::start(&pool, CRAWL, || ()).unwrap();
    used(&pool);
    wait_until_clean(&pool);
    assert_eq!(pool.file().metadata().unwrap().blocks(), at_rest);
    used(&pool);
    drop(scrubber);
    assert_eq!(pool.info().scrubbing_bytes, 0);
    assert_eq!(pool.file().metadata().unwrap().blocks(), at_rest);
    assert_eq!(Arc::strong_count(&pool), 1, "the thread has ended");
    drop(pool);
    assert_eq!(fixture.check().pool, []);
}

#[test]
fn zeroing_uses_bandwidth_and_holes_do_not() {
    let current_dir = std::env::current_dir().unwrap();
    for (folder, thin, costs) in [
        (Path::new("/dev/shm"), false, false),
        (&current_dir, true, false),
        (&current_dir, false, true),
    ] {
        let fixture = Fixture { folder: TempDir::new_in(folder).unwrap() };
        let options =
            CreateOptions { size_bytes: Some(64 * MIB), thin, ..CreateOptions::default() };
        let pool = Pool::create_with(&fixture.path(), options).unwrap();
        if folder == current_dir && pool.durability() == Durability::Volatile {
            eprintln!("skipped: {} is in memory", folder.display());
            continue;
        }
        assert_eq!(pool.scrubbing_costs_bandwidth(), costs, "{}, thin: {thin}", folder.display());
    }
}

#[test]
fn scrubber_ends_with_or_before_its_pool() {
    let (pool, barrier) = slow_pool();
    return_without_scrub(&pool, 20 * MIB);
    barrier.set(Gate::Armed);
    let scrubber = Scrubber::start(&pool, None, || ()).unwrap();
    barrier.wait_until_shut();
    thread::scope(|scope| {
        let weak = Arc::downgrade(&pool);
        let (end, ended) = mpsc::channel();
        let (task, tasks) = mpsc::channel();
        scope.spawn(move || {
            task.send(this_task()).unwrap();
            drop(scrubber);
            // The receiver no longer exists if the test has already observed that the thread
            // sleeps.
            let _ = end.send(());
            // The scrubber's thread has already dropped its reference to the pool.
            assert!(weak.strong_count() <= 1);
        });
        let early =
            poll_unless_asleep(tasks.recv_timeout(TIMEOUT).unwrap(), || ended.try_recv().ok());
        barrier.set(Gate::Open);
        assert!(early.is_none(), "it did not wait for the current batch of the thread");
    });
    assert!(pool.scrubbed_bytes() >= 16 * MIB, "the batch was finished");
    // If the pool is dropped before the scrubber, the scrubber must not keep it open.
    let scrubber = Scrubber::start(&pool, None, || ()).unwrap();
    wait_until_clean(&pool);
    let weak = Arc::downgrade(&pool);
    drop(pool);
    drop(scrubber);
    assert!(weak.upgrade().is_none());
}

#[test]
#[should_panic(expected = "a pool has one scrubber")]
fn second_scrubber_panics() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let _first = Scrubber::start(&pool, None, || ()).unwrap();
    let _second = Scrubber::start(&pool, None, || ());
}

#[test]
fn failed_scrubber_makes_the_pool_read_only_and_ends_all_waits() {
    let (barrier, broken) = (Barrier::new(), Arc::new(AtomicBool::new(false)));
    let media = Hooked::new(40 * MIB, {
        let (barrier, broken) = (Arc::clone(&barrier), Arc::clone(&broken));
        move || {
            barrier.pass();
            match broken.load(Ordering::SeqCst) {
                true => Err(MediaError::Io {
                    operation: "zeroing",
                    offset_bytes: 0,
                    length_bytes: 8,
                    source: std::io::Error::from_raw_os_error(libc::EIO),
                }),
                false => Ok(()),
            }
        }
    });
    let pool = open(media.clone());
    return_without_scrub(&pool, 36 * MIB);
    barrier.set(Gate::Armed);
    let scrubber = Scrubber::start(&pool, None, || ()).unwrap();
    barrier.wait_until_shut();
    let error = thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.alloc_memory(2 * MIB));
        broken.store(true, Ordering::SeqCst);
        barrier.set(Gate::Open);
        waiter.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, PoolError::Latched { .. } | PoolError::Media(_)), "{error}");
    drop(scrubber);
    assert!(pool.info().latched.is_some_and(|cause| cause.contains("zeroing")));
    assert_states_add_up(&pool.info());
    assert!(matches!(pool.scrub_all(), Err(PoolError::Latched { .. })));
    drop(pool);
    broken.store(false, Ordering::SeqCst);
    let pool = open(media);
    assert_eq!(state_bytes(&pool.info()), [0, 0, 0, 36]);
    pool.scrub_all().unwrap();
    assert_eq!(state_bytes(&pool.info()), [0, 0, 36, 0]);
}
