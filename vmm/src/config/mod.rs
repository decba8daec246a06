//! Configuration of a VM. Each flag and API section has a file with its table of keys and a pure
//! `validate()`.
//!
//! Field names are those of Cloud Hypervisor's API, and all sizes are in bytes. A new key is one
//! line in the table of its section. The crate foreshore_config generates the struct, the flag,
//! JSON, the help and the errors from the table. A new flag with keys also needs a field in
//! [`VmConfig`] and one in the flags of `cli`. A device without options, such as `--pvpanic`, needs
//! only an entry in [`SWITCHES`].
//!
//! Text becomes a valid configuration in three steps. The text of a flag is parsed into its
//! section, each section is validated alone, and [`VmConfig::validate`] compares the sections with
//! each other. No step accesses the host. Missing files and full pools are detected later, by the
//! code that opens them.

mod at_guest_shutdown;
mod cli;
mod devices;
mod json;
mod landlock;
mod limits;
mod memory;
mod numa;
mod payload;
mod platform;
mod pressure;
mod socket;
mod switches;
#[cfg(test)]
mod tables_tests;
mod topology;
mod unsupported;

use foreshore_config::{ConfigError, SectionError, section};
use foreshore_devices::file_id::is_same;
use foreshore_devices::memory::layout::{BootMemory, linux_block_bytes};
use foreshore_devices::virtio::block::serial::serial_number;
use foreshore_devices::virtio::net;
use foreshore_devices::volume::interface::{Allocation, Chosen, Payload, check_ids, choose};
use foreshore_devices::volume::pmem_config;
use foreshore_types::size::Size;

use self::json::{one_or_many, serial as serial_from_json};

pub use self::at_guest_shutdown::AtGuestShutdown;
pub use self::cli::{
    COMPATIBLE_WITH, CliError, Command, Launch, TABLES, description, parse_command_line,
};
pub use self::devices::DeviceConfig;
#[cfg(test)]
pub(crate) use self::json::fields;
pub use self::landlock::{LandlockAccess, LandlockConfig, LandlockMode};
pub use self::memory::{
    HostMemoryConfig, HotplugMethod, MIN_PM_NODE, MemoryConfig, MemoryZoneConfig, PmMemoryConfig,
    STORAGE_HIGH_BYTES,
};
pub use self::numa::{MAX_NODE, NumaConfig, NumaDistance};
pub use self::payload::{MAX_CMDLINE_BYTES, PayloadConfig};
pub use self::platform::PlatformConfig;
pub use self::pressure::{
    FIXED_SIZE, POLICIES, ParamSettings, PressureConfig, RECORD_BYTES, check_fixed_size,
    check_policy, parameter_names, rules_as_well,
};
pub use self::socket::{ApiSocket, MetricsAddress};
pub use self::switches::{SWITCHES, Switches};
pub use self::topology::{BALLOON_ZONE, DRAM_ZONE, Node, Topology};
pub use crate::cpu::config::{
    CoreScheduling, CpuAffinity, CpuFeatures, CpuTopology, CpusConfig, MAX_VCPUS,
};
pub use crate::cpu::cpu_topology::{Level, Shape, VcpuPlace};
pub use foreshore_devices::host_console::config::{
    ConsoleConfig, ConsoleMode, DEFAULT_MAX_SIZE, FileLimits, MIN_MAX_RATE,
};
pub use foreshore_devices::virtio::balloon::config::BalloonConfig;
pub use foreshore_devices::virtio::block::config::{DiskConfig, ImageType};
pub use foreshore_devices::virtio::net::config::{
    GivenFd, HostAddress, MacAddress, NetConfig, VhostMode,
};
pub use foreshore_devices::virtio::rng::config::RngConfig;
pub use foreshore_devices::virtio::vsock::config::{MAX_CID, MIN_CID, VsockConfig};
pub use foreshore_devices::volume::config::{PmVolumeConfig, VolumeInterface, VolumeSize};
pub use foreshore_devices::volume::pmem_config::PmemConfig;

section! {
    /// A VM.
    pub struct VmConfig: "vm.create" {
        payload: PayloadConfig => "Guest software to boot",
        cpus: CpusConfig = CpusConfig::default() => "vCPUs",
        memory: MemoryConfig = MemoryConfig::default() => "DRAM",
        balloon: Option<BalloonConfig> => "Memory that the guest returns without hotplug",
        disks (shown): Vec<DiskConfig> => "Disks",
        net: Vec<NetConfig> => "Network interfaces",
        serial (with serial_from_json): ConsoleConfig = ConsoleConfig::default_serial() => "COM1",
        console: ConsoleConfig = ConsoleConfig::default_console() => "virtio-console, hvc0",
        rng: RngConfig = RngConfig::default() => "Entropy source",
        switches (flatten): Switches => "Devices without options",
        vsock: Option<VsockConfig> => "Sockets between guest and host",
        platform: Option<PlatformConfig> => "Machine as a whole",
        numa: Vec<NumaConfig> => "Nodes of the guest, instead of one and one for each zone of PM",
        pm_memory (with one_or_many): Vec<PmMemoryConfig> => "Zones of PM",
        pm_volumes (shown): Vec<PmVolumeConfig> => "Volumes of PM pools",
        pmem: Vec<PmemConfig> => "Files and devices as persistent memory",
        pressure: Option<PressureConfig>
            => "Governor, instead of the default of [`VmConfig::governing`]",
        landlock_enable: bool = false => "Limit the VMM to the files of the VM",
        landlock_rules: Vec<LandlockConfig> => "Files for devices that are added later",
    }
}

impl VmConfig {
    /// Checks every section alone, and then all sections together.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_counts()?;
        self.payload.validate()?;
        self.cpus.validate()?;
        self.memory.validate()?;
        self.balloon
            .as_ref()
            .map_or(Ok(()), |balloon| balloon.validate(self.memory.boot_bytes()))?;
        self.serial.validate("--serial")?;
        self.console.validate("--console")?;
        self.vsock.as_ref().map_or(Ok(()), VsockConfig::validate)?;
        self.platform.as_ref().map_or(Ok(()), PlatformConfig::validate)?;
        memory::pm::validate_all(&self.pm_memory)?;
        self.numa.iter().try_for_each(NumaConfig::validate)?;
        Topology::of(self)?;
        self.pm_volumes.iter().try_for_each(PmVolumeConfig::validate)?;
        pmem_config::validate_all(&self.pmem)?;
        self.pressure.as_ref().map_or(Ok(()), PressureConfig::validate)?;
        self.disks.iter().try_for_each(|disk| disk.validate(self.cpus.max_vcpus))?;
        net::config::validate_all(&self.net, self.cpus.max_vcpus)?;
        self.check_ids()?;
        self.check_slots()?;
        // First, because the same volume twice also has the same serial number.
        self.check_volumes()?;
        self.check_serial_numbers()
    }

    /// Checks that no two disks request the same PCI slot.
    fn check_slots(&self) -> Result<(), ConfigError> {
        let slots: Vec<_> = self.disks.iter().filter_map(|disk| disk.pci_device_id).collect();
        match slots.iter().enumerate().find(|(nth, slot)| slots[..*nth].contains(slot)) {
            Some((_, slot)) => {
                let reason = format!("two disks have the pci_device_id {slot}");
                Err(ConfigError::Conflict { flag: "--disk", reason })
            }
            None => Ok(()),
        }
    }

    /// Checks that the serial numbers of disks and volumes are unique, because guests identify
    /// disks by them.
    fn check_serial_numbers(&self) -> Result<(), ConfigError> {
        let conflict = |reason| Err(ConfigError::Conflict { flag: "--disk", reason });
        let volumes =
            self.pm_volumes.iter().filter(|volume| volume.interface == VolumeInterface::VirtioBlk);
        // A disk without a serial number uses its ID as the serial number.
        let mut named = self.clone();
        named.name_devices();
        let serials: Vec<_> =
            ((0..).zip(&named.disks).map(|(nth, disk)| disk.serial_or_default(nth)))
                .chain(volumes.map(|volume| serial_number(&volume.name)))
                .collect();
        match serials.iter().enumerate().find(|(nth, serial)| serials[..*nth].contains(serial)) {
            Some((_, serial)) => conflict(format!(
                "two disks have the serial number {serial:?}: set serial= of one (a volume has its name)"
            )),
            None => Ok(()),
        }
    }

    fn check_volumes(&self) -> Result<(), ConfigError> {
        let flag = "--pm-volume";
        for (nth, volume) in self.pm_volumes.iter().enumerate() {
            let earlier = &self.pm_volumes[..nth];
            if earlier
                .iter()
                .any(|other| other.name == volume.name && is_same(&other.pool, &volume.pool))
            {
                let reason =
                    format!("volume {} of pool {:?} is given twice", volume.name, volume.pool);
                return Err(ConfigError::Conflict { flag, reason });
            }
            // The volume may exist and be thick, so `thin` is not compared with the interface.
            let (allocation, max_vcpus) = (Allocation::Thick, self.cpus.max_vcpus);
            choose(volume, &allocation, max_vcpus, Payload::Linux).map_err(SectionError::new)?;
        }
        Ok(check_ids(self.chosen_volumes(), self.ids_beside_volumes())
            .map_err(SectionError::new)?)
    }

    /// Volumes, each with the interface that is chosen if the payload is Linux and the volume can
    /// be mapped. If not, an error is reported when the payload is loaded or the volume is opened.
    fn chosen_volumes(&self) -> impl Iterator<Item = (&PmVolumeConfig, Chosen)> {
        let choose = |volume: &PmVolumeConfig| {
            choose(volume, &Allocation::Thick, self.cpus.max_vcpus, Payload::Linux).ok()
        };
        self.pm_volumes.iter().filter_map(move |volume| Some((volume, choose(volume)?)))
    }

    /// Configuration of the governor, including its default. The default is `psi` for a VM with PM,
    /// because such a VM is intended to be resized automatically. It is `off` for other VMs.
    ///
    /// Clients of Cloud Hypervisor do not expect that a governor changes sizes. For example, Kata
    /// gives each VM a balloon for free page reporting, requests memory by `vm.resize`, and waits
    /// until `memory_actual_size` equals its request.
    pub fn governing(&self) -> PressureConfig {
        let usual = || match &*self.pm_memory {
            [] => PressureConfig { policy: "off".to_owned(), ..PressureConfig::default() },
            _ => PressureConfig::default(),
        };
        self.pressure.clone().unwrap_or_else(usual)
    }

    /// Settings that are valid, but probably do not work as intended.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.payload.warnings();
        let grows_by_acpi = self.memory.resizes_by_acpi() && self.memory.hotplug_size.is_some();
        let of_dram = self.memory.hotplug_size.filter(|_| !grows_by_acpi);
        let dram = of_dram.map(|bytes| ("--memory: hotplug_size".to_owned(), bytes));
        let zones = self.memory.zones.iter().filter_map(|zone| {
            Some((format!("--memory-zone id={}: hotplug_size", zone.id), zone.hotplug_size?))
        });
        let pm = self.pm_memory.iter().map(|pm| ("--pm-memory: size".to_owned(), pm.size));
        let hotplug: Vec<(String, u64)> = dram.into_iter().chain(zones).chain(pm).collect();
        // A configuration without a valid topology has already been refused, so it needs no
        // warnings.
        let boot =
            Topology::of(self).map(|topology| BootMemory::of(topology.zones())).unwrap_or_default();
        let block_bytes = linux_block_bytes(boot.end());
        for (name, bytes) in hotplug.iter().filter(|(_, bytes)| !bytes.is_multiple_of(block_bytes))
        {
            warnings.push(format!(
                "{name} is {}, not a multiple of {}: Linux adds memory in such blocks, and the last one takes page \
                 descriptors for all of its block",
                Size(*bytes),
                Size(block_bytes)
            ));
        }
        let policy = self.governing().policy;
        let can_grow = !hotplug.is_empty() || self.balloon.is_some();
        let is_heard =
            self.vsock.is_some() || self.balloon.as_ref().is_some_and(|balloon| balloon.statistics);
        if can_grow && !is_heard && !matches!(&*policy, "fixed" | "off") {
            warnings.push(format!(
                "--pressure: policy={policy} needs --vsock, over which the guest's agent reports; without it, memory is not \
                 resized"
            ));
        }
        if grows_by_acpi && !can_grow && policy != "off" {
            warnings.push(format!(
                "--pressure: policy={policy} resizes nothing, because ACPI memory is added only by vm.resize and never removed; \
                 use hotplug_method=virtio-mem"
            ));
        }
        let memory = &self.memory.host;
        if memory.reserve && memory.shared && !memory.prefault {
            warnings.push(
                "--memory: reserve=on has no effect on shared memory, which the host accounts for when it is used"
                    .to_owned(),
            );
        }
        let has_huge_pages =
            memory.hugepages || self.memory.zones.iter().any(|zone| zone.host.hugepages);
        if self.balloon.is_some() && has_huge_pages {
            warnings.push(
                "--balloon: hugepages=on: the host reclaims only whole huge pages, which free_page_reporting=on reports; \
                 memory in the balloon stays with the VM"
                    .to_owned(),
            );
        }
        if self.platform.as_ref().is_some_and(PlatformConfig::wants_more_segments) {
            warnings.push(
                "--platform: num_pci_segments is ignored; the VM has one PCI segment".to_owned(),
            );
        }
        if self.net.iter().any(NetConfig::is_idle_of_given) {
            warnings.push(
                "--net: ip, mask and host_mac are not applied to an interface passed with fd; they are only shown"
                    .to_owned(),
            );
        }
        if self.serial.mode == ConsoleMode::Tty && self.console.mode == ConsoleMode::Tty {
            let warning = "--serial and --console are both tty: input goes to the console, or with --console off to the \
                           serial port";
            warnings.push(warning.to_owned());
        }
        for volume in self.pm_volumes.iter().filter(|volume| volume.force) {
            warnings.push(format!(
                "--pm-volume: volume {} is attached with force=on: its content may be damaged",
                volume.name
            ));
        }
        warnings
    }
}

/// Small VM for tests that only pass the configuration on.
#[cfg(test)]
pub(crate) fn test_config() -> VmConfig {
    VmConfig {
        payload: PayloadConfig { kernel: Some("/vmlinux".into()), ..PayloadConfig::default() },
        cpus: CpusConfig::default(),
        memory: MemoryConfig {
            size: 512 << 20,
            hotplug_method: HotplugMethod::VirtioMem,
            ..MemoryConfig::default()
        },
        balloon: None,
        disks: Vec::new(),
        net: Vec::new(),
        serial: ConsoleConfig::default(),
        console: ConsoleConfig::default(),
        rng: RngConfig { src: "/dev/urandom".into() },
        switches: Switches::default(),
        vsock: None,
        platform: None,
        numa: Vec::new(),
        pm_memory: Vec::new(),
        pm_volumes: Vec::new(),
        pmem: Vec::new(),
        pressure: Some(PressureConfig { policy: "off".to_owned(), ..PressureConfig::default() }),
        landlock_enable: false,
        landlock_rules: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configuration with only the required fields.
    fn least() -> VmConfig {
        serde_json::from_str(r#"{"payload": {"kernel": "/vmlinuz"}}"#).unwrap()
    }

    fn volume(text: &str) -> PmVolumeConfig {
        PmVolumeConfig::parse(text).unwrap()
    }

    #[test]
    fn defaults_equal_those_of_cloud_hypervisor() {
        let config = least();
        assert!(config.validate().is_ok());
        assert_eq!(config.warnings(), Vec::<String>::new());
        assert_eq!((config.cpus.boot_vcpus, config.memory.size), (1, 512 << 20));
        assert_eq!(config.serial.mode, ConsoleMode::Null);
        assert_eq!(config.console.mode, ConsoleMode::Tty);
    }

    #[test]
    fn json_round_trips() {
        let mut config = least();
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/p,size=4G").unwrap()];
        config.numa = vec![NumaConfig::parse("guest_numa_id=0,cpus=0,distances=1@21").unwrap()];
        config.memory.zones =
            vec![MemoryZoneConfig::parse("id=a,size=2M,file=/f,shared=on").unwrap()];
        config.pm_volumes =
            vec![volume("pool=/p,name=a,size=remaining"), volume("pool=/p,name=b,size=2M")];
        config.vsock = Some(VsockConfig::parse("cid=3,socket=/s").unwrap());
        config.pmem = vec![PmemConfig::parse("file=/a").unwrap()];
        config.balloon = Some(BalloonConfig::parse("size=64M,floor=32M").unwrap());
        config.net = vec![NetConfig::parse("tap=a,mtu=1500").unwrap()];
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<VmConfig>(&json).unwrap(), config);
    }

    #[test]
    fn single_pm_zone_needs_no_list() {
        let zones = |json: &str| {
            let json = format!(r#"{{"payload": {{"kernel": "/vmlinuz"}}, "pm_memory": {json}}}"#);
            serde_json::from_str::<VmConfig>(&json).map(|config| config.pm_memory)
        };
        let zone = PmMemoryConfig::parse("pool=/p,size=2M").unwrap();
        let json = r#"{"pool": "/p", "size": 2097152}"#;
        assert_eq!(zones(json).unwrap(), std::slice::from_ref(&zone));
        assert_eq!(zones(&format!("[{json}, {json}]")).unwrap(), [zone.clone(), zone]);
        assert_eq!(zones("null").unwrap(), []);
        assert!(
            zones("7").unwrap_err().to_string().contains("must be an object, or a list of objects")
        );
    }

    #[test]
    fn terminal_has_one_reader() {
        let mut config = least();
        config.serial = ConsoleConfig::parse_serial("tty").unwrap();
        assert!(config.validate().is_ok());
        let warned = |config: &VmConfig| {
            config.warnings().iter().any(|warning| warning.contains("both tty"))
        };
        assert!(warned(&config));
        config.console = ConsoleConfig::parse_console("off").unwrap();
        assert!(!warned(&config));
    }

    #[test]
    fn virtio_pmem_requires_a_single_possible_vcpu() {
        let mut config = least();
        config.pm_volumes = vec![volume("pool=/p,name=a,interface=virtio-pmem")];
        assert!(config.validate().is_ok());
        config.cpus = CpusConfig::parse("boot=1,max=2").unwrap();
        let error = config.validate().unwrap_err().to_string();
        assert!(
            error.starts_with("--pm-volume name=a: interface=virtio-pmem is unsafe"),
            "{error}"
        );
        assert!(error.contains("(max=2)"), "{error}");
        config.pm_volumes[0].force = true;
        assert!(config.validate().is_ok());
        assert!(config.warnings()[0].contains("force=on"));
        config.pm_volumes = vec![volume("pool=/p,name=a,interface=auto")];
        assert!(config.validate().is_ok());
    }

    #[test]
    fn raw_volume_by_virtio_pmem_allows_many_vcpus() {
        let mut config = least();
        config.cpus = CpusConfig::parse("boot=2,max=4").unwrap();
        for interface in ["auto", "virtio-pmem", "nvdimm"] {
            config.pm_volumes =
                vec![volume(&format!("pool=/p,name=a,format=raw,interface={interface}"))];
            assert!(config.validate().is_ok(), "{interface}");
        }
    }

    #[test]
    fn duplicate_volume_is_refused() {
        let mut config = least();
        config.pm_volumes =
            vec![volume("pool=/p,name=a"), volume("pool=/q,name=a"), volume("pool=/p,name=a")];
        let error = config.validate().unwrap_err().to_string();
        assert_eq!(error, r#"--pm-volume: volume a of pool "/p" is given twice"#);
    }

    #[test]
    fn pci_slot_of_two_disks_is_refused() {
        let mut config = least();
        config.disks = ["path=/a,pci_device_id=7", "path=/b", "path=/c,pci_device_id=7"]
            .map(|text| DiskConfig::parse(text).unwrap())
            .to_vec();
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "--disk: two disks have the pci_device_id 7"
        );
        config.disks.pop();
        assert!(config.validate().is_ok());
    }

    #[test]
    fn serial_numbers_of_disks_are_unique() {
        let mut config = least();
        let disk = |text: &str| DiskConfig::parse(text).unwrap();
        let error = |config: &VmConfig| config.validate().unwrap_err().to_string();
        config.disks =
            vec![disk("path=/a,serial=s"), disk("path=/b,id=b"), disk("path=/c,serial=b")];
        assert!(
            error(&config).contains(r#"two disks have the serial number "b""#),
            "{}",
            error(&config)
        );
        config.disks.pop();
        config.pm_volumes = vec![volume("pool=/p,name=s"), volume("pool=/q,name=s")];
        assert!(config.validate().is_ok(), "a volume on an NVDIMM has no serial number");
        config.pm_volumes = vec![volume("pool=/p,name=t,interface=virtio-blk"); 2];
        assert!(error(&config).contains("volume t of pool \"/p\" is given twice"));
        config.pm_volumes = vec![volume("pool=/p,name=s,interface=virtio-blk")];
        assert!(
            error(&config).contains(r#"two disks have the serial number "s""#),
            "{}",
            error(&config)
        );
        config.pm_volumes = ["production-database-a", "production-database-b"]
            .map(|name| volume(&format!("pool=/p,name={name},interface=virtio-blk")))
            .to_vec();
        assert!(config.validate().is_ok());
    }

    #[test]
    fn every_section_is_validated() {
        let broken: [fn(&mut VmConfig); 14] = [
            |c| c.balloon = Some(BalloonConfig::parse("size=1T").unwrap()),
            |c| c.payload.kernel = None,
            |c| c.cpus.boot_vcpus = 0,
            |c| c.memory.size = 1,
            |c| c.serial.mode = ConsoleMode::File,
            |c| c.vsock = Some(VsockConfig { cid: 0, socket: "/s".into(), id: None }),
            |c| {
                c.pm_memory = vec![PmMemoryConfig {
                    size: 0,
                    ..PmMemoryConfig::parse("pool=/p,size=2M").unwrap()
                }]
            },
            |c| c.numa = vec![NumaConfig::parse("guest_numa_id=64").unwrap()],
            |c| c.numa = vec![NumaConfig::parse("guest_numa_id=1").unwrap()],
            |c| c.pm_volumes = vec![PmVolumeConfig::parse("pool=/p,name=a/b").unwrap()],
            |c| c.disks = vec![DiskConfig::parse("path=/d,num_queues=2").unwrap()],
            |c| c.net = vec![NetConfig::parse("num_queues=4").unwrap()],
            |c| c.pmem = vec![PmemConfig::parse("file=/a,size=1").unwrap()],
            |c| c.pressure = Some(governed_by("none")),
        ];
        for (nth, break_it) in broken.iter().enumerate() {
            let mut config = least();
            break_it(&mut config);
            assert!(config.validate().is_err(), "{nth}");
        }
    }

    #[test]
    fn unintended_settings_cause_warnings() {
        let mut config = least();
        config.vsock = Some(VsockConfig::parse("cid=3,socket=/s").unwrap());
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/p,size=130M").unwrap()];
        // The zone has exactly the configured size, although it is not a multiple of the block
        // size. All messages show that size.
        let expected = "--pm-memory: size is 130 MiB, not a multiple of 128 MiB: Linux adds memory in such blocks, and the \
             last one takes page descriptors for all of its block";
        assert_eq!(config.warnings(), [expected]);
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/p,size=128M").unwrap()];
        assert_eq!(config.warnings(), Vec::<String>::new());
        // Boot memory then ends at 64 GiB.
        config.memory.size = 63 << 30;
        assert!(config.warnings()[0].contains("not a multiple of 2 GiB"));
        config.memory.size = 512 << 20;
        config.vsock = None;
        assert!(config.warnings()[0].contains("--vsock"));
        config.pressure = Some(governed_by("off"));
        assert_eq!(config.warnings(), Vec::<String>::new());
    }

    /// Kata sends both fields.
    #[test]
    fn balloon_of_a_vm_with_huge_pages_is_accepted_with_a_warning() {
        let mut config = least();
        config.balloon = Some(BalloonConfig::parse("size=0,free_page_reporting=on").unwrap());
        config.memory.host.hugepages = true;
        assert_eq!(config.validate(), Ok(()));
        assert!(
            config.warnings()[0]
                .starts_with("--balloon: hugepages=on: the host reclaims only whole")
        );
        let zone = MemoryZoneConfig::parse("id=a,size=512M,hugepages=on").unwrap();
        config.memory = MemoryConfig { size: 0, zones: vec![zone], ..MemoryConfig::default() };
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.warnings().len(), 1);
        config.balloon = None;
        assert_eq!(config.warnings(), Vec::<String>::new());
    }

    fn governed_by(policy: &str) -> PressureConfig {
        PressureConfig { policy: policy.to_owned(), ..PressureConfig::default() }
    }

    /// Kata's runtime in Go sends one of these bodies, and expects exactly the requested sizes.
    #[test]
    fn governor_is_on_by_default_only_with_pm() {
        let of_a_client = [
            serde_json::json!({}),
            serde_json::json!({"balloon": {"size": 0, "free_page_reporting": true}}),
            serde_json::json!({"memory": {"size": 536_870_912, "hotplug_method": "VirtioMem", "hotplug_size": 536_870_912}}),
        ];
        let pm = serde_json::json!({"pm_memory": [{"pool": "/p", "size": 268_435_456}]});
        let parsed = |mut body: serde_json::Value| {
            body["payload"] = serde_json::json!({"kernel": "/vmlinux"});
            serde_json::from_value::<VmConfig>(body).unwrap()
        };
        for body in of_a_client {
            let mut config = parsed(body);
            assert_eq!(config.governing().policy, "off", "{config:?}");
            assert_eq!(config.warnings(), Vec::<String>::new());
            config.pressure = Some(PressureConfig::default());
            assert_eq!(config.governing().policy, "psi", "a requested policy is used");
        }
        let mut config = parsed(pm);
        assert_eq!(config.governing().policy, "psi");
        config.pressure = Some(governed_by("off"));
        assert_eq!(config.governing().policy, "off");
    }
}
