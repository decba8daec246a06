//! Buddy allocator for free chunks.
//!
//! It exists only in memory and never accesses the media. Opening the pool rebuilds it from the
//! chunk table.

use std::collections::BTreeSet;

use super::wear::Wear;
use crate::pool::format::chunk::{ChunkId, Extent, MAX_ORDER, Run, merge_runs};

/// End of the pool at which chunks are allocated. Volumes are long-lived, while memory is lent and
/// returned often. Allocating from opposite ends leaves one large hole between them instead of many
/// small ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Allocates the lowest chunk numbers, for volumes.
    Low,
    /// Allocates the highest chunk numbers, for memory.
    High,
}

const ORDERS: usize = MAX_ORDER as usize + 1;

/// Free extents of orders 0 to 10. Two free buddies are always merged into one extent of the next
/// order.
#[derive(Debug, Default)]
pub(crate) struct Buddy {
    /// For each chunk, the order plus one of the free extent that starts there, or 0. Chunks after
    /// the end are not free.
    heads: Vec<u8>,
    /// Free extents of each order, sorted by wear level and start (see [`key`]).
    by_wear: [BTreeSet<u64>; ORDERS],
    wear: Wear,
    free_chunks: u32,
    /// Number of searches through all free extents.
    #[cfg(test)]
    searches: std::cell::Cell<u32>,
}

/// Combines a wear level and a start into one number, which sorts by level first. A level is at
/// most 2^32 uses / `WEAR_STEP`.
fn key(level: u64, start: u32) -> u64 {
    level << 32 | u64::from(start)
}

fn level_and_start(key: u64) -> (u64, u32) {
    (key >> 32, key as u32)
}

impl Buddy {
    /// Returns an allocator without free chunks. `uses` contains the number of uses of each chunk.
    fn with_wear(uses: Vec<u32>) -> Self {
        Self { heads: vec![0; uses.len()], wear: Wear::new(uses), ..Self::default() }
    }

    /// Returns an allocator with free runs in any order. Adjacent runs are merged first, so that no
    /// two free extents are buddies.
    pub(crate) fn new(uses: Vec<u32>, free: Vec<Run>) -> Self {
        let free = merge_runs(free);
        let mut buddy = Self::with_wear(uses);
        let mut keys: [Vec<u64>; ORDERS] = Default::default();
        buddy
            .heads
            .resize(free.last().map_or(0, |run| run.end().0 as usize).max(buddy.heads.len()), 0);
        for extent in free.iter().flat_map(|run| run.extents()) {
            buddy.heads[extent.start.0 as usize] = extent.order + 1;
            keys[usize::from(extent.order)].push(buddy.key(extent));
            buddy.free_chunks += extent.chunks();
        }
        // Building a set from all keys is several times faster than inserting the keys one by one.
        buddy.by_wear = keys.map(BTreeSet::from_iter);
        buddy
    }

    fn key(&self, extent: Extent) -> u64 {
        key(self.wear.level(extent), extent.start.0)
    }

    fn insert(&mut self, extent: Extent) {
        let start = extent.start.0 as usize;
        if self.heads.len() <= start {
            self.heads.resize(start + 1, 0);
        }
        let key = self.key(extent);
        let is_new = self.heads[start] == 0 && self.by_wear[usize::from(extent.order)].insert(key);
        assert!(is_new, "{extent} was free already");
        self.heads[start] = extent.order + 1;
    }

    /// Returns true if `extent` is exactly one of the free extents. A part of a larger one does not
    /// match.
    fn contains(&self, extent: Extent) -> bool {
        self.heads.get(extent.start.0 as usize).is_some_and(|head| *head == extent.order + 1)
    }

    /// Removes a free extent. Returns false if the extent is not free, or is a part of a larger
    /// free extent.
    fn remove(&mut self, extent: Extent) -> bool {
        if !self.contains(extent) {
            return false;
        }
        self.heads[extent.start.0 as usize] = 0;
        let key = self.key(extent);
        let removed = self.by_wear[usize::from(extent.order)].remove(&key);
        assert!(removed, "wear changes only while an extent is not free");
        true
    }

    /// Returns the free extent that contains a chunk.
    fn extent_containing(&self, chunk: u32) -> Option<Extent> {
        let extent = |order: u8| Extent { start: ChunkId(chunk & !((1 << order) - 1)), order };
        (0..=MAX_ORDER).map(extent).find(|extent| self.contains(*extent))
    }

    /// Returns the number of free chunks.
    pub(crate) fn free_chunks(&self) -> u32 {
        self.free_chunks
    }

    /// Returns the largest order with a free extent.
    pub(crate) fn largest_order(&self) -> Option<u8> {
        (0..=MAX_ORDER).rev().find(|order| !self.by_wear[usize::from(*order)].is_empty())
    }

    /// Returns the number of searches through all free extents.
    #[cfg(test)]
    pub(crate) fn searches(&self) -> u32 {
        self.searches.get()
    }

    fn free_extents(&self) -> impl Iterator<Item = Extent> {
        #[cfg(test)]
        self.searches.update(|searches| searches + 1);
        let mut at = 0;
        std::iter::from_fn(move || {
            at += self.heads.get(at..)?.iter().position(|head| *head != 0)?;
            let extent = Extent { start: ChunkId(at as u32), order: self.heads[at] - 1 };
            at += extent.chunks() as usize;
            Some(extent)
        })
    }

    /// Returns runs of free chunks, in order. Adjacent extents that are not buddies form one run.
    fn free_runs(&self) -> impl Iterator<Item = Run> {
        let mut extents = self.free_extents().peekable();
        std::iter::from_fn(move || {
            let mut run = extents.next()?.run();
            while let Some(next) = extents.next_if(|next| next.start == run.end()) {
                run.chunks += next.chunks();
            }
            Some(run)
        })
    }

    pub(crate) fn longest_run(&self) -> u32 {
        self.free_runs().map(|run| run.chunks).max().unwrap_or(0)
    }

    /// Allocates `chunks` chunks for a long time, sorted by their position in the file. They are
    /// taken from the start of the shortest sufficient run. Among runs of equal length, the least
    /// worn is used. If no run is sufficient, the chunks consist of as few extents as possible.
    pub(crate) fn allocate_long_term(&mut self, chunks: u32) -> Option<Vec<Run>> {
        let shortest =
            self.free_runs().map(|run| run.chunks).filter(|length| *length >= chunks).min();
        let fits = shortest.and_then(|length| {
            let shortest = self.free_runs().filter(|run| run.chunks == length);
            shortest.min_by_key(|run| (self.wear.level_of_run(*run), run.start))
        });
        if let Some(run) = fits {
            let run = Run { start: run.start, chunks };
            self.take_run(run);
            return Some(vec![run]);
        }
        self.allocate_sorted(chunks)
    }

    /// Allocates `chunks` chunks in as few extents as possible, sorted by their position.
    fn allocate_sorted(&mut self, chunks: u32) -> Option<Vec<Run>> {
        let mut extents = self.allocate(chunks, Placement::Low)?;
        extents.sort_unstable();
        Some(crate::pool::format::chunk::runs(extents.iter().flat_map(|extent| extent.run().ids())))
    }

    /// Allocates at `start` if the chunks there are free, or otherwise as
    /// [`Self::allocate_long_term`] does. A volume that grows directly after its last chunk thus
    /// gets no additional piece.
    pub(crate) fn allocate_long_term_at(
        &mut self,
        start: ChunkId,
        chunks: u32,
    ) -> Option<Vec<Run>> {
        let wanted = Run { start, chunks };
        if self.is_free(wanted) {
            self.take_run(wanted);
            return Some(vec![wanted]);
        }
        self.allocate_long_term(chunks)
    }

    /// Allocates at `start` if the chunks there are free, or otherwise in as few extents as
    /// possible. Unlike the other allocations for a long time, it does not search all free runs,
    /// which takes milliseconds in a large pool.
    pub(crate) fn allocate_near(
        &mut self,
        start: Option<ChunkId>,
        chunks: u32,
    ) -> Option<Vec<Run>> {
        match start.map(|start| Run { start, chunks }) {
            Some(wanted) if self.is_free(wanted) => {
                self.take_run(wanted);
                Some(vec![wanted])
            }
            _ => self.allocate_sorted(chunks),
        }
    }

    fn is_free(&self, run: Run) -> bool {
        let mut at = run.start;
        while at < run.end() {
            let Some(containing) = self.extent_containing(at.0) else { return false };
            at = containing.run().end();
        }
        true
    }

    /// Removes a free run, which may span several free extents.
    fn take_run(&mut self, run: Run) {
        self.remove_run(run);
        self.wear.count_use(run);
    }

    fn remove_run(&mut self, run: Run) {
        let end = run.start.0 + run.chunks;
        let mut at = run.start.0;
        while at < end {
            let containing =
                self.extent_containing(at).expect("the caller checked that the run is free");
            self.remove(containing);
            self.free_chunks -= containing.chunks();
            let containing_end = containing.start.0 + containing.chunks();
            self.free_run(Run { start: containing.start, chunks: at - containing.start.0 });
            let after = end.min(containing_end);
            self.free_run(Run { start: ChunkId(after), chunks: containing_end - after });
            at = containing_end;
        }
    }

    /// Allocates `chunks` chunks in as few extents as possible, largest first. Each is taken from
    /// the smallest sufficient free extent. If too few chunks are free, returns `None` and
    /// allocates nothing.
    pub(crate) fn allocate(&mut self, chunks: u32, placement: Placement) -> Option<Vec<Extent>> {
        if chunks > self.free_chunks {
            return None;
        }
        let mut extents = Vec::new();
        let mut rest = chunks;
        while rest > 0 {
            let wanted = rest.ilog2().min(u32::from(MAX_ORDER)) as u8;
            let extent = self.take(wanted, placement);
            rest -= extent.chunks();
            extents.push(extent);
        }
        Some(extents)
    }

    /// Returns the order from which to take an extent of order `wanted`. Among the sufficient
    /// orders, it is the one with the least worn extent. If several are equal, it is the smallest.
    /// If no order is sufficient, it is the largest one with a free extent. At least one chunk must
    /// be free.
    fn source(&self, wanted: u8) -> u8 {
        let least =
            |order: u8| self.by_wear[usize::from(order)].first().map(|key| level_and_start(*key).0);
        let fitting = (wanted..=MAX_ORDER).filter_map(|order| Some((least(order)?, order))).min();
        let smaller = || (0..wanted).rev().find(|order| least(*order).is_some());
        fitting
            .map(|(_, order)| order)
            .or_else(smaller)
            .expect("the caller checked that enough is free")
    }

    /// Removes one extent of order `wanted`, or of the largest smaller order. The least worn extent
    /// is removed. If several are equal, `placement` selects the end of the pool. At least one
    /// chunk must be free.
    fn take(&mut self, wanted: u8, placement: Placement) -> Extent {
        let source = self.source(wanted);
        let set = &self.by_wear[usize::from(source)];
        let (level, lowest) =
            level_and_start(*set.first().expect("the source order has a free extent"));
        let start = match placement {
            Placement::Low => lowest,
            Placement::High => {
                level_and_start(
                    *set.range(..=key(level, u32::MAX)).next_back().expect("the set is not empty"),
                )
                .1
            }
        };
        let mut extent = Extent { start: ChunkId(start), order: source };
        let removed = self.remove(extent);
        assert!(removed, "an extent in the wear index is free");
        while extent.order > wanted {
            // Halve the extent and keep the less worn half. If both are equal, `placement` selects
            // the half.
            let low = Extent { order: extent.order - 1, ..extent };
            let high = Extent { start: low.run().end(), ..low };
            let (of_low, of_high) = (self.wear.level(low), self.wear.level(high));
            let keep_high = match placement {
                Placement::Low => of_high < of_low,
                Placement::High => of_high <= of_low,
            };
            let (half, other_half) = if keep_high { (high, low) } else { (low, high) };
            self.insert(other_half);
            extent = half;
        }
        self.free_chunks -= extent.chunks();
        self.wear.count_use(extent.run());
        extent
    }

    /// Frees an extent and merges it with its free buddies.
    ///
    /// # Panics
    /// Panics if the extent is already free or is not aligned.
    pub(crate) fn free(&mut self, extent: Extent) {
        assert!(
            extent.order <= MAX_ORDER && extent.start.0.is_multiple_of(extent.chunks()),
            "{extent} is not aligned"
        );
        let mut whole = extent;
        let buddy_of =
            |extent: Extent| Extent { start: ChunkId(extent.start.0 ^ extent.chunks()), ..extent };
        while whole.order < MAX_ORDER && self.remove(buddy_of(whole)) {
            whole =
                Extent { start: ChunkId(whole.start.0 & !whole.chunks()), order: whole.order + 1 };
        }
        self.insert(whole);
        self.free_chunks += extent.chunks();
    }

    pub(crate) fn free_run(&mut self, run: Run) {
        run.extents().for_each(|extent| self.free(extent));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::media::simulator::Random;
    use crate::pool::alloc::wear::WEAR_STEP;

    const CHUNKS: u32 = 3000;

    /// Simple reference model with one flag per chunk.
    struct Model {
        free: Vec<bool>,
    }

    impl Model {
        fn count(&self) -> u32 {
            self.free.iter().filter(|f| **f).count() as u32
        }

        fn largest_order(&self) -> Option<u8> {
            (0..=MAX_ORDER)
                .rev()
                .find(|order| self.free.chunks_exact(1 << order).any(|c| c.iter().all(|f| *f)))
        }

        fn longest_run(&self) -> u32 {
            self.free.split(|f| !*f).map(|run| run.len() as u32).max().unwrap_or(0)
        }

        fn set(&mut self, extent: Extent, free: bool) {
            for id in extent.run().ids() {
                let flag = &mut self.free[id.0 as usize];
                assert_ne!(*flag, free, "{id} does not change");
                *flag = free;
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Operation {
        AllocateLongTerm {
            chunks: u32,
        },
        AllocateNear {
            start: Option<u32>,
            chunks: u32,
        },
        Allocate {
            chunks: u32,
            low: bool,
        },
        Free {
            pick: prop::sample::Index,
        },
        /// Frees one chunk of an allocated extent.
        FreePart {
            pick: prop::sample::Index,
            chunk: prop::sample::Index,
        },
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            4 => (1..200u32, any::<bool>()).prop_map(|(chunks, low)| Operation::Allocate { chunks, low }),
            1 => (200..2500u32, any::<bool>()).prop_map(|(chunks, low)| Operation::Allocate { chunks, low }),
            2 => (1..700u32).prop_map(|chunks| Operation::AllocateLongTerm { chunks }),
            2 => (prop::option::of(0..CHUNKS + 9), 1..700u32)
                .prop_map(|(start, chunks)| Operation::AllocateNear { start, chunks }),
            3 => any::<prop::sample::Index>().prop_map(|pick| Operation::Free { pick }),
            2 => any::<(prop::sample::Index, prop::sample::Index)>()
                .prop_map(|(pick, chunk)| Operation::FreePart { pick, chunk }),
        ]
    }

    fn apply(operation: Operation, buddy: &mut Buddy, model: &mut Model, held: &mut Vec<Extent>) {
        match operation {
            Operation::Allocate { chunks, low } => {
                let placement = if low { Placement::Low } else { Placement::High };
                let Some(extents) = buddy.allocate(chunks, placement) else {
                    assert!(chunks > model.count(), "{chunks} refused with {} free", model.count());
                    return;
                };
                assert_eq!(extents.iter().map(|e| e.chunks()).sum::<u32>(), chunks);
                let first_wanted = chunks.ilog2().min(u32::from(MAX_ORDER)) as u8;
                assert_eq!(
                    extents[0].order,
                    first_wanted.min(model.largest_order().unwrap()),
                    "largest first"
                );
                extents.iter().for_each(|e| model.set(*e, false));
                held.extend(extents);
            }
            Operation::AllocateLongTerm { chunks } => {
                let Some(runs) = buddy.allocate_long_term(chunks) else {
                    assert!(chunks > model.count(), "{chunks} refused with {} free", model.count());
                    return;
                };
                assert_eq!(runs.iter().map(|r| r.chunks).sum::<u32>(), chunks);
                assert!(runs.is_sorted());
                assert_eq!(
                    runs.len() == 1,
                    chunks <= model.longest_run(),
                    "one extent if available"
                );
                let extents: Vec<_> = runs.iter().flat_map(|run| run.extents()).collect();
                extents.iter().for_each(|e| model.set(*e, false));
                held.extend(extents);
            }
            Operation::AllocateNear { start, chunks } => {
                let wanted = start.map(|start| Run { start: ChunkId(start), chunks });
                let is_free = |run: &Run| {
                    run.ids().all(|id| model.free.get(id.0 as usize).is_some_and(|free| *free))
                };
                let Some(runs) = buddy.allocate_near(start.map(ChunkId), chunks) else {
                    assert!(chunks > model.count(), "{chunks} refused with {} free", model.count());
                    return;
                };
                assert_eq!(runs.iter().map(|r| r.chunks).sum::<u32>(), chunks);
                assert!(runs.is_sorted());
                if let Some(wanted) = wanted.filter(is_free) {
                    assert_eq!(runs, [wanted]);
                }
                let extents: Vec<_> = runs.iter().flat_map(|run| run.extents()).collect();
                extents.iter().for_each(|e| model.set(*e, false));
                held.extend(extents);
            }
            Operation::Free { pick } if !held.is_empty() => {
                let extent = held.swap_remove(pick.index(held.len()));
                model.set(extent, true);
                buddy.free(extent);
            }
            Operation::FreePart { pick, chunk } if !held.is_empty() => {
                let extent = held.swap_remove(pick.index(held.len()));
                let ids: Vec<_> = extent.run().ids().collect();
                let freed = ids[chunk.index(ids.len())];
                held.extend(ids.into_iter().filter(|id| *id != freed).map(Extent::chunk));
                model.set(Extent::chunk(freed), true);
                buddy.free(Extent::chunk(freed));
            }
            Operation::Free { .. } | Operation::FreePart { .. } => {}
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn allocator_agrees_with_one_flag_per_chunk(operations in prop::collection::vec(operation(), 1..120)) {
            let mut buddy = Buddy::default();
            let mut model = Model { free: vec![true; CHUNKS as usize] };
            let mut held = Vec::new();
            buddy.free_run(Run { start: ChunkId(0), chunks: CHUNKS });
            for operation in operations {
                apply(operation, &mut buddy, &mut model, &mut held);
                prop_assert_eq!(buddy.free_chunks(), model.count());
                prop_assert_eq!(buddy.largest_order(), model.largest_order());
                prop_assert_eq!(buddy.longest_run(), model.longest_run());
            }
            for extent in held {
                model.set(extent, true);
                buddy.free(extent);
            }
            let mut whole = Buddy::default();
            whole.free_run(Run { start: ChunkId(0), chunks: CHUNKS });
            prop_assert!(buddy.free_extents().eq(whole.free_extents()), "after all chunks are freed, the initial extents are restored");
        }
    }

    #[test]
    fn allocator_built_at_open_equals_one_freed_in_steps() {
        let uses: Vec<u32> = (0..6000).map(|chunk| chunk % 7 * 20).collect();
        let run = |start, chunks| Run { start: ChunkId(start), chunks };
        let free = [run(3, 4), run(64, 2048), run(2113, 3000), run(5999, 1), run(7, 2), run(1, 1)];
        let buddy = Buddy::new(uses.clone(), free.to_vec());
        let mut freed = Buddy::with_wear(uses);
        free.iter().flat_map(|run| run.ids()).for_each(|chunk| freed.free(Extent::chunk(chunk)));
        assert_eq!(buddy.free_chunks(), 5056);
        assert_eq!(buddy.free_chunks(), freed.free_chunks());
        assert!(buddy.free_extents().eq(freed.free_extents()));
        assert_eq!(buddy.by_wear, freed.by_wear);
    }

    #[test]
    fn volumes_use_low_chunks_and_memory_high_ones() {
        let fresh = || {
            let mut buddy = Buddy::default();
            buddy.free_run(Run { start: ChunkId(0), chunks: 1024 });
            buddy
        };
        let low = fresh().allocate(3, Placement::Low).unwrap();
        assert_eq!(
            low,
            [Extent { start: ChunkId(0), order: 1 }, Extent { start: ChunkId(2), order: 0 }]
        );
        let high = fresh().allocate(3, Placement::High).unwrap();
        assert_eq!(
            high,
            [Extent { start: ChunkId(1022), order: 1 }, Extent { start: ChunkId(1021), order: 0 }]
        );
    }

    #[test]
    fn wear_of_free_chunks_stays_within_a_few_steps() {
        const CYCLES: u32 = 10_000;
        for (chunks, placement) in [(1, Placement::High), (2, Placement::High), (3, Placement::Low)]
        {
            let mut buddy = Buddy::default();
            // As in a pool, the first chunks are metadata. The free extents therefore have all
            // sizes.
            let all = Run { start: ChunkId(2), chunks: 126 };
            buddy.free_run(all);
            for _ in 0..CYCLES {
                let taken = buddy.allocate(chunks, placement).unwrap();
                taken.into_iter().for_each(|extent| buddy.free(extent));
            }
            let wear = &buddy.wear.uses()[2..128];
            assert_eq!(wear.iter().sum::<u32>(), CYCLES * chunks);
            let (least, most) = (wear.iter().min().unwrap(), wear.iter().max().unwrap());
            assert!(most - least <= 3 * WEAR_STEP as u32, "{chunks} at a time: {least} to {most}");
            assert_eq!(buddy.longest_run(), 126);
        }
    }

    #[test]
    fn wear_within_a_step_does_not_affect_placement() {
        let mut wear = vec![0; 1024];
        wear[512..].fill(WEAR_STEP as u32 - 1);
        let mut buddy = Buddy::with_wear(wear);
        buddy.free_run(Run { start: ChunkId(0), chunks: 1024 });
        let extent = buddy.allocate(1, Placement::High).unwrap()[0];
        assert_eq!(extent, Extent::chunk(ChunkId(1023)));
        buddy.free(extent);
        // One more use raises the single chunk to the next wear level.
        assert_eq!(buddy.allocate(1, Placement::High).unwrap()[0], Extent::chunk(ChunkId(1022)));
    }

    /// Rank of a free extent for a request of order `wanted`; the lowest rank is lent first.
    /// Extents that are large enough precede others. Among them, the least worn is first, then the
    /// smallest. If none is large enough, the largest is first. All free chunks are erased.
    fn rank(buddy: &Buddy, wanted: u8, extent: Extent) -> impl Ord + use<> {
        let (level, order) = (buddy.wear.level(extent), u64::from(extent.order));
        match extent.order >= wanted {
            true => (false, level, order),
            false => (true, u64::from(MAX_ORDER) - order, level),
        }
    }

    /// Takes an extent of an order.
    type Choose = fn(&mut Buddy, u8) -> Extent;

    /// Lends extents from randomly used and worn chunks. Returns false if `choose` took one from a
    /// free extent that does not have the lowest rank.
    fn lends_in_order(seed: u64, choose: Choose) -> bool {
        let mut random = Random::new(seed);
        let uses = (0..256).map(|_| (random.below(4) * random.below(2 * WEAR_STEP)) as u32);
        let mut buddy = Buddy::with_wear(uses.collect());
        let free = (0..256).filter(|_| random.below(8) > 0).map(|id| Extent::chunk(ChunkId(id)));
        free.collect::<Vec<_>>().into_iter().for_each(|chunk| buddy.free(chunk));
        (0..20).all(|_| {
            let wanted = random.below(6) as u8;
            let best = buddy.free_extents().min_by_key(|extent| rank(&buddy, wanted, *extent));
            let best = rank(&buddy, wanted, best.expect("20 extents are less than all chunks"));
            let free: Vec<Extent> = buddy.free_extents().collect();
            let ranks: Vec<_> = free.iter().map(|free| rank(&buddy, wanted, *free)).collect();
            let chosen = choose(&mut buddy, wanted);
            let is_of = |free: &Extent| free.run().ids().any(|id| id == chosen.start);
            let at = free.iter().position(is_of).expect("it was free");
            ranks[at] == best
        })
    }

    #[test]
    fn memory_gets_the_least_worn_of_sufficient_extents_or_the_largest() {
        for seed in 0..200 {
            assert!(
                lends_in_order(seed, |buddy, wanted| buddy.take(wanted, Placement::High)),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn lending_in_another_order_is_detected() {
        /// Takes the free extent with the least key.
        fn take_by<K: Ord>(buddy: &mut Buddy, key: impl Fn(&Buddy, Extent) -> K) -> Extent {
            let chosen = buddy.free_extents().min_by_key(|extent| key(buddy, *extent));
            let chosen = chosen.expect("some are free");
            buddy.take_run(chosen.run());
            chosen
        }
        let variants: [(&str, Choose); 3] = [
            ("wear is ignored", |buddy, wanted| {
                take_by(buddy, |_, extent| (extent.order < wanted, extent.order))
            }),
            ("large extents are split", |buddy, wanted| {
                take_by(buddy, |buddy, extent| {
                    let level = buddy.wear.level(extent);
                    (extent.order < wanted, level, MAX_ORDER - extent.order)
                })
            }),
            ("small extents are used although one is large enough", |buddy, _| {
                take_by(buddy, |buddy, extent| (buddy.wear.level(extent), extent.order))
            }),
        ];
        for (variant, choose) in variants {
            assert!((0..200).any(|seed| !lends_in_order(seed, choose)), "{variant}");
        }
    }

    #[test]
    fn growth_is_contiguous_if_possible() {
        let mut buddy = Buddy::default();
        buddy.free_run(Run { start: ChunkId(8), chunks: 3 });
        buddy.free_run(Run { start: ChunkId(20), chunks: 9 });
        assert_eq!(
            buddy.allocate_long_term_at(ChunkId(21), 3),
            Some(vec![Run { start: ChunkId(21), chunks: 3 }])
        );
        assert_eq!(
            buddy.allocate_long_term_at(ChunkId(9), 3),
            Some(vec![Run { start: ChunkId(8), chunks: 3 }])
        );
        assert_eq!(buddy.allocate_long_term_at(ChunkId(9), 7), None);
        assert_eq!(buddy.free_chunks(), 6);
    }

    #[test]
    fn small_extents_are_used_before_large_ones_are_split() {
        let mut buddy = Buddy::default();
        buddy.free_run(Run { start: ChunkId(0), chunks: 1024 });
        buddy.free(Extent::chunk(ChunkId(2048)));
        buddy.free(Extent { start: ChunkId(4096), order: 2 });
        for _ in 0..5 {
            buddy.allocate(1, Placement::Low).unwrap();
        }
        assert_eq!(buddy.largest_order(), Some(10));
    }

    #[test]
    #[should_panic(expected = "was free already")]
    fn double_free_panics() {
        let mut buddy = Buddy::default();
        buddy.free(Extent::chunk(ChunkId(4)));
        buddy.free(Extent::chunk(ChunkId(4)));
    }
}
