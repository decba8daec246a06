//! Tests with real threads on few sectors. Some stop readers at the worst moments.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex};
use std::thread;

use super::*;
use crate::btt::flog::read_map;
use crate::media::{Durability, Media, MediaError, simulator::Random};

fn small(sectors: u32, lanes: u32) -> MemoryMedia {
    let media = MemoryMedia::new(VOLUME_BYTES);
    format_small(&media, sectors, lanes);
    media
}

/// Version of a sector that reads as zeros.
const DISCARDED: u64 = u64::MAX;

/// Returns the version of a sector, or `None` if the sector is torn.
pub(super) fn version_of(sector: u64, bytes: &[u8]) -> Option<u64> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(DISCARDED);
    }
    let mixed = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    // Inverse of the odd factor in content(), modulo 2^64.
    let version = mixed.wrapping_mul(0xf1de_83e1_9937_733d) & 0xffff_ffff;
    (bytes == content(sector, version, 4096)).then_some(version)
}

/// Uses two arenas. The first has few lanes. The boundary between them is within the range of
/// sectors.
#[test]
fn threads_on_few_sectors_and_lanes_never_see_a_torn_one() {
    const SECTORS: u64 = 18;
    const WRITERS: u64 = 4;
    const ROUNDS: u64 = 400;
    let media = grown(&small(12, 6), 2 * VOLUME_BYTES);
    let engine = Engine::open(&media).unwrap();
    assert_eq!(engine.arenas()[1].first_sector, 12);
    let (versions, writing) = (AtomicU64::new(1), AtomicU64::new(WRITERS));
    let start = Barrier::new(WRITERS as usize + 3);
    let fill: Vec<u8> = (0..SECTORS).flat_map(|sector| content(sector, 0, 4096)).collect();
    engine.write(0, &fill).unwrap();
    let last: Vec<Mutex<Vec<u64>>> = (0..SECTORS).map(|_| Mutex::new(vec![0])).collect();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (engine, start, versions, writing, last) =
                (&engine, &start, &versions, &writing, &last);
            scope.spawn(move || {
                let mut random = Random::new(writer + 1);
                start.wait();
                for _ in 0..ROUNDS {
                    let first = random.below(SECTORS - 2);
                    let sectors = first..first + 1 + random.below(3);
                    let version = if random.below(6) == 0 {
                        engine.discard(sectors.clone()).unwrap();
                        DISCARDED
                    } else {
                        let version = versions.fetch_add(1, Ordering::SeqCst);
                        let bytes =
                            sectors.clone().flat_map(|sector| content(sector, version, 4096));
                        engine.write(first, &bytes.collect::<Vec<u8>>()).unwrap();
                        version
                    };
                    sectors.for_each(|sector| last[sector as usize].lock().unwrap().push(version));
                }
                writing.fetch_sub(1, Ordering::SeqCst);
            });
        }
        for reader in 0..3 {
            let (engine, start, writing) = (&engine, &start, &writing);
            scope.spawn(move || {
                let mut random = Random::new(reader + 100);
                start.wait();
                while writing.load(Ordering::SeqCst) > 0 {
                    let sector = random.below(SECTORS);
                    let bytes = read(engine, sector);
                    assert!(version_of(sector, &bytes).is_some(), "sector {sector} is torn");
                }
            });
        }
    });
    assert!(check(&media).is_clean());
    for (sector, last) in (0..).zip(last) {
        let version = version_of(sector, &read(&engine, sector)).expect("whole");
        // Any of the last concurrent writes may have taken effect last.
        assert!(
            last.into_inner().unwrap().iter().rev().take(WRITERS as usize).any(|v| *v == version)
        );
    }
}

/// Media on which a thread stops once, either before it copies a block or after it has read the
/// map.
struct PausingMedia {
    media: MemoryMedia,
    /// Number of map loads before the thread stops.
    stop_after_map_loads: AtomicUsize,
    stop_at_data: AtomicBool,
    stopped: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
    map: Range<u64>,
}

impl PausingMedia {
    fn stop(&self) {
        self.stopped.lock().unwrap().send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
    }
}

impl Media for PausingMedia {
    fn len_bytes(&self) -> u64 {
        Media::len_bytes(&self.media)
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.media.read(offset_bytes, into)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.store(offset_bytes, bytes)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        Media::persist(&self.media, ranges)
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        let word = Media::load_word(&self.media, offset_bytes)?;
        let left = &self.stop_after_map_loads;
        if self.map.contains(&offset_bytes)
            && left.try_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
                == Ok(1)
        {
            self.stop();
        }
        Ok(word)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        Media::store_word(&self.media, offset_bytes, word)
    }

    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        if self.stop_at_data.swap(false, Ordering::SeqCst) {
            self.stop();
        }
        self.read(offset_bytes, into)
    }
}

/// Creates media on which threads stop. One channel reports a stop, and the other one ends it.
fn pausing_media(sectors: u32, lanes: u32) -> (PausingMedia, Receiver<()>, Sender<()>) {
    let media = small(sectors, lanes);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let ((stopped, has_stopped), (continues, go_on)) = (channel(), channel());
    let stopping = PausingMedia {
        media,
        stop_after_map_loads: 0.into(),
        stop_at_data: false.into(),
        stopped: Mutex::new(stopped),
        go_on: Mutex::new(go_on),
        map: info.map_at..info.map_at + 64,
    };
    (stopping, has_stopped, continues)
}

/// Stops a reader of sector 1, overwrites the sector until every lane has been used often, and lets
/// the reader continue. Returns the version that the reader has read, provided that it is not torn.
/// Also returns the data that a reader without an announcement would have read.
fn read_while_overwritten(prepare: impl Fn(&PausingMedia)) -> (Option<u64>, Vec<u8>) {
    let (stopping, has_stopped, continues) = pausing_media(16, 3);
    let (info, _) = read_arena(&stopping, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let engine = Engine::open(stopping).unwrap();
    engine.write(1, &content(1, 1, 4096)).unwrap();
    let block_at = info.block_at(read_map(engine.space(), &info, 1).unwrap().block);
    thread::scope(|scope| {
        prepare(engine.space());
        let reader = scope.spawn(|| read(&engine, 1));
        has_stopped.recv().unwrap();
        // If a writer waited for the reader, this would hang.
        (2..32).for_each(|version| engine.write(1, &content(1, version, 4096)).unwrap());
        let mut of_block = vec![0; 4096];
        engine.space().read(block_at, &mut of_block).unwrap();
        continues.send(()).unwrap();
        (version_of(1, &reader.join().unwrap()), of_block)
    })
}

#[test]
fn block_being_read_is_not_overwritten_and_no_writer_waits() {
    let at_data = |media: &PausingMedia| media.stop_at_data.store(true, Ordering::SeqCst);
    let (version, of_block) = read_while_overwritten(at_data);
    assert_eq!(version, Some(1), "unchanged since the read");
    assert_eq!(of_block, content(1, 1, 4096));
}

#[test]
fn late_reader_reads_the_map_again() {
    let late = |media: &PausingMedia| media.stop_after_map_loads.store(1, Ordering::SeqCst);
    let (version, of_block) = read_while_overwritten(late);
    assert_eq!(version, Some(31));
    // Without the second check, it would have read another version, or parts of two versions.
    assert_ne!(of_block, content(1, 1, 4096));
}
