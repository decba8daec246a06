//! Memory comes and goes by virtio-balloon, and a guest without an agent is sized by its statistics.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::Guest;
use guest_tests::guest::{Kernel, Script};
use serde_json::json;

use crate::zones::{MIB, vmstat};

guest_tests::tests![
    a_balloon_takes_and_gives_memory_and_saves_a_guest_from_the_oom_killer: 300,
    a_guest_without_an_agent_is_sized_by_its_balloons_statistics: 300,
];

/// For a driver to follow, under emulation.
const FOLLOW_LIMIT: Duration = Duration::from_secs(120);

/// A line of /proc/meminfo.
fn meminfo_mib(guest: &Guest, what: &str) -> Result<u64> {
    let text = guest.run(&format!("awk '/^{what}:/ {{ print int($2 / 1024) }}' /proc/meminfo"))?;
    text.trim().parse().with_context(|| format!("{what} in /proc/meminfo: {text:?}"))
}

/// What is in the balloon.
fn actual_bytes(guest: &Guest) -> Result<u64> {
    let info = guest.api("GET", "vm.info", None)?;
    info["balloon"]["actual_bytes"].as_u64().with_context(|| format!("vm.info without a balloon: {info}"))
}

fn ask(guest: &Guest, bytes: u64) -> Result<()> {
    guest.api("PUT", "vm.resize", Some(json!({ "desired_balloon": bytes })))?;
    guest.wait_until("the balloon has its size", FOLLOW_LIMIT, || Ok(actual_bytes(guest)? == bytes))
}

fn statistic(guest: &Guest, name: &str) -> Result<f64> {
    guest.metrics()?.value("foreshore_balloon_guest_bytes", &[("statistic", name)])
}

/// Fills guest memory; an error if it is killed before all of it is held.
fn fill(guest: &Guest, mib: u64) -> Result<Script> {
    let mut hog = guest.start_script(FOLLOW_LIMIT, &format!("exec guest-tool hog {mib}"))?;
    let goal = format!("held {mib}");
    while let Some(line) = hog.next_line() {
        if line == goal {
            return Ok(hog);
        }
    }
    anyhow::bail!("Of {mib} MiB not all was held")
}

/// Fills memory and lets it go.
fn touch(guest: &Guest, mib: u64) -> Result<()> {
    drop(fill(guest, mib)?);
    guest.wait_until("what was filled is free", FOLLOW_LIMIT, || {
        Ok(guest.try_run(FOLLOW_LIMIT, "pidof guest-tool")?.code != 0)
    })
}

fn a_balloon_takes_and_gives_memory_and_saves_a_guest_from_the_oom_killer() -> Result<()> {
    let guest = Guest::builder()
        .kernel(Kernel::V6_1)
        .memory("size=512M")
        .argument("--balloon", "size=0,deflate_on_oom=on")
        .cmdline("foreshore.agent=off")
        .pressure("off")
        .boot()?;
    // What the host holds falls with what is taken, whichever of the free pages the driver takes.
    let free_mib = meminfo_mib(&guest, "MemFree")?;
    ensure!(free_mib > 320, "Only {free_mib} MiB are free: the test needs more");
    touch(&guest, free_mib - 40)?;
    let (available_mib, full_bytes) = (meminfo_mib(&guest, "MemAvailable")?, guest.rss_bytes()?);
    ask(&guest, 256 * MIB)?;
    let (left_mib, taken_bytes) = (meminfo_mib(&guest, "MemAvailable")?, guest.rss_bytes()?);
    ensure!(left_mib + 240 < available_mib, "{available_mib} MiB were available, and now {left_mib}");
    ensure!(taken_bytes + 180 * MIB < full_bytes, "{full_bytes} bytes were resident, and now {taken_bytes}");
    let info = guest.api("GET", "vm.info", None)?;
    ensure!(info["memory_actual_size"] == json!(256 * MIB), "{info}");
    // Statistics say the same as the guest does itself.
    let total_mib = meminfo_mib(&guest, "MemTotal")?;
    guest.wait_until("statistics show the balloon", FOLLOW_LIMIT, || {
        let free_mib = statistic(&guest, "free")? as u64 / MIB;
        Ok(statistic(&guest, "total")? as u64 / MIB == total_mib && free_mib < 200)
    })?;
    // More than is left: the guest takes it out of the balloon before it kills anybody.
    let hog = fill(&guest, left_mib + 60)?;
    ensure!(vmstat(&guest, "oom_kill")? == 0, "Something was killed");
    let saved = guest.metrics()?.value("foreshore_balloon_oom_deflated_bytes_total", &[])?;
    ensure!(saved > 0.0 && actual_bytes(&guest)? < 256 * MIB, "Nothing was taken out of the balloon");
    drop(hog);
    // And all of it back, when it is asked to.
    ask(&guest, 0)?;
    guest.wait_until("all memory is available again", FOLLOW_LIMIT, || {
        Ok(meminfo_mib(&guest, "MemAvailable")? + 16 > available_mib)
    })?;
    let refused = guest.metrics()?.sum("foreshore_balloon_refused_total", &[]);
    ensure!(refused == 0.0, "{refused} pages or requests were refused");
    guest.no_kernel_complaints()
}

fn a_guest_without_an_agent_is_sized_by_its_balloons_statistics() -> Result<()> {
    let guest = Guest::builder()
        .memory("size=768M")
        .argument("--balloon", "deflate_on_oom=on,free_page_reporting=on")
        .cmdline("foreshore.agent=off")
        .pressure("psi")
        .boot()?;
    guest.wait_until("memory that is idle goes into the balloon", FOLLOW_LIMIT, || {
        Ok(actual_bytes(&guest)? >= 128 * MIB)
    })?;
    let pressure = guest.api("GET", "vm.pressure", None)?;
    ensure!(pressure["details"]["source"] == "statistics", "{pressure}");
    ensure!(pressure["details"]["refused"] == json!({}), "{pressure}");
    // The watermarks are those that the kernel has, not far off: khugepaged's share is most of them.
    let high = "awk '$1 == \"high\" { sum += $2 } END { print sum * 4096 }' /proc/zoneinfo";
    let real: f64 = guest.run(high)?.trim().parse()?;
    let shown = guest.metrics()?.value("foreshore_pressure_watermark_bytes", &[("watermark", "high")])?;
    ensure!((0.8..1.25).contains(&(shown / real)), "The high watermarks are {real} bytes, not {shown}");
    // More than it has at hand: it comes out of the balloon in time.
    let need_mib = meminfo_mib(&guest, "MemAvailable")? + 100;
    let before_bytes = actual_bytes(&guest)?;
    let hog = fill(&guest, need_mib)?;
    ensure!(vmstat(&guest, "oom_kill")? == 0, "Something was killed");
    let busy_bytes = actual_bytes(&guest)?;
    ensure!(busy_bytes + 64 * MIB < before_bytes, "{before_bytes} bytes, then {busy_bytes} in the balloon");
    // What is freed goes back to the host without anybody asking, and then into the balloon.
    let full_bytes = guest.rss_bytes()?;
    drop(hog);
    let back = guest.wait_until("free pages are back on the host", FOLLOW_LIMIT, || {
        let reported =
            guest.metrics()?.value("foreshore_balloon_given_back_bytes_total", &[("by", "report")])?;
        let fallen = guest.rss_bytes()? + need_mib / 2 * MIB < full_bytes;
        Ok(fallen && reported >= (64 * MIB) as f64)
    });
    let again = guest.wait_until("idle memory goes into the balloon again", FOLLOW_LIMIT, || {
        Ok(actual_bytes(&guest)? > busy_bytes + 64 * MIB)
    });
    if back.is_err() || again.is_err() {
        // What a person would ask next.
        println!("{}", guest.api("GET", "vm.pressure", None)?);
        println!("{}", guest.run("cat /proc/meminfo; dmesg | tail -n 20")?);
    }
    back.and(again)?;
    guest.no_kernel_complaints()
}
