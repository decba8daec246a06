//! Tests of failing media. The first failure should make the pool read-only, and the next open
//! should find it intact.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::crash;
use super::hooked::{Hooked, open};
use super::slow::{Barrier, Gate, TIMEOUT};
use super::*;
use crate::btt::{BttError, Engine, arenas};
use crate::media::simulator::Random;
use crate::media::{Media, MediaError, Pending};

/// Creates media on which persists and erases fail without any effect after `left` of them have
/// succeeded.
fn failing(left: Arc<AtomicU32>) -> Hooked {
    Hooked::new(40 * MIB, move || {
        let counted = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        counted.map(|_| ()).map_err(|_| failure())
    })
}

fn failure() -> MediaError {
    MediaError::Io {
        operation: "persist",
        offset_bytes: 0,
        length_bytes: 8,
        source: std::io::Error::from_raw_os_error(libc::EIO),
    }
}

/// Maximum number of images of a power failure after a media failure.
const BOUND: usize = 50;

/// Checks that every image of a power failure opens and is intact, whichever part of the failed
/// write it contains.
fn assert_survives_loss_of_power(media: &Hooked) {
    for image in media.crash_point().images(BOUND, &mut Random::new(1)) {
        let pool = crash::open(&image).unwrap();
        for volume in pool.volumes() {
            let report = pool.open_volume(&volume.name).unwrap().check_btt();
            assert!(report.is_none_or(|report| report.is_clean()), "{volume:?}");
        }
        crash::verify_space(&image, &pool).unwrap();
    }
}

/// Lends and returns memory, and creates, flushes, renames, resizes and deletes volumes, until the
/// first error.
fn work(pool: &Arc<Pool<impl Media>>) -> Result<(), PoolError> {
    let memory = pool.alloc_memory(6 * MIB)?;
    pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw)?;
    pool.create_volume("b", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt)?;
    pool.free_memory(&memory)?;
    let volume = pool.open_volume("b")?;
    let flushed = volume.flush_guest_stores(0..18 * MIB);
    if flushed.is_err() {
        assert!(
            matches!(volume.flush_guest_stores(0..8), Err(PoolError::Latched { .. })),
            "a failed flush stays failed"
        );
    }
    flushed?;
    drop(volume);
    pool.resize_volume("a", VolumeSize::Bytes(8 * MIB), Shrink::Refuse)?;
    pool.resize_volume("a", VolumeSize::Bytes(2 * MIB), Shrink::Allow)?;
    pool.rename_volume("a", "c")?;
    pool.delete_volume("c")?;
    pool.scrub_all()
}

#[test]
fn first_failure_makes_the_pool_read_only_until_it_is_reopened() {
    let mut failures = 0;
    loop {
        let left = Arc::new(AtomicU32::new(u32::MAX));
        let media = failing(Arc::clone(&left));
        let pool = open(media.clone());
        left.store(failures, Ordering::SeqCst);
        let Err(error) = work(&pool) else { break };
        assert!(matches!(error, PoolError::Media(MediaError::Io { .. })), "{error}");
        left.store(u32::MAX, Ordering::SeqCst);

        assert!(!pool.is_writable());
        assert!(pool.info().latched.is_some_and(|cause| cause.contains("persist")));
        assert!(pool.info().lendable_bytes > 0);
        assert_eq!(pool.offered_bytes(), 0, "regardless of the free space");
        assert!(matches!(pool.alloc_memory(2 * MIB), Err(PoolError::Latched { .. })));
        assert!(matches!(
            pool.create_volume("c", VolumeSize::Remaining, VolumeFormat::Raw),
            Err(PoolError::Latched { .. })
        ));
        assert!(matches!(pool.delete_volume("a"), Err(PoolError::Latched { .. })));
        assert!(matches!(pool.scrub_all(), Err(PoolError::Latched { .. })));
        assert!(pool.check().is_ok(), "it is still readable");
        assert_states_add_up(&pool.info());
        drop(pool);
        assert_survives_loss_of_power(&media);

        let pool = open(media);
        assert!(pool.is_writable());
        assert_states_add_up(&pool.info());
        assert_eq!(pool.info().memory_bytes, 0);
        assert_eq!(pool.check().unwrap().pool, []);
        failures += 1;
    }
    assert!(failures >= 20, "only {failures} calls could fail");
}

/// Checks an engine and its pool after a write has failed.
fn assert_read_only<M: Media>(
    pool: &Pool<M>,
    engine: &Engine<Volume<M>>,
    result: Result<(), BttError>,
    cause: &str,
) {
    let Err(BttError::Media(error @ MediaError::Io { .. })) = &result else { panic!("{result:?}") };
    assert!(foreshore_types::chain(&error).contains(cause), "{error:?}");
    let arena = engine.arenas()[0].read_only.clone().expect("the arena is read-only");
    let latched = pool.info().latched.expect("and so is the pool");
    assert!(arena.contains(cause) && latched.contains(cause), "{arena}; {latched}");
    assert!(!pool.is_writable());
    for result in [engine.write(100, &[1; 4096]), engine.discard(100..101), engine.flush()] {
        assert!(matches!(result, Err(BttError::ReadOnly { arena: 0, .. })), "{result:?}");
    }
    assert!(matches!(pool.alloc_memory(2 * MIB), Err(PoolError::Latched { .. })));
}

#[test]
fn failed_write_back_makes_arena_and_pool_read_only() {
    let mut failures = 0;
    loop {
        let left = Arc::new(AtomicU32::new(u32::MAX));
        let media = failing(Arc::clone(&left));
        let pool = open(media.clone());
        pool.create_volume("a", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
        let engine = Engine::open(pool.open_volume("a").unwrap()).unwrap();
        engine.write(7, &[1; 8192]).unwrap();
        left.store(failures, Ordering::SeqCst);
        let result = engine.write(7, &[2; 8192]);
        left.store(u32::MAX, Ordering::SeqCst);
        if result.is_ok() {
            break;
        }
        assert_read_only(&pool, &engine, result, "os error 5");
        drop((engine, pool));
        assert_survives_loss_of_power(&media);
        failures += 1;
    }
    // The write begins persists for the map words of the sectors, for the map words of the lanes,
    // and for two halves and the data of each sector. It ends two persists.
    assert_eq!(failures, 1 + 1 + 2 * 3 + 2, "each of them can fail");
}

#[test]
fn truncated_file_makes_arena_and_pool_read_only() {
    for is_dax in [false, true] {
        // The map is not truncated, so that the write reaches the log.
        let (_fixture, pool, engine, _) = open_and_cut(is_dax);
        assert_read_only(&pool, &engine, engine.write(7, &[2; 4096]), "the file was truncated");

        // The data was stored before the truncation, and is lost before its write-back. On media
        // whose persist does nothing, this cannot be detected.
        let (_fixture, pool, engine, flog_at) = open_and_cut(is_dax);
        let begun = engine.space().begin_persist(flog_at..flog_at + 8, &mut Pending::default());
        assert_eq!(begun.is_err(), is_dax, "{begun:?}");
        assert_eq!(pool.is_writable(), !is_dax);
        if let Err(error) = begun {
            assert!(foreshore_types::chain(&error).contains("the file was truncated"), "{error:?}");
            assert!(error.to_string().contains("write-back"), "{error}");
            let cause = pool.info().latched.expect("the pool is read-only");
            assert_eq!(cause, foreshore_types::chain(&error));
        }
    }
}

/// Creates an engine that has written. Then truncates the file to the start of the volume's log.
fn open_and_cut(is_dax: bool) -> (Fixture, Arc<Pool>, Engine<Volume>, u64) {
    let fixture = Fixture::new();
    let made = fixture.create(64 * MIB, 0);
    made.create_volume("a", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
    drop(made);
    let pool = match is_dax {
        true => Pool::open_with_dax_persists(&fixture.path()).unwrap(),
        false => fixture.open(),
    };
    let volume = pool.open_volume("a").unwrap();
    let [only] = volume.extents() else { panic!("it has one extent") };
    let Ok((info, _)) = &arenas(&volume)[0] else { panic!("it has an arena") };
    assert!(info.flog_at.is_multiple_of(4096), "the loss of pages is tested");
    let (flog_at, end_bytes) = (info.flog_at, only.offset_bytes() + info.flog_at);
    let engine = Engine::open(volume).unwrap();
    engine.write(7, &[1; 4096]).unwrap();
    pool.file().set_len(end_bytes).unwrap();
    (fixture, pool, engine, flog_at)
}

/// Media on which one persist or erase waits at a gate while another call may fail.
struct Slow {
    media: Hooked,
    gate: Arc<Barrier>,
    fails: Arc<AtomicBool>,
    /// Makes the call that waited at the gate fail.
    waiter_fails: Arc<AtomicBool>,
}

impl Slow {
    fn new() -> Self {
        let gate = Barrier::new();
        let (fails, waiter_fails) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let hook = {
            let (gate, fails, waiter_fails) =
                (Arc::clone(&gate), Arc::clone(&fails), Arc::clone(&waiter_fails));
            move || {
                if fails.swap(false, Ordering::SeqCst) {
                    return Err(failure());
                }
                gate.pass();
                if waiter_fails.swap(false, Ordering::SeqCst) { Err(failure()) } else { Ok(()) }
            }
        };
        Self { media: Hooked::new(60 * MIB, hook), gate, fails, waiter_fails }
    }

    /// Makes a flush of volume `b` fail while `change` waits for the media. The wait itself ends
    /// without an error.
    fn flush_fails_during<T: Send>(
        &self,
        pool: &Arc<OtherPool>,
        change: impl FnOnce() -> T + Send,
    ) -> T {
        let volume = pool.open_volume("b").unwrap();
        self.gate.set(Gate::Armed);
        thread::scope(|scope| {
            let change = scope.spawn(change);
            self.gate.wait_until_shut();
            self.fails.store(true, Ordering::SeqCst);
            let flushed = volume.flush_guest_stores(0..8);
            self.gate.set(Gate::Open);
            assert!(matches!(flushed, Err(PoolError::Media(_))), "{flushed:?}");
            change.join().unwrap()
        })
    }
}

/// Waits until a thread sleeps. In /proc/pid/stat, the state follows the name (proc(5)).
fn wait_until_asleep(thread: libc::pid_t) {
    let end = Instant::now() + TIMEOUT;
    let is_asleep = || {
        let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S"))
    };
    while !is_asleep() {
        assert!(Instant::now() < end, "it does not wait");
        thread::yield_now();
    }
}

#[test]
fn change_that_waited_for_a_failed_one_is_refused() {
    let slow = Slow::new();
    let pool = open(slow.media.clone());
    pool.create_volume("v", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw).unwrap();
    let resize = |bytes, shrink| pool.resize_volume("v", VolumeSize::Bytes(bytes), shrink);
    slow.gate.set(Gate::Armed);
    let (shrunk, grown) = thread::scope(|scope| {
        let shrinks = scope.spawn(|| resize(2 * MIB, Shrink::Allow));
        slow.gate.wait_until_shut();
        let (say, said) = mpsc::channel();
        let grows = scope.spawn(move || {
            // SAFETY: a query without side effects.
            say.send(unsafe { libc::gettid() }).unwrap();
            resize(12 * MIB, Shrink::Refuse)
        });
        wait_until_asleep(said.recv().unwrap());
        slow.waiter_fails.store(true, Ordering::SeqCst);
        slow.gate.set(Gate::Open);
        (shrinks.join().unwrap(), grows.join().unwrap())
    });
    assert!(matches!(shrunk, Err(PoolError::Media(_))), "{shrunk:?}");
    assert!(matches!(grown, Err(PoolError::Latched { .. })), "{grown:?}");
    drop(pool);
    assert_survives_loss_of_power(&slow.media);
}

#[test]
fn change_in_progress_does_not_commit_after_another_failure() {
    let slow = Slow::new();
    let pool = open(slow.media.clone());
    let made = pool.create_volume("b", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let make = || pool.create_volume("c", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw);
    let error = slow.flush_fails_during(&pool, make).unwrap_err();
    assert!(matches!(error, PoolError::Latched { .. }), "{error}");
    assert_states_add_up(&pool.info());
    drop(pool);
    assert_survives_loss_of_power(&slow.media);
    assert_eq!(open(slow.media).volumes(), [made]);
}

#[test]
fn erased_chunks_are_not_freed_after_another_failure() {
    let slow = Slow::new();
    let pool = open(slow.media.clone());
    pool.create_volume("b", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let memory = pool.alloc_memory(4 * MIB).unwrap();
    pool.free_memory(&memory).unwrap();
    let free_bytes = pool.info().free_bytes;
    let error = slow.flush_fails_during(&pool, || pool.scrub_some(4 * MIB)).unwrap_err();
    assert!(matches!(error, PoolError::Latched { .. }), "{error}");
    assert_eq!(pool.info().free_bytes, free_bytes);
    assert_states_add_up(&pool.info());
    drop(pool);
    assert_survives_loss_of_power(&slow.media);
    let pool = open(slow.media);
    assert_eq!((pool.info().free_bytes, pool.info().scrubbing_bytes), (free_bytes, 4 * MIB));
}

/// If the write-back of a page failed, the page may be clean in the cache. Reads then return data
/// that was not written.
#[test]
fn open_stores_scrub_words_again() {
    let media = Hooked::new(40 * MIB, || Ok(()));
    let pool = open(media.clone());
    pool.create_volume("v", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    let run = pool.open_volume("v").unwrap().extents()[0].run;
    pool.delete_volume("v").unwrap();
    let table = pool.table();
    drop(pool);
    media.take_stored();
    assert_eq!(open(media.clone()).info().scrubbing_bytes, 4 * MIB);
    let words: Vec<_> = table.byte_range(run).step_by(8).collect();
    assert_eq!(media.take_stored(), words);
}

/// Neither an unreadable sector nor a map that is unreadable during a check affects durability.
#[test]
fn read_errors_do_not_latch_the_pool() {
    const MARK: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let media = Hooked::new(40 * MIB, || Ok(()));
    let pool = open(media.clone());
    pool.create_volume("a", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
    let engine = Engine::open(pool.open_volume("a").unwrap()).unwrap();
    engine.write(7, &MARK.to_le_bytes().repeat(512)).unwrap();
    let block = media.find_words(MARK)[0];
    media.set_bad(Some(block..block + 64));
    let result = engine.read(7, &mut vec![0; 4096]);
    assert!(matches!(result, Err(BttError::Unreadable { sector: 7, .. })), "{result:?}");
    engine.write(8, &[1; 4096]).unwrap();
    engine.space().flush_guest_stores(0..18 * MIB).unwrap();

    // Makes the whole volume unreadable except its first chunk, while it is in use and while it is
    // not. This range includes the map.
    let last = engine.space().extents().last().unwrap();
    let end = last.offset_bytes() + last.len_bytes();
    media.set_bad(Some(end - MIB..end));
    let is_damaged = |report: &CheckReport| report.damaged() > 0 && !report.is_clean();
    assert!(is_damaged(&pool.check().unwrap()));
    assert!(pool.is_writable());
    drop(engine);
    assert!(is_damaged(&pool.check().unwrap()));
    assert!(pool.is_writable());
    media.set_bad(None);
    assert!(pool.check().unwrap().is_clean());
    pool.create_volume("b", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
}
