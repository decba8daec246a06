//! A guest that means harm gets an error, or a device that wants a reset. Never the VMM.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::{Guest, Pool, skip};
use serde_json::json;

use crate::zones::{MIB, zone};

guest_tests::tests![
    buffers_in_unplugged_memory_are_survived_while_it_comes_and_goes: 240,
    garbage_from_the_rng_driver_is_survived,
    garbage_from_the_vsock_driver_is_survived,
    garbage_from_the_mem_driver_is_survived,
    garbage_from_the_pmem_driver_is_survived,
    garbage_from_the_blk_driver_is_survived,
    garbage_from_the_net_driver_is_survived,
    a_touch_of_unplugged_memory_finds_nothing,
];

// PCI device ids: 0x1040 and the device's type (virtio 1.3, 4.1.2 and 5).
const NET: &str = "0x1041";
const BLK: &str = "0x1042";
const RNG: &str = "0x1044";
const VSOCK: &str = "0x1053";
const MEM: &str = "0x1058";
const PMEM: &str = "0x105b";

/// Most of the garbage is not answered: each waits some milliseconds.
const GARBAGE_CHAINS: u64 = 1000;
/// Where it is, the attack ends.
const STOP: &str = "/run/attack-is-over";
const ATTACK_LIMIT: Duration = Duration::from_secs(90);

fn target() -> GuestBuilder {
    Guest::builder()
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=512M")
        .pressure("off")
        .cmdline("foreshore.agent=off")
}

/// First address and end of the range that the guest's first virtio-mem device manages.
fn hotplug_range(guest: &Guest) -> Result<(u64, u64)> {
    let iomem = guest.run("cat /proc/iomem")?;
    let line = iomem.lines().find(|line| line.contains(" : virtio") && !line.starts_with(' '));
    let line = line.with_context(|| format!("No range of a virtio-mem device in\n{iomem}"))?;
    let (range, _) = line.split_once(" : ").context("No range")?;
    let (first, last) = range.trim().split_once('-').context("No range")?;
    Ok((u64::from_str_radix(first, 16)?, u64::from_str_radix(last, 16)? + 1))
}

fn buffers_in_unplugged_memory_are_survived_while_it_comes_and_goes() -> Result<()> {
    let guest = target().boot()?;
    let (first, end) = hotplug_range(&guest)?;
    // What is plugged stays offline, so that the device's random bytes hit nothing the guest uses.
    guest.run("echo offline >/sys/devices/system/memory/auto_online_blocks")?;
    let attack = guest.start_script(
        ATTACK_LIMIT,
        &format!("exec guest-tool hostile-range {RNG} {first:#x} {end:#x} {STOP}"),
    )?;
    let mut resizes = 0;
    for mib in [896, 384].into_iter().cycle().take(16) {
        guest.api("PUT", "vm.resize", Some(json!({ "desired_ram": mib * MIB })))?;
        guest.wait_until("it is plugged or unplugged", ATTACK_LIMIT, || {
            Ok(zone(&guest, "dram")?.plugged_bytes == (mib - 384) * MIB)
        })?;
        resizes += 1;
    }
    guest.run(&format!("touch {STOP}"))?;
    let Report { sent, answered, .. } = ended_well(attack)?;
    ensure!(sent > 100 && answered == sent, "{answered} of {sent} buffers in {resizes} resizes");
    still_well(&guest)
}

/// What an attack reports.
struct Report {
    sent: u64,
    answered: u64,
    restarted: u64,
}

fn ended_well(attack: Script) -> Result<Report> {
    let output = attack.finish()?;
    ensure!(output.code == 0, "The attack ended with {}: {}", output.code, output.stderr);
    report(&output.stdout)
}

/// `hostile: sent 1000, answered 812, restarted 117 times`
fn report(text: &str) -> Result<Report> {
    let number = |word: &str| {
        // On a console the line may not be whole yet.
        let (line, _) = text.split_once("hostile: ")?.1.split_once(" times")?;
        let (_, rest) = line.split_once(word)?;
        rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let report = || {
        Some(Report { sent: number("sent")?, answered: number("answered")?, restarted: number("restarted")? })
    };
    report().with_context(|| format!("No report of an attack: {text:?}"))
}

/// A device that has given its queues up, or takes nothing out of them, was not attacked. Few of vsock's chains are
/// answered: its receive and event queues wait for something to tell.
fn garbage_was_taken(report: &Report) -> Result<()> {
    let Report { sent, answered, restarted } = report;
    ensure!(
        *sent == GARBAGE_CHAINS && *answered >= sent / 40 && *restarted >= sent / 50,
        "Of {sent} chains {answered} were answered, with {restarted} restarts"
    );
    Ok(())
}

fn still_well(guest: &Guest) -> Result<()> {
    guest.api("GET", "vmm.ping", None)?;
    guest.api("GET", "vm.info", None)?;
    ensure!(guest.run("echo alive")? == "alive\n", "The guest does not answer");
    Ok(())
}

fn garbage_is_survived(guest: &Guest, device: &str) -> Result<()> {
    let attack = guest
        .start_script(ATTACK_LIMIT, &format!("exec guest-tool hostile-garbage {device} {GARBAGE_CHAINS}"))?;
    garbage_was_taken(&ended_well(attack)?)?;
    still_well(guest)
}

fn garbage_from_the_rng_driver_is_survived() -> Result<()> {
    garbage_is_survived(&target().boot()?, RNG)
}

fn garbage_from_the_mem_driver_is_survived() -> Result<()> {
    garbage_is_survived(&target().boot()?, MEM)
}

fn garbage_from_the_pmem_driver_is_survived() -> Result<()> {
    let pool = Pool::create("128M")?;
    pool.create_volume("data", "32M")?;
    let volume = format!("pool={},name=data,interface=virtio-pmem", pool.name());
    let guest = target().cpus(1).pm_volume(&volume).boot()?;
    garbage_is_survived(&guest, PMEM)?;
    drop(guest);
    pool.check().map(drop)
}

fn garbage_from_the_blk_driver_is_survived() -> Result<()> {
    let image = guest_tests::runner::this_tests_dir().join("image");
    std::fs::create_dir_all(guest_tests::runner::this_tests_dir())?;
    std::fs::File::create(&image)?.set_len(32 * MIB)?;
    let guest = target().argument("--disk", &format!("path={}", image.display())).boot()?;
    garbage_is_survived(&guest, BLK)?;
    let sent = guest.metrics()?.value("foreshore_disk_bad_requests_total", &[("disk", "_disk0")])?;
    ensure!(sent > 0.0, "No request was refused");
    Ok(())
}

fn garbage_from_the_net_driver_is_survived() -> Result<()> {
    if !crate::net::has_tun() {
        return skip(crate::net::NO_TUN);
    }
    let guest = target().argument("--net", "tap=fstap8").boot()?;
    garbage_is_survived(&guest, NET)?;
    let refused = guest.metrics()?.value("foreshore_net_bad_requests_total", &[("net", "_net0")])?;
    ensure!(refused > 0.0, "No request was refused");
    Ok(())
}

/// The tests' own way into the guest is what is attacked here: the attack reports on the console.
fn garbage_from_the_vsock_driver_is_survived() -> Result<()> {
    let guest = target().boot()?;
    let command = format!(
        "setsid sh -c 'guest-tool hostile-garbage {VSOCK} {GARBAGE_CHAINS} >/dev/console 2>&1' >/dev/null 2>&1 &"
    );
    guest.run(&command)?;
    guest.wait_until("the attack is over", ATTACK_LIMIT, || Ok(report(&guest.console_log()?).is_ok()))?;
    garbage_was_taken(&report(&guest.console_log()?)?)?;
    guest.api("GET", "vmm.ping", None)?;
    guest.api("GET", "vm.info", None).map(drop)
}

/// Where no slot is there is no memory: all ones, as on a bus where nobody answers. The VM lives on.
fn a_touch_of_unplugged_memory_finds_nothing() -> Result<()> {
    // Where virtio_mem has claimed the range, the kernel keeps even root out of it.
    // There is an SRAT, which names the range, once there are two nodes.
    let pool = Pool::create("256M")?;
    let memory = format!("pool={},size=128M", pool.name());
    let guest = target().pm_memory(&memory).cmdline("iomem=relaxed foreshore.skip=virtio_mem").boot()?;
    let range = guest.run("dmesg | sed -n 's/.*SRAT: .*mem 0x\\([0-9a-f]*\\)-.*hotplug.*/\\1/p'")?;
    let first =
        range.lines().next().with_context(|| format!("SRAT has no hot-pluggable range: {range:?}"))?;
    let answer = guest.run(&format!("devmem 0x{first} 64"))?;
    ensure!(answer.trim() == "0xFFFFFFFFFFFFFFFF", "The guest read {answer:?} where nothing is plugged");
    still_well(&guest)
}
