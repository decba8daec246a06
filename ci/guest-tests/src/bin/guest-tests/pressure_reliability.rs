//! The governor goes on with a guest that cannot give back, or cannot take.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::zones::{MIB, zone};

guest_tests::tests![
    memory_with_pinned_pages_stays_and_the_rest_goes_back: 600 (extended),
    a_guest_without_dram_for_descriptors_is_asked_again: 600 (extended),
];

/// For what takes the guest seconds when all is well.
const LIMIT: Duration = Duration::from_secs(120);
/// For shrinks, which wait for cool-downs and pauses.
const SHRINK_LIMIT: Duration = Duration::from_secs(400);

fn small_guest(pool: &Pool) -> GuestBuilder {
    Guest::builder()
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
}

fn pressure(guest: &Guest) -> Result<Value> {
    guest.api("GET", "vm.pressure?decisions=1000", None)
}

fn wait_for_agent(guest: &Guest, state: &str) -> Result<()> {
    guest.wait_until(&format!("the agent is {state}"), LIMIT, || Ok(pressure(guest)?["agent"] == state))?;
    let shown = guest.metrics()?.value("foreshore_pressure_agent_state", &[("state", state)])?;
    ensure!(shown == 1.0, "The metrics do not say that the agent is {state}");
    Ok(())
}

/// Whether there is such a decision.
fn has_decided(guest: &Guest, is_it: impl Fn(&Value) -> bool) -> Result<bool> {
    let info = pressure(guest)?;
    let decisions = info["decisions"].as_array().context("No decisions")?;
    Ok(decisions.iter().any(is_it))
}

/// Starts `guest-tool hog` and waits until it has that much.
fn fill(guest: &Guest, mib: u64) -> Result<Script> {
    let mut hog = guest.start_script(LIMIT, &format!("exec guest-tool hog {mib}"))?;
    let goal = format!("held {mib}");
    while hog.next_line().context("The load was killed")? != goal {}
    Ok(hog)
}

fn memory_with_pinned_pages_stays_and_the_rest_goes_back() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("psi").boot()?;
    wait_for_agent(&guest, "live")?;
    let hog = fill(&guest, 640)?;
    let top = zone(&guest, "pm")?.plugged_bytes;
    ensure!(top >= 128 * MIB, "Only {top} bytes of PM are plugged");
    drop(hog);
    // What is filled next comes from PM too, and some of it is pinned.
    let mut pins = guest.start_script(LIMIT, "exec guest-tool pin 560")?;
    while pins.next_line().context("The pins were killed")? != "pinned" {}
    let tried = |decision: &Value| {
        decision["direction"] == "shrink"
            && ["partly", "withdrawn", "stuck"].iter().any(|state| decision["outcome"]["state"] == *state)
    };
    guest.wait_until("a shrink is not followed", SHRINK_LIMIT, || has_decided(&guest, tried))?;
    ensure!(zone(&guest, "dram")?.plugged_bytes == 128 * MIB, "DRAM was taken in place of PM that stays");
    drop(pins);
    guest.wait_until("all PM is back", SHRINK_LIMIT, || Ok(zone(&guest, "pm")?.plugged_bytes == 0))?;
    guest.no_kernel_complaints()
}

fn a_guest_without_dram_for_descriptors_is_asked_again() -> Result<()> {
    let pool = Pool::create("1G")?;
    // No movable DRAM to begin with: what is full here is what page descriptors come out of.
    let guest = Guest::builder()
        .cpus(2)
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("off")
        .boot()?;
    wait_for_agent(&guest, "live")?;
    let available_mib: u64 =
        guest.run("awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo")?.trim().parse()?;
    let hog = fill(&guest, available_mib - 24)?;
    guest.api("PUT", "vm.pressure", Some(json!({ "policy": "fixed", "size": 512 * MIB })))?;
    // Whether the guest finds the 2 MiB for a section now is its own affair; it is asked, and what comes of it is said.
    let asked =
        |decision: &Value| decision["direction"] == "grow" && decision["asked_bytes"].as_u64() > Some(0);
    guest.wait_until("the guest is asked", LIMIT, || has_decided(&guest, asked))?;
    drop(hog);
    guest.wait_until("it has everything", SHRINK_LIMIT, || {
        Ok(zone(&guest, "pm")?.plugged_bytes == 512 * MIB)
    })?;
    Ok(())
}
