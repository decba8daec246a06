//! Tests of the confinement of a VMM whose devices a stock guest uses.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Result, ensure};
use escaped_guest::threads::{self, VmmThread};
use guest_tests::Guest;
use guest_tests::disk::sparse_file;
use guest_tests::guest::GuestBuilder;
use guest_tests::pool::Pool;
use guest_tests::runner::this_tests_dir;
use serde_json::json;

guest_tests::tests![
    each_thread_of_a_running_vm_is_confined: 240,
    device_with_file_outside_the_limits_is_refused: 240,
];

const MIB: u64 = 1 << 20;

fn builder() -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off")
}

/// Returns the names of the VMM's threads, each with its value of `key` (proc(5)).
fn threads(guest: &Guest, key: &str) -> Result<Vec<(String, String)>> {
    let threads = threads::of(guest.pid())?;
    let value = |thread: &VmmThread| Ok((thread.name.clone(), thread.status(key)?.to_owned()));
    threads.iter().map(value).collect()
}

fn each_thread_of_a_running_vm_is_confined() -> Result<()> {
    let disk = sparse_file("disk", 64 * MIB)?;
    let pool = Pool::create("128M")?;
    let events = this_tests_dir().join("events");
    let guest = builder()
        .argument("--disk", &format!("path={}", disk.display()))
        .pm_volume(&format!("pool={},name=data,size=64M,create=on", pool.path().display()))
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    // A request to the API and a scrape start the threads of the servers.
    guest.get("vm.info")?;
    guest.metrics()?;
    // Mode 2 of seccomp(2) is a filter.
    for (key, expected) in [("Seccomp", "2"), ("NoNewPrivs", "1")] {
        for (name, value) in threads(&guest, key)? {
            ensure!(value == expected, "{key} of thread {name} is {value}");
        }
    }
    // The threads that build VMs and end devices have one filter. The others have added their own.
    for (name, filters) in threads(&guest, "Seccomp_filters")? {
        let has_own = !["foreshore", "_removed"].contains(&&*name);
        ensure!(!has_own || filters.parse::<u32>()? >= 2, "{name} has {filters} filters");
    }
    let names: BTreeSet<_> = threads(&guest, "Name")?.into_iter().map(|(name, _)| name).collect();
    for kind in ["_api", "vcpu0", "_device", "_vsock", "_mem", "_disk0_q0", "_events"] {
        ensure!(names.contains(kind), "{kind} is not among {names:?}");
    }
    ensure!(guest.metric("foreshore_seccomp_enabled", &[])? == 1.0);
    ensure!(guest.metric("foreshore_landlock_enabled", &[])? == 1.0);
    guest.no_kernel_complaints()
}

fn device_with_file_outside_the_limits_is_refused() -> Result<()> {
    // The folder of the VM's sockets and console is within the limits.
    let inside = sparse_file("inside", 64 * MIB)?;
    let folder = std::env::temp_dir().join("outside-the-limits");
    fs::create_dir_all(&folder)?;
    let outside = folder.join("image");
    fs::File::create(&outside)?.set_len(64 * MIB)?;
    let disk = json!({"path": outside, "id": "outside"});
    {
        let guest = builder().boot()?;
        let refused = guest.try_put("vm.add-disk", disk.clone())?;
        let rule = format!("--landlock-rules path={},access=rw", folder.display());
        ensure!(refused.status == 400 && refused.body.contains(&rule), "{refused:?}");
        guest.put("vm.add-disk", json!({"path": inside, "id": "inside"}))?;
        ensure!(guest.metric("foreshore_landlock_enabled", &[])? == 1.0);
    }
    // Without the limits, and with a rule, the same request succeeds.
    let rule = format!("path={},access=rw", folder.display());
    for (arguments, enabled) in
        [(["--landlock", "off"], 0.0), (["--landlock-rules", rule.as_str()], 1.0)]
    {
        let guest = builder().words(arguments).boot()?;
        guest.put("vm.add-disk", disk.clone())?;
        ensure!(guest.metric("foreshore_landlock_enabled", &[])? == enabled);
    }
    Ok(())
}
