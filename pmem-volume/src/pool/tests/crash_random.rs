//! Crashes in random sequences of operations.

use super::campaign::{Replay, replay_as, seeds, verify_each};
use super::crash::{
    Marked, Marks, fill_blocks, fill_memory, fill_words, new_pool_of, open, split_marks,
    verify_marked, volumes_of,
};
use super::*;
use crate::media::simulator::{Random, Simulator};

const STEPS: usize = 54;
const SEEDS: u64 = 24;
const BOUND: usize = 32;
/// Size of a pool that contains only raw volumes, in chunks.
const CHUNKS: u32 = 14;
/// Size of the smallest BTT volume, and of one with a second arena, in chunks.
const BTT_CHUNKS: [u64; 2] = [9, 18];
/// One in this many seeds uses a pool that is large enough for BTT volumes.
const BTT_SEEDS: u64 = 6;
const BTT_POOL_CHUNKS: u32 = 28;
/// Number of chunks that every second pool reserves for volumes. Most pools use fewer.
const STRG_CHUNKS: u64 = 5;
/// Maximum growth of a pool in a sequence, in chunks.
const MORE_CHUNKS: u64 = 6;

/// Pool with its expected content.
struct World {
    media: Simulator,
    pool: Arc<OtherPool>,
    lent: Vec<Extent>,
    /// Expected content of volumes.
    marked: Marks,
    first_chunks: u32,
    reserve_bytes: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let chunks = if seed.is_multiple_of(BTT_SEEDS) { BTT_POOL_CHUNKS } else { CHUNKS };
        let reserve_bytes = if seed.is_multiple_of(2) { 0 } else { STRG_CHUNKS * CHUNK_BYTES };
        let (media, pool) = new_pool_of(chunks, |superblock| superblock.strg_bytes = reserve_bytes);
        Self {
            media,
            pool,
            lent: vec![],
            marked: Marks::new(),
            first_chunks: chunks,
            reserve_bytes,
        }
    }

    fn pick_volume(&self, random: &mut Random) -> Option<VolumeInfo> {
        let mut volumes = self.pool.volumes();
        (!volumes.is_empty())
            .then(|| volumes.swap_remove(random.below(volumes.len() as u64) as usize))
    }

    /// Performs one random operation, and returns its name. The pool may refuse the operation, for
    /// example because it is full or a name is in use.
    fn step(&mut self, random: &mut Random) -> &'static str {
        match random.below(19) {
            0..=2 => self.lend(random),
            3 => self.return_memory(random),
            4 => self.return_chunk(random),
            5 | 6 => self.create(random),
            7 => self.delete(random),
            8 => self.rename(random),
            9 => self.resize(random),
            10 => self.reopen(),
            11 | 12 => self.scrub(random),
            13 => self.crash(random),
            14 => self.split(random),
            15 | 16 => self.fill_holes(random),
            17 => self.convert(random),
            _ => self.grow(),
        }
    }

    fn lend(&mut self, random: &mut Random) -> &'static str {
        if let Ok(extents) = self.pool.alloc_memory((random.below(5) + 1) * CHUNK_BYTES) {
            fill_memory(&self.media, &extents);
            self.lent.extend(extents);
        }
        "lend"
    }

    fn return_memory(&mut self, random: &mut Random) -> &'static str {
        let count = random.below(self.lent.len() as u64 + 1) as usize;
        let back: Vec<_> = self.lent.drain(..count).collect();
        self.pool.free_memory(&back).unwrap();
        "take back"
    }

    fn return_chunk(&mut self, random: &mut Random) -> &'static str {
        if !self.lent.is_empty() {
            let extent = self.lent.swap_remove(random.below(self.lent.len() as u64) as usize);
            let mut chunks: Vec<_> = extent.run().ids().map(Extent::chunk).collect();
            let back = chunks.swap_remove(random.below(chunks.len() as u64) as usize);
            self.pool.free_memory(&[back]).unwrap();
            self.lent.extend(chunks);
        }
        "take a chunk back"
    }

    fn scrub(&mut self, random: &mut Random) -> &'static str {
        self.pool.scrub_some((random.below(4) + 1) * CHUNK_BYTES).unwrap();
        "scrub"
    }

    fn create(&mut self, random: &mut Random) -> &'static str {
        let name = format!("v{}", random.below(4));
        let with_btt = self.first_chunks == BTT_POOL_CHUNKS && random.below(2) == 0;
        let (chunks, format) = match with_btt {
            true => (BTT_CHUNKS[0], VolumeFormat::Btt),
            false => (random.below(4) + 1, VolumeFormat::Raw),
        };
        let size = VolumeSize::Bytes(chunks * CHUNK_BYTES);
        let thin = random.below(2) == 0;
        let _ = self
            .pool
            .create_volume_with(&name, VolumeOptions { size, format, thin, reserve_bytes: None });
        "create"
    }

    /// Fills holes of a volume, if it is thin.
    fn fill_holes(&mut self, random: &mut Random) -> &'static str {
        if let Some(info) = self.pick_volume(random) {
            let volume = self.pool.open_volume(&info.name).unwrap();
            let start = random.below(info.size_bytes / CHUNK_BYTES) * CHUNK_BYTES;
            let end = info.size_bytes.min(start + (random.below(3) + 1) * CHUNK_BYTES);
            volume.provision(start..end).unwrap();
        }
        "fill holes"
    }

    fn convert(&mut self, random: &mut Random) -> &'static str {
        if let Some(volume) = self.pick_volume(random) {
            self.pool.convert_volume(&volume.name, random.below(2) == 0).unwrap();
        }
        "convert"
    }

    fn delete(&mut self, random: &mut Random) -> &'static str {
        if let Some(volume) = self.pick_volume(random) {
            self.pool.delete_volume(&volume.name).unwrap();
        }
        "delete"
    }

    fn rename(&mut self, random: &mut Random) -> &'static str {
        if let Some(volume) = self.pick_volume(random) {
            let _ = self.pool.rename_volume(&volume.name, &format!("v{}", random.below(4)));
        }
        "rename"
    }

    fn resize(&mut self, random: &mut Random) -> &'static str {
        if let Some(volume) = self.pick_volume(random) {
            let chunks = match volume.format {
                VolumeFormat::Raw => random.below(6) + 1,
                VolumeFormat::Btt => BTT_CHUNKS[1],
            };
            let size = VolumeSize::Bytes(chunks * CHUNK_BYTES);
            let _ = self.pool.resize_volume(&volume.name, size, Shrink::Allow);
        }
        "resize"
    }

    fn split(&mut self, random: &mut Random) -> &'static str {
        if let Some(volume) = self.pick_volume(random) {
            let chunks = match volume.format {
                VolumeFormat::Raw => random.below(3) + 1,
                VolumeFormat::Btt => BTT_CHUNKS[0],
            };
            // A part may have the name of the split volume, or the name of another volume.
            let name = |random: &mut Random| format!("v{}", random.below(4));
            let parts = [
                (name(random), VolumeSize::Bytes(chunks * CHUNK_BYTES)),
                (name(random), VolumeSize::Remaining),
            ];
            if let Ok(parts) = self.pool.split_volume(&volume.name, &parts, SplitContent::Refuse) {
                split_marks(&mut self.marked, volume.uuid, &parts);
            }
        }
        "split"
    }

    /// Opens the pool again without returning lent memory, as after a kill.
    fn reopen(&mut self) -> &'static str {
        self.lent.clear();
        self.pool = open(&self.media).unwrap();
        "open"
    }

    /// Kills the process during another operation. The next process opens the visible state,
    /// durable or not.
    fn crash(&mut self, random: &mut Random) -> &'static str {
        self.step(random);
        let mut points = self.media.take_points();
        let point = points.swap_remove(random.below(points.len() as u64) as usize);
        self.media = point.killed();
        self.media.record();
        self.reopen();
        "die"
    }

    fn grow(&mut self) -> &'static str {
        let size_bytes = self.pool.superblock().size_bytes() + CHUNK_BYTES;
        if size_bytes > (u64::from(self.first_chunks) + MORE_CHUNKS) * CHUNK_BYTES {
            self.reopen();
            return "open";
        }
        self.pool.grow_on(size_bytes, |_| Ok(()), |_| self.media.extend(size_bytes)).unwrap();
        "grow"
    }

    /// Writes content to new chunks of volumes. These writes are not part of the crash.
    fn fill_new(&mut self) {
        let mut marked = Marks::new();
        for volume in self.pool.volumes() {
            let chunks = (volume.size_bytes / CHUNK_BYTES) as u32;
            // A part has the marks of the split volume, and receives its own marks from now on.
            let old_marks =
                self.marked.get(&volume.uuid).filter(|marks| marks.origin == volume.uuid);
            let old_chunks = old_marks.map_or(0, |marks| marks.chunks);
            // Volumes that were created thin have chunks without a mark, even after a conversion.
            let is_new = !self.marked.contains_key(&volume.uuid);
            let is_sparse = old_marks.map_or(volume.thin && is_new, |marks| marks.is_sparse);
            match volume.format {
                VolumeFormat::Raw if old_chunks < chunks => {
                    let volume = self.pool.open_volume(&volume.name).unwrap();
                    fill_words(&volume, old_chunks, is_sparse);
                }
                VolumeFormat::Btt if old_chunks < chunks => {
                    fill_blocks(&self.media, &self.pool, &volume.name)
                }
                _ => {}
            }
            marked.insert(volume.uuid, Marked { is_sparse, ..Marked::own(&volume, chunks) });
        }
        self.marked = marked;
    }
}

/// Checks that the STRG size or the sizes of all volumes, whichever is larger, minus the chunks of
/// volumes, is reserved, and that the rest is lendable.
fn verify_strg(pool: &OtherPool, reserve_bytes: u64) -> Result<(), String> {
    let info = pool.info();
    let sizes_bytes = pool.volumes().iter().map(|volume| volume.size_bytes).sum();
    let unlendable_bytes = reserve_bytes.max(sizes_bytes).saturating_sub(info.volume_bytes);
    let available_bytes = info.free_bytes + info.scrubbing_bytes;
    if info.reserve_bytes != reserve_bytes || available_bytes < unlendable_bytes {
        return Err(format!(
            "{unlendable_bytes} of the {reserve_bytes} bytes for volumes must be reserved: {info:?}"
        ));
    }
    let lendable_bytes = available_bytes - unlendable_bytes;
    if info.lendable_bytes != lendable_bytes {
        return Err(format!("{lendable_bytes} bytes must be lendable: {info:?}"));
    }
    match pool.alloc_memory(lendable_bytes + CHUNK_BYTES) {
        Err(PoolError::PoolFull { withheld_bytes, .. }) if withheld_bytes == unlendable_bytes => {
            Ok(())
        }
        other => Err(format!("the reserve of the volumes was requested: {other:?}")),
    }
}

#[test]
fn oracle_with_a_larger_reserve_fails() {
    for (reserve_bytes, lent_bytes) in [(4 * CHUNK_BYTES, 0), (0, 8 * CHUNK_BYTES)] {
        let (_media, pool) =
            new_pool_of(CHUNKS, |superblock| superblock.strg_bytes = reserve_bytes);
        if lent_bytes > 0 {
            pool.alloc_memory(lent_bytes).unwrap();
        }
        verify_strg(&pool, reserve_bytes).unwrap();
        verify_strg(&pool, reserve_bytes + CHUNK_BYTES)
            .expect_err("a pool that reserves too little was not detected");
    }
}

#[test]
fn random_operations_survive_a_crash_at_every_persist() {
    let replay = Replay::from_environment();
    let mut images = 0;
    for seed in seeds(SEEDS) {
        let mut random = Random::new(seed);
        let mut world = World::new(seed);
        for step in 0..STEPS {
            let before = volumes_of(&world.pool);
            world.media.record();
            let case = world.step(&mut random);
            let points = world.media.take_points();
            let after = volumes_of(&world.pool);
            if replay.has_step(step) {
                let verify_image = |image: &Simulator| {
                    verify_marked(image, &[&before, &after], &world.marked)?;
                    let pool = open(image).map_err(|error| error.to_string())?;
                    verify_strg(&pool, world.reserve_bytes)
                };
                // Seeded separately, so that a replay of only this step opens the same images.
                let mut of_step = Random::new(seed << 16 | step as u64);
                images += verify_each(&points, BOUND, &mut of_step, &verify_image).unwrap_or_else(
                    |error| panic!("{case}: {}", replay_as(&seed.to_string(), step, &error)),
                );
            }
            verify_strg(&world.pool, world.reserve_bytes)
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            world.fill_new();
        }
    }
    replay.count(images, 6000 * seeds(SEEDS).count());
}
