//! Tests that hostile guests cause errors or device resets, but do not harm the VMM.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::{Guest, Pool};
use serde_json::json;

use crate::net::{self, Net};
use crate::vhost_net;
use crate::zones::{MIB, wait_until_plugged, zone};

guest_tests::tests![
    buffers_in_unplugged_memory_are_survived_while_it_comes_and_goes: 240 x 2,
    garbage_from_the_rng_mem_and_vsock_drivers_is_survived: 240 (long) x 2,
    garbage_from_the_net_driver_is_survived (long) x 2,
    garbage_from_the_pmem_driver_is_survived (long),
    garbage_from_the_blk_driver_is_survived x 2,
    garbage_from_the_net_driver_is_survived_by_the_kernel (long) x 2,
    frames_in_unplugged_memory_are_survived_by_the_kernel: 240 (long) x 2,
    read_of_unplugged_memory_returns_all_ones x 2,
];

// PCI device IDs. They are 0x1040 plus the type of the device (virtio 1.3, 4.1.2 and 5).
const NET: &str = "0x1041";
const BLK: &str = "0x1042";
const RNG: &str = "0x1044";
const VSOCK: &str = "0x1053";
const MEM: &str = "0x1058";
const PMEM: &str = "0x105b";

/// Number of garbage chains. Most of them are never answered, and the driver waits some
/// milliseconds for each.
const GARBAGE_CHAINS: u64 = 1000;
/// File that ends the attack once it exists.
const STOP: &str = "/run/attack-is-over";
const ATTACK_LIMIT: Duration = Duration::from_secs(90);
/// Number of frames that exceeds the queue of a tap whose reader does not read (its `txqueuelen`).
const TAP_FRAMES: u64 = 1500;
/// Pause between bursts of frames. The attack also needs the host's single CPU.
const BETWEEN_FRAMES: Duration = Duration::from_millis(2);

fn target() -> GuestBuilder {
    Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=512M")
        .pressure("off")
        .cmdline("foreshore.agent=off")
}

/// Returns the first address and the end of the range of the guest's first virtio-mem device.
fn hotplug_range(guest: &Guest) -> Result<(u64, u64)> {
    let iomem = guest.run("cat /proc/iomem")?;
    let line = iomem.lines().find(|line| line.contains(" : virtio") && !line.starts_with(' '));
    let line = line.with_context(|| format!("No virtio-mem device in\n{iomem}"))?;
    let (range, _) = line.split_once(" : ").context("The line has no range")?;
    let (first, last) = range.trim().split_once('-').context("The line has no range")?;
    Ok((u64::from_str_radix(first, 16)?, u64::from_str_radix(last, 16)? + 1))
}

fn buffers_in_unplugged_memory_are_survived_while_it_comes_and_goes() -> Result<()> {
    let guest = target().boot()?;
    let attack = attack_hotplug_range(&guest, "hostile-range", RNG)?;
    come_and_go(&guest, "dram", |_| Ok(()))?;
    guest.run(&format!("touch {STOP}"))?;
    let Report { sent, answered, .. } = ended_well(attack)?;
    ensure!(sent > 100 && answered == sent, "The device answered {answered} of {sent} buffers");
    still_well(&guest)
}

fn attack_hotplug_range(guest: &Guest, how: &str, device: &str) -> Result<Script> {
    let (first, end) = hotplug_range(guest)?;
    // Plugged memory must remain offline, so that the device's random bytes do not hit memory that
    // the guest uses.
    guest.run("echo offline >/sys/devices/system/memory/auto_online_blocks")?;
    guest.start_script(
        ATTACK_LIMIT,
        &format!("exec guest-tool {how} {device} {first:#x} {end:#x} {STOP}"),
    )
}

/// All memory that a target can plug.
const PLUGGED_BYTES: u64 = 512 * MIB;

/// Plugs and unplugs the whole zone eight times. Calls `check` with the plugged size each time that
/// it has been reached.
fn come_and_go(guest: &Guest, id: &str, check: impl Fn(u64) -> Result<()>) -> Result<()> {
    for plugged_bytes in [PLUGGED_BYTES, 0].into_iter().cycle().take(16) {
        let (call, body) = match id {
            "dram" => ("vm.resize", json!({ "desired_ram": 384 * MIB + plugged_bytes })),
            _ => ("vm.resize-zone", json!({ "id": id, "desired_ram": plugged_bytes })),
        };
        guest.put(call, body)?;
        wait_until_plugged(guest, id, plugged_bytes, ATTACK_LIMIT)?;
        check(plugged_bytes)?;
    }
    Ok(())
}

/// Number of frames sent to a tap's interface, and the counters of the host's kernel.
#[derive(Clone, Copy)]
struct FrameCounts {
    given: u64,
    to_guest: u64,
    dropped: u64,
    from_guest: u64,
}

impl FrameCounts {
    fn now(net: &Net, given: &AtomicU64) -> Result<Self> {
        let count = |name: &str| -> Result<u64> {
            let path = format!("/sys/class/net/{}/statistics/{name}", net.tap);
            std::fs::read_to_string(path)?.trim().parse().context("Not a number of frames")
        };
        // The kernel's counters must be read before `given`, so that frames in transit count as
        // given.
        let (to_guest, dropped) = (count("tx_packets")?, count("tx_dropped")?);
        let given = given.load(Ordering::SeqCst);
        Ok(Self { given, to_guest, dropped, from_guest: count("rx_packets")? })
    }

    /// Returns the number of frames that are still in the tap, or that left it without being
    /// delivered.
    fn missing_since(&self, before: &Self) -> u64 {
        let finished = (self.to_guest + self.dropped) - (before.to_guest + before.dropped);
        (self.given - before.given).saturating_sub(finished)
    }
}

/// vhost-net copies frames to addresses in the VMM, and does not check whether memory is plugged
/// there (docs/design/decisions/0018).
fn frames_in_unplugged_memory_are_survived_by_the_kernel() -> Result<()> {
    let net = vhost_net::network(37)?;
    // The guest does not boot from PM, so resident memory of the zone is plugged memory.
    let pool = Pool::create("640M")?;
    let memory = format!("pool={},size=512M", pool.name());
    let guest = target().memory("size=384M").pm_memory(&memory);
    let guest = guest.argument("--net", &net.option(",vhost=on")).boot()?;
    let attack = attack_hotplug_range(&guest, "hostile-frames", NET)?;
    let ((end, ended), given) = (mpsc::channel(), AtomicU64::new(0));
    thread::scope(|scope| -> Result<()> {
        let frames = scope.spawn(|| give_frames(&net, &given, ended));
        let came_and_went = come_and_go(&guest, "pm", |plugged_bytes| {
            let before = FrameCounts::now(&net, &given)?;
            // 1. With plugged memory, the kernel stores received frames there and sends frames from
            //    it.
            if plugged_bytes > 0 {
                return guest.wait_until("frames are sent and received", ATTACK_LIMIT, || {
                    let now = FrameCounts::now(&net, &given)?;
                    Ok(now.to_guest > before.to_guest + 20
                        && now.from_guest > before.from_guest + 20)
                });
            }
            // 2. Without plugged memory, the kernel takes frames out of the tap and drops them. The
            //    host should not allocate pages for them.
            guest.wait_until("frames are lost", ATTACK_LIMIT, || {
                Ok(FrameCounts::now(&net, &given)?.missing_since(&before) > TAP_FRAMES)
            })?;
            let resident_bytes = zone(&guest, "pm")?.resident_bytes;
            ensure!(resident_bytes == 0, "{resident_bytes} bytes of unplugged memory are resident");
            Ok(())
        });
        drop(end);
        frames.join().expect("it does not panic")?;
        came_and_went
    })?;
    guest.run(&format!("touch {STOP}"))?;
    let Report { answered, .. } = ended_well(attack)?;
    ensure!(answered > 100, "The device returned only {answered} buffers");
    vhost_net::is_moved_by_kernel(&guest, "_net0")?;
    still_well(&guest)
}

/// Sends frames to the tap until the sender of `ended` is dropped.
fn give_frames(net: &Net, given: &AtomicU64, ended: Receiver<()>) -> Result<()> {
    let socket = UdpSocket::bind((net.host, 0))?;
    // The frames are broadcast, because no address belongs to the guest.
    socket.set_broadcast(true)?;
    let broadcast = Ipv4Addr::from_bits(net.host.to_bits() | 0xff);
    while ended.recv_timeout(BETWEEN_FRAMES) == Err(RecvTimeoutError::Timeout) {
        for _ in 0..16 {
            given.fetch_add(1, Ordering::SeqCst);
            socket.send_to(&[0x5a; 1400], (broadcast, 9))?;
        }
    }
    Ok(())
}

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

/// Parses `hostile: sent 1000, answered 812, restarted 117 times`.
fn report(text: &str) -> Result<Report> {
    let number = |word: &str| {
        // The line may be incomplete on a console.
        let (line, _) = text.split_once("hostile: ")?.1.split_once(" times")?;
        let (_, rest) = line.split_once(word)?;
        rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let report = || {
        Some(Report {
            sent: number("sent")?,
            answered: number("answered")?,
            restarted: number("restarted")?,
        })
    };
    report().with_context(|| format!("Not a report of an attack: {text:?}"))
}

/// Checks that the device processed the garbage. Otherwise the device has disabled its queues or
/// takes nothing from them. vsock answers only few chains, because its receive and event queues
/// wait for data.
fn check_garbage_was_handled(report: &Report) -> Result<()> {
    let Report { sent, answered, restarted } = report;
    ensure!(
        *sent == GARBAGE_CHAINS && *answered >= sent / 40 && *restarted >= sent / 50,
        "The device answered {answered} of {sent} chains, with {restarted} restarts"
    );
    Ok(())
}

fn still_well(guest: &Guest) -> Result<()> {
    guest.get("vmm.ping")?;
    guest.get("vm.info")?;
    ensure!(guest.run("echo alive")? == "alive\n", "The guest does not answer");
    Ok(())
}

fn garbage_is_survived(guest: &Guest, device: &str) -> Result<()> {
    let attack = guest.start_script(
        ATTACK_LIMIT,
        &format!("exec guest-tool hostile-garbage {device} {GARBAGE_CHAINS}"),
    )?;
    check_garbage_was_handled(&ended_well(attack)?)?;
    still_well(guest)
}

fn garbage_from_the_pmem_driver_is_survived() -> Result<()> {
    let pool = Pool::create("128M")?;
    pool.create_volume("data", "32M")?;
    let volume = format!("pool={},name=data,interface=virtio-pmem", pool.name());
    let guest = target().pm_volume(&volume).boot()?;
    garbage_is_survived(&guest, PMEM)?;
    drop(guest);
    pool.check().map(drop)
}

fn garbage_from_the_blk_driver_is_survived() -> Result<()> {
    let image = guest_tests::disk::sparse_file("image", 32 * MIB)?;
    let guest = target().argument("--disk", &format!("path={}", image.display())).boot()?;
    garbage_is_survived(&guest, BLK)?;
    let sent = guest.metric("foreshore_disk_bad_requests_total", &[("disk", "_disk0")])?;
    ensure!(sent > 0.0, "No request was refused");
    Ok(())
}

fn garbage_from_the_net_driver_is_survived_by_the_kernel() -> Result<()> {
    let net = vhost_net::network(38)?;
    let guest = target().argument("--net", &net.option(",vhost=on")).boot()?;
    garbage_is_survived(&guest, NET)?;
    // vhost reported errors in the ring by the eventfd that the VMM had passed for that
    // (VHOST_SET_VRING_ERR).
    let broken_queues = guest.metric("foreshore_net_broken_queues_total", &[("net", "_net0")])?;
    ensure!(broken_queues > 0.0, "The metrics count no broken queue");
    Ok(())
}

/// Attacks one device after the other in one guest. Tries all of them, even if the first attack
/// fails.
fn garbage_from_the_rng_mem_and_vsock_drivers_is_survived() -> Result<()> {
    let guest = target().boot()?;
    let results = [
        garbage_is_survived(&guest, RNG).context("Entropy device"),
        garbage_is_survived(&guest, MEM).context("Memory device"),
        garbage_from_the_vsock_driver_is_survived(&guest).context("Vsock device"),
    ];
    let failures: Vec<_> =
        results.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

fn garbage_from_the_net_driver_is_survived() -> Result<()> {
    net::need_tun()?;
    let guest = target().argument("--net", "tap=fstap13").boot()?;
    garbage_is_survived(&guest, NET)?;
    let refused = guest.metric("foreshore_net_bad_requests_total", &[("net", "_net0")])?;
    ensure!(refused > 0.0, "No request was refused");
    Ok(())
}

/// The attack breaks the tests' own connection to the guest, so it reports on the console.
fn garbage_from_the_vsock_driver_is_survived(guest: &Guest) -> Result<()> {
    let command = format!(
        "setsid sh -c 'guest-tool hostile-garbage {VSOCK} {GARBAGE_CHAINS} >/dev/console 2>&1' >/dev/null 2>&1 &"
    );
    guest.run(&command)?;
    guest.wait_until("the attack is over", ATTACK_LIMIT, || {
        Ok(report(&guest.console_log()?).is_ok())
    })?;
    check_garbage_was_handled(&report(&guest.console_log()?)?)?;
    guest.get("vmm.ping")?;
    guest.get("vm.info").map(drop)
}

/// An address without a memory slot reads as all ones, like an address without a device. The VM
/// should continue to run.
fn read_of_unplugged_memory_returns_all_ones() -> Result<()> {
    // The kernel does not allow access to a range that virtio_mem has claimed, not even to root.
    // The SRAT contains the range, but exists only with two nodes.
    let pool = Pool::create("256M")?;
    let memory = format!("pool={},size=128M", pool.name());
    let guest =
        target().pm_memory(&memory).cmdline("iomem=relaxed foreshore.skip=virtio_mem").boot()?;
    let range =
        guest.run("dmesg | sed -n 's/.*SRAT: .*mem 0x\\([0-9a-f]*\\)-.*hotplug.*/\\1/p'")?;
    let first = range
        .lines()
        .next()
        .with_context(|| format!("SRAT has no hot-pluggable range: {range:?}"))?;
    let answer = guest.run(&format!("devmem 0x{first} 64"))?;
    ensure!(
        answer.trim() == "0xFFFFFFFFFFFFFFFF",
        "The guest read {answer:?} from an unplugged range"
    );
    still_well(&guest)
}
