//! Tests of Cloud Hypervisor's clients (ci/clients) with real guests.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, Guest, Image, Kernel, program};

use crate::api::{empty_vmm, without_a_vm};
use crate::net::{Net, need_tun};

guest_tests::tests![
    every_call: 300,
    curl_keeps_its_connection => Client::new("curl").run_and_leave(),
    flintlock_reads_the_counters (long),
    hypeman_waits_until_memory_has_settled => Client::new("hypeman").run_to_the_end(),
    katas_runtime_in_go_adds_a_disk_and_memory: 240 (long) x several =>
        Client::with_nets("kata-go", [20, 21])?.run_to_the_end(),
    katas_runtime_in_rust_writes_out_every_null: 240 x several =>
        Client::with_nets("kata-runtime-rs", [22, 23])?.run_to_the_end(),
    libvirt_reboots: 240 (long),
    virtink_reboots: 240 (long) => Client::new("virtink").run_and_leave(),
];

const END_LIMIT: Duration = Duration::from_secs(30);
/// FIFO that libvirt creates.
const EVENTS: &str = "event-monitor-fifo";

fn image(name: &str, mib: u64) -> Result<PathBuf> {
    fs::create_dir_all(this_tests_dir())?;
    let path = this_tests_dir().join(name);
    // A VM may already be using the file.
    File::options().write(true).create(true).truncate(false).open(&path)?.set_len(mib << 20)?;
    Ok(path)
}

struct Client {
    name: &'static str,
    /// Networks of the guest's NICs that the client opens.
    nets: Vec<Net>,
}

impl Client {
    fn new(name: &'static str) -> Self {
        Self { name, nets: Vec::new() }
    }

    fn with_nets(name: &'static str, numbers: [u8; 2]) -> Result<Self> {
        let [one, other] = numbers.map(Net::new);
        Ok(Self { name, nets: vec![one?, other?] })
    }

    /// Runs the client to its end. At the line `until up`, waits until the guest is ready.
    fn run(&self, vmm: &Guest) -> Result<()> {
        let kernel = Kernel::V6_12;
        let paths = [
            vmm.api_socket(),
            kernel.path(),
            Image::Basic.path(kernel),
            vmm.console_file(),
            vmm.vsock_socket(),
            image("disk0", 64)?,
            image("disk1", 64)?,
            image("pmem", 128)?,
            this_tests_dir().join(EVENTS),
        ];
        let mut command = Command::new(program("client-tests"));
        command.arg(self.name).args(paths).args(self.nets.iter().map(|net| &net.tap));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut input = child.stdin.take().expect("a pipe");
        let mut boots = 0;
        for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
            match line?.as_str() {
                "until up" => {
                    vmm.wait_for_shell(BOOT_LIMIT)?;
                    self.use_nets(vmm, boots)?;
                    boots += 1;
                    writeln!(input)?;
                }
                output => println!("{}: {output}", self.name),
            }
        }
        let status = child.wait()?;
        ensure!(status.success(), "{} ended with {status}; its output is above", self.name);
        Ok(())
    }

    /// Checks that the client's NICs carry packets after the first boot and later ones.
    fn use_nets(&self, vmm: &Guest, boots: usize) -> Result<()> {
        for (nth, net) in self.nets.iter().enumerate() {
            if boots == 0 {
                net.set_up_host()?;
            }
            net.set_up_guest(vmm, &format!("eth{nth}"))?;
        }
        Ok(())
    }

    /// Runs the client against a VMM that has no VM. The client should end the VMM.
    fn run_to_the_end(&self) -> Result<()> {
        let vmm = empty_vmm()?;
        self.run(&vmm)?;
        ends(vmm)
    }

    /// Runs the client against a VMM that has no VM. The client should leave the VMM without a VM.
    fn run_and_leave(&self) -> Result<()> {
        let vmm = empty_vmm()?;
        self.run(&vmm)?;
        ensure!(
            vmm.try_api("GET", "vm.info", None)?.status == 404,
            "{} did not delete its VM",
            self.name
        );
        vmm.command("vmm.shutdown")?;
        ends(vmm)
    }
}

fn ends(vmm: Guest) -> Result<()> {
    let status = vmm.wait_for_exit(END_LIMIT)?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}

fn every_call() -> Result<()> {
    // The client adds an interface for which the VMM creates a tap.
    need_tun()?;
    Client::new("every-call").run_to_the_end()
}

/// The client passes everything as flags, and passes two values to one flag.
fn flintlock_reads_the_counters() -> Result<()> {
    let disk = |name: &str, more: &str| {
        Ok::<_, anyhow::Error>(format!("path={}{more}", image(name, 64)?.display()))
    };
    let (root, metadata) = (disk("disk0", "")?, disk("disk1", ",readonly=on")?);
    let log = this_tests_dir().join("flintlock.log");
    let vmm = Guest::builder()
        .words([
            "--log-file",
            &log.display().to_string(),
            "-v",
            "--cpus",
            "boot=1",
            "--memory",
            "size=512M",
        ])
        .words(["--disk", &root, &metadata])
        .start()?;
    Client::new("flintlock").run(&vmm)?;
    ensure!(vmm.get("vm.info")?["state"] == "Created", "The VM is not shut down");
    vmm.command("vmm.shutdown")?;
    ends(vmm)
}

/// Libvirt creates the socket, starts the VMM, and opens the FIFO. The VMM waits for the FIFO.
fn libvirt_reboots() -> Result<()> {
    let client = Client::with_nets("libvirt", [24, 25])?;
    let events = this_tests_dir().join(EVENTS);
    ensure!(Command::new("mkfifo").arg(&events).status()?.success(), "Cannot create a FIFO");
    let monitor = format!("path={}", events.display());
    let vmm = without_a_vm().api_by_descriptor().argument("--event-monitor", &monitor).start()?;
    client.run(&vmm)?;
    let output = vmm.console_log()?;
    ensure!(
        output.matches("foreshore-guest: ready").count() == 2,
        "The terminal received:\n{output}"
    );
    ends(vmm)
}
