//! What a VM shall be: one plain struct per flag and API section, each with a pure `validate()`.
//!
//! Field names are those of Cloud Hypervisor's API; sizes are in bytes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Everything about one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmConfig {
    /// What to boot.
    pub payload: PayloadConfig,
    /// vCPUs.
    pub cpus: CpusConfig,
    /// DRAM.
    pub memory: MemoryConfig,
    /// COM1.
    pub serial: ConsoleConfig,
    /// virtio-console, hvc0.
    pub console: ConsoleConfig,
    /// Entropy source.
    pub rng: RngConfig,
    /// Sockets between guest and host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// The `pm` zone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pm_memory: Option<PmMemoryConfig>,
    /// Volumes of PM pools.
    #[serde(default)]
    pub pm_volumes: Vec<PmVolumeConfig>,
    /// What the governor does.
    pub pressure: PressureConfig,
}

/// `--kernel`, `--initramfs`, `--cmdline`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadConfig {
    /// An ELF kernel with a PVH note, or a bzImage.
    pub kernel: Option<PathBuf>,
    /// Initial RAM file system.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line, as the user wrote it.
    pub cmdline: Option<String>,
}

/// `--cpus boot=,max=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusConfig {
    /// vCPUs at boot.
    pub boot_vcpus: u8,
    /// vCPUs that may ever be.
    pub max_vcpus: u8,
}

/// How DRAM grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HotplugMethod {
    /// ACPI memory devices.
    #[default]
    Acpi,
    /// A virtio-mem device.
    VirtioMem,
}

/// `--memory size=,hotplug_method=,hotplug_size=,hotplugged_size=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Boot memory.
    pub size: u64,
    /// How it grows.
    #[serde(default)]
    pub hotplug_method: HotplugMethod,
    /// By how much it may grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// How much of that is requested at boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
}

/// Where a console's bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// The device is not there.
    #[default]
    Off,
    /// Output is thrown away.
    Null,
    /// Standard input and output.
    Tty,
    /// Output to a file.
    File,
}

/// `--serial`, `--console`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file, with [`ConsoleMode::File`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

/// `--rng src=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngConfig {
    /// Where entropy comes from.
    pub src: PathBuf,
}

/// `--vsock cid=,socket=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context id, 3 and up.
    pub cid: u32,
    /// The unix socket of the host's side.
    pub socket: PathBuf,
}

/// `--pm-memory pool=,size=,guest_numa_node=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmMemoryConfig {
    /// The pool.
    pub pool: PathBuf,
    /// The most that may be plugged.
    pub size: u64,
    /// Its node in the guest.
    pub guest_numa_node: u32,
}

/// How a volume is shown to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeInterface {
    /// The safest that the guest can use.
    #[default]
    Auto,
    /// An NVDIMM, by ACPI NFIT.
    Nvdimm,
    /// A virtio-pmem device.
    VirtioPmem,
}

/// How large a volume shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeSize {
    /// What it is.
    Existing,
    /// So many bytes.
    Bytes(u64),
    /// What is left of the pool.
    Remaining,
}

/// `--pm-volume pool=,name=,size=,interface=,create=,readonly=,force=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmVolumeConfig {
    /// The pool.
    pub pool: PathBuf,
    /// The volume's name in it.
    pub name: String,
    /// Its size: another one than the volume has is an error.
    pub size: VolumeSize,
    /// How it is shown.
    pub interface: VolumeInterface,
    /// Make it when it is missing.
    pub create: bool,
    /// The guest must not write.
    pub readonly: bool,
    /// Take an interface that is known to be unsafe.
    pub force: bool,
}

/// `--pressure policy=,...`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PressureConfig {
    /// The policy's name: `psi`, `fixed`, `off`.
    pub policy: String,
    /// Decide, say so, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// A small VM for tests of what only passes a configuration on.
#[cfg(test)]
pub(crate) fn test_config() -> VmConfig {
    VmConfig {
        payload: PayloadConfig::default(),
        cpus: CpusConfig { boot_vcpus: 1, max_vcpus: 1 },
        memory: MemoryConfig {
            size: 512 << 20,
            hotplug_method: HotplugMethod::VirtioMem,
            hotplug_size: None,
            hotplugged_size: None,
        },
        serial: ConsoleConfig::default(),
        console: ConsoleConfig::default(),
        rng: RngConfig { src: "/dev/urandom".into() },
        vsock: None,
        pm_memory: None,
        pm_volumes: Vec::new(),
        pressure: PressureConfig { policy: "off".to_owned(), dry_run: false },
    }
}
