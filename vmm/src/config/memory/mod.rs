//! `--memory`.

mod host;
pub(super) mod plug_bandwidth;
pub(super) mod pm;
mod zone;

use foreshore_config::{ConfigError, section, size, words};
use foreshore_types::UNIT_BYTES;
use foreshore_types::size::Size;

use self::plug_bandwidth::DEFAULT_PLUG_BANDWIDTH;
use self::zone::{check_hotplug, check_plug_bandwidth};

pub use self::host::HostMemoryConfig;
pub use self::pm::{MIN_PM_NODE, PmMemoryConfig, STORAGE_HIGH_BYTES};
pub use self::zone::MemoryZoneConfig;

words! {
    /// Method by which DRAM is plugged.
    pub enum HotplugMethod {
        /// ACPI memory devices.
        Acpi = "Acpi" "acpi",
        /// A virtio-mem device.
        VirtioMem = "VirtioMem" "virtio-mem",
    }
}

section! {
    /// DRAM.
    pub struct MemoryConfig: "--memory" "DRAM" {
        size (json_required): u64 = 512 << 20 => "Boot memory; 0 with --memory-zone",
        host (flatten): HostMemoryConfig => "Host memory of the guest",
        thp: bool = true => "Request transparent huge pages from the host",
        hotplug_method: HotplugMethod = HotplugMethod::Acpi => "Method of DRAM hotplug",
        hotplug_size: Option<u64> => "Memory that can be added at run time",
        hotplugged_size: Option<u64> => "Part of hotplug_size that is requested at boot",
        plug_bandwidth (usually (DEFAULT_PLUG_BANDWIDTH)): Option<u64>
            => "Upper limit of bytes per second plugged after an unplug; 0 for no limit",
        zones (json_only): Vec<MemoryZoneConfig>
            => "Zones of --memory-zone, instead of size and hotplug_size",
    }
    defaults true;
}

impl MemoryConfig {
    pub fn boot_bytes(&self) -> u64 {
        self.zones.iter().fold(self.size, |sum, zone| sum.saturating_add(zone.size))
    }

    /// Checks the sizes, the host memory, and that the hotplug method supports both.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        if self.zones.is_empty() {
            size::check_pages(flag, "size", self.size)?;
        } else {
            self.check_zones()?;
        }
        match self.hotplug_method {
            HotplugMethod::VirtioMem => {
                check_hotplug(flag, self.hotplug_size, self.hotplugged_size)?;
                if self.zones.is_empty() {
                    check_plug_bandwidth(flag, self.hotplug_size, self.plug_bandwidth)?;
                }
            }
            HotplugMethod::Acpi => self.check_dimms()?,
        }
        let sizes = [("size", self.size), ("hotplug_size", self.hotplug_size.unwrap_or(0))];
        self.host.validate(flag, sizes)?;
        self.check_blocks()
    }

    /// Refuses keys that are not supported with ACPI. With ACPI, memory is added only to
    /// `--memory`, and only on request.
    fn check_dimms(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        if let Some(zone) = self.zones.iter().find(|zone| zone.hotplug_size.is_some()) {
            let reason = format!(
                "hotplug_size of --memory-zone id={} needs hotplug_method=virtio-mem: ACPI cannot add memory to zones",
                zone.id
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        if let Some(bytes) = self.hotplugged_size.filter(|bytes| *bytes != 0) {
            let reason = format!(
                "hotplugged_size is {}, which needs hotplug_method=virtio-mem: ACPI adds memory only by vm.resize",
                Size(bytes)
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        if let Some(rate) = self.plug_bandwidth {
            let reason = format!(
                "plug_bandwidth is {}, which needs hotplug_method=virtio-mem: ACPI memory is never unplugged",
                Size(rate)
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        self.hotplug_size.map_or(Ok(()), |bytes| size::check_pages(flag, "hotplug_size", bytes))
    }

    /// Returns true if vm.resize adds memory by ACPI. A smaller size then takes effect at the next
    /// boot.
    pub fn resizes_by_acpi(&self) -> bool {
        self.zones.is_empty() && self.hotplug_method == HotplugMethod::Acpi
    }

    /// Refuses keys that must be set for each zone instead.
    fn check_zones(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        let sizes = [
            ("size", self.size),
            ("hotplug_size", self.hotplug_size.unwrap_or(0)),
            ("hotplugged_size", self.hotplugged_size.unwrap_or(0)),
            ("hugepage_size", self.host.hugepage_size.unwrap_or(0)),
        ];
        if let Some((key, bytes)) = sizes.iter().find(|(_, bytes)| *bytes != 0) {
            let reason = format!(
                "{key} is {}, and must be 0 with --memory-zone: each zone has sizes of its own",
                Size(*bytes)
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        if let Some(rate) = self.plug_bandwidth {
            let reason = format!(
                "plug_bandwidth is {}; with --memory-zone, set it for each zone",
                Size(rate)
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        // Clients set `shared` of `--memory` even if there are zones, which have their own `shared`
        // key. Cloud Hypervisor then ignores that of `--memory`.
        let of_zones = HostMemoryConfig { shared: false, ..self.host.clone() };
        if let Some(key) = of_zones.first_on() {
            let reason = format!("{key}=on has no effect with --memory-zone; set it for each zone");
            return Err(ConfigError::Conflict { flag, reason });
        }
        self.zones.iter().try_for_each(MemoryZoneConfig::validate)
    }

    /// Refuses huge pages larger than a virtio-mem block, because blocks are plugged and unplugged
    /// individually.
    fn check_blocks(&self) -> Result<(), ConfigError> {
        let zones = self.zones.iter().map(|zone| (zone.hotplug_size, zone.host.hugepage_size));
        let mut parts = zones.chain([(self.hotplug_size, self.host.hugepage_size)]);
        let too_large = |page_bytes: &u64| *page_bytes > UNIT_BYTES;
        match parts.find_map(|(hotplug, page)| hotplug.and(page).filter(too_large)) {
            Some(page_bytes) if self.hotplug_method == HotplugMethod::VirtioMem => {
                let reason = format!(
                    "hugepage_size={} excludes hotplug_method=virtio-mem, whose blocks have {}: the host cannot reclaim a part of a huge page",
                    Size(page_bytes),
                    Size(UNIT_BYTES)
                );
                Err(ConfigError::Conflict { flag: Self::FLAG, reason })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        MemoryConfig::parse(text).and_then(|memory| memory.validate()).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let memory = MemoryConfig::parse(
            "size=384M,hotplug_method=virtio-mem,hotplug_size=128M,hotplugged_size=0,shared=off,thp=off,prefault=on",
        )
        .unwrap();
        assert_eq!(memory.size, 384 << 20);
        assert_eq!(memory.hotplug_method, HotplugMethod::VirtioMem);
        assert_eq!((memory.hotplug_size, memory.hotplugged_size), (Some(128 << 20), Some(0)));
        assert!(memory.validate().is_ok());
        assert!(memory.host.prefault && !memory.thp && !memory.host.shared);
        assert_eq!(MemoryConfig::parse("hotplug_method=acpi"), Ok(MemoryConfig::default()));
    }

    #[test]
    fn sizes_out_of_bounds_are_named() {
        assert_eq!(error("size=0"), "--memory: size is 0, and must be at least 4 KiB");
        assert_eq!(
            error("size=5000"),
            "--memory: size is 5000 bytes, which is not a multiple of 4 KiB"
        );
        assert_eq!(error("size=8192T"), "--memory: size is 8192 TiB, and must be at most 4096 TiB");
        assert_eq!(MemoryConfig::parse("size=2049M").unwrap().validate(), Ok(()));
        assert_eq!(
            error("size=2M,hotplug_method=virtio-mem,hotplug_size=0"),
            "--memory: hotplug_size is 0, and must be at least 2 MiB"
        );
        assert_eq!(
            error("size=2M,hotplug_method=virtio-mem,hotplug_size=4M,hotplugged_size=6M"),
            "--memory: hotplugged_size is 6 MiB, and must be at most 4 MiB, which is hotplug_size"
        );
        assert!(
            error("size=2M,hotplug_method=virtio-mem,hotplugged_size=2M")
                .contains("must be at most 0")
        );
    }

    #[test]
    fn sizes_belong_to_zones_if_there_are_any() {
        let zones = |text: &str| {
            let mut memory = MemoryConfig::parse(text).unwrap();
            memory.zones = ["id=a,size=2M,hotplug_size=2M", "id=b,size=4M"]
                .map(|text| MemoryZoneConfig::parse(text).unwrap())
                .to_vec();
            memory
        };
        let memory = zones("size=0,hotplug_method=virtio-mem");
        assert!(memory.validate().is_ok());
        assert_eq!(memory.boot_bytes(), 6 << 20);
        let error = |text: &str| zones(text).validate().unwrap_err().to_string();
        assert_eq!(
            error("size=2M,hotplug_method=virtio-mem"),
            "--memory: size is 2 MiB, and must be 0 with --memory-zone: each zone has sizes of its own"
        );
        assert!(
            error("size=0,hotplug_method=virtio-mem,hotplug_size=2M")
                .contains("hotplug_size is 2 MiB, and must be 0")
        );
        assert!(
            error("size=0")
                .contains("hotplug_size of --memory-zone id=a needs hotplug_method=virtio-mem")
        );
        assert!(
            error("size=0,hotplug_method=virtio-mem,plug_bandwidth=1G")
                .contains("plug_bandwidth is 1 GiB; with --memory-zone, set it for each zone")
        );
        assert!(
            error("size=0,prefault=on,hotplug_method=virtio-mem")
                .contains("prefault=on has no effect with --memory-zone"),
            "it would be ignored"
        );
    }

    #[test]
    fn invalid_combinations_are_refused_with_the_reason() {
        assert!(
            error("size=2M,hotplug_size=2M,hotplugged_size=2M")
                .contains("hotplugged_size is 2 MiB, which needs")
        );
        assert!(
            error("size=2M,hotplug_size=2M,plug_bandwidth=1G")
                .contains("plug_bandwidth is 1 GiB, which needs hotplug_method=virtio-mem")
        );
        assert!(
            error("size=2M,hotplug_method=virtio-mem,plug_bandwidth=1G")
                .contains("plug_bandwidth is 1 GiB, which needs hotplug_size")
        );
        assert!(
            error("size=2M,hotplug_method=virtio-mem,hotplug_size=2M,plug_bandwidth=63M")
                .contains("at least 64 MiB per second")
        );
        assert!(error("size=2M,hotplug_size=5000").contains("not a multiple of 4 KiB"));
        // Kata sets the hotplug size to the size of the host's memory, which can be any number.
        assert_eq!(
            MemoryConfig::parse("size=2049M,hotplug_size=1572863M").unwrap().validate(),
            Ok(())
        );
        let virtio_mem = "hotplug_method=virtio-mem,hotplug_size=1G";
        let large = format!("size=1G,{virtio_mem},hugepages=on,hugepage_size=1G");
        assert!(error(&large).contains(
            "hugepage_size=1 GiB excludes hotplug_method=virtio-mem, whose blocks have 2 MiB"
        ));
        let small = format!("size=1G,{virtio_mem},hugepages=on,hugepage_size=2M");
        assert_eq!(MemoryConfig::parse(&small).unwrap().validate(), Ok(()));
        assert!(error("size=3M,hugepages=on,hugepage_size=2M").contains("not a multiple of 2 MiB"));
        assert!(
            error("size=2M,mergeable=on,shared=on").starts_with("--memory: mergeable=on excludes")
        );
        assert!(error("size=2M,hotplug_method=balloon").contains("acpi or virtio-mem"));
    }

    /// JSON as sent by Kata's containerd shims in Go and in Rust: it contains nulls, and sizes that
    /// are only multiples of 1 MiB.
    #[test]
    fn memory_of_kata_is_accepted_and_shown_as_by_cloud_hypervisor() {
        let go = r#"{"size":2148532224,"hotplug_size":1649266655232,"mergeable":false,"hotplug_method":"Acpi","shared":true,"hugepages":false,"prefault":false,"thp":true}"#;
        let rust = r#"{
  "size": 2148532224,
  "mergeable": false,
  "hotplug_method": "Acpi",
  "hotplug_size": 1649266655232,
  "hotplugged_size": null,
  "shared": true,
  "hugepages": false,
  "hugepage_size": null,
  "prefault": false,
  "zones": null,
  "thp": true
}"#;
        for body in [go, rust] {
            let mut vm = serde_json::json!({"payload": {"kernel": "/vmlinux"}});
            vm["memory"] = serde_json::from_str(body).unwrap();
            let serde_json::Value::Object(vm) = vm else { panic!("an object") };
            let memory = crate::config::VmConfig::from_json(vm).unwrap().memory;
            assert!(memory.host.shared && memory.resizes_by_acpi());
            assert_eq!((memory.size, memory.hotplug_size), (2049 << 20, Some(1649266655232)));
            let shown = serde_json::to_value(&memory).unwrap();
            for (key, value) in [
                ("hotplug_method", "\"Acpi\""),
                ("prefault", "false"),
                ("thp", "true"),
                ("reserve", "false"),
            ] {
                assert_eq!(shown[key].to_string(), value, "{key}");
            }
        }
    }
}
