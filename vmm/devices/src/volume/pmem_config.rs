//! `--pmem`.

use std::path::PathBuf;

use foreshore_config::refused_keys as refused;
use foreshore_config::{ConfigError, name, section, size};

use crate::memory::lost_memory::RangeSource;

section! {
    /// File or device that the guest uses as persistent memory.
    pub struct PmemConfig: "--pmem" "Files and devices as persistent memory, /dev/pmem0 and on" {
        file: PathBuf => "File or device, or a directory for an unnamed new file",
        size: Option<u64> => "Size of the device, instead of the whole file's; required for a directory",
        discard_writes: bool = false => "Discard writes of the guest",
        id: Option<String> => "Name in the API and in metrics, instead of _pmem0 and so on",
    }
    refused &[refused::PCI, refused::SLOT];
}

impl PmemConfig {
    /// Kind of the device, one word for ids and metrics.
    pub const KIND: &'static str = "pmem";

    /// Flag with the properties that identify the device in errors.
    pub fn flag(&self) -> String {
        self.source().to_string()
    }

    /// Source of the device's range of guest memory.
    pub fn source(&self) -> RangeSource {
        RangeSource { flag: Self::FLAG, key: format!("file={}", self.file.display()) }
    }

    /// Checks that the size is a multiple of the huge page size, and that the id is valid.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        self.size.map_or(Ok(()), |bytes| size::check(flag, "size", bytes))?;
        self.id.as_ref().map_or(Ok(()), |id| name::check(flag, "id", id))
    }

    /// Name of the `nth` device: its configured id, or otherwise the name that Cloud Hypervisor
    /// would assign.
    pub fn name(&self, nth: usize) -> String {
        self.id.clone().unwrap_or_else(|| format!("_pmem{nth}"))
    }
}

/// Checks each device, and checks that all names are unique.
pub fn validate_all(devices: &[PmemConfig]) -> Result<(), ConfigError> {
    let conflict = |reason| Err(ConfigError::Conflict { flag: PmemConfig::FLAG, reason });
    for (nth, device) in devices.iter().enumerate() {
        device.validate()?;
        for (other_nth, other) in devices[..nth].iter().enumerate() {
            if device.name(nth) == other.name(other_nth) {
                return conflict(format!("id {} is given twice", device.name(nth)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        PmemConfig::parse(text).and_then(|pmem| pmem.validate()).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let pmem = PmemConfig::parse(
            "file=/img,size=1G,discard_writes=on,id=root,iommu=off,pci_segment=0",
        )
        .unwrap();
        let expected = PmemConfig {
            file: "/img".into(),
            size: Some(1 << 30),
            discard_writes: true,
            id: Some("root".to_owned()),
        };
        assert_eq!(pmem, expected);
        assert!(pmem.validate().is_ok());
        assert_eq!(pmem.name(3), "root");
        let least = PmemConfig::parse("file=/img").unwrap();
        assert_eq!((least.size, least.discard_writes), (None, false));
        assert!(least.validate().is_ok());
        assert_eq!(least.name(3), "_pmem3");
        // The API uses Cloud Hypervisor's keys.
        let json = serde_json::json!({"file": "/img", "size": 1 << 30, "discard_writes": true, "id": "root"});
        assert_eq!(serde_json::to_value(&pmem).unwrap(), json);
        assert_eq!(serde_json::from_str::<PmemConfig>(r#"{"file": "/img"}"#).unwrap(), least);
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("size=2M"), "--pmem: file= is missing");
        assert_eq!(error("file=,size=2M"), "--pmem: file= is missing");
        assert_eq!(error("file=/a,size=0"), "--pmem: size is 0, and must be at least 2 MiB");
        assert_eq!(
            error("file=/a,size=3M"),
            "--pmem: size is 3 MiB, which is not a multiple of 2 MiB"
        );
        assert!(error("file=/a,size=8192T").contains("at most 4096 TiB"));
        assert!(error("file=/a,discard_writes=maybe").contains("on or off"));
        assert!(error("file=/a,iommu=on").contains("a virtual IOMMU is not implemented"));
        assert!(error("file=/a,pci_segment=1").contains("one PCI segment"));
        assert!(error("file=/a,pci_device_id=3").contains("not supported"));
        assert!(error("file=/a,mergeable=on").contains("unknown key"));
        for id in ["__pmem", "a\nb"] {
            assert!(error(&format!("file=/a,id={id}")).contains("without '__' in front"), "{id:?}");
        }
    }

    #[test]
    fn names_are_unique() {
        let all = |texts: &[&str]| {
            let devices: Vec<_> =
                texts.iter().map(|text| PmemConfig::parse(text).unwrap()).collect();
            validate_all(&devices).map_err(|error| error.to_string())
        };
        assert_eq!(all(&["file=/a", "file=/b", "file=/c,id=c"]), Ok(()));
        assert_eq!(
            all(&["file=/a,id=c", "file=/b,id=c"]),
            Err("--pmem: id c is given twice".to_owned())
        );
        assert_eq!(
            all(&["file=/a,id=_pmem1", "file=/b"]),
            Err("--pmem: id _pmem1 is given twice".to_owned())
        );
        assert!(all(&["file=/a", "file=/b,size=1"]).is_err());
    }
}
