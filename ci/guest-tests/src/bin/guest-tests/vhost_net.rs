//! Tests of `--net vhost=on`: the host's kernel moves the frames, and the guest uses Debian's stock
//! driver.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use guest_tests::Guest;
use guest_tests::guest::program;
use guest_tests::host;
use guest_tests::runner::{emulated, skip, this_tests_dir};
use guest_tests::user::need_root;
use serde_json::json;

use crate::hotplug;
use crate::net::{
    Done, IO_LIMIT, Net, TRANSFER_BYTES, builder, check_lost_bus_mastering, check_lost_tap,
    from_guest, from_guest_by_two_queues, ping_host, rebind_driver, tap_frames, to_guest,
    to_guest_until,
};
use crate::zones::{MIB, wait_until_plugged};

guest_tests::tests![
    the_kernel_moves_frames_over_a_pause_and_a_reboot: 420 (long) on [V6_12, V6_1 extended],
    two_vhost_queue_pairs_follow_their_interrupts: 300 (extended) x 2,
    vhost_interface_is_added_and_removed: 420 (extended),
    memory_comes_and_goes_under_the_kernels_frames: 480 (long),
    an_interface_that_the_kernel_loses_is_a_link_that_is_down: 300 (extended),
    a_nic_without_the_bus_is_silent_for_the_kernel_as_well: 300 (extended),
    without_vhost_net_on_is_refused_and_auto_falls_back: 180,
];

/// Number of datagrams. The tap can queue all of them for a paused guest.
const DATAGRAMS: u64 = 100;
const NO_VHOST: &str = "no /dev/vhost-net here";

pub(crate) fn network(nth: u8) -> Result<Net> {
    need_root("create a tap")?;
    // An error is ignored, because the module may be built in.
    let _ = Command::new("modprobe").arg("vhost_net").status();
    if !Path::new("/dev/vhost-net").exists() {
        // The emulated host is built from this repository and should have the module.
        ensure!(!emulated(), "The emulated host has {NO_VHOST}");
        return skip(NO_VHOST);
    }
    Net::new(nth)
}

fn is_moved_by(backend: &str, guest: &Guest, net: &str) -> Result<()> {
    let labels = [("net", net), ("backend", backend)];
    let value = guest.metric("foreshore_net_backend", &labels)?;
    ensure!(value == 1.0, "{net} does not use {backend}");
    Ok(())
}

pub(crate) fn is_moved_by_kernel(guest: &Guest, net: &str) -> Result<()> {
    is_moved_by("vhost", guest, net)
}

fn is_counted(guest: &Guest, net: &str, min_bytes: usize) -> Result<()> {
    let (counters, metrics) = (guest.get("vm.counters")?, guest.metrics()?);
    for (name, direction) in [("rx_bytes", "to-guest"), ("tx_bytes", "from-guest")] {
        ensure!(counters[net][name].as_u64() > Some(min_bytes as u64), "{name}: {counters}");
        let labels = [("net", net), ("direction", direction)];
        let bytes = metrics.value("foreshore_net_bytes_total", &labels)?;
        ensure!(bytes > min_bytes as f64, "{bytes} bytes {direction}");
    }
    ensure!(
        metrics.value("foreshore_net_broken_queues_total", &[("net", net)])? == 0.0,
        "The metrics count a broken queue"
    );
    Ok(())
}

/// Returns how many datagrams the guest received for a closed port.
fn unwanted(guest: &Guest) -> Result<u64> {
    let counters = guest.run("grep ^Udp: /proc/net/snmp")?;
    let count = counters.lines().nth(1).and_then(|values| values.split(' ').nth(2)?.parse().ok());
    count.with_context(|| format!("NoPorts is missing in {counters:?}"))
}

/// Pauses the guest during a transfer. No frame may reach the guest during the pause, and no frame
/// may be lost.
fn pauses(guest: &Guest, net: &Net) -> Result<()> {
    thread::scope(|scope| -> Result<()> {
        let unwanted_before = unwanted(guest)?;
        let before = tap_frames(net)?;
        let transfer = scope.spawn(|| to_guest(guest, net, 2 * TRANSFER_BYTES));
        guest.wait_until("the transfer is under way", IO_LIMIT, || {
            Ok(tap_frames(net)? > before + 100)
        })?;
        guest.command("vm.pause")?;
        let paused = tap_frames(net)?;
        let socket = UdpSocket::bind((net.host, 0))?;
        for _ in 0..DATAGRAMS {
            socket.send_to(b"for later", (net.guest, 9))?;
        }
        ensure!(tap_frames(net)? == paused, "Frames reached the paused guest");
        guest.command("vm.resume")?;
        // The test uses datagrams, because TCP would retransmit lost data.
        guest.wait_until("the guest has the bytes sent during the pause", IO_LIMIT, || {
            Ok(unwanted(guest)? >= unwanted_before + DATAGRAMS)
        })?;
        transfer.join().expect("a transfer does not panic")
    })
}

fn the_kernel_moves_frames_over_a_pause_and_a_reboot() -> Result<()> {
    let net = network(30)?;
    let guest = net.builder(",vhost=on").boot()?;
    net.bring_up(&guest)?;
    is_moved_by_kernel(&guest, "_net0")?;
    ping_host(&guest, &net)?;
    from_guest(&guest, &net, TRANSFER_BYTES)?;
    pauses(&guest, &net)?;
    is_counted(&guest, "_net0", TRANSFER_BYTES)?;
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["net"][0]["vhost"] == "on", "{info}");
    rebind_driver(&guest, &net)?;
    guest.no_kernel_complaints()?;
    // The kernel should also move frames after a reboot.
    guest.reboot_from_inside()?;
    net.bring_up(&guest)?;
    ping_host(&guest, &net)?;
    from_guest(&guest, &net, TRANSFER_BYTES / 16)?;
    is_moved_by_kernel(&guest, "_net0")?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn two_vhost_queue_pairs_follow_their_interrupts() -> Result<()> {
    let net = network(32)?;
    let guest = net.builder(",num_queues=4,vhost=auto").boot()?;
    net.bring_up(&guest)?;
    is_moved_by_kernel(&guest, "_net0")?;
    // Interrupts are moved between the vCPUs. For each move, the guest masks a vector and writes a
    // different message.
    let move_to = |cpus: &str| {
        let set = format!(
            "for irq in $(awk -F: '/virtio.-(in|out)put/ {{ print $1 + 0 }}' /proc/interrupts); do \
             echo {cpus} >/proc/irq/$irq/smp_affinity; done"
        );
        guest.run(&set).map(drop)
    };
    for cpus in ["1", "2", "3"] {
        move_to(cpus)?;
        ping_host(&guest, &net)?;
        from_guest_by_two_queues(&guest, &net, TRANSFER_BYTES / 16)?;
        to_guest(&guest, &net, TRANSFER_BYTES / 16)?;
    }
    is_counted(&guest, "_net0", TRANSFER_BYTES / 16)?;
    guest.no_kernel_complaints()
}

fn vhost_interface_is_added_and_removed() -> Result<()> {
    let net = network(33)?;
    let guest = builder().boot()?;
    for _ in 0..3 {
        let body = json!({"id": "lan", "tap": net.tap, "ip": net.host, "mask": "255.255.255.0", "vhost": "on"});
        guest.put("vm.add-net", body)?;
        net.bring_up(&guest)?;
        is_moved_by_kernel(&guest, "lan")?;
        ping_host(&guest, &net)?;
        from_guest(&guest, &net, TRANSFER_BYTES / 16)?;
        to_guest(&guest, &net, TRANSFER_BYTES / 16)?;
        is_counted(&guest, "lan", TRANSFER_BYTES / 16)?;
        guest.put("vm.remove-device", json!({"id": "lan"}))?;
        guest.wait_until_run(
            "the guest has ejected the device",
            IO_LIMIT,
            "! test -e /sys/class/net/eth0",
        )?;
        guest.wait_until("the tap is removed", IO_LIMIT, || Ok(!net.exists()))?;
        let open = fs::read_dir(format!("/proc/{}/fd", guest.pid()))?
            .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
            .filter(|path| path == Path::new("/dev/vhost-net"))
            .count();
        ensure!(open == 0, "{open} files of /dev/vhost-net are open");
    }
    guest.no_kernel_complaints()
}

/// Runs `work` while the guest receives frames.
fn under_frames(guest: &Guest, net: &Net, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let done = Done::default();
    thread::scope(|scope| {
        let transfer = scope.spawn(|| to_guest_until(guest, net, &done));
        let outcome = work();
        // Must also be set after an error of `work`, because the transfer would otherwise never
        // end.
        done.set();
        transfer.join().expect("a transfer does not panic")?;
        outcome
    })
}

fn memory_comes_and_goes_under_the_kernels_frames() -> Result<()> {
    let net = network(34)?;
    let guest = net
        .builder(",vhost=on")
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=512M")
        .boot()?;
    net.bring_up(&guest)?;
    let resize = |mib: u64| {
        guest.put("vm.resize", json!({ "desired_ram": (384 + mib) * MIB }))?;
        wait_until_plugged(&guest, "dram", mib * MIB, IO_LIMIT)
    };
    for _ in 0..2 {
        under_frames(&guest, &net, || {
            resize(512)?;
            resize(0)
        })?;
        from_guest(&guest, &net, TRANSFER_BYTES / 4)?;
    }
    // A file is a separate memory region, which is added to and removed from the kernel's table.
    let file = hotplug::image("pmem")?;
    for _ in 0..2 {
        under_frames(&guest, &net, || {
            let added = hotplug::add_pmem(&guest, &file, "quay")?;
            hotplug::wait_for_pmem(&guest)?;
            ensure!(hotplug::remove(&guest, "quay")? == 204, "vm.remove-device failed");
            hotplug::wait_until_gone(&guest, "quay", &added["bdf"])
        })?;
        guest.wait_until("the file is no longer mapped", IO_LIMIT, || {
            let maps = fs::read_to_string(format!("/proc/{}/maps", guest.pid()))?;
            Ok(!maps.contains(&file.display().to_string()))
        })?;
        from_guest(&guest, &net, TRANSFER_BYTES / 16)?;
    }
    is_counted(&guest, "_net0", TRANSFER_BYTES / 2)?;
    guest.no_kernel_complaints()
}

fn an_interface_that_the_kernel_loses_is_a_link_that_is_down() -> Result<()> {
    let net = network(35)?;
    // The loss is only detected when a frame is sent.
    check_lost_tap(&net, ",vhost=on", &format!("ping -c 1 -W 1 {}; ", net.host))
}

fn a_nic_without_the_bus_is_silent_for_the_kernel_as_well() -> Result<()> {
    let net = network(39)?;
    check_lost_bus_mastering(&net, ",vhost=on")
}

fn without_vhost_net_on_is_refused_and_auto_falls_back() -> Result<()> {
    let net = network(36)?;
    // Hides the device only from the VMM, in a mount namespace, so that later tests can still use
    // it. No driver has the device number of the node that replaces it.
    let [gone, script] = ["gone", "without-vhost-net"].map(|name| this_tests_dir().join(name));
    host::run(&format!("mknod {} c 10 254", gone.display()))?;
    let hide = format!("mount --bind {} /dev/vhost-net", gone.display());
    let foreshore = program("foreshore");
    let body = format!(
        "#!/bin/sh\nexec unshare -m sh -c '{hide} && exec {} \"$@\"' sh \"$@\"\n",
        foreshore.display()
    );
    fs::write(&script, body)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let on = net.builder(",vhost=on").program(&script).name("refused").expect_refusal()?;
    for word in ["--net", "_net0", "/dev/vhost-net", "vhost_net"] {
        ensure!(on.message.contains(word), "{word:?} is missing in: {}", on.message);
    }
    let guest = net.builder(",vhost=auto").program(&script).verbose().boot()?;
    net.bring_up(&guest)?;
    ping_host(&guest, &net)?;
    is_moved_by("vmm", &guest, "_net0")?;
    let log = guest.vmm_log()?;
    ensure!(
        log.contains("vhost-net is not available") && log.contains("/dev/vhost-net"),
        "The log does not name the reason: {log}"
    );
    guest.power_off()
}
