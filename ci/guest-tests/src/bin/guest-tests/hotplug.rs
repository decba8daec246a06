//! Tests of device hotplug while the guest runs, with Debian's stock drivers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::guest::GuestBuilder;
use guest_tests::runner::this_tests_dir;
use guest_tests::user::need_proc;
use guest_tests::{BOOT_LIMIT, Guest};
use serde_json::{Value, json};

guest_tests::tests![
    a_disk_and_a_vsock_device_come_are_used_and_go: 300,
    a_disk_goes_while_the_guest_writes: 240 x 2,
    a_guest_that_does_not_answer_keeps_its_disk: 240 (extended),
    reboot_keeps_additions_and_removals: 300,
    invalid_additions_and_removals_are_refused: 240,
    a_file_comes_as_pmem_is_used_and_goes: 240,
    disks_that_come_while_the_guest_boots_are_found: 240,
];

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const IO_LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

pub(crate) fn image(name: &str) -> Result<PathBuf> {
    sparse_file(name, 64 * MIB)
}

pub(crate) fn builder() -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off")
}

/// Checks that the guest has registered every slot under its number, with a hotplug driver.
fn slots_are_registered(guest: &Guest) -> Result<()> {
    let slots = guest.run("ls /sys/bus/pci/slots")?;
    let mut numbers: Vec<u32> =
        slots.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    numbers.sort_unstable();
    ensure!(numbers == (1..32).collect::<Vec<_>>(), "The guest has the wrong slots: {slots}");
    // This file does not exist for a slot without a hotplug driver.
    guest.run(
        "test -w /sys/bus/pci/slots/31/power && test $(cat /sys/bus/pci/slots/31/power) = 0",
    )?;
    guest.run("test $(cat /sys/bus/pci/slots/1/power) = 1").map(drop)
}

pub(crate) fn slot_of(added: &Value) -> Result<u32> {
    let bdf = added["bdf"].as_str().with_context(|| format!("The response has no bdf: {added}"))?;
    let slot = bdf.strip_prefix("0000:00:").and_then(|rest| rest.strip_suffix(".0"));
    Ok(u32::from_str_radix(slot.with_context(|| format!("The bdf is not on bus 0: {bdf}"))?, 16)?)
}

pub(crate) fn add_disk(guest: &Guest, path: &PathBuf, id: &str) -> Result<Value> {
    let added = guest.put("vm.add-disk", json!({ "path": path, "id": id }))?;
    ensure!(added["id"] == id, "{added}");
    Ok(added)
}

pub(crate) fn remove(guest: &Guest, id: &str) -> Result<u16> {
    Ok(guest.try_put("vm.remove-device", json!({ "id": id }))?.status)
}

pub(crate) fn wait_for_disk(guest: &Guest, serial: &str) -> Result<String> {
    let find = format!("grep -lx {serial} /sys/block/vd*/serial");
    guest.wait_until_run("the guest has the disk", LIMIT, &find)?;
    let found = guest.run(&find)?;
    let node = found.trim().split('/').nth(3).context("The disk has no name")?.to_owned();
    guest.wait_until_run("the disk's node exists", LIMIT, &format!("test -b /dev/{node}"))?;
    Ok(node)
}

/// Waits until the device has disappeared from both the guest and the VMM.
pub(crate) fn wait_until_gone(guest: &Guest, id: &str, bdf: &Value) -> Result<()> {
    let bdf = bdf.as_str().context("The response has no bdf")?;
    guest.wait_until_run(
        "the guest has ejected the device",
        LIMIT,
        &format!("! test -e /sys/bus/pci/devices/{bdf}"),
    )?;
    guest.wait_until("the VMM has removed the device", LIMIT, || {
        let metrics = guest.metrics()?;
        let pending = metrics.value("foreshore_hotplug_pending", &[])?;
        Ok(pending == 0.0 && metrics.value("foreshore_disk_size_bytes", &[("disk", id)]).is_err())
    })
}

/// Runs several hotplug sequences in one guest.
fn a_disk_and_a_vsock_device_come_are_used_and_go() -> Result<()> {
    let events = this_tests_dir().join("events");
    let monitor = format!("path={}", events.display());
    let guest = builder().argument("--event-monitor", &monitor).boot()?;
    slots_are_registered(&guest)?;
    a_disk_comes_is_used_and_goes(&guest, &events).context("Disk")?;
    a_disk_comes_back_as_another(&guest).context("The image of a disk as another disk")?;
    a_vsock_device_goes_and_comes(&guest).context("Vsock device")?;
    guest.no_kernel_complaints()
}

fn a_disk_comes_is_used_and_goes(guest: &Guest, events: &Path) -> Result<()> {
    let path = image("disk")?;
    let devices = guest.metric("foreshore_pci_devices", &[])?;
    let added = add_disk(guest, &path, "harbour")?;
    ensure!(slot_of(&added)? == devices as u32 + 1, "{added} with {devices} devices");
    let node = wait_for_disk(guest, "harbour")?;
    guest.run_within(
        IO_LIMIT,
        &format!("mkfs.ext4 -q /dev/{node} && mkdir -p /mnt/d && mount -t ext4 /dev/{node} /mnt/d"),
    )?;
    guest.run_within(
        IO_LIMIT,
        "dd if=/dev/urandom of=/mnt/d/file bs=1M count=20 && sync && sha256sum /mnt/d/file >/tmp/sum",
    )?;
    guest.run_within(IO_LIMIT, "umount /mnt/d")?;
    let metrics = guest.metrics()?;
    ensure!(
        metrics.value("foreshore_pci_devices", &[])? == devices + 1.0,
        "The metrics do not count the device"
    );
    let written = [("disk", "harbour"), ("operation", "write"), ("result", "ok")];
    ensure!(
        metrics.value("foreshore_disk_operations_total", &written)? > 0.0,
        "The metrics count no writes of the disk"
    );
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["disks"][0]["id"] == "harbour", "{info}");
    let counters = guest.get("vm.counters")?;
    ensure!(counters["harbour"]["write_ops"].as_u64() > Some(0), "{counters}");
    let has_event = |event: &str| Ok(fs::read_to_string(events)?.contains(event));
    guest.wait_until("the event is sent", LIMIT, || has_event("device-added"))?;
    ensure!(!has_event("device-removed")?, "device-removed precedes the removal");
    ensure!(remove(guest, "harbour")? == 204, "vm.remove-device failed");
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["disks"] == json!([]), "{info}");
    wait_until_gone(guest, "harbour", &added["bdf"])?;
    guest.wait_until("the event is sent", LIMIT, || has_event("device-removed"))?;
    ensure!(remove(guest, "harbour")? == 404, "A second removal did not return 404");
    ensure!(guest.get("vm.counters")? == json!({}), "vm.counters still has the device");
    ensure!(
        guest.metric("foreshore_pci_devices", &[])? == devices,
        "The metrics still count the device"
    );
    // The disk is added again, and should contain the written data. The disk now has the API's
    // default name.
    let added_again =
        guest.put("vm.add-disk", json!({"path": path, "serial": "again", "num_queues": 1}))?;
    ensure!(
        added_again["id"] == "_disk0" && added_again["bdf"] == added["bdf"],
        "{added_again}, before: {added}"
    );
    let node = wait_for_disk(guest, "again")?;
    guest.run_within(
        IO_LIMIT,
        &format!("mount -t ext4 /dev/{node} /mnt/d && sha256sum -c /tmp/sum && umount /mnt/d"),
    )?;
    ensure!(remove(guest, "_disk0")? == 204, "vm.remove-device failed");
    wait_until_gone(guest, "_disk0", &added_again["bdf"])
}

pub(crate) fn add_pmem(guest: &Guest, path: &PathBuf, id: &str) -> Result<Value> {
    let added = guest.put("vm.add-pmem", json!({ "file": path, "id": id }))?;
    ensure!(added["id"] == id, "{added}");
    Ok(added)
}

pub(crate) fn wait_for_pmem(guest: &Guest) -> Result<String> {
    guest.wait_until_run("the guest has the file", LIMIT, "test -b /dev/pmem*")?;
    let node = guest.run("ls /dev | grep ^pmem")?.trim().to_owned();
    ensure!(!node.contains(char::is_whitespace), "The guest has several nodes: {node}");
    Ok(node)
}

fn a_file_comes_as_pmem_is_used_and_goes() -> Result<()> {
    let path = image("pmem")?;
    let guest = builder().boot()?;
    let mut added = add_pmem(&guest, &path, "quay")?;
    let node = wait_for_pmem(&guest)?;
    guest.run_within(
        IO_LIMIT,
        &format!(
            "dd if=/dev/urandom of=/dev/{node} bs=1M count=16 conv=fsync && sha256sum /dev/{node} >/tmp/sum"
        ),
    )?;
    let flushes = [("pmem", "quay"), ("result", "ok")];
    ensure!(
        guest.metric("foreshore_pmem_flushes_total", &flushes)? > 0.0,
        "The metrics count no flush"
    );
    // The data is in the file, and the mapping has been removed. The file can be added again.
    for _ in 0..2 {
        ensure!(remove(&guest, "quay")? == 204, "vm.remove-device failed");
        wait_until_gone(&guest, "quay", &added["bdf"])?;
        ensure!(
            guest.metric("foreshore_pmem_size_bytes", &[("pmem", "quay")]).is_err(),
            "The metrics still count the device"
        );
        guest.wait_until("the file is no longer mapped", LIMIT, || {
            Ok(!fs::read_to_string(need_proc(guest.pid(), "maps")?)?
                .contains(&path.display().to_string()))
        })?;
        added = add_pmem(&guest, &path, "quay")?;
        ensure!(wait_for_pmem(&guest)? == node, "The device's name has changed");
        guest.run_within(IO_LIMIT, "sha256sum -c /tmp/sum")?;
    }
    guest.no_kernel_complaints()
}

/// The tests' own shell uses this device. The shell answers again when the device has returned.
fn a_vsock_device_goes_and_comes(guest: &Guest) -> Result<()> {
    let vsock = guest.get("vm.info")?["config"]["vsock"].clone();
    ensure!(vsock["id"] == "_vsock0", "{vsock}");
    let other = this_tests_dir().join("other");
    let second = guest.try_put("vm.add-vsock", json!({"cid": 4, "socket": other}))?;
    ensure!(second.status == 400 && second.body.contains("one vsock device"), "{second:?}");
    for _ in 0..3 {
        ensure!(remove(guest, "_vsock0")? == 204, "vm.remove-device failed");
        guest.wait_until("the guest has ejected the device", LIMIT, || {
            Ok(!guest.vsock_socket().exists())
        })?;
        ensure!(
            guest.metric("foreshore_hotplug_pending", &[])? == 0.0,
            "The removal is still pending"
        );
        let added = guest.put("vm.add-vsock", vsock.clone())?;
        ensure!(added["id"] == "_vsock0", "{added}");
        guest.wait_for_shell(LIMIT)?;
        guest.run("true")?;
    }
    Ok(())
}

fn a_disk_goes_while_the_guest_writes() -> Result<()> {
    let path = image("disk")?;
    let guest = builder().boot()?;
    for round in 0..3 {
        let id = format!("disk-{round}");
        let added = add_disk(&guest, &path, &id)?;
        let node = wait_for_disk(&guest, &id)?;
        // If the device node disappears between two runs of dd, the next run would create a regular
        // file of that name, and the loop would never end.
        let writes = format!(
            "while test -b /dev/{node} && dd if=/dev/zero of=/dev/{node} bs=64k count=64 oflag=direct 2>/dev/null
            do :; done; echo over"
        );
        let writer = guest.start_script(IO_LIMIT, &writes)?;
        let written = [("disk", id.as_str()), ("operation", "write"), ("result", "ok")];
        guest.wait_until("the guest writes", LIMIT, || {
            Ok(guest.metric("foreshore_disk_operations_total", &written)? > 50.0)
        })?;
        ensure!(remove(&guest, &id)? == 204, "vm.remove-device of {id} failed");
        // The kernel takes the disk away from the writer, and each later write should fail.
        wait_until_gone(&guest, &id, &added["bdf"])?;
        ensure!(writer.finish()?.stdout.contains("over"), "The writer did not end with an error");
        guest.run(&format!("rm -f /dev/{node}"))?;
    }
    ensure!(guest.get("vm.info")?["state"] == "Running", "The VM does not run");
    guest.run("true")?;
    Ok(())
}

fn a_guest_that_does_not_answer_keeps_its_disk() -> Result<()> {
    let path = image("disk")?;
    let guest = builder().boot()?;
    let added = add_disk(&guest, &path, "harbour")?;
    let node = wait_for_disk(&guest, "harbour")?;
    guest.command("vm.pause")?;
    // Repeating a removal request has no further effect.
    for _ in 0..2 {
        ensure!(remove(&guest, "harbour")? == 204, "vm.remove-device failed");
    }
    let pending = |guest: &Guest| guest.metric("foreshore_hotplug_pending", &[]);
    ensure!(pending(&guest)? == 1.0, "{} removals are pending", pending(&guest)?);
    let same = guest.try_put("vm.add-disk", json!({"path": path, "id": "harbour"}))?;
    ensure!(same.status == 409 && same.body.contains("harbour"), "{same:?}");
    // Other disks can be added in the meantime.
    let other = add_disk(&guest, &image("other")?, "other")?;
    ensure!(other["bdf"] != added["bdf"], "{other}");
    guest.command("vm.resume")?;
    wait_until_gone(&guest, "harbour", &added["bdf"])?;
    guest
        .run(&format!("! test -e /sys/block/{node} || grep -qx other /sys/block/{node}/serial"))?;
    wait_for_disk(&guest, "other")?;
    // A removal that is requested during a pause can be completed.
    ensure!(remove(&guest, "other")? == 204, "vm.remove-device failed");
    wait_until_gone(&guest, "other", &other["bdf"])?;
    guest.no_kernel_complaints()
}

fn reboot_keeps_additions_and_removals() -> Result<()> {
    let guest = builder().boot()?;
    for id in ["stays", "goes", "slow"] {
        add_disk(&guest, &image(id)?, id)?;
        wait_for_disk(&guest, id)?;
    }
    ensure!(remove(&guest, "goes")? == 204, "vm.remove-device failed");
    guest.wait_until("the device is removed", LIMIT, || {
        Ok(guest.metric("foreshore_hotplug_pending", &[])? == 0.0)
    })?;
    // The VM is paused, so the guest receives no request to eject this disk before the guest ends.
    guest.command("vm.pause")?;
    ensure!(remove(&guest, "slow")? == 204, "vm.remove-device failed");
    guest.command("vm.reboot")?;
    guest.wait_for_shell(BOOT_LIMIT)?;
    wait_for_disk(&guest, "stays")?;
    let serials = guest.run("cat /sys/block/vd*/serial")?;
    ensure!(serials.trim() == "stays", "The guest has the disks {serials} after the reboot");
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["disks"].as_array().is_some_and(|disks| disks.len() == 1), "{info}");
    ensure!(guest.metric("foreshore_hotplug_pending", &[])? == 0.0, "A removal is pending");
    // Each of the three files is either free or in use by the VM.
    add_disk(&guest, &this_tests_dir().join("goes"), "goes")?;
    add_disk(&guest, &this_tests_dir().join("slow"), "slow")?;
    wait_for_disk(&guest, "slow")?;
    guest.no_kernel_complaints()
}

/// Adds an image again immediately after removing it. Until the guest has ejected it, the only
/// allowed error is 429.
fn a_disk_comes_back_as_another(guest: &Guest) -> Result<()> {
    const ROUNDS: usize = 5;
    let path = image("another")?;
    add_disk(guest, &path, "round0")?;
    wait_for_disk(guest, "round0")?;
    let mut retries = 0;
    for round in 1..=ROUNDS {
        ensure!(remove(guest, &format!("round{}", round - 1))? == 204, "vm.remove-device failed");
        let id = format!("round{round}");
        let disk = json!({ "path": path, "id": id });
        guest.wait_until("the image is free", LIMIT, || {
            let answer = guest.try_put("vm.add-disk", disk.clone())?;
            ensure!([200, 429].contains(&answer.status), "{}: {}", answer.status, answer.body);
            retries += usize::from(answer.status == 429);
            Ok(answer.status == 200)
        })?;
        wait_for_disk(guest, &id)?;
    }
    ensure!(retries > 0, "The guest ejected every device before the next call");
    Ok(())
}

fn invalid_additions_and_removals_are_refused() -> Result<()> {
    let (first, second) = (image("first")?, image("second")?);
    let link = first.with_extension("link");
    std::os::unix::fs::symlink(&first, &link)?;
    let guest = builder().argument("--disk", &format!("path={}", first.display())).boot()?;
    let devices = guest.metric("foreshore_pci_devices", &[])?;
    for (body, status, text) in [
        (json!({"path": second, "id": "_disk0"}), 409, "_disk0"),
        (json!({"path": second, "num_queues": 2}), 400, "num_queues is 2"),
        (json!({"path": second, "iommu": true}), 400, "iommu"),
        (json!({"id": "x"}), 400, "path"),
        (json!({"path": "/nowhere", "id": "x"}), 500, "/nowhere"),
        (json!({"path": first, "id": "x"}), 400, "name the same file"),
        (json!({"path": link, "id": "x"}), 400, "name the same file"),
    ] {
        let answer = guest.try_put("vm.add-disk", body.clone())?;
        ensure!(answer.status == status && answer.body.contains(text), "{body}: {answer:?}");
    }
    for (id, status) in [("nobody", 404), ("__rng", 500)] {
        ensure!(
            remove(&guest, id)? == status,
            "vm.remove-device of {id} returned {}",
            remove(&guest, id)?
        );
    }
    ensure!(guest.metric("foreshore_pci_devices", &[])? == devices, "A device was added");
    // A device that the guest ejects on its own remains in its slot, and the guest can find it
    // there again.
    let node = wait_for_disk(&guest, "_disk0")?;
    let power = format!(
        "bdf=$(basename $(dirname $(readlink -f /sys/block/{node}/device))) && \
         echo /sys/bus/pci/slots/$((0x$(echo $bdf | cut -c9-10)))/power"
    );
    let power = guest.run(&power)?.trim().to_owned();
    guest.run_within(
        LIMIT,
        &format!("echo 0 >{power} && ! test -e /sys/block/{node} && echo 1 >{power}"),
    )?;
    // A disk that the VM has had since its start can be removed as well.
    let node = wait_for_disk(&guest, "_disk0")?;
    ensure!(remove(&guest, "_disk0")? == 204, "vm.remove-device failed");
    guest.wait_until_run(
        "the device is removed",
        LIMIT,
        &format!("! test -e /sys/block/{node}"),
    )?;
    // Adds disks until the bus has no free slot.
    let mut count = 0;
    let refused = loop {
        let path = image(&format!("full-{count}"))?;
        let answer = guest.try_put("vm.add-disk", json!({ "path": path }))?;
        if answer.status != 200 {
            break answer;
        }
        count += 1;
    };
    ensure!(refused.status == 500 && refused.body.contains("31 slots"), "{refused:?}");
    guest.wait_until_run(
        "all disks exist",
        LIMIT,
        &format!("test $(ls /sys/block | grep -c ^vd) = {count}"),
    )?;
    guest.no_kernel_complaints()
}

/// Some disks are added before the guest scans its bus, some before its hotplug driver starts, and
/// some later.
fn disks_that_come_while_the_guest_boots_are_found() -> Result<()> {
    const DISKS: u32 = 16;
    let guest = builder().start()?;
    guest.wait_until("the VM runs", LIMIT, || {
        Ok(guest.get("vm.info").is_ok_and(|info| info["state"] == "Running"))
    })?;
    for nth in 0..DISKS {
        let path = image(&format!("disk{nth}"))?;
        guest.put("vm.add-disk", json!({"path": path, "id": format!("disk{nth}")}))?;
    }
    guest.wait_for_shell(BOOT_LIMIT)?;
    let all = format!("test $(ls -d /sys/block/vd* | wc -l) = {DISKS}");
    guest.wait_until_run("the guest has all disks", LIMIT, &all)?;
    // Each event should have been delivered exactly once, so that the next event is delivered as
    // well.
    guest.put("vm.remove-device", json!({"id": "disk0"}))?;
    let others = format!("test $(ls -d /sys/block/vd* | wc -l) = {}", DISKS - 1);
    guest.wait_until_run("the guest has ejected one disk", LIMIT, &others)?;
    guest.no_kernel_complaints()
}
