//! The client for the API of a VMM, with ch-remote's verbs and ours.

mod pressure;
mod table;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};
use foreshore::api::{Client, MemoryAnswer, ResizeBody, ResizeZoneBody};
use foreshore::config::parse_size;
use foreshore::vm::request::{ResizeDiskRequest, ResizeStatus, ZoneInfo};
use serde_json::Value;

use self::pressure::Pressure;
use self::table::{mib, table};

const EXAMPLES: &str = "\
Examples:
  foreshore-remote --api-socket /run/vm.sock info
  foreshore-remote --api-socket /run/vm.sock resize --memory 768M
  foreshore-remote --api-socket /run/vm.sock resize-disk --disk _disk0 --size 20G
  foreshore-remote --api-socket /run/vm.sock memory
  foreshore-remote --api-socket /run/vm.sock pressure --log 100
  foreshore-remote --api-socket /run/vm.sock pressure set policy=amf,reclaim=40,ceiling=1G
  foreshore-remote --api-socket /run/vm.sock pressure resume pm";

/// Talks to a running foreshore.
#[derive(Debug, Parser)]
#[command(name = "foreshore-remote", after_help = EXAMPLES, version, disable_help_subcommand = true)]
struct Flags {
    /// The VMM's API socket
    #[arg(long, value_name = "PATH")]
    api_socket: PathBuf,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Boot a VM that has been created, or shut down
    Boot,
    /// Show what disks have counted, as JSON
    Counters,
    /// Create a VM from a configuration in JSON, as info shows it
    Create {
        /// Where it is [default: standard input]
        #[arg(value_name = "PATH", default_value = "-", hide_default_value = true)]
        path: PathBuf,
    },
    /// End the VM and forget its configuration
    Delete,
    /// Show what happens from now on, one line of JSON for each event, until the VMM ends
    Events,
    /// Show the VM's configuration and state, as JSON
    Info,
    /// Show every memory zone: requested, plugged, online, resident
    Memory {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Send every vCPU a non-maskable interrupt
    Nmi,
    /// Stop the vCPUs, keep everything
    Pause,
    /// See whether the VMM answers
    Ping,
    /// Press the guest's power button
    PowerButton,
    /// Show what the governor does, or change it
    Pressure(Pressure),
    /// Restart the VM
    Reboot,
    /// Change the VM's size; sizes take K, M, G or T
    Resize(Resize),
    /// Let the vCPUs of a paused VM go on
    Resume,
    /// Give a disk another size; sizes take K, M, G or T
    ResizeDisk(ResizeDisk),
    /// Give a memory zone another size; sizes take K, M, G or T
    ResizeZone(ResizeZone),
    /// End the VM, keep the VMM
    Shutdown,
    /// End VM and VMM
    ShutdownVmm,
    /// Show every volume, as JSON: interface, durability, whether it has failed
    Volumes,
}

#[derive(Debug, Args)]
struct Resize {
    /// vCPUs
    #[arg(long)]
    cpus: Option<u8>,
    /// DRAM, boot memory included
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Balloon
    #[arg(long, value_name = "SIZE", value_parser = size)]
    balloon: Option<u64>,
}

#[derive(Debug, Args)]
struct ResizeDisk {
    /// Which disk: what --disk calls it, _disk0 for the first one without an id
    #[arg(long, value_name = "ID")]
    disk: String,
    /// Its new size
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: u64,
}

#[derive(Debug, Args)]
struct ResizeZone {
    /// Which zone: dram, pm, or what --memory-zone or --pm-memory calls it
    #[arg(long, value_name = "ID")]
    id: String,
    /// Its new size, boot memory included
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: u64,
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| "not a size: bytes, or a number with K, M, G or T".to_owned())
}

fn main() -> ExitCode {
    match run(std::env::args_os().collect()) {
        Ok(text) => {
            // Who reads it may have read enough, like `head`.
            let _ = io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            let message = format!("{error:#}").replace('\n', " ");
            let _ = writeln!(io::stderr(), "foreshore-remote: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Vec<OsString>) -> anyhow::Result<String> {
    let flags = match Flags::try_parse_from(args) {
        Ok(flags) => flags,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(error.render().to_string());
        }
        Err(error) => bail!("{}{}", first_line(&error.render().to_string()), hint(&error)),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(execute(&Client::new(&flags.api_socket), flags.verb))
}

/// clap explains itself in several lines; the flags that are missing are listed in the second and on.
fn first_line(usage: &str) -> String {
    let said = usage.lines().map(str::trim).take_while(|line| !line.is_empty());
    let text = said.collect::<Vec<_>>().join(" ");
    format!("{}; see --help", text.strip_prefix("error: ").unwrap_or(&text))
}

/// `pressure policy=amf` looks like the VMM's own flag: where that goes here.
fn hint(error: &clap::Error) -> &'static str {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(verb)) if verb.contains('=') => {
            "; what is to be changed goes behind `pressure set`"
        }
        _ => "",
    }
}

/// Does what is asked; returns what to print.
async fn execute(vmm: &Client, verb: Verb) -> anyhow::Result<String> {
    match verb {
        Verb::Info => pretty(&vmm.get("vm.info").await?),
        Verb::Counters => pretty(&vmm.get("vm.counters").await?),
        Verb::Volumes => pretty(&vmm.get("vm.volumes").await?),
        Verb::Ping => pretty(&vmm.get("vmm.ping").await?),
        Verb::Memory { json } => {
            let answer = vmm.get("vm.memory").await?;
            if json {
                return pretty(&answer);
            }
            let memory: MemoryAnswer =
                serde_json::from_slice(&answer).context("The answer is not a list of zones")?;
            Ok(zones_table(&memory.zones))
        }
        Verb::Pressure(pressure) => pressure.execute(vmm).await,
        Verb::Resize(Resize { cpus: None, memory: None, balloon: None }) => {
            bail!("resize needs at least one of --cpus, --memory and --balloon")
        }
        Verb::Resize(Resize { cpus, memory, balloon }) => {
            let body = ResizeBody { desired_vcpus: cpus, desired_ram: memory, desired_balloon: balloon };
            put(vmm, "vm.resize", Some(serde_json::to_string(&body)?)).await
        }
        Verb::ResizeDisk(ResizeDisk { disk: id, size: desired_size }) => {
            let body = ResizeDiskRequest { id, desired_size };
            put(vmm, "vm.resize-disk", Some(serde_json::to_string(&body)?)).await
        }
        Verb::ResizeZone(ResizeZone { id, size: desired_ram }) => {
            let body = ResizeZoneBody { id, desired_ram };
            put(vmm, "vm.resize-zone", Some(serde_json::to_string(&body)?)).await
        }
        Verb::Events => follow(vmm).await,
        Verb::Create { path } => put(vmm, "vm.create", Some(read(&path)?)).await,
        Verb::Delete => put(vmm, "vm.delete", None).await,
        Verb::Boot => put(vmm, "vm.boot", None).await,
        Verb::Pause => put(vmm, "vm.pause", None).await,
        Verb::Resume => put(vmm, "vm.resume", None).await,
        Verb::PowerButton => put(vmm, "vm.power-button", None).await,
        Verb::Nmi => put(vmm, "vm.nmi", None).await,
        Verb::Reboot => put(vmm, "vm.reboot", None).await,
        Verb::Shutdown => put(vmm, "vm.shutdown", None).await,
        Verb::ShutdownVmm => put(vmm, "vmm.shutdown", None).await,
    }
}

async fn follow(vmm: &Client) -> anyhow::Result<String> {
    let mut out = io::stdout();
    vmm.follow("vmm.events", |piece| {
        out.write_all(piece)?;
        out.flush()
    })
    .await?;
    Ok(String::new())
}

/// A file's text; `-` is standard input.
fn read(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return io::read_to_string(io::stdin()).context("Cannot read standard input");
    }
    std::fs::read_to_string(path).with_context(|| format!("Cannot read {path:?}"))
}

async fn put(vmm: &Client, call: &str, body: Option<String>) -> anyhow::Result<String> {
    vmm.put(call, body).await?;
    Ok(String::new())
}

fn pretty(answer: &[u8]) -> anyhow::Result<String> {
    let value: Value = serde_json::from_slice(answer).context("The answer is not JSON")?;
    Ok(format!("{value:#}\n"))
}

/// Zones in columns, sizes in MiB.
fn zones_table(zones: &[ZoneInfo]) -> String {
    let header = ["ZONE", "NODE", "BOOT", "HOTPLUG", "REQUESTED", "PLUGGED", "ONLINE", "RESIDENT", "STATUS"];
    let rows = zones.iter().map(|zone| {
        [
            zone.id.clone(),
            zone.guest_numa_node.to_string(),
            mib(zone.boot_bytes),
            mib(zone.hotplug_bytes),
            mib(zone.requested_bytes),
            mib(zone.plugged_bytes),
            zone.online_bytes.map_or_else(|| "-".to_owned(), mib),
            mib(zone.resident_bytes),
            status(&zone.status),
        ]
    });
    table(header, 1, rows)
}

fn status(status: &ResizeStatus) -> String {
    match status {
        ResizeStatus::Reached => "reached".to_owned(),
        ResizeStatus::Pending => "pending".to_owned(),
        ResizeStatus::NoDriver => "no-driver".to_owned(),
        ResizeStatus::Stuck(reason) => format!("stuck: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb(args: &[&str]) -> Verb {
        Flags::try_parse_from([&["foreshore-remote", "--api-socket", "/s"], args].concat()).unwrap().verb
    }

    fn zone() -> ZoneInfo {
        ZoneInfo {
            id: "dram".to_owned(),
            tier: "dram".to_owned(),
            guest_numa_node: 0,
            boot_bytes: 384 << 20,
            hotplug_bytes: 128 << 20,
            requested_bytes: 128 << 20,
            plugged_bytes: 64 << 20,
            online_bytes: None,
            resident_bytes: 5 << 20,
            status: ResizeStatus::Stuck("busy pages".to_owned()),
        }
    }

    #[test]
    fn zones_are_shown_in_columns() {
        let expected = "\
ZONE  NODE     BOOT  HOTPLUG  REQUESTED  PLUGGED  ONLINE  RESIDENT  STATUS
dram     0  384 MiB  128 MiB    128 MiB   64 MiB       -     5 MiB  stuck: busy pages
";
        assert_eq!(zones_table(&[zone()]), expected);
    }

    #[test]
    fn sizes_take_units() {
        let Verb::Resize(resize) = verb(&["resize", "--memory", "1G", "--cpus", "2"]) else { panic!() };
        assert_eq!((resize.memory, resize.cpus, resize.balloon), (Some(1 << 30), Some(2), None));
    }

    #[test]
    fn every_error_is_one_line() {
        let error = |args: &[&str]| {
            let args = [&["foreshore-remote"], args].concat();
            let error = run(args.into_iter().map(OsString::from).collect()).unwrap_err();
            let text = format!("{error:#}");
            assert_eq!(text.lines().count(), 1, "{text}");
            text
        };
        assert!(error(&["ping"]).contains("--api-socket"));
        assert!(error(&["--api-socket", "/s", "fly"]).contains("fly"));
        assert!(error(&["--api-socket", "/s", "resize", "--memory", "1Q"]).contains("not a size"));
        assert!(
            error(&["--api-socket", "/s", "create", "/nowhere/c"]).starts_with("Cannot read \"/nowhere/c\"")
        );
        assert!(error(&["--api-socket", "/s", "resize"]).contains("at least one of"));
        assert!(error(&["--api-socket", "/s", "pressure", "policy=amf"]).ends_with("`pressure set`"));
        assert!(!error(&["--api-socket", "/s", "pressure", "fly"]).contains("`pressure set`"));
        assert!(
            error(&["--api-socket", "/nowhere/s", "ping"])
                .starts_with("Cannot reach a VMM at \"/nowhere/s\"")
        );
    }
}
