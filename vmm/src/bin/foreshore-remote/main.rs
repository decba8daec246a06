//! Client for the API of a VMM, with the subcommands of ch-remote and those of Foreshore.

#![forbid(unsafe_code)]

mod answers;
mod completion;
mod devices;
mod events;
mod manual;
mod output;
mod ping;
mod pressure;
mod remedy;
mod table;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;

use anyhow::Context;
use clap::builder::TypedValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand};
use foreshore::api::{Client, MemoryAnswer, PoolsAnswer, VolumesAnswer};
use foreshore::config::COMPATIBLE_WITH;
use foreshore::vm::request::{
    GrowPoolRequest, ResizeDiskRequest, ResizeRequest, ResizeZoneRequest,
};
use foreshore_cli::{WRONG_COMMAND_LINE, usage_line};
use foreshore_types::size;

use self::answers::{counters_table, info_lines, pools_table, volumes_table, zones_table};
use self::devices::Device;
use self::events::Events;
use self::manual::ManualVerb;
use self::output::{Origin, Output, text_of};
use self::ping::Ping;
use self::pressure::Pressure;

const EXAMPLES: &str = "\
Examples:
  foreshore-remote --api-socket /run/vm.sock ping --wait
  foreshore-remote --api-socket /run/vm.sock info
  foreshore-remote --api-socket /run/vm.sock resize --memory 768M
  foreshore-remote --api-socket /run/vm.sock add-disk path=/d.raw,id=d
  foreshore-remote --api-socket /run/vm.sock remove-device d
  foreshore-remote --api-socket /run/vm.sock resize-disk --disk _disk0 --size 20G
  foreshore-remote --api-socket /run/vm.sock memory
  foreshore-remote --api-socket /run/vm.sock pressure --log 100
  foreshore-remote --api-socket /run/vm.sock pressure set policy=amf,reclaim=40,ceiling=1G
  foreshore-remote --api-socket /run/vm.sock pressure resume pm";

/// Control a running VM
#[derive(Debug, Parser)]
#[command(name = "foreshore-remote", after_help = format!("{EXAMPLES}\n\n{}", size::HELP), disable_help_subcommand = true, arg_required_else_help = false, version = VERSION.as_str(), long_version = LONG_VERSION.as_str())]
struct Flags {
    /// API socket of the VMM
    #[arg(long, value_name = "PATH", env = API_SOCKET, hide_env_values = true, value_parser = MaybeEmptyPath)]
    api_socket: Option<PathBuf>,
    /// Print JSON: the answer of the VMM, or {} if it has none
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

/// Parser of a path that may be empty, so that an empty environment variable counts as not set.
#[derive(Clone)]
struct MaybeEmptyPath;

impl TypedValueParser for MaybeEmptyPath {
    type Value = PathBuf;

    fn parse_ref(
        &self,
        _: &clap::Command,
        _: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<PathBuf, clap::Error> {
        Ok(value.into())
    }
}

/// Environment variable with the path of the API socket.
const API_SOCKET: &str = "FORESHORE_API_SOCKET";

/// Version of the client, and the compatible version of ch-remote.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("v{} (ch-remote v{COMPATIBLE_WITH})", env!("CARGO_PKG_VERSION")));
/// Version of the client, with the commit and date of the build.
static LONG_VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{}\n{}", *VERSION, env!("FORESHORE_BUILD")));

#[derive(Debug, Subcommand)]
enum Verb {
    /// Verbs for a VMM
    #[command(flatten)]
    Call(Call),
    /// Verbs about this program
    #[command(flatten)]
    Manual(ManualVerb),
}

#[derive(Debug, Subcommand)]
enum Call {
    /// Add a disk, described as for --disk
    AddDisk(Device),
    /// Add a network interface, described as for --net; descriptors of fd= are sent
    AddNet(Device),
    /// Add a volume of a pool, described as for --pm-volume
    AddPmVolume(Device),
    /// Add a file or device as persistent memory, described as for --pmem
    AddPmem(Device),
    /// Add the vsock device, described as for --vsock
    AddVsock(Device),
    /// Boot a created or shut-down VM
    Boot,
    /// Show the counters of disks and network interfaces
    Counters(Output),
    /// Create a VM from a JSON configuration, as shown by info
    Create {
        /// File with the configuration [default: standard input]
        #[arg(value_name = "PATH", default_value = "-", hide_default_value = true)]
        path: PathBuf,
    },
    /// End the VM and delete its configuration
    Delete,
    /// Show events as they occur, until the VMM ends
    Events(Events),
    /// Grow an open pool
    GrowPool(GrowPool),
    /// Show the state, memory, vCPUs and devices of the VM; its configuration with --json
    Info(Output),
    /// Show every memory zone with its requested, plugged, online and resident size
    Memory(Output),
    /// Send every vCPU a non-maskable interrupt
    Nmi,
    /// Pause the VM
    Pause,
    /// Check that the VMM responds
    Ping(Ping),
    /// Show every open pool with its use of space and its status
    Pool(Output),
    /// Press the power button of the guest
    PowerButton,
    /// Show or change the state of the governor
    Pressure(Pressure),
    /// Restart the VM
    Reboot,
    /// Request that the guest release a device
    RemoveDevice {
        /// ID of the device, from its flag or from the answer to its addition
        id: String,
    },
    /// Resize the VM
    Resize(Resize),
    /// Resume a paused VM
    Resume,
    /// Resize a disk
    ResizeDisk(ResizeDisk),
    /// Resize a memory zone
    ResizeZone(ResizeZone),
    /// End the VM, but not the VMM
    Shutdown,
    /// End the VM and the VMM
    ShutdownVmm,
    /// Show every volume with its interface, durability and failures
    Volumes(Output),
    /// Verbs of ch-remote whose calls the VMM refuses, with its reason
    #[command(flatten)]
    Refused(Refused),
}

/// Subcommands of ch-remote that Foreshore does not support.
#[derive(Debug, Subcommand)]
#[command(hide = true)]
enum Refused {
    #[command(hide = true)]
    AddDevice(Ignored),
    #[command(hide = true)]
    AddFs(Ignored),
    #[command(hide = true)]
    AddGenericVhostUser(Ignored),
    #[command(hide = true)]
    AddUserDevice(Ignored),
    #[command(hide = true)]
    AddVdpa(Ignored),
    #[command(hide = true)]
    Coredump(Ignored),
    #[command(hide = true)]
    ReceiveMigration(Ignored),
    #[command(hide = true)]
    Restore(Ignored),
    #[command(hide = true)]
    SendMigration(Ignored),
    #[command(hide = true)]
    Snapshot(Ignored),
}

/// Arguments that are ignored.
#[derive(Debug, Args)]
struct Ignored {
    #[arg(num_args = 0.., allow_hyphen_values = true, trailing_var_arg = true)]
    _arguments: Vec<String>,
}

impl Refused {
    fn call(&self) -> &'static str {
        match self {
            Self::AddDevice(_) => "vm.add-device",
            Self::AddFs(_) => "vm.add-fs",
            Self::AddGenericVhostUser(_) => "vm.add-generic-vhost-user",
            Self::AddUserDevice(_) => "vm.add-user-device",
            Self::AddVdpa(_) => "vm.add-vdpa",
            Self::Coredump(_) => "vm.coredump",
            Self::ReceiveMigration(_) => "vm.receive-migration",
            Self::Restore(_) => "vm.restore",
            Self::SendMigration(_) => "vm.send-migration",
            Self::Snapshot(_) => "vm.snapshot",
        }
    }
}

#[derive(Debug, Args)]
struct Resize {
    /// vCPUs
    #[arg(long)]
    cpus: Option<u8>,
    /// DRAM, boot memory included
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Balloon
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    balloon: Option<u64>,
}

#[derive(Debug, Args)]
struct ResizeDisk {
    /// ID of the disk, _disk0 for the first one without an ID
    #[arg(long, value_name = "ID")]
    disk: String,
    /// New size
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: u64,
}

#[derive(Debug, Args)]
struct GrowPool {
    /// Pool of the VM
    #[arg(value_name = "POOL")]
    path: PathBuf,
    /// New size [default: the size of the device]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Erase data that the device has after the pool
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct ResizeZone {
    /// ID of the zone: dram, pm, or the ID in --memory-zone or --pm-memory
    #[arg(long, value_name = "ID")]
    id: String,
    /// New size, including boot memory
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: u64,
}

/// Error in the command line. The exit code is 2, as with clap.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct WrongCommandLine(String);

/// Writes and flushes the output. At exit, Rust would ignore an error in writing the rest.
fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn main() -> ExitCode {
    pmem_volume::file_mode::make_files_private();
    foreshore_cli::answer_completion(manual::description);
    match run(std::env::args_os().collect()) {
        Ok(text) => match print(&text) {
            // The reader, for example `head`, may have closed the pipe.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                let _ =
                    writeln!(io::stderr(), "foreshore-remote: cannot write the output: {error}");
                ExitCode::FAILURE
            }
            _ => ExitCode::SUCCESS,
        },
        Err(error) => {
            let verbs = Flags::command();
            let message = remedy::describe(&error, |verb| verbs.find_subcommand(verb).is_some());
            let _ = writeln!(io::stderr(), "foreshore-remote: {message}");
            let is_usage = error.is::<WrongCommandLine>();
            if is_usage { ExitCode::from(WRONG_COMMAND_LINE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(args: Vec<OsString>) -> anyhow::Result<String> {
    let flags = match Flags::try_parse_from(args) {
        Ok(flags) => flags,
        Err(error)
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) =>
        {
            return Ok(error.render().to_string());
        }
        Err(error) => {
            return Err(WrongCommandLine(format!("{}{}", usage_line(&error), hint(&error))).into());
        }
    };
    let call = match flags.verb {
        Verb::Call(call) => call,
        Verb::Manual(verb) => return verb.execute(),
    };
    let Some(api_socket) = flags.api_socket.filter(|path| !path.as_os_str().is_empty()) else {
        let missing = format!("--api-socket is missing, and {API_SOCKET} is not set; see --help");
        return Err(WrongCommandLine(missing).into());
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = runtime.block_on(execute(&Client::new(&api_socket), call))?;
    Ok(if flags.json && text.is_empty() { "{}\n".to_owned() } else { text })
}

/// Hint for arguments like `pressure policy=amf`, the syntax of the VMM's flag.
fn hint(error: &clap::Error) -> &'static str {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(verb)) if verb.contains('=') => {
            "; to change a setting, use `pressure set`"
        }
        _ => "",
    }
}

/// Executes a subcommand, and returns the text to print.
async fn execute(vmm: &Client, call: Call) -> anyhow::Result<String> {
    match call {
        Call::Info(output) => {
            output.format(Origin::ChRemote, &vmm.get("vm.info").await?, info_lines)
        }
        Call::Counters(output) => {
            output.format(Origin::ChRemote, &vmm.get("vm.counters").await?, counters_table)
        }
        Call::Ping(ping) => ping.execute(vmm).await,
        Call::Memory(output) => {
            let table = |memory: &MemoryAnswer| zones_table(&memory.zones);
            output.format(Origin::Foreshore, &vmm.get("vm.memory").await?, table)
        }
        Call::Pool(output) => {
            let table = |pools: &PoolsAnswer| pools_table(&pools.pools);
            output.format(Origin::Foreshore, &vmm.get("pool.info").await?, table)
        }
        Call::Volumes(output) => {
            let table = |volumes: &VolumesAnswer| volumes_table(&volumes.volumes);
            output.format(Origin::Foreshore, &vmm.get("vm.volumes").await?, table)
        }
        Call::Pressure(pressure) => pressure.execute(vmm).await,
        Call::Resize(Resize { cpus: None, memory: None, balloon: None }) => {
            let missing = "resize needs at least one of --cpus, --memory and --balloon";
            Err(WrongCommandLine(missing.to_owned()).into())
        }
        Call::Resize(Resize { cpus, memory, balloon }) => {
            let body = ResizeRequest {
                desired_vcpus: cpus,
                desired_ram: memory,
                desired_balloon: balloon,
            };
            put(vmm, "vm.resize", Some(serde_json::to_string(&body)?)).await
        }
        Call::ResizeDisk(ResizeDisk { disk: id, size: desired_size }) => {
            let body = ResizeDiskRequest { id, desired_size };
            put(vmm, "vm.resize-disk", Some(serde_json::to_string(&body)?)).await
        }
        Call::GrowPool(GrowPool { path, size, force }) => {
            // The VMM may have another working directory.
            let path = std::path::absolute(path)?;
            let body = GrowPoolRequest { path, size, force };
            put(vmm, "pool.grow", Some(serde_json::to_string(&body)?)).await
        }
        Call::ResizeZone(ResizeZone { id, size: desired_ram }) => {
            let body = ResizeZoneRequest { id, desired_ram };
            put(vmm, "vm.resize-zone", Some(serde_json::to_string(&body)?)).await
        }
        Call::Events(events) => events.execute(vmm).await,
        Call::AddDisk(device) => device.add_disk(vmm).await,
        Call::AddNet(device) => device.add_net(vmm).await,
        Call::AddPmVolume(device) => device.add_pm_volume(vmm).await,
        Call::AddPmem(device) => device.add_pmem(vmm).await,
        Call::AddVsock(device) => device.add_vsock(vmm).await,
        Call::RemoveDevice { id } => devices::remove(vmm, &id).await,
        Call::Refused(refused) => put(vmm, refused.call(), None).await,
        Call::Create { path } => put(vmm, "vm.create", Some(read(&path)?)).await,
        Call::Delete => put(vmm, "vm.delete", None).await,
        Call::Boot => put(vmm, "vm.boot", None).await,
        Call::Pause => put(vmm, "vm.pause", None).await,
        Call::Resume => put(vmm, "vm.resume", None).await,
        Call::PowerButton => put(vmm, "vm.power-button", None).await,
        Call::Nmi => put(vmm, "vm.nmi", None).await,
        Call::Reboot => put(vmm, "vm.reboot", None).await,
        Call::Shutdown => put(vmm, "vm.shutdown", None).await,
        Call::ShutdownVmm => put(vmm, "vmm.shutdown", None).await,
    }
}

/// Reads a file, or standard input for `-`.
fn read(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return io::read_to_string(io::stdin()).context("cannot read standard input");
    }
    std::fs::read_to_string(path).with_context(|| format!("cannot read {path:?}"))
}

async fn put(vmm: &Client, call: &str, body: Option<String>) -> anyhow::Result<String> {
    text_of(&vmm.put(call, body).await?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn call(args: &[&str]) -> Call {
        let args = [&["foreshore-remote", "--api-socket", "/s"], args].concat();
        match Flags::try_parse_from(args).unwrap().verb {
            Verb::Call(call) => call,
            Verb::Manual(verb) => panic!("{verb:?}"),
        }
    }

    #[test]
    fn sizes_are_parsed_with_units() {
        let Call::Resize(resize) = call(&["resize", "--memory", "1G", "--cpus", "2"]) else {
            panic!()
        };
        assert_eq!((resize.memory, resize.cpus, resize.balloon), (Some(1 << 30), Some(2), None));
        for text in ["64MiB", "64M", "65536K", "0.0625G", "67108864"] {
            let Call::Resize(resize) = call(&["resize", "--balloon", text]) else { panic!() };
            assert_eq!(resize.balloon, Some(64 << 20), "{text}");
        }
    }

    /// Subcommands of ch-remote (54.0.0-dev, commit ae44c2971), each with arguments and the
    /// resulting call.
    const CH_REMOTE: [(&str, &[&str], &str); 31] = [
        ("add-device", &["path=/sys/bus/pci/devices/0000:00:01.0"], "vm.add-device"),
        ("add-disk", &["path=/d"], "vm.add-disk"),
        ("add-fs", &["tag=a,socket=/s"], "vm.add-fs"),
        ("add-generic-vhost-user", &["virtio_id=26,socket=/s"], "vm.add-generic-vhost-user"),
        ("add-net", &["fd=[3,4]"], "vm.add-net"),
        ("add-pmem", &["file=/p"], "vm.add-pmem"),
        ("add-user-device", &["socket=/s"], "vm.add-user-device"),
        ("add-vdpa", &["path=/dev/vhost-vdpa-0"], "vm.add-vdpa"),
        ("add-vsock", &["cid=3,socket=/s"], "vm.add-vsock"),
        ("boot", &[], "vm.boot"),
        ("coredump", &["file:///core"], "vm.coredump"),
        ("counters", &[], "vm.counters"),
        ("create", &["/config.json"], "vm.create"),
        ("delete", &[], "vm.delete"),
        ("info", &[], "vm.info"),
        ("nmi", &[], "vm.nmi"),
        ("pause", &[], "vm.pause"),
        ("ping", &[], "vmm.ping"),
        ("power-button", &[], "vm.power-button"),
        ("reboot", &[], "vm.reboot"),
        ("receive-migration", &["receiver_url=unix:/m"], "vm.receive-migration"),
        ("remove-device", &["d"], "vm.remove-device"),
        ("resize", &["--cpus", "2", "--memory", "1G", "--balloon", "0"], "vm.resize"),
        ("resize-disk", &["--disk", "d", "--size", "1G"], "vm.resize-disk"),
        ("resize-zone", &["--id", "z", "--size", "1G"], "vm.resize-zone"),
        ("restore", &["source_url=file:///s"], "vm.restore"),
        ("resume", &[], "vm.resume"),
        ("send-migration", &["unix:/m", "--local"], "vm.send-migration"),
        ("shutdown", &[], "vm.shutdown"),
        ("shutdown-vmm", &[], "vmm.shutdown"),
        ("snapshot", &["file:///s"], "vm.snapshot"),
    ];
    /// Subcommands that the VMM refuses, each with the reason.
    const CH_REMOTE_REFUSED: [(&str, &str); 10] = [
        ("add-device", "device passthrough is not supported"),
        ("add-fs", "virtio-fs is not implemented"),
        ("add-generic-vhost-user", "vhost-user is not implemented"),
        ("add-user-device", "device passthrough is not supported"),
        ("add-vdpa", "vDPA is not implemented"),
        ("coredump", "core dumps of a guest are not supported"),
        ("receive-migration", "migration is not implemented"),
        ("restore", "snapshots are not implemented"),
        ("send-migration", "migration is not implemented"),
        ("snapshot", "snapshots are not implemented"),
    ];
    /// Subcommands that ch-remote does not have.
    const OURS: [&str; 9] = [
        "add-pm-volume",
        "completion",
        "events",
        "grow-pool",
        "man",
        "memory",
        "pool",
        "pressure",
        "volumes",
    ];

    #[test]
    fn subcommands_include_all_of_ch_remote() {
        let flags = Flags::command();
        let verbs: BTreeSet<_> = flags.get_subcommands().map(|verb| verb.get_name()).collect();
        let expected = CH_REMOTE.iter().map(|(verb, ..)| *verb).chain(OURS).collect();
        assert_eq!(verbs, expected);
        let page = include_str!("../../../../docs/reference/compatibility.md");
        let has_row =
            |name: &str, end: &str| page.lines().any(|row| row.contains(name) && row.contains(end));
        for (name, args, path) in CH_REMOTE {
            let parsed = call(&[&[name], args].concat());
            let refusal = CH_REMOTE_REFUSED.iter().find(|(refused, _)| *refused == name);
            match (parsed, refusal) {
                (Call::Refused(refused), Some((_, why))) => {
                    assert_eq!(refused.call(), path);
                    assert!(
                        has_row(&format!("`{path}`"), &format!(" | refused | {why} |")),
                        "{name}: {why}"
                    );
                }
                (Call::Refused(_), None) => panic!("{name} is refused without a reason"),
                (_, Some(_)) => panic!("{name} is in the list of refusals, but is not refused"),
                (_, None) => assert!(has_row(&format!("`{path}`"), " | implemented |"), "{name}"),
            }
        }
    }

    #[test]
    fn subcommands_parse_their_arguments() {
        assert!(matches!(call(&["remove-device", "d"]), Call::RemoveDevice { id } if id == "d"));
        let volume = ["add-pm-volume", "pool=/p,name=a"];
        assert!(matches!(call(&volume), Call::AddPmVolume(_)));
        assert!(matches!(call(&["events", "--follow"]), Call::Events(_)));
        assert!(matches!(call(&["pool", "--json"]), Call::Pool(Output { json: true })));
        assert!(matches!(call(&["--json", "pool"]), Call::Pool(Output { json: true })));
        let version = run(["foreshore-remote", "--version"].map(OsString::from).to_vec()).unwrap();
        let lines: Vec<_> = version.lines().collect();
        assert!(lines[0].contains("ch-remote v") && lines[1].starts_with("commit "), "{version}");
    }

    #[test]
    fn error_about_a_misspelled_word_suggests_the_right_one() {
        assert!(foreshore_cli::misspelled::check_suggestions(&Flags::command()) > 0);
    }

    #[test]
    fn missing_command_is_a_usage_error() {
        for args in [&["foreshore-remote"][..], &["foreshore-remote", "--api-socket", "/s"]] {
            let error = run(args.iter().map(OsString::from).collect()).unwrap_err();
            let WrongCommandLine(text) = error.downcast().unwrap();
            assert!(text.contains("requires a subcommand"), "{text}");
        }
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
            error(&["--api-socket", "/s", "create", "/nowhere/c"])
                .starts_with("cannot read \"/nowhere/c\"")
        );
        assert!(error(&["--api-socket", "/s", "resize"]).contains("at least one of"));
        assert!(
            error(&["--api-socket", "/s", "add-disk", "readonly=on"])
                .contains("disk: path= is missing")
        );
        assert!(
            error(&["--api-socket", "/s", "pressure", "policy=amf"]).ends_with("`pressure set`")
        );
        assert!(!error(&["--api-socket", "/s", "pressure", "fly"]).contains("`pressure set`"));
        assert!(
            error(&["--api-socket", "/nowhere/s", "ping"])
                .starts_with("cannot reach a VMM at \"/nowhere/s\"")
        );
    }
}
