//! `--memory size=,hotplug_method=,hotplug_size=,hotplugged_size=`.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::memory_zone::{MemoryZoneConfig, check_hotplug};
use super::option_parser::{OFF, ON, Refused, Syntax};
use super::size::{self, Size};

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--memory",
    keys: &["size", "hotplug_method", "hotplug_size", "hotplugged_size"],
    words: &[],
    refused: &[
        Refused { key: "shared", neutral: OFF, why: "no device here shares DRAM with another process" },
        Refused { key: "mergeable", neutral: OFF, why: "it is not implemented" },
        Refused {
            key: "hugepages",
            neutral: OFF,
            why: "DRAM has transparent huge pages; hugetlbfs is not implemented",
        },
        Refused { key: "hugepage_size", neutral: &[], why: "hugetlbfs is not implemented" },
        Refused { key: "prefault", neutral: OFF, why: "it is not implemented" },
        Refused { key: "reserve", neutral: OFF, why: "it is not implemented" },
        Refused { key: "thp", neutral: ON, why: "DRAM always has transparent huge pages" },
    ],
};

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
    /// Boot memory; 0 with zones.
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
    /// Zones with sizes of their own, instead of those above.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<MemoryZoneConfig>,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: 512 << 20,
            hotplug_method: HotplugMethod::Acpi,
            hotplug_size: None,
            hotplugged_size: None,
            zones: Vec::new(),
        }
    }
}

impl MemoryConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let method = options.read("hotplug_method", "acpi or virtio-mem", |text| match text {
            "acpi" => Some(HotplugMethod::Acpi),
            "virtio-mem" => Some(HotplugMethod::VirtioMem),
            _ => None,
        })?;
        let default = Self::default();
        Ok(Self {
            size: options.size("size")?.unwrap_or(default.size),
            hotplug_method: method.unwrap_or_default(),
            hotplug_size: options.size("hotplug_size")?,
            hotplugged_size: options.size("hotplugged_size")?,
            zones: Vec::new(),
        })
    }

    /// All boot memory.
    pub fn boot_bytes(&self) -> u64 {
        self.zones.iter().fold(self.size, |sum, zone| sum.saturating_add(zone.size))
    }

    /// Whether any part of it may grow.
    fn can_grow(&self) -> bool {
        self.hotplug_size.is_some() || self.zones.iter().any(|zone| zone.hotplug_size.is_some())
    }

    /// Sizes within their bounds, and a way to grow if it shall grow.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = SYNTAX.flag;
        if self.zones.is_empty() {
            size::check(flag, "size", self.size)?;
        } else {
            // What is said here would be of no zone.
            let sizes = [
                ("size", self.size),
                ("hotplug_size", self.hotplug_size.unwrap_or(0)),
                ("hotplugged_size", self.hotplugged_size.unwrap_or(0)),
            ];
            if let Some((key, bytes)) = sizes.iter().find(|(_, bytes)| *bytes != 0) {
                let reason = format!(
                    "{key} is {}, and must be 0 with --memory-zone: each zone has sizes of its own",
                    Size(*bytes)
                );
                return Err(ConfigError::Conflict { flag, reason });
            }
            self.zones.iter().try_for_each(MemoryZoneConfig::validate)?;
        }
        if self.can_grow() && self.hotplug_method == HotplugMethod::Acpi {
            let reason = "hotplug_size needs hotplug_method=virtio-mem: \
                hotplug by ACPI memory devices is not supported by foreshore";
            return Err(ConfigError::Conflict { flag, reason: reason.to_owned() });
        }
        check_hotplug(flag, self.hotplug_size, self.hotplugged_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        MemoryConfig::parse(text).and_then(|memory| memory.validate()).unwrap_err().to_string()
    }

    #[test]
    fn the_flag_is_read() {
        let memory = MemoryConfig::parse(
            "size=384M,hotplug_method=virtio-mem,hotplug_size=128M,hotplugged_size=0,shared=off,thp=on",
        )
        .unwrap();
        assert_eq!(memory.size, 384 << 20);
        assert_eq!(memory.hotplug_method, HotplugMethod::VirtioMem);
        assert_eq!((memory.hotplug_size, memory.hotplugged_size), (Some(128 << 20), Some(0)));
        assert!(memory.validate().is_ok());
        assert_eq!(MemoryConfig::parse("hotplug_method=acpi"), Ok(MemoryConfig::default()));
    }

    #[test]
    fn sizes_out_of_bounds_are_named() {
        assert_eq!(error("size=0"), "--memory: size is 0, and must be at least 2 MiB");
        assert_eq!(error("size=3M"), "--memory: size is 3 MiB, which is not a multiple of 2 MiB");
        assert_eq!(error("size=2T"), "--memory: size is 2 TiB, and must be at most 1 TiB");
        assert_eq!(
            error("size=2M,hotplug_method=virtio-mem,hotplug_size=0"),
            "--memory: hotplug_size is 0, and must be at least 2 MiB"
        );
        assert_eq!(
            error("size=2M,hotplug_method=virtio-mem,hotplug_size=4M,hotplugged_size=6M"),
            "--memory: hotplugged_size is 6 MiB, and must be at most 4 MiB, which is hotplug_size"
        );
        assert!(error("size=2M,hotplugged_size=2M").contains("must be at most 0"));
    }

    #[test]
    fn zones_have_all_the_sizes_that_there_are() {
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
        assert!(error("size=0").contains("hotplug_size needs hotplug_method=virtio-mem"));
    }

    #[test]
    fn what_is_not_built_is_refused_with_the_reason() {
        assert!(error("size=2M,hotplug_size=2M").contains("needs hotplug_method=virtio-mem"));
        assert!(error("size=2M,hugepages=on").starts_with("--memory: hugepages=on is not supported"));
        assert!(error("size=2M,shared=on").contains("no device here shares DRAM"));
        assert!(error("size=2M,hotplug_method=balloon").contains("acpi or virtio-mem"));
    }
}
