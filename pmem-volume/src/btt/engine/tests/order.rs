//! Tests of readers, writers and map locks in every order that the memory model allows (loom). The
//! engine's code is compiled again with the atomics of loom. Each step is omitted in turn, and the
//! tests should detect it.
//!
//! One difference remains. Here, locks are released by an exchange, because loom cannot check a
//! store that is concurrent with exchanges. The engine uses a store, which is sufficient. A later
//! exchange sees the newest value, which is that of the store. If the store overwrites the value of
//! an exchange, only the mark of a waiting thread is lost.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::super::*;
use super::cpu::{self, OmittedStep};
use super::live_blocks::LiveBlocks;
use super::lock::Lock;
use super::map::{LineLocks, Map};
use super::readers::Readers;
use crate::btt::arena::ArenaInfo;
use crate::media::{Durability, Media, MediaError};

const CHILD: &str = "FORESHORE_TEST_CHILD";

/// Runs a test in a separate process. The coroutines of loom install a SIGBUS handler without
/// calling the previous one, which other tests need. `name` is the calling test.
fn in_own_process(name: &str, test: fn()) {
    if env::var_os(CHILD).is_some() {
        return test();
    }
    let path = format!("btt::engine::tests::loom_model::order::{name}");
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", &path]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Executes all orders of a model. Returns the error of a failing order, if there is one.
fn every_order(
    omitted: OmittedStep,
    model: impl Fn() + Send + Sync + 'static,
) -> Result<(), String> {
    cpu::OMITTED_STEP.set(omitted);
    let result = catch_unwind(AssertUnwindSafe(|| loom::model(model)));
    cpu::OMITTED_STEP.set(OmittedStep::Nothing);
    result.map_err(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "a panic".to_owned(), |text| text.to_string())
        }
    })
}

/// Sector with two blocks of two words each. If the words of a block differ, it is torn.
struct Sector {
    /// Block of the sector according to the map: 1 or 2.
    map: AtomicU64,
    blocks: [[AtomicU64; 2]; 2],
    readers: Readers,
}

impl Sector {
    fn new() -> Self {
        let block = || [AtomicU64::new(0), AtomicU64::new(0)];
        Self { map: AtomicU64::new(1), blocks: [block(), block()], readers: Readers::new(2) }
    }

    /// Writes twice with the same lane, which initially has block 2. Stops if the lane's block is
    /// being read.
    fn write(&self) {
        let mut free = 2;
        for version in 1..=2 {
            let is_read = self.readers.announcements_after_lock().contains(free)
                && cpu::OMITTED_STEP.get() != OmittedStep::AnnouncementCheck;
            if is_read {
                return;
            }
            self.blocks[free as usize - 1]
                .iter()
                .for_each(|word| word.store(version, Ordering::Relaxed));
            let old = self.map.load(Ordering::Relaxed);
            // This store is ordered after all earlier stores, like a store to the media.
            self.map.store(free, Ordering::Release);
            free = old;
        }
    }

    fn read(&self) {
        let mut last = None;
        let find = || {
            if cpu::OMITTED_STEP.get() != OmittedStep::SecondMapRead || last.is_none() {
                last = Some(self.map.load(Ordering::Acquire));
            }
            Ok::<_, ()>(last)
        };
        let (block, _announcement) = self.readers.announce_found(find).unwrap().unwrap();
        let [first, second] = &self.blocks[block as usize - 1];
        let (first, second) = (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
        assert_eq!(first, second, "torn");
    }
}

fn read_while_written(omitted: OmittedStep) -> Result<(), String> {
    every_order(omitted, || {
        let sector = Arc::new(Sector::new());
        let reader = Arc::clone(&sector);
        let reader = thread::spawn(move || reader.read());
        sector.write();
        reader.join().unwrap();
    })
}

#[test]
fn reader_never_sees_a_torn_sector() {
    in_own_process("reader_never_sees_a_torn_sector", || {
        read_while_written(OmittedStep::Nothing).unwrap();
    });
}

#[test]
fn omission_of_any_step_between_readers_and_writers_is_detected() {
    in_own_process("omission_of_any_step_between_readers_and_writers_is_detected", || {
        use OmittedStep::{AnnouncementCheck, ReadersFence, SecondMapRead, WritersFence};
        for omitted in [ReadersFence, WritersFence, SecondMapRead, AnnouncementCheck] {
            let found = read_while_written(omitted).expect_err(&format!("{omitted:?}"));
            assert!(found.contains("torn"), "{omitted:?}: {found}");
        }
    });
}

impl Sector {
    /// Moves the sector to block 2, and then zeroes block 1 unless it is being read.
    fn move_and_zero(&self) {
        let [old, new] = &self.blocks;
        for (from, to) in old.iter().zip(new) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.map.store(2, Ordering::Release);
        let is_read = self.readers.is_announced(1..2)
            && cpu::OMITTED_STEP.get() != OmittedStep::AnnouncementCheck;
        if !is_read {
            old.iter().for_each(|word| word.store(ZEROED, Ordering::Relaxed));
        }
    }

    fn read_moved(&self) {
        let find = || Ok::<_, ()>(Some(self.map.load(Ordering::Acquire)));
        let (block, _announcement) = self.readers.announce_found(find).unwrap().unwrap();
        let words = &self.blocks[block as usize - 1];
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) != ZEROED), "a zeroed block");
    }
}

/// Word in a block that a compaction has zeroed.
const ZEROED: u64 = 98;

fn read_while_moved(omitted: OmittedStep) -> Result<(), String> {
    every_order(omitted, || {
        let sector = Arc::new(Sector::new());
        let reader = Arc::clone(&sector);
        let reader = thread::spawn(move || reader.read_moved());
        sector.move_and_zero();
        reader.join().unwrap();
    })
}

#[test]
fn reader_never_sees_the_zeros_of_a_moved_sector() {
    in_own_process("reader_never_sees_the_zeros_of_a_moved_sector", || {
        read_while_moved(OmittedStep::Nothing).unwrap();
        use OmittedStep::{AnnouncementCheck, ReadersFence, ReleaseFence};
        for omitted in [ReadersFence, ReleaseFence, AnnouncementCheck] {
            let found = read_while_moved(omitted).expect_err(&format!("{omitted:?}"));
            assert!(found.contains("a zeroed block"), "{omitted:?}: {found}");
        }
    });
}

/// Word that a new owner stores in released space.
const OF_OTHER_OWNER: u64 = 99;

/// Unit of space that is released while it is in use. Its chunk contains a single word.
struct Unit {
    /// 1 if the map names the block in the unit, or 0 if the sector was discarded.
    map: AtomicU64,
    /// Chunk of the unit: 1, 2, or 0 for a hole.
    chunk: AtomicU64,
    words: [AtomicU64; 2],
    readers: Readers,
    live: LiveBlocks,
}

impl Unit {
    fn new(info: &ArenaInfo) -> Self {
        let live = LiveBlocks::new(info, UNIT_BYTES);
        // Creates the count. Loom would detect its concurrent creation as an access.
        live.add(0);
        live.remove(0);
        assert_eq!(live.take_queued(1), [0]);
        Self {
            map: AtomicU64::new(1),
            chunk: AtomicU64::new(1),
            words: [AtomicU64::new(7), AtomicU64::new(0)],
            readers: Readers::new(2),
            live,
        }
    }

    fn word(&self, chunk: u64) -> &AtomicU64 {
        &self.words[chunk as usize - 1]
    }

    /// Discards the sector, and releases the unit unless its block is live or being read.
    fn discard_and_release(&self) {
        self.map.store(0, Ordering::Release);
        if !self.live.claim(0) {
            return;
        }
        let chunk = self.chunk.swap(0, Ordering::SeqCst);
        let is_read = self.readers.is_announced(1..2)
            && cpu::OMITTED_STEP.get() != OmittedStep::AnnouncementCheck;
        if is_read {
            self.chunk.store(chunk, Ordering::Release);
        } else {
            self.word(chunk).store(OF_OTHER_OWNER, Ordering::Relaxed);
        }
        self.live.end_release(0, true);
    }

    fn read(&self) {
        let find = || {
            Ok::<_, ()>(match self.map.load(Ordering::Acquire) {
                0 => None,
                block => Some(block),
            })
        };
        let Some((_, _announcement)) = self.readers.announce_found(find).unwrap() else { return };
        let word = match self.chunk.load(Ordering::Acquire) {
            0 => 0,
            chunk => self.word(chunk).load(Ordering::Relaxed),
        };
        assert!(word == 0 || word == 7, "released space was read");
    }

    /// Writes to a block in the unit, and allocates space for it if necessary.
    fn write(&self) {
        if cpu::OMITTED_STEP.get() != OmittedStep::BlockCount {
            self.live.add(0);
        }
        if self.chunk.load(Ordering::Acquire) == 0 {
            self.chunk.store(2, Ordering::Release);
        }
        let chunk = self.chunk.load(Ordering::Acquire);
        assert_ne!(chunk, 0, "the space was released");
        self.word(chunk).store(8, Ordering::Release);
    }
}

/// Size of the unit, which is also that of its only block.
const UNIT_BYTES: u64 = 4096;

fn release_while_used(omitted: OmittedStep, other: fn(&Unit)) -> Result<(), String> {
    let media = formatted(4096);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let info = ArenaInfo { blocks: 1, ..info };
    every_order(omitted, move || {
        let unit = Arc::new(Unit::new(&info));
        let shared = Arc::clone(&unit);
        let user = thread::spawn(move || other(&shared));
        unit.discard_and_release();
        user.join().unwrap();
    })
}

#[test]
fn reader_never_sees_released_space() {
    in_own_process("reader_never_sees_released_space", || {
        release_while_used(OmittedStep::Nothing, Unit::read).unwrap();
        use OmittedStep::{AnnouncementCheck, ReadersFence, ReleaseFence};
        for omitted in [ReadersFence, ReleaseFence, AnnouncementCheck] {
            let found = release_while_used(omitted, Unit::read).expect_err(&format!("{omitted:?}"));
            assert!(found.contains("released space"), "{omitted:?}: {found}");
        }
    });
}

#[test]
fn writer_never_stores_to_released_space() {
    fn write(unit: &Unit) {
        unit.write();
        let chunk = unit.chunk.load(Ordering::Acquire);
        let is_stored = chunk != 0 && unit.word(chunk).load(Ordering::Relaxed) == 8;
        assert!(is_stored, "the space was released");
    }
    in_own_process("writer_never_stores_to_released_space", || {
        release_while_used(OmittedStep::Nothing, write).unwrap();
        let found = release_while_used(OmittedStep::BlockCount, write).unwrap_err();
        assert!(found.contains("the space was released"), "{found}");
    });
}

/// Media that consists of one word of the map.
struct OneWord(AtomicU64);

impl Media for OneWord {
    fn len_bytes(&self) -> u64 {
        8
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), MediaError> {
        unreachable!("the map is words")
    }

    fn store(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        unreachable!("the map is words")
    }

    fn persist(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }

    fn load_word(&self, _: u64) -> Result<u64, MediaError> {
        Ok(self.0.load(Ordering::Acquire))
    }

    fn store_word(&self, _: u64, word: u64) -> Result<(), MediaError> {
        self.0.store(word, Ordering::Release);
        Ok(())
    }
}

/// Two writers change the two entries of the same word.
fn neighbors_change(omitted: OmittedStep) -> Result<(), String> {
    let media = formatted(4096);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    every_order(omitted, move || {
        let shared = Arc::new((LineLocks::new(1), Map::new(&info), OneWord(AtomicU64::new(0))));
        let change = move |shared: &(LineLocks, Map, OneWord), sector: u32| {
            let (locks, map, word) = shared;
            // To omit the lock of the line, each writer uses a lock of its own.
            let own = LineLocks::new(1);
            let locks = if omitted == OmittedStep::LineLock { &own } else { locks };
            let sectors = sector..sector + 1;
            let locked = locks.lock(map.word_range(&sectors));
            map.change(word, sectors, &locked, |_, _| sector + 7).unwrap();
        };
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || change(&other, 1));
        change(&shared, 0);
        other.join().unwrap();
        assert_eq!(shared.2.0.load(Ordering::Acquire), 8 << 32 | 7, "lost");
    })
}

#[test]
fn changes_of_both_entries_in_a_map_word_are_kept() {
    in_own_process("changes_of_both_entries_in_a_map_word_are_kept", || {
        neighbors_change(OmittedStep::Nothing).unwrap();
        let found = neighbors_change(OmittedStep::LineLock).unwrap_err();
        assert!(found.contains("lost"), "{found}");
    });
}

/// Two threads add to a value under a lock. Loom detects an access that overlaps with accesses of
/// the other thread.
fn two_threads_add(omitted: OmittedStep) -> Result<(), String> {
    every_order(omitted, || {
        let lock = Arc::new(Lock::new(0));
        let other = Arc::clone(&lock);
        let other = thread::spawn(move || *other.lock() += 1);
        *lock.lock() += 1;
        other.join().unwrap();
        assert_eq!(*lock.lock(), 2, "lost");
    })
}

#[test]
fn lock_excludes_other_threads() {
    in_own_process("lock_excludes_other_threads", || {
        two_threads_add(OmittedStep::Nothing).unwrap();
        for omitted in [OmittedStep::Release, OmittedStep::Acquire] {
            let found = two_threads_add(omitted).expect_err(&format!("{omitted:?}"));
            assert!(found.contains("Causality violation"), "{omitted:?}: {found}");
        }
    });
}
