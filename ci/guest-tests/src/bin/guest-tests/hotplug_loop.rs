//! Adds, uses and removes each kind of device a hundred times in one guest. Checks that the VMM's
//! resources do not grow.

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, ResourceCounts};
use serde_json::{Value, json};

use crate::hotplug::{
    LIMIT, add_disk, add_pmem, builder, image, remove, slot_of, wait_for_disk, wait_for_pmem,
    wait_until_gone,
};
use crate::net::{Net, TRANSFER_BYTES, add_net, from_guest};

guest_tests::tests![
    a_hundred_of_each_device: 3600 (extended) => a_hundred_of_each(12),
    a_hundred_of_each_device_with_four_vcpus_on_6_1: 3600 (extended) on [V6_1] x 4 =>
        a_hundred_of_each(15),
];

const ROUNDS: usize = 100;
/// Rounds before the first count. The VMM allocates some resources once and keeps them.
const WARM_UP: usize = 10;

/// Resources of the VMM after the first rounds, and the device's slot.
#[derive(Default)]
struct Before(Option<(ResourceCounts, u32)>);

impl Before {
    fn check_round(&mut self, nth: usize, guest: &Guest, added: &Value) -> Result<()> {
        let slot = slot_of(added)?;
        match self.0 {
            None if nth + 1 == WARM_UP => self.0 = Some((guest.resource_counts()?, slot)),
            Some((_, first)) => ensure!(slot == first, "The slot has changed: {added}"),
            None => {}
        }
        Ok(())
    }

    fn check_end(self, kind: &str, guest: &Guest) -> Result<()> {
        let (before, _) = self.0.context("The loop had no rounds")?;
        guest.wait_until_resources_are_freed(&before)?;
        let removed = [("kind", kind), ("action", "remove"), ("result", "ok")];
        let removed = guest.metric("foreshore_hotplug_total", &removed)?;
        ensure!(removed == ROUNDS as f64, "The metrics count {removed} removals");
        println!("{ROUNDS} of {kind}: {:?}, at first {before:?}", guest.resource_counts()?);
        Ok(())
    }
}

/// Adds a device with `add`, uses it, and removes it, many times.
fn come_and_go(
    guest: &Guest,
    kind: &str,
    mut add: impl FnMut(&str) -> Result<Value>,
) -> Result<()> {
    let mut before = Before::default();
    for nth in 0..ROUNDS {
        let id = format!("{kind}-{nth}");
        let added = add(&id).with_context(|| id.clone())?;
        ensure!(remove(guest, &id)? == 204, "vm.remove-device of {id} failed");
        wait_until_gone(guest, &id, &added["bdf"])?;
        before.check_round(nth, guest, &added)?;
    }
    before.check_end(kind, guest)
}

fn disks(guest: &Guest) -> Result<()> {
    let path = image("disk")?;
    come_and_go(guest, "disk", |id| {
        let added = add_disk(guest, &path, id)?;
        let node = wait_for_disk(guest, id)?;
        guest.run(&format!(
            "dd if=/dev/urandom of=/dev/{node} bs=64k count=4 oflag=direct 2>/dev/null"
        ))?;
        Ok(added)
    })
}

fn files(guest: &Guest) -> Result<()> {
    let path = image("pmem")?;
    come_and_go(guest, "pmem", |id| {
        let added = add_pmem(guest, &path, id)?;
        let node = wait_for_pmem(guest)?;
        guest.run(&format!(
            "dd if=/dev/urandom of=/dev/{node} bs=64k count=4 conv=fsync 2>/dev/null"
        ))?;
        Ok(added)
    })
}

/// Adds the interface alternately by name and with a passed queue.
fn interfaces(guest: &Guest, net: &Net) -> Result<()> {
    let mut by_fd = false;
    come_and_go(guest, "net", |id| {
        by_fd = !by_fd;
        let added = add_net(guest, net, id, by_fd)?;
        net.bring_up(guest)?;
        from_guest(guest, net, TRANSFER_BYTES / 64)?;
        Ok(added)
    })
}

/// The tests' own shell uses this device, so the shell cannot report that the guest has ejected it.
fn vsocks(guest: &Guest) -> Result<()> {
    let vsock = guest.get("vm.info")?["config"]["vsock"].clone();
    let mut before = Before::default();
    for nth in 0..ROUNDS {
        ensure!(remove(guest, "_vsock0")? == 204, "vm.remove-device failed");
        guest.wait_until("the VMM has removed the device", LIMIT, || {
            Ok(guest.metric("foreshore_hotplug_pending", &[])? == 0.0
                && !guest.vsock_socket().exists())
        })?;
        let added = guest.put("vm.add-vsock", vsock.clone())?;
        guest.wait_for_shell(LIMIT)?;
        before.check_round(nth, guest, &added)?;
    }
    before.check_end("vsock", guest)
}

fn a_hundred_of_each(nth: u8) -> Result<()> {
    let net = Net::new(nth)?;
    let guest = builder().boot()?;
    let original = json!(guest.get("vm.info")?["config"]);
    disks(&guest)?;
    files(&guest)?;
    interfaces(&guest, &net)?;
    vsocks(&guest)?;
    let config = guest.get("vm.info")?["config"].clone();
    for section in ["disks", "net", "pmem", "vsock"] {
        let empty = |config: &Value| config[section].as_array().is_none_or(Vec::is_empty);
        let same = config[section] == original[section] || (empty(&config) && section != "vsock");
        ensure!(same, "{section}: {config}, before: {original}");
    }
    guest.no_kernel_complaints()
}
