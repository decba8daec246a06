//! Pool that this process has opened.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use foreshore_confinement::thread::{self, ThreadKind};
use foreshore_types::size::Size;
use pmem_volume::btt::{
    ArenaResult, ArenaStatus, BttError, Engine, GuestAccess, InfoError, InfoSource, arenas,
    is_replaced, release_reported,
};
use pmem_volume::media::{Media, MediaError};
use pmem_volume::pool::{Finding, Run, Scrubber, Shrink};
use pmem_volume::{ChunkId, Durability, OpenMode, Pool, Volume, VolumeSize};

use tracing::warn;

use super::block_device::ServedVolume;
use super::lost_btt::LostBtt;
use super::{
    CHUNK_BYTES, PmPool, PoolError, PoolInfo, PoolVolume, VolumeDisk, VolumeExtent, VolumeInfo,
    VolumeOptions,
};
use crate::persist::{Persist, PersistError};
use crate::pool::btt_loss::BttLoss;

/// Pool of the crate `pmem-volume`, with a thread that erases returned memory.
pub struct LocalPool {
    // First field, because the scrubber must stop before the pool is closed. On tmpfs, it first
    // returns memory to the host.
    scrubber: Scrubber,
    pool: Arc<Pool>,
}

impl LocalPool {
    /// Opens the pool at `path` for writing. Chunks that an earlier VM has not returned are queued
    /// for erasure. Erasure uses at most `scrub_bytes_per_s` of the media's bandwidth, except where
    /// it only punches holes. `None` means no limit.
    pub fn open(
        path: &Path,
        scrub_bytes_per_s: Option<NonZeroU64>,
    ) -> Result<Arc<Self>, PoolError> {
        let pool = Pool::open(path, OpenMode::ReadWrite)?;
        warn_of_blocks(&pool);
        let scrubber =
            Scrubber::start(&pool, scrub_bytes_per_s, || thread::enter(ThreadKind::Scrubber))?;
        Ok(Arc::new(Self { scrubber, pool }))
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

/// Warns of blocks that the pool's file had lost. The pool has already allocated new blocks, but
/// the cause may recur.
fn warn_of_blocks(pool: &Pool) {
    let path = pool.path().display();
    for finding in pool.findings_at_open() {
        match finding {
            Finding::BlocksLost { hole_bytes, shared_bytes } => {
                let lost = Size(hole_bytes + shared_bytes);
                warn!(pool = %path, %lost, "Pool file lacked blocks, as after a sparse copy; they were allocated again");
            }
            finding @ Finding::CopyOnWrite { .. } => warn!(pool = %path, "{finding}"),
            _ => {}
        }
    }
}

impl fmt::Debug for LocalPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalPool").field(&self.pool.path()).finish()
    }
}

impl PmPool for LocalPool {
    fn file(&self) -> BorrowedFd<'_> {
        self.pool.file().as_fd()
    }

    fn alloc_memory(&self, len: u64) -> Result<Vec<Range<u64>>, PoolError> {
        let extents = self.pool.alloc_memory(len)?;
        Ok(extents.into_iter().map(|extent| extent.byte_range()).collect())
    }

    fn free_memory(&self, extents: &[Range<u64>]) -> Result<(), PoolError> {
        let aligned: Vec<_> = extents.iter().flat_map(|extent| run(extent).extents()).collect();
        self.pool.free_memory(&aligned)
    }

    fn grow(&self, size_bytes: Option<u64>, force: bool) -> Result<(), PoolError> {
        self.pool.grow_in_use(size_bytes, force, &mut |_| {})
    }

    fn set_borrowable_bytes(&self, borrowable_bytes: u64) {
        self.pool.set_borrowable_bytes(borrowable_bytes);
    }

    fn start_recalls(&self) {
        self.pool.start_recalls();
    }

    fn next_recall(&self) -> Option<u64> {
        self.pool.next_recall()
    }

    fn refuse_recall(&self) {
        self.pool.refuse_recall();
    }

    fn end_recalls(&self) {
        self.pool.end_recalls();
    }

    fn volumes(&self) -> Vec<VolumeInfo> {
        self.pool.volumes()
    }

    fn create_volume(&self, name: &str, options: VolumeOptions) -> Result<(), PoolError> {
        self.pool.create_volume_with(name, options).map(drop)
    }

    fn grow_volume(&self, name: &str, size_bytes: u64) -> Result<(), PoolError> {
        self.pool.resize_volume(name, VolumeSize::Bytes(size_bytes), Shrink::Refuse).map(drop)
    }

    fn delete_volume(&self, name: &str) -> Result<(), PoolError> {
        self.pool.delete_volume(name)
    }

    fn open_volume(&self, name: &str) -> Result<Box<dyn PoolVolume>, PoolError> {
        Ok(Box::new(self.pool.open_volume(name)?))
    }

    fn info(&self) -> PoolInfo {
        self.pool.info()
    }

    fn offered_bytes(&self) -> u64 {
        self.pool.offered_bytes()
    }

    fn scrubbed_bytes(&self) -> u64 {
        self.pool.scrubbed_bytes()
    }

    fn has_failed(&self) -> bool {
        // The pool was opened for writing, so it is read-only only after a failure.
        !self.pool.is_writable()
    }

    fn set_scrub_bandwidth(&self, bytes_per_s: Option<NonZeroU64>) {
        self.scrubber.set_bytes_per_s(bytes_per_s);
    }

    fn lend_promised(&self, min_free_bytes: Option<u64>) {
        self.pool.lend_promised(min_free_bytes);
    }

    fn durability(&self) -> Durability {
        self.pool.durability()
    }
}

impl PoolVolume for Volume {
    fn size_bytes(&self) -> u64 {
        Volume::size_bytes(self)
    }

    fn extents(&self) -> Vec<VolumeExtent> {
        self.allocated_extents()
    }

    fn allocated_bytes(&self) -> u64 {
        Volume::allocated_bytes(self)
    }

    fn reserve_bytes(&self) -> u64 {
        self.info().reserve_bytes
    }

    fn is_thin(&self) -> bool {
        self.release_unit_bytes().is_some()
    }

    fn provision(&self, index: u32) -> Result<u64, MediaError> {
        self.provision_chunk(index)
    }

    fn release(&self, index: u32) -> Result<(), MediaError> {
        let start = u64::from(index) * CHUNK_BYTES;
        // The VMM does not read a volume that it maps.
        let unit = start..start + CHUNK_BYTES;
        Media::release(self, std::slice::from_ref(&unit), &|_| false).map(drop)
    }

    fn chunk_offset(&self, index: u32) -> Option<u64> {
        Volume::chunk_offset(self, index)
    }

    fn btt_uuid(&self) -> Option<String> {
        let (first, _) = arenas(self).into_iter().next()?.ok()?;
        Some(first.uuid.to_string())
    }

    fn release_reported(
        &self,
        free: &[Range<u64>],
        access: &mut dyn GuestAccess,
    ) -> Result<u64, MediaError> {
        release_reported(self, free, access)
    }

    /// Completes the recovery of the BTT. Map entries that the engine has stored need not be
    /// durable yet. The engine can redo them from the log, and persists them before it overwrites
    /// their log entries (`pmem_volume::btt`). A guest's driver does neither, and overwrites log
    /// entries. After a power cut, two sectors would then share a block. Recovery, which persists
    /// the map, must therefore run before the guest's driver.
    fn quiesce(&self) -> Result<(), BttError> {
        let name = &self.info().name;
        // If the guest has replaced the BTT, the engine would use the backup copy of the old info
        // block and overwrite the guest's new content. The guest's driver finds no BTT, so recovery
        // is not needed.
        let is_replaced = |arena: &ArenaResult| matches!(arena, Ok((_, InfoSource::Second)));
        if let Some(arena) = arenas(self).iter().position(is_replaced) {
            warn!(
                volume = name,
                arena,
                "BTT lost its first info block, so the guest's driver finds no sectors; if the guest did not \
                 overwrite it on purpose, restore the BTT with `pmvol btt repair`"
            );
            return Ok(());
        }
        match Engine::open(self) {
            Ok(engine) => {
                warn_of_read_only(name, &engine.arenas());
                engine.quiesce()
            }
            Err(
                err @ (BttError::Media(_) | BttError::NoBtt { reason: InfoError::Media(_), .. }),
            ) => Err(err),
            Err(err) => {
                // The guest may be about to write a new BTT.
                let error = foreshore_types::chain(&err);
                warn!(
                    volume = name,
                    error,
                    "Cannot open the BTT; it is not recovered, and the guest gets the volume as it \
                     is. `pmvol btt check` reports the damage"
                );
                Ok(())
            }
        }
    }

    fn into_disk(self: Box<Self>) -> Result<VolumeDisk, BttError> {
        let name = self.info().name.clone();
        if let Some(loss) = btt_loss(&self) {
            warn_of_loss(&name, &loss);
            let device = Arc::new(LostBtt::new(*self, loss.reason().to_owned()));
            return Ok(VolumeDisk { device, btt_loss: Some(loss) });
        }
        let engine = Engine::open(*self)?;
        warn_of_read_only(&name, &engine.arenas());
        Ok(VolumeDisk { device: Arc::new(ServedVolume::new(engine)), btt_loss: None })
    }
}

/// Returns the reason why the BTT engine must not serve a volume. `None` if it can, or if reading
/// the media fails. A guest can cause each of these reasons, so none of them may prevent the start
/// of the VMM.
fn btt_loss(volume: &Volume) -> Option<BttLoss> {
    match Engine::check_servable(&volume) {
        Err(err) if is_of_media(&err) => None,
        // If the first info block is intact, the BTT still exists.
        Err(err @ BttError::Ambiguous { .. }) if !is_replaced(volume) => {
            let remedy = "`pmvol btt export` copies the readable sectors";
            Some(BttLoss::Damaged { reason: format!("{err}; {remedy}") })
        }
        Err(err) => Some(BttLoss::Replaced { reason: err.to_string() }),
        Ok(()) => is_replaced(volume).then(|| BttLoss::Replaced {
            reason: "the first info block was overwritten".to_owned(),
        }),
    }
}

fn warn_of_loss(volume: &str, loss: &BttLoss) {
    match loss {
        BttLoss::Replaced { reason } => warn!(
            volume,
            reason,
            "Volume is no longer a BTT; the disk is read-only and shows the bytes of the volume. If no guest replaced \
             the BTT, restore it with `pmvol btt repair`; with interface=nvdimm the guest can write"
        ),
        BttLoss::Damaged { reason } => warn!(
            volume,
            reason,
            "BTT is damaged; the disk is read-only and shows the bytes of the volume. `pmvol btt repair` cannot restore \
             the arena"
        ),
    }
}

fn is_of_media(err: &BttError) -> bool {
    matches!(
        err,
        BttError::Media(_)
            | BttError::NoBtt { reason: InfoError::Media(_), .. }
            | BttError::Ambiguous { reason: InfoError::Media(_), .. }
    )
}

fn warn_of_read_only(volume: &str, arenas: &[ArenaStatus]) {
    for (arena, ArenaStatus { first_sector, sectors, read_only, .. }) in arenas.iter().enumerate() {
        if let Some(reason) = read_only {
            warn!(
                volume,
                arena,
                first_sector,
                sectors,
                reason,
                "Arena refuses writes, and reads of sectors that it cannot locate"
            );
        }
    }
}

impl Persist for Volume {
    fn persist(&self) -> Result<(), PersistError> {
        // After a failed write-back, the kernel may report the next one as successful, although the
        // content is not durable.
        if !self.pool().is_writable() {
            return Err(PersistError::ReadOnly);
        }
        self.flush_guest_stores(0..Volume::size_bytes(self))
            .map_err(|err| PersistError::Backing(Box::new(err)))
    }
}

/// Converts an extent to chunk numbers.
///
/// # Panics
/// If the extent is not from a pool. Callers pass only extents that they have received from the
/// pool.
fn run(extent: &Range<u64>) -> Run {
    let chunk = |at: u64| {
        assert!(at.is_multiple_of(CHUNK_BYTES), "{extent:?}");
        u32::try_from(at / CHUNK_BYTES).expect("pools have less than 2^32 chunks")
    };
    let (start, end) = (chunk(extent.start), chunk(extent.end));
    Run { start: ChunkId(start), chunks: end - start }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use tempfile::TempDir;

    use super::*;
    use crate::disk::range::{DiskRange, Unmap};
    use crate::disk::{Geometry, ResizeError};
    use crate::pool::VolumeFormat;

    const MIB: u64 = 1 << 20;

    /// Creates a pool of 64 MiB, with 16 MiB reserved for volumes, on tmpfs if available.
    fn pool() -> (Arc<LocalPool>, PathBuf, TempDir) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(Pool::create(&path, 64 * MIB, 16 * MIB).unwrap());
        (LocalPool::open(&path, None).unwrap(), path, folder)
    }

    fn states(info: &PoolInfo) -> u64 {
        info.metadata_bytes
            + info.retired_bytes
            + info.free_storage_bytes()
            + info.free_migrate_bytes()
            + info.memory_bytes
            + info.scrubbing_bytes
            + info.volume_bytes
    }

    fn len(extent: &Range<u64>) -> u64 {
        extent.end - extent.start
    }

    #[test]
    fn memory_is_lent_largest_first_and_returned_in_any_parts() {
        let (pool, _path, _folder) = pool();
        let before = pool.info();
        let extents = pool.alloc_memory(16 * MIB).unwrap();
        assert_eq!(extents.iter().map(len).sum::<u64>(), 16 * MIB);
        assert!(extents.windows(2).all(|pair| len(&pair[0]) >= len(&pair[1])));
        assert!(extents.iter().all(|extent| extent.start.is_multiple_of(len(extent))));
        assert_eq!(pool.info().memory_bytes, 16 * MIB);
        assert_eq!(states(&pool.info()), before.total_bytes);
        // Frees three chunks of one extent. Three is not a power of two.
        assert!(len(&extents[0]) >= 8 * MIB, "{extents:?}");
        let start = extents[0].start + 2 * MIB;
        let part = start..start + 6 * MIB;
        let part = std::slice::from_ref(&part);
        pool.free_memory(part).unwrap();
        assert_eq!(pool.info().memory_bytes, 10 * MIB);
        assert!(pool.free_memory(part).is_err());
    }

    /// Creates the volume `data` of 24 MiB.
    fn create_data(pool: &LocalPool) {
        pool.create_volume("data", VolumeOptions::thick(24 * MIB, VolumeFormat::Btt)).unwrap();
    }

    #[test]
    fn volume_is_created_opened_once_grown_and_deleted() {
        let (pool, _path, _folder) = pool();
        assert!(pool.open_volume("data").is_err() && pool.volumes().is_empty());
        create_data(&pool);
        let volume = pool.open_volume("data").unwrap();
        assert_eq!(volume.size_bytes(), 24 * MIB);
        assert_eq!(volume.extents().iter().map(|extent| extent.len_bytes()).sum::<u64>(), 24 * MIB);
        volume.persist().unwrap();
        assert!(pool.open_volume("data").is_err(), "the volume is open");
        assert!(pool.grow_volume("data", 40 * MIB).is_err(), "it is open");
        assert!(pool.delete_volume("data").is_err(), "it is open");
        drop(volume);
        pool.grow_volume("data", 40 * MIB).unwrap();
        pool.create_volume("raw", VolumeOptions::thick(2 * MIB, VolumeFormat::Raw)).unwrap();
        let volumes = || {
            let volumes = pool.volumes().into_iter();
            volumes
                .map(|volume| (volume.name, volume.format, volume.size_bytes))
                .collect::<Vec<_>>()
        };
        let raw = ("raw".to_owned(), VolumeFormat::Raw, 2 * MIB);
        assert_eq!(volumes(), [("data".to_owned(), VolumeFormat::Btt, 40 * MIB), raw.clone()]);
        pool.delete_volume("data").unwrap();
        assert_eq!(volumes(), [raw]);
    }

    #[test]
    fn served_volume_grows_and_keeps_its_sectors() {
        let (pool, _path, _folder) = pool();
        create_data(&pool);
        let device = pool.open_volume("data").unwrap().into_disk().unwrap().device;
        device.write(4096, &[7; 4096]).unwrap();
        let before = device.size_bytes();
        for (wanted_bytes, word) in [
            (22 * MIB, "cannot shrink"),
            (25 * MIB, "multiple"),
            (26 * MIB, "16 MiB"),
            (90 * MIB, "full"),
        ] {
            let error = device.resize(wanted_bytes).unwrap_err();
            assert!(matches!(error, ResizeError::Unsupported(_)), "{error:?}");
            assert!(error.to_string().contains(word), "{error}");
        }
        device.resize(24 * MIB).unwrap();
        assert_eq!(device.size_bytes(), before);
        device.resize(48 * MIB).unwrap();
        assert_eq!((pool.volumes()[0].size_bytes, device.extents()), (48 * MIB, 1));
        let after = device.size_bytes();
        assert!(after > before + 22 * MIB, "{after}");
        device.write(after - 4096, &[8; 4096]).unwrap();
        for (at, byte) in [(4096, 7), (after - 4096, 8)] {
            let mut data = [0; 4096];
            device.read(at, &mut data).unwrap();
            assert_eq!(data, [byte; 4096]);
        }
    }

    /// Each thread writes sectors of its own, and always reads what it has written last.
    #[test]
    fn requests_continue_while_a_served_volume_grows() {
        for thin in [false, true] {
            let (pool, _path, _folder) = pool();
            let size = VolumeSize::Bytes(18 * MIB);
            let options =
                VolumeOptions { size, format: VolumeFormat::Btt, thin, reserve_bytes: None };
            pool.create_volume("data", options).unwrap();
            let device = pool.open_volume("data").unwrap().into_disk().unwrap().device;
            let (has_grown, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
            let write = |thread: u64| {
                let mut round = 0u64;
                while !has_grown.load(Ordering::Relaxed) || round < 20 {
                    for nth in 0..8 {
                        let at = (thread * 1000 + nth * 50) * 4096;
                        let data = [(round + nth) as u8; 4096];
                        device.write(at, &data).unwrap();
                        let mut found = [0; 4096];
                        device.read(at, &mut found).unwrap();
                        assert_eq!(found, data);
                    }
                    round += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            };
            std::thread::scope(|scope| {
                (0..3).for_each(|thread| drop(scope.spawn(move || write(thread))));
                for size_mib in [34, 50] {
                    let before = rounds.load(Ordering::Relaxed);
                    while rounds.load(Ordering::Relaxed) < before + 10 {
                        std::thread::yield_now();
                    }
                    device.resize(size_mib * MIB).unwrap();
                }
                has_grown.store(true, Ordering::Relaxed);
            });
            assert!(device.size_bytes() > 46 * MIB);
            drop(device);
            assert!(pool.pool().check().unwrap().is_clean());
        }
    }

    /// Returns the offset of the only changed word whose neighbors are unchanged, with its old and
    /// new value. This is the map entry: the data of a sector changes a long run of words, and a
    /// log entry changes two.
    fn lone_word(before: &[u8], after: &[u8]) -> (u64, [u8; 8], [u8; 8]) {
        let pairs = before.as_chunks::<8>().0.iter().zip(after.as_chunks::<8>().0);
        let words: Vec<_> = pairs.enumerate().filter(|(_, (old, new))| old != new).collect();
        let lone: Vec<_> =
            words.chunk_by(|a, b| a.0 + 1 == b.0).filter(|run| run.len() == 1).collect();
        let [[(at, (old, new))]] = lone[..] else { panic!("{} lone words", lone.len()) };
        (*at as u64 * 8, **old, **new)
    }

    #[test]
    fn quiesce_makes_the_map_durable() {
        let (pool, path, _folder) = pool();
        create_data(&pool);
        let disk = pool.open_volume("data").unwrap().into_disk().unwrap();
        let before = fs::read(&path).unwrap();
        disk.device.write(7 * 4096, &[0xa5; 4096]).unwrap();
        drop(disk);
        let (at, old, new) = lone_word(&before, &fs::read(&path).unwrap());
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let word = || {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, at).unwrap();
            word
        };
        assert_eq!(word(), new);
        // State after a power cut: the log contains the write, but the map does not.
        file.write_all_at(&old, at).unwrap();
        let volume = pool.open_volume("data").unwrap();
        assert_eq!(word(), old, "opening the volume changed the word");
        volume.quiesce().unwrap();
        assert_eq!(word(), new);
    }

    #[test]
    fn volume_with_a_replaced_btt_is_served_unchanged() {
        let (pool, path, _folder) = pool();
        create_data(&pool);
        let signature = b"BTT_ARENA_INFO\0\0";
        let bytes = fs::read(&path).unwrap();
        let at =
            bytes.chunks(4096).position(|page| page.starts_with(signature)).expect("an info block")
                * 4096;
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        // Same content as after `ndctl create-namespace -m fsdax` in the guest, which then uses the
        // whole volume.
        file.write_all_at(b"NVDIMM_PFN_INFO\0", at as u64).unwrap();
        let map_at = at as u64 + 16 * MIB;
        file.write_all_at(&[0x55; 4096], map_at).unwrap();
        let before = fs::read(&path).unwrap();
        pool.open_volume("data").unwrap().quiesce().unwrap();
        assert!(fs::read(&path).unwrap() == before, "the guest's bytes were changed");
        // The volume opens as a disk, on every boot.
        for _ in 0..2 {
            check_bytes_as_disk(&pool, &path, at - 4096);
        }
        file.write_all_at(&[0; 4096], map_at).unwrap();
        file.write_all_at(signature, at as u64).unwrap();
        pool.open_volume("data").unwrap().quiesce().unwrap();
        let disk = pool.open_volume("data").unwrap().into_disk().unwrap();
        assert_eq!(disk.btt_loss, None);
        disk.device.write(7 * 4096, &[1; 4096]).unwrap();
    }

    /// Checks that the volume `data`, which starts at offset `start` of the pool's file, opens as a
    /// disk that serves the raw bytes, and that none of them changes.
    fn check_bytes_as_disk(pool: &LocalPool, path: &Path, start: usize) {
        let before = fs::read(path).unwrap();
        let VolumeDisk { device, btt_loss } =
            pool.open_volume("data").unwrap().into_disk().unwrap();
        assert!(matches!(btt_loss, Some(BttLoss::Replaced { .. })));
        let Geometry { block_bytes, read_only, discard, .. } = device.geometry();
        assert_eq!((block_bytes, read_only, discard), (512, true, false));
        assert_eq!(device.size_bytes(), 24 * MIB);
        for at in [0, 4096, 24 * MIB - 4096] {
            let mut bytes = [0; 4096];
            device.read(at, &mut bytes).unwrap();
            assert!(before[start + at as usize..].starts_with(&bytes), "byte {at}");
        }
        assert!(device.read(24 * MIB, &mut [0; 512]).is_err());
        assert!(device.read(u64::MAX - 511, &mut [0; 512]).is_err());
        let is_refused = |result: io::Result<()>| {
            result.unwrap_err().kind() == io::ErrorKind::ReadOnlyFilesystem
        };
        assert!(is_refused(device.write(7 * 512, &[1; 4096])));
        assert!(is_refused(device.discard(DiskRange::at(0, 4096))));
        assert!(is_refused(device.write_zeroes(DiskRange::at(0, 4096), Unmap::Allowed)));
        device.flush().unwrap();
        drop(device);
        assert!(fs::read(path).unwrap() == before, "the guest's bytes were changed");
    }

    /// Creates the volume `data` with three arenas. Returns the offsets of their info blocks in the
    /// pool's file, in pairs.
    fn create_three_arenas(pool: &LocalPool, path: &Path) -> [[u64; 2]; 3] {
        pool.create_volume("data", VolumeOptions::thick(18 * MIB, VolumeFormat::Btt)).unwrap();
        for size_mib in [34, 50] {
            pool.grow_volume("data", size_mib * MIB).unwrap();
        }
        let [a, b, c, d, e, f] = info_blocks(path)[..] else { panic!("three arenas") };
        [[a, b], [c, d], [e, f]]
    }

    /// Returns the offsets of the info blocks in the pool's file.
    fn info_blocks(path: &Path) -> Vec<u64> {
        let bytes = fs::read(path).unwrap();
        let pages = bytes.chunks(4096).zip((0..).step_by(4096));
        pages
            .filter(|(page, _)| page.starts_with(b"BTT_ARENA_INFO\0\0"))
            .map(|(_, at)| at)
            .collect()
    }

    #[test]
    fn damage_behind_the_first_arena_does_not_count_as_replacement() {
        let (pool, path, _folder) = pool();
        let [[first, _], second, [_, third_copy]] = create_three_arenas(&pool, &path);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for at in second.into_iter().chain([third_copy]) {
            file.write_all_at(&[0x55; 4096], at).unwrap();
        }
        let VolumeDisk { device, btt_loss } =
            pool.open_volume("data").unwrap().into_disk().unwrap();
        let Some(BttLoss::Damaged { reason }) = btt_loss else { panic!("{btt_loss:?}") };
        assert!(reason.contains("arena 1") && reason.contains("pmvol btt export"), "{reason}");
        assert_eq!(device.write(0, &[1; 4096]).unwrap_err().to_string(), reason);
        drop(device);
        // Same content as after `mkfs` on the whole volume: only the copy of the first info block
        // is left.
        file.write_all_at(&[0x55; 4096], first).unwrap();
        let disk = pool.open_volume("data").unwrap().into_disk().unwrap();
        assert!(matches!(disk.btt_loss, Some(BttLoss::Replaced { .. })));
    }

    /// A media error is reported at the start, because no guest can cause it.
    #[test]
    fn volume_with_unreadable_arena_of_unknown_end_is_refused() {
        let (pool, path, _folder) = pool();
        let [_, [second, _], _] = create_three_arenas(&pool, &path);
        let volume = pool.open_volume("data").unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(second).unwrap();
        let err = volume.into_disk().err().unwrap();
        assert!(
            matches!(err, BttError::Ambiguous { arena: 1, reason: InfoError::Media(_), .. }),
            "{err:?}"
        );
    }

    #[test]
    fn volume_without_a_whole_info_block_is_a_disk_of_its_bytes() {
        let (pool, path, _folder) = pool();
        create_data(&pool);
        let [first, second] = info_blocks(&path)[..] else { panic!("one arena") };
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        // The first info block is torn: the BTT is damaged, and the copy is used.
        file.write_all_at(&[0xff; 8], first + 4088).unwrap();
        let disk = pool.open_volume("data").unwrap().into_disk().unwrap();
        assert_eq!(disk.btt_loss, None);
        drop(disk);
        // Both info blocks are damaged, first with and then without signatures.
        for (offset, bytes) in [(4088, &[0xff; 4096][..8]), (0, &[0x55; 4096][..])] {
            for at in [first, second] {
                file.write_all_at(bytes, at + offset).unwrap();
            }
            check_bytes_as_disk(&pool, &path, first as usize - 4096);
        }
    }

    #[test]
    fn pool_is_opened_once_and_closed_when_it_is_dropped() {
        let (pool, path, _folder) = pool();
        let err = LocalPool::open(&path, None).err().unwrap().to_string();
        assert!(err.contains("in use"), "{err}");
        // The scrubber's thread does not keep the pool open.
        drop(pool);
        LocalPool::open(&path, None).unwrap();
    }
}
