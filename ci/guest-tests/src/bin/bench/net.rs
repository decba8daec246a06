//! TCP between guest and host, over a tap.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_tests::{host_memory, wait_for, wait_until};

use crate::samples::{Row, Samples, median};
use crate::vmm::{Extras, MIB, Net, Vm, Vmm};

const TRANSFER_BYTES: usize = 64 * MIB as usize;
const BLOCK_BYTES: usize = 64 << 10;
const ROUND_TRIPS: usize = 2000;
const REPEATS: usize = 3;
const PORT: u16 = 5001;
const LIMIT: Duration = Duration::from_secs(120);
const GUEST: Ipv4Addr = Ipv4Addr::new(172, 29, 0, 2);
const HOST: Ipv4Addr = Ipv4Addr::new(172, 29, 0, 1);
const TAP: &str = "bench0";

/// Each row is the median of some runs of one guest.
pub fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    // It may be built in.
    let _ = Command::new("modprobe").arg("tun").status();
    host_memory::even_out()?;
    let vm =
        vmm.start(&Extras { net: Some(Net { tap: TAP.to_owned(), host: HOST }), ..Extras::default() })?;
    vm.wait_for_shell()?;
    // The VMMs set it up, but for QEMU, which leaves that to scripts.
    let set_up = format!("ifconfig {TAP} {HOST} netmask 255.255.255.0 up");
    ensure!(Command::new("sh").args(["-c", &set_up]).status()?.success(), "`{set_up}` has failed");
    wait_until("eth0 is there", LIMIT, || Ok(vm.try_run("test -e /sys/class/net/eth0")?.code == 0))?;
    vm.run(&format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"))?;
    vm.run(&format!("guest-tool net-serve {PORT} >/dev/null 2>&1 </dev/null &"))?;
    wait_for("the guest listens", LIMIT, || Ok(TcpStream::connect((GUEST, PORT)).ok()))?;
    for (row, timed) in [
        (Row::NetToGuest, to_guest as fn() -> Result<f64>),
        (Row::NetFromGuest, from_guest),
        (Row::NetRoundTrip, round_trip_us),
    ] {
        timed()?;
        let values = (0..REPEATS).map(|_| timed()).collect::<Result<Vec<_>>>()?;
        samples.add(row, vmm.name(), median(&values).context("No repeats")?);
    }
    stop(vm)
}

/// The next VMM makes the tap anew.
fn stop(vm: Vm) -> Result<()> {
    drop(vm);
    let is_gone = || Ok(!std::path::Path::new("/sys/class/net").join(TAP).exists());
    wait_until("the tap is gone", LIMIT, is_gone)
}

fn connect(wanted: u8) -> Result<TcpStream> {
    let mut stream = TcpStream::connect((GUEST, PORT))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(&[wanted])?;
    Ok(stream)
}

/// Until the guest says that it has all of it.
fn to_guest() -> Result<f64> {
    let (mut stream, block) = (connect(b's')?, vec![1; BLOCK_BYTES]);
    let started = Instant::now();
    for _ in 0..TRANSFER_BYTES / BLOCK_BYTES {
        stream.write_all(&block)?;
    }
    stream.shutdown(Shutdown::Write)?;
    stream.read_exact(&mut [0])?;
    Ok(started.elapsed().as_secs_f64())
}

fn from_guest() -> Result<f64> {
    let (mut stream, mut block) = (connect(b'g')?, vec![0; BLOCK_BYTES]);
    let started = Instant::now();
    stream.write_all(&(TRANSFER_BYTES as u64).to_le_bytes())?;
    let mut left = TRANSFER_BYTES;
    while left > 0 {
        let len = stream.read(&mut block)?;
        ensure!(len > 0, "{left} bytes have not come");
        left -= len;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// The median of many.
fn round_trip_us() -> Result<f64> {
    let mut stream = connect(b'e')?;
    let mut times_us = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let started = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        times_us.push(started.elapsed().as_secs_f64() * 1e6);
    }
    median(&times_us).context("No round trips")
}
