//! Tests that memory mapped by a program in the guest is the pool's own memory. The program's
//! stores are in the pool's file before any flush, and the program sees stores by the host.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::HeldWriteback;
use guest_tests::namespace::{Kind, convert};
use guest_tests::{Guest, Image, Pool};
use pmem_volume::{OpenMode, VolumeFormat};

use crate::raw_volume::{pool_on_disk, raw_guest, wait_for_bytes};
use crate::volume::{IO_LIMIT, check_acknowledged, guest_with, write_files_and_kill};
use crate::volume_flush::flushes;
use crate::zones::MIB;

guest_tests::tests![
    fsdax_reaches_the_pool: 300 on [V6_12, V6_1 extended] x 2,
    fsdax_by_xfs_reaches_the_pool: 300 (extended) on [V6_12Generic] x 2,
    fsdax_files_survive_a_power_cut: 300 (long) x 2,
    devdax_reaches_the_pool: 300 (long) on [V6_12, V6_1 extended] x 2,
    map_sync_on_a_raw_nvdimm_is_not_durable_on_a_page_cache: 300 (long) x 2,
];

/// File system with DAX that does not flush by itself during a test.
pub(crate) struct FileSystem {
    make: &'static str,
    mount: &'static str,
    check: &'static str,
}

pub(crate) const EXT4: FileSystem = FileSystem {
    make: "mkfs.ext4 -q -b 4096 -N 1024 -E lazy_journal_init=1,nodiscard /dev/pmem0",
    mount: "mkdir -p /mnt/data && mount -t ext4 -o dax=always,commit=300,noinit_itable /dev/pmem0 /mnt/data",
    check: "e2fsck -fn /dev/pmem0",
};
const XFS: FileSystem = FileSystem {
    // Linux does not support DAX and reflink together.
    make: "mkfs.xfs -q -f -m reflink=0 /dev/pmem0",
    mount: "mkdir -p /mnt/data && mount -t xfs -o dax=always /dev/pmem0 /mnt/data && \
        echo 720000 >/proc/sys/fs/xfs/xfssyncd_centisecs",
    check: "xfs_repair -n /dev/pmem0",
};
pub(crate) const HEAP: &str = "/mnt/data/heap";
pub(crate) const HEAP_BYTES: u64 = 8 * MIB;

/// Returns a word that `guest-tool map-store` writes for this seed.
fn word(seed: u64, index: u64) -> u64 {
    seed + index
}

/// Raw volume as seen from the host while a VM uses it: ranges in the pool's file.
struct VolumeOnHost {
    file: File,
    /// Each extent's offset in the volume, offset in the file, and length.
    extents: Vec<(u64, u64, u64)>,
}

impl VolumeOnHost {
    fn find(pool: &Pool) -> Result<Self> {
        // The chunks of the volume do not move while a VM uses it.
        let peeked = pmem_volume::Pool::open(pool.path(), OpenMode::Peek)?;
        let volume = peeked.open_volume("data")?;
        ensure!(
            volume.info().format == VolumeFormat::Raw,
            "The volume's format is {:?}",
            volume.info()
        );
        let extents = volume.extents().iter();
        let extents =
            extents.map(|e| (e.volume_offset_bytes(), e.offset_bytes(), e.len_bytes())).collect();
        let file = File::options().read(true).write(true).open(pool.path())?;
        Ok(Self { file, extents })
    }

    fn file_offset(&self, offset: u64) -> Result<u64> {
        let extent =
            self.extents.iter().find(|(start, _, len)| (*start..start + len).contains(&offset));
        let (start, at, _) =
            extent.with_context(|| format!("The volume has no byte {offset:#x}"))?;
        Ok(at + offset - start)
    }

    fn word(&self, offset: u64) -> Result<u64> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, self.file_offset(offset)?)?;
        Ok(u64::from_le_bytes(word))
    }

    fn store(&self, offset: u64, word: u64) -> Result<()> {
        Ok(self.file.write_all_at(&word.to_le_bytes(), self.file_offset(offset)?)?)
    }

    /// Checks every word in a range of the guest's file or device. `first` is the number of the
    /// range's first word.
    fn check(&self, offset: u64, len_bytes: u64, seed: u64, first: u64) -> Result<()> {
        for index in 0..len_bytes / 8 {
            let (found, expected) = (self.word(offset + 8 * index)?, word(seed, first + index));
            ensure!(
                found == expected,
                "{found:#x} at {:#x} instead of {expected:#x}",
                offset + 8 * index
            );
        }
        Ok(())
    }
}

/// Checks that stores arrive in both directions without a flush. `path` is a mapped file in the
/// guest that consists of `extents` (offset in the file, offset in the volume, length).
fn reaches(guest: &Guest, pool: &Pool, path: &str, extents: &[(u64, u64, u64)]) -> Result<()> {
    const SEED: u64 = 0x5eed_0000_0000;
    let bytes = extents.iter().map(|(_, _, len)| len).sum::<u64>();
    ensure!(bytes == HEAP_BYTES, "{path} is at {extents:?}");
    let volume = VolumeOnHost::find(pool)?;
    let before = flushes(guest, "ok")?;
    // 1. The guest's stores should be in the pool.
    let mut script = guest.start_script(
        IO_LIMIT,
        &format!("exec guest-tool map-store {path} 0 {HEAP_BYTES} {SEED}"),
    )?;
    ensure!(
        script.next_line().as_deref() == Some("stored"),
        "map-store failed: {:?}",
        script.finish()
    );
    for (at, offset, len) in extents {
        volume
            .check(*offset, *len, SEED, at / 8)
            .context("The guest's store is not in the pool")?;
    }
    // 2. A program that only polls should see the host's stores.
    let wait = format!("exec guest-tool map-wait {path} 0 {HEAP_BYTES} 4711");
    let mut waiting = guest.start_script(IO_LIMIT, &wait)?;
    let line = waiting.next_line().context("map-wait printed nothing")?;
    ensure!(line == format!("waiting at {SEED:#x}"), "map-wait found {line:?}");
    volume.store(extents[0].1, 4711)?;
    ensure!(waiting.next_line().as_deref() == Some("seen"), "The host's store is not in the guest");
    volume.store(extents[0].1, SEED)?;
    // 3. The stores should have arrived without a flush.
    let after = flushes(guest, "ok")?;
    ensure!(after == before, "The VMM received {} flushes", after - before);
    Ok(())
}

impl FileSystem {
    /// Creates and mounts the file system, and creates a file of [`HEAP_BYTES`] at [`HEAP`].
    pub(crate) fn make(&self, guest: &Guest) -> Result<()> {
        guest.run_within(IO_LIMIT, self.make)?;
        guest.run(self.mount)?;
        let mounts = guest.run("cat /proc/mounts")?;
        let dax = |line: &str| line.contains("/mnt/data") && line.contains("dax=always");
        ensure!(mounts.lines().any(dax), "{mounts}");
        guest
            .run_within(IO_LIMIT, &format!("dd if=/dev/zero of={HEAP} bs=1M count=8 && sync"))
            .map(drop)
    }

    fn unmount_and_check(&self, guest: &Guest) -> Result<()> {
        guest.run_within(IO_LIMIT, &format!("umount /mnt/data && {}", self.check)).map(drop)
    }
}

fn fsdax_reaches(pool: &Pool, guest: &Guest, file_system: &FileSystem) -> Result<()> {
    wait_for_bytes(guest)?;
    file_system.make(guest)?;
    let lines = guest.run(&format!("guest-tool extents {HEAP}"))?;
    let extents: Vec<_> = lines.lines().map(extent).collect::<Result<_>>()?;
    // virtio-pmem needs a flush request, so the kernel should not treat a fence as a flush.
    let map_sync = guest.run(&format!("guest-tool map-sync {HEAP} {HEAP_BYTES}"))?;
    ensure!(map_sync == "refused\n", "MAP_SYNC by virtio-pmem is {map_sync}");
    reaches(guest, pool, HEAP, &extents)?;
    // Flushes requested by programs should reach the host.
    let before = flushes(guest, "ok")?;
    guest.run(&format!("printf x | dd of={HEAP} conv=notrunc,fsync"))?;
    ensure!(flushes(guest, "ok")? > before, "An fsync caused no flush");
    file_system.unmount_and_check(guest)?;
    guest.no_kernel_complaints()
}

fn extent(line: &str) -> Result<(u64, u64, u64)> {
    let mut numbers = line.split(' ').map(str::parse::<u64>);
    let mut next = || numbers.next().context("A number is missing")?.context("Not a number");
    Ok((next()?, next()?, next()?))
}

fn fsdax_reaches_the_pool() -> Result<()> {
    let pool = Pool::create("256M")?;
    fsdax_reaches(&pool, &raw_guest(&pool, "interface=auto").boot()?, &EXT4)
}

fn fsdax_by_xfs_reaches_the_pool() -> Result<()> {
    let pool = Pool::create("512M")?;
    // XFS requires 300 MiB.
    let guest = guest_with(&pool, "format=raw,size=320M,create=on,interface=auto")
        .image(Image::FileSystems)
        .memory("size=512M")
        .boot()?;
    fsdax_reaches(&pool, &guest, &XFS)
}

fn fsdax_files_survive_a_power_cut() -> Result<()> {
    let _held = HeldWriteback::hold()?;
    let (disk, pool) = pool_on_disk(1024)?;
    let guest = raw_guest(&pool, "interface=auto").boot()?;
    wait_for_bytes(&guest)?;
    EXT4.make(&guest)?;
    let acknowledged = write_files_and_kill(guest, 15)?;
    let pool = Pool::at(&disk.after_power_loss()?);
    let guest = raw_guest(&pool, "interface=auto").boot()?;
    wait_for_bytes(&guest)?;
    guest.run(EXT4.mount)?;
    check_acknowledged(&guest, &acknowledged)?;
    EXT4.unmount_and_check(&guest)?;
    guest.no_kernel_complaints()
}

fn wait_for_devdax(guest: &Guest) -> Result<()> {
    guest.run("modprobe device_dax")?;
    guest.wait_until_run("/dev/dax0.0 exists", IO_LIMIT, "test -c /dev/dax0.0")
}

fn devdax_reaches_the_pool() -> Result<()> {
    let pool = Pool::create("256M")?;
    let builder = raw_guest(&pool, "interface=auto");
    let guest = builder.boot()?;
    wait_for_bytes(&guest)?;
    guest.run_within(IO_LIMIT, &convert(0, Kind::DevDax))?;
    wait_for_devdax(&guest)?;
    // The data of a devdax device begins after the superblock of its namespace. `dax0.*` also
    // matches the seed of the next device, which has no address yet, so reading its file fails.
    let resources = "cd /sys/bus/nd/devices; for place in dax0.*/resource region0/resource; do cat $place; done; true";
    let resources = guest.run(resources)?;
    let resources: Vec<u64> = resources
        .lines()
        .filter_map(|line| u64::from_str_radix(line.trim_start_matches("0x"), 16).ok())
        .filter(|resource| *resource != u64::MAX)
        .collect();
    let [device, region] = resources[..] else {
        anyhow::bail!("The device and its region are at {resources:x?}")
    };
    ensure!((device - region).is_multiple_of(2 * MIB), "{device:#x} in {region:#x}: no huge pages");
    reaches(&guest, &pool, "/dev/dax0.0", &[(0, device - region, HEAP_BYTES)])?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    // The next boot should find the namespace as a devdax device.
    let guest = builder.boot()?;
    wait_for_devdax(&guest)?;
    guest
        .run(&format!("guest-tool map-check /dev/dax0.0 0 {HEAP_BYTES} {}", 0x5eed_0000_0000u64))?;
    guest.no_kernel_complaints()
}

/// Shows why a raw NVDIMM on such a pool is refused: the guest's kernel reports stores as durable
/// although they are not. If this test fails, the refusal has become unnecessary.
fn map_sync_on_a_raw_nvdimm_is_not_durable_on_a_page_cache() -> Result<()> {
    const SEED: u64 = 0xbad_0000_0000;
    let _held = HeldWriteback::hold()?;
    let (disk, pool) = pool_on_disk(1024)?;
    let builder = |pool: &Pool| raw_guest(pool, "interface=nvdimm,force=on");
    let guest = builder(&pool).boot()?;
    wait_for_bytes(&guest)?;
    guest.run_within(IO_LIMIT, &convert(0, Kind::FsDax))?;
    wait_for_bytes(&guest)?;
    EXT4.make(&guest)?;
    let map_sync = guest.run(&format!("guest-tool map-sync {HEAP} {HEAP_BYTES}"))?;
    ensure!(map_sync == "allowed\n", "MAP_SYNC on an NVDIMM is {map_sync}");
    let store = format!("exec guest-tool map-store-sync {HEAP} 0 {HEAP_BYTES} {SEED}");
    let mut script = guest.start_script(IO_LIMIT, &store)?;
    ensure!(
        script.next_line().as_deref() == Some("stored"),
        "map-store failed: {:?}",
        script.finish()
    );
    guest.kill9()?;
    let pool = Pool::at(&disk.after_power_loss()?);
    let guest = builder(&pool).boot()?;
    wait_for_bytes(&guest)?;
    guest.run(EXT4.mount)?;
    let check = format!("guest-tool map-check {HEAP} 0 {HEAP_BYTES} {SEED}");
    let output = guest.try_run(IO_LIMIT, &check)?;
    ensure!(output.code != 0, "All data survived, so the refusal of MAP_SYNC is not needed");
    ensure!(
        output.stderr.contains("Word"),
        "map-check failed for another reason: {}",
        output.stderr
    );
    Ok(())
}
