//! `--memory-zone`.

use std::path::PathBuf;

use foreshore_config::{ConfigError, name, section, size};
use foreshore_types::size::Size;

use super::host::HostMemoryConfig;
use super::plug_bandwidth::{self, DEFAULT_PLUG_BANDWIDTH};

section! {
    /// Zone of DRAM.
    pub struct MemoryZoneConfig: "--memory-zone" "Zones of DRAM, with --memory size=0" {
        id: String => "Name of the zone",
        size: u64 => "Boot memory of the zone",
        file: Option<PathBuf>
            => "File for the boot memory, or a directory for a file without a name",
        host (flatten): HostMemoryConfig => "Host memory of the zone",
        host_numa_node: Option<u32>
            => "Host node for all memory of the zone, instead of any",
        hotplug_size: Option<u64> => "Memory that can be added at run time",
        hotplugged_size: Option<u64> => "Part of hotplug_size that is requested at boot",
        plug_bandwidth (usually (DEFAULT_PLUG_BANDWIDTH)): Option<u64>
            => "Upper limit of bytes per second plugged after an unplug; 0 for no limit",
    }
}

impl MemoryZoneConfig {
    /// Checks the ID, the sizes and the host memory of the zone.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        name::check(flag, "id", &self.id)?;
        size::check_pages(flag, "size", self.size)?;
        check_hotplug(flag, self.hotplug_size, self.hotplugged_size)?;
        check_plug_bandwidth(flag, self.hotplug_size, self.plug_bandwidth)?;
        if let (Some(file), true) = (&self.file, self.host.hugepages) {
            let file = file.display();
            let reason = format!(
                "file={file} excludes hugepages=on, because its file system determines the page size; use a file on hugetlbfs"
            );
            return Err(ConfigError::Conflict { flag, reason });
        }
        let sizes = [("size", self.size), ("hotplug_size", self.hotplug_size.unwrap_or(0))];
        self.host.validate(flag, sizes)
    }
}

/// Checks the sizes of a hotplug part, and that the size requested at boot does not exceed it.
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

/// Checks the plug rate, which is valid only with a hotplug part.
pub(super) fn check_plug_bandwidth(
    flag: &'static str,
    hotplug_size: Option<u64>,
    plug_bandwidth: Option<u64>,
) -> Result<(), ConfigError> {
    plug_bandwidth::check(flag, plug_bandwidth)?;
    if let (None, Some(rate)) = (hotplug_size, plug_bandwidth) {
        let reason = format!("plug_bandwidth is {}, which needs hotplug_size", Size(rate));
        return Err(ConfigError::Conflict { flag, reason });
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
    fn flag_is_parsed() {
        let zone = MemoryZoneConfig::parse(
            "id=mem0,size=1G,hotplug_size=2G,hotplugged_size=512M,host_numa_node=1,shared=on,hugepages=on,\
             hugepage_size=2M,prefault=on,reserve=on,mergeable=off,plug_bandwidth=100M",
        )
        .unwrap();
        let expected = MemoryZoneConfig {
            id: "mem0".to_owned(),
            size: 1 << 30,
            file: None,
            host: HostMemoryConfig {
                shared: true,
                mergeable: false,
                hugepages: true,
                hugepage_size: Some(2 << 20),
                prefault: true,
                reserve: true,
            },
            host_numa_node: Some(1),
            hotplug_size: Some(2 << 30),
            hotplugged_size: Some(512 << 20),
            plug_bandwidth: Some(100 << 20),
        };
        assert_eq!(zone, expected);
        assert!(zone.validate().is_ok());
        // JSON as sent by clients of Cloud Hypervisor.
        let json =
            r#"{"id": "mem0", "size": 2097152, "shared": false, "file": "/f", "mergeable": true}"#;
        assert_eq!(
            serde_json::from_str::<MemoryZoneConfig>(json).unwrap(),
            MemoryZoneConfig::parse("id=mem0,size=2M,file=/f,mergeable=on").unwrap()
        );
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("size=1G"), "--memory-zone: id= is missing");
        assert_eq!(error("id=a"), "--memory-zone: size= is missing");
        assert_eq!(error("id=a,size=0"), "--memory-zone: size is 0, and must be at least 4 KiB");
        assert_eq!(
            error("id=a,size=2M,hotplug_size=3M"),
            "--memory-zone: hotplug_size is 3 MiB, which is not a multiple of 2 MiB"
        );
        assert_eq!(
            error("id=a,size=2M,hotplug_size=2M,hotplugged_size=4M"),
            "--memory-zone: hotplugged_size is 4 MiB, and must be at most 2 MiB, which is hotplug_size"
        );
        assert!(error("id=__a,size=2M").contains("without '__' in front"));
        assert!(
            error("id=a,size=2M,host_numa_node=-1").contains("a whole number from 0 to 4294967295")
        );
    }

    #[test]
    fn invalid_page_sizes_are_refused() {
        for (more, text) in [
            ("mergeable=on,shared=on", "mergeable=on excludes shared=on and hugepages=on"),
            ("mergeable=on,hugepages=on", "mergeable=on excludes shared=on and hugepages=on"),
            ("hugepage_size=2M", "hugepage_size needs hugepages=on"),
            (
                "hugepages=on,hugepage_size=3M",
                r#"hugepage_size="3 MiB" is not a size that huge pages have"#,
            ),
            ("hugepages=on,hugepage_size=4K", r#"hugepage_size="4 KiB" is not"#),
            ("hugepages=on,hugepage_size=1G", "size is 2 MiB, which is not a multiple of 1 GiB"),
            ("hugepages=on,file=/f", "file=/f excludes hugepages=on"),
        ] {
            let message = error(&format!("id=a,size=2M,{more}"));
            assert!(
                message.starts_with("--memory-zone: ") && message.contains(text),
                "{more}: {message}"
            );
        }
    }
}
