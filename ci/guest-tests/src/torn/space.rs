//! Condition that must hold for the space of a thin volume after a crash: each chunk is in use.

use std::collections::BTreeSet;
use std::ops::Range;

use anyhow::{Result, anyhow, ensure};
use pmem_volume::btt::{ArenaInfo, Engine, arenas};
use pmem_volume::media::Media;
use pmem_volume::{CHUNK_BYTES, OpenMode, Volume};

use super::load::Load;
use crate::Pool;

/// Bit of a map entry of a sector with data or an error (UEFI 2.10, 6.4.3).
const HAS_BLOCK: u32 = 1 << 30;
const BLOCK: u32 = HAS_BLOCK - 1;

/// Opens the volume like the next VMM, and checks that all space is free or in use when the engine
/// has released unused chunks. Then prepares the volume for the load.
pub(super) fn check_and_prepare(pool: &Pool, load: Load, is_new: bool) -> Result<()> {
    let opened = pmem_volume::Pool::open(pool.path(), OpenMode::ReadWrite)?;
    let info = opened.info();
    let free_bytes = info.free_bytes + info.scrubbing_bytes;
    ensure!(
        info.metadata_bytes + info.volume_bytes + free_bytes == info.total_bytes,
        "Lent or damaged chunks are left: {info:?}"
    );
    let engine = Engine::open(opened.open_volume("data")?)?;
    if !is_new {
        load.check_volume(&engine)?;
        // A pass that ends before it moves anything.
        engine.compact(&mut |_| false)?;
        let unused = unused_chunks(engine.space())?;
        ensure!(unused.is_empty(), "Chunks {unused:?} of the volume contain no data");
    }
    load.prepare_volume(&engine)?;
    Ok(engine.quiesce()?)
}

/// Returns the indexes of chunks that consist of blocks without data.
fn unused_chunks(volume: &Volume) -> Result<BTreeSet<u64>> {
    let extents = volume.allocated_extents();
    let mut unused: BTreeSet<u64> = extents
        .iter()
        .flat_map(|extent| chunks(extent.volume_offset_bytes(), extent.len_bytes()))
        .collect();
    let mut blocks_end = 0;
    let mut remove = |range: Range<u64>| unused.retain(|chunk| !range.contains(chunk));
    for arena in arenas(volume) {
        let (info, _) = arena.map_err(|missing| anyhow!("{}", missing.reason))?;
        remove(chunks(blocks_end, info.data_at - blocks_end));
        blocks_end = info.data_at + u64::from(info.blocks) * u64::from(info.block_bytes);
        for block in live_blocks(volume, &info)? {
            let block_bytes = u64::from(info.block_bytes);
            remove(chunks(info.data_at + u64::from(block) * block_bytes, block_bytes));
        }
    }
    remove(chunks(blocks_end, volume.size_bytes() - blocks_end));
    Ok(unused)
}

/// Returns the blocks of an arena's sectors with data or an error.
fn live_blocks(volume: &Volume, info: &ArenaInfo) -> Result<Vec<u32>> {
    let mut map = vec![0; info.sectors as usize * 4];
    volume.read(info.map_at, &mut map)?;
    let (entries, _) = map.as_chunks::<4>();
    let entries = entries.iter().map(|entry| u32::from_le_bytes(*entry));
    Ok(entries.filter(|entry| entry & HAS_BLOCK != 0).map(|entry| entry & BLOCK).collect())
}

/// Returns the indexes of the chunks that contain a part of a range.
fn chunks(offset_bytes: u64, length_bytes: u64) -> Range<u64> {
    offset_bytes / CHUNK_BYTES..(offset_bytes + length_bytes).div_ceil(CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use pmem_volume::{VolumeFormat, VolumeOptions};

    use super::*;

    const SIZE_BYTES: u64 = 24 << 20;
    const SECTOR: [u8; 4096] = [1; 4096];

    #[test]
    fn chunks_without_live_blocks_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        let pool = pmem_volume::Pool::create(&path, 64 << 20, 0).unwrap();
        let options =
            VolumeOptions { thin: true, ..VolumeOptions::thick(SIZE_BYTES, VolumeFormat::Btt) };
        pool.create_volume_with("data", options).unwrap();
        let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
        assert_eq!(unused_chunks(engine.space()).unwrap(), BTreeSet::new());
        for sector in 2048..2048 + 1024 {
            engine.write(sector, &SECTOR).unwrap();
        }
        let unused = unused_chunks(engine.space()).unwrap();
        assert_eq!(unused, BTreeSet::new());
        engine.space().provision_chunk(8).unwrap();
        assert_eq!(unused_chunks(engine.space()).unwrap(), BTreeSet::from([8]));
        // Unlike a discard, this releases nothing.
        engine.write_zeroes(2048..2048 + 1024).unwrap();
        assert!(unused_chunks(engine.space()).unwrap().len() > 1);
    }
}
