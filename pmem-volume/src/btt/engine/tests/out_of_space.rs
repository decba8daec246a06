//! Random operations in a pool that runs out of space, at each possible allocation. Discards
//! release space.

use std::sync::Mutex;

use super::*;
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::PAGE_BYTES;
use crate::media::simulator::Random;
use crate::media::thin::ThinMedia;
use crate::media::{Durability, MediaError, Pending};

const SECTORS: u32 = 48;
const LANES: u32 = 4;

/// Wrong order of allocations and stores that is simulated between the engine and the media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpaceBug {
    Nothing,
    /// The map words of an exchange get their space when they are stored.
    MapNotProvisioned,
    /// The data of an exchange gets its space after the flog has been stored.
    FlogBeforeSpace,
}

/// Media with holes that simulates a wrong order.
struct Reordered<'a> {
    thin: ThinMedia<&'a MemoryMedia>,
    bug: SpaceBug,
    map: Range<u64>,
    /// Allocations that were postponed.
    postponed: Mutex<Vec<Range<u64>>>,
}

impl<'a> Reordered<'a> {
    fn new(media: &'a MemoryMedia, bug: SpaceBug) -> Self {
        let thin = ThinMedia::new(media, VOLUME_BYTES, PAGE_BYTES);
        let thin = if bug == SpaceBug::MapNotProvisioned { thin } else { thin.strict() };
        let ArenaInfo { map_at, flog_at, .. } =
            read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap().0;
        Self { thin, bug, map: map_at..flog_at, postponed: Mutex::default() }
    }
}

impl Media for Reordered<'_> {
    fn len_bytes(&self) -> u64 {
        self.thin.len_bytes()
    }

    fn durability(&self) -> Durability {
        self.thin.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.thin.read(offset_bytes, into)
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        self.thin.next_data(range)
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.thin.load_word(offset_bytes)
    }

    fn provision(&self, range: Range<u64>) -> Result<(), MediaError> {
        match self.bug {
            SpaceBug::MapNotProvisioned if self.map.contains(&range.start) => Ok(()),
            SpaceBug::FlogBeforeSpace => {
                self.postponed.lock().unwrap().push(range);
                Ok(())
            }
            _ => self.thin.provision(range),
        }
    }

    fn release_unit_bytes(&self) -> Option<u64> {
        self.thin.release_unit_bytes()
    }

    fn release(
        &self,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        self.thin.release(units, is_read)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.thin.store(offset_bytes, bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        // The first halves of the flog entries precede all other stores of an exchange. A discard
        // stores words of the map.
        let postponed = std::mem::take(&mut *self.postponed.lock().unwrap());
        let is_flog = !self.map.contains(&offset_bytes);
        if is_flog {
            self.thin.store_word(offset_bytes, word)?;
        }
        postponed.into_iter().try_for_each(|range| self.thin.provision(range))?;
        if is_flog { Ok(()) } else { self.thin.store_word(offset_bytes, word) }
    }

    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.thin.store_bulk(offset_bytes, bytes, pending)
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        self.thin.begin_persist(range, pending)
    }

    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        self.thin.end_persist(pending)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.thin.persist(ranges)
    }
}

/// Returns the content of a sector. Version 0 is a sector that reads as zeros.
fn version_of(sector: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; 4096] } else { content(sector, version, 4096) }
}

/// Checks that the sectors contain their versions, and that a check finds nothing.
fn verify(engine: &Engine<Reordered<'_>>, versions: &[u64]) -> Result<(), String> {
    if let Some(reason) = &engine.arenas()[0].read_only {
        return Err(format!("read-only: {reason}"));
    }
    for (sector, version) in (0..).zip(versions) {
        if read(engine, sector) != version_of(sector, *version) {
            return Err(format!("sector {sector} is not version {version}"));
        }
    }
    let report = check(engine.space());
    if report.is_clean() { Ok(()) } else { Err(format!("{report:?}")) }
}

/// Performs random operations in a pool with the given space. Returns the number of operations that
/// failed because the pool was full.
fn operate(seed: u64, chunks: u64, bug: SpaceBug) -> Result<usize, String> {
    let media = MemoryMedia::new(ThinMedia::<MemoryMedia>::wrapped_bytes(VOLUME_BYTES, PAGE_BYTES));
    format_small(&ThinMedia::new(&media, VOLUME_BYTES, PAGE_BYTES), SECTORS, LANES);
    let engine = Engine::open(Reordered::new(&media, bug)).unwrap();
    engine.space().thin.set_available_chunks(chunks);
    let mut random = Random::new(seed);
    let (mut versions, mut failures) = ([0; SECTORS as usize], 0);
    for next in 1..60 {
        let first = random.below(u64::from(SECTORS));
        let sectors = first..u64::from(SECTORS).min(first + 1 + random.below(6));
        let (version, result) = match random.below(5) {
            0 => (0, engine.discard(sectors.clone())),
            _ => {
                let bytes: Vec<u8> =
                    sectors.clone().flat_map(|sector| version_of(sector, next)).collect();
                (next, engine.write(first, &bytes))
            }
        };
        match result {
            Ok(()) => sectors.for_each(|sector| versions[sector as usize] = version),
            Err(BttError::Full(_)) => {
                failures += 1;
                // Each sector is old or new.
                for sector in sectors {
                    if read(&engine, sector) == version_of(sector, version) {
                        versions[sector as usize] = version;
                    }
                }
                verify(&engine, &versions)?;
            }
            Err(error) => return Err(format!("{next}: {}", foreshore_types::chain(&error))),
        }
    }
    verify(&engine, &versions)?;
    drop(engine);
    verify(&Engine::open(Reordered::new(&media, bug)).unwrap(), &versions)?;
    Ok(failures)
}

/// Repeats the operations with more and more space, until it is enough. Returns the total number of
/// failed operations.
fn run_out_of_space(seed: u64, bug: SpaceBug) -> Result<usize, String> {
    let mut total = 0;
    for chunks in 0.. {
        let failures =
            operate(seed, chunks, bug).map_err(|error| format!("{seed}, {chunks}: {error}"))?;
        total += failures;
        if failures == 0 {
            break;
        }
    }
    Ok(total)
}

#[test]
fn sectors_stay_intact_when_space_runs_out_at_any_allocation() {
    for seed in 1..3 {
        let failures = run_out_of_space(seed, SpaceBug::Nothing).unwrap();
        assert!(failures > 100, "only {failures} failures");
    }
}

#[test]
fn map_word_stored_without_space_is_detected() {
    let error = run_out_of_space(1, SpaceBug::MapNotProvisioned).unwrap_err();
    assert!(error.contains("the media failed: the pool has no space"), "{error}");
}

#[test]
fn flog_stored_before_the_space_of_the_data_is_detected() {
    let error = run_out_of_space(1, SpaceBug::FlogBeforeSpace).unwrap_err();
    assert!(error.contains("the media failed: the pool has no space"), "{error}");
}
