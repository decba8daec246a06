//! Comparison of a whole pool with a simple model, which consists of a list of volumes, a set of
//! lent chunks, and counters.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::crash::{new_pool_of, open, places};
use super::*;
use crate::media::simulator::Simulator;

const CHUNKS: u32 = 40;
const METADATA: u32 = 2;
const STRG: u32 = 12;
const SLOTS: u32 = 3;
const MAX_GROWTH: u32 = 6;
/// Size of the smallest BTT volume, in chunks. Further growth adds an arena.
const BTT_CHUNKS: u32 = 9;

#[derive(Clone, Debug)]
enum Operation {
    Lend { chunks: u32 },
    ReturnMemory { picks: Vec<prop::sample::Index> },
    ReturnChunk { pick: prop::sample::Index, chunk: prop::sample::Index },
    Create { name: u8, chunks: u32, format: VolumeFormat, thin: bool, reserve: Option<u32> },
    SetReserve { name: u8, chunks: u32 },
    CreateRemaining { name: u8 },
    Delete { name: u8 },
    Rename { name: u8, new_name: u8 },
    Resize { name: u8, chunks: u32, shrink: bool },
    Convert { name: u8, thin: bool },
    FillHoles { name: u8, start: u32, chunks: u32 },
    Release { name: u8, start: u32, chunks: u32 },
    Scrub { chunks: u32 },
    LendPromised { min_free_chunks: Option<u32> },
    Reopen,
    Grow,
}

fn operation() -> impl Strategy<Value = Operation> {
    let name = 0..5u8;
    let index = any::<prop::sample::Index>;
    let format = prop_oneof![2 => Just(VolumeFormat::Raw), 1 => Just(VolumeFormat::Btt)];
    prop_oneof![
        6 => (1..30u32).prop_map(|chunks| Operation::Lend { chunks }),
        3 => prop::collection::vec(index(), 0..4).prop_map(|picks| Operation::ReturnMemory { picks }),
        3 => (index(), index()).prop_map(|(pick, chunk)| Operation::ReturnChunk { pick, chunk }),
        5 => (name.clone(), 1..14u32, format, prop::option::of(prop::option::of(0..15u32)))
            .prop_map(|(name, chunks, format, reserve)| Operation::Create {
                name,
                chunks,
                format,
                thin: reserve.is_some(),
                reserve: reserve.flatten(),
            }),
        // Larger than the pool, so that writes can fill the pool.
        1 => name.clone().prop_map(|name| Operation::Create {
            name,
            chunks: 2 * CHUNKS,
            format: VolumeFormat::Raw,
            thin: true,
            reserve: Some(2),
        }),
        2 => (name.clone(), 0..15u32)
            .prop_map(|(name, chunks)| Operation::SetReserve { name, chunks }),
        2 => (name.clone(), any::<bool>())
            .prop_map(|(name, thin)| Operation::Convert { name, thin }),
        4 => (name.clone(), 0..40u32, 1..12u32)
            .prop_map(|(name, start, chunks)| Operation::FillHoles { name, start, chunks }),
        4 => (name.clone(), 0..14u32, 1..8u32)
            .prop_map(|(name, start, chunks)| Operation::Release { name, start, chunks }),
        1 => name.clone().prop_map(|name| Operation::CreateRemaining { name }),
        3 => name.clone().prop_map(|name| Operation::Delete { name }),
        2 => (name.clone(), name.clone()).prop_map(|(name, new_name)| Operation::Rename { name, new_name }),
        4 => (name, 1..24u32, any::<bool>())
            .prop_map(|(name, chunks, shrink)| Operation::Resize { name, chunks, shrink }),
        3 => (1..12u32).prop_map(|chunks| Operation::Scrub { chunks }),
        2 => prop::option::of(0..12u32)
            .prop_map(|min_free_chunks| Operation::LendPromised { min_free_chunks }),
        1 => Just(Operation::Reopen),
        1 => Just(Operation::Grow),
    ]
}

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Full,
    Exists,
    NoSuchVolume,
    NoSlot,
    /// The size is invalid.
    Refused,
}

fn outcome_of<T>(result: &Result<T, PoolError>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(PoolError::PoolFull { .. }) => Outcome::Full,
        Err(PoolError::VolumeExists { .. } | PoolError::SameName { .. }) => Outcome::Exists,
        Err(PoolError::NoSuchVolume { .. }) => Outcome::NoSuchVolume,
        Err(PoolError::NoVolumeSlot { .. }) => Outcome::NoSlot,
        Err(
            PoolError::Size { .. }
            | PoolError::ShrinkRefused { .. }
            | PoolError::NotThin { .. }
            | PoolError::Btt(_),
        ) => Outcome::Refused,
        Err(error) => panic!("{error}"),
    }
}

/// Simple model of a pool.
#[derive(Default)]
struct Model {
    chunks: u32,
    volumes: BTreeMap<String, ModelVolume>,
    lent: Vec<Extent>,
    /// Chunks that stay free for volumes while promised chunks are lent. `None` if none are lent.
    min_free_chunks: Option<u32>,
    /// Promised chunks may have been lent since the pool was opened.
    has_lent_promised: bool,
}

#[derive(Clone, Debug)]
struct ModelVolume {
    chunks: u32,
    /// Guaranteed chunks.
    reserve: u32,
    format: VolumeFormat,
    thin: bool,
    /// Indexes that have a chunk.
    present: BTreeSet<u32>,
    /// Indexes with the metadata of a BTT. No other chunk contains data.
    metadata: BTreeSet<u32>,
}

impl ModelVolume {
    fn new(chunks: u32, format: VolumeFormat, thin: bool) -> Self {
        let empty = BTreeSet::new();
        let mut volume =
            Self { chunks: 0, reserve: 0, format, thin, present: empty.clone(), metadata: empty };
        volume.grow(chunks);
        volume
    }

    fn promised(&self) -> u32 {
        self.reserve.max(self.present.len() as u32)
    }

    /// Changes the size. If all of the volume was guaranteed, this stays so.
    fn set_chunks(&mut self, chunks: u32) {
        let is_whole = self.reserve == self.chunks;
        self.reserve = if is_whole { chunks } else { self.reserve.min(chunks) };
        self.chunks = chunks;
    }

    /// A BTT gets another arena, which has metadata in its first and last chunk.
    fn grow(&mut self, chunks: u32) {
        if self.format == VolumeFormat::Btt {
            self.metadata.extend([self.chunks, chunks - 1]);
        }
        match self.thin {
            true => self.present.extend(&self.metadata),
            false => self.present.extend(self.chunks..chunks),
        }
        self.set_chunks(chunks);
    }

    fn convert(&mut self, thin: bool) {
        self.thin = thin;
        self.present = if thin { self.metadata.clone() } else { (0..self.chunks).collect() };
        self.reserve = if thin { self.reserve } else { self.chunks };
    }
}

impl Model {
    fn in_volumes(&self) -> u32 {
        self.volumes.values().map(|volume| volume.present.len() as u32).sum()
    }

    fn promised(&self) -> u32 {
        self.volumes.values().map(|volume| volume.promised()).sum()
    }

    fn provisioned(&self) -> u32 {
        self.volumes.values().map(|volume| volume.chunks).sum()
    }

    /// Chunks that can be promised to a new or growing volume.
    fn unpromised(&self) -> u32 {
        self.free().saturating_sub(self.holes())
    }

    /// Chunks that were promised, but are not allocated.
    fn holes(&self) -> u32 {
        self.promised() - self.in_volumes()
    }

    fn in_memory(&self) -> u32 {
        self.lent.iter().map(|extent| extent.chunks()).sum()
    }

    fn free(&self) -> u32 {
        self.chunks - METADATA - self.in_volumes() - self.in_memory()
    }

    /// Lending memory leaves free the part of STRG that volumes do not use yet, or their holes,
    /// whichever is larger. If holes are lent, only the minimum of them counts.
    fn lendable(&self) -> u32 {
        let holes = self.holes().min(self.min_free_chunks.unwrap_or(u32::MAX));
        let kept = STRG.saturating_sub(self.in_volumes()).max(holes);
        self.free() - kept.min(self.free())
    }

    fn create(&self, name: &str, new: &ModelVolume) -> Outcome {
        let ModelVolume { chunks, format, thin, reserve, .. } = *new;
        match () {
            () if self.volumes.contains_key(name) => Outcome::Exists,
            () if self.volumes.len() as u32 == SLOTS => Outcome::NoSlot,
            () if format == VolumeFormat::Btt && chunks < BTT_CHUNKS => Outcome::Refused,
            () if reserve > chunks || (!thin && reserve < chunks) => Outcome::Refused,
            () if new.promised() > self.unpromised() => Outcome::Full,
            () => Outcome::Done,
        }
    }

    fn resize(&self, name: &str, chunks: u32, shrink: bool) -> Outcome {
        let Some(volume) = self.volumes.get(name) else { return Outcome::NoSuchVolume };
        let (has, format) = (&volume.chunks, &volume.format);
        let grown = || {
            let mut grown = volume.clone();
            grown.grow(chunks);
            grown
        };
        match () {
            () if chunks == *has || (chunks < *has && !shrink) => Outcome::Refused,
            () if chunks < *has => Outcome::Done,
            // An additional arena has at least 16 MiB. It starts after the last arena and the
            // unused space after it.
            () if *format == VolumeFormat::Btt && chunks < has + BTT_CHUNKS - 1 => Outcome::Refused,
            () if grown().promised() - volume.promised() > self.unpromised() => Outcome::Full,
            () => Outcome::Done,
        }
    }
}

struct World {
    media: Simulator,
    pool: Arc<OtherPool>,
    model: Model,
}

fn size_of_chunks(chunks: u32) -> VolumeSize {
    VolumeSize::Bytes(bytes(chunks))
}

impl World {
    fn new() -> Self {
        let (media, pool) = new_pool_of(CHUNKS, |superblock| {
            superblock.strg_bytes = bytes(STRG);
            superblock.volume_slots = SLOTS;
        });
        Self { media, pool, model: Model { chunks: CHUNKS, ..Model::default() } }
    }

    /// Applies an operation to the pool and the model, and returns both results.
    fn apply(&mut self, operation: Operation) -> (Outcome, Outcome) {
        let name = |number: u8| format!("v{number}");
        let model = &mut self.model;
        match operation {
            Operation::Lend { chunks } => {
                let expected =
                    if chunks <= model.lendable() { Outcome::Done } else { Outcome::Full };
                let result = self.pool.alloc_memory(bytes(chunks));
                let end = outcome_of(&result);
                let extents = result.unwrap_or_default();
                assert!(
                    end != Outcome::Done
                        || extents.iter().map(|e| e.chunks()).sum::<u32>() == chunks
                );
                model.lent.extend(extents);
                (end, expected)
            }
            Operation::ReturnMemory { picks } => {
                let mut back = Vec::new();
                for pick in picks {
                    if !model.lent.is_empty() {
                        back.push(model.lent.swap_remove(pick.index(model.lent.len())));
                    }
                }
                (outcome_of(&self.pool.free_memory(&back)), Outcome::Done)
            }
            Operation::Scrub { chunks } => {
                let waiting = self.pool.info().scrubbing_bytes;
                let erased = self.pool.scrub_some(bytes(chunks)).unwrap();
                assert_eq!(erased, waiting.min(bytes(chunks)));
                (Outcome::Done, Outcome::Done)
            }
            Operation::ReturnChunk { pick, chunk } => {
                if model.lent.is_empty() {
                    return (Outcome::Done, Outcome::Done);
                }
                let extent = model.lent.swap_remove(pick.index(model.lent.len()));
                let mut chunks: Vec<_> = extent.run().ids().map(Extent::chunk).collect();
                let back = chunks.swap_remove(chunk.index(chunks.len()));
                model.lent.extend(chunks);
                (outcome_of(&self.pool.free_memory(&[back])), Outcome::Done)
            }
            Operation::Create { name: number, chunks, format, thin, reserve } => {
                let mut new = ModelVolume::new(chunks, format, thin);
                new.reserve = reserve.unwrap_or(chunks);
                let expected = model.create(&name(number), &new);
                let options = VolumeOptions {
                    size: size_of_chunks(chunks),
                    format,
                    thin,
                    reserve_bytes: reserve.map(bytes),
                };
                let end = outcome_of(&self.pool.create_volume_with(&name(number), options));
                if expected == Outcome::Done {
                    model.volumes.insert(name(number), new);
                }
                (end, expected)
            }
            Operation::SetReserve { name: number, chunks } => {
                let end = outcome_of(&self.pool.set_volume_reserve(&name(number), bytes(chunks)));
                let unpromised = model.unpromised();
                let Some(volume) = model.volumes.get_mut(&name(number)) else {
                    return (end, Outcome::NoSuchVolume);
                };
                let changed = ModelVolume { reserve: chunks, ..volume.clone() };
                match changed.promised() - volume.promised().min(changed.promised()) {
                    _ if !volume.thin || chunks > volume.chunks => (end, Outcome::Refused),
                    more if more > unpromised => (end, Outcome::Full),
                    _ => {
                        *volume = changed;
                        (end, Outcome::Done)
                    }
                }
            }
            Operation::Convert { name: number, thin } => {
                let end = outcome_of(&self.pool.convert_volume(&name(number), thin));
                let (free, unpromised) = (model.free(), model.unpromised());
                match model.volumes.get_mut(&name(number)) {
                    None => (end, Outcome::NoSuchVolume),
                    Some(volume)
                        if !thin
                            && (volume.chunks - volume.promised() > unpromised
                                || volume.chunks - volume.present.len() as u32 > free) =>
                    {
                        (end, Outcome::Full)
                    }
                    Some(volume) => {
                        volume.convert(thin);
                        (end, Outcome::Done)
                    }
                }
            }
            Operation::FillHoles { name: number, start, chunks } => {
                let (free, unpromised) = (model.free(), model.unpromised());
                let Some(volume) = model.volumes.get_mut(&name(number)) else {
                    return (Outcome::Done, Outcome::Done);
                };
                let start = start.min(volume.chunks - 1);
                let end = (start + chunks).min(volume.chunks);
                let holes = (start..end).filter(|index| !volume.present.contains(index));
                let mut filled = volume.clone();
                filled.present.extend(holes);
                let holes = (filled.present.len() - volume.present.len()) as u32;
                let beyond = filled.promised() - volume.promised();
                let opened = self.pool.open_volume(&name(number)).unwrap();
                match opened.provision(bytes(start)..bytes(end)) {
                    Ok(()) if beyond > unpromised => {
                        panic!("{beyond} chunks beyond the reserve, {unpromised} were unpromised")
                    }
                    Ok(()) => {
                        *volume = filled;
                        (Outcome::Done, Outcome::Done)
                    }
                    // Only lent chunks and those beyond the reserve can be missing.
                    Err(MediaError::Full { .. }) if holes > free || beyond > unpromised => {
                        (Outcome::Full, Outcome::Full)
                    }
                    Err(error) => panic!("{holes} of {free} free chunks: {error}"),
                }
            }
            Operation::LendPromised { min_free_chunks } => {
                self.pool.lend_promised(min_free_chunks.map(bytes));
                self.pool.set_borrowable_bytes(u64::MAX);
                model.min_free_chunks = min_free_chunks;
                model.has_lent_promised |= min_free_chunks.is_some();
                (Outcome::Done, Outcome::Done)
            }
            Operation::Release { name: number, start, chunks } => {
                if let Some(volume) = model.volumes.get_mut(&name(number)).filter(|v| v.thin) {
                    // Metadata must stay.
                    let indexes = (start..(start + chunks).min(volume.chunks))
                        .filter(|index| !volume.metadata.contains(index));
                    let units: Vec<_> =
                        indexes.map(|index| bytes(index)..bytes(index + 1)).collect();
                    let opened = self.pool.open_volume(&name(number)).unwrap();
                    assert_eq!(opened.release(&units, &|_| false).unwrap(), []);
                    volume
                        .present
                        .retain(|index| !units.contains(&(bytes(*index)..bytes(*index + 1))));
                }
                (Outcome::Done, Outcome::Done)
            }
            Operation::CreateRemaining { name: number } => {
                let chunks = model.unpromised();
                let new = ModelVolume::new(chunks.max(1), VolumeFormat::Raw, false);
                let expected = match model.create(&name(number), &new) {
                    Outcome::Done if chunks == 0 => Outcome::Full,
                    end => end,
                };
                let create = self.pool.create_volume(
                    &name(number),
                    VolumeSize::Remaining,
                    VolumeFormat::Raw,
                );
                if expected == Outcome::Done {
                    model.volumes.insert(name(number), new);
                }
                (outcome_of(&create), expected)
            }
            Operation::Delete { name: number } => {
                let expected = if model.volumes.remove(&name(number)).is_some() {
                    Outcome::Done
                } else {
                    Outcome::NoSuchVolume
                };
                (outcome_of(&self.pool.delete_volume(&name(number))), expected)
            }
            Operation::Rename { name: number, new_name } => {
                let expected = match () {
                    () if !model.volumes.contains_key(&name(number)) => Outcome::NoSuchVolume,
                    () if model.volumes.contains_key(&name(new_name)) => Outcome::Exists,
                    () => Outcome::Done,
                };
                if expected == Outcome::Done {
                    let volume = model.volumes.remove(&name(number)).expect("checked before");
                    model.volumes.insert(name(new_name), volume);
                }
                (outcome_of(&self.pool.rename_volume(&name(number), &name(new_name))), expected)
            }
            Operation::Resize { name: number, chunks, shrink } => {
                // The model has no arenas, which a shrink of a BTT volume removes. Therefore, its
                // BTT volumes only grow.
                let is_btt = |volume: &ModelVolume| volume.format == VolumeFormat::Btt;
                let shrink = shrink && !model.volumes.get(&name(number)).is_some_and(is_btt);
                let expected = model.resize(&name(number), chunks, shrink);
                let shrink = if shrink { Shrink::Allow } else { Shrink::Refuse };
                let end = outcome_of(&self.pool.resize_volume(
                    &name(number),
                    size_of_chunks(chunks),
                    shrink,
                ));
                if let (Outcome::Done, Some(volume)) =
                    (expected, model.volumes.get_mut(&name(number)))
                {
                    match chunks > volume.chunks {
                        true => volume.grow(chunks),
                        false => {
                            volume.set_chunks(chunks);
                            volume.present.retain(|index| *index < chunks);
                        }
                    }
                }
                (end, expected)
            }
            Operation::Reopen => {
                self.reopen();
                (Outcome::Done, Outcome::Done)
            }
            Operation::Grow => {
                if self.model.chunks < CHUNKS + MAX_GROWTH {
                    let size_bytes = bytes(self.model.chunks + 1);
                    self.pool
                        .grow_on(size_bytes, |_| Ok(()), |_| self.media.extend(size_bytes))
                        .unwrap();
                    self.model.chunks += 1;
                }
                (Outcome::Done, Outcome::Done)
            }
        }
    }

    /// Opens the pool again without returning lent memory, as when a process exits.
    fn reopen(&mut self) {
        self.model.lent.clear();
        self.model.min_free_chunks = None;
        self.model.has_lent_promised = false;
        self.pool = open(&self.media).unwrap();
    }

    fn verify(&self) -> Result<(), TestCaseError> {
        let (model, info) = (&self.model, self.pool.info());
        assert_states_add_up(&info);
        assert_accounts_add_up(&info);
        prop_assert_eq!(info.total_bytes, bytes(model.chunks));
        prop_assert_eq!(info.volume_bytes, bytes(model.in_volumes()));
        prop_assert_eq!(info.promised_bytes, bytes(model.promised()));
        prop_assert_eq!(info.provisioned_bytes, bytes(model.provisioned()));
        prop_assert!(
            model.has_lent_promised || model.holes() <= model.free(),
            "{} promised chunks are neither allocated nor free",
            model.holes()
        );
        prop_assert_eq!(info.available_bytes(), bytes(model.unpromised()));
        prop_assert_eq!(info.memory_bytes, bytes(model.in_memory()));
        // Chunks that wait to be erased are also available for allocations.
        prop_assert_eq!(info.free_bytes + info.scrubbing_bytes, bytes(model.free()));
        prop_assert_eq!(info.lendable_bytes, bytes(model.lendable()));
        prop_assert_eq!(self.pool.offered_bytes(), info.lendable_bytes);
        prop_assert_eq!(info.reserve_bytes, bytes(STRG));
        prop_assert!(
            bytes(model.free() + model.in_volumes())
                >= info.reserve_bytes.min(bytes(model.chunks - METADATA)),
            "lent memory includes the STRG reserve"
        );
        let volumes: BTreeMap<_, _> = self
            .pool
            .volumes()
            .into_iter()
            .map(|v| {
                let [size, reserve] =
                    [v.size_bytes, v.reserve_bytes].map(|b| (b / CHUNK_BYTES) as u32);
                (v.name, (size, reserve, v.format, v.thin))
            })
            .collect();
        let expected: BTreeMap<_, _> = model
            .volumes
            .iter()
            .map(|(name, v)| (name.clone(), (v.chunks, v.reserve, v.format, v.thin)))
            .collect();
        prop_assert_eq!(&volumes, &expected);
        // Every chunk has exactly one owner.
        let mut taken = BTreeSet::from_iter((0..METADATA).map(ChunkId));
        for name in volumes.keys() {
            let mut present = BTreeSet::new();
            for (index, chunk) in places(&self.pool.open_volume(name).unwrap()) {
                prop_assert!(taken.insert(chunk), "{} overlaps another", name);
                present.insert(index);
            }
            prop_assert_eq!(&present, &model.volumes[name].present, "{}", name);
        }
        for extent in &model.lent {
            prop_assert!(
                extent.start.0.is_multiple_of(extent.chunks()) && extent.order <= MAX_ORDER
            );
            prop_assert!(
                extent.run().ids().all(|chunk| taken.insert(chunk)),
                "{} has another owner",
                extent
            );
        }
        prop_assert!(taken.iter().all(|chunk| chunk.0 < model.chunks));
        prop_assert_eq!(taken.len() as u32, model.chunks - model.free());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pool_agrees_with_a_list_of_volumes_and_a_set_of_chunks(
        operations in prop::collection::vec(operation(), 1..60)
    ) {
        let mut world = World::new();
        for operation in operations {
            let case = format!("{operation:?}");
            let (end, expected) = world.apply(operation);
            prop_assert_eq!(end, expected, "{}", case);
            world.verify()?;
        }
        prop_assert_eq!(world.pool.check().unwrap().pool, []);
        world.reopen();
        world.verify()?;
    }
}
