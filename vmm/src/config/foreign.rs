//! Flags of Cloud Hypervisor that foreshore does not have, so that each is refused with a reason
//! rather than as a typing error.

use foreshore_config::{ConfigError, asks_for_nothing};
use serde_json::{Map, Value};

const FLAGS: &[(&str, &str)] = &[
    ("--dbus-object-path", "there is no D-Bus interface; see --api-socket"),
    ("--dbus-service-name", "there is no D-Bus interface; see --api-socket"),
    ("--dbus-system-bus", "there is no D-Bus interface; see --api-socket"),
    ("--debug-console", "use --serial or --console"),
    ("--device", "there is no device passthrough"),
    ("--fs", "virtio-fs is not implemented"),
    ("--gdb", "there is no debug stub"),
    ("--generic-vhost-user", "vhost-user is not implemented"),
    ("--host-data", "confidential guests are not supported"),
    ("--fw-cfg-config", "there is no firmware configuration device"),
    ("--igvm", "confidential guests are not supported"),
    ("--ivshmem", "it is not implemented"),
    ("--landlock", "it is not implemented"),
    ("--landlock-rules", "it is not implemented"),
    ("--pci-segment", "there is one PCI segment"),
    ("--pvmemcontrol", "it is not implemented"),
    ("--rate-limit-group", "there is nothing to limit yet"),
    ("--restore", "snapshots are not implemented"),
    ("--rtc", "it is not implemented"),
    ("--sgx-epc", "SGX is not implemented"),
    ("--tpm", "it is not implemented"),
    ("--user-device", "there is no device passthrough"),
    ("--vdpa", "it is not implemented"),
];

/// Sections of Cloud Hypervisor's configuration that foreshore does not have, and the flags that
/// fill them.
const SECTIONS: &[(&str, &str)] = &[
    ("debug_console", "--debug-console"),
    ("devices", "--device"),
    ("fs", "--fs"),
    ("gdb", "--gdb"),
    ("generic_vhost_user", "--generic-vhost-user"),
    ("iommu", "--device"),
    ("ivshmem", "--ivshmem"),
    ("landlock_enable", "--landlock"),
    ("landlock_rules", "--landlock-rules"),
    ("pci_segments", "--pci-segment"),
    ("pvmemcontrol", "--pvmemcontrol"),
    ("rate_limit_groups", "--rate-limit-group"),
    ("rtc", "--rtc"),
    ("sgx_epc", "--sgx-epc"),
    ("tpm", "--tpm"),
    ("user_devices", "--user-device"),
    ("vdpa", "--vdpa"),
];

/// Why `flag` is refused, if it is one of Cloud Hypervisor's.
pub(super) fn reason(flag: &str) -> Option<&'static str> {
    FLAGS.iter().find(|(name, _)| *name == flag).map(|(_, reason)| *reason)
}

/// Returns the reason why a value of `--debug-console` is refused, unless it is off.
pub(super) fn debug_console(value: &str) -> Option<&'static str> {
    let is_off = value.split(',').any(|part| part.trim().eq_ignore_ascii_case("off"));
    reason("--debug-console").filter(|_| !is_off)
}

/// Returns true for a debug console that is off. Cloud Hypervisor shows it in every configuration,
/// with a port.
fn is_off(name: &str, section: &Value) -> bool {
    let mode = (name == "debug_console").then(|| section.get("mode")?.as_str()).flatten();
    mode.is_some_and(|mode| mode.eq_ignore_ascii_case("off"))
}

/// Removes sections that only Cloud Hypervisor has from a configuration. Refuses a section that
/// requests something, with the reason of its flag.
pub(super) fn take_sections(config: &mut Map<String, Value>) -> Result<(), ConfigError> {
    for (name, flag) in SECTIONS {
        if let Some(section) = config.remove(*name)
            && !asks_for_nothing(&section, &[])
            && !is_off(name, &section)
        {
            let why = reason(flag).expect("every section's flag has a reason");
            return Err(ConfigError::ForeignSection { flag, why });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_has_the_reason_of_its_flag() {
        for (name, flag) in SECTIONS {
            let mut config = Map::from_iter([((*name).to_owned(), Value::from(1))]);
            let refused = ConfigError::ForeignSection { flag, why: reason(flag).unwrap() };
            assert_eq!(take_sections(&mut config), Err(refused));
        }
        let mut config = Map::from_iter([("memory".to_owned(), Value::from(1))]);
        assert_eq!((take_sections(&mut config), config.len()), (Ok(()), 1));
    }
}
