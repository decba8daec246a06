//! Tests of `--pmem`: a file or device of the host as persistent memory, as in Cloud Hypervisor.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use guest_tests::guest::GuestBuilder;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Disk, Guest, LoopDevice, Pool};

use crate::pool_media::{DEVDAX, blank};
use crate::raw_volume::wait_for_bytes;
use crate::volume::IO_LIMIT;
use crate::zones::MIB;

guest_tests::tests![
    pmem_is_flushed_to_its_file: 300 on [V6_12, V6_1 extended] x 2,
    pmem_without_writes_leaves_its_file_alone (long) x 2,
    pmem_devices_come_in_their_order_and_survive_a_reboot: 300 x 2,
    pmem_may_be_a_devdax_device (extended) x 2,
];

/// Creates a file in which every MiB begins with `text`.
pub(crate) fn file(dir: &Path, name: &str, mib: u64, text: &str) -> Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let path = dir.join(name);
    let file = File::create(&path)?;
    file.set_len(mib * MIB)?;
    for at in 0..mib {
        file.write_all_at(format!("{text} {at}\n").as_bytes(), at * MIB)?;
    }
    Ok(path)
}

pub(crate) fn guest_with(pmem: &str) -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off").argument("--pmem", pmem)
}

fn line(guest: &Guest, device: &str, mib: u64) -> Result<String> {
    let read = format!("dd if={device} bs=1M skip={mib} count=1 2>/dev/null | head -n 1");
    Ok(guest.run(&read)?.trim_end().to_owned())
}

fn flushes(guest: &Guest, result: &str) -> Result<f64> {
    let labels = [("pmem", "_pmem0"), ("result", result)];
    guest.metric("foreshore_pmem_flushes_total", &labels)
}

fn pmem_is_flushed_to_its_file() -> Result<()> {
    let disk = Disk::create(384, 1024)?;
    let path = file(disk.dir(), "file", 32, "host")?;
    let guest = guest_with(&format!("file={}", path.display())).boot()?;
    wait_for_bytes(&guest)?;
    ensure!(guest.run("cat /sys/block/pmem0/size")?.trim() == "65536", "Not 32 MiB");
    ensure!(
        line(&guest, "/dev/pmem0", 31)? == "host 31",
        "The guest does not read the file's content"
    );
    let before = flushes(&guest, "ok")?;
    guest.run_within(IO_LIMIT, "guest-tool write-blocks /dev/pmem0 buffered 16 600 1 1")?;
    guest.run("echo guest | dd of=/dev/pmem0 bs=1M seek=31 conv=sync,fsync")?;
    ensure!(flushes(&guest, "ok")? > before, "Two syncs caused no flush");
    ensure!(flushes(&guest, "error")? == 0.0, "Flushes have failed");
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    ensure!(
        fs::read(&path)?[31 * MIB as usize..].starts_with(b"guest\n"),
        "The guest's data are not in the file"
    );
    Ok(())
}

fn pmem_without_writes_leaves_its_file_alone() -> Result<()> {
    let path = file(&this_tests_dir(), "file", 16, "host")?;
    let before = fs::read(&path)?;
    let pmem = format!("file={},discard_writes=on", path.display());
    // VMs that only read the file may share it.
    let guests = [guest_with(&pmem).boot()?, guest_with(&pmem).boot()?];
    for (guest, text) in guests.iter().zip(["first", "second"]) {
        wait_for_bytes(guest)?;
        ensure!(
            line(guest, "/dev/pmem0", 1)? == "host 1",
            "The guest does not read the file's content"
        );
        guest.run(&format!("echo {text} | dd of=/dev/pmem0 bs=1M seek=1 conv=sync,fsync"))?;
    }
    for (guest, text) in guests.iter().zip(["first", "second"]) {
        guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
        ensure!(line(guest, "/dev/pmem0", 1)? == text, "{text} does not see its own writes");
        guest.no_kernel_complaints()?;
    }
    // While it is read, no other VM may write to it.
    let writer = guest_with(&format!("file={}", path.display()));
    let refusal = writer.name("writer").expect_refusal()?;
    ensure!(refusal.message.contains("in use by process"), "{}", refusal.message);
    ensure!(fs::read(&path)? == before, "The file has changed");
    for guest in guests {
        guest.power_off()?;
    }
    ensure!(fs::read(&path)? == before, "The file has changed");
    Ok(())
}

/// Uses one volume, followed by two files, a block device and an unnamed file. All sizes differ.
fn pmem_devices_come_in_their_order_and_survive_a_reboot() -> Result<()> {
    let dir = this_tests_dir();
    let unnamed = dir.join("unnamed");
    fs::create_dir_all(&unnamed)?;
    let pool = Pool::create("128M")?;
    let device = LoopDevice::create(18)?;
    let (a, b) = (file(&dir, "a", 4, "a")?, file(&dir, "b", 16, "b")?);
    let guest = guest_with(&format!("file={}", a.display()))
        .pm_volume(&format!("pool={},name=data,size=22M,create=on,format=raw", pool.name()))
        .argument("--pmem", &format!("file={},size=8M,id=second,discard_writes=on", b.display()))
        .argument("--pmem", &format!("file={}", device.path().display()))
        .argument("--pmem", &format!("file={},size=12M", unnamed.display()))
        .boot()?;
    let last_exists = || guest.wait_until_run("/dev/pmem4 exists", IO_LIMIT, "test -b /dev/pmem4");
    last_exists()?;
    let sizes =
        guest.run("cd /sys/block && cat pmem0/size pmem1/size pmem2/size pmem3/size pmem4/size")?;
    let sizes: Vec<_> =
        sizes.lines().map(|sectors| Ok(sectors.parse::<u64>()? / 2048)).collect::<Result<_>>()?;
    ensure!(sizes == [22, 4, 8, 18, 12], "Sizes in MiB: {sizes:?}");
    ensure!(line(&guest, "/dev/pmem1", 3)? == "a 3", "/dev/pmem1 is not file a");
    ensure!(line(&guest, "/dev/pmem2", 7)? == "b 7", "/dev/pmem2 is not file b");
    let config = guest.get("vm.info")?["config"]["pmem"].clone();
    ensure!(
        config.as_array().is_some_and(|devices| devices.len() == 4),
        "Unexpected configuration in vm.info: {config}"
    );
    ensure!(
        config[1]["discard_writes"] == true && config[1]["size"] == 8 * MIB,
        "Unexpected configuration in vm.info: {config}"
    );
    let metrics = guest.metrics()?;
    let size = |pmem| metrics.value("foreshore_pmem_size_bytes", &[("pmem", pmem)]);
    ensure!(
        size("_pmem0")? == (4 * MIB) as f64 && size("second")? == (8 * MIB) as f64,
        "The metrics have wrong sizes"
    );
    let durability = [("pmem", "second"), ("durability", "discarded")];
    ensure!(
        metrics.value("foreshore_pmem_info", &durability)? == 1.0,
        "The metrics have a wrong durability"
    );
    // If a directory is given, the file has no name. The next boot of the VM should use the same
    // file.
    ensure!(fs::read_dir(&unnamed)?.count() == 0, "The file has a name");
    guest.run("echo guest | dd of=/dev/pmem4 bs=1M seek=5 conv=sync,fsync")?;
    guest.reboot_from_inside()?;
    last_exists()?;
    ensure!(line(&guest, "/dev/pmem4", 5)? == "guest", "The reboot emptied /dev/pmem4");
    ensure!(line(&guest, "/dev/pmem1", 3)? == "a 3", "/dev/pmem1 is not file a after a reboot");
    guest.no_kernel_complaints()
}

fn pmem_may_be_a_devdax_device() -> Result<()> {
    let device = blank(DEVDAX)?;
    let guest = guest_with(&format!("file={},size=64M", device.display())).boot()?;
    wait_for_bytes(&guest)?;
    ensure!(guest.run("cat /sys/block/pmem0/size")?.trim() == "131072", "Not 64 MiB");
    guest.run_within(IO_LIMIT, "guest-tool write-blocks /dev/pmem0 direct 0 1000 4 1")?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    let guest = guest_with(&format!("file={},size=64M", device.display())).boot()?;
    wait_for_bytes(&guest)?;
    guest.run_within(IO_LIMIT, "guest-tool check-blocks /dev/pmem0 0 1000 4 1")?;
    guest.power_off()
}
