//! VMMs to compare. All of them run the same guest.

use std::net::Ipv4Addr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use guest_tests::guest::{BOOT_LIMIT, GuestBuilder, Machine, program};
use guest_tests::qemu::{QemuBuilder, QemuGuest};
use guest_tests::{Guest, Image, Kernel, host_memory};
use serde_json::json;

use crate::forget;

pub(crate) const FORESHORE: &str = "foreshore";
pub(crate) const QEMU: &str = "qemu";
pub(crate) const UNCONFINED: &str = "unconfined";

pub(crate) const MIB: u64 = 1 << 20;
/// Boot memory of every guest in these benchmarks.
pub(crate) const BOOT_MIB: u64 = 512;

const PATH_LIMIT: Duration = Duration::from_secs(120);

/// Kernel command line for all VMMs. It contains the arguments that Foreshore adds by default.
const CMDLINE: &str = "memhp_default_state=online_movable foreshore.agent=off";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Vmm {
    Foreshore,
    /// Foreshore without system call filters and Landlock.
    Unconfined,
    Qemu,
    /// Another VMM that has Cloud Hypervisor's flags and API.
    Other {
        name: String,
        program: PathBuf,
    },
}

#[derive(Debug, Clone, Default)]
pub(crate) enum Disk {
    #[default]
    None,
    /// Volume given with `--pm-volume`.
    Volume(String),
    /// Raw image as a virtio-blk disk.
    Image(PathBuf),
    /// File that QEMU provides as an NVDIMM.
    NvdimmFile(PathBuf, u64),
}

/// Tap on the host. Each VMM creates it.
#[derive(Debug, Clone)]
pub(crate) struct Net {
    pub tap: String,
    /// Address of the host on the tap, or `None` if the tap is in a bridge.
    pub host: Option<Ipv4Addr>,
    /// Index of the guest among concurrent guests.
    pub nth: u8,
    /// True if the host's kernel moves its frames.
    pub vhost: bool,
}

/// Devices and memory that a guest has in addition to boot memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Extras {
    pub hotplug_mib: u64,
    pub disk: Disk,
    pub net: Option<Net>,
    /// Selects a kernel and an image that support more file systems.
    pub file_systems: bool,
}

impl Extras {
    fn kernel_and_image(&self) -> (Kernel, Image) {
        match self.file_systems {
            true => (Kernel::V6_12Generic, Image::FileSystems),
            false => (Kernel::V6_12, Image::Basic),
        }
    }
}

/// Guest that is running under one of the VMMs.
pub(crate) enum Vm {
    /// Guest under Foreshore or under a VMM with the same flags.
    Cli(Guest),
    Qemu(QemuGuest),
}

impl Vmm {
    /// Returns Foreshore, QEMU, and the VMM given by the environment.
    pub(crate) fn all() -> Vec<Self> {
        let other =
            std::env::var_os("FORESHORE_TEST_BENCH_VMM").map(PathBuf::from).map(|program| {
                let name = program
                    .file_name()
                    .map_or_else(|| "other".into(), |name| name.to_string_lossy());
                Self::Other { name: name.into_owned(), program }
            });
        [Self::Foreshore, Self::Qemu].into_iter().chain(other).collect()
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Foreshore => FORESHORE,
            Self::Unconfined => UNCONFINED,
            Self::Qemu => QEMU,
            Self::Other { name, .. } => name,
        }
    }

    pub(crate) fn has_vhost_net(&self) -> bool {
        matches!(self, Self::Foreshore | Self::Qemu)
    }

    /// Brings the host's memory into the same state, starts the guest, and waits until it accepts
    /// commands.
    pub(crate) fn boot(&self, extras: &Extras) -> Result<Vm> {
        host_memory::even_out()?;
        let vm = self.start(extras)?;
        vm.wait_for_shell(BOOT_LIMIT)?;
        Ok(vm)
    }

    /// Starts the guest without waiting.
    pub(crate) fn start(&self, extras: &Extras) -> Result<Vm> {
        match self {
            Self::Qemu => {
                // QEMU truncates the file only when it opens it. Until then, the file would contain
                // the output of the last guest.
                let builder = qemu(extras);
                forget(&builder.console())?;
                Ok(Vm::Qemu(builder.start()?))
            }
            Self::Foreshore => {
                Ok(Vm::Cli(cli(extras, &program("foreshore")).pressure("off").start()?))
            }
            Self::Unconfined => {
                let builder = cli(extras, &program("foreshore")).pressure("off");
                let builder = builder.argument("--seccomp", "false").argument("--landlock", "off");
                Ok(Vm::Cli(builder.start()?))
            }
            Self::Other { program, .. } => {
                Ok(Vm::Cli(cli(extras, program).without("--metrics").start()?))
            }
        }
    }
}

fn cli(extras: &Extras, program: &Path) -> GuestBuilder {
    let mut memory = format!("size={BOOT_MIB}M");
    if extras.hotplug_mib > 0 {
        memory += &format!(",hotplug_method=virtio-mem,hotplug_size={}M", extras.hotplug_mib);
    }
    // Without an entropy device, as in QEMU's guest.
    let (kernel, image) = extras.kernel_and_image();
    let builder = Guest::builder().program(program).kernel(kernel).image(image);
    let builder = builder.memory(&memory).cmdline(CMDLINE).without("--rng");
    let builder = match &extras.net {
        Some(Net { tap, host, nth, vhost }) => {
            let address =
                host.map_or(String::new(), |host| format!(",ip={host},mask=255.255.255.0"));
            let vhost = if *vhost { ",vhost=on" } else { "" };
            builder.argument(
                "--net",
                &format!("tap={tap},mac=02:f5:00:00:00:{nth:02x}{address}{vhost}"),
            )
        }
        None => builder,
    };
    match &extras.disk {
        Disk::Volume(options) => builder.pm_volume(options),
        Disk::Image(file) => builder.argument("--disk", &format!("path={}", file.display())),
        _ => builder,
    }
}

fn qemu(extras: &Extras) -> QemuBuilder {
    let (kernel, image) = extras.kernel_and_image();
    let builder = QemuBuilder::default()
        .kernel(kernel)
        .image(image)
        .memory_mib(BOOT_MIB, extras.hotplug_mib)
        .cmdline(&format!("console=ttyS0 loglevel=5 {CMDLINE}"));
    let builder = match &extras.net {
        Some(Net { tap, nth, vhost, .. }) => builder.tap(tap, *vhost).nth(*nth),
        None => builder,
    };
    match &extras.disk {
        Disk::NvdimmFile(file, bytes) => builder.nvdimm(file, *bytes),
        Disk::Image(file) => builder.disk(file),
        _ => builder,
    }
}

impl Deref for Vm {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        match self {
            Self::Cli(guest) => guest,
            Self::Qemu(guest) => guest,
        }
    }
}

impl Vm {
    pub(crate) fn number(&self, command: &str) -> Result<f64> {
        let output = self.run(command)?;
        output
            .trim()
            .parse()
            .with_context(|| format!("Unexpected output of `{command}`: {output:?}"))
    }

    pub(crate) fn wait_for_path(&self, path: &str) -> Result<()> {
        self.wait_until_run(&format!("{path} exists"), PATH_LIMIT, &format!("test -e {path}"))
    }

    pub(crate) fn request_bytes(&self, bytes: u64) -> Result<()> {
        match self {
            Self::Cli(guest) => {
                let size = BOOT_MIB * MIB + bytes;
                guest.put("vm.resize", json!({ "desired_ram": size })).map(drop)
            }
            Self::Qemu(guest) => guest.request_hotplug_bytes(bytes),
        }
    }

    pub(crate) fn plugged_bytes(&self) -> Result<u64> {
        match self {
            Self::Cli(guest) => {
                let info = guest.get("vm.info")?;
                let size = info["memory_actual_size"].as_u64();
                let size = size.with_context(|| format!("vm.info has no size: {info}"))?;
                Ok(size.saturating_sub(BOOT_MIB * MIB))
            }
            Self::Qemu(guest) => guest.plugged_bytes(),
        }
    }
}
