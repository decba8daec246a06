//! `--balloon`.

use foreshore_config::refused_keys as refused;
use foreshore_config::{ConfigError, name, section};
use foreshore_types::size::Size;
use foreshore_types::{PAGE_BYTES, UNIT_BYTES};

/// Id that Cloud Hypervisor gives its only virtio balloon.
const ID: &str = "__balloon";

/// Minimum of the default floor. In larger VMs the default floor is a quarter of the boot memory.
const MIN_FLOOR_BYTES: u64 = 64 << 20;

/// Largest target that fits into the configuration, which has 32 bits for the number of pages.
const MAX_BYTES: u64 = u32::MAX as u64 * PAGE_BYTES;

section! {
    /// Balloon in boot memory.
    pub struct BalloonConfig: "--balloon" "Balloon in boot memory" {
        size: u64 = 0 => "Fixed size until a resize; 0 leaves the size to the policy",
        deflate_on_oom: bool = false => "Let the guest deflate the balloon when it runs out of memory",
        free_page_reporting: bool = false
            => "Return pages to the host while the guest reports them as free",
        statistics: bool = true
            => "Request statistics, which the governor uses without an agent",
        floor: Option<u64>
            => "Boot memory that always stays with the guest, instead of a quarter",
        id: Option<String> => "Name of the device, instead of __balloon",
    }
    refused &[refused::PCI, refused::SLOT];
}

impl BalloonConfig {
    pub fn id_or_default(&self) -> &str {
        self.id.as_deref().unwrap_or(ID)
    }

    /// Maximum size of the balloon in a VM with `boot_bytes` of boot memory.
    pub fn max_bytes(&self, boot_bytes: u64) -> u64 {
        let usual = (boot_bytes / 4).next_multiple_of(UNIT_BYTES).max(MIN_FLOOR_BYTES);
        // The balloon never includes boot memory beyond the last whole block.
        let most = boot_bytes.saturating_sub(self.floor.unwrap_or(usual)).min(MAX_BYTES);
        most / UNIT_BYTES * UNIT_BYTES
    }

    /// Checks that sizes are multiples of the block size and that `size` leaves the floor to the
    /// guest.
    pub fn validate(&self, boot_bytes: u64) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        for (key, bytes) in [("size", self.size), ("floor", self.floor.unwrap_or(0))] {
            if !bytes.is_multiple_of(UNIT_BYTES) {
                let (value, unit) = (Size(bytes), Size(UNIT_BYTES));
                return Err(ConfigError::NotMultiple { flag, key, value, unit });
            }
        }
        let most = self.max_bytes(boot_bytes);
        if self.size > most {
            return Err(ConfigError::TooLarge {
                flag,
                key: "size",
                value: Size(self.size),
                most: Size(most),
                because: ", so that floor= of the boot memory stays with the guest",
            });
        }
        // A user may set the default id explicitly.
        self.id.as_ref().filter(|id| *id != ID).map_or(Ok(()), |id| name::check(flag, "id", id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn error(text: &str) -> String {
        let parsed = BalloonConfig::parse(text).and_then(|balloon| balloon.validate(512 * MIB));
        parsed.unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let text = "size=128M,deflate_on_oom=on,free_page_reporting=on,statistics=off,floor=64M,id=b,pci_segment=0";
        let balloon = BalloonConfig::parse(text).unwrap();
        let expected = BalloonConfig {
            size: 128 * MIB,
            deflate_on_oom: true,
            free_page_reporting: true,
            statistics: false,
            floor: Some(64 * MIB),
            id: Some("b".to_owned()),
        };
        assert_eq!(balloon, expected);
        assert_eq!(balloon.validate(512 * MIB), Ok(()));
    }

    #[test]
    fn unset_keys_have_the_defaults_of_cloud_hypervisor() {
        let balloon = BalloonConfig::parse("size=0").unwrap();
        assert!(!balloon.deflate_on_oom && !balloon.free_page_reporting && balloon.statistics);
        assert_eq!(balloon.id_or_default(), "__balloon");
        let json = r#"{"size": 1048576, "deflate_on_oom": true}"#;
        let balloon: BalloonConfig = serde_json::from_str(json).unwrap();
        assert!(balloon.deflate_on_oom && balloon.statistics && balloon.floor.is_none());
    }

    #[test]
    fn default_floor_is_a_quarter_of_boot_memory() {
        let most =
            |text: &str, boot| BalloonConfig::parse(text).unwrap().max_bytes(boot * MIB) / MIB;
        assert_eq!(most("size=0", 512), 384);
        assert_eq!(most("size=0", 100), 36);
        assert_eq!(most("size=0", 32), 0);
        assert_eq!(most("floor=32M", 512), 480);
        assert_eq!(most("floor=1G", 512), 0);
        // The result is a whole number of blocks even if a quarter of the memory is not.
        assert_eq!(most("size=0", 1022), 766);
        assert_eq!(most("floor=32M", 513), 480);
        assert_eq!(
            most("size=0", 1 << 30),
            (16 << 20) - 2,
            "the device can request at most 2^32 pages"
        );
    }

    #[test]
    fn errors_name_the_bound() {
        let expected = "--balloon: size is 386 MiB, and must be at most 384 MiB, so that floor= of the boot memory stays with the guest";
        assert_eq!(error("size=386M"), expected);
        assert_eq!(error("size=1M"), "--balloon: size is 1 MiB, which is not a multiple of 2 MiB");
        assert_eq!(
            error("floor=3M"),
            "--balloon: floor is 3 MiB, which is not a multiple of 2 MiB"
        );
        assert!(error("id=__a").contains("without '__' in front"));
        assert!(error("pci_segment=1").contains("one PCI segment"));
        assert!(error("shrink=on").contains("unknown key"));
    }
}
