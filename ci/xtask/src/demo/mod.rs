//! The demonstration: six phases that print a line for each claim, and a picture.

mod narrator;
mod picture;
mod plot;
mod prometheus;
mod table;

use std::net::TcpListener;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::apt::Apt;
use crate::cargo;
use crate::checkout::{Checkout, create_folder, read, remove_folder};
use crate::host::{self, ends, reruns};
use crate::images::guests;
use crate::jobs::{self, Scratch};
use crate::messages::{attempt, print, report, with_task_name};
use crate::programs::{self, user_path};
use crate::random;
use crate::setup;
use narrator::Narrator;
use prometheus::Prometheus;

const FOLDER: &str = "target/demo";
/// Images to build. The demo boots the first one. The commands in README.md use the other.
const IMAGES: [&str; 2] = ["redis-6.12", "basic-6.12"];
/// Time for a demo to end by itself and save the logs of its VMs, before the host kills it.
const END_S: u32 = 60;
const HOST_MIB: &str = "5120";
/// Number of host CPUs. On an emulated host with two CPUs, 1 in 20 boots of a two-CPU guest fails
/// because of the emulation. Some failures leave no trace: a vCPU spins, and an NMI does not reach
/// it (docs/design/testing.md).
const HOST_CPUS: &str = "1";
/// First port to try. It is below the ports that the kernel assigns to outgoing connections.
const FIRST_PORT: u32 = 20_000;
const PORTS: u32 = 12_000;
/// Folder for pools. On tmpfs, the blocks that a pool file uses show how much memory has been
/// returned.
const POOLS: &str = "/dev/shm";
const POOLS_MIB: u64 = 2048;
/// Variable with the folder for pools and logs.
const TEST_FOLDER: &str = "FORESHORE_TEST_DIR";
/// Part of the line that reports a claim that does not hold.
const NOT_SHOWN: &str = "NOT SEEN";

#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Arguments {
    /// Do not build programs and images
    #[arg(long)]
    no_build: bool,
    /// Time limit of the demo, excluding set-up and builds
    ///
    /// The demo takes 4 to 8 minutes on an emulated host. A longer limit also gives each step more
    /// time.
    #[arg(
        long = "within", value_name = "SECONDS", default_value_t = 780,
        value_parser = clap::value_parser!(u32).range(1..1_000_000)
    )]
    limit_s: u32,
}

pub(crate) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<u8> {
    with_task_name("demo", || {
        prepare(checkout, arguments)?;
        let folder = checkout.path(FOLDER);
        remove_folder(&folder)?;
        create_folder(&folder)?;
        let demo = Demo::new(checkout, arguments.limit_s, folder)?;
        let prometheus = Prometheus::start(checkout, &demo.folder, demo.metrics_ports)?;
        report!("Prometheus scrapes both VMs every second");
        demo.show(&prometheus)
    })
}

fn prepare(checkout: &Checkout, arguments: &Arguments) -> Result<()> {
    report!("setting up");
    setup::ensure_set_up(checkout)?;
    if programs::find("gnuplot", user_path()).is_none() {
        Apt::new(checkout).install(&["gnuplot-nox"])?;
    }
    if !arguments.no_build {
        cargo::build_programs(checkout)?;
        guests::build_named(checkout, &IMAGES)?;
    }
    Ok(())
}

/// Returns a port that no process listens on.
fn free_port() -> Result<u16> {
    loop {
        let port = u16::try_from(FIRST_PORT + random::below(PORTS))?;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
}

struct Demo<'run> {
    checkout: &'run Checkout,
    limit_s: u32,
    folder: PathBuf,
    metrics_ports: [u16; 2],
    /// Address on the host where the VMs listen.
    listen: &'static str,
    /// Folder for pools and logs on the host.
    pools: PathBuf,
    /// Folder for pools and logs if the host is this machine. The folder is removed at the end.
    _scratch: Option<Scratch>,
}

impl<'run> Demo<'run> {
    fn new(checkout: &'run Checkout, limit_s: u32, folder: PathBuf) -> Result<Self> {
        let metrics_ports = [free_port()?, free_port()?];
        let (listen, pools, scratch) = if host::is_direct()? {
            let space = rustix::fs::statvfs(POOLS)?;
            if (space.f_bavail * space.f_frsize) >> 20 < POOLS_MIB {
                bail!(
                    "{POOLS} has less than the {POOLS_MIB} MiB of free space that the pools need"
                );
            }
            let scratch = Scratch::new(Some(POOLS.as_ref()), "foreshore-demo.")?;
            ("127.0.0.1", scratch.path().to_owned(), Some(scratch))
        } else {
            ("0.0.0.0", "/dev/shm/foreshore-demo".into(), None)
        };
        Ok(Self { checkout, limit_s, folder, metrics_ports, listen, pools, _scratch: scratch })
    }

    /// Runs all phases, and returns the exit code.
    fn show(&self, prometheus: &Prometheus) -> Result<u8> {
        let mut narrator = Narrator::new(&self.folder);
        let end =
            reruns::run(self.checkout, &self.folder, print, || self.run_on_host(&mut narrator))?;
        let mut code = end.code;
        if code == 0 {
            let is_drawn = attempt(|| self.draw(prometheus, &mut narrator)).unwrap_or(false);
            code = u8::from(!is_drawn);
        }
        end.note();
        if code != 0 {
            self.report_failure(code, prometheus, &narrator)?;
        }
        Ok(code)
    }

    fn run_on_host(&self, narrator: &mut Narrator) -> Result<u8> {
        narrator.begin();
        let mut host = programs::task(self.checkout, "host")?;
        let timeout = self.limit_s + END_S;
        let options =
            format!("--no-build --mem {HOST_MIB} --cpus {HOST_CPUS} --timeout {timeout} --out");
        host.args(options.split(' ')).arg(&self.folder);
        for port in self.metrics_ports {
            host.arg("--forward").arg(format!("{port}:{port}"));
        }
        host.args(["--", "demo"]);
        host.args(self.metrics_ports.map(|port| format!("{}:{port}", self.listen)));
        host.arg(self.limit_s.to_string()).current_dir(self.checkout.root());
        host.env(TEST_FOLDER, &self.pools);
        let status = jobs::stream_output(&mut host, |bytes| narrator.add(bytes))?;
        narrator.finish()?;
        Ok(jobs::exit_code(status))
    }

    /// Runs phase 6. Returns true if the picture shows all claims.
    fn draw(&self, prometheus: &Prometheus, narrator: &mut Narrator) -> Result<bool> {
        let events = narrator.events.clone();
        let zero_s = narrator.zero_s;
        let show = |bytes: &[u8]| narrator.add(bytes);
        let missing = picture::draw(self, prometheus, zero_s, &events, true, show);
        narrator.finish()?;
        let missing = missing?;
        match &missing {
            None => narrator.add(SHOWN.as_bytes())?,
            Some(claim) => narrator.add(format!("  {NOT_SHOWN}: {claim}\n").as_bytes())?,
        }
        Ok(missing.is_none())
    }

    /// Reports a failure, and draws a picture that shows how far the demo got.
    fn report_failure(&self, code: u8, prometheus: &Prometheus, narrator: &Narrator) -> Result<()> {
        let show = |bytes: &[u8]| {
            crate::messages::write_output(bytes);
            Ok(())
        };
        let Narrator { zero_s, events, .. } = narrator;
        if zero_s.is_some()
            && attempt(|| picture::draw(self, prometheus, *zero_s, events, false, show)).is_none()
        {
            report!("cannot draw the picture");
        }
        let log = self.folder.join(narrator::LOG);
        if log.exists() && read(&log)?.contains(NOT_SHOWN) {
            report!(
                "FAILED: {NOT_SHOWN} above marks the claims that failed; the logs are in {FOLDER}"
            );
        } else {
            report!("FAILED ({}): the logs are in {FOLDER}", ends::meaning(code));
        }
        Ok(())
    }
}

/// Lines that follow the picture if all claims hold.
const SHOWN: &str = "\
== all claims were seen to hold
  picture: target/demo/timeline.svg and timeline.png; its data: timeline.csv
  in the same folder: this log (demo.log), and of each VM (governed, policy-off, restarted-nvdimm, restarted-virtio-pmem, boundary)
  the guest's console (*.console.log) and the VMM's log (*.vmm.log); docs/tutorials/try-it.md lists all files
";
