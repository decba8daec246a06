//! Measures TCP over taps: between a guest and the host, and between two guests whose taps are in
//! the same bridge.

use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use guest_tests::host::{self, Bridge, load_modules};
use guest_tests::{BOOT_LIMIT, host_memory, wait_for, wait_until};
use guest_tools::timed_net;

use crate::samples::{Row, Samples, Unit};
use crate::vmm::{Extras, MIB, Net, Vm, Vmm};

const TRANSFER_BYTES: usize = 64 * MIB as usize;
const ROUND_TRIPS: usize = 2000;
const REPEATS: usize = 3;
const PORT: u16 = 5001;
const LIMIT: Duration = Duration::from_secs(120);
const HOST: Ipv4Addr = Ipv4Addr::new(172, 29, 0, 1);
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(172, 29, 0, 2), Ipv4Addr::new(172, 29, 0, 3)];
const TAPS: [&str; 2] = ["bench0", "bench1"];
const BRIDGE: &str = "benchbr";

/// Adds a value for each row: the median of several runs in one guest or one pair of guests.
pub(crate) fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    load_modules(&["tun", "bridge", "vhost_net"]);
    with_host(vmm, samples, [Row::NetToGuest, Row::NetFromGuest, Row::NetRoundTrip], false)?;
    if vmm.has_vhost_net() && Path::new("/dev/vhost-net").exists() {
        with_host(
            vmm,
            samples,
            [Row::VhostToGuest, Row::VhostFromGuest, Row::VhostRoundTrip],
            true,
        )?;
    }
    between_guests(vmm, samples)
}

/// Measures transfers from the host to a guest and back.
fn with_host(vmm: &Vmm, samples: &mut Samples, rows: [Row; 3], vhost: bool) -> Result<()> {
    host_memory::even_out()?;
    let vm = start(vmm, 0, Some(HOST), vhost)?;
    // All VMMs except QEMU configure the tap. QEMU leaves that to scripts.
    host::run(&format!("ifconfig {} {HOST} netmask 255.255.255.0 up", TAPS[0]))?;
    bring_up(&vm, ADDRESSES[0])?;
    serve(&vm)?;
    let server = SocketAddrV4::new(ADDRESSES[0], PORT);
    wait_for("the guest listens", LIMIT, || Ok(TcpStream::connect(server).ok()))?;
    let [to_guest, from_guest, round_trip] = rows;
    add(samples, to_guest, vmm, || timed_net::send(server, TRANSFER_BYTES))?;
    add(samples, from_guest, vmm, || timed_net::receive(server, TRANSFER_BYTES))?;
    add(samples, round_trip, vmm, || timed_net::round_trip(server, ROUND_TRIPS))?;
    stop([vm])
}

/// Measures transfers between two guests of the same VMM in both directions, with the sender's
/// clock.
fn between_guests(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let _bridge = Bridge::create(BRIDGE)?;
    let [from, to] = [start(vmm, 0, None, false)?, start(vmm, 1, None, false)?];
    for tap in TAPS {
        host::run(&format!("ip link set {tap} up && brctl addif {BRIDGE} {tap}"))?;
    }
    bring_up(&from, ADDRESSES[0])?;
    bring_up(&to, ADDRESSES[1])?;
    serve(&to)?;
    let server = SocketAddrV4::new(ADDRESSES[1], PORT);
    let time = |operation: &str, count: usize| -> Result<Duration> {
        let took_us = from.number(&format!("guest-tool net-time {server} {operation} {count}"))?;
        Ok(Duration::from_micros(took_us as u64))
    };
    wait_for("the other guest answers", LIMIT, || Ok(time("round-trip", 1).ok()))?;
    add(samples, Row::NetBetween, vmm, || time("send", TRANSFER_BYTES))?;
    add(samples, Row::NetBetweenRoundTrip, vmm, || time("round-trip", ROUND_TRIPS))?;
    stop([from, to])
}

/// Starts a guest with a tap, and waits until it accepts commands.
fn start(vmm: &Vmm, nth: u8, host: Option<Ipv4Addr>, vhost: bool) -> Result<Vm> {
    let net = Net { tap: TAPS[usize::from(nth)].to_owned(), host, nth, vhost };
    let vm = vmm.start(&Extras { net: Some(net), ..Extras::default() })?;
    vm.wait_for_shell(BOOT_LIMIT)?;
    Ok(vm)
}

fn bring_up(vm: &Vm, address: Ipv4Addr) -> Result<()> {
    vm.wait_for_path("/sys/class/net/eth0")?;
    vm.run(&format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up")).map(drop)
}

fn serve(vm: &Vm) -> Result<()> {
    vm.run(&format!("guest-tool net-serve {PORT} >/dev/null 2>&1 </dev/null &")).map(drop)
}

fn add(
    samples: &mut Samples,
    row: Row,
    vmm: &Vmm,
    timed: impl Fn() -> Result<Duration>,
) -> Result<()> {
    let scale = if row.unit() == Unit::Microseconds { 1e6 } else { 1.0 };
    samples.add_medians([row], vmm.name(), REPEATS, || Ok([timed()?.as_secs_f64() * scale]))
}

/// Stops the VMs, and waits until their taps have disappeared. The next VMM creates them again.
fn stop<const COUNT: usize>(vms: [Vm; COUNT]) -> Result<()> {
    drop(vms);
    let exists = |tap: &&str| Path::new("/sys/class/net").join(tap).exists();
    wait_until("the taps are removed", LIMIT, || Ok(!TAPS.iter().any(&exists)))
}
