//! Measures how long it takes a client to query the VM's state over an existing connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::samples::{Row, Samples, median, p99};
use crate::usage::wait_until_idle;
use crate::vmm::{Extras, Vm, Vmm};

const CALLS: usize = 2000;
const LIMIT: Duration = Duration::from_secs(30);

/// Measures calls while the guest is idle.
pub(crate) fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    let vm = vmm.boot(&Extras::default())?;
    wait_until_idle(vm.pid())?;
    let times_us = match &vm {
        Vm::Cli(guest) => rest(&guest.api_socket())?,
        Vm::Qemu(guest) => qmp(guest.qmp_socket())?,
    };
    samples.add(Row::ApiMedian, vmm.name(), median(&times_us).context("No calls were measured")?);
    samples.add(Row::ApiP99, vmm.name(), p99(&times_us).context("No calls were measured")?);
    Ok(())
}

fn connect(path: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(path)
        .with_context(|| format!("Cannot connect to {}", path.display()))?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

fn timed(mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    // The first call is not measured, because it takes longer.
    call()?;
    let mut times_us = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let started = Instant::now();
        call()?;
        times_us.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times_us)
}

fn rest(path: &Path) -> Result<Vec<f64>> {
    let mut stream = BufReader::new(connect(path)?);
    timed(|| {
        stream.get_mut().write_all(b"GET /api/v1/vm.info HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let (mut line, mut len) = (String::new(), 0);
        while line != "\r\n" {
            line.clear();
            ensure!(stream.read_line(&mut line)? > 0, "The VMM closed the connection");
            if let Some((_, value)) = line.to_ascii_lowercase().split_once("content-length:") {
                len = value.trim().parse()?;
            }
        }
        ensure!(len > 0, "vm.info is empty");
        Ok(stream.read_exact(&mut vec![0; len])?)
    })
}

fn qmp(path: &Path) -> Result<Vec<f64>> {
    let mut stream = BufReader::new(connect(path)?);
    let mut line = String::new();
    // QMP sends a greeting first.
    stream.read_line(&mut line)?;
    stream.get_mut().write_all(b"{\"execute\": \"qmp_capabilities\"}\n")?;
    line.clear();
    stream.read_line(&mut line)?;
    timed(|| {
        stream.get_mut().write_all(b"{\"execute\": \"query-status\"}\n")?;
        line.clear();
        while !line.contains("\"return\"") {
            line.clear();
            ensure!(stream.read_line(&mut line)? > 0, "The VMM closed the connection");
        }
        Ok(())
    })
}
