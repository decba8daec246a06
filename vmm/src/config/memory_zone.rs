//! `--memory-zone id=,size=,host_numa_node=,hotplug_size=,hotplugged_size=`.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::name;
use super::option_parser::{OFF, Refused, Syntax};
use super::size::{self, Size};

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--memory-zone",
    keys: &["id", "size", "host_numa_node", "hotplug_size", "hotplugged_size"],
    words: &[],
    refused: &[
        Refused { key: "file", neutral: &[], why: "DRAM is anonymous memory; see --pm-memory" },
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
    ],
};

/// `--memory-zone id=,size=,host_numa_node=,hotplug_size=,hotplugged_size=`: a zone of DRAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryZoneConfig {
    /// Its name.
    pub id: String,
    /// Its boot memory.
    pub size: u64,
    /// The host's node from which all its memory comes; wherever the host likes otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_numa_node: Option<u32>,
    /// By how much it may grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// How much of that is requested at boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
}

impl MemoryZoneConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        Ok(Self {
            id: options.required("id", options.text("id").map(str::to_owned))?,
            size: options.required("size", options.size("size")?)?,
            host_numa_node: options.number("host_numa_node")?,
            hotplug_size: options.size("hotplug_size")?,
            hotplugged_size: options.size("hotplugged_size")?,
        })
    }

    /// A name, and sizes within their bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        name::check(SYNTAX.flag, "id", &self.id)?;
        size::check(SYNTAX.flag, "size", self.size)?;
        check_hotplug(SYNTAX.flag, self.hotplug_size, self.hotplugged_size)
    }
}

/// The sizes of a hotplug part: within their bounds, and no more requested at boot than there is.
pub(super) fn check_hotplug(
    flag: &'static str,
    hotplug_size: Option<u64>,
    hotplugged_size: Option<u64>,
) -> Result<(), ConfigError> {
    if let Some(bytes) = hotplug_size {
        size::check(flag, "hotplug_size", bytes)?;
    }
    let Some(bytes) = hotplugged_size.filter(|bytes| *bytes != 0) else { return Ok(()) };
    size::check(flag, "hotplugged_size", bytes)?;
    let most = hotplug_size.unwrap_or(0);
    if bytes > most {
        let because = ", which is hotplug_size";
        let (value, most) = (Size(bytes), Size(most));
        return Err(ConfigError::TooLarge { flag, key: "hotplugged_size", value, most, because });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        MemoryZoneConfig::parse(text).and_then(|zone| zone.validate()).unwrap_err().to_string()
    }

    #[test]
    fn the_flag_is_read() {
        let zone = MemoryZoneConfig::parse(
            "id=mem0,size=1G,hotplug_size=2G,hotplugged_size=512M,host_numa_node=1,shared=off,prefault=off",
        )
        .unwrap();
        let expected = MemoryZoneConfig {
            id: "mem0".to_owned(),
            size: 1 << 30,
            host_numa_node: Some(1),
            hotplug_size: Some(2 << 30),
            hotplugged_size: Some(512 << 20),
        };
        assert_eq!(zone, expected);
        assert!(zone.validate().is_ok());
        // As Cloud Hypervisor's clients send it.
        let json = r#"{"id": "mem0", "size": 2097152, "shared": false, "host_numa_node": null}"#;
        assert_eq!(
            serde_json::from_str::<MemoryZoneConfig>(json).unwrap(),
            MemoryZoneConfig::parse("id=mem0,size=2M").unwrap()
        );
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("size=1G"), "--memory-zone: id= is missing");
        assert_eq!(error("id=a"), "--memory-zone: size= is missing");
        assert_eq!(error("id=a,size=0"), "--memory-zone: size is 0, and must be at least 2 MiB");
        assert_eq!(
            error("id=a,size=2M,hotplug_size=3M"),
            "--memory-zone: hotplug_size is 3 MiB, which is not a multiple of 2 MiB"
        );
        assert_eq!(
            error("id=a,size=2M,hotplug_size=2M,hotplugged_size=4M"),
            "--memory-zone: hotplugged_size is 4 MiB, and must be at most 2 MiB, which is hotplug_size"
        );
        assert!(error("id=a:b,size=2M").contains(r#"id="a:b" is not 1 to 64 letters"#));
        assert!(error("id=a,size=2M,host_numa_node=-1").contains("a whole number of 32 bits"));
    }

    #[test]
    fn what_is_not_built_is_refused_with_the_reason() {
        for option in
            ["file=/a", "shared=on", "mergeable=on", "hugepages=on", "hugepage_size=1G", "prefault=on"]
        {
            let expected = format!("--memory-zone: {option} is not supported by foreshore: ");
            assert!(error(&format!("id=a,size=2M,{option}")).starts_with(&expected), "{option}");
        }
    }
}
