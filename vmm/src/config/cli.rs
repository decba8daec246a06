//! Parsing of the command line into a [`Launch`].

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser};
use foreshore_cli::usage_line;
use foreshore_config::{ConfigError, Table};
use foreshore_confinement::identity::Identity;
use foreshore_confinement::seccomp::SeccompMode;
use foreshore_devices::events::EventMonitor;
use foreshore_devices::host_console::config as console;
use foreshore_devices::log::{LogConfig, LogFormat};
use foreshore_types::size;
use thiserror::Error;

use super::at_guest_shutdown::AtGuestShutdown;
use super::{
    ApiSocket, BalloonConfig, ConsoleConfig, CpusConfig, DiskConfig, LandlockConfig, LandlockMode,
    MemoryConfig, MemoryZoneConfig, MetricsAddress, NetConfig, NumaConfig, PayloadConfig,
    PlatformConfig, PmMemoryConfig, PmVolumeConfig, PmemConfig, PressureConfig, RngConfig,
    Switches, VmConfig, VsockConfig, pressure, unsupported,
};

/// Result of parsing a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Launch(Box<Launch>),
    /// Print a text, either the help or the version, and exit.
    Print(String),
}

/// VM to run, and settings of the VMM process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Validated VM. Without a VM, the VMM waits for `vm.create`.
    pub config: Option<VmConfig>,
    pub at_guest_shutdown: AtGuestShutdown,
    pub api_socket: Option<ApiSocket>,
    pub event_monitor: Option<EventMonitor>,
    pub metrics: Option<MetricsAddress>,
    /// Name of the VM in its metrics.
    pub vm_name: String,
    pub log: LogConfig,
    /// Settings that probably do not work as intended, to be logged.
    pub warnings: Vec<String>,
    pub seccomp: SeccompMode,
    pub landlock: LandlockMode,
    pub identity: Identity,
}

impl Launch {
    /// Inherited descriptors, each with the flag that names it.
    pub(crate) fn descriptors(&self) -> Vec<(&'static str, RawFd)> {
        let nets = self.config.iter().flat_map(|config| &config.net).flat_map(|net| &net.fds);
        let mut all: Vec<_> = nets.map(|given| (NetConfig::FLAG, given.number())).collect();
        if let Some(ApiSocket::Fd(fd)) = self.api_socket {
            all.push((ApiSocket::TABLE.flag, fd));
        }
        if let Some(EventMonitor::Fd(fd)) = self.event_monitor {
            all.push((EventMonitor::TABLE.flag, fd));
        }
        all
    }
}

/// Error in the command line, in one line of text.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CliError {
    #[error("{0}")]
    Usage(String),
    /// A flag of Cloud Hypervisor that Foreshore does not have.
    #[error("{flag} is not supported by foreshore: {why}")]
    Foreign {
        flag: String,
        /// Reason for the refusal.
        why: &'static str,
    },
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Version of Cloud Hypervisor with compatible flags and API.
pub const COMPATIBLE_WITH: &str = "54.0.0";

const EXAMPLES: &str = "\
Flags follow Cloud Hypervisor's syntax.

Examples:
  A guest on DRAM alone, with its console on this terminal:
    foreshore --kernel vmlinuz --initramfs initrd.img --cmdline console=hvc0 --memory size=512M

  A guest that grows on demand, DRAM first, then PM, with a volume:
    pmvol create /pm/pool --size 16G
    foreshore --kernel vmlinuz --initramfs initrd.img --cpus boot=2 \\
      --memory size=512M,hotplug_method=virtio-mem,hotplug_size=512M \\
      --pm-memory pool=/pm/pool,size=4G \\
      --pm-volume pool=/pm/pool,name=data,size=8G,create=on \\
      --pressure policy=psi --vsock cid=3,socket=/run/vm.vsock \\
      --api-socket /run/vm.sock --metrics 127.0.0.1:9745";

/// Virtual machine monitor with guest memory and storage from one pool of persistent memory
#[derive(Debug, Parser)]
#[command(name = "foreshore", after_help = format!("{}\n{EXAMPLES}", size::HELP), version, disable_version_flag = true, args_override_self = false)]
struct Flags {
    #[command(flatten)]
    vm: Option<VmFlags>,

    #[arg(long, value_name = "SOCKET", help_heading = "Control")]
    api_socket: Option<String>,
    #[arg(long, value_name = "ADDRESS", help_heading = "Control")]
    metrics: Option<String>,
    #[arg(long, value_name = "TARGET", help_heading = "Control")]
    event_monitor: Option<String>,
    /// off: accepted for compatibility with Cloud Hypervisor; a debug console is not implemented
    #[arg(long, value_name = "MODE", hide = true)]
    debug_console: Option<String>,
    /// Keep the VMM when the guest powers off
    #[arg(long, help_heading = "Control")]
    no_shutdown: bool,
    /// Action on a system call that a thread's filter does not allow
    #[arg(long, value_name = "MODE", help_heading = "Confinement", default_value = "true", value_parser = seccomp_mode())]
    seccomp: SeccompMode,
    /// Become this user, by name or number, before the VM's files are opened
    #[arg(long, value_name = "USER", help_heading = "Confinement")]
    user: Option<String>,
    /// Use this group instead of the user's primary group
    #[arg(long, value_name = "GROUP", help_heading = "Confinement")]
    group: Option<String>,
    /// Make this the root folder, in which all paths are looked up
    #[arg(long, value_name = "FOLDER", help_heading = "Confinement")]
    chroot: Option<PathBuf>,
    /// Use Landlock to limit the VMM to the files of the VM
    #[arg(long, value_name = "MODE", num_args = 0..=1, default_value = "auto", default_missing_value = "on", ignore_case = true, help_heading = "Confinement")]
    landlock: LandlockMode,
    /// Log to a file [default: standard error]
    #[arg(long, value_name = "PATH", help_heading = "Control")]
    log_file: Option<PathBuf>,
    /// Format of log lines; a template of Cloud Hypervisor, such as {msg}, is accepted and ignored
    #[arg(long, value_name = "FORMAT", help_heading = "Control", default_value = "text", value_parser = LogFormatParser)]
    log_format: GivenLogFormat,
    /// Log more: -v information, -vv debugging, -vvv everything
    #[arg(short, action = ArgAction::Count, help_heading = "Control")]
    v: u8,
    /// Print the version
    #[arg(short = 'V', long, help_heading = "Control")]
    version: bool,
}

/// Value of `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GivenLogFormat {
    Ours(LogFormat),
    /// Template with tokens in braces, as in Cloud Hypervisor.
    Template,
}

impl GivenLogFormat {
    fn format(self) -> LogFormat {
        match self {
            Self::Ours(format) => format,
            Self::Template => LogFormat::default(),
        }
    }
}

#[derive(Clone)]
struct LogFormatParser;

impl TypedValueParser for LogFormatParser {
    type Value = GivenLogFormat;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<GivenLogFormat, clap::Error> {
        if value.as_encoded_bytes().contains(&b'{') {
            return Ok(GivenLogFormat::Template);
        }
        let names = PossibleValuesParser::new(LogFormat::ALL.map(LogFormat::name));
        let name = names.parse_ref(command, argument, value)?;
        let format = LogFormat::ALL.into_iter().find(|format| format.name() == name);
        Ok(GivenLogFormat::Ours(format.expect("a possible value")))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(LogFormat::ALL.into_iter().map(|format| PossibleValue::new(format.name()))))
    }
}

/// Flags that describe the VM. All other flags are about the VMM.
#[derive(Debug, Default, Args)]
struct VmFlags {
    /// Kernel to boot: an ELF file with a PVH note, or a bzImage
    #[arg(long, value_name = "PATH", help_heading = "Guest")]
    kernel: Option<PathBuf>,
    /// Firmware that boots from a disk, instead of a kernel: an ELF file with a PVH note
    #[arg(long, value_name = "PATH", help_heading = "Guest")]
    firmware: Option<PathBuf>,
    /// Initial RAM file system
    #[arg(long, value_name = "PATH", help_heading = "Guest")]
    initramfs: Option<PathBuf>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", help_heading = "Guest")]
    cmdline: Option<String>,
    #[arg(long, value_name = "OPTIONS", help_heading = "Guest")]
    cpus: Option<String>,

    #[arg(long, value_name = "OPTIONS", help_heading = "Guest")]
    platform: Option<String>,

    #[arg(long, value_name = "OPTIONS", help_heading = "Memory and storage")]
    memory: Option<String>,
    #[arg(long, value_name = "OPTIONS", help_heading = "Memory and storage")]
    balloon: Option<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    memory_zone: Vec<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    numa: Vec<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    pm_memory: Vec<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    pm_volume: Vec<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    disk: Vec<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Memory and storage")]
    pmem: Vec<String>,
    #[arg(long, value_name = "OPTIONS", help_heading = "Memory and storage")]
    pressure: Option<String>,

    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Devices")]
    net: Vec<String>,
    #[arg(long, value_name = "MODE", help_heading = "Devices")]
    serial: Option<String>,
    #[arg(long, value_name = "MODE", help_heading = "Devices")]
    console: Option<String>,
    #[arg(long, value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "", help_heading = "Devices")]
    rng: Option<String>,
    #[arg(long, value_name = "OPTIONS", help_heading = "Devices")]
    vsock: Option<String>,

    #[arg(long, value_name = "OPTIONS", num_args = 1.., action = ArgAction::Append, help_heading = "Confinement")]
    landlock_rules: Vec<String>,
}

/// Key tables of all flags that have keys.
pub const TABLES: [Table; 20] = [
    Table::of::<CpusConfig>(),
    Table::of::<PlatformConfig>(),
    Table::of::<MemoryConfig>(),
    Table::of::<BalloonConfig>(),
    Table::of::<MemoryZoneConfig>(),
    Table::of::<NumaConfig>(),
    Table::of::<PmMemoryConfig>(),
    Table::of::<PmVolumeConfig>(),
    Table::of::<DiskConfig>(),
    Table::of::<PmemConfig>(),
    pressure::TABLE,
    Table::of::<NetConfig>(),
    console::SERIAL,
    console::CONSOLE,
    Table::of::<RngConfig>(),
    Table::of::<VsockConfig>(),
    Table::of::<LandlockConfig>(),
    ApiSocket::TABLE,
    MetricsAddress::TABLE,
    EventMonitor::TABLE,
];

/// Command line description for clap, with help from the tables.
pub fn description() -> clap::Command {
    Flags::command().args(Switches::args()).mut_args(|arg| {
        match TABLES.iter().find(|table| arg.get_long() == table.flag.strip_prefix("--")) {
            Some(table) => arg.help(table.line()).long_help(table.listing()),
            None => arg,
        }
    })
}

/// Parses and validates a command line. Its first word is the program's name.
pub fn parse_command_line(args: impl IntoIterator<Item = OsString>) -> Result<Command, CliError> {
    let matches = description().try_get_matches_from(args);
    let read = |matches| Ok((Flags::from_arg_matches(&matches)?, Switches::from_matches(&matches)));
    let (flags, switches) = match matches.and_then(read) {
        Ok((flags, _)) if flags.version => {
            return Ok(Command::Print(version()));
        }
        Ok(read) => read,
        Err(error) if error.kind() == ErrorKind::DisplayHelp => {
            return Ok(Command::Print(error.render().to_string()));
        }
        Err(error) => return Err(usage_error(&error)),
    };
    if let Some(text) = &flags.debug_console
        && let Some(why) = unsupported::debug_console(text)
    {
        return Err(CliError::Foreign { flag: "--debug-console".to_owned(), why });
    }
    let mut warnings = Vec::new();
    if flags.log_format == GivenLogFormat::Template {
        let text = "--log-format: ignored; templates are not supported, use text or json";
        warnings.push(text.to_owned());
    }
    let api_socket = flags.api_socket.as_deref().map(ApiSocket::parse).transpose()?;
    let event_monitor = flags.event_monitor.as_deref().map(EventMonitor::parse).transpose()?;
    let metrics = flags.metrics.as_deref().map(MetricsAddress::parse_named).transpose()?;
    let (metrics, vm_name) = metrics.unzip();
    if let Some(MetricsAddress::Tcp(address, _)) = &metrics
        && !address.ip().to_canonical().is_loopback()
    {
        warnings.push(format!(
            "--metrics {address}: every host that reaches this address can read the metrics; use 127.0.0.1 or unix:PATH to keep them on this host"
        ));
    }
    let vm_name = vm_name.flatten().unwrap_or_else(|| default_name(api_socket.as_ref()));
    let log = LogConfig {
        file: flags.log_file.clone(),
        format: flags.log_format.format(),
        verbosity: flags.v,
    };
    let at_guest_shutdown =
        if flags.no_shutdown { AtGuestShutdown::Stay } else { AtGuestShutdown::End };
    let config = match (&api_socket, flags.vm) {
        (Some(_), None) if switches.is_empty() => None,
        (_, vm) => {
            let mut config = vm_config(vm.unwrap_or_default(), switches)?;
            config.landlock_enable = flags.landlock != LandlockMode::Off;
            Some(config)
        }
    };
    if let Some(config) = &config {
        config.validate()?;
        warnings.extend(config.warnings());
    }
    let launch = Launch {
        config,
        at_guest_shutdown,
        api_socket,
        event_monitor,
        metrics,
        vm_name,
        log,
        warnings,
        seccomp: flags.seccomp,
        landlock: flags.landlock,
        identity: Identity { user: flags.user, group: flags.group, root: flags.chroot },
    };
    check_descriptors(&launch)?;
    Ok(Command::Launch(Box::new(launch)))
}

/// Version text. The second line has the commit and date of the build. libvirt identifies the
/// program as Cloud Hypervisor by the start of the first line, and derives its features from the
/// version number.
fn version() -> String {
    let ours = env!("CARGO_PKG_VERSION");
    let build = env!("FORESHORE_BUILD");
    format!("cloud-hypervisor v{COMPATIBLE_WITH} (foreshore v{ours})\n{build}\n")
}

fn vm_config(flags: VmFlags, switches: Switches) -> Result<VmConfig, ConfigError> {
    let serial = flags.serial.as_deref().map(ConsoleConfig::parse_serial).transpose()?;
    let console = flags.console.as_deref().map(ConsoleConfig::parse_console).transpose()?;
    Ok(VmConfig {
        payload: PayloadConfig {
            firmware: flags.firmware,
            kernel: flags.kernel,
            initramfs: flags.initramfs,
            cmdline: flags.cmdline,
        },
        cpus: flags.cpus.as_deref().map_or(Ok(CpusConfig::default()), CpusConfig::parse)?,
        memory: memory_config(flags.memory.as_deref(), &flags.memory_zone)?,
        numa: all(&flags.numa, NumaConfig::parse)?,
        balloon: flags.balloon.as_deref().map(BalloonConfig::parse).transpose()?,
        disks: all(&flags.disk, DiskConfig::parse)?,
        net: all(&flags.net, NetConfig::parse)?,
        serial: serial.unwrap_or_else(ConsoleConfig::default_serial),
        console: console.unwrap_or_else(ConsoleConfig::default_console),
        rng: flags.rng.as_deref().map_or(Ok(RngConfig::default()), RngConfig::parse)?,
        switches,
        vsock: flags.vsock.as_deref().map(VsockConfig::parse).transpose()?,
        landlock_enable: false,
        landlock_rules: all(&flags.landlock_rules, LandlockConfig::parse)?,
        platform: flags.platform.as_deref().map(PlatformConfig::parse).transpose()?,
        pm_memory: all(&flags.pm_memory, PmMemoryConfig::parse)?,
        pm_volumes: all(&flags.pm_volume, PmVolumeConfig::parse)?,
        pmem: all(&flags.pmem, PmemConfig::parse)?,
        pressure: flags.pressure.as_deref().map(PressureConfig::parse).transpose()?,
    })
}

fn memory_config(memory: Option<&str>, zones: &[String]) -> Result<MemoryConfig, ConfigError> {
    let memory = memory.map_or(Ok(MemoryConfig::default()), MemoryConfig::parse)?;
    Ok(MemoryConfig { zones: all(zones, MemoryZoneConfig::parse)?, ..memory })
}

fn all<T>(
    texts: &[String],
    parse: fn(&str) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    texts.iter().map(|text| parse(text)).collect()
}

/// Default name of a VM, derived from its API socket, because users identify a VM by its socket.
fn default_name(api_socket: Option<&ApiSocket>) -> String {
    let stem = match api_socket {
        Some(ApiSocket::Path(path, _)) => path.file_stem(),
        _ => None,
    };
    stem.map_or_else(|| "foreshore".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

fn seccomp_mode() -> impl TypedValueParser<Value = SeccompMode> {
    let value = |mode: SeccompMode| {
        PossibleValue::new(mode.name()).help(match mode {
            SeccompMode::Enforce => "End the VMM",
            SeccompMode::Off => "Allow all calls",
            SeccompMode::Log => "Log the call and carry it out",
            SeccompMode::Errno => "Let the call fail",
        })
    };
    PossibleValuesParser::new(SeccompMode::ALL.map(value)).map(|name| {
        let mode = SeccompMode::ALL.into_iter().find(|mode| mode.name() == name);
        mode.expect("a possible value")
    })
}

/// Checks that no two flags name the same descriptor, because each of them would close it. `--net`
/// compares its descriptors with each other.
fn check_descriptors(launch: &Launch) -> Result<(), ConfigError> {
    let all = launch.descriptors();
    for (nth, (flag, fd)) in all.iter().enumerate() {
        let other = all[..nth].iter().find(|(other, taken)| other != flag && taken == fd);
        if let Some((other, _)) = other {
            let reason = format!("fd {fd} is also used by {other}");
            return Err(ConfigError::Conflict { flag, reason });
        }
    }
    Ok(())
}

fn usage_error(error: &clap::Error) -> CliError {
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg)
        && let Some(why) = unsupported::reason(flag)
    {
        return CliError::Foreign { flag: flag.clone(), why };
    }
    CliError::Usage(usage_line(error))
}

#[cfg(test)]
mod tests {
    use super::super::{ConsoleMode, HotplugMethod, VolumeSize};
    use super::*;

    fn parse(args: &[&str]) -> Result<Command, CliError> {
        parse_command_line(
            std::iter::once("foreshore").chain(args.iter().copied()).map(OsString::from),
        )
    }

    fn config(args: &[&str]) -> VmConfig {
        launch(args).config.unwrap()
    }

    fn launch(args: &[&str]) -> Launch {
        match parse(&[&["--kernel", "/vmlinuz"], args].concat()).unwrap() {
            Command::Launch(launch) => *launch,
            Command::Print(text) => panic!("printed {text}"),
        }
    }

    fn error(args: &[&str]) -> String {
        let message = parse(&[&["--kernel", "/vmlinuz"], args].concat()).unwrap_err().to_string();
        assert_eq!(message.lines().count(), 1, "{message}");
        message
    }

    #[test]
    fn example_of_the_manual_is_parsed() {
        let launch = launch(&[
            "--initramfs",
            "img",
            "--cpus",
            "boot=2",
            "--memory",
            "size=512M,hotplug_method=virtio-mem,hotplug_size=512M",
            "--pm-memory",
            "pool=/pm/pool,size=4G",
            "--pm-volume",
            "pool=/pm/pool,name=data,size=8G,interface=auto",
            "--pressure",
            "policy=psi",
            "--vsock",
            "cid=3,socket=/run/vm.vsock",
            "--api-socket",
            "/run/vm.sock",
            "--metrics",
            "127.0.0.1:9745",
            "-vv",
            "--serial",
            "file=/log",
            "--cmdline",
            "console=hvc0 quiet",
        ]);
        let config = launch.config.clone().unwrap();
        assert_eq!(config.payload.initramfs, Some("img".into()));
        assert_eq!(config.payload.cmdline.as_deref(), Some("console=hvc0 quiet"));
        assert_eq!(config.cpus.max_vcpus, 2);
        assert_eq!(config.memory.hotplug_method, HotplugMethod::VirtioMem);
        assert_eq!(config.pm_memory[0].size, 4 << 30);
        assert_eq!(config.pm_volumes[0].size, VolumeSize::Bytes(8 << 30));
        assert_eq!(config.serial.mode, ConsoleMode::File);
        assert_eq!(config.vsock.unwrap().cid, 3);
        assert_eq!(launch.api_socket, ApiSocket::parse("/run/vm.sock").ok());
        assert!(matches!(launch.metrics, Some(MetricsAddress::Tcp(..))));
        assert_eq!(launch.log.verbosity, 2);
        assert_eq!(launch.warnings, Vec::<String>::new());
    }

    #[test]
    fn volumes_may_share_a_flag_or_repeat_it() {
        let names = |args: &[&str]| -> Vec<String> {
            config(args).pm_volumes.into_iter().map(|volume| volume.name).collect()
        };
        assert_eq!(names(&["--pm-volume", "pool=/p,name=a", "pool=/p,name=b", "-v"]), ["a", "b"]);
        assert_eq!(
            names(&["--pm-volume", "pool=/p,name=a", "--pm-volume", "pool=/p,name=b"]),
            ["a", "b"]
        );
    }

    #[test]
    fn numa_flags_are_parsed_as_in_cloud_hypervisor() {
        let nodes = [
            "--memory",
            "size=0,hotplug_method=virtio-mem",
            "--memory-zone",
            "id=mem0,size=1G,hotplug_size=1G",
            "id=mem1,size=1G",
            "--cpus",
            "boot=2",
            "--numa",
            "guest_numa_id=0,cpus=0,memory_zones=mem0,distances=1@15",
            "--numa",
            "guest_numa_id=1,cpus=1,memory_zones=mem1",
            "--pm-memory",
            "pool=/p,size=1G,near=1",
        ];
        let config = config(&nodes);
        assert_eq!(
            (config.memory.zones.len(), config.numa.len(), config.pm_memory[0].near),
            (2, 2, Some(1))
        );
        assert_eq!(
            error(&nodes[2..]),
            "--memory: size is 512 MiB, and must be 0 with --memory-zone: each zone has sizes of its own"
        );
        assert!(
            error(&["--numa", "guest_numa_id=0,cpus=1"])
                .starts_with("--numa: cpus is 1, and must be 0")
        );
        assert!(
            error(&["--memory", "size=0", "--memory-zone", "id=a,size=1G,file=/f,hugepages=on"])
                .starts_with("--memory-zone: file=/f excludes hugepages=on")
        );
    }

    #[test]
    fn disks_may_share_a_flag_or_repeat_it() {
        let config = config(&["--disk", "path=/a", "path=/b", "--disk", "path=/c,readonly=on"]);
        let paths: Vec<_> =
            config.disks.iter().map(|disk| disk.path.display().to_string()).collect();
        assert_eq!(paths, ["/a", "/b", "/c"]);
        assert!(config.disks[2].readonly);
        assert!(error(&["--disk", "path=/a,num_queues=2"]).starts_with("--disk: num_queues is 2"));
    }

    #[test]
    fn net_flags_are_parsed_as_in_cloud_hypervisor() {
        let config = config(&[
            "--net",
            "tap=tap0",
            "tap=,mac=,ip=,mask=",
            "--net",
            "fd=[7,8],num_queues=4",
            "--cpus",
            "boot=2",
        ]);
        let taps: Vec<_> = config.net.iter().map(|net| net.tap.as_deref()).collect();
        let fds: Vec<_> = config.net[2].fds.iter().map(|fd| fd.number()).collect();
        assert_eq!((taps, fds), (vec![Some("tap0"), None, None], vec![7, 8]));
        assert!(error(&["--net", "tap=tap0,num_queues=4"]).starts_with("--net: num_queues is 4"));
    }

    #[test]
    fn pmem_flags_are_parsed_as_in_cloud_hypervisor() {
        let files = |args: &[&str]| -> Vec<String> {
            config(args).pmem.iter().map(|pmem| pmem.file.display().to_string()).collect()
        };
        assert_eq!(files(&["--pmem", "file=/a", "file=/b,discard_writes=on"]), ["/a", "/b"]);
        assert_eq!(files(&["--pmem", "file=/a", "--pmem", "file=/b"]), ["/a", "/b"]);
        assert!(error(&["--pmem", "size=2M"]).starts_with("--pmem: file= is missing"));
    }

    #[test]
    fn vm_name_defaults_to_its_api_socket() {
        assert_eq!(launch(&[]).vm_name, "foreshore");
        assert_eq!(launch(&["--api-socket", "/run/web.sock"]).vm_name, "web");
        assert_eq!(launch(&["--api-socket", "fd=9", "--metrics", "unix:/m,vm=db"]).vm_name, "db");
        assert_eq!(launch(&["--metrics", "unix:/m,vm="]).vm_name, "foreshore");
    }

    #[test]
    fn api_socket_alone_creates_no_vm() {
        let bare = |args: &[&str]| match parse(args) {
            Ok(Command::Launch(launch)) => *launch,
            other => panic!("{other:?}"),
        };
        let launch =
            bare(&["--api-socket", "/run/vm.sock", "-v", "--no-shutdown", "--seccomp", "false"]);
        assert_eq!((launch.config, launch.at_guest_shutdown), (None, AtGuestShutdown::Stay));
        assert_eq!(bare(&["--api-socket", "fd=7"]).at_guest_shutdown, AtGuestShutdown::End);
        // Each flag that describes a VM creates a VM.
        for described in [
            &["--cpus", "boot=2"][..],
            &["--console", "off"],
            &["--disk", "path=/a"],
            &["--cmdline", "x"],
            &["--pvpanic"],
        ] {
            let args = [&["--api-socket", "/run/vm.sock"], described].concat();
            assert!(
                parse(&args).unwrap_err().to_string().starts_with("--kernel is missing"),
                "{described:?}"
            );
        }
    }

    #[test]
    fn help_and_version_are_printed() {
        let print = |flag| match parse(&[flag]) {
            Ok(Command::Print(text)) => text,
            other => panic!("{other:?}"),
        };
        let ours = env!("CARGO_PKG_VERSION");
        let version = print("--version");
        let lines: Vec<_> = version.lines().collect();
        assert_eq!(lines[0], format!("cloud-hypervisor v54.0.0 (foreshore v{ours})"));
        assert!(lines[1].starts_with("commit ") && lines.len() == 2, "{version}");
        // libvirt parses the number after the `v`. None of its features requires more than 40.
        let number =
            version.strip_prefix("cloud-hypervisor v").unwrap().split(['.', ' ']).next().unwrap();
        assert!(number.parse::<u32>().unwrap() >= 40);
        let help = print("--help");
        for text in
            ["Guest:", "Memory and storage:", "Devices:", "Control:", "Examples:", "--pm-volume"]
        {
            assert!(help.contains(text), "{text}");
        }
    }

    #[test]
    fn every_error_is_one_line_that_names_the_flag() {
        assert!(parse(&[]).unwrap_err().to_string().starts_with("--kernel is missing"));
        assert!(error(&["--memory", "size=0"]).starts_with("--memory: size is 0"));
        assert!(error(&["--memory"]).contains("--memory"));
        assert!(error(&["--memory", "size=1G", "--memory", "size=1G"]).contains("--memory"));
        assert!(error(&["--frobnicate"]).contains("--frobnicate"));
        assert!(error(&["stray"]).contains("stray"));
        let twice = error(&["--api-socket", "fd=7", "--event-monitor", "fd=7"]);
        assert_eq!(twice, "--event-monitor: fd 7 is also used by --api-socket");
        let twice = error(&["--api-socket", "fd=7", "--net", "fd=7"]);
        assert_eq!(twice, "--api-socket: fd 7 is also used by --net");
        assert!(error(&["--seccomp", "maybe"]).contains("'--seccomp <MODE>'"));
        assert!(error(&["--pressure", "policy=magic"]).starts_with("--pressure:"));
        assert!(error(&["--serial", "tty,pty"]).starts_with("--serial:"));
    }

    #[test]
    fn every_flag_of_cloud_hypervisor_is_supported_or_refused_with_a_reason() {
        let (ours, mut seen) = (description(), 0);
        let names = include_str!("../../tests/compatibility/cloud-hypervisor-0.3.0.names");
        for name in names.lines().filter_map(|line| line.strip_prefix("flag --")) {
            let long = name.split(' ').next().unwrap();
            let flag = &*format!("--{long}");
            seen += 1;
            let mut shown = ours.get_arguments().filter(|argument| !argument.is_hide_set());
            let is_ours = shown.any(|argument| argument.get_long() == Some(long));
            let why = unsupported::reason(flag);
            assert!(is_ours != why.is_some(), "{flag} must be either supported or refused");
            if let Some(why) = why {
                let refused = format!("{flag} is not supported by foreshore: {why}");
                assert_eq!(error(&[flag, "x"]), refused);
            }
        }
        assert!(seen > 40, "{seen}");
    }

    #[test]
    fn flags_without_effect_are_accepted() {
        assert_eq!(config(&["--rng"]).rng, RngConfig::default());
    }

    #[test]
    fn log_format_is_text_json_or_a_template_that_is_ignored() {
        let format = |args| launch(args).log.format;
        assert_eq!(format(&[]), LogFormat::Text);
        assert_eq!(format(&["--log-format", "text"]), LogFormat::Text);
        assert_eq!(format(&["--log-format", "json"]), LogFormat::Json);
        assert_eq!(launch(&["--log-format", "json"]).warnings, Vec::<String>::new());
        let template = launch(&["--log-format", "{boottime}: {msg}"]);
        assert_eq!(template.log.format, LogFormat::Text);
        assert!(template.warnings[0].starts_with("--log-format: ignored"));
        assert_eq!(
            error(&["--log-format", "xml"]),
            "invalid value 'xml' for '--log-format <FORMAT>' [possible values: text, json]; see --help"
        );
    }

    #[test]
    fn debug_console_is_refused_unless_it_is_off() {
        for off in ["off", "Off", "off,iobase=233"] {
            assert_eq!(launch(&["--debug-console", off]), launch(&[]));
        }
        for on in ["tty", "file=/off", ""] {
            assert!(
                error(&["--debug-console", on]).starts_with("--debug-console is not supported"),
                "{on}"
            );
        }
    }

    #[test]
    fn system_calls_are_filtered_by_default() {
        assert_eq!(launch(&[]).seccomp, SeccompMode::Enforce);
        for mode in SeccompMode::ALL {
            assert_eq!(launch(&["--seccomp", mode.name()]).seccomp, mode);
        }
    }

    #[test]
    fn misspelled_flag_suggests_the_nearest() {
        let message = error(&["--memry", "size=1G"]);
        assert!(
            message.contains("'--memry'") && message.contains("did you mean '--memory'?"),
            "{message}"
        );
        assert!(!error(&["--xyzzy"]).contains("did you mean"));
    }
}
