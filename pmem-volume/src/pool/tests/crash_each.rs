//! Crashes during each single operation, with all images or `BOUND` samples per crash point.

use std::cell::RefCell;

use super::campaign::{Replay, replay_as, verify_each};
use super::crash::{
    Marked, Marks, Volumes, fill_blocks, fill_memory, fill_volume, new_pool_of, open, split_marks,
    verify_marked, volumes_of,
};
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::table::{Owner, Slot, encode_owner};

const CHUNKS: u32 = 30;
const BOUND: usize = 600;

/// Pool with raw volumes `v` and `w`, a BTT volume `b`, and lent memory.
pub(super) struct Start {
    pub(super) media: Simulator,
    pub(super) pool: Arc<OtherPool>,
    lent: Vec<Extent>,
    /// Expected content of all volumes, including parts that an operation creates.
    pub(super) marks: RefCell<Marks>,
}

impl Start {
    pub(super) fn new() -> Self {
        let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 4);
        for (name, chunks, format) in
            [("v", 3, VolumeFormat::Raw), ("b", 9, VolumeFormat::Btt), ("w", 1, VolumeFormat::Raw)]
        {
            pool.create_volume(name, bytes(chunks), format).unwrap();
        }
        ["v", "w"].iter().for_each(|name| fill_volume(&media, &pool, name));
        let lent = pool.alloc_memory(3 * CHUNK_BYTES).unwrap();
        fill_memory(&media, &lent);
        let marks = RefCell::new(marks_of(&pool));
        Self { media, pool, lent, marks }
    }

    /// Pool with a thin raw volume `v`, a thin BTT volume `b`, and a raw volume `w` that was
    /// converted from thin to thick, and has a chunk of zeros.
    pub(super) fn thin() -> Self {
        let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 4);
        for (name, chunks, format) in
            [("v", 5, VolumeFormat::Raw), ("b", 9, VolumeFormat::Btt), ("w", 3, VolumeFormat::Raw)]
        {
            let size = bytes(chunks);
            pool.create_volume_with(
                name,
                VolumeOptions { size, format, thin: true, reserve_bytes: None },
            )
            .unwrap();
        }
        ["v", "w"].iter().for_each(|name| fill_volume(&media, &pool, name));
        let marks = RefCell::new(marks_of(&pool));
        pool.convert_volume("w", false).unwrap();
        let lent = pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
        fill_memory(&media, &lent);
        Self { media, pool, lent, marks }
    }

    pub(super) fn split(&self, name: &str, parts: [(&str, VolumeSize); 2]) {
        let whole =
            self.pool.volumes().into_iter().find(|volume| volume.name == name).unwrap().uuid;
        let parts = parts.map(|(name, size)| (name.to_owned(), size));
        let parts = self.pool.split_volume(name, &parts, SplitContent::Refuse).unwrap();
        split_marks(&mut self.marks.borrow_mut(), whole, &parts);
    }
}

fn marks_of(pool: &OtherPool) -> Marks {
    let marked = |v: &VolumeInfo| Marked::own(v, (v.size_bytes / CHUNK_BYTES) as u32);
    pool.volumes().iter().map(|volume| (volume.uuid, marked(volume))).collect()
}

pub(super) fn bytes(chunks: u64) -> VolumeSize {
    VolumeSize::Bytes(chunks * CHUNK_BYTES)
}

pub(super) type Operation = fn(&Start);

/// Operations, each with its minimum number of distinct images. If there are fewer, the simulator
/// does not generate all of them.
pub(super) const OPERATIONS: [(&str, Operation, usize); 21] = [
    ("lend", |s| fill_memory(&s.media, &s.pool.alloc_memory(5 * CHUNK_BYTES).unwrap()), 2200),
    ("take back", |s| s.pool.free_memory(&s.lent).unwrap(), 480),
    ("take a part back", |s| s.pool.free_memory(&[Extent::chunk(s.lent[0].start)]).unwrap(), 165),
    ("take back and scrub", return_and_scrub, 450),
    ("lend waiting chunks", lend_waiting_chunks, 2500),
    ("make a raw volume", |s| make(s, "x", 2, VolumeFormat::Raw), 2900),
    ("make a BTT volume", |s| make(s, "x", 9, VolumeFormat::Btt), 5500),
    ("delete a volume", |s| s.pool.delete_volume("v").unwrap(), 2700),
    ("delete a BTT volume", |s| s.pool.delete_volume("b").unwrap(), 3500),
    ("delete and make", delete_and_make, 6100),
    ("delete, scrub and make", delete_scrub_and_make, 6200),
    ("rename", |s| drop(s.pool.rename_volume("v", "a-longer-name-of-many-words").unwrap()), 1700),
    (
        "grow a raw volume",
        |s| drop(s.pool.resize_volume("v", bytes(7), Shrink::Refuse).unwrap()),
        2500,
    ),
    (
        "shrink a raw volume",
        |s| drop(s.pool.resize_volume("v", bytes(1), Shrink::Allow).unwrap()),
        1600,
    ),
    (
        "grow a BTT volume",
        |s| drop(s.pool.resize_volume("b", bytes(18), Shrink::Refuse).unwrap()),
        5800,
    ),
    ("split a raw volume", |s| s.split("v", [("v", bytes(1)), ("y", VolumeSize::Remaining)]), 6900),
    ("split a BTT volume", split_a_btt_volume, 22000),
    ("open after a crash", |s| drop(open(&s.media).unwrap()), 480),
    ("open after much", reopen_after_operations, 580),
    ("open and scrub", |s| open(&s.media).unwrap().scrub_all().unwrap(), 480),
    ("grow the pool", grow_the_pool, 4800),
];

fn make(start: &Start, name: &str, chunks: u64, format: VolumeFormat) {
    start.pool.create_volume(name, bytes(chunks), format).unwrap();
}

/// Erases chunks one by one, so that other marked chunks wait in the meantime.
fn return_and_scrub(start: &Start) {
    start.pool.free_memory(&start.lent).unwrap();
    while start.pool.scrub_some(CHUNK_BYTES).unwrap() > 0 {}
}

/// Lends more chunks than are clean.
fn lend_waiting_chunks(start: &Start) {
    start.pool.free_memory(&start.lent).unwrap();
    let clean_bytes = start.pool.info().free_bytes;
    fill_memory(&start.media, &start.pool.alloc_memory(clean_bytes + 2 * CHUNK_BYTES).unwrap());
}

/// Splits a volume with old data in blocks that its map does not use.
pub(super) fn split_a_btt_volume(start: &Start) {
    start.pool.resize_volume("b", bytes(18), Shrink::Refuse).unwrap();
    fill_blocks(&start.media, &start.pool, "b");
    // The preparation is not part of the crash.
    start.media.take_points();
    start.media.record();
    start.split("b", [("b", bytes(9)), ("c", VolumeSize::Remaining)]);
}

/// Returns volumes that are also possible during an operation, for example between a deletion and
/// the next step.
pub(super) fn intermediate_state(case: &str, before: &Volumes) -> Option<Volumes> {
    let mut state = before.clone();
    match case {
        _ if case.starts_with("delete") && case.ends_with("make") => drop(state.remove("v")),
        _ if case.starts_with("split a") && case.ends_with("BTT volume") => {
            state.insert("b".to_owned(), 18);
        }
        _ => return None,
    }
    Some(state)
}

/// The new volume receives the slot and the chunks of the old one.
fn delete_scrub_and_make(start: &Start) {
    start.pool.delete_volume("v").unwrap();
    start.pool.scrub_all().unwrap();
    make(start, "x", 3, VolumeFormat::Raw);
}

/// The new volume receives the slot of the old one, whose chunks are still waiting to be erased.
fn delete_and_make(start: &Start) {
    start.pool.delete_volume("v").unwrap();
    make(start, "x", 3, VolumeFormat::Raw);
}

/// Combines everything that opening corrects: different copies, a wear word, memory and leftovers.
fn reopen_after_operations(start: &Start) {
    let (media, superblock) = (&start.media, &start.pool.superblock());
    let flip = |at: u64| media.store_word(at, media.load_word(at).unwrap() ^ 1 << 40).unwrap();
    flip(layout::SUPERBLOCK_OFFSETS[1] + 72);
    flip(superblock.volume_record_offsets(Slot(0))[0] + 64);
    let entry =
        |chunk: u32| layout::CHUNK_TABLE_OFFSET + u64::from(chunk) * layout::CHUNK_ENTRY_BYTES;
    flip(entry(4) + 8);
    let left =
        [Owner::Volume { slot: Slot(0), index: 3 }, Owner::Volume { slot: Slot(3), index: 0 }];
    for (chunk, owner) in (20..).map(ChunkId).zip(left) {
        media.store_word(entry(chunk.0), encode_owner(chunk, owner)).unwrap();
        media.store_word(chunk.offset_bytes() + 8, 7).unwrap();
    }
    media.persist_range(0..media.len_bytes()).unwrap();
    // The preparation is not part of the crash.
    media.take_points();
    media.record();
    open(media).unwrap().scrub_all().unwrap();
}

fn grow_the_pool(start: &Start) {
    let pool = open(&start.media).unwrap();
    let size_bytes = u64::from(CHUNKS + 3) * CHUNK_BYTES;
    pool.grow_on(size_bytes, |_| Ok(()), |_| start.media.extend(size_bytes)).unwrap();
    drop(open(&start.media).unwrap());
}

#[test]
fn every_operation_survives_a_crash_at_every_persist() {
    let operations = OPERATIONS
        .into_iter()
        .map(|(case, operation, least)| (case, Start::new as fn() -> Start, operation, least));
    verify_operations(operations);
}

/// Performs each operation on its start, and verifies images of all crashes during it.
pub(super) fn verify_operations(
    operations: impl IntoIterator<Item = (&'static str, fn() -> Start, Operation, usize)>,
) {
    let replay = Replay::from_environment();
    for (step, (case, start, operation, least)) in operations.into_iter().enumerate() {
        if !replay.has_step(step) {
            continue;
        }
        let start = start();
        let before = volumes_of(&start.pool);
        start.media.record();
        operation(&start);
        let points = start.media.take_points();
        let after = volumes_of(&open(&start.media).unwrap());
        let intermediate_state = intermediate_state(case, &before);
        let allowed: Vec<_> = [&before, &after].into_iter().chain(&intermediate_state).collect();
        let verify_image =
            |image: &Simulator| verify_marked(image, &allowed, &start.marks.borrow());
        let images = verify_each(&points, BOUND, &mut Random::new(step as u64), &verify_image)
            .unwrap_or_else(|error| panic!("{case}: {}", replay_as("0", step, &error)));
        replay.count(images, least);
    }
}
