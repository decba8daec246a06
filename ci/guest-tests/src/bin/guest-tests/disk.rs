//! Tests of `--disk`: image files as virtio-blk disks, with Debian's stock driver.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::guest::GuestBuilder;
use guest_tests::user::need_proc;
use guest_tests::{Disk, Guest, Pool};
use guest_tools::content::Bytes;
use guest_tools::sectors::{Outcome, Program, Shape};
use serde_json::json;

use crate::blocks;
use crate::btt_cross::{Disk as VolumeDisk, check, seed, write};
use crate::volume::with_volume;

guest_tests::tests![
    a_file_system_on_a_disk_is_made_used_and_checked: 240 on [V6_12, V6_1 extended] x 2,
    disks_show_their_shape_grow_discard_and_refuse_writes: 240 x 2,
    images_and_a_volume_retain_writes_discards_and_zeroes: 240 (long) x 2,
    a_guest_lives_on_a_disk: 240 (extended),
    a_failed_flush_ends_all_writing_to_an_image_and_a_volume x 2,
];

const IO_LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

fn image(name: &str, mib: u64) -> Result<PathBuf> {
    sparse_file(name, mib * MIB)
}

fn guest_with(disk: &str) -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off").argument("--disk", disk)
}

fn wait_for_disk(guest: &Guest) -> Result<()> {
    guest.wait_until_run("/dev/vda exists", IO_LIMIT, "test -b /dev/vda")
}

fn a_file_system_on_a_disk_is_made_used_and_checked() -> Result<()> {
    let path = image("disk", 96)?;
    let disk = format!("path={},num_queues=2", path.display());
    let guest = guest_with(&disk).boot()?;
    wait_for_disk(&guest)?;
    blocks::write(&guest, "/dev/vda", ["direct", "buffered", "direct"], 2)?;
    blocks::check(&guest, "/dev/vda", 2)?;
    guest.run_within(
        IO_LIMIT,
        "mkfs.ext4 -q /dev/vda && mkdir -p /mnt/d && mount -t ext4 /dev/vda /mnt/d",
    )?;
    guest.run_within(
        IO_LIMIT,
        "dd if=/dev/urandom of=/mnt/d/file bs=1M count=20 && sha256sum /mnt/d/file >/mnt/d/sum && umount /mnt/d",
    )?;
    guest.run_within(IO_LIMIT, "e2fsck -fn /dev/vda && echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(
        IO_LIMIT,
        "mount -t ext4 /dev/vda /mnt/d && cd / && sha256sum -c /mnt/d/sum && umount /mnt/d",
    )?;
    let metrics = guest.metrics()?;
    for (operation, min) in [("read", 100.0), ("write", 1.0), ("flush", 1.0)] {
        let labels = [("disk", "_disk0"), ("operation", operation), ("result", "ok")];
        let count = metrics.value("foreshore_disk_operations_total", &labels)?;
        ensure!(count >= min, "Only {count} requests to {operation}");
    }
    ensure!(
        metrics.value("foreshore_disk_bad_requests_total", &[("disk", "_disk0")])? == 0.0,
        "The metrics count bad requests"
    );
    guest.no_kernel_complaints()
}

/// One guest with four disks. Each disk tests one property.
fn disks_show_their_shape_grow_discard_and_refuse_writes() -> Result<()> {
    let (shaped, growing, full) = (image("shaped", 32)?, image("growing", 32)?, image("full", 64)?);
    let read_only = image("read-only", 32)?;
    let mut content = vec![0; (32 * MIB) as usize];
    Bytes::new(seed(82)?).fill(&mut content);
    fs::write(&read_only, &content)?;
    let reader = format!("path={},readonly=on", read_only.display());
    let options = format!("path={},num_queues=2,queue_size=64,serial=harbour-1", shaped.display());
    let guest = guest_with(&options)
        .argument("--disk", &format!("path={},id=data", growing.display()))
        .argument("--disk", &format!("path={}", full.display()))
        .argument("--disk", &reader)
        .boot()?;
    guest.wait_until_run(
        "all disks exist",
        IO_LIMIT,
        "for n in a b c d; do test -b /dev/vd$n || exit 1; done",
    )?;
    shows_its_shape(&guest, &shaped).context("Shape of the disk")?;
    grows_under_its_guest(&guest, &growing).context("Growing")?;
    discarded_space_is_released(&guest, &full).context("Discards")?;
    takes_no_writes(&guest, &read_only, &content).context("Read-only disk")?;
    guest.no_kernel_complaints()?;
    // Several VMs may read the image at the same time, but then none may write it.
    let second = guest_with(&reader).name("second").start()?;
    second.wait_until("a second VM that only reads runs", IO_LIMIT, || {
        Ok(second.get("vm.info").is_ok_and(|info| info["state"] == "Running"))
    })?;
    let refusal =
        guest_with(&format!("path={}", read_only.display())).name("third").expect_refusal()?;
    ensure!(refusal.message.contains("in use by process"), "{}", refusal.message);
    Ok(())
}

fn shows_its_shape(guest: &Guest, path: &Path) -> Result<()> {
    let sys = |file: &str| {
        Ok::<_, anyhow::Error>(guest.run(&format!("cat /sys/block/vda/{file}"))?.trim().to_owned())
    };
    ensure!(guest.run("ls /sys/block/vda/mq")?.split_whitespace().count() == 2, "Not two queues");
    for (file, expected) in [
        ("serial", "harbour-1"),
        ("size", "65536"),
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
        ("queue/minimum_io_size", "4096"),
        ("queue/discard_granularity", "4096"),
        ("queue/max_segments", "62"),
        ("queue/write_cache", "write back"),
        ("ro", "0"),
    ] {
        let value = sys(file)?;
        ensure!(value == expected, "{file} is {value:?} instead of {expected:?}");
    }
    // The driver may disable the write cache.
    guest.run("echo 'write through' >/sys/block/vda/cache_type")?;
    guest.run("dd if=/dev/zero of=/dev/vda bs=4k count=1 oflag=direct")?;
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["disks"][0]["path"] == path.display().to_string(), "{info}");
    Ok(())
}

fn grows_under_its_guest(guest: &Guest, path: &Path) -> Result<()> {
    let resize = |id: &str, mib: u64| {
        guest.try_put("vm.resize-disk", json!({ "id": id, "desired_size": mib * MIB }))
    };
    ensure!(resize("data", 64)?.status == 204, "vm.resize-disk failed");
    guest.wait_until_run(
        "the guest has the new size",
        IO_LIMIT,
        "test $(cat /sys/block/vdb/size) = 131072",
    )?;
    guest.run("dd if=/dev/urandom of=/dev/vdb bs=1M seek=63 count=1 oflag=direct")?;
    ensure!(fs::metadata(path)?.len() == 64 * MIB, "The image's file was not resized");
    let refused = resize("data", 32)?;
    ensure!(refused.status == 400 && refused.body.contains("cannot shrink"), "{refused:?}");
    let missing = resize("_disk9", 64)?;
    ensure!(missing.status == 404 && missing.body.contains("data"), "{missing:?}");
    let size = guest.metric("foreshore_disk_size_bytes", &[("disk", "data")])?;
    ensure!(size == (64 * MIB) as f64, "{size}");
    Ok(())
}

fn discarded_space_is_released(guest: &Guest, path: &Path) -> Result<()> {
    let used_mib = || Ok::<_, anyhow::Error>(fs::metadata(path)?.blocks() * 512 / MIB);
    guest.run_within(IO_LIMIT, "dd if=/dev/urandom of=/dev/vdc bs=1M count=40 oflag=direct")?;
    ensure!(used_mib()? >= 40, "The image uses only {} MiB", used_mib()?);
    guest.run_within(IO_LIMIT, "blkdiscard -o 0 -l 31457280 /dev/vdc")?;
    ensure!(used_mib()? <= 11, "The image uses {} MiB after a discard of 30 MiB", used_mib()?);
    guest.run("test $(head -c 31457280 /dev/vdc | tr -d '\\0' | wc -c) = 0")?;
    // The file system sends discards.
    guest.run_within(
        IO_LIMIT,
        "mkfs.ext4 -q /dev/vdc && mkdir -p /mnt/d && mount -t ext4 /dev/vdc /mnt/d",
    )?;
    guest.run_within(IO_LIMIT, "dd if=/dev/urandom of=/mnt/d/file bs=1M count=30 && sync")?;
    let full_mib = used_mib()?;
    guest.run_within(IO_LIMIT, "rm /mnt/d/file && sync && fstrim /mnt/d && umount /mnt/d")?;
    ensure!(
        used_mib()? + 25 <= full_mib,
        "The image uses {} of {full_mib} MiB after fstrim",
        used_mib()?
    );
    Ok(())
}

fn takes_no_writes(guest: &Guest, path: &Path, content: &[u8]) -> Result<()> {
    ensure!(guest.run("cat /sys/block/vdd/ro")?.trim() == "1", "Not read-only");
    for command in [
        "dd if=/dev/urandom of=/dev/vdd bs=4k count=1 oflag=direct",
        "dd if=/dev/urandom of=/dev/vdd bs=4k count=1 conv=fsync",
    ] {
        let output = guest.try_run(IO_LIMIT, command)?;
        let is_error = output.code != 0 && output.stderr.contains("Operation not permitted");
        ensure!(is_error, "`{command}` on a read-only disk: {output:?}");
    }
    ensure!(fs::read(path)? == content, "The image has changed");
    // The guest should read unchanged content.
    let start = guest.run("head -c 8192 /dev/vdd | od -An -v -tx1")?;
    let start: Result<Vec<u8>, _> =
        start.split_whitespace().map(|byte| u8::from_str_radix(byte, 16)).collect();
    ensure!(start? == content[..8192], "The guest reads other content than the image has");
    Ok(())
}

fn shape(guest: &Guest, node: &str) -> Result<Shape> {
    let number = |file: &str| -> Result<u64> {
        Ok(guest.run(&format!("cat /sys/block/{node}/{file}"))?.trim().parse()?)
    };
    let sector_bytes = number("queue/logical_block_size")?;
    // The kernel reports units of 512 bytes, whatever the device's sector size.
    let sectors = number("size")? * 512 / sector_bytes;
    Ok(Shape { sectors, sector_bytes: u32::try_from(sector_bytes)? })
}

/// Checks the content of an image after a guest has run `program` on it.
fn image_holds(path: &Path, shape: Shape, program: &str) -> Result<()> {
    let file = File::open(path)?;
    let holds = Outcome::of_history(shape, &[program])?
        .check(|first, into| Ok(file.read_exact_at(into, first * u64::from(shape.sector_bytes))?));
    holds.with_context(|| format!("Content of {}", path.display()))
}

/// Returns the flags of a process's open files with this path.
fn open_flags(pid: u32, path: &Path) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(need_proc(pid, "fd")?)? {
        let entry = entry?;
        // Other files may have been closed in the meantime.
        if fs::read_link(entry.path()).is_ok_and(|target| target == path) {
            let number =
                entry.file_name().into_string().ok().context("Descriptor that is not a number")?;
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            found.push(i32::from_str_radix(flags.context("fdinfo has no flags")?.trim(), 8)?);
        }
    }
    ensure!(!found.is_empty(), "Process {pid} has not opened {}", path.display());
    Ok(found)
}

/// The images are on ext4, because a tmpfs consists only of page cache. One image is opened with
/// O_DIRECT, and the other uses the page cache.
fn images_and_a_volume_retain_writes_discards_and_zeroes() -> Result<()> {
    let disk = Disk::create(128, 160)?;
    let [direct, cached] = ["direct", "cached"].map(|name| disk.dir().join(name));
    for path in [&direct, &cached] {
        File::create(path)?.set_len(32 * MIB)?;
    }
    let pool = Pool::create("64M")?;
    let volumes = [VolumeDisk::create(&pool, "data", 32, 4096)?];
    let volume = format!("pool={},name=data,interface=virtio-blk", pool.name());
    let guest = guest_with(&format!("path={},direct=on", direct.display()))
        .argument("--disk", &format!("path={}", cached.display()))
        .pm_volume(&volume)
        .boot()?;
    // Disks come before volumes.
    let all_disks_exist = "test -b /dev/vda && test -b /dev/vdb && test -b /dev/vdc";
    guest.wait_until_run("all disks exist", IO_LIMIT, all_disks_exist)?;
    for (path, is_direct) in [(&direct, true), (&cached, false)] {
        let flags = open_flags(guest.pid(), path)?;
        // The last partial unit of a direct image is read through the page cache.
        ensure!(
            flags.iter().any(|flags| flags & libc::O_DIRECT != 0) == is_direct,
            "{} is open with the flags {flags:#x?}",
            path.display()
        );
    }
    let writes = format!("writes:{}:400:1", seed(81)?);
    guest.run_within(IO_LIMIT, &write("/dev/vda", &writes))?;
    image_holds(&direct, shape(&guest, "vda")?, &writes)?;
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(IO_LIMIT, &check("/dev/vda", &[&writes]))?;
    // A quarter of these operations are discards and zeroing, which the disk itself performs. If a
    // disk did not support them, the guest's kernel would write the zeros.
    let discards = format!("discards:{}:600:2", seed(80)?);
    for (node, family, label) in [
        ("vdb", "foreshore_disk_operations_total", ("disk", "_disk1")),
        ("vdc", "foreshore_volume_operations_total", ("volume", "data")),
    ] {
        let device = format!("/dev/{node}");
        let (write, check) = (write(&device, &discards), check(&device, &[&discards]));
        guest.run_within(
            IO_LIMIT,
            &format!("{write} && echo 3 >/proc/sys/vm/drop_caches && {check}"),
        )?;
        let metrics = guest.metrics()?;
        let count = |operation, result| {
            metrics.value(family, &[label, ("operation", operation), ("result", result)])
        };
        let expected = discards.parse::<Program>()?.erasures(shape(&guest, node)?);
        for (operation, min) in
            [("discard", expected.discards), ("write-zeroes", expected.zeroings)]
        {
            let (done, failed) = (count(operation, "ok")?, count(operation, "error")?);
            ensure!(
                min > 20 && done >= min as f64 && failed == 0.0,
                "{node}: {done} of {min} requests to {operation} succeeded, {failed} failed"
            );
        }
    }
    image_holds(&cached, shape(&guest, "vdb")?, &discards)?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    volumes[0].verify(&[discards])
}

/// Copies the guest's own files to a new root file system on `device`.
pub(crate) fn make_root(guest: &Guest, device: &str) -> Result<()> {
    guest.run_within(
        IO_LIMIT,
        &format!(
            "mkfs.ext4 -q {device} && mkdir -p /mnt/r && mount -t ext4 {device} /mnt/r && cd / && \
             cp -a bin sbin usr lib* etc init root var /mnt/r && cd /mnt/r && mkdir -p dev proc sys tmp run mnt && \
             touch etc/root-on-disk && cd / && umount /mnt/r"
        ),
    )
    .map(drop)
}

pub(crate) fn runs_from(guest: &Guest, device: &str) -> Result<()> {
    let mounts = guest.run("cat /proc/mounts")?;
    ensure!(mounts.contains(&format!("{device} / ext4")), "The root is not on {device}:\n{mounts}");
    guest.run("echo here >/root/life && sync && cat /root/life")?;
    guest.no_kernel_complaints()
}

fn a_guest_lives_on_a_disk() -> Result<()> {
    let path = image("root", 192)?;
    let builder = guest_with(&format!("path={}", path.display()));
    let guest = builder.boot()?;
    wait_for_disk(&guest)?;
    make_root(&guest, "/dev/vda")?;
    guest.power_off()?;
    let builder = builder.cmdline("foreshore.root=/dev/vda");
    let guest = builder.boot()?;
    runs_from(&guest, "/dev/vda")?;
    guest.kill9()?;
    let guest = builder.boot()?;
    ensure!(guest.run("cat /root/life")?.trim() == "here", "Synced data are lost");
    guest.no_kernel_complaints()
}

/// After a failed flush, the content of the disk is unknown. Therefore, this write and every later
/// write should fail in the guest. Reads still work.
fn a_failed_flush_ends_all_writing_to_an_image_and_a_volume() -> Result<()> {
    let disk = Disk::create(640, 128)?;
    let path = disk.dir().join("image");
    File::create(&path)?.set_len(256 * MIB)?;
    let pool = with_volume(Pool::create_in(disk.dir(), "256M")?)?;
    let volume = format!("pool={},name=data,interface=virtio-blk", pool.name());
    let guest =
        guest_with(&format!("path={},num_queues=2", path.display())).pm_volume(&volume).boot()?;
    guest.wait_until_run("both disks exist", IO_LIMIT, "test -b /dev/vda && test -b /dev/vdb")?;
    let write = |node: &str, more: &str| format!("dd if=/dev/urandom of=/dev/{node} bs=1M {more}");
    for node in ["vda", "vdb"] {
        guest.run_within(IO_LIMIT, &write(node, "count=4 conv=fsync"))?;
    }
    let failed = || guest.metric("foreshore_disk_failed", &[("disk", "_disk0")]);
    ensure!(failed()? == 0.0, "A flush failed on an intact disk");
    ensure!(
        guest.metric("foreshore_disk_io_uring", &[("disk", "_disk0")])? == 1.0,
        "The disk does not use io_uring"
    );
    disk.fill_up()?;
    // The writes bypass the guest's page cache but not the host's, so that the flush fails. A guest
    // whose writes fail does not send a flush.
    for (node, writes) in [
        ("vda", "seek=64 count=8 oflag=direct conv=fsync"),
        ("vdb", "seek=4 count=24 oflag=direct conv=fsync"),
    ] {
        let output = guest.try_run(IO_LIMIT, &write(node, writes))?;
        let is_error = output.code != 0 && output.stderr.contains("Input/output error");
        ensure!(is_error, "fsync of {node} succeeded: {output:?}");
        let output = guest.try_run(IO_LIMIT, &write(node, "count=1 oflag=direct"))?;
        ensure!(output.code != 0, "A write to {node} succeeded after a lost write");
    }
    ensure!(failed()? == 1.0, "The metrics do not report the failed disk");
    let output =
        guest.try_run(IO_LIMIT, "dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync")?;
    ensure!(output.code != 0, "A second flush succeeded");
    guest.run("dd if=/dev/vda of=/dev/null bs=1M count=4 iflag=direct")?;
    let state = guest.get("vm.info")?["state"].clone();
    ensure!(state == "Running", "The VM is {state}");
    Ok(())
}
