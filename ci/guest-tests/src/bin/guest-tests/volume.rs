//! Tests of volumes as disks: content should be durable through every interface.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script, complaints};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};

use crate::blocks;
use crate::volume_flush::{flushes, has_hints};

guest_tests::tests![
    nvdimm_holds_with_four_cpus_and_over_a_kill: 400 x several,
    nvdimm_holds_with_two_cpus_on_6_1: 300 on [V6_1] x 2 => holds("nvdimm"),
    virtio_pmem_holds_with_one_cpu: 300 (long) => holds("virtio-pmem"),
    virtio_pmem_forced_on_two_cpus_breaks_the_guest: 300 x 2,
    a_readonly_volume_takes_no_writes (long),
    volumes_stay_across_a_reboot: 300 (long),
];

pub(crate) const IO_LIMIT: Duration = Duration::from_secs(180);

pub(crate) fn pool_with_volume() -> Result<Pool> {
    with_volume(Pool::create("256M")?)
}

pub(crate) fn with_volume(pool: Pool) -> Result<Pool> {
    pool.create_volume("data", "96M")?;
    Ok(pool)
}

pub(crate) fn guest_with(pool: &Pool, options: &str) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M")
        .pressure("off")
        .pm_volume(&format!("pool={},name=data,{options}", pool.name()))
}

pub(crate) fn wait_for_disk(guest: &Guest) -> Result<()> {
    guest.wait_until_run("/dev/pmem0s exists", IO_LIMIT, "test -b /dev/pmem0s")
}

/// Runs direct and buffered writers concurrently on separate thirds of the disk, together with a
/// load that swaps. Each writer verifies its blocks, and all blocks are verified at the end.
fn write_hard(guest: &Guest, rounds: u32) -> Result<()> {
    wait_for_disk(guest)?;
    let load = guest.start_script(IO_LIMIT, "exec guest-tool hog 280")?;
    blocks::write(guest, "/dev/pmem0s", ["direct", "buffered", "direct"], rounds)?;
    drop(load);
    blocks::check(guest, "/dev/pmem0s", rounds)
}

fn holds(interface: &str) -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = guest_with(&pool, &format!("interface={interface}"));
    let guest = written_hard(guest, interface)?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Returns a guest that has written and verified a lot of data on its volume.
fn written_hard(guest: GuestBuilder, interface: &str) -> Result<Guest> {
    let guest = guest.cmdline("foreshore.zram=256M").boot()?;
    write_hard(&guest, 2)?;
    // The pool is on tmpfs, so flushes have no media to reach.
    if interface == "nvdimm" {
        ensure!(!has_hints(&guest)?, "The guest has flush hints");
        ensure!(flushes(&guest, "ok")? == 0.0, "The VMM received flushes");
    }
    guest.no_kernel_complaints()?;
    Ok(guest)
}

fn nvdimm_holds_with_four_cpus_and_over_a_kill() -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = written_hard(guest_with(&pool, "interface=nvdimm").cpus(4), "nvdimm")?;
    make_file_system(&guest)?;
    guest.run(MOUNT)?;
    let acknowledged = write_files_and_kill(guest, 15).context("Files before the kill")?;
    pool.check().context("The pool after the kill")?;
    let guest = guest_with(&pool, "interface=nvdimm").cpus(2).boot()?;
    wait_for_disk(&guest)?;
    guest.run(MOUNT)?;
    check_acknowledged(&guest, &acknowledged).context("Files after the kill")?;
    guest.run_within(IO_LIMIT, "umount /mnt/data && e2fsck -fn /dev/pmem0s")?;
    guest.no_kernel_complaints()
}

/// Shows the bug in the guest that is the reason for refusing this configuration. If it did not
/// occur here, the tests above could not detect it.
fn virtio_pmem_forced_on_two_cpus_breaks_the_guest() -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = guest_with(&pool, "interface=virtio-pmem,force=on").boot()?;
    wait_for_disk(&guest)?;
    let writers: Vec<Script> = [(0, 1), (8192, 2)]
        .into_iter()
        .map(|(first, seed)| {
            let command =
                format!("exec guest-tool write-blocks /dev/pmem0s direct {first} 600 {seed} 1000");
            guest.start_script(IO_LIMIT, &command)
        })
        .collect::<Result<_>>()?;
    guest.wait_until("the guest's kernel has a BUG", IO_LIMIT, || {
        Ok(complaints(&guest.console_log()?).iter().any(|line| line.contains("BUG: ")))
    })?;
    drop(writers);
    Ok(())
}

/// Creates an ext4 file system with as few writes as possible. If each write costs four flushes of
/// a disk, even these take a minute.
pub(crate) fn make_file_system(guest: &Guest) -> Result<()> {
    let make = "mkfs.ext4 -q -N 1024 -E lazy_journal_init=1,nodiscard /dev/pmem0s";
    guest.run_within(IO_LIMIT, make).map(drop)
}

pub(crate) const MOUNT: &str = "mkdir -p /mnt/data && mount -t ext4 /dev/pmem0s /mnt/data";

/// Writes files with fsync until at least `count` files are acknowledged. Then kills the VMM while
/// the next file is written. Returns a line for each acknowledged file, with its name and its hash.
pub(crate) fn write_files_and_kill(guest: Guest, count: u32) -> Result<String> {
    let mut acknowledged = String::new();
    let mut writer =
        guest.start_script(IO_LIMIT, "exec guest-tool write-files /mnt/data/files 20000")?;
    guest.no_kernel_complaints()?;
    for _ in 0..count {
        let line = writer.next_line().context("The writer ended")?;
        acknowledged += &(line + "\n");
    }
    // The writer runs until the VMM is dead.
    guest.kill9()?;
    while let Some(line) = writer.next_line() {
        acknowledged += &(line + "\n");
    }
    Ok(acknowledged)
}

/// Checks that every acknowledged file exists in the VM and is complete.
pub(crate) fn check_acknowledged(guest: &Guest, acknowledged: &str) -> Result<()> {
    // The list is kept outside of the VM and is copied into it for the check.
    fs::write(this_tests_dir().join("acknowledged.log"), acknowledged)?;
    guest.run("mkdir -p /mnt/data/files && : >/tmp/list")?;
    for lines in acknowledged.lines().collect::<Vec<_>>().chunks(200) {
        guest.run(&format!("cat >>/tmp/list <<'END'\n{}\nEND", lines.join("\n")))?;
    }
    let checked = guest.run_within(IO_LIMIT, "guest-tool check-files /mnt/data/files /tmp/list")?;
    let expected = format!("checked {}\n", acknowledged.lines().count());
    ensure!(checked == expected, "check-files printed {checked:?} instead of {expected:?}");
    Ok(())
}

/// Returns the guest's BTT disks, from the largest to the smallest. The guest finds them in any
/// order.
fn btt_disks(guest: &Guest, count: usize) -> Result<Vec<String>> {
    let disks: Vec<_> = (0..count).map(|number| format!("pmem{number}s")).collect();
    let all_disks_exist: Vec<_> = disks.iter().map(|disk| format!("test -b /dev/{disk}")).collect();
    guest.wait_until_run("all disks exist", IO_LIMIT, &all_disks_exist.join(" && "))?;
    let size = |disk: String| -> Result<(u64, String)> {
        Ok((guest.run(&format!("cat /sys/block/{disk}/size"))?.trim().parse()?, disk))
    };
    let mut sizes = disks.into_iter().map(size).collect::<Result<Vec<_>>>()?;
    sizes.sort();
    Ok(sizes.into_iter().rev().map(|(_, disk)| disk).collect())
}

/// Tests one volume per interface in one guest.
fn a_readonly_volume_takes_no_writes() -> Result<()> {
    let pool = pool_with_volume()?;
    pool.create_volume("smaller", "48M")?;
    pool.create_volume("smallest", "32M")?;
    let before = fs::read(pool.path())?;
    let volume = |name: &str, interface: &str| {
        format!("pool={},name={name},interface={interface},readonly=on", pool.name())
    };
    let guest = guest_with(&pool, "interface=nvdimm,readonly=on")
        .pm_volume(&volume("smaller", "virtio-pmem"))
        .pm_volume(&volume("smallest", "virtio-blk"))
        .boot()?;
    let btt = btt_disks(&guest, 2)?;
    guest.wait_until_run("/dev/vda exists", IO_LIMIT, "test -b /dev/vda")?;
    // If an interface cannot mark its disk as read-only, writes should fail.
    for (interface, disk, marked) in
        [("nvdimm", &*btt[0], "1"), ("virtio-pmem", &*btt[1], "0"), ("virtio-blk", "vda", "1")]
    {
        takes_no_writes(&guest, disk, marked).with_context(|| format!("interface={interface}"))?;
    }
    guest.power_off()?;
    pool.check()?;
    // The first chunk identifies a VM's use of the pool. The guest could have written to all other
    // chunks.
    let after = fs::read(pool.path())?;
    let changed = before
        .chunks(1 << 21)
        .zip(after.chunks(1 << 21))
        .skip(1)
        .filter(|(old, new)| old != new)
        .count();
    ensure!(
        before.len() == after.len() && changed == 0,
        "The guest changed {changed} chunks of the pool"
    );
    Ok(())
}

fn takes_no_writes(guest: &Guest, disk: &str, marked: &str) -> Result<()> {
    let found = guest.run(&format!("cat /sys/block/{disk}/ro"))?;
    ensure!(found.trim() == marked, "/sys/block/{disk}/ro is {} instead of {marked}", found.trim());
    for mode in ["oflag=direct", "conv=fsync"] {
        let write = format!("dd if=/dev/urandom of=/dev/{disk} bs=4096 count=4 {mode}");
        let output = guest.try_run(IO_LIMIT, &write)?;
        ensure!(output.code != 0, "A write to a read-only volume succeeded: {write}");
    }
    guest.run(&format!("dd if=/dev/{disk} of=/dev/null bs=4096 count=16")).map(drop)
}

/// Uses one volume per interface. A reboot builds a new machine. It should not open the volumes
/// before the old machine has closed them.
fn volumes_stay_across_a_reboot() -> Result<()> {
    let pool = pool_with_volume()?;
    pool.create_volume("more", "32M")?;
    let guest = guest_with(&pool, "interface=virtio-pmem")
        .pm_volume(&format!("pool={},name=more,interface=nvdimm", pool.name()))
        .boot()?;
    for (seed, disk) in (1..).zip(btt_disks(&guest, 2)?) {
        guest.run(&format!("guest-tool write-blocks /dev/{disk} direct 0 200 {seed} 1"))?;
    }
    guest.reboot_from_inside()?;
    for (seed, disk) in (1..).zip(btt_disks(&guest, 2)?) {
        guest.run(&format!("guest-tool check-blocks /dev/{disk} 0 200 {seed} 1"))?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}
