//! `--memory size=,hotplug_method=,hotplug_size=,hotplugged_size=`.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, ON, Refused, Syntax};
use super::size::{self, Size};

const SYNTAX: Syntax = Syntax {
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

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: 512 << 20,
            hotplug_method: HotplugMethod::Acpi,
            hotplug_size: None,
            hotplugged_size: None,
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
        })
    }

    /// Sizes within their bounds, and a way to grow if it shall grow.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = SYNTAX.flag;
        size::check(flag, "size", self.size)?;
        if let Some(bytes) = self.hotplug_size {
            size::check(flag, "hotplug_size", bytes)?;
            if self.hotplug_method == HotplugMethod::Acpi {
                let reason = "hotplug_size needs hotplug_method=virtio-mem: \
                    hotplug by ACPI memory devices is not supported by foreshore";
                return Err(ConfigError::Conflict { flag, reason: reason.to_owned() });
            }
        }
        let Some(bytes) = self.hotplugged_size.filter(|bytes| *bytes != 0) else { return Ok(()) };
        size::check(flag, "hotplugged_size", bytes)?;
        let most = self.hotplug_size.unwrap_or(0);
        if bytes > most {
            let because = ", which is hotplug_size";
            let (value, most) = (Size(bytes), Size(most));
            return Err(ConfigError::TooLarge { flag, key: "hotplugged_size", value, most, because });
        }
        Ok(())
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
    fn what_is_not_built_is_refused_with_the_reason() {
        assert!(error("size=2M,hotplug_size=2M").contains("needs hotplug_method=virtio-mem"));
        assert!(error("size=2M,hugepages=on").starts_with("--memory: hugepages=on is not supported"));
        assert!(error("size=2M,shared=on").contains("no device here shares DRAM"));
        assert!(error("size=2M,hotplug_method=balloon").contains("acpi or virtio-mem"));
    }
}
