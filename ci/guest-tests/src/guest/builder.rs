//! Options for starting a guest.

use std::fmt;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use rustix::io::{FdFlags, fcntl_setfd};

use super::{
    BOOT_LIMIT, Endpoint, Guest, Machine, Paths, VmmProcess, console, process, program, unpacked,
};
use crate::flush_noop;
use crate::runner::this_tests_dir;
use crate::table::{is_in_this_tests_row, this_tests_kernel, this_tests_vcpus};

const REFUSAL_LIMIT: Duration = Duration::from_secs(20);
/// Parts of error messages about problems of the host. In these cases, the command line is valid
/// and the exit code is 1. All other errors are about the command line.
const CANNOT: [&str; 4] =
    ["foreshore: cannot ", "foreshore: Cannot ", " is in use", "cannot listen"];
/// Exit codes for a VM that cannot boot, and for an invalid command line.
const FAILURE: i32 = 1;
const INVALID_COMMAND_LINE_CODE: i32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    V6_12,
    V6_1,
    /// Generic flavor of 6.12, with drivers that the cloud flavor lacks.
    V6_12Generic,
}

impl fmt::Display for Kernel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V6_12 => "6.12",
            Self::V6_1 => "6.1",
            Self::V6_12Generic => "6.12-generic",
        })
    }
}

impl FromStr for Kernel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = [Self::V6_12, Self::V6_1].into_iter().find(|kernel| kernel.to_string() == text);
        found.with_context(|| format!("No such kernel: {text:?}; existing kernels: 6.12, 6.1"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// Contains busybox, drivers, e2fsprogs, the agent, guest-shell and guest-tool.
    Basic,
    /// Same as `Basic`, with Debian's ndctl.
    Ndctl,
    /// Same as `Basic`, with Debian's Redis. Only for the 6.12 kernel.
    Redis,
    /// Same as `Basic`, with Debian's Redis, SQLite's shell and tcc. Only for the 6.12 kernel.
    Workloads,
    /// Same as `Basic`, with XFS, F2FS, Btrfs and their tools. Only for the generic 6.12 kernel.
    FileSystems,
}

/// Folder with kernels and images. ci/nested/host sets the variable GUESTS.
fn guests_dir() -> PathBuf {
    std::env::var_os("GUESTS").map_or_else(|| PathBuf::from("/guests"), PathBuf::from)
}

impl Kernel {
    pub fn path(self) -> PathBuf {
        guests_dir().join(format!("vmlinuz-{self}"))
    }
}

impl Image {
    pub fn path(self, kernel: Kernel) -> PathBuf {
        let flavour = match self {
            Self::Basic => "basic",
            Self::Ndctl => "ndctl",
            Self::Redis => "redis",
            Self::Workloads => "workloads",
            Self::FileSystems => "file-systems",
        };
        guests_dir().join(format!("{flavour}-{kernel}.img"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub message: String,
}

#[derive(Debug, Clone)]
pub struct GuestBuilder {
    name: Option<String>,
    program: PathBuf,
    kernel: Kernel,
    is_packed: bool,
    image: Image,
    cpus: u32,
    max_cpus: Option<u32>,
    memory: String,
    cmdline: String,
    pressure: Option<String>,
    metrics: Option<String>,
    arguments: Vec<String>,
    without: Vec<&'static str>,
    boot_limit: Duration,
    has_noop_flushes: bool,
    terminal: Option<PathBuf>,
    api_by_descriptor: bool,
}

impl GuestBuilder {
    pub(super) fn new() -> Self {
        Self {
            name: None,
            program: program("foreshore"),
            kernel: this_tests_kernel(),
            is_packed: false,
            image: Image::Basic,
            cpus: this_tests_vcpus(),
            max_cpus: None,
            memory: "size=512M".to_owned(),
            // Only warnings are printed on the console. Each byte is an exit and takes time.
            cmdline: "console=ttyS0 loglevel=5".to_owned(),
            pressure: None,
            metrics: None,
            arguments: Vec::new(),
            without: Vec::new(),
            boot_limit: BOOT_LIMIT,
            has_noop_flushes: false,
            terminal: None,
            api_by_descriptor: false,
        }
    }

    /// Sets the base name of the VM's files. The default is a number.
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Selects a different VMM that accepts the same flags.
    pub fn program(mut self, program: &Path) -> Self {
        self.program = program.to_owned();
        self
    }

    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Boots the kernel from its bzImage, even where tests use unpacked kernels.
    pub fn packed_kernel(mut self) -> Self {
        self.is_packed = true;
        self
    }

    pub fn image(mut self, image: Image) -> Self {
        self.image = image;
        self
    }

    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    pub fn max_cpus(mut self, max_cpus: u32) -> Self {
        self.max_cpus = Some(max_cpus);
        self
    }

    /// Sets `--memory`, for example to `size=384M,hotplug_method=virtio-mem,hotplug_size=128M`.
    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.to_owned();
        self
    }

    /// Sets `--pm-memory`, for example to `pool=PATH,size=1G`.
    pub fn pm_memory(self, pm_memory: &str) -> Self {
        self.argument("--pm-memory", pm_memory)
    }

    /// Adds a `--pm-volume`, for example `pool=PATH,name=data,interface=nvdimm`. May be repeated.
    pub fn pm_volume(self, pm_volume: &str) -> Self {
        self.argument("--pm-volume", pm_volume)
    }

    /// Sets `--pressure policy=`, for example to psi, fixed or off.
    pub fn pressure(mut self, policy: &str) -> Self {
        self.pressure = Some(policy.to_owned());
        self
    }

    /// Sets `--metrics`, for example to `0.0.0.0:9745,vm=demo`, if a program other than the test
    /// scrapes the metrics. The default is a free local port.
    pub fn metrics(mut self, metrics: &str) -> Self {
        self.metrics = Some(metrics.to_owned());
        self
    }

    /// Appends to the kernel command line.
    pub fn cmdline(mut self, more: &str) -> Self {
        self.cmdline += " ";
        self.cmdline += more;
        self
    }

    /// Adds a flag that has no method of its own, or replaces one of the builder's flags.
    pub fn argument(mut self, flag: &str, value: &str) -> Self {
        self.arguments.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    pub fn words<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(words.into_iter().map(str::to_owned));
        self
    }

    /// Creates the API socket, and passes it to the VMM as `--api-socket fd=N`.
    pub fn api_by_descriptor(mut self) -> Self {
        self.api_by_descriptor = true;
        self
    }

    /// Adds `-v`, so that the log contains normal operations as well as problems.
    pub fn verbose(mut self) -> Self {
        self.arguments.push("-v".to_owned());
        self
    }

    /// Omits one of the builder's flags, for example `--vsock`, `--metrics` or `--kernel`.
    pub fn without(mut self, flag: &'static str) -> Self {
        self.without.push(flag);
        self
    }

    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// Makes the VMM's flushes succeed without any effect, so that data is not durable.
    pub fn with_noop_flushes(mut self) -> Self {
        self.has_noop_flushes = true;
        self
    }

    /// Runs the VMM on this terminal, as if a shell had started it. The terminal is the VMM's
    /// standard input and output, and its controlling terminal.
    pub fn terminal(mut self, terminal: &Path) -> Self {
        self.terminal = Some(terminal.to_owned());
        self
    }

    pub fn boot(&self) -> Result<Guest> {
        is_in_this_tests_row(self.kernel, self.cpus)?;
        let guest = self.start()?;
        guest.wait_for_shell(self.boot_limit)?;
        Ok(guest)
    }

    pub fn start(&self) -> Result<Guest> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = self.name.clone().unwrap_or_else(|| "vm".to_owned());
        let paths = Paths { dir: this_tests_dir(), name: format!("{name}{number}") };
        std::fs::create_dir_all(&paths.dir)
            .with_context(|| format!("Cannot create {}", paths.dir.display()))?;
        let metrics = self.metrics.clone().unwrap_or_else(free_address);
        let mut command = Command::new(&self.program);
        let listener =
            self.api_by_descriptor.then(|| inheritable_listener(&paths.api())).transpose()?;
        let api = listener.as_ref().map(|listener| format!("fd={}", listener.as_raw_fd()));
        let with_api = self.clone().words(api.iter().flat_map(|api| ["--api-socket", api]));
        let kernel =
            if self.is_packed { self.kernel.path() } else { unpacked::path_of(self.kernel)? };
        command.args(with_api.vmm_arguments(&paths, &metrics, &kernel));
        if self.has_noop_flushes {
            flush_noop::disable_flushes(&mut command);
        }
        if let Some(terminal) = &self.terminal {
            process::at_terminal(&mut command, terminal)?;
        }
        let process = VmmProcess::start(&mut command, &paths.vmm_log())?;
        let metrics_address = metrics.split(',').next().unwrap_or_default().to_owned();
        let endpoint = Endpoint::Socket(paths.vsock());
        let (console, log) = (paths.console(), paths.vmm_log());
        let machine = Machine { process, endpoint, console, log };
        Ok(Guest { machine, paths, metrics_address })
    }

    pub fn expect_refusal(&self) -> Result<Refusal> {
        let guest = self.start()?;
        let log = guest.log.clone();
        let status =
            guest.wait_for_exit(REFUSAL_LIMIT).context("The VMM accepted its command line")?;
        let message = console::read(&log)?;
        let is_understood = CANNOT.iter().any(|words| message.contains(words));
        let code = if is_understood { FAILURE } else { INVALID_COMMAND_LINE_CODE };
        ensure!(
            status.code() == Some(code),
            "The VMM ended with {status} instead of {code}: {message}"
        );
        Ok(Refusal { message })
    }

    fn vmm_arguments(&self, paths: &Paths, metrics: &str, kernel: &Path) -> Vec<String> {
        let text = |path: &Path| path.display().to_string();
        let max_cpus = self.max_cpus.unwrap_or(self.cpus);
        let defaults: [(&'static str, Option<String>); 11] = [
            ("--kernel", Some(text(kernel))),
            ("--initramfs", Some(text(&self.image.path(self.kernel)))),
            ("--cmdline", Some(self.cmdline.clone())),
            ("--cpus", Some(format!("boot={},max={max_cpus}", self.cpus))),
            ("--memory", Some(self.memory.clone())),
            ("--serial", Some(format!("file={}", text(&paths.console())))),
            ("--console", Some("off".to_owned())),
            ("--rng", Some("src=/dev/urandom".to_owned())),
            ("--vsock", Some(format!("cid=3,socket={}", text(&paths.vsock())))),
            ("--api-socket", Some(text(&paths.api()))),
            ("--metrics", Some(metrics.to_owned())),
        ];
        let pressure =
            ("--pressure", self.pressure.as_ref().map(|policy| format!("policy={policy}")));
        defaults
            .into_iter()
            .chain([pressure])
            .filter(|(flag, _)| {
                !self.without.contains(flag) && !self.arguments.iter().any(|other| other == flag)
            })
            .filter_map(|(flag, value)| Some([flag.to_owned(), value?]))
            .flatten()
            .chain(self.arguments.iter().cloned())
            .collect()
    }
}

/// Returns a listening socket. A child process inherits it under the same number.
fn inheritable_listener(path: &Path) -> Result<UnixListener> {
    let listener =
        UnixListener::bind(path).with_context(|| format!("Cannot listen on {}", path.display()))?;
    fcntl_setfd(&listener, FdFlags::empty())?;
    Ok(listener)
}

/// Returns a local address that no other VMM of this PID namespace uses. The IP address contains
/// the PID of this process, which has at most 22 bits.
fn free_address() -> String {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(9745);
    let address = Ipv4Addr::from_bits(0x7f40_0000 + std::process::id());
    format!("{address}:{}", NEXT_PORT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(builder: &GuestBuilder) -> Vec<String> {
        let paths = Paths { dir: PathBuf::from("/t"), name: "vm0".to_owned() };
        builder.vmm_arguments(&paths, "127.0.0.1:9", Path::new("/k"))
    }

    fn value<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
        let at = arguments.iter().position(|argument| argument == flag)?;
        Some(&arguments[at + 1])
    }

    #[test]
    fn options_become_arguments() {
        let builder = Guest::builder()
            .cpus(2)
            .max_cpus(4)
            .memory("size=1G")
            .pressure("off")
            .cmdline("a=b")
            .verbose();
        let arguments = arguments(&builder);
        assert_eq!(value(&arguments, "--cpus"), Some("boot=2,max=4"));
        assert_eq!(value(&arguments, "--memory"), Some("size=1G"));
        assert_eq!(value(&arguments, "--pressure"), Some("policy=off"));
        assert_eq!(value(&arguments, "--vsock"), Some("cid=3,socket=/t/vm0.vsock"));
        assert!(value(&arguments, "--cmdline").unwrap().ends_with(" a=b"));
        assert!(arguments.contains(&"-v".to_owned()));
    }

    #[test]
    fn argument_replaces_the_default() {
        let arguments =
            arguments(&Guest::builder().argument("--kernel", "/dev/null").without("--metrics"));
        assert_eq!(value(&arguments, "--kernel"), Some("/dev/null"));
        assert_eq!(arguments.iter().filter(|argument| *argument == "--kernel").count(), 1);
        assert_eq!(value(&arguments, "--metrics"), None);
    }

    #[test]
    fn flag_may_be_repeated() {
        let builder = Guest::builder().pm_volume("pool=p,name=a").pm_volume("pool=p,name=b");
        let volumes =
            arguments(&builder).iter().filter(|argument| *argument == "--pm-volume").count();
        assert_eq!(volumes, 2);
    }
}
