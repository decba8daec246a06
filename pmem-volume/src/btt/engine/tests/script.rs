//! Simulation of writers whose steps are randomly interleaved, on media that records crash points.
//!
//! All writers run on a single thread, so a seed is enough to reproduce a failure. Each writer has
//! one exchange in progress, and executes one step at a time. At every persist, the possible
//! content of each sector is recorded.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::super::exchange::Exchange;
use super::super::lanes::{self, LaneGuards};
use super::super::map::{LINE_SECTORS, written_entry};
use super::*;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::{MapEntry, MapKind, Recovery, newest, read_map, recover, second_slot};
use crate::btt::layout::{FlogGroupBytes, MAP_BLOCK, PAGE_BYTES};
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::media::thin::ThinMedia;
use crate::media::{Durability, Media, MediaError, Pending, is_zero};

pub(super) const SECTORS: u32 = 48;
pub(super) const LANES: u32 = 4;

/// Possible versions of a sector. Version 0 reads as zeros.
#[derive(Clone, Debug, Default)]
struct SectorVersions {
    /// Version of the sector if no write is in progress.
    current: u64,
    /// Versions of the writes in progress.
    pending: Vec<u64>,
}

/// Possible content of all sectors that were ever written.
#[derive(Clone, Debug, Default)]
pub(super) struct Oracle(BTreeMap<u32, SectorVersions>);

/// Wrong order that is simulated between the engine and the media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedBug {
    Nothing,
    /// The second half is stored before the data is durable.
    Data,
    /// The second half is stored before the first half is durable.
    FirstHalf,
    /// The second half is not durable when the map changes and the write returns.
    SecondHalf,
    /// A change of the map is durable before the second half.
    MapBeforeFlog,
    /// A lane is reused before the map word that it changed last is durable.
    LaneReused,
    /// A sector is written again before its map word is durable.
    SectorRewritten,
    /// A discard returns before it is durable.
    Discard,
    /// Recovery redoes the map before the flog is durable.
    RecoveredFlog,
    /// Recovery ends before the map is durable.
    RecoveredMap,
    /// Another driver uses the media before the map is durable.
    NotQuiesced,
    /// The error flag is stored in the second info block before it is durable in the first one.
    ErrorFlag,
    /// The data is stored after its persist has begun.
    DataPersistedTooEarly,
    /// The halves of the flog entry are stored after their persist has begun.
    LogPersistedTooEarly,
    /// Map entries that mark the sectors of a load as zeros are not durable before the data.
    LoadZeros,
    /// Space is used before its allocation is durable.
    Space,
    /// Space has another owner before its release is durable.
    Release,
    /// The counts of live blocks lack the new blocks of exchanges.
    UncountedBlocks,
    /// A compaction stores no zeros in the block that a lane gives away.
    MissingZeros,
    /// These zeros are not durable before the second half.
    LateZeros,
}

/// Persist that has begun for a range. Like a CPU, it writes back the current content of the cache
/// lines. The end makes exactly this content durable.
#[derive(Debug)]
struct BegunPersist {
    range: Range<u64>,
    words: Vec<(u64, u64)>,
}

/// Media that can simulate a wrong order, with the oracle for each crash point.
pub(super) struct Recorded {
    pub(super) media: Simulator,
    bug: InjectedBug,
    map: Range<u64>,
    flog: Range<u64>,
    /// False while the engine is being opened. Persists then belong to the recovery.
    pub(super) is_open: std::sync::atomic::AtomicBool,
    held_back: Mutex<Vec<(u64, u64)>>,
    /// Persists that have begun, in order. Only one thread begins them.
    begun: Mutex<Vec<BegunPersist>>,
    /// Persists that have begun for ranges that are stored too late.
    begun_too_early: Mutex<Vec<BegunPersist>>,
    pub(super) oracle: Mutex<Oracle>,
    oracles: Mutex<Vec<Oracle>>,
}

impl Recorded {
    pub(super) fn new(media: Simulator, bug: InjectedBug, oracle: Oracle) -> Self {
        let space: &dyn Media = &media;
        let size_bytes = space.len_bytes() - START_BYTES;
        let (info, _) = read_arena(&media, START_BYTES, size_bytes).unwrap();
        Self {
            map: info.map_at..info.map_at + u64::from(info.sectors) * 4,
            flog: info.flog_at..info.flog_at + u64::from(info.lanes) * 64,
            media,
            bug,
            is_open: false.into(),
            held_back: Mutex::default(),
            begun: Mutex::default(),
            begun_too_early: Mutex::default(),
            oracle: Mutex::new(oracle),
            oracles: Mutex::default(),
        }
    }

    /// Starts to record crash points, each with the possible content of sectors.
    pub(super) fn record(&self) {
        self.oracles.lock().unwrap().clear();
        self.media.record();
    }

    /// Returns the recorded crash points, each with the possible content of sectors.
    pub(super) fn take_points(&self) -> Vec<(CrashPoint, Oracle)> {
        let mut oracles = std::mem::take(&mut *self.oracles.lock().unwrap());
        oracles.push(self.oracle.lock().unwrap().clone());
        let points = self.media.take_points();
        assert_eq!(points.len(), oracles.len());
        points.into_iter().zip(oracles).collect()
    }

    fn persist_all(&self, ranges: &[Range<u64>]) {
        self.oracles.lock().unwrap().push(self.oracle.lock().unwrap().clone());
        Media::persist(&self.media, ranges).unwrap();
    }

    /// Ends persists that have begun, like [`Self::persist_all`].
    fn persist_begun<'b>(&self, begun: impl IntoIterator<Item = &'b BegunPersist>) {
        self.oracles.lock().unwrap().push(self.oracle.lock().unwrap().clone());
        let words: Vec<_> =
            begun.into_iter().flat_map(|begun| begun.words.iter().copied()).collect();
        self.media.persist_written_back(&words);
    }

    fn begin(&self, range: Range<u64>) -> BegunPersist {
        BegunPersist { words: self.media.written_back(range.clone()), range }
    }

    /// Returns true if the persist of these ranges should be omitted.
    fn is_omitted(&self, ranges: &[Range<u64>]) -> bool {
        let is_open = self.is_open.load(std::sync::atomic::Ordering::Relaxed);
        let of = |bug, is_in: fn(&Self, &Range<u64>) -> bool| {
            self.bug == bug && ranges.iter().all(|range| is_in(self, range))
        };
        let is_omitted = match is_open {
            true => {
                of(InjectedBug::SecondHalf, Self::in_flog)
                    || of(InjectedBug::MapBeforeFlog, Self::in_flog)
                    || of(InjectedBug::Discard, Self::in_map)
                    || of(InjectedBug::Space, |_, range| range.start >= VOLUME_BYTES)
                    || of(InjectedBug::Release, Self::is_release)
            }
            false => {
                of(InjectedBug::RecoveredFlog, Self::in_flog)
                    || of(InjectedBug::RecoveredMap, Self::in_map)
            }
        };
        let in_metadata = |range: &Range<u64>| self.in_map(range) || self.in_flog(range);
        is_omitted || self.bug == InjectedBug::ErrorFlag && !ranges.iter().any(in_metadata)
    }

    /// Returns true if the range contains map entries at the start of a window, and if their
    /// persist should be omitted.
    fn is_omitted_from_load(&self, range: &Range<u64>) -> bool {
        let is_open = self.is_open.load(std::sync::atomic::Ordering::Relaxed);
        let mut words = (range.start..range.end).step_by(8);
        let is_zero_entry = |at| {
            let word = Media::load_word(&self.media, at).unwrap();
            [word as u32, (word >> 32) as u32].iter().all(|entry| entry >> 30 == 2)
        };
        self.bug == InjectedBug::LoadZeros
            && is_open
            && self.in_map(range)
            && words.all(is_zero_entry)
    }

    /// Returns true if the range is the word of a chunk that has become a hole.
    fn is_release(&self, range: &Range<u64>) -> bool {
        range.start >= VOLUME_BYTES && Media::load_word(&self.media, range.start).unwrap() == 0
    }

    fn is_zero(&self, range: &Range<u64>) -> bool {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.media.read(range.start, &mut bytes).unwrap();
        is_zero(&bytes)
    }

    fn in_map(&self, range: &Range<u64>) -> bool {
        self.map.start <= range.start && range.start < self.map.end
    }

    fn in_flog(&self, range: &Range<u64>) -> bool {
        self.flog.start <= range.start && range.start < self.flog.end
    }
}

impl Media for Recorded {
    fn len_bytes(&self) -> u64 {
        Media::len_bytes(&self.media)
    }

    fn durability(&self) -> Durability {
        Durability::DaxSync
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.media.read(offset_bytes, into)
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        self.media.next_data(range)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.store(offset_bytes, bytes)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let persisted: Vec<_> =
            ranges.iter().filter(|range| !self.is_omitted_from_load(range)).cloned().collect();
        self.persist_all(if self.is_omitted(ranges) { &[] } else { &persisted });
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        Media::load_word(&self.media, offset_bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        let at = offset_bytes..offset_bytes + 8;
        if self.bug == InjectedBug::MapBeforeFlog {
            if self.in_flog(&at) && offset_bytes % 16 == 8 {
                self.held_back.lock().unwrap().push((offset_bytes, word));
                return Ok(());
            }
            if self.in_map(&at) {
                Media::store_word(&self.media, offset_bytes, word)?;
                self.persist_all(std::slice::from_ref(&at));
                for (at, word) in std::mem::take(&mut *self.held_back.lock().unwrap()) {
                    Media::store_word(&self.media, at, word)?;
                    self.persist_all(std::slice::from_ref(&(at..at + 8)));
                }
                return Ok(());
            }
        }
        if self.bug == InjectedBug::LogPersistedTooEarly && self.in_flog(&at) {
            let begun = self.begin(at);
            self.begun_too_early.lock().unwrap().push(begun);
        }
        Media::store_word(&self.media, offset_bytes, word)
    }

    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        let range = offset_bytes..offset_bytes + bytes.len() as u64;
        if self.bug == InjectedBug::MissingZeros && is_zero(bytes) {
            return Ok(());
        }
        if self.bug == InjectedBug::DataPersistedTooEarly {
            self.begin_persist(range, pending)?;
            return self.store(offset_bytes, bytes);
        }
        self.store(offset_bytes, bytes)?;
        self.begin_persist(range, pending)
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        let too_early = std::mem::take(&mut *self.begun_too_early.lock().unwrap());
        let too_early = too_early.into_iter().find(|begun| begun.range == range);
        self.begun.lock().unwrap().push(too_early.unwrap_or_else(|| self.begin(range.clone())));
        pending.add(range);
        Ok(())
    }

    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        let begun = std::mem::take(&mut *self.begun.lock().unwrap());
        assert!(begun.iter().map(|begun| &begun.range).eq(pending.ranges()), "{begun:x?}");
        let is_data = |range: &Range<u64>| !self.in_map(range) && !self.in_flog(range);
        if !pending.ranges().iter().any(is_data) {
            // Omits the persist of the flog entries of an exchange.
            let is_omitted = self.is_omitted(pending.ranges());
            self.persist_begun(begun.iter().filter(|_| !is_omitted));
            return Ok(());
        }
        // The map words of the exchange's own sectors come first.
        let is_persisted = |(index, range): (usize, &Range<u64>)| match self.bug {
            InjectedBug::FirstHalf => !self.in_flog(range),
            InjectedBug::SectorRewritten => index > 0,
            InjectedBug::LaneReused => index == 0 || !self.in_map(range),
            InjectedBug::Data => !is_data(range),
            InjectedBug::LateZeros => !is_data(range) || !self.is_zero(range),
            _ => true,
        };
        let persisted =
            begun.iter().enumerate().filter(|(index, begun)| is_persisted((*index, &begun.range)));
        self.persist_begun(persisted.map(|(_, begun)| begun));
        Ok(())
    }
}

/// Returns the content of a sector with few nonzero words. A small number of images then covers a
/// large share of all possible ones.
pub(super) fn sparse_content(sector: u32, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    if (1..DISCARDS).contains(&version) {
        let mark = u64::from(sector + 1) << 32 | version;
        for (index, word) in [(0, mark), (1000, !mark), (4088, mark.rotate_left(7))] {
            bytes[index..index + 8].copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// Creates media with a small arena, which has only as many lanes as the script needs.
pub(super) fn new_media() -> Simulator {
    let media = Simulator::new(VOLUME_BYTES);
    format_small(&media, SECTORS, LANES);
    media
}

/// Unit in which media with holes gets and releases space. It contains a few blocks.
const UNIT_BYTES: u64 = 4 * PAGE_BYTES;

/// Creates media with holes for [`thin`], with a small arena.
pub(super) fn new_media_with_holes() -> Simulator {
    let size_bytes = ThinMedia::<Simulator>::wrapped_bytes(VOLUME_BYTES, UNIT_BYTES);
    let media = Simulator::new(size_bytes);
    format_small(&ThinMedia::new(&media, VOLUME_BYTES, UNIT_BYTES), SECTORS, LANES);
    media
}

/// Opens media with holes. A store into a hole panics, and another owner uses released space.
pub(super) fn thin<M: Media>(media: M) -> ThinMedia<M> {
    ThinMedia::new(media, VOLUME_BYTES, UNIT_BYTES).strict().with_reuse()
}

/// Exchange in progress, or a discard that is not durable yet.
struct Active<'a, S> {
    exchange: Option<OneOrMore<'a, S>>,
    sectors: Range<u32>,
    version: u64,
    steps: u32,
}

/// Exchange of one or several sectors, as in the engine.
enum OneOrMore<'a, S> {
    One(Exchange<'a, S, [lanes::LaneGuard<'a>; 1]>),
    More(Exchange<'a, S, LaneGuards<'a>>),
}

impl<'a, S: Media> OneOrMore<'a, S> {
    fn begin(common: &'a Common<S>, arena: &'a Arena, sectors: &Range<u32>) -> Self {
        let exchange = match sectors.len() {
            1 => OneOrMore::One(Exchange::begin_one(common, arena, sectors.start)),
            wanted => OneOrMore::More(Exchange::begin(common, arena, sectors.start, wanted)),
        };
        let begun = match &exchange {
            OneOrMore::One(exchange) => exchange.sectors(),
            OneOrMore::More(exchange) => exchange.sectors(),
        };
        assert_eq!(begun, *sectors);
        exchange
    }

    fn log(&mut self, bytes: &[u8]) -> Result<(), BttError> {
        match self {
            OneOrMore::One(exchange) => exchange.log(bytes),
            OneOrMore::More(exchange) => exchange.log(bytes),
        }
    }

    fn commit(&mut self) -> Result<(), BttError> {
        match self {
            OneOrMore::One(exchange) => exchange.commit(),
            OneOrMore::More(exchange) => exchange.commit(),
        }
    }

    fn publish(self) -> Result<(), BttError> {
        match self {
            OneOrMore::One(exchange) => exchange.publish(),
            OneOrMore::More(exchange) => exchange.publish(),
        }
    }
}

/// Versions of at least this value are discards, which leave zeros.
const DISCARDS: u64 = 1 << 32;

/// Script of interleaved writers.
pub(super) struct Script<'a, S> {
    engine: &'a Engine<S>,
    recorded: &'a Recorded,
    active: Vec<Option<Active<'a, S>>>,
    version: u64,
    /// Number of bytes that compactions have moved, if the script compacts.
    pub(super) compacted_bytes: Option<u64>,
}

impl<'a, S: Media> Script<'a, S> {
    /// Creates a script. `versions` must be larger than all versions on the media.
    pub(super) fn new(
        engine: &'a Engine<S>,
        recorded: &'a Recorded,
        writers: usize,
        version: u64,
    ) -> Self {
        let active = (0..writers).map(|_| None).collect();
        Self { engine, recorded, active, version, compacted_bytes: None }
    }

    /// Makes the script discard more and compact.
    pub(super) fn with_compactions(self) -> Self {
        Self { compacted_bytes: Some(0), ..self }
    }

    /// Executes `steps` steps of randomly chosen writers.
    pub(super) fn run(&mut self, random: &mut Random, steps: usize) {
        for _ in 0..steps {
            let writer = random.below(self.active.len() as u64) as usize;
            if self.active[writer].is_some() {
                self.step(writer);
                continue;
            }
            let first = random.below(u64::from(SECTORS) - 2) as u32;
            let sectors = first..first + 1 + random.below(2) as u32;
            match (random.below(6), self.compacted_bytes) {
                (0, _) | (1, Some(_)) => self.discard(writer, sectors),
                (2, Some(_)) => self.compact(),
                _ => self.begin(writer, sectors),
            }
        }
    }

    /// Performs a pass of a compaction unless it would block.
    fn compact(&mut self) {
        let exchanges = || self.active.iter().flatten().filter(|active| active.exchange.is_some());
        let lanes: usize = exchanges().map(|active| active.sectors.len()).sum();
        if lanes < LANES as usize && exchanges().all(|active| active.steps == 1) {
            let moved_bytes = self.compacted_bytes.get_or_insert_default();
            let mut on_moved = |bytes| {
                *moved_bytes += bytes;
                true
            };
            self.engine.compact(&mut on_moved).unwrap();
        }
    }

    /// Finishes all writers.
    pub(super) fn finish(&mut self) {
        while self.active.iter().any(Option::is_some) {
            (0..self.active.len()).for_each(|writer| self.step(writer));
        }
    }

    /// Performs step 1 of an exchange if a lane is free.
    pub(super) fn begin(&mut self, writer: usize, sectors: Range<u32>) {
        let exchanges = self.active.iter().flatten().filter(|active| active.exchange.is_some());
        let taken: usize = exchanges.map(|active| active.sectors.len()).sum();
        let sectors = sectors.start..sectors.end.min(sectors.start + LANES - taken as u32);
        if sectors.is_empty() {
            return;
        }
        self.version += 1;
        let version = self.version;
        self.update_oracle(&sectors, |versions| versions.pending.push(version));
        let arena = self.engine.arena_slots[0].arena().unwrap();
        let exchange = OneOrMore::begin(&self.engine.common, arena, &sectors);
        self.active[writer] = Some(Active { exchange: Some(exchange), sectors, version, steps: 1 });
    }

    /// Performs the next step of a writer's exchange. Does nothing if the writer has no exchange in
    /// progress or if the step would block.
    pub(super) fn step(&mut self, writer: usize) {
        let Some(active) = &self.active[writer] else { return };
        if active.exchange.is_some() && active.steps == 1 && self.is_locked(&active.sectors) {
            return;
        }
        let active = self.active[writer].as_mut().unwrap();
        active.steps += 1;
        let Some(exchange) = active.exchange.as_mut() else {
            let Active { sectors, version, .. } = self.active[writer].take().unwrap();
            let arena = self.engine.arena_slots[0].arena().unwrap();
            arena.persist_discarded(&self.engine.common.space, &sectors).unwrap();
            self.update_oracle(&sectors, |versions| versions.end(version));
            arena.release_unused(&self.engine.common).unwrap();
            return;
        };
        match active.steps {
            2 => {
                let (sectors, version) = (active.sectors.clone(), active.version);
                let content = sectors.flat_map(|sector| sparse_content(sector, version));
                exchange.log(&content.collect::<Vec<u8>>()).unwrap();
            }
            3 => exchange.commit().unwrap(),
            _ => {
                active.exchange.take().unwrap().publish().unwrap();
                let Active { sectors, version, .. } = self.active[writer].take().unwrap();
                if self.recorded.bug == InjectedBug::UncountedBlocks {
                    self.forget_blocks(&sectors);
                }
                self.update_oracle(&sectors, |versions| versions.end(version));
            }
        }
    }

    /// Removes the blocks of sectors from the counts of live blocks.
    fn forget_blocks(&self, sectors: &Range<u32>) {
        let arena = self.engine.arena_slots[0].arena().unwrap();
        for sector in sectors.clone() {
            let entry = arena.map.entry(&self.engine.common.space, sector).unwrap();
            arena.live.as_ref().unwrap().remove(entry & MAP_BLOCK);
        }
    }

    /// Performs the first step of a discard unless it would block. The second step makes the
    /// discard durable, and releases space.
    pub(super) fn discard(&mut self, writer: usize, sectors: Range<u32>) {
        if self.is_locked(&sectors) {
            return;
        }
        self.version += 1;
        let version = DISCARDS + self.version;
        self.update_oracle(&sectors, |versions| versions.pending.push(version));
        let arena = self.engine.arena_slots[0].arena().unwrap();
        let failed = arena.store_discarded(&self.engine.common, sectors.clone()).unwrap();
        assert!(failed.is_empty());
        self.active[writer] = Some(Active { exchange: None, sectors, version, steps: 1 });
    }

    /// Returns true if an exchange has locked the lines of these sectors.
    fn is_locked(&self, sectors: &Range<u32>) -> bool {
        let lines = |of: &Range<u32>| of.start / LINE_SECTORS..=(of.end - 1) / LINE_SECTORS;
        let wanted = lines(sectors);
        let has_locked = |active: &&Active<'_, S>| active.exchange.is_some() && active.steps > 1;
        let mut locked = self.active.iter().flatten().filter(has_locked);
        locked.any(|active| lines(&active.sectors).any(|line| wanted.contains(&line)))
    }

    fn update_oracle(&self, sectors: &Range<u32>, change: impl Fn(&mut SectorVersions)) {
        let mut oracle = self.recorded.oracle.lock().unwrap();
        sectors.clone().for_each(|sector| change(oracle.0.entry(sector).or_default()));
    }
}

/// Simulates a different driver. Like the Linux driver (drivers/nvdimm/btt.c, btt_freelist_init and
/// btt_write_pg), it persists each of its stores and assumes that existing content is durable.
pub(super) struct Driver<'a> {
    recorded: &'a Recorded,
    info: ArenaInfo,
    recovery: Recovery,
}

impl<'a> Driver<'a> {
    pub(super) fn open(recorded: &'a Recorded) -> Self {
        let size_bytes = Media::len_bytes(recorded) - START_BYTES;
        let (info, _) = read_arena(recorded, START_BYTES, size_bytes).unwrap();
        let mut recovery = recover(recorded, &info);
        let driver = Self { recorded, info, recovery: Recovery::default() };
        for (sector, block) in std::mem::take(&mut recovery.redo) {
            driver.map(sector, block);
        }
        Self { recovery, ..driver }
    }

    /// Writes a sector through the given lane.
    pub(super) fn write(&mut self, lane: usize, sector: u32, version: u64) {
        let update_oracle = |change: fn(&mut SectorVersions, u64)| {
            let mut oracle = self.recorded.oracle.lock().unwrap();
            change(oracle.0.entry(sector).or_default(), version);
        };
        update_oracle(|versions, version| versions.pending.push(version));
        let lane_now = self.recovery.lanes[lane].clone();
        let (block, at) = (lane_now.block, lane_now.entry_at(&self.info));
        self.store(self.info.block_at(block), &sparse_content(sector, version));
        let old = read_map(self.recorded, &self.info, sector).unwrap().block;
        for (at, half) in [at, at + 8].into_iter().zip(lane_now.halves(sector, old)) {
            self.store(at, &half.to_le_bytes());
        }
        self.map(sector, block);
        self.recovery.lanes[lane].advance(self.recovery.second_slot, sector, old);
        update_oracle(SectorVersions::end);
    }

    fn map(&self, sector: u32, block: u32) {
        let at = self.info.map_at + u64::from(sector / 2) * 8;
        let mut word = [0; 8];
        self.recorded.read(at, &mut word).unwrap();
        let within = (sector % 2 * 4) as usize;
        word[within..within + 4].copy_from_slice(&written_entry(block).to_le_bytes());
        self.store(at, &word);
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.recorded.store(at, bytes).unwrap();
        self.recorded.persist_all(std::slice::from_ref(&(at..at + bytes.len() as u64)));
    }
}

/// Blocks that the Linux driver stores in the map when it opens a BTT (drivers/nvdimm/btt.c,
/// btt_freelist_init), by sector. It does not use the recovery of the engine.
struct LinuxRecovery {
    info: ArenaInfo,
    redo: BTreeMap<u32, u32>,
}

impl LinuxRecovery {
    fn of(image: &impl Media) -> Self {
        let (info, _) = read_arena(image, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
        let mut groups = vec![FlogGroupBytes::new_zeroed(); info.lanes as usize];
        image.read(info.flog_at, groups.as_mut_bytes()).unwrap();
        let second = second_slot(&groups).unwrap();
        let mut redo = BTreeMap::new();
        for group in &groups {
            let pair = [&group.entries[0], &group.entries[second]];
            let entry = pair[newest(pair).unwrap()];
            let [old, new] = [&entry.old_map, &entry.new_map].map(|map| map.get() & MAP_BLOCK);
            let mapped = read_map(image, &info, entry.lba.get()).unwrap().block;
            if old != new && mapped == old {
                redo.insert(entry.lba.get(), new);
            }
        }
        Self { info, redo }
    }

    fn read(&self, image: &impl Media, sector: u32) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES as usize];
        let block = match (self.redo.get(&sector), read_map(image, &self.info, sector).unwrap()) {
            (Some(block), _) => *block,
            (None, MapEntry { kind: MapKind::Data, block }) => block,
            (None, _) => return bytes,
        };
        image.read(self.info.block_at(block), &mut bytes).unwrap();
        bytes
    }
}

impl SectorVersions {
    /// Ends a write or a discard. From here on, its version is the content of the sector.
    fn end(&mut self, version: u64) {
        let Some(index) = self.pending.iter().position(|pending| *pending == version) else {
            assert!(version >= DISCARDS);
            return;
        };
        self.pending.remove(index);
        self.current = version;
        if version < DISCARDS {
            // Discards in progress were stored before this exchange locked the line. The exchange
            // has made them durable.
            self.pending.retain(|pending| *pending < DISCARDS);
        }
    }
}

impl Oracle {
    /// From here on, sectors may contain this version.
    pub(super) fn expect_write(&mut self, sectors: Range<u32>, version: u64) {
        sectors.for_each(|sector| self.0.entry(sector).or_default().pending.push(version));
    }

    /// Ends all writes.
    pub(super) fn end_writes(&mut self) {
        for versions in self.0.values_mut() {
            versions.current = versions.pending.drain(..).next_back().unwrap_or(versions.current);
        }
    }

    /// Verifies an image, which may have holes. Returns an oracle with its content and without
    /// writes in progress.
    ///
    /// 1. A check finds nothing, and a recovery as in Linux reads a possible version of every
    ///    sector.
    /// 2. The engine opens it, and reads a possible version of every sector.
    /// 3. A check finds nothing, and nothing to redo.
    pub(super) fn verify(&self, image: &Simulator) -> Result<Self, String> {
        match Media::len_bytes(image) {
            VOLUME_BYTES => self.verify_media(image),
            _ => {
                let media = ThinMedia::new(image, VOLUME_BYTES, UNIT_BYTES);
                let before = media.allocated();
                let found = self.verify_media(&media)?;
                match media.allocated() == before {
                    true => Ok(found),
                    false => Err("recovery has allocated space".to_owned()),
                }
            }
        }
    }

    fn verify_media(&self, image: &impl Media) -> Result<Self, String> {
        let check_is_clean = |when: &str| {
            let report = check(image);
            if report.is_clean() {
                Ok(report)
            } else {
                Err(format!("{when}: {:?}", report.arenas[0].findings))
            }
        };
        check_is_clean("before")?;
        let linux = LinuxRecovery::of(image);
        self.find(|sector| linux.read(image, sector)).map_err(|error| format!("Linux: {error}"))?;
        let engine = Engine::open(image).map_err(|error| error.to_string())?;
        let found = self.read(&engine)?;
        if check_is_clean("after")?.arenas[0].redo > 0 {
            return Err("recovery is incomplete".to_owned());
        }
        Ok(found)
    }

    /// Returns the versions that an engine reads, provided that all of them are possible.
    pub(super) fn read(&self, engine: &Engine<impl Media>) -> Result<Self, String> {
        self.find(|sector| read(engine, u64::from(sector)))
    }

    /// Returns the versions of the sectors that `read` returns, provided that all of them are
    /// possible.
    fn find(&self, read: impl Fn(u32) -> Vec<u8>) -> Result<Self, String> {
        let mut found = Self::default();
        let untouched = SectorVersions::default();
        for sector in 0..SECTORS {
            let versions = self.0.get(&sector).unwrap_or(&untouched);
            let bytes = read(sector);
            let allowed = std::iter::once(&versions.current).chain(&versions.pending);
            let Some(version) = allowed.copied().find(|v| bytes == sparse_content(sector, *v))
            else {
                return Err(format!("sector {sector} is none of {versions:?}: {:x?}", &bytes[..8]));
            };
            found.0.insert(sector, SectorVersions { current: version, pending: vec![] });
        }
        Ok(found)
    }
}
