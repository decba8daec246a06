//! `--platform`.

use foreshore_config::{ConfigError, OFF, Refused, section};

const IOMMU: &str = "a virtual IOMMU is not implemented";
const PASSTHROUGH: &str = "device passthrough is not supported";
const SMBIOS: &str = "SMBIOS tables are not implemented";
const CONFIDENTIAL: &str = "confidential guests are not supported";

const REFUSED: &[Refused] = &[
    Refused { key: "iommu_segments", neutral: &["[]"], why: IOMMU },
    Refused { key: "iommu_address_width", neutral: &["64"], why: IOMMU },
    Refused { key: "iommu_address_width_bits", neutral: &["64"], why: IOMMU },
    Refused { key: "iommufd", neutral: OFF, why: PASSTHROUGH },
    Refused { key: "iommufd_fd", neutral: &[], why: PASSTHROUGH },
    // Without device passthrough, the value makes no difference.
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

/// Maximum number of PCI segments in Cloud Hypervisor.
const MAX_SEGMENTS: u16 = 96;

section! {
    /// Properties of the whole machine. Kata Containers requests two PCI segments, and adds devices
    /// to the first.
    pub struct PlatformConfig: "--platform"
        "Accepted for compatibility with Cloud Hypervisor; the VM has one PCI segment" {
        num_pci_segments (range (1..=MAX_SEGMENTS)): u16 = 1
            => "PCI segments; any number results in one",
    }
    refused &[REFUSED];
}

impl PlatformConfig {
    /// Accepts every number of segments that Cloud Hypervisor accepts.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()
    }

    /// Returns true if more than one segment is requested. Only one exists.
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
        assert_eq!(
            PlatformConfig::parse("num_pci_segments=2,tdx=off").unwrap().num_pci_segments,
            2
        );
        let error = |text| {
            PlatformConfig::parse(text)
                .and_then(|platform| platform.validate())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error("num_pci_segments=0"),
            "--platform: num_pci_segments is 0, and must be 1 to 96"
        );
        assert!(error("num_pci_segments=97").contains("1 to 96"));
        assert!(error("uuid=x").contains("SMBIOS tables are not implemented"));
    }
}
