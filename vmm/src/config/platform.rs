//! `--platform num_pci_segments=`.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, Refused, Syntax};

const IOMMU: &str = "there is no virtual IOMMU";
const PASSTHROUGH: &str = "there is no device passthrough";
const SMBIOS: &str = "there are no SMBIOS tables";
const CONFIDENTIAL: &str = "confidential guests are not supported";

const REFUSED: &[Refused] = &[
    Refused { key: "iommu_segments", neutral: &["[]"], why: IOMMU },
    Refused { key: "iommu_address_width", neutral: &["64"], why: IOMMU },
    Refused { key: "iommu_address_width_bits", neutral: &["64"], why: IOMMU },
    Refused { key: "iommufd", neutral: OFF, why: PASSTHROUGH },
    Refused { key: "iommufd_fd", neutral: &[], why: PASSTHROUGH },
    // Without passthrough it is all the same.
    Refused { key: "vfio_p2p_dma", neutral: &["on", "off", "true", "false"], why: PASSTHROUGH },
    Refused { key: "serial_number", neutral: &[], why: SMBIOS },
    Refused { key: "uuid", neutral: &[], why: SMBIOS },
    Refused { key: "oem_strings", neutral: &["[]"], why: SMBIOS },
    Refused { key: "chassis_asset_tag", neutral: &[], why: SMBIOS },
    Refused { key: "system_manufacturer", neutral: &[], why: SMBIOS },
    Refused { key: "system_product_name", neutral: &[], why: SMBIOS },
    Refused { key: "system_version", neutral: &[], why: SMBIOS },
    Refused { key: "system_serial_number", neutral: &[], why: SMBIOS },
    Refused { key: "system_uuid", neutral: &[], why: SMBIOS },
    Refused { key: "system_sku_number", neutral: &[], why: SMBIOS },
    Refused { key: "system_family", neutral: &[], why: SMBIOS },
    Refused { key: "tdx", neutral: OFF, why: CONFIDENTIAL },
    Refused { key: "sev_snp", neutral: OFF, why: CONFIDENTIAL },
];

pub(super) const SYNTAX: Syntax =
    Syntax { flag: "--platform", keys: &["num_pci_segments"], words: &[], refused: &[REFUSED] };

/// So many Cloud Hypervisor takes.
const MAX_SEGMENTS: u16 = 96;

/// `--platform num_pci_segments=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlatformConfig {
    /// How many PCI segments a client would like. There is one; Kata Containers asks for two, and puts what it adds into the first.
    #[serde(default = "one_segment")]
    pub num_pci_segments: u16,
}

fn one_segment() -> u16 {
    1
}

impl PlatformConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        Ok(Self { num_pci_segments: options.number("num_pci_segments")?.unwrap_or_else(one_segment) })
    }

    /// A number that Cloud Hypervisor would take.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if (1..=MAX_SEGMENTS).contains(&self.num_pci_segments) {
            return Ok(());
        }
        Err(ConfigError::OutOfRange {
            flag: SYNTAX.flag,
            key: "num_pci_segments",
            value: self.num_pci_segments.into(),
            least: 1,
            most: MAX_SEGMENTS.into(),
        })
    }

    /// Whether it asks for what is not there, and does without.
    pub(super) fn wants_more_segments(&self) -> bool {
        self.num_pci_segments > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_read_and_bounded() {
        assert_eq!(PlatformConfig::parse("").unwrap().num_pci_segments, 1);
        assert_eq!(PlatformConfig::parse("num_pci_segments=2,tdx=off").unwrap().num_pci_segments, 2);
        let error = |text| {
            PlatformConfig::parse(text).and_then(|platform| platform.validate()).unwrap_err().to_string()
        };
        assert_eq!(error("num_pci_segments=0"), "--platform: num_pci_segments is 0, and must be 1 to 96");
        assert!(error("num_pci_segments=97").contains("1 to 96"));
        assert!(error("uuid=x").contains("no SMBIOS"));
    }
}
