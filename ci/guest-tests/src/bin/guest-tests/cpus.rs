//! Tests of vCPUs with Debian's stock kernels: features, topology, and hotplug.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, Guest, Kernel, this_tests_kernel};
use serde_json::json;

guest_tests::tests![
    vcpus_come_run_and_go: 400 on [V6_12, V6_1 extended] x several => come_and_go(1),
    vcpus_come_and_go_twenty_times: 1200 (extended) on [V6_12, V6_1] x several => come_and_go(20),
    unreleased_vcpus_stay_until_a_reboot: 300 (long) x several,
    pause_nmi_and_reboot_affect_only_present_vcpus: 300 (long) x several,
    guest_cannot_eject_a_vcpu_without_a_request: 240 (extended) x several,
    guest_sees_the_requested_topology: 300 (long) on [V6_12, V6_1 extended] x 4 => check_topologies(&[BOTH]),
    every_topology_is_seen: 600 (extended) on [V6_12, V6_1] x 4 =>
        check_topologies(&[CORES, THREADS, BOTH, PACKAGES]),
    added_vcpus_have_their_place_in_the_topology: 240 x several,
    cpu_features_address_bits_and_affinity_are_applied: 240,
    pause_of_a_minute_causes_no_lockup: 400 (extended) x 2,
];

/// Time limit for starting or releasing a vCPU. The time limit is long because up to four vCPUs
/// share the emulated host's CPU.
const LIMIT: Duration = Duration::from_secs(100);
/// File that ends the load once it exists.
const STOP: &str = "/run/load-is-over";
/// Registers of CPU hotplug (vmm/src/acpi/hotplug_cpus.rs).
const SELECT: &str = "0xe9102020";
const STATUS: &str = "0xe9102024";

fn builder(cpus: u32) -> GuestBuilder {
    Guest::builder().cpus(cpus).max_cpus(4).memory("size=384M").pressure("off")
}

fn resize(guest: &Guest, vcpus: u32) -> Result<u16> {
    Ok(guest.try_put("vm.resize", json!({ "desired_vcpus": vcpus }))?.status)
}

/// Returns the numbers of present, leaving and parked vCPUs.
fn counts(guest: &Guest) -> Result<[f64; 3]> {
    let metrics = guest.metrics()?;
    let count = |state| metrics.value("foreshore_vcpus", &[("state", state)]);
    Ok([count("present")?, count("leaving")?, count("parked")?])
}

/// Adds vCPUs, and brings them online in the guest as udev would. Afterwards, vCPUs 0 to `to` - 1
/// are running.
fn grow(guest: &Guest, from: u32, to: u32) -> Result<()> {
    ensure!(resize(guest, to)? == 204, "A resize to {to} vCPUs was refused");
    for cpu in from..to {
        let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        guest.wait_until_run("the guest has the vCPU", LIMIT, &format!("test -e {online}"))?;
        guest.run_within(LIMIT, &format!("echo 1 >{online}"))?;
    }
    let online = guest.run("cat /sys/devices/system/cpu/online")?;
    ensure!(online.trim() == format!("0-{}", to - 1), "{online} of {to} vCPUs are online");
    // Runs a program on each vCPU.
    for cpu in 0..to {
        guest.run_within(LIMIT, &format!("taskset {:x} true", 1 << cpu))?;
    }
    Ok(())
}

fn shrink(guest: &Guest, to: u32) -> Result<()> {
    ensure!(resize(guest, to)? == 204, "A resize to {to} vCPUs was refused");
    guest.wait_until("the guest has ejected the vCPUs", LIMIT, || {
        let [present, leaving, _] = counts(guest)?;
        Ok(present == f64::from(to) && leaving == 0.0)
    })?;
    let expected = if to == 1 { "0".to_owned() } else { format!("0-{}", to - 1) };
    guest.wait_until_run(
        "the guest has no other vCPUs",
        LIMIT,
        &format!("test $(cat /sys/devices/system/cpu/present) = {expected}"),
    )
}

fn load(guest: &Guest) -> Result<Script> {
    let loops = format!("for i in 1 2 3 4; do while ! test -e {STOP}; do :; done & done; wait");
    guest.start_script(Duration::from_secs(1200), &loops)
}

fn boot_vcpus(guest: &Guest) -> Result<u64> {
    let info = guest.get("vm.info")?;
    Ok(info["config"]["cpus"]["boot_vcpus"].as_u64().unwrap_or_default())
}

fn come_and_go(rounds: u32) -> Result<()> {
    let events = this_tests_dir().join("events");
    let monitor = format!("path={}", events.display());
    let guest = builder(1).argument("--event-monitor", &monitor).boot()?;
    ensure!(counts(&guest)? == [1.0, 0.0, 0.0], "The guest did not boot with 1 vCPU");
    let load = load(&guest)?;
    for round in 0..rounds {
        grow(&guest, 1, 4)?;
        ensure!(
            counts(&guest)? == [4.0, 0.0, 0.0] && boot_vcpus(&guest)? == 4,
            "The guest does not have 4 vCPUs in round {round}"
        );
        shrink(&guest, 1)?;
        ensure!(
            counts(&guest)? == [1.0, 0.0, 3.0] && boot_vcpus(&guest)? == 1,
            "The guest does not have 1 vCPU in round {round}"
        );
    }
    // Adds vCPUs in steps, and removes only some of them.
    grow(&guest, 1, 3)?;
    shrink(&guest, 2)?;
    grow(&guest, 2, 4)?;
    guest.run(&format!("touch {STOP}"))?;
    let output = load.finish()?;
    ensure!(output.code == 0, "The load has ended with {}", output.code);
    let emitted = fs::read_to_string(&events)?;
    let resized = emitted.matches("vcpus-resized").count();
    ensure!(resized == 2 * rounds as usize + 3, "{resized} resizes are events:\n{emitted}");
    guest.no_kernel_complaints()
}

/// Makes the guest ignore requests for ejection (drivers/acpi/scan.c, acpi_device_hotplug).
fn refuse_ejection(guest: &Guest) -> Result<()> {
    guest.run("echo 0 >/sys/firmware/acpi/hotplug/processor/enabled").map(drop)
}

fn unreleased_vcpus_stay_until_a_reboot() -> Result<()> {
    let guest = builder(4).boot()?;
    for (vcpus, what) in [(0, "none"), (5, "more than may be")] {
        ensure!(resize(&guest, vcpus)? == 400, "A resize to {what} was accepted");
    }
    refuse_ejection(&guest)?;
    ensure!(resize(&guest, 2)? == 204, "A resize to 2 vCPUs was refused");
    let log_check = "dmesg | grep -q 'Eject disabled'";
    guest.wait_until_run("the guest has refused", LIMIT, log_check)?;
    ensure!(counts(&guest)? == [2.0, 2.0, 0.0], "The vCPUs are not counted as leaving");
    for vcpus in [1, 3, 4] {
        ensure!(
            resize(&guest, vcpus)? == 429,
            "A resize to {vcpus} vCPUs was accepted while vCPUs are leaving"
        );
    }
    ensure!(resize(&guest, 2)? == 204, "A repeated resize to 2 vCPUs was refused");
    ensure!(
        guest.run("cat /sys/devices/system/cpu/online")?.trim() == "0-3",
        "The leaving vCPUs do not run"
    );
    ensure!(boot_vcpus(&guest)? == 2, "The configuration does not have 2 boot vCPUs");
    guest.command("vm.reboot")?;
    guest.wait_for_shell(BOOT_LIMIT)?;
    ensure!(
        guest.run("cat /sys/devices/system/cpu/online")?.trim() == "0-1",
        "The guest did not boot with 2 vCPUs"
    );
    ensure!(counts(&guest)? == [2.0, 0.0, 0.0], "vCPUs are still counted as leaving");
    grow(&guest, 2, 3)?;
    guest.no_kernel_complaints()
}

fn pause_nmi_and_reboot_affect_only_present_vcpus() -> Result<()> {
    let guest = builder(1).boot()?;
    grow(&guest, 1, 4)?;
    shrink(&guest, 3)?;
    // One vCPU is parked, one is running, and one is present but offline.
    guest.run("echo 0 >/sys/devices/system/cpu/cpu2/online")?;
    for _ in 0..5 {
        guest.command("vm.pause")?;
        guest.command("vm.resume")?;
    }
    guest.run("taskset 2 true")?;
    guest.run("echo 1 >/sys/devices/system/cpu/cpu2/online")?;
    shrink(&guest, 2)?;
    guest.no_kernel_complaints()?;
    guest.command("vm.nmi")?;
    for cpu in 0..2 {
        let log_check =
            format!("dmesg | grep -q 'NMI received for unknown reason .* on CPU {cpu}'");
        guest.wait_until_run("the vCPU has received its NMI", LIMIT, &log_check)?;
    }
    // The parked vCPUs should return without receiving the NMI.
    grow(&guest, 2, 4)?;
    guest.run("! dmesg | grep 'NMI received for unknown reason .* on CPU [23]'")?;
    guest.reboot_from_inside()?;
    ensure!(
        guest.run("cat /sys/devices/system/cpu/online")?.trim() == "0-3",
        "The guest did not boot with 4 vCPUs"
    );
    shrink(&guest, 1)?;
    guest.no_kernel_complaints()
}

fn guest_cannot_eject_a_vcpu_without_a_request() -> Result<()> {
    // With a page attribute table, Linux would refuse to map the registers again, because ACPI has
    // already mapped them.
    let guest = builder(3).cmdline("nopat").boot()?;
    let eject = |index: &str| format!("devmem {SELECT} 32 {index} && devmem {STATUS} 32 1");
    // The list includes the vCPU that writes. No ejection has been requested.
    for index in ["0", "1", "2", "3", "4", "255", "256", "0xffffffff"] {
        guest.run(&eject(index))?;
    }
    ensure!(counts(&guest)? == [3.0, 0.0, 0.0], "A vCPU was ejected without a request");
    guest.run("for cpu in 1 2 4; do taskset $cpu true; done")?;
    // The vCPU whose removal was requested ejects itself without being stopped first.
    refuse_ejection(&guest)?;
    ensure!(resize(&guest, 2)? == 204, "A resize to 2 vCPUs was refused");
    let _last_words = guest.start_script(LIMIT, &format!("taskset 4 sh -c '{}'", eject("2")))?;
    guest.wait_until("the vCPU is parked", LIMIT, || Ok(counts(&guest)? == [2.0, 0.0, 1.0]))?;
    guest.still_running()?;
    // It returns as a vCPU that the guest must start, whatever its previous state.
    ensure!(resize(&guest, 3)? == 204, "A resize to 3 vCPUs was refused");
    ensure!(counts(&guest)? == [3.0, 0.0, 0.0], "The guest does not have 3 vCPUs");
    guest.command("vm.reboot")?;
    guest.wait_for_shell(BOOT_LIMIT)?;
    ensure!(
        guest.run("cat /sys/devices/system/cpu/online")?.trim() == "0-2",
        "The guest did not boot with 3 vCPUs"
    );
    guest.no_kernel_complaints()
}

/// Topology reported by the guest: threads per core, cores per package, and packages.
fn shape(guest: &Guest) -> Result<[usize; 3]> {
    let distinct = |file: &str| -> Result<Vec<String>> {
        let text = guest.run(&format!("cat /sys/devices/system/cpu/cpu[0-9]*/topology/{file}"))?;
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines.dedup();
        Ok(lines)
    };
    let threads = guest.run("cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list")?;
    let packages = distinct("physical_package_id")?.len();
    let cores = distinct("core_cpus_list")?.len();
    Ok([numbers(&threads), cores / packages, packages])
}

/// Number of entries in one of the kernel's lists, such as `0-1,4`.
fn numbers(list: &str) -> usize {
    let count = |part: &str| {
        let mut ends =
            part.split('-').map(|number| number.trim().parse::<usize>().unwrap_or_default());
        let first = ends.next().unwrap_or_default();
        ends.next().unwrap_or(first) - first + 1
    };
    list.trim().split(',').map(count).sum()
}

/// Requested topology, with the expected threads per core, cores per package, and packages.
type Topology = (&'static str, [usize; 3]);

const CORES: Topology = ("1:4:1:1", [1, 4, 1]);
const THREADS: Topology = ("2:2:1:1", [2, 2, 1]);
const BOTH: Topology = ("2:1:1:2", [2, 1, 2]);
const PACKAGES: Topology = ("1:1:1:4", [1, 1, 4]);

fn check_topologies(topologies: &[Topology]) -> Result<()> {
    for &(topology, expected) in topologies {
        let guest = shaped(&format!("boot=4,max=4,topology={topology}")).boot()?;
        let (actual, [threads, cores, packages]) = (shape(&guest)?, expected);
        // Before the parser of 6.9, Linux finds the threads of an AMD core only with TOPOEXT
        // (arch/x86/kernel/cpu/amd.c, amd_get_topology). The emulated host's processor lacks it, so
        // Linux treats threads as cores.
        let flat = this_tests_kernel() == Kernel::V6_1 && amd_without_topoext(&guest)?;
        let expected_numbers = if flat { [1, threads * cores, packages] } else { expected };
        ensure!(
            actual == expected_numbers,
            "The guest sees {topology} as {actual:?} instead of {expected_numbers:?}"
        );
        let info = guest.get("vm.info")?;
        let shown = &info["config"]["cpus"]["topology"];
        ensure!(
            shown["threads_per_core"] == expected[0] && shown["packages"] == expected[2],
            "{info}"
        );
        guest.no_kernel_complaints()?;
    }
    Ok(())
}

/// Returns true if the guest's processor is from AMD and leaf 0x8000_001e does not report which
/// threads share a core.
fn amd_without_topoext(guest: &Guest) -> Result<bool> {
    let info = guest.run("cat /proc/cpuinfo")?;
    Ok(info.contains("AuthenticAMD") && !info.split_whitespace().any(|word| word == "topoext"))
}

fn shaped(flag: &str) -> GuestBuilder {
    Guest::builder().without("--cpus").argument("--cpus", flag).memory("size=384M").pressure("off")
}

fn added_vcpus_have_their_place_in_the_topology() -> Result<()> {
    let guest = shaped("boot=1,max=4,topology=2:2:1:1").boot()?;
    grow(&guest, 1, 4)?;
    ensure!(shape(&guest)? == [2, 2, 1], "The guest sees {:?}", shape(&guest)?);
    shrink(&guest, 1)?;
    guest.no_kernel_complaints()
}

/// Checks that CPUID settings are visible in the guest, and that threads run on their configured
/// CPUs.
fn cpu_features_address_bits_and_affinity_are_applied() -> Result<()> {
    // Index of the last CPU. On a host with a single CPU, the test proves nothing. On hardware,
    // `ci/test --guest` has more.
    let last = thread::available_parallelism()?.get() - 1;
    let cpus = format!("boot=1,nested=off,max_phys_bits=38,affinity=[0@[{last}]]");
    let guest = shaped(&cpus).boot()?;
    let flags = guest.run("grep -m1 ^flags /proc/cpuinfo")?;
    ensure!(
        flags.split_whitespace().all(|flag| flag != "svm" && flag != "vmx"),
        "The guest can run guests: {flags}"
    );
    guest.run("grep -q '^address sizes.*: 38 bits physical' /proc/cpuinfo")?;
    let mut found = 0;
    for task in fs::read_dir(format!("/proc/{}/task", guest.pid()))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        if status.starts_with("Name:\tvcpu0\n") {
            found += 1;
            let here = format!("Cpus_allowed_list:\t{last}\n");
            ensure!(status.contains(&here), "vCPU 0 runs elsewhere: {status}");
        }
    }
    ensure!(found == 1, "{found} threads have the name of vCPU 0");
    guest.no_kernel_complaints()?;
    drop(guest);
    let refusal = shaped("boot=1,affinity=[0@[1000]]").expect_refusal()?;
    ensure!(refusal.message.contains("affinity="), "{}", refusal.message);
    let refusal = shaped("boot=1,features=amx").expect_refusal()?;
    ensure!(refusal.message.contains("no AMX for guests"), "{}", refusal.message);
    Ok(())
}

/// Pause that exceeds the time limit of the guest's watchdog for hung vCPUs (2 x watchdog_thresh,
/// which is 10 s).
const PAUSE: Duration = Duration::from_secs(60);

fn pause_of_a_minute_causes_no_lockup() -> Result<()> {
    for clock in ["kvm-clock", "tsc"] {
        let guest = builder(2).cmdline(&format!("clocksource={clock}")).boot()?;
        let load = load(&guest)?;
        guest.command("vm.pause")?;
        // This test is about elapsed time, so it has to sleep.
        thread::sleep(PAUSE);
        guest.command("vm.resume")?;
        guest.run_within(LIMIT, &format!("touch {STOP}"))?;
        ensure!(load.finish()?.code == 0, "{clock}: the load failed");
        guest.no_kernel_complaints()?;
    }
    Ok(())
}
