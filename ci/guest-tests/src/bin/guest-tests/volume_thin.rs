//! Tests of thin volumes. Only the first write of the guest to a chunk allocates it, and discards
//! release chunks.

use std::fs;

use anyhow::{Context, Result, ensure};
use guest_tests::pool::pmvol;
use guest_tests::traced_thread::TracedThread;
use guest_tests::user::need_root;
use guest_tests::{Guest, GuestBuilder, Pool, Script};
use serde_json::json;

use crate::blocks;
use crate::volume::{IO_LIMIT, guest_with};
use crate::zones::{MIB, pool_info, wait_until_plugged, zone};

guest_tests::tests![
    only_writes_allocate_chunks_of_a_thin_volume: 300 x 2,
    only_writes_allocate_chunks_of_a_thin_volume_on_6_1: 300 (long) on [V6_1] x 2 =>
        only_writes_allocate_chunks_of_a_thin_volume(),
    fstrim_releases_the_chunks_of_deleted_files: 300 x 2,
    compaction_releases_the_chunks_of_scattered_files: 600 x 2,
    thin_volume_is_converted_and_becomes_an_nvdimm: 400 (long) x 2,
    only_stores_allocate_chunks_of_a_thin_nvdimm: 400 on [V6_12, V6_1 long] x 2 =>
        only_stores_allocate_chunks("auto", "nvdimm"),
    only_stores_allocate_chunks_by_thin_virtio_pmem: 400 (long) on [V6_12, V6_1] =>
        only_stores_allocate_chunks("virtio-pmem", "virtio-pmem"),
    thin_nvdimm_keeps_files_over_reboots_and_kills: 600 on [V6_12, V6_1 long] x 2,
    vmm_with_a_waiting_store_is_killed: 300 x 2 => killed_while_a_store_waits("nvdimm"),
    vmm_with_a_waiting_store_by_virtio_pmem_is_killed: 300 (long) =>
        killed_while_a_store_waits("virtio-pmem"),
    thin_volume_gets_space_that_was_lent_as_memory: 600 x 2,
    full_pool_pauses_the_vm_until_memory_is_returned: 400 x 2,
    full_pool_pauses_the_vm_until_it_grows: 400 x 2,
    full_pool_pauses_the_vm_until_it_grows_on_6_1: 400 (extended) on [V6_1] x 2 =>
        full_pool_pauses_the_vm_until_it_grows(),
    write_to_a_full_pool_fails_with_on_full_error: 300 x 2,
];

const THIN: &str = "size=96M,create=on";

/// Thin volume whose discards the VMM receives.
const THIN_DISK: &str = "size=96M,create=on,interface=virtio-blk";

/// Step of mapping a thin volume that needs root.
pub(crate) const USERFAULTS: &str = "open /dev/userfaultfd";

fn boot(builder: GuestBuilder, device: &str) -> Result<Guest> {
    let guest = builder.boot()?;
    guest.wait_until_run("the disk exists", IO_LIMIT, &format!("test -b {device}"))?;
    Ok(guest)
}

/// Allocated bytes of the volume, which a compaction may change at any time.
fn current_allocated_bytes(guest: &Guest) -> Result<u64> {
    let volumes = guest.get("vm.volumes")?;
    let bytes = volumes["volumes"][0]["allocated_bytes"].as_u64();
    bytes.with_context(|| format!("No allocated_bytes: {volumes}"))
}

/// Allocated bytes of the volume. Checks that the API and the metrics report the same.
fn allocated_bytes(guest: &Guest) -> Result<u64> {
    let bytes = current_allocated_bytes(guest)?;
    let labels = [("volume", "data"), ("interface", "virtio-blk")];
    let metric = guest.metric("foreshore_volume_allocated_bytes", &labels)?;
    ensure!(metric == bytes as f64, "The metric is {metric}, but the API reports {bytes}");
    Ok(bytes)
}

/// Live bytes of the volume. Checks that the API and the metrics report the same.
fn live_bytes(guest: &Guest) -> Result<u64> {
    let volumes = guest.get("vm.volumes")?;
    let bytes = volumes["volumes"][0]["live_bytes"].as_u64();
    let bytes = bytes.with_context(|| format!("No live_bytes: {volumes}"))?;
    let labels = [("volume", "data"), ("interface", "virtio-blk")];
    let metric = guest.metric("foreshore_volume_live_bytes", &labels)?;
    ensure!(metric == bytes as f64, "The metric is {metric}, but the API reports {bytes}");
    Ok(bytes)
}

fn only_writes_allocate_chunks_of_a_thin_volume() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, THIN_DISK), "/dev/vda")?;
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"][0]["interface"] == "virtio-blk", "{volumes}");
    let empty = allocated_bytes(&guest)?;
    ensure!(empty <= 8 * MIB, "{empty} bytes are allocated in a new volume");

    // udev and the kernel have already read the first sectors.
    guest.run_within(IO_LIMIT, "dd if=/dev/vda of=/dev/null bs=1M")?;
    guest.run_within(IO_LIMIT, "blkdiscard /dev/vda")?;
    ensure!(allocated_bytes(&guest)? == empty, "Reads or discards have allocated chunks");

    ensure!(live_bytes(&guest)? == 0, "{}", guest.get("vm.volumes")?);

    let write = "dd if=/dev/urandom of=/dev/vda bs=1M count=20 seek=40 oflag=direct";
    guest.run_within(IO_LIMIT, write)?;
    ensure!(live_bytes(&guest)? == 20 * MIB, "{}", guest.get("vm.volumes")?);
    let written = allocated_bytes(&guest)?;
    // The data may begin and end within chunks. The map and the lanes' blocks need a few more.
    ensure!((20 * MIB..=32 * MIB).contains(&(written - empty)), "{empty} bytes grew to {written}");
    guest.run_within(IO_LIMIT, write)?;
    ensure!(live_bytes(&guest)? == 20 * MIB, "{}", guest.get("vm.volumes")?);
    let again = allocated_bytes(&guest)?;
    // 256 lanes have a block each, which a write exchanges with the block of its sector.
    ensure!(again - written <= 2 * MIB, "Overwrites increased {written} bytes to {again}");
    guest.run_within(IO_LIMIT, "blkdiscard -o 52428800 -l 5242880 /dev/vda")?;
    ensure!(live_bytes(&guest)? == 15 * MIB, "{}", guest.get("vm.volumes")?);
    let left = allocated_bytes(&guest)?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    let info = pool.info()?;
    ensure!(info["promised_bytes"] == 96 * MIB, "{info}");
    ensure!(info["volume_bytes"] == left, "{info}");
    Ok(())
}

fn fstrim_releases_the_chunks_of_deleted_files() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, THIN_DISK), "/dev/vda")?;
    guest.run_within(
        IO_LIMIT,
        "mkfs.ext4 -q /dev/vda && mkdir -p /mnt/t && mount -t ext4 /dev/vda /mnt/t && \
         dd if=/dev/urandom of=/mnt/t/keep bs=1M count=2 && sync && \
         sha256sum /mnt/t/keep > /tmp/sum",
    )?;
    let empty = allocated_bytes(&guest)?;
    for round in 1..=2 {
        guest.run_within(IO_LIMIT, "dd if=/dev/urandom of=/mnt/t/file bs=1M count=48 && sync")?;
        let full = allocated_bytes(&guest)?;
        ensure!(full >= empty + 40 * MIB, "Round {round}: {empty} bytes grew only to {full}");
        guest.run_within(IO_LIMIT, "rm /mnt/t/file && sync && fstrim /mnt/t")?;
        let trimmed = allocated_bytes(&guest)?;
        // Chunks that contain a part of the metadata or of the other file stay.
        ensure!(trimmed <= empty + 12 * MIB, "Round {round}: {full} bytes fell only to {trimmed}");
        let labels = [("volume", "data"), ("interface", "virtio-blk")];
        let released = guest.metric("foreshore_volume_released_bytes_total", &labels)?;
        ensure!(released >= (full - trimmed) as f64, "{released} bytes were released");
    }
    guest.run_within(
        IO_LIMIT,
        "umount /mnt/t && e2fsck -fn /dev/vda && mount -t ext4 /dev/vda /mnt/t && \
         sha256sum -c /tmp/sum",
    )?;
    let before_kill = allocated_bytes(&guest)?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    let info = pool.info()?;
    ensure!(info["volume_bytes"].as_u64() >= Some(before_kill), "{info}");
    ensure!(info["promised_bytes"] == 96 * MIB, "{info}");
    Ok(())
}

/// Each chunk keeps one of 16 files, so fstrim releases almost no chunk. The pool has less free
/// space than `storage_high`, so the VMM compacts.
fn compaction_releases_the_chunks_of_scattered_files() -> Result<()> {
    let pool = Pool::create("128M")?;
    let guest = boot(guest_with(&pool, THIN_DISK), "/dev/vda")?;
    guest.run_within(
        IO_LIMIT,
        "mkfs.ext4 -q /dev/vda && mkdir -p /mnt/t && mount -t ext4 /dev/vda /mnt/t && sync",
    )?;
    let empty = current_allocated_bytes(&guest)?;
    // 48 MiB in 384 files.
    guest.run_within(
        IO_LIMIT,
        "cd /mnt/t && for n in $(seq 384); do \
             dd if=/dev/urandom of=$n bs=128k count=1 2>/dev/null || exit 1; \
         done && sync",
    )?;
    let full = current_allocated_bytes(&guest)?;
    ensure!(full >= empty + 40 * MIB, "{empty} bytes grew only to {full}");
    guest.run_within(
        IO_LIMIT,
        "cd /mnt/t && for n in $(seq 384); do [ $((n % 16)) = 0 ] || rm $n || exit 1; done && \
         sha256sum [0-9]* > sums && sync && fstrim /mnt/t",
    )?;
    // 45 MiB were deleted. Meanwhile, the file system may initialize its inode tables.
    guest.wait_until("the chunks of deleted files are released", 2 * IO_LIMIT, || {
        Ok(current_allocated_bytes(&guest)? <= full - 28 * MIB)
    })?;
    let labels = [("volume", "data"), ("interface", "virtio-blk")];
    let moved = guest.metric("foreshore_volume_compacted_bytes_total", &labels)?;
    ensure!(moved > 0.0, "The compaction has moved no data");
    guest.run_within(
        IO_LIMIT,
        "cd / && umount /mnt/t && e2fsck -fn /dev/vda && mount -t ext4 /dev/vda /mnt/t && \
         cd /mnt/t && sha256sum -c sums",
    )?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    guest.run_within(
        IO_LIMIT,
        "mkdir -p /mnt/t && mount -t ext4 /dev/vda /mnt/t && cd /mnt/t && sha256sum -c sums",
    )?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Bytes of the volume that the metrics report as allocated.
fn mapped_bytes(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_volume_allocated_bytes", &[("volume", "data")])
}

fn only_stores_allocate_chunks(interface: &str, chosen: &str) -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("256M")?;
    let guest = guest_with(&pool, &format!("{THIN},interface={interface}"));
    let guest = boot(guest, "/dev/pmem0s")?;
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"][0]["interface"] == chosen, "{volumes}");
    let empty = mapped_bytes(&guest)?;
    ensure!(empty <= (8 * MIB) as f64, "{empty} bytes are allocated in a new volume");
    // Reads of all sectors also read all of the map.
    guest.run_within(IO_LIMIT, "dd if=/dev/pmem0s bs=1M | cmp -n 94371840 - /dev/zero")?;
    ensure!(mapped_bytes(&guest)? == empty, "Reads have allocated chunks");

    let write = "dd if=/dev/urandom of=/tmp/data bs=1M count=20 && \
                 dd if=/tmp/data of=/dev/pmem0s bs=1M seek=40 oflag=direct && \
                 dd if=/dev/pmem0s bs=1M skip=40 count=20 iflag=direct | cmp - /tmp/data";
    guest.run_within(IO_LIMIT, write)?;
    let written = mapped_bytes(&guest)? - empty;
    ensure!((20 * MIB) as f64 <= written, "Only {written} bytes were allocated");
    ensure!(written <= (48 * MIB) as f64, "{written} bytes were allocated");
    let fills = |guest: &Guest| {
        guest.metric("foreshore_volume_hole_fill_duration_seconds_count", &[("volume", "data")])
    };
    let filled = fills(&guest)?;
    ensure!(filled >= 10.0, "Only {filled} holes were filled");
    let rewrite = "dd if=/tmp/data of=/dev/pmem0s bs=1M seek=40 oflag=direct";
    guest.run_within(IO_LIMIT, rewrite)?;
    let again = fills(&guest)?;
    ensure!(again <= filled + 1.0, "Overwrites filled {filled} to {again} holes");
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn thin_nvdimm_keeps_files_over_reboots_and_kills() -> Result<()> {
    const MOUNT: &str = "mkdir -p /mnt/t && mount -t ext4 /dev/pmem0s /mnt/t";
    need_root(USERFAULTS)?;
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, &format!("{THIN},interface=nvdimm")), "/dev/pmem0s")?;
    guest.run_within(
        IO_LIMIT,
        &format!(
            "mkfs.ext4 -q -E nodiscard /dev/pmem0s && {MOUNT} && \
             dd if=/dev/urandom of=/mnt/t/first bs=1M count=24 && cd /mnt/t && \
             sha256sum first > first.sum && sync && cd / && umount /mnt/t"
        ),
    )?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check()?;
    let again = || boot(guest_with(&pool, "interface=nvdimm"), "/dev/pmem0s");
    let guest = again()?;
    guest.run_within(
        IO_LIMIT,
        &format!(
            "{MOUNT} && cd /mnt/t && sha256sum -c first.sum && \
             dd if=/dev/urandom of=second bs=1M count=24 && sha256sum second > second.sum && sync"
        ),
    )?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    // Our engine reads data that the guest's driver wrote, and the reverse.
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    guest.run_within(
        IO_LIMIT,
        "mkdir -p /mnt/t && mount -t ext4 /dev/vda /mnt/t && cd /mnt/t && \
         sha256sum -c first.sum second.sum && rm first && sync && fstrim . && cd / && umount /mnt/t",
    )?;
    guest.power_off()?;
    let guest = again()?;
    guest.run_within(
        IO_LIMIT,
        &format!(
            "e2fsck -fn /dev/pmem0s && {MOUNT} && cd /mnt/t && sha256sum -c second.sum && \
             dd if=/dev/urandom of=third bs=1M count=24 && sync"
        ),
    )?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Descriptors of a process, each with its target.
fn descriptors(pid: u32) -> Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        // The process may have closed the descriptor.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        found.push((entry.file_name().to_string_lossy().parse()?, target.display().to_string()));
    }
    Ok(found)
}

/// The thread that fills holes is stopped. The kernel ends a VM only when its page faults have
/// ended, so the kill succeeds only if the userfaultfd is closed first.
fn killed_while_a_store_waits(interface: &str) -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("256M")?;
    let guest = guest_with(&pool, &format!("{THIN},interface={interface}"));
    let guest = boot(guest, "/dev/pmem0s")?;
    let fds = descriptors(guest.pid())?;
    let (userfaults, _) = fds
        .iter()
        .find(|(_, target)| target == "anon_inode:[userfaultfd]")
        .with_context(|| format!("No userfaultfd: {fds:?}"))?;
    let kvm = fds.iter().filter(|(_, target)| target.starts_with("anon_inode:kvm-"));
    ensure!(kvm.clone().count() > 1, "No descriptors of KVM: {fds:?}");
    ensure!(kvm.clone().all(|(fd, _)| fd < userfaults), "{fds:?}");

    let stopped = TracedThread::stop(guest.pid(), "_holes")?;
    let write = "dd if=/dev/zero of=/dev/pmem0s bs=1M count=8 seek=40 oflag=direct";
    let script = guest.start_script(IO_LIMIT, write)?;
    let info = format!("/proc/{}/fdinfo/{userfaults}", guest.pid());
    guest.wait_until("a store waits", IO_LIMIT, || {
        Ok(fs::read_to_string(&info)?
            .lines()
            .any(|line| line.strip_prefix("total:").is_some_and(|count| count.trim() != "0")))
    })?;
    guest.kill_now()?;
    stopped.wait_for_end()?;
    guest.kill9()?;
    drop(script);
    pool.check()?;
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    guest.run_within(IO_LIMIT, "dd if=/dev/vda bs=1M | cmp -n 94371840 - /dev/zero")?;
    guest.power_off()
}

fn thin_volume_is_converted_and_becomes_an_nvdimm() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, THIN_DISK), "/dev/vda")?;
    blocks::write(&guest, "/dev/vda", ["direct", "buffered", "direct"], 2)?;
    guest.kill9()?;
    pool.check()?;
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    blocks::check(&guest, "/dev/vda", 2)?;
    guest.power_off()?;

    pmvol(&["volume", "convert", &pool.name(), "data", "--thick"])?;
    let info = pool.info()?;
    ensure!(info["volume_bytes"] == 96 * MIB, "{info}");
    // The guest's own driver should be able to read the data that our engine wrote.
    let guest = boot(guest_with(&pool, "interface=nvdimm"), "/dev/pmem0s")?;
    blocks::check(&guest, "/dev/pmem0s", 2)?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;

    pmvol(&["volume", "convert", &pool.name(), "data", "--thin"])?;
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    blocks::check(&guest, "/dev/vda", 2)?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Free bytes of the pool, including those that must be erased first.
fn free_bytes(guest: &Guest) -> Result<u64> {
    let pool = pool_info(guest)?;
    let number = |key: &str| pool[key].as_u64().with_context(|| format!("No {key}: {pool}"));
    Ok(number("free_bytes")? + number("scrubbing_bytes")?)
}

/// Memory takes the whole pool above the watermark `low`. Then the volume is written, so the
/// governor should recall memory. No step of the writes exceeds the watermark.
fn thin_volume_gets_space_that_was_lent_as_memory() -> Result<()> {
    const PM_MIB: u64 = 448;
    const LOW_MIB: u64 = 48;
    const STEP_MIB: u64 = 16;
    let pool = Pool::create("512M")?;
    let marks = format!("storage_min=16M,storage_low={LOW_MIB}M,storage_high=96M,spill=256M");
    let guest = guest_with(&pool, "size=256M,create=on,interface=virtio-blk")
        .pm_memory(&format!("pool={},size={PM_MIB}M,{marks}", pool.name()))
        .pressure(&format!("fixed,size={PM_MIB}M"));
    let guest = boot(guest, "/dev/vda")?;
    wait_until_plugged(&guest, "pm", PM_MIB * MIB, IO_LIMIT)?;
    ensure!(free_bytes(&guest)? < 2 * LOW_MIB * MIB, "{}", guest.get("pool.info")?);

    for offset_mib in (0..192).step_by(STEP_MIB as usize) {
        guest.wait_until("the space of the next writes is free", IO_LIMIT, || {
            Ok(free_bytes(&guest)? >= LOW_MIB * MIB)
        })?;
        let write = format!(
            "dd if=/dev/urandom of=/tmp/data bs=1M count={STEP_MIB} && \
             dd if=/tmp/data of=/dev/vda bs=1M seek={offset_mib} oflag=direct && \
             dd if=/dev/vda bs=1M skip={offset_mib} count={STEP_MIB} iflag=direct | cmp - /tmp/data"
        );
        guest.run_within(IO_LIMIT, &write)?;
    }
    let (pm, written) = (zone(&guest, "pm")?, allocated_bytes(&guest)?);
    ensure!(written >= 192 * MIB, "Only {written} bytes are allocated");
    ensure!(pm.plugged_bytes <= (PM_MIB - 128) * MIB, "{} bytes are plugged", pm.plugged_bytes);
    let labels = [("policy", "fixed"), ("direction", "shrink"), ("reason", "storage_low")];
    ensure!(guest.metric("foreshore_pressure_plans_total", &labels)? > 0.0, "No recall");

    // A client cannot get the space that volumes still need either.
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": PM_MIB * MIB }))?;
    guest.wait_until("the pool refuses the rest", IO_LIMIT, || {
        let answer = guest.get("vm.memory")?;
        let zones = answer["zones"].as_array().context("No zones")?;
        let reason =
            |zone: &serde_json::Value| zone["status"]["reason"].as_str().map(str::to_owned);
        let is_full =
            |reason: String| reason.starts_with("storage") || reason.starts_with("pool-full");
        Ok(zones.iter().filter_map(reason).any(is_full))
    })?;
    ensure!(free_bytes(&guest)? >= 16 * MIB, "{}", guest.get("pool.info")?);
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check().map(drop)
}

/// Part of the data that is larger than the space that the pool has beside the memory.
const OVERCOMMITTED_MIB: u64 = 96;
/// The pool has 188 MiB, so volumes get 76 MiB until memory is returned.
const LENT_MIB: u64 = 112;

/// Command that prints the data of the volume. The number in each block shows misplaced blocks.
fn print_blocks(bytes: u64) -> String {
    let count = bytes / 4096;
    format!("awk 'BEGIN {{ for (i = 0; i < {count}; i++) printf \"%4095d\\n\", i }}'")
}

/// Boots a guest whose volume is larger than the pool, and plugs memory. Then starts to write more
/// than the pool has.
pub(crate) fn write_beyond_the_pool(
    pool: &Pool,
    keys: &str,
    device: &str,
) -> Result<(Guest, Script)> {
    let volume = format!("size=1G,create=on,reserve=32M,{keys}");
    let memory = format!("pool={},size={LENT_MIB}M", pool.name());
    let guest = boot(guest_with(pool, &volume).pm_memory(&memory), device)?;
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": LENT_MIB * MIB }))?;
    wait_until_plugged(&guest, "pm", LENT_MIB * MIB, IO_LIMIT)?;
    let info = pool_info(&guest)?;
    ensure!(info["provisioned_bytes"] == 1024 * MIB, "{info}");
    ensure!(info["promised_bytes"].as_u64() <= Some(40 * MIB), "{info}");
    let bytes = OVERCOMMITTED_MIB * MIB;
    let data = print_blocks(bytes);
    let write = format!("{data} | dd of={device} bs=1M iflag=fullblock oflag=direct");
    let script = guest.start_script(IO_LIMIT, &write)?;
    Ok((guest, script))
}

pub(crate) fn wait_until_paused(guest: &Guest) -> Result<()> {
    // Twice the usual limit, because each write by virtio-pmem takes four exits.
    guest.wait_until("the VM is paused because the pool is full", 2 * IO_LIMIT, || {
        let info = guest.get("vm.info")?;
        let reason = info["pause_reason"].as_str().unwrap_or_default();
        Ok(info["state"] == "Paused" && reason.starts_with("pool-full: volume data"))
    })
}

pub(crate) fn full_writes(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_volume_full_writes_total", &[("volume", "data")])
}

fn full_pool_pauses_the_vm_until_memory_is_returned() -> Result<()> {
    let pool = Pool::create("192M")?;
    let (guest, script) = write_beyond_the_pool(&pool, "on_full=pause", "/dev/vda")?;
    wait_until_paused(&guest)?;
    let full = full_writes(&guest)?;
    ensure!(full > 0.0, "No write found the pool full");
    // The guest returns nothing, so the VM is paused again.
    guest.command("vm.resume")?;
    guest.wait_until("the write is retried", IO_LIMIT, || Ok(full_writes(&guest)? > full))?;
    wait_until_paused(&guest)?;

    // The resize lets the guest run, and the write continues when the memory is unplugged.
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": 32 * MIB }))?;
    script.finish()?.success("dd")?;
    wait_until_plugged(&guest, "pm", 32 * MIB, IO_LIMIT)?;
    let info = guest.get("vm.info")?;
    ensure!(info["state"] == "Running" && info.get("pause_reason").is_none(), "{info}");
    let bytes = OVERCOMMITTED_MIB * MIB;
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(IO_LIMIT, &format!("{} | cmp -n {bytes} - /dev/vda", print_blocks(bytes)))?;
    ensure!(allocated_bytes(&guest)? >= bytes, "{}", guest.get("vm.volumes")?);
    guest.kill9()?;
    pool.check().map(drop)
}

fn full_pool_pauses_the_vm_until_it_grows() -> Result<()> {
    let pool = Pool::create("192M")?;
    let (guest, script) = write_beyond_the_pool(&pool, "on_full=pause", "/dev/vda")?;
    wait_until_paused(&guest)?;
    grow_until_written(guest, script, &pool, "/dev/vda")
}

/// Grows the full pool, and checks that the write continues and all data is stored.
pub(crate) fn grow_until_written(
    guest: Guest,
    script: Script,
    pool: &Pool,
    device: &str,
) -> Result<()> {
    let grow = |mib: u64| json!({ "path": pool.name(), "size": mib * MIB });
    let refused = guest.try_put("pool.grow", grow(192))?;
    let is_bound_named = refused.body.contains("does not exceed the current 192 MiB");
    ensure!(refused.status == 400 && is_bound_named, "{refused:?}");
    guest.put("pool.grow", grow(256))?;
    script.finish()?.success("dd")?;
    let info = pool_info(&guest)?;
    ensure!(info["total_bytes"] == 256 * MIB && info["memory_bytes"] == LENT_MIB * MIB, "{info}");
    let info = guest.get("vm.info")?;
    ensure!(info["state"] == "Running" && info.get("pause_reason").is_none(), "{info}");
    let bytes = OVERCOMMITTED_MIB * MIB;
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(IO_LIMIT, &format!("{} | cmp -n {bytes} - {device}", print_blocks(bytes)))?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    ensure!(pool.info()?["total_bytes"] == 256 * MIB, "{}", pool.info()?);
    Ok(())
}

fn write_to_a_full_pool_fails_with_on_full_error() -> Result<()> {
    let pool = Pool::create("192M")?;
    let (guest, script) = write_beyond_the_pool(&pool, "on_full=error", "/dev/vda")?;
    let output = script.finish()?;
    ensure!(output.code != 0, "The write has succeeded");
    ensure!(output.stderr.contains("Input/output error"), "{}", output.stderr);
    ensure!(full_writes(&guest)? > 0.0, "No write found the pool full");
    ensure!(guest.get("vm.info")?["state"] == "Running", "{}", guest.get("vm.info")?);
    // Written data can still be read.
    let count = 64 * MIB;
    guest.run_within(IO_LIMIT, &format!("{} | cmp -n {count} - /dev/vda", print_blocks(count)))?;
    guest.kill9()?;
    pool.check().map(drop)
}
