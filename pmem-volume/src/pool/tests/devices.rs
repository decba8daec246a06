//! Tests of pools on block devices, and of thin pools. Block devices require a loop device and
//! therefore root. `ci/guest-tests` contains further tests.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use std::ops::Range;

use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::lock::{LockKind, try_lock};
use crate::pool::ownership::{ClaimError, claim};
use crate::progress::{Progress, Task, ignore_progress};

/// Loop device backed by a sparse file.
struct Loop {
    folder: TempDir,
    device: PathBuf,
}

impl Loop {
    /// Creates a loop device. Returns `None` if the host has no loop devices.
    fn new(len_bytes: u64) -> Option<Self> {
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(len_bytes).unwrap();
        let output = Command::new("losetup").args(["--show", "-f"]).arg(&image).output();
        let output = output.ok().filter(|output| output.status.success());
        if output.is_none() {
            eprintln!("skipped: no loop devices here (they need root)");
        }
        let device = String::from_utf8(output?.stdout).unwrap().trim().into();
        Some(Self { folder, device })
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Enlarges the disk.
    fn extend(&self, len_bytes: u64) {
        OpenOptions::new().write(true).open(self.image()).unwrap().set_len(len_bytes).unwrap();
        assert!(Command::new("losetup").arg("-c").arg(&self.device).status().unwrap().success());
    }

    fn create(&self) -> Result<Arc<Pool>, PoolError> {
        self.create_with(CreateOptions::default())
    }

    fn create_with(&self, options: CreateOptions<'_>) -> Result<Arc<Pool>, PoolError> {
        Pool::create_with(&self.device, options)
    }

    fn open(&self) -> Result<Arc<Pool>, PoolError> {
        Pool::open(&self.device, OpenMode::ReadWrite)
    }

    /// Returns the content of the disk itself.
    fn content(&self) -> Vec<u8> {
        File::open(&self.device).unwrap().sync_all().unwrap();
        fs::read(self.image()).unwrap()
    }

    fn write(&self, offset_bytes: u64, bytes: &[u8]) {
        let device = OpenOptions::new().write(true).open(&self.device).unwrap();
        device.write_all_at(bytes, offset_bytes).unwrap();
        device.sync_all().unwrap();
    }
}

#[test]
fn read_only_device_is_reported_and_readable() {
    let Some(disk) = Loop::new(32 * MIB) else { return };
    disk.create().unwrap();
    let protect =
        |flag| Command::new("blockdev").arg(flag).arg(&disk.device).status().unwrap().success();
    if !protect("--setro") {
        eprintln!("skipped: the device cannot be write-protected");
        return;
    }
    for result in [
        disk.create(),
        disk.open(),
        Pool::grow_with(&disk.device, None, false, &mut ignore_progress),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, PoolError::DeviceReadOnly { .. }), "{error:?}");
        assert!(error.to_string().contains("the device is read-only"), "{error}");
    }
    let repaired = Pool::repair(&disk.device, false).unwrap_err();
    assert!(matches!(repaired, PoolError::DeviceReadOnly { .. }), "{repaired:?}");
    assert_eq!(Pool::repair(&disk.device, true).unwrap().left, [""; 0]);
    assert!(Pool::open(&disk.device, OpenMode::ReadOnly).unwrap().check().unwrap().is_clean());
    assert!(protect("--setrw"));
    disk.open().unwrap();
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").arg("-d").arg(&self.device).status().unwrap();
    }
}

#[test]
fn pool_uses_all_whole_chunks_of_a_block_device() {
    let Some(disk) = Loop::new(33 * MIB + 4096) else { return };
    let pool = disk.create().unwrap();
    let info = pool.info();
    assert_eq!(
        (info.total_bytes, info.durability, info.thin),
        (32 * MIB, Durability::PageCache, false)
    );
    let extents = pool.alloc_memory(8 * MIB).unwrap();
    extents.iter().for_each(|extent| fill(&pool, *extent, 0x5a));
    // As after a crash, the memory that was lent is free again and reads as zeros, even on the
    // disk.
    drop(pool);
    let pool = disk.open().unwrap();
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().free_bytes, 28 * MIB);
    assert!(extents.iter().all(|extent| is_zero(&pool, *extent)));
    drop(pool);
    assert!(disk.content()[4 * MIB as usize..].iter().all(|byte| *byte == 0));
    assert!(Pool::open(&disk.device, OpenMode::ReadOnly).unwrap().check().unwrap().is_clean());
}

#[test]
fn erasing_a_block_device_is_visible_in_earlier_mappings() {
    let Some(disk) = Loop::new(16 * MIB) else { return };
    let pool = disk.create().unwrap();
    let extents = pool.alloc_memory(4 * MIB).unwrap();
    let media = pool.media();
    for extent in &extents {
        media.store(extent.offset_bytes(), &[0x5a; 4096]).unwrap();
        assert_eq!(media.load_word(extent.offset_bytes()).unwrap(), 0x5a5a_5a5a_5a5a_5a5a);
    }
    pool.free_memory(&extents).unwrap();
    pool.scrub_all().unwrap();
    assert!(extents.iter().all(|extent| media.load_word(extent.offset_bytes()).unwrap() == 0));
}

#[test]
fn pool_grows_into_an_enlarged_block_device() {
    let Some(disk) = Loop::new(16 * MIB) else { return };
    drop(disk.create().unwrap());
    let volume = |name| {
        disk.open().unwrap().create_volume(name, VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw)
    };
    volume("before").unwrap();
    let error = Pool::grow(&disk.device, 32 * MIB).unwrap_err();
    let too_small = matches!(
        error,
        PoolError::DeviceTooSmall { needed_bytes, device_bytes, .. } if needed_bytes == 32 * MIB && device_bytes == 16 * MIB
    );
    assert!(too_small, "{error}");
    disk.extend(48 * MIB);
    // Data after the pool should not be visible to the next owner of that space. It is in the
    // middle of the added part.
    disk.write(20 * MIB, &[0x77; 8192]);
    assert_eq!(disk.open().unwrap().info().total_bytes, 16 * MIB);
    let pool = Pool::grow(&disk.device, 32 * MIB).unwrap();
    assert_eq!(pool.info().total_bytes, 32 * MIB);
    let extents = pool.alloc_memory(pool.info().free_bytes).unwrap();
    assert!(extents.iter().all(|extent| is_zero(&pool, *extent)));
    drop(pool);
    // Data at either end of the added part may be valuable, so it is erased only with permission.
    disk.write(48 * MIB - 512, b"the end");
    let error = Pool::grow_with(&disk.device, None, false, &mut ignore_progress).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("it has data at byte 50331136"), "{text}");
    assert_eq!(disk.open().unwrap().info().total_bytes, 32 * MIB);
    assert!(
        disk.content().ends_with(&[b"the end".as_slice(), &[0; 505]].concat()),
        "the device was changed"
    );
    let mut reported = Vec::new();
    let pool =
        Pool::grow_with(&disk.device, None, true, &mut |progress| reported.push(progress)).unwrap();
    let erasing = |done_bytes| Progress { task: Task::Erase, done_bytes, total_bytes: 16 * MIB };
    assert_eq!(reported, [erasing(0), erasing(16 * MIB)]);
    assert_eq!((pool.info().total_bytes, pool.volumes().len()), (48 * MIB, 1));
    drop(pool);
    assert_eq!(disk.content().len() as u64, 48 * MIB);
    assert!(Pool::open(&disk.device, OpenMode::ReadOnly).unwrap().check().unwrap().is_clean());
}

#[test]
fn unfinished_growth_does_not_change_the_length_of_a_block_device() {
    let Some(disk) = Loop::new(32 * MIB) else { return };
    let size_bytes = Some(16 * MIB);
    let pool = disk.create_with(CreateOptions { size_bytes, ..CreateOptions::default() }).unwrap();
    let new = grow::plan(&pool.superblock(), 32 * MIB).unwrap();
    grow::announce_growth(pool.media(), &pool.superblock(), &new).unwrap();
    drop(pool);
    assert_eq!(disk.open().unwrap().info().total_bytes, 16 * MIB);
    let report = Pool::open(&disk.device, OpenMode::ReadOnly).unwrap().check().unwrap();
    assert!(report.pool.is_empty(), "{:?}", report.pool);
    assert_eq!(Pool::grow(&disk.device, 32 * MIB).unwrap().info().total_bytes, 32 * MIB);
}

#[test]
fn shrunk_block_device_is_refused_as_truncated() {
    let Some(disk) = Loop::new(32 * MIB) else { return };
    drop(disk.create().unwrap());
    disk.extend(16 * MIB);
    let error = disk.open().unwrap_err();
    let truncated = matches!(
        error,
        PoolError::Truncated { file_bytes, pool_bytes, .. } if (file_bytes, pool_bytes) == (16 * MIB, 32 * MIB)
    );
    assert!(truncated, "{error}");
}

#[test]
fn content_of_a_device_is_erased_only_by_force_and_volumes_never() {
    let Some(disk) = Loop::new(16 * MIB) else { return };
    let force = || CreateOptions { force: true, ..CreateOptions::default() };
    disk.write(0x438, b"\x53\xef");
    disk.write(9 * MIB, b"precious");
    let before = disk.content();
    let error = disk.create().unwrap_err();
    assert!(
        matches!(&error, PoolError::DeviceNotEmpty { found, .. } if found.contains("ext4")),
        "{error}"
    );
    for (size_bytes, reserve_bytes, thin) in
        [(64, 0, false), (16, 64, false), (3, 0, false), (16, 0, true)]
    {
        let size_bytes = Some(size_bytes * MIB);
        let options =
            CreateOptions { size_bytes, reserve_bytes: reserve_bytes * MIB, thin, ..force() };
        disk.create_with(options).unwrap_err();
    }
    assert!(before == disk.content(), "a refused pool has changed the device");

    let pool = disk.create_with(force()).unwrap();
    let found =
        |error| matches!(&error, PoolError::DeviceNotEmpty { found, .. } if found.contains("pool"));
    let info = pool.create_volume("v", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw).unwrap();
    drop(pool);
    let error = disk.create_with(force()).unwrap_err();
    assert!(
        matches!(&error, PoolError::DeviceHasVolumes { volumes, .. } if *volumes == ["v"]),
        "{error}"
    );
    let pool = disk.open().unwrap();
    assert_eq!(pool.volumes(), [info]);
    pool.delete_volume("v").unwrap();
    let uuid = pool.uuid();
    drop(pool);
    assert!(found(disk.create().unwrap_err()));
    let pool = disk.create_with(force()).unwrap();
    assert_ne!(pool.uuid(), uuid);
    assert!(is_zero(&pool, Extent { start: ChunkId(4), order: 0 }));
    drop(pool);
}

#[test]
fn pool_with_unknown_volumes_is_not_erased_by_force() {
    let damages: [(&str, &[u64]); 4] = [
        ("both copies of a volume's record", &[(64 << 10) + 256 + 40, MIB + 256 + 40]),
        ("the owner word of a chunk", &[2 * MIB + 3 * 16]),
        ("both superblocks", &[100, 2 * MIB - 4096 + 100]),
        ("the version", &[8, 2 * MIB - 4096 + 8]),
    ];
    for (case, places) in damages {
        let Some(disk) = Loop::new(32 * MIB) else { return };
        drop(disk.create().unwrap());
        places.iter().for_each(|at| disk.write(*at, &[0x5a]));
        let before = disk.content();
        for force in [false, true] {
            let options = CreateOptions { force, ..CreateOptions::default() };
            let error = disk.create_with(options).unwrap_err();
            assert!(matches!(error, PoolError::DeviceUnknownVolumes { .. }), "{case}: {error}");
        }
        assert!(before == disk.content(), "{case}: a refused pool has changed the device");
        // Erases the superblock without the pool's functions.
        disk.write(0, &vec![0; 2 << 20]);
        disk.create_with(CreateOptions { force: true, ..CreateOptions::default() }).unwrap();
    }
}

#[test]
fn unfinished_creation_leaves_no_pool() {
    let Some(disk) = Loop::new(160 * MIB) else { return };
    drop(disk.create().unwrap());
    let mut reported = Vec::new();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut progress = |now: Progress| {
            reported.push((now.done_bytes, now.total_bytes));
            assert_eq!(now.done_bytes, 0, "interrupted after the first step");
        };
        disk.create_with(CreateOptions {
            force: true,
            progress: Some(&mut progress),
            ..CreateOptions::default()
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(reported, [(0, 160 * MIB), (64 * MIB, 160 * MIB)]);
    assert!(matches!(disk.open().unwrap_err(), PoolError::NotAPool { .. }));
    drop(disk.create().unwrap());
}

#[test]
fn error_of_a_block_device_in_use_names_the_holder() {
    let Some(disk) = Loop::new(16 * MIB) else { return };
    let pool = disk.create().unwrap();
    let holder = |error| match error {
        PoolError::InUse { holder, .. } => holder.pid,
        error => panic!("{error}"),
    };
    let me = Some(std::process::id());
    assert_eq!(holder(disk.open().unwrap_err()), me);
    assert_eq!(holder(disk.create().unwrap_err()), me);
    assert_eq!(holder(Pool::open(&disk.device, OpenMode::ReadOnly).unwrap_err()), me);
    let peeked = Pool::open(&disk.device, OpenMode::Peek).unwrap();
    assert_eq!(peeked.holder().unwrap().pid, me);
    drop((peeked, pool));
    // The device is opened exclusively by a user that takes no lock.
    let mut options = OpenOptions::new();
    let taken = std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_EXCL);
    // Until its execve(), a forked child of another test may still hold a copy of the pool's
    // descriptor.
    let taken = loop {
        match taken.open(&disk.device) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => thread::yield_now(),
            result => break result.unwrap(),
        }
    };
    let error = disk.open().unwrap_err();
    assert!(matches!(error, PoolError::DeviceInUse { .. }), "{error}");
    let error = claim(&disk.device, true, 0).unwrap_err();
    assert!(matches!(error, ClaimError::DeviceInUse { .. }), "{error}");
    claim(&disk.device, false, 0).unwrap();
    drop(taken);
    let claimed = claim(&disk.device, true, 0).unwrap();
    assert_eq!(holder(disk.open().unwrap_err()), me);
    drop(claimed);
    // After writes, udev reads a disk under a shared lock.
    let udev = File::open(&disk.device).unwrap();
    // The forked child may have a copy of this descriptor as well.
    while try_lock(&udev, LockKind::Shared).unwrap().is_err() {
        thread::yield_now();
    }
    let lock_holder = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        drop(udev);
    });
    disk.open().unwrap();
    lock_holder.join().unwrap();
}

#[test]
fn other_character_devices_are_refused_without_being_opened() {
    for force in [false, true] {
        let options = CreateOptions { force, ..CreateOptions::default() };
        let error = Pool::create_with(Path::new("/dev/null"), options).unwrap_err();
        assert!(
            matches!(&error, PoolError::NotDax { subsystem, .. } if subsystem == "mem"),
            "{error}"
        );
    }
    let error = Pool::open(Path::new("/dev/tty"), OpenMode::ReadWrite).unwrap_err();
    assert!(matches!(&error, PoolError::NotDax { .. }), "{error}");
    // Opening a pipe without a writer does not block.
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(Pool::open(&pipe, OpenMode::ReadWrite), Err(PoolError::NotAFile { .. })));
}

/// Simulated media on a device. A device cannot be truncated.
struct OnDevice(Simulator);

impl Media for OnDevice {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(offset_bytes, into)
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.0.load_word(offset_bytes)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.0.store(offset_bytes, bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.0.store_word(offset_bytes, word)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.0.persist(ranges)
    }

    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.0.erase(ranges)
    }
}

const OLD: u64 = 14 * CHUNK_BYTES;
const NEW: u64 = 17 * CHUNK_BYTES;

/// Opens a crash image of a device.
fn open_device(device: &Simulator) -> Result<Arc<OtherPool>, PoolError> {
    Ok(open_part(device)?.1)
}

/// Opens a crash image as [`open_device`] does. Returns also the media of the pool.
fn open_part(device: &Simulator) -> Result<(Simulator, Arc<OtherPool>), PoolError> {
    let mut copies = [layout::SuperblockBytes::new_zeroed(), layout::SuperblockBytes::new_zeroed()];
    for (copy, offset) in copies.iter_mut().zip(layout::SUPERBLOCK_OFFSETS) {
        device.read(offset, copy.as_mut_bytes())?;
    }
    let (path, mode) = (Path::new("simulated"), OpenMode::ReadWrite);
    let length = open_steps::Length::Device(device.len_bytes());
    let (superblock, findings) = open_steps::select_superblock(path, copies, length, mode)?;
    let part = device.part(superblock.size_bytes());
    let media: Box<dyn Media> = Box::new(OnDevice(part.clone()));
    Ok((part, Pool::from_media(path.to_owned(), mode, media, superblock, findings)?))
}

/// Verifies a crash image of a growth on a device, and returns the size of the pool.
fn verify_device(device: &Simulator) -> Result<u64, String> {
    let pool = open_device(device).map_err(|error| format!("cannot open it: {error}"))?;
    let volumes: Vec<_> =
        pool.volumes().into_iter().map(|volume| (volume.name, volume.size_bytes)).collect();
    if volumes != [("v".to_owned(), 4 * CHUNK_BYTES)] {
        return Err(format!("it has the volumes {volumes:?}"));
    }
    let report = pool.check().map_err(|error| error.to_string())?;
    if !report.is_clean() {
        return Err(format!("{report:?}"));
    }
    for extent in
        pool.alloc_memory(pool.info().lendable_bytes).map_err(|error| error.to_string())?
    {
        let range = extent.offset_bytes()..extent.offset_bytes() + extent.len_bytes();
        let dirty = device.dirty_words(range);
        if dirty > 0 {
            return Err(format!("{dirty} words of {extent} are not zero"));
        }
    }
    Ok(pool.info().total_bytes)
}

/// Grows a simulated pool on a device that has data after the pool. Returns the sizes of the pools
/// in the crash images.
fn grow_on_device(
    table_offset: u64,
    erase: impl Fn(&Simulator) -> Result<(), MediaError>,
) -> Result<Vec<u64>, String> {
    let device = Simulator::new(NEW);
    let mut superblock = create::plan(OLD, 0, Uuid::from_u128(1), 1).unwrap();
    (superblock.volume_slots, superblock.chunk_table_offset) = (3, table_offset);
    create::write_empty_pool(&device.part(OLD), &superblock).unwrap();
    for chunk in (OLD..NEW).step_by(CHUNK_BYTES as usize) {
        device.store(chunk + 4096, &[0x77; 64]).unwrap();
    }
    device.persist(std::slice::from_ref(&(0..NEW))).unwrap();
    let (part, pool) = open_part(&device).unwrap();
    pool.create_volume("v", VolumeSize::Bytes(4 * CHUNK_BYTES), VolumeFormat::Raw).unwrap();
    device.record();
    let grown = pool.grow_on(
        NEW,
        |_| Ok(()),
        |_| {
            part.set_len(NEW);
            erase(&part).map_err(std::io::Error::other)
        },
    );
    grown.unwrap();
    let (points, mut random, mut sizes) = (device.take_points(), Random::new(23), vec![]);
    for image in points.iter().flat_map(|point| point.images(64, &mut random)) {
        sizes.push(verify_device(&image)?);
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

/// Offsets of the chunk table. With the first one, the table's last chunk has space for more
/// entries.
const TABLES: [u64; 2] = [CHUNK_BYTES, 2 * CHUNK_BYTES - 14 * 16];

#[test]
fn crash_in_a_growth_on_a_device_leaves_the_old_or_new_size() {
    for table_offset in TABLES {
        let erase = |media: &Simulator| media.erase(std::slice::from_ref(&(OLD..NEW)));
        assert_eq!(grow_on_device(table_offset, erase).unwrap(), [OLD, NEW]);
    }
}

#[test]
fn missing_erasure_in_a_growth_on_a_device_is_detected() {
    for table_offset in TABLES {
        let error = grow_on_device(table_offset, |_| Ok(())).unwrap_err();
        assert!(error.contains("are not zero") || error.contains("NotErased"), "{error}");
    }
}

/// Creates a pool in the current folder. Returns `None` if this folder is not on a disk.
fn on_disk(thin: bool) -> Option<(TempDir, Arc<Pool>)> {
    let folder = TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    let options = CreateOptions { size_bytes: Some(64 * MIB), thin, ..CreateOptions::default() };
    let pool = Pool::create_with(&folder.path().join("pool"), options).unwrap();
    if pool.durability() != Durability::PageCache {
        eprintln!("skipped: {} is {}", folder.path().display(), pool.durability().name());
        return None;
    }
    Some((folder, pool))
}

fn blocks_bytes(pool: &Pool) -> u64 {
    pool.file().sync_all().unwrap();
    pool.file().metadata().unwrap().blocks() * 512
}

#[test]
fn thin_pool_has_blocks_only_for_metadata_and_used_chunks() {
    let Some((folder, pool)) = on_disk(true) else { return };
    // The file system may use some blocks for its own metadata.
    let own = 4 * MIB..5 * MIB;
    assert!(pool.info().thin);
    assert!(own.contains(&blocks_bytes(&pool)), "{}", blocks_bytes(&pool));
    let extents = pool.alloc_memory(16 * MIB).unwrap();
    extents.iter().for_each(|extent| fill(&pool, *extent, 0x5a));
    assert!(blocks_bytes(&pool) >= 20 * MIB);
    pool.free_memory(&extents).unwrap();
    pool.scrub_all().unwrap();
    assert!(own.contains(&blocks_bytes(&pool)), "{}", blocks_bytes(&pool));
    assert!(extents.iter().all(|extent| is_zero(&pool, *extent)));
    let path = folder.path().join("pool");
    drop(pool);
    // The pool remains thin when it grows.
    let pool = Pool::grow(&path, 1 << 30).unwrap();
    assert!(pool.info().thin && own.contains(&blocks_bytes(&pool)), "{}", blocks_bytes(&pool));
    drop(pool);
    let report = Pool::open(&path, OpenMode::ReadOnly).unwrap().check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn growth_on_a_device_of_the_same_size_is_refused() {
    let Some(disk) = Loop::new(32 * MIB + 4096) else { return };
    drop(disk.create().unwrap());
    let error = Pool::grow_with(&disk.device, None, false, &mut ignore_progress).unwrap_err();
    assert!(matches!(error, PoolError::DeviceNotGrown { .. }), "{error:?}");
    assert!(error.to_string().contains("uses all of the device (32 MiB)"), "{error}");
}

#[test]
fn pool_on_a_disk_is_thin_only_on_request() {
    let Some((_folder, pool)) = on_disk(false) else { return };
    assert!(!pool.info().thin && blocks_bytes(&pool) >= 64 * MIB);
    let fixture = Fixture::new();
    assert!(fixture.create(64 * MIB, 0).info().thin, "tmpfs is always thin");
    assert!(!fixture.open().superblock().is_thin, "the pool reports it");
    let error = Pool::create_with(&fixture.folder.path().join("other"), CreateOptions::default())
        .unwrap_err();
    assert!(matches!(error, PoolError::SizeNeeded { .. }), "{error}");
    let error = Pool::grow_with(&fixture.path(), None, false, &mut ignore_progress).unwrap_err();
    assert!(matches!(error, PoolError::SizeNeeded { .. }), "{error}");
}
