//! Tests of durability and behavior of pools on all kinds of media: tmpfs, file systems with and
//! without DAX, block devices and devdax.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::{fill_up, mount, need_dax, need_private_mounts, unmount};
use guest_tests::guest::program;
use guest_tests::lent_memory::LentMemory;
use guest_tests::pool::pmvol;
use guest_tests::runner::this_tests_dir;
use guest_tests::user::need_root;
use guest_tests::{Disk, FileSystem, Guest, LoopDevice, Pool, skip};
use pmem_volume::media::{self, FileMedia, Media};
use pmem_volume::{OpenMode, Shrink, VolumeFormat, VolumeSize};

use crate::volume::{IO_LIMIT, wait_for_disk};
use crate::volume_flush::{flushes, has_hints, write_blocks};
use crate::zones::{MIB, wait_until_plugged};

guest_tests::tests![
    on_tmpfs_it_is_volatile on none,
    on_ext4_it_is_page_cache on none,
    on_ext4_it_is_thin_on_request on none,
    on_xfs_it_is_page_cache (extended) on none,
    on_ext4_with_dax_it_is_dax_sync on none,
    on_xfs_with_dax_it_is_dax_sync on none,
    on_a_block_device_it_is_page_cache_and_grows_with_it on none,
    on_persistent_memory_as_a_block_device_it_is_page_cache (extended) on none,
    on_devdax_it_is_dax_sync on none,
    a_full_file_system_fails_creation_and_growth_and_changes_nothing on none,
    a_guest_has_memory_and_a_volume_on_a_block_device: 300 (extended),
    a_guest_has_memory_and_a_volume_on_devdax: 300,
];

/// Unused persistent memory as a block device.
const PMEM: &str = "/dev/pmem1";
/// Unused persistent memory as devdax.
pub(crate) const DEVDAX: &str = "/dev/dax2.0";

struct Expected {
    durability: &'static str,
    thin: bool,
}

fn page_cache() -> Expected {
    Expected { durability: "page-cache", thin: false }
}

fn dax_sync() -> Expected {
    Expected { durability: "dax-sync", thin: false }
}

/// Erases a persistent memory device of the emulated host, and returns its path.
pub(crate) fn blank(device: &str) -> Result<PathBuf> {
    let path = PathBuf::from(device);
    if std::env::var_os("FORESHORE_HOST").is_none_or(|host| host != "nested") {
        return skip(format!("{device} may hold data of this machine's owner"));
    }
    need_root("open a device of persistent memory")?;
    if !path.exists() {
        return skip(format!(
            "no {device} here (ci/nested/host --nvdimm 512 --pmem-devices 320 has one)"
        ));
    }
    if device == DEVDAX {
        // devdax does not support write(). The library's own functions erase the whole device. A
        // pool without superblocks would still be recognized as a pool.
        let node = File::options().read(true).write(true).open(&path)?;
        let len_bytes = media::len_bytes(&node)?;
        FileMedia::new(node, len_bytes, true)?.erase(std::slice::from_ref(&(0..len_bytes)))?;
        return Ok(path);
    }
    let node = File::options().write(true).open(&path)?;
    for offset in [0, 1 << 20] {
        node.write_all_at(&vec![0; 1 << 20], offset)?;
    }
    let end = fs::read_to_string("/sys/class/block/pmem1/size")?.trim().parse::<u64>()? * 512;
    node.write_all_at(&vec![0; 1 << 20], end - (1 << 20))?;
    node.sync_all()?;
    Ok(path)
}

/// Checks that pmvol fails with an error that contains all `words`.
pub(crate) fn refused(arguments: &[&str], words: &[&str]) -> Result<()> {
    match pmvol(arguments) {
        Ok(output) => anyhow::bail!("pmvol {} did not fail: {output}", arguments.join(" ")),
        Err(error) => {
            let text = format!("{error:#}");
            let missing = words.iter().find(|word| !text.contains(**word));
            ensure!(missing.is_none(), "{missing:?} is missing in {text}");
            Ok(())
        }
    }
}

/// Process `pool-hold`, which runs until it is killed.
struct Holder(Child);

impl Holder {
    fn start(pool: &Pool, bytes: u64) -> Result<Self> {
        let mut command = Command::new(program("pool-hold"));
        command.args([pool.name(), bytes.to_string()]).stdout(Stdio::piped());
        let mut holder = Self(command.spawn().context("Cannot start pool-hold")?);
        let mut line = String::new();
        BufReader::new(holder.0.stdout.as_mut().context("pool-hold has no output")?)
            .read_line(&mut line)?;
        ensure!(line == "held\n", "Unexpected line of pool-hold: {line:?}");
        Ok(holder)
    }

    fn pid(&self) -> String {
        format!("process {} (pool-hold)", self.0.id())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // An error is ignored, because the process may already have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn open(pool: &Pool) -> Result<Arc<pmem_volume::Pool>> {
    Ok(pmem_volume::Pool::open(pool.path(), OpenMode::ReadWrite)?)
}

/// Lends all free chunks in the pool, and checks that they read as zeros.
fn free_chunks_are_zero(pool: &Pool) -> Result<()> {
    let open = open(pool)?;
    open.scrub_all()?;
    let info = open.info();
    ensure!(
        info.memory_bytes + info.scrubbing_bytes == 0,
        "The pool did not get all memory back: {info:?}"
    );
    let lent = LentMemory::take(&open, info.lendable_bytes)?;
    let found = lent.find_content();
    ensure!(found.is_none(), "A free chunk has content (offset and byte): {found:?}");
    lent.give_back(&open)?;
    Ok(open.scrub_all()?)
}

/// Tests the operations of a pool: volumes are created, changed and deleted, memory of a dead
/// holder is erased, and the pool grows. The pool has no volumes at the end.
fn serves(pool: &Pool, expected: &Expected, grow: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let name = &pool.name();
    let info = pool.info()?;
    ensure!(
        info["durability"] == expected.durability && info["thin"] == expected.thin,
        "Unexpected information: {info}"
    );
    // 1. Volumes are created.
    let open = open(pool)?;
    open.create_volume("data", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt)?;
    open.create_volume("raw", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw)?;
    open.resize_volume("data", VolumeSize::Bytes(36 * MIB), Shrink::Refuse)?;
    open.resize_volume("raw", VolumeSize::Bytes(4 * MIB), Shrink::Allow)?;
    drop(open);
    // 2. The holder of lent memory dies. Until then, it owns the pool.
    let holder = Holder::start(pool, 12 * MIB)?;
    let info = pool.info()?;
    let in_use_by = info["in_use_by"].as_str().unwrap_or_default();
    ensure!(
        in_use_by == holder.pid() && info["memory_bytes"] == 12 * MIB,
        "Held by {}: {info}",
        holder.pid()
    );
    refused(&["volume", "delete", name, "raw"], &[&holder.pid()])?;
    drop(holder);
    // 3. The memory should have been erased, and the volumes should be unchanged.
    free_chunks_are_zero(pool)?;
    ensure!(
        pool.check()?.ends_with("clean\n"),
        "The pool is not clean after its holder was killed"
    );
    // 4. The pool grows.
    grow(name)?;
    let grown = self::open(pool)?;
    ensure!(
        grown.info().total_bytes > info["total_bytes"].as_u64().unwrap_or(u64::MAX),
        "The pool did not grow"
    );
    grown.delete_volume("raw")?;
    grown.delete_volume("data")?;
    drop(grown);
    free_chunks_are_zero(pool)?;
    let info = pool.info()?;
    ensure!(
        info["durability"] == expected.durability && info["thin"] == expected.thin,
        "Unexpected information after the growth: {info}"
    );
    ensure!(pool.check()?.ends_with("clean\n"), "The pool is not clean at the end");
    Ok(())
}

/// Runs [`serves`] on a pool file, which can grow by itself.
fn serves_in_file(dir: &Path, flags: &[&str], expected: &Expected) -> Result<Pool> {
    let pool = Pool::at(dir);
    pmvol(&[&["create", &pool.name(), "--size", "64M"], flags].concat())?;
    serves(&pool, expected, |name| pmvol(&["grow", name, "--size", "80M"]).map(drop))?;
    Ok(pool)
}

fn on_tmpfs_it_is_volatile() -> Result<()> {
    fs::create_dir_all(this_tests_dir())?;
    let volatile = Expected { durability: "volatile", thin: true };
    let pool = serves_in_file(&this_tests_dir(), &[], &volatile)?;
    ensure!(
        pool.occupied_bytes()? <= 4 * MIB,
        "The free pool occupies {} bytes",
        pool.occupied_bytes()?
    );
    Ok(())
}

fn on_ext4_it_is_page_cache() -> Result<()> {
    let disk = Disk::create(128, 256)?;
    let pool = serves_in_file(disk.dir(), &[], &page_cache())?;
    ensure!(
        pool.occupied_bytes()? >= 80 * MIB,
        "Only {} bytes are allocated",
        pool.occupied_bytes()?
    );
    Ok(())
}

fn on_ext4_it_is_thin_on_request() -> Result<()> {
    let disk = Disk::create(128, 256)?;
    let thin = Expected { thin: true, ..page_cache() };
    let pool = serves_in_file(disk.dir(), &["--thin"], &thin)?;
    ensure!(
        pool.occupied_bytes()? < 5 * MIB,
        "The free pool occupies {} bytes",
        pool.occupied_bytes()?
    );
    // When the disk is full, only operations that store new data may fail.
    let filler = disk.dir().join("filler");
    fill_up(&filler)?;
    let create = ["volume", "create", &pool.name(), "v", "--size", "36M", "--thick"];
    refused(&create, &["file system has", "free more space"])?;
    fs::remove_file(&filler)?;
    free_chunks_are_zero(&pool)?;
    pmvol(&create)?;
    ensure!(pool.check()?.ends_with("clean\n"), "The pool is not clean");
    // The pool may be larger than the disk, because chunks take up space only when they are used.
    pmvol(&["grow", &pool.name(), "--size", "1G"])?;
    ensure!(pool.check()?.ends_with("clean\n"), "The pool is not clean");
    Ok(())
}

fn on_xfs_it_is_page_cache() -> Result<()> {
    let disk = Disk::create_with(FileSystem::Xfs, 320, 400)?;
    serves_in_file(disk.dir(), &[], &page_cache()).map(drop)
}

fn on_ext4_with_dax_it_is_dax_sync() -> Result<()> {
    let dir = need_dax()?.join("places");
    fs::create_dir_all(&dir)?;
    let result = serves_in_file(&dir, &[], &dax_sync());
    fs::remove_dir_all(&dir)?;
    result.map(drop)
}

fn on_xfs_with_dax_it_is_dax_sync() -> Result<()> {
    let device = blank(PMEM)?;
    need_private_mounts()?;
    FileSystem::Xfs.make(&device)?;
    let at = this_tests_dir().join("xfs");
    mount(&device, &at, FileSystem::Xfs, "dax=always")?;
    let thick =
        serves_in_file(&at, &[], &dax_sync()).and_then(|pool| Ok(fs::remove_file(pool.path())?));
    let thin = serves_in_file(&at, &["--thin"], &Expected { thin: true, ..dax_sync() });
    let device = device.display().to_string();
    let mounted = refused(&["create", &device, "--force"], &[&device, "mounted on", "/xfs"]);
    unmount(&at)?;
    thick.and(thin.map(drop)).and(mounted)?;
    refused(&["create", &device], &["XFS", "--force"])
}

fn on_a_block_device_it_is_page_cache_and_grows_with_it() -> Result<()> {
    let disk = LoopDevice::create(65)?;
    let pool = Pool::by_path(disk.path());
    pmvol(&["create", &pool.name()])?;
    ensure!(
        pool.info()?["total_bytes"] == 64 * MIB,
        "The pool does not cover the device: {}",
        pool.info()?
    );
    serves(&pool, &page_cache(), |name| {
        refused(&["grow", name, "--size", "96M"], &["--size", "96 MiB", "65 MiB"])?;
        disk.lengthen(97)?;
        pmvol(&["grow", name]).map(drop)
    })?;
    ensure!(
        pool.info()?["total_bytes"] == 96 * MIB,
        "The pool does not cover the device: {}",
        pool.info()?
    );
    // A pool on the device should be detected, and should not be overwritten without `--force`.
    refused(&["create", &pool.name()], &["already has a pool", "--force"])?;
    disk.lengthen(32)?;
    refused(&["info", &pool.name()], &["cut short", "33554432", "100663296"])
}

fn on_persistent_memory_as_a_block_device_it_is_page_cache() -> Result<()> {
    let pool = Pool::by_path(&blank(PMEM)?);
    pmvol(&["create", &pool.name(), "--size", "64M"])?;
    serves(&pool, &page_cache(), |name| pmvol(&["grow", name, "--force"]).map(drop))
}

fn on_devdax_it_is_dax_sync() -> Result<()> {
    let device = blank(DEVDAX)?;
    let pool = Pool::by_path(&device);
    refused(&["create", &pool.name(), "--thin", "--force"], &["--thin", "device"])?;
    refused(&["create", &pool.name(), "--size", "1G", "--force"], &["--size", "1 GiB"])?;
    pmvol(&["create", &pool.name(), "--size", "64M", "--force"])?;
    pmvol(&["volume", "create", &pool.name(), "kept", "--size", "2M", "--format", "raw"])?;
    refused(&["create", &pool.name(), "--force"], &["volumes kept", "delete"])?;
    pmvol(&["volume", "delete", &pool.name(), "kept"])?;
    refused(&["create", &pool.name()], &["already has a pool", "--force"])?;
    serves(&pool, &dax_sync(), |name| pmvol(&["grow", name, "--force"]).map(drop))?;
    pmvol(&["repair", &pool.name()]).map(drop)
}

/// Returns the free bytes that an unprivileged user may use on a file system.
fn free_bytes(dir: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Fills a file system until only slightly more than `bytes` are free.
fn leave_free(dir: &Path, bytes: u64) -> Result<()> {
    let mut filler = File::options().create(true).append(true).open(dir.join("filler"))?;
    let block = vec![0xff; 4096];
    // The file system's metadata also takes up space, so the last steps are small.
    while free_bytes(dir)? > bytes + 16384 {
        for _ in 0..(free_bytes(dir)? - bytes).saturating_sub(256 << 10).div_ceil(4096).max(1) {
            filler.write_all(&block)?;
        }
        filler.sync_all()?;
    }
    ensure!(free_bytes(dir)? >= bytes, "Too much was filled");
    Ok(())
}

fn names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Tests creation and growth in two cases each: with a size that obviously does not fit, and with a
/// size for which only the last blocks are missing.
fn a_full_file_system_fails_creation_and_growth_and_changes_nothing() -> Result<()> {
    let disk = Disk::create_with(FileSystem::Ext4ByBlocks, 48, 64)?;
    let pool = Pool::at(disk.dir());
    let name = &pool.name();
    pmvol(&["create", name, "--size", "8M"])?;
    pmvol(&["volume", "create", name, "v", "--size", "2M", "--format", "raw"])?;
    let before = fs::read(pool.path())?;
    leave_free(disk.dir(), 24 * MIB)?;
    let (free, files) = (free_bytes(disk.dir())?, names(disk.dir())?);
    let other = disk.dir().join("other").display().to_string();
    for size in ["64M", "24M"] {
        refused(&["create", &other, "--size", size], &["--size", &other, "needs", "free"])?;
        ensure!(
            names(disk.dir())? == files,
            "The failed command left files: {:?}",
            names(disk.dir())?
        );
        ensure!(
            free_bytes(disk.dir())? == free,
            "{free} bytes were free, now {}",
            free_bytes(disk.dir())?
        );
    }
    for size in ["72M", "32M"] {
        refused(&["grow", name, "--size", size], &["--size", name, "needs", "free"])?;
        ensure!(
            free_bytes(disk.dir())? == free,
            "{free} bytes were free, now {}",
            free_bytes(disk.dir())?
        );
        ensure!(pool.check()?.ends_with("clean\n"), "The pool is not clean");
        // Only the sequence numbers and checksums of superblocks may have changed.
        let after = fs::read(pool.path())?;
        let differ = before.len() != after.len()
            || before[4096..(2 << 20) - 4096] != after[4096..(2 << 20) - 4096];
        ensure!(
            !differ && before[2 << 20..] == after[2 << 20..],
            "The failed growth changed the pool"
        );
    }
    pmvol(&["grow", name, "--size", "24M"])?;
    ensure!(pool.check()?.ends_with("clean\n"), "The pool is not clean");
    Ok(())
}

/// A guest that uses memory and a volume of the pool is killed. The volume should be consistent,
/// and no content of the memory may remain.
fn check_guest_runs_from(pool: &Pool, hints: bool) -> Result<()> {
    pool.create_volume("data", "24M")?;
    let memory = format!("pool={},size=128M", pool.name());
    let guest = Guest::builder()
        .memory("size=384M")
        .pm_memory(&memory)
        .pm_volume(&format!("pool={},name=data,interface=nvdimm", pool.name()))
        .pressure("fixed,size=128M")
        // The kernel's own memory cannot be in PM. The kernel needs swap to make room for it.
        .cmdline("foreshore.zram=256M")
        .boot()?;
    wait_until_plugged(&guest, "pm", 128 * MIB, IO_LIMIT)?;
    wait_for_disk(&guest)?;
    ensure!(has_hints(&guest)? == hints, "The guest has flush hints: {}", !hints);
    write_blocks(&guest, 50)?;
    let flushed = flushes(&guest, "ok")?;
    ensure!(
        (flushed > 0.0) == hints && flushes(&guest, "error")? == 0.0,
        "The guest requested {flushed} flushes"
    );
    // The load exceeds the boot memory.
    let _hog = guest.hog(380, IO_LIMIT)?;
    ensure!(
        pool.info()?["memory_bytes"] == 128 * MIB,
        "The pool does not lend 128 MiB: {}",
        pool.info()?
    );
    guest.run_within(IO_LIMIT, "guest-tool check-blocks /dev/pmem0s 0 50 1 1")?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    free_chunks_are_zero(pool)?;
    pool.check()?;
    pmvol(&["volume", "delete", &pool.name(), "data", "--force"]).map(drop)
}

fn a_guest_has_memory_and_a_volume_on_a_block_device() -> Result<()> {
    let disk = LoopDevice::create(160)?;
    let pool = Pool::by_path(disk.path());
    pmvol(&["create", &pool.name()])?;
    check_guest_runs_from(&pool, true)
}

fn a_guest_has_memory_and_a_volume_on_devdax() -> Result<()> {
    let pool = Pool::by_path(&blank(DEVDAX)?);
    pmvol(&["create", &pool.name(), "--size", "160M", "--force"])?;
    check_guest_runs_from(&pool, false)
}
