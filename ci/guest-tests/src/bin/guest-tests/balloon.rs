//! Tests inflation and deflation of the virtio balloon, and policies that use balloon statistics to
//! size a guest without an agent.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::decisions::{decisions_since, decisions_total};
use crate::zones::{MIB, meminfo_mib, vmstat, zone};

guest_tests::tests![
    a_balloon_saves_a_guest_from_the_oom_killer: 300 on [V6_12, V6_1 extended],
    reported_free_pages_return_to_the_host: 240 (long) on [V6_12, V6_1 extended],
    a_guest_without_an_agent_is_sized_by_statistics: 300 (long) on [V6_12, V6_1 extended],
    a_guest_without_an_agent_is_given_pm_by_psi: 400 (long) x 2 => is_given_pm_by(&PSI),
    a_guest_without_an_agent_is_given_pm_by_amf: 400 (extended) x 2 => is_given_pm_by(&AMF),
];

/// Time that a driver needs to reach a size, under emulation.
const FOLLOW_LIMIT: Duration = Duration::from_secs(120);

/// Time for a shrink, including cool-downs.
const SHRINK_LIMIT: Duration = Duration::from_secs(240);
/// Size of a guest memory block. A block is only unplugged as a whole.
const BLOCK_MIB: u64 = 128;

fn actual_bytes(guest: &Guest) -> Result<u64> {
    let info = guest.get("vm.info")?;
    info["balloon"]["actual_bytes"]
        .as_u64()
        .with_context(|| format!("vm.info has no balloon: {info}"))
}

fn resize_balloon(guest: &Guest, bytes: u64) -> Result<()> {
    guest.put("vm.resize", json!({ "desired_balloon": bytes }))?;
    guest.wait_until("the balloon has its size", FOLLOW_LIMIT, || Ok(actual_bytes(guest)? == bytes))
}

fn statistic(guest: &Guest, name: &str) -> Result<f64> {
    guest.metric("foreshore_balloon_guest_memory_bytes", &[("state", name)])
}

fn touch(guest: &Guest, mib: u64) -> Result<()> {
    drop(guest.hog(mib, FOLLOW_LIMIT)?);
    wait_until_freed(guest)
}

fn wait_until_freed(guest: &Guest) -> Result<()> {
    guest.wait_until("the filled memory is free", FOLLOW_LIMIT, || {
        Ok(guest.try_run(FOLLOW_LIMIT, "pidof guest-tool")?.code != 0)
    })
}

fn a_balloon_saves_a_guest_from_the_oom_killer() -> Result<()> {
    let guest = Guest::builder()
        .memory("size=512M")
        .argument("--balloon", "size=0,deflate_on_oom=on")
        .cmdline("foreshore.agent=off")
        .pressure("off")
        .boot()?;
    // Linux 6.12 leaves up to an eighth of memory on the per-CPU lists of the CPU that freed it,
    // and counts it as used.
    guest.run("echo 1000 >/proc/sys/vm/percpu_pagelist_high_fraction")?;
    // Resident memory should fall by the inflated size, whichever free pages the driver selects.
    let free_mib = meminfo_mib(&guest, "MemFree")?;
    ensure!(free_mib > 320, "Only {free_mib} MiB are free; the test needs more than 320");
    touch(&guest, free_mib - 40)?;
    let (available_mib, full_bytes) = (meminfo_mib(&guest, "MemAvailable")?, guest.rss_bytes()?);
    resize_balloon(&guest, 256 * MIB)?;
    let (left_mib, inflated_rss_bytes) = (meminfo_mib(&guest, "MemAvailable")?, guest.rss_bytes()?);
    ensure!(
        left_mib + 240 < available_mib,
        "{available_mib} MiB were available, now {left_mib} MiB"
    );
    ensure!(
        inflated_rss_bytes + 180 * MIB < full_bytes,
        "{full_bytes} bytes were resident, now {inflated_rss_bytes}"
    );
    let info = guest.get("vm.info")?;
    ensure!(info["memory_actual_size"] == json!(256 * MIB), "{info}");
    // The statistics should agree with the guest's own values.
    let total_mib = meminfo_mib(&guest, "MemTotal")?;
    guest.wait_until("statistics show the balloon", FOLLOW_LIMIT, || {
        let free_mib = statistic(&guest, "free")? as u64 / MIB;
        Ok(statistic(&guest, "total")? as u64 / MIB == total_mib && free_mib < 200)
    })?;
    // The load exceeds the remaining memory. The guest should deflate the balloon before it kills a
    // process.
    let hog = guest.hog(left_mib + 60, FOLLOW_LIMIT)?;
    ensure!(vmstat(&guest, "oom_kill")? == 0, "A process was killed");
    let saved = guest.metric("foreshore_balloon_oom_deflated_bytes_total", &[])?;
    ensure!(saved > 0.0 && actual_bytes(&guest)? < 256 * MIB, "The metrics count no deflation");
    drop(hog);
    // Deflating the balloon returns all of its memory.
    resize_balloon(&guest, 0)?;
    guest.wait_until("all memory is available again", FOLLOW_LIMIT, || {
        Ok(meminfo_mib(&guest, "MemAvailable")? + 16 > available_mib)
    })?;
    for refused in
        ["foreshore_balloon_refused_pages_total", "foreshore_balloon_refused_requests_total"]
    {
        let count = guest.metrics()?.sum(refused, &[]);
        ensure!(count == 0.0, "{refused}: {count}");
    }
    guest.no_kernel_complaints()
}

/// Two guests free memory, but only one of them reports its free pages. The host should get back
/// memory only from that guest, and only the freed part. The balloons are empty, and no policy is
/// active.
fn reported_free_pages_return_to_the_host() -> Result<()> {
    const FREED_MIB: u64 = 256;
    /// Minimum share of the freed memory that is reported. The rest is in incomplete blocks of 2
    /// MiB, or is used by other programs in the meantime.
    const MIN_RETURNED_PERCENT: u64 = 85;
    let boot = |with_reporting: &str| {
        Guest::builder()
            .name(with_reporting)
            .memory("size=512M")
            .argument("--balloon", &format!("size=0,free_page_reporting={with_reporting}"))
            .cmdline("foreshore.agent=off")
            .pressure("off")
            .boot()
    };
    // The guest without reporting frees its memory first. When the other guest's memory has been
    // returned, this guest has had enough time, too.
    let (without_reporting, with_reporting) = (boot("off")?, boot("on")?);
    let given_back = |guest: &Guest, by: &str| -> Result<u64> {
        let back = guest.metric("foreshore_balloon_given_back_bytes_total", &[("by", by)])?;
        Ok(back as u64)
    };
    let full = |guest: &Guest| -> Result<u64> {
        let hog = guest.hog(FREED_MIB, FOLLOW_LIMIT)?;
        let full_bytes = guest.rss_bytes()?;
        ensure!(
            full_bytes > FREED_MIB * MIB,
            "Only {full_bytes} bytes are resident with {FREED_MIB} MiB in use"
        );
        drop(hog);
        wait_until_freed(guest)?;
        Ok(full_bytes)
    };
    let without_reporting_bytes = full(&without_reporting)?;
    let reported_before = given_back(&with_reporting, "report")?;
    let reporting_bytes = full(&with_reporting)?;
    let min_returned_bytes = FREED_MIB * MIB * MIN_RETURNED_PERCENT / 100;
    with_reporting.wait_until("the freed memory is back on the host", FOLLOW_LIMIT, || {
        Ok(with_reporting.rss_bytes()? + min_returned_bytes <= reporting_bytes)
    })?;
    let reported = given_back(&with_reporting, "report")? - reported_before;
    ensure!(reported >= min_returned_bytes, "Only {reported} bytes were reported");
    ensure!(given_back(&with_reporting, "inflate")? == 0, "The balloon was inflated");
    // Memory in use is not returned: the guest still works and still has some memory.
    let left_bytes = with_reporting.rss_bytes()?;
    ensure!(left_bytes >= 32 * MIB, "Only {left_bytes} bytes of the guest are resident");
    let retained_bytes = without_reporting.rss_bytes()?;
    ensure!(
        retained_bytes + 16 * MIB >= without_reporting_bytes,
        "{without_reporting_bytes} bytes were resident, now {retained_bytes} without free page reporting"
    );
    ensure!(
        given_back(&without_reporting, "report")? == 0,
        "The metrics count reported pages without free page reporting"
    );
    // The guest should be able to use the memory again.
    drop(with_reporting.hog(FREED_MIB, FOLLOW_LIMIT)?);
    with_reporting.no_kernel_complaints()
}

fn a_guest_without_an_agent_is_sized_by_statistics() -> Result<()> {
    let guest = Guest::builder()
        .memory("size=768M")
        .argument("--balloon", "deflate_on_oom=on,free_page_reporting=on")
        .cmdline("foreshore.agent=off")
        // Unit tests cover the default waits.
        .pressure("psi,idle=2s,cool_down=1s")
        .boot()?;
    guest.wait_until("idle memory is in the balloon", FOLLOW_LIMIT, || {
        Ok(actual_bytes(&guest)? >= 128 * MIB)
    })?;
    let pressure = guest.get("vm.pressure")?;
    ensure!(pressure["details"]["source"] == "statistics", "{pressure}");
    ensure!(pressure["details"]["refused"] == json!({}), "{pressure}");
    // The VMM's estimate of the watermarks should be close to the kernel's values, to which
    // khugepaged contributes most.
    let high = "awk '$1 == \"high\" { sum += $2 } END { print sum * 4096 }' /proc/zoneinfo";
    let real: f64 = guest.run(high)?.trim().parse()?;
    let shown = guest.metric("foreshore_pressure_watermark_bytes", &[("watermark", "high")])?;
    ensure!(
        (0.8..1.25).contains(&(shown / real)),
        "The high watermarks are {real} bytes instead of {shown}"
    );
    // The load exceeds the available memory, so the balloon should be deflated in time.
    let need_mib = meminfo_mib(&guest, "MemAvailable")? + 100;
    let before_bytes = actual_bytes(&guest)?;
    let hog = guest.hog(need_mib, FOLLOW_LIMIT)?;
    ensure!(vmstat(&guest, "oom_kill")? == 0, "A process was killed");
    let busy_bytes = actual_bytes(&guest)?;
    ensure!(
        busy_bytes + 64 * MIB < before_bytes,
        "The balloon had {before_bytes} bytes, then {busy_bytes}"
    );
    // Freed memory is first returned to the host by free page reporting. Then the balloon is
    // inflated.
    let full_bytes = guest.rss_bytes()?;
    drop(hog);
    let back = guest.wait_until("free pages are back on the host", FOLLOW_LIMIT, || {
        let reported =
            guest.metric("foreshore_balloon_given_back_bytes_total", &[("by", "report")])?;
        let fallen = guest.rss_bytes()? + need_mib / 2 * MIB < full_bytes;
        Ok(fallen && reported >= (64 * MIB) as f64)
    });
    let refilled = guest.wait_until("idle memory is in the balloon again", FOLLOW_LIMIT, || {
        Ok(actual_bytes(&guest)? > busy_bytes + 64 * MIB)
    });
    if back.is_err() || refilled.is_err() {
        // Diagnostics for the log of a failed test.
        println!("{}", guest.get("vm.pressure")?);
        println!("{}", guest.run("cat /proc/meminfo; dmesg | tail -n 20")?);
    }
    back.and(refilled)?;
    guest.no_kernel_complaints()
}

/// Policy with its parameters, and the reason that it gives for a shrink.
struct Giver {
    policy: &'static str,
    params: &'static str,
    give_back: &'static str,
}

/// Policy that uses available memory.
const PSI: Giver = Giver { policy: "psi", params: r#"{"idle": "2s"}"#, give_back: "surplus" };
/// Policy that uses free memory.
const AMF: Giver = Giver {
    policy: "amf",
    params: r#"{"watermark-scale": 2, "reclaim": 5}"#,
    give_back: "descriptor_space",
};

fn is_given_pm_by(giver: &Giver) -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = Guest::builder()
        .memory("size=768M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        // Boot memory is not inflated, because this test is about PM.
        .argument("--balloon", "floor=768M")
        .cmdline("foreshore.agent=off foreshore.zram=128M")
        .pressure("off")
        .boot()?;
    let followed = is_given_pm(&guest, giver);
    if followed.is_err() {
        // Diagnostics for the log of a failed test.
        println!("{}", guest.get("vm.memory")?);
        println!("{}", guest.get("vm.pressure")?);
        println!("{}", guest.run("cat /proc/meminfo; dmesg | tail -n 20")?);
    }
    followed?;
    guest.no_kernel_complaints()
}

fn is_given_pm(guest: &Guest, giver: &Giver) -> Result<()> {
    let Giver { policy, params, give_back } = giver;
    let params: Value = serde_json::from_str(params)?;
    const MORE_MIB: u64 = 200;
    let pressure = || guest.get("vm.pressure");
    let before = decisions_total(guest)?;
    guest.put("vm.pressure", json!({ "policy": policy, "params": params }))?;
    guest.wait_until("the governor has statistics", FOLLOW_LIMIT, || {
        let info = pressure()?;
        Ok(info["agent"] == "never" && info["details"]["source"] == "statistics")
    })?;
    let plugged = || Ok::<_, anyhow::Error>(zone(guest, "pm")?.plugged_bytes);
    ensure!(plugged()? == 0, "PM is plugged without a shortage");
    // 1. Apply a load that exceeds the memory but is not faster than the statistics.
    let need_mib = meminfo_mib(guest, "MemAvailable")? + MORE_MIB;
    let mut load =
        guest.start_script(FOLLOW_LIMIT, &format!("exec guest-tool leak {need_mib} 60"))?;
    let goal = format!("held {need_mib} ");
    while !load.next_line().context("The load was killed")?.starts_with(&goal) {}
    let (given, swapped) = (plugged()?, vmstat(guest, "pswpout")?);
    println!(
        "{policy}: {} MiB of PM for a load of {need_mib} MiB, {swapped} pages swapped out",
        given / MIB
    );
    ensure!(given >= MORE_MIB / 2 * MIB, "Only {given} bytes of PM are plugged");
    ensure!(vmstat(guest, "oom_kill")? == 0, "A process was killed");
    let grows = |decision: &&Value| decision["direction"] == "grow";
    let decisions = decisions_since(guest, before)?;
    ensure!(
        decisions.iter().any(|decision| grows(&decision)),
        "No decision grew PM: {decisions:?}"
    );
    // 2. PM is returned.
    drop(load);
    guest.wait_until("PM is unplugged", SHRINK_LIMIT, || Ok(plugged()? < BLOCK_MIB * MIB))?;
    let decisions = decisions_since(guest, before)?;
    let shrinks = || decisions.iter().filter(|decision| decision["direction"] == "shrink");
    ensure!(
        shrinks().count() > 0 && shrinks().all(|decision| decision["reason"] == *give_back),
        "No shrink, or one without the reason {give_back}: {decisions:?}"
    );
    ensure!(pressure()?["details"]["refused"] == json!({}), "{}", pressure()?);
    guest.put("vm.pressure", json!({ "policy": "fixed", "size": 0 }))?;
    guest.wait_until("all PM is unplugged", SHRINK_LIMIT, || Ok(plugged()? == 0))
}
