//! Calls from the engine to media of each durability class while it writes a sector. On media where
//! stores become durable by themselves or never, the engine should pass no ranges. On other media,
//! it should persist each store before the next step.

use std::ops::Range;
use std::sync::Mutex;

use uuid::Uuid;

use super::*;
use crate::btt::{Engine, Layout, arenas};
use crate::btt_file::BttFile;
use crate::media::recorded_ops::{RecordedOp, not_durable, record_ops};
use crate::media::{Media, Pending};
use crate::media::{MediaError, MediaKind, coalesce};

const CLASSES: [Durability; 3] = [Durability::DaxSync, Durability::PageCache, Durability::Volatile];

/// Calls that were recorded since the last reset.
#[derive(Default)]
struct PersistLog {
    /// Number of ranges in each persist.
    named: Vec<usize>,
    /// Ranges that were stored but not persisted.
    stored: Vec<Range<u64>>,
    /// Ranges that were stored before a persist that did not include them.
    left_out: Vec<Range<u64>>,
}

/// File whose reported durability is `class`.
struct ClassMedia {
    file: FileMedia,
    class: Durability,
    log: Arc<Mutex<PersistLog>>,
}

impl ClassMedia {
    fn log_store(&self, offset_bytes: u64, length_bytes: usize) {
        self.log.lock().unwrap().stored.push(offset_bytes..offset_bytes + length_bytes as u64);
    }
}

impl Media for ClassMedia {
    fn len_bytes(&self) -> u64 {
        self.file.len_bytes()
    }
    fn durability(&self) -> Durability {
        self.class
    }
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.file.read(offset_bytes, into)
    }
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.file.load_word(offset_bytes)
    }
    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.log_store(offset_bytes, bytes.len());
        self.file.store(offset_bytes, bytes)
    }
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.store(offset_bytes, bytes)?;
        if self.class != Durability::Volatile {
            pending.add(offset_bytes..offset_bytes + bytes.len() as u64);
        }
        Ok(())
    }
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.log_store(offset_bytes, 8);
        self.file.store_word(offset_bytes, word)
    }
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let mut log = self.log.lock().unwrap();
        let named = coalesce(ranges);
        let is_left_out = |stored: &Range<u64>| {
            !named.iter().any(|range| range.start <= stored.start && stored.end <= range.end)
        };
        let stored = std::mem::take(&mut log.stored);
        log.left_out.extend(stored.into_iter().filter(is_left_out));
        log.named.push(ranges.len());
        self.file.persist(ranges)
    }
    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.file.erase(ranges)
    }
}

/// Writes to media that reports the durability `reported_class`, and compares the calls with the
/// requirements of `class`.
fn check_class(class: Durability, reported_class: Durability) -> Result<(), String> {
    let fixture = Fixture::new();
    fixture
        .create(64 * MIB, 0)
        .create_volume("data", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt)
        .unwrap();
    let log = Arc::new(Mutex::new(PersistLog::default()));
    let media = |file| {
        Box::new(ClassMedia { file, class: reported_class, log: Arc::clone(&log) })
            as Box<dyn Media>
    };
    let pool = Pool::open_on(&fixture.path(), media).unwrap();
    let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
    for (first, sectors) in [(5, 1), (5, 3), (1000, 1)] {
        *log.lock().unwrap() = PersistLog::default();
        engine.write(first, &vec![0xa5; sectors * 4096]).unwrap();
        let PersistLog { named, stored, left_out } = std::mem::take(&mut *log.lock().unwrap());
        // Two persists: 1. the first halves of the flog entries and the data, and 2. the second
        // halves. The next exchange persists the map words.
        if named.len() != 2 || stored.is_empty() {
            return Err(format!("{} persists, and {stored:?} after the last", named.len()));
        }
        match class {
            Durability::Volatile if named == [0, 0] => {}
            Durability::Volatile => {
                return Err(format!("{named:?} ranges are persisted unnecessarily"));
            }
            Durability::DaxSync | Durability::PageCache if left_out.is_empty() => {}
            Durability::DaxSync | Durability::PageCache => {
                return Err(format!("{left_out:?} is not durable"));
            }
        }
    }
    Ok(())
}

/// Creates a pool with a volume that has no adjacent chunks. Its BTT ends shortly after a chunk
/// boundary, so that its map is on both sides. Returns the first sector whose map entry is after
/// the boundary.
fn fragmented(fixture: &Fixture) -> u64 {
    let pool = fixture.create(64 * MIB, 0);
    let memory = pool.alloc_memory(60 * MIB).unwrap();
    let every_other =
        memory.iter().flat_map(|e| e.run().ids()).filter(|c| c.0 % 2 == 0).map(Extent::chunk);
    pool.free_memory(&every_other.collect::<Vec<_>>()).unwrap();
    // Created as a raw volume, because the map of a BTT volume would be in the last chunk.
    let info = pool.create_volume("data", VolumeSize::Bytes(20 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(info.extents, 10);
    let volume = pool.open_volume("data").unwrap();
    Layout::new(18 * MIB + 32 * 1024, 4096, Uuid::from_u128(42)).unwrap().format(&volume).unwrap();
    let Ok((info, _)) = &arenas(&volume)[0] else { panic!("it has an arena") };
    let map = info.map_at..info.map_at + u64::from(info.sectors) * 4;
    assert!(map.contains(&(18 * MIB)) && map.contains(&(18 * MIB - 1)), "{map:x?}");
    (18 * MIB - info.map_at) / 4
}

/// Returns exchanges of one sector on each side of the boundary, of two sectors across it, and of
/// the maximum number of sectors. Each exchange is performed twice, because the second one persists
/// the map words of the first.
fn across(border: u64) -> impl Iterator<Item = (u64, usize)> {
    let writes = [(border - 1, 1), (border, 1), (border - 1, 2), (border - 40, 64)];
    writes.into_iter().flat_map(|write| [write, write])
}

#[test]
fn stores_across_an_extent_boundary_are_persisted() {
    for class in [Durability::DaxSync, Durability::PageCache] {
        let fixture = Fixture::new();
        let border = fragmented(&fixture);
        let log = Arc::new(Mutex::new(PersistLog::default()));
        let media =
            |file| Box::new(ClassMedia { file, class, log: Arc::clone(&log) }) as Box<dyn Media>;
        let pool = Pool::open_on(&fixture.path(), media).unwrap();
        let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
        *log.lock().unwrap() = PersistLog::default();
        for (first, sectors) in across(border) {
            engine.write(first, &vec![0xa5; sectors * 4096]).unwrap();
            let log = log.lock().unwrap();
            let left_out = &log.left_out;
            assert!(
                left_out.is_empty(),
                "{}: {sectors} from {first} on: {left_out:x?}",
                class.name()
            );
            // The ranges left in `stored` are words of the map, which are not durable yet.
            assert!(log.stored.len() >= sectors / 2, "{:x?}", log.stored);
        }
        assert_eq!(log.lock().unwrap().named.len(), 2 * across(border).count());
    }
}

/// Tests the persist of the file itself, which names no ranges. At each fence, all earlier stores
/// should have left the caches.
#[test]
fn stores_across_an_extent_boundary_leave_the_caches() {
    let fixture = Fixture::new();
    let border = fragmented(&fixture);
    let pool = Pool::open_with_dax_persists(&fixture.path()).unwrap();
    let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
    let ops = record_ops(|| {
        for (first, sectors) in across(border) {
            engine.write(first, &vec![0xa5; sectors * 4096]).unwrap();
        }
    });
    let fences: Vec<_> = (0..ops.len()).filter(|at| ops[*at] == RecordedOp::Fenced).collect();
    assert_eq!(fences.len(), 2 * across(border).count());
    for fence in fences {
        let left = not_durable(&ops[..=fence]);
        assert!(left.is_empty(), "at fence {fence}: {left:x?}");
        assert!(!not_durable(&ops[..fence]).is_empty(), "it has work to do");
    }
    assert!(!not_durable(&ops).is_empty(), "the last words of the map are the next exchange's");
}

#[test]
fn engine_persists_as_each_class_needs() {
    for class in CLASSES {
        check_class(class, class).unwrap_or_else(|error| panic!("{}: {error}", class.name()));
    }
}

#[test]
fn wrong_class_is_detected() {
    for class in [Durability::DaxSync, Durability::PageCache] {
        let error = check_class(class, Durability::Volatile).unwrap_err();
        assert!(error.contains("is not durable"), "{error}");
        let error = check_class(Durability::Volatile, class).unwrap_err();
        assert!(error.contains("unnecessarily"), "{error}");
    }
}

#[test]
fn file_without_a_pool_is_persisted_as_its_place_needs() {
    let by_range = |folder: &Path| {
        let file = tempfile::NamedTempFile::new_in(folder).unwrap();
        file.as_file().set_len(4096).unwrap();
        let mut pending = Pending::default();
        BttFile::open(file.path(), true).unwrap().begin_persist(0..8, &mut pending).unwrap();
        !pending.ranges().is_empty()
    };
    assert!(!by_range(Path::new("/dev/shm")));
    let current_dir = std::env::current_dir().unwrap();
    match MediaKind::of(&fs::File::open(current_dir.join("Cargo.toml")).unwrap()).unwrap() {
        MediaKind::Disk => assert!(by_range(&current_dir)),
        media_kind => eprintln!("skipped: {} is {media_kind:?}", current_dir.display()),
    }
}
