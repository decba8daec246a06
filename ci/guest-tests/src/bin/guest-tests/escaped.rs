//! System calls of an attacker in all kinds of threads of a VMM, whose devices a stock guest uses.

use std::fs;

use anyhow::{Result, ensure};
use escaped_guest::threads::{self, ThreadKind, VmmThread};
use escaped_guest::{
    ATTEMPTS, Confinement, REFUSED, Targets, TracedThread, check_attempts,
    check_attempts_without_limits, execute_program, open_through_ring_of_disk,
};
use guest_tests::disk::sparse_file;
use guest_tests::guest::GuestBuilder;
use guest_tests::host::load_modules;
use guest_tests::pool::Pool;
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, Guest};

guest_tests::tests![
    attempts_succeed_without_confinement: 240 (long),
    attempts_fail_in_each_kind_of_thread: 240,
    refused_attempt_ends_the_vmm_with_a_log_line: 240,
    attempts_are_logged_in_log_mode: 240 (long),
];

const MIB: u64 = 1 << 20;
/// Volume with holes that the guest fills.
const VOLUME: &str = "name=data,size=64M,create=on,interface=nvdimm";

/// Returns a builder of a VM that has threads of all kinds.
pub(crate) fn builder() -> Result<GuestBuilder> {
    load_modules(&["tun"]);
    let disk = sparse_file("disk", 64 * MIB)?;
    let pool = Pool::create("128M")?;
    let events = this_tests_dir().join("events");
    Ok(Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pressure("psi")
        .argument("--disk", &format!("path={}", disk.display()))
        .argument("--net", "tap=escaped0")
        .argument("--balloon", "size=0")
        .pm_volume(&format!("pool={},{VOLUME}", pool.path().display()))
        .argument("--event-monitor", &format!("path={}", events.display())))
}

/// Returns objects of the host in a folder outside the limits of VMs.
fn targets() -> Result<Targets> {
    let folder = std::env::temp_dir().join(format!("no-vm-{}", std::process::id()));
    fs::create_dir(&folder)?;
    Targets::create(&folder)
}

fn boot(seccomp: &str, landlock: &str) -> Result<(Guest, Vec<VmmThread>)> {
    let guest = builder()?.words(["--seccomp", seccomp, "--landlock", landlock]).boot()?;
    let threads = threads::wait_for_kinds(guest.pid(), &ThreadKind::ALL)?;
    Ok((guest, threads))
}

fn attach(guest: &Guest, thread: &VmmThread) -> Result<TracedThread> {
    TracedThread::attach(guest.pid(), thread.id)
}

fn attempts_fail_in_each_kind_of_thread() -> Result<()> {
    let targets = targets()?;
    let (guest, _) = boot("errno", "on")?;
    let threads = threads::of(guest.pid())?;
    // This attempt is the first, because the set-up thread's attempts create a second ring.
    let queue = threads.iter().find(|thread| thread.name == "_disk0_q0").expect("one disk");
    let result = open_through_ring_of_disk(&mut attach(&guest, queue)?)?;
    ensure!(result == -i64::from(libc::EACCES), "openat through the ring of the disk: {result}");
    for thread in &threads {
        check_attempts(thread, &mut attach(&guest, thread)?, &targets, Confinement::On)?;
    }
    ensure!(targets.is_pool_unchanged()?);
    // The threads continue with their work.
    guest.run("dd if=/dev/vda of=/dev/null bs=1M count=4")?;
    guest.get("vm.info")?;
    guest.no_kernel_complaints()
}

fn attempts_succeed_without_confinement() -> Result<()> {
    let targets = targets()?;
    check_attempts_without_limits(&targets)?;
    let (guest, threads) = boot("false", "off")?;
    for thread in &threads {
        check_attempts(thread, &mut attach(&guest, thread)?, &targets, Confinement::Off)?;
    }
    ensure!(!targets.is_pool_unchanged()?);
    let vcpu = threads.iter().find(|thread| thread.name == "vcpu0").expect("one of each kind");
    execute_program(attach(&guest, vcpu)?)?;
    let status = guest.wait_for_exit(BOOT_LIMIT)?;
    ensure!(status.success(), "the program ended with {status}");
    Ok(())
}

fn refused_attempt_ends_the_vmm_with_a_log_line() -> Result<()> {
    let targets = targets()?;
    let (guest, threads) = boot("true", "auto")?;
    let vcpu = threads.iter().find(|thread| thread.name == "vcpu0").expect("one of each kind");
    let attempt = &ATTEMPTS[0];
    let result = attempt.make(&mut attach(&guest, vcpu)?, &targets);
    ensure!(result.is_err(), "{result:?}");
    let log = guest.vmm_log()?;
    ensure!(log.contains(&attempt.log_line(vcpu)), "{log}");
    let status = guest.wait_for_exit(BOOT_LIMIT)?;
    ensure!(status.code() == Some(REFUSED), "the VMM ended with {status}");
    Ok(())
}

fn attempts_are_logged_in_log_mode() -> Result<()> {
    let targets = targets()?;
    let (guest, threads) = boot("log", "on")?;
    for thread in &threads {
        let mut traced = attach(&guest, thread)?;
        for attempt in &ATTEMPTS {
            attempt.make(&mut traced, &targets)?;
        }
    }
    let log = guest.vmm_log()?;
    for thread in &threads {
        let kind = thread.kind()?;
        for attempt in ATTEMPTS.iter().filter(|attempt| attempt.is_filtered(kind)) {
            ensure!(log.contains(&attempt.log_line(thread)), "{}: {log}", attempt.name);
        }
    }
    guest.no_kernel_complaints()
}
