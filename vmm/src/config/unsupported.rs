//! Flags of Cloud Hypervisor that Foreshore does not support. Each is refused with a reason,
//! instead of being reported as an unknown flag.

use foreshore_config::{ConfigError, asks_for_nothing};
use serde_json::{Map, Value};

/// Refused flags, each with the configuration sections that it fills, and with the reason.
const FLAGS: &[(&str, &[&str], &str)] = &[
    ("--dbus-object-path", &[], "D-Bus is not supported; use --api-socket"),
    ("--dbus-service-name", &[], "D-Bus is not supported; use --api-socket"),
    ("--dbus-system-bus", &[], "D-Bus is not supported; use --api-socket"),
    ("--debug-console", &["debug_console"], "use --serial or --console"),
    ("--device", &["devices", "iommu"], "device passthrough is not supported"),
    ("--fs", &["fs"], "virtio-fs is not implemented"),
    ("--gdb", &["gdb"], "a GDB stub is not implemented"),
    ("--generic-vhost-user", &["generic_vhost_user"], "vhost-user is not implemented"),
    ("--host-data", &[], "confidential guests are not supported"),
    ("--fw-cfg-config", &[], "fw_cfg is not implemented"),
    ("--igvm", &[], "confidential guests are not supported"),
    ("--ivshmem", &["ivshmem"], "it is not implemented"),
    ("--pci-segment", &["pci_segments"], "the VM has one PCI segment"),
    ("--pvmemcontrol", &["pvmemcontrol"], "it is not implemented"),
    ("--rate-limit-group", &["rate_limit_groups"], "rate limits are not implemented"),
    ("--restore", &[], "snapshots are not implemented"),
    ("--rtc", &["rtc"], "it is not implemented"),
    ("--sgx-epc", &["sgx_epc"], "SGX is not implemented"),
    ("--tpm", &["tpm"], "it is not implemented"),
    ("--user-device", &["user_devices"], "device passthrough is not supported"),
    ("--vdpa", &["vdpa"], "it is not implemented"),
];

/// Returns the reason for refusing `flag`, if Cloud Hypervisor has such a flag.
pub(super) fn reason(flag: &str) -> Option<&'static str> {
    FLAGS.iter().find(|(name, ..)| *name == flag).map(|(_, _, why)| *why)
}

/// Returns the reason for refusing a value of `--debug-console`, unless the value is `off`.
pub(super) fn debug_console(value: &str) -> Option<&'static str> {
    let is_off = value.split(',').any(|part| part.trim().eq_ignore_ascii_case("off"));
    reason("--debug-console").filter(|_| !is_off)
}

/// Returns true for a debug console that is switched off. Cloud Hypervisor includes it in every
/// configuration, with a port.
fn is_off(name: &str, section: &Value) -> bool {
    let mode = (name == "debug_console").then(|| section.get("mode")?.as_str()).flatten();
    mode.is_some_and(|mode| mode.eq_ignore_ascii_case("off"))
}

/// Removes sections from a configuration that only Cloud Hypervisor supports. Refuses a section
/// that requests a feature, with the reason given for its flag.
pub(super) fn take_sections(config: &mut Map<String, Value>) -> Result<(), ConfigError> {
    for (flag, sections, why) in FLAGS {
        for name in *sections {
            if let Some(section) = config.remove(*name)
                && !asks_for_nothing(&section, &[])
                && !is_off(name, &section)
            {
                return Err(ConfigError::ForeignSection { flag, why });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_has_the_reason_of_its_flag() {
        for (flag, sections, why) in FLAGS {
            for name in *sections {
                let mut config = Map::from_iter([((*name).to_owned(), Value::from(1))]);
                let refused = ConfigError::ForeignSection { flag, why };
                assert_eq!(take_sections(&mut config), Err(refused));
            }
        }
        let mut config = Map::from_iter([("memory".to_owned(), Value::from(1))]);
        assert_eq!((take_sections(&mut config), config.len()), (Ok(()), 1));
    }
}
