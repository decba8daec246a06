//! Upper limits on the number of sections in a configuration.
//!
//! These limits are checked first, because other checks compare each section with all others. The
//! comparisons would take hours for as many sections as fit into a request body.

use foreshore_config::ConfigError;
use foreshore_devices::memory::layout::PCI_SLOTS;

use super::{
    DiskConfig, MemoryZoneConfig, NetConfig, NumaConfig, PmMemoryConfig, PmVolumeConfig,
    PmemConfig, VmConfig,
};

/// Upper limit for sections that do not need a slot on the PCI bus. The actual limit of a VM is
/// lower, and is checked when the VM is built.
const MOST: usize = 256;
/// The host bridge occupies one slot.
const MOST_SLOTS: usize = PCI_SLOTS as usize - 1;

fn check(
    flag: &'static str,
    key: &'static str,
    count: usize,
    most: usize,
) -> Result<(), ConfigError> {
    if count <= most {
        return Ok(());
    }
    Err(ConfigError::OutOfRange { flag, key, value: count as u64, least: 0, most: most as u64 })
}

impl VmConfig {
    /// Refuses lists that are too long for any machine.
    pub(super) fn check_counts(&self) -> Result<(), ConfigError> {
        let number = "their number";
        for (flag, count) in [
            (PmVolumeConfig::FLAG, self.pm_volumes.len()),
            (PmMemoryConfig::FLAG, self.pm_memory.len()),
            (MemoryZoneConfig::FLAG, self.memory.zones.len()),
            (NumaConfig::FLAG, self.numa.len()),
        ] {
            check(flag, number, count, MOST)?;
        }
        let on_the_bus = [
            (DiskConfig::FLAG, self.disks.len()),
            (NetConfig::FLAG, self.net.len()),
            (PmemConfig::FLAG, self.pmem.len()),
        ];
        for (flag, count) in on_the_bus {
            check(flag, number, count, MOST_SLOTS)?;
        }
        let all = on_the_bus.iter().map(|(_, count)| count).sum::<usize>()
            + usize::from(self.vsock.is_some());
        let (flag, _) =
            on_the_bus.into_iter().max_by_key(|(_, count)| *count).expect("there are three");
        check(flag, "the number of devices on the PCI bus", all, MOST_SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{VsockConfig, test_config};

    fn refused(config: &VmConfig) -> String {
        config.validate().unwrap_err().to_string()
    }

    fn disks(count: usize) -> Vec<DiskConfig> {
        (0..count).map(|nth| DiskConfig::parse(&format!("path=/d{nth}")).unwrap()).collect()
    }

    #[test]
    fn more_devices_than_pci_slots_are_refused() {
        let mut config = test_config();
        config.disks = disks(MOST_SLOTS);
        assert_eq!(config.validate(), Ok(()));
        config.vsock = Some(VsockConfig::parse("cid=3,socket=/s").unwrap());
        let all = "--disk: the number of devices on the PCI bus is 32, and must be 0 to 31";
        assert_eq!(refused(&config), all);
        config.vsock = None;
        config.net = vec![NetConfig::parse("id=n").unwrap()];
        assert_eq!(refused(&config), all);
        config.net.clear();
        config.disks = disks(MOST_SLOTS + 1);
        assert_eq!(refused(&config), "--disk: their number is 32, and must be 0 to 31");
    }

    /// Without the limit, comparing each interface with all others would take hours.
    #[test]
    fn list_that_fills_a_request_body_is_refused_quickly() {
        let mut config = test_config();
        config.net = vec![NetConfig::parse("").unwrap(); 300_000];
        assert_eq!(refused(&config), "--net: their number is 300000, and must be 0 to 31");
        config.net.clear();
        let volume = PmVolumeConfig::parse("pool=/p,name=v,force=on").unwrap();
        config.pm_volumes = vec![volume; 300_000];
        assert_eq!(refused(&config), "--pm-volume: their number is 300000, and must be 0 to 256");
        config.pm_volumes.clear();
        config.numa = vec![NumaConfig::parse("guest_numa_id=0").unwrap(); MOST + 1];
        assert_eq!(refused(&config), "--numa: their number is 257, and must be 0 to 256");
    }
}
