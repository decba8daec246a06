//! A VM's configuration as the API takes it, in JSON.
//!
//! Field names are Cloud Hypervisor's. What a client says that foreshore has nothing for is refused with the reason,
//! as the same flag is, unless it asks for what is the case anyway: clients write out defaults. Names that neither knows
//! are passed over, as Cloud Hypervisor does, but in sections that are ours alone.

use serde_json::{Map, Value};
use thiserror::Error;

use super::error::ConfigError;
use super::field::{self, FieldError};
use super::option_parser::Syntax;
use super::{
    NetConfig, VmConfig, balloon, console, cpus, disk, foreign, memory, memory_zone, net, numa, payload,
    platform, pm_memory, pm_volume, pmem, pressure, rng, unknown, vsock,
};

/// Sections, with what the flag of the same meaning takes.
pub(super) const SECTIONS: [(&str, &Syntax); 12] = [
    ("payload", &payload::SYNTAX),
    ("cpus", &cpus::SYNTAX),
    ("memory", &memory::SYNTAX),
    ("balloon", &balloon::SYNTAX),
    ("disks", &disk::SYNTAX),
    ("net", &net::SYNTAX),
    ("serial", &console::SERIAL),
    ("console", &console::CONSOLE),
    ("rng", &rng::SYNTAX),
    ("vsock", &vsock::SYNTAX),
    ("pmem", &pmem::SYNTAX),
    ("platform", &platform::SYNTAX),
];

/// Sections that Cloud Hypervisor does not have: their flags and keys. No client knows more of them than we do, so that a key
/// which nobody knows is a mistake.
pub(super) const OURS: [(&str, &str, &[&str]); 3] = [
    ("pm_memory", pm_memory::SYNTAX.flag, pm_memory::SYNTAX.keys),
    ("pm_volumes", pm_volume::SYNTAX.flag, pm_volume::SYNTAX.keys),
    ("pressure", pressure::FLAG, &pressure::FIELDS),
];

/// Why a configuration in JSON is refused.
#[derive(Debug, Error)]
pub enum JsonError {
    /// A field of it is missing, or is not what it has to be.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// It has something that is not supported, or is no valid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl VmConfig {
    /// Reads and validates a configuration.
    pub fn from_json(json: Map<String, Value>) -> Result<Self, JsonError> {
        Self::from_json_warned(json).map(|(config, _)| config)
    }

    /// The same, with what is to be known about it, also of what it has no more.
    pub fn from_json_warned(mut json: Map<String, Value>) -> Result<(Self, Vec<String>), JsonError> {
        strip_nulls(&mut json);
        let nets = json.get_mut("net").and_then(Value::as_array_mut).into_iter().flatten();
        let passed_over: Vec<_> =
            nets.filter_map(Value::as_object_mut).filter_map(NetConfig::pass_over_fds).collect();
        check(&json)?;
        let unknown = unknown::warning(&json);
        let config: Self = field::read(Value::Object(json))?;
        config.validate()?;
        let mut warnings = config.warnings();
        warnings.extend(unknown);
        // Once, however many interfaces have some.
        warnings.extend(passed_over.first().map(|&warning| warning.to_owned()));
        Ok((config, warnings))
    }
}

/// A field that is null is as good as left out.
pub(super) fn strip_nulls(fields: &mut Map<String, Value>) {
    fields.retain(|_, value| !value.is_null());
    fields.values_mut().for_each(strip_nulls_within);
}

fn strip_nulls_within(value: &mut Value) {
    match value {
        Value::Object(fields) => strip_nulls(fields),
        Value::Array(values) => values.iter_mut().for_each(strip_nulls_within),
        _ => {}
    }
}

fn check(config: &Map<String, Value>) -> Result<(), ConfigError> {
    for (name, value) in config {
        if let Some((flag, why)) = foreign::section(name)
            && !asks_for_nothing(value, &[])
            && !foreign::is_off(name, value)
        {
            return Err(ConfigError::ForeignSection { flag, why });
        }
    }
    for (name, syntax) in SECTIONS {
        objects(config.get(name)).try_for_each(|section| check_section(syntax, section))?;
    }
    for (name, flag, keys) in OURS {
        objects(config.get(name)).try_for_each(|section| check_keys(flag, keys, section))?;
    }
    let zones = objects(config.get("memory").and_then(|memory| memory.get("zones")));
    zones.into_iter().try_for_each(|zone| check_section(&memory_zone::SYNTAX, zone))?;
    objects(config.get("numa")).try_for_each(|node| check_section(&numa::SYNTAX, node))
}

/// A section's object, or all of them.
fn objects(section: Option<&Value>) -> impl Iterator<Item = &Map<String, Value>> {
    let (one, many) = match section {
        Some(Value::Object(object)) => (Some(object), &[][..]),
        Some(Value::Array(list)) => (None, &list[..]),
        _ => (None, &[][..]),
    };
    one.into_iter().chain(many.iter().filter_map(Value::as_object))
}

pub(super) fn check_section(syntax: &Syntax, section: &Map<String, Value>) -> Result<(), ConfigError> {
    for refused in syntax.refused() {
        if let Some(value) = section.get(refused.key)
            && !asks_for_nothing(value, refused.neutral)
        {
            return Err(ConfigError::Unsupported {
                flag: syntax.flag,
                key: refused.key,
                value: format!("={value}"),
                why: refused.why,
            });
        }
    }
    Ok(())
}

fn check_keys(flag: &'static str, keys: &[&str], section: &Map<String, Value>) -> Result<(), ConfigError> {
    match section.keys().find(|key| !keys.contains(&&***key)) {
        Some(key) => Err(ConfigError::UnknownKey { flag, key: key.clone(), known: keys.join(", ") }),
        None => Ok(()),
    }
}

/// Whether a value is one of the `neutral` ones, or has nothing in it; without neutral ones, whether it is a switch that is off.
fn asks_for_nothing(value: &Value, neutral: &[&str]) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.values().all(|value| asks_for_nothing(value, &[])),
        Value::String(text) => neutral.iter().any(|neutral| neutral.eq_ignore_ascii_case(text)),
        Value::Bool(false) if neutral.is_empty() => true,
        Value::Bool(_) | Value::Number(_) => neutral.contains(&&*value.to_string()),
    }
}

/// Every section with the names of its fields, those among them that are refused.
#[cfg(test)]
pub(crate) fn fields() -> Vec<(&'static str, Vec<&'static str>)> {
    let theirs = SECTIONS.iter().map(|(section, syntax)| (*section, unknown::keys(section, syntax)));
    theirs.chain(OURS.iter().map(|(section, _, keys)| (*section, keys.to_vec()))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::config::{ConsoleMode, HotplugMethod, PmMemoryConfig, PmVolumeConfig, PressureConfig};

    fn read(json: Value) -> Result<VmConfig, JsonError> {
        let Value::Object(fields) = json else { panic!("{json} is no object") };
        VmConfig::from_json(fields)
    }

    fn error(json: Value) -> String {
        read(json).unwrap_err().to_string()
    }

    /// A VM with these sections as well.
    fn with(more: Value) -> Value {
        let mut config = json!({"payload": {"kernel": "/vmlinux"}});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    }

    #[test]
    fn what_clients_write_out_as_a_default_is_taken() {
        let config = read(json!({
            "payload": {"kernel": "/vmlinux", "firmware": null, "cmdline": "quiet"},
            "cpus": {"boot_vcpus": 1, "max_vcpus": 2, "topology": null, "kvm_hyperv": false, "affinity": null,
                     "features": {"amx": false}},
            "memory": {"size": 536870912, "mergeable": false, "hotplug_method": "VirtioMem", "hotplug_size": null,
                       "shared": false, "hugepages": false, "hugepage_size": null, "prefault": false, "thp": true,
                       "zones": null},
            "disks": [{"path": "/disk", "iommu": false, "vhost_user": false, "rate_limiter_config": null,
                       "pci_segment": 0, "image_type": "Raw"}],
            "platform": {"num_pci_segments": 2, "iommufd": false, "oem_strings": null},
            "net": [{"tap": null, "ip": "10.0.0.1", "mask": "255.255.255.0", "mac": "02:00:00:00:00:01", "num_queues": 2,
                     "vhost_user": false, "vhost_mode": "Client", "vhost_socket": null, "fds": null, "iommu": false,
                     "rate_limiter_config": null, "pci_segment": 0}],
            "fs": null, "devices": null, "pci_segments": [], "watchdog": false, "iommu": false,
            "rng": {"src": "/dev/urandom", "iommu": false},
            "serial": {"mode": "Null", "file": null, "iommu": false, "socket": null},
            "console": {"mode": "Off"},
            "a_field_of_later_years": {"x": 1}
        }))
        .unwrap();
        assert_eq!(config.memory.hotplug_method, HotplugMethod::VirtioMem);
        assert_eq!((config.cpus.max_vcpus, config.console.mode), (2, ConsoleMode::Off));
        assert_eq!(config.disks.len(), 1);
        // And what is shown can be given again.
        let shown = serde_json::to_value(&config).unwrap();
        assert_eq!(read(shown).unwrap(), config);
    }

    /// What `vm.info` shows of one that was given open, for instance.
    #[test]
    fn descriptors_of_an_interface_are_passed_over_with_a_warning() {
        let read = |nets: Value| {
            let Value::Object(json) = with(json!({ "net": nets })) else { panic!() };
            VmConfig::from_json_warned(json).unwrap()
        };
        let (config, warnings) = read(json!([{"id": "a", "fds": [-1]}, {"id": "b", "fds": [7]}]));
        assert!(config.net.iter().all(|net| net.fds.is_empty()));
        assert!(matches!(&warnings[..], [one] if one.starts_with("--net: fds in JSON")), "{warnings:?}");
        let (plain, none) = read(json!([{"id": "a"}, {"id": "b", "fds": []}]));
        assert_eq!((plain, none), (config, Vec::new()));
    }

    #[test]
    fn what_is_not_supported_is_refused_with_the_reason_of_its_flag() {
        for (more, text) in [
            (json!({"fs": [{"tag": "a", "socket": "/s"}]}), "--fs is not supported by foreshore: "),
            (json!({"net": [{"vhost_user": true}]}), "--net: vhost_user=true is not supported"),
            (json!({"net": [{"fds": ["3"]}]}), "--net: fds=[\"3\"] is not supported"),
            (json!({"pvpanic": true}), "--pvpanic is not supported by foreshore: "),
            (json!({"platform": {"num_pci_segments": 2, "uuid": "x"}}), "--platform: uuid="),
            (
                json!({"memory": {"size": 536870912, "shared": true, "mergeable": true}}),
                "--memory: mergeable=on goes with",
            ),
            (
                json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "kvm_hyperv": true}}),
                "--cpus: kvm_hyperv=true is not supported",
            ),
            (json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "profile": "Other"}}), "--cpus: profile="),
            (json!({"disks": [{"path": "/a"}, {"path": "/b", "iommu": true}]}), "--disk: iommu=true"),
            (
                json!({"disks": [{"path": "/a", "rate_limiter_config": {"bandwidth": {"size": 1}}}]}),
                "--disk: rate",
            ),
            (json!({"payload": {"kernel": "/k", "igvm": "/i"}}), "payload: igvm=\"/i\" is not supported"),
            (
                json!({"memory": {"size": 0, "zones": [{"id": "a", "size": 536870912, "hugepage_size": 2097152}]}}),
                "--memory-zone: hugepage_size needs hugepages=on",
            ),
            (json!({"numa": [{"guest_numa_id": 0, "device_id": "x"}]}), "--numa: device_id="),
        ] {
            let message = error(with(more.clone()));
            assert!(message.starts_with(text), "{more}: {message}");
        }
    }

    #[test]
    fn keys_that_nobody_knows_are_refused_in_our_own_sections_alone() {
        let zone = json!({"pool": "/p", "size": 2 << 20, "hugepages": true});
        let keys = "pool, size, id, guest_numa_node, near, read_latency, write_latency, bandwidth, scrub_bandwidth, plug_bandwidth";
        let told = format!(r#"--pm-memory: unknown key "hugepages"; the keys are {keys}"#);
        assert_eq!(error(with(json!({ "pm_memory": zone }))), told);
        assert_eq!(error(with(json!({ "pm_memory": [zone] }))), told);
        let volume = |key: &str| json!({"pm_volumes": [{"pool": "/p", "name": "a"}, {"pool": "/p", "name": "b", key: true}]});
        assert!(
            error(with(volume("read_only")))
                .starts_with(r#"--pm-volume: unknown key "read_only"; the keys are pool"#)
        );
        assert!(read(with(volume("readonly"))).is_ok());
        assert_eq!(
            error(with(json!({"pressure": {"policy": "psi", "idle": "10s"}}))),
            r#"--pressure: unknown key "idle"; the keys are policy, size, params, rules, dry_run, paused, record, record_size"#
        );
        // Clients of a later Cloud Hypervisor go on working.
        let later =
            json!({"balloon": {"size": 0, "later": 1}, "disks": [{"path": "/d", "later": {}}], "later": [1]});
        assert!(read(with(later)).is_ok());
    }

    #[test]
    fn keys_of_our_own_sections_are_their_fields() {
        let all = "id=a,guest_numa_node=1,near=0,read_latency=1,write_latency=1,bandwidth=1G,scrub_bandwidth=0,plug_bandwidth=0";
        let zone = PmMemoryConfig::parse(&format!("pool=/p,size=2M,{all}")).unwrap();
        let all = "format=btt,interface=auto,create=on,readonly=off,force=off";
        let volume = PmVolumeConfig::parse(&format!("pool=/p,name=a,size=2M,{all}")).unwrap();
        let all = "policy=fixed,size=0,idle=1s,cool_down=1s,record=/r,record_size=1M";
        let pressure = PressureConfig::parse(all).unwrap();
        let shown = json!({"pm_memory": zone, "pm_volumes": volume, "pressure": pressure});
        for (section, _, keys) in OURS {
            let fields: BTreeSet<_> =
                shown[section].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(keys.iter().copied().collect::<BTreeSet<_>>(), fields, "{section}");
        }
    }

    #[test]
    fn what_is_no_configuration_is_told() {
        let number = |most: u64| format!("must be a whole number from 0 to {most}");
        for (more, told) in [
            (
                json!({"cpus": {"boot_vcpus": -1, "max_vcpus": 1}}),
                format!("cpus.boot_vcpus is -1, and {}", number(255)),
            ),
            (
                json!({"cpus": {"boot_vcpus": 300, "max_vcpus": 1}}),
                format!("cpus.boot_vcpus is 300, and {}", number(255)),
            ),
            (json!({"cpus": {"max_vcpus": 1}}), "cpus.boot_vcpus is missing".to_owned()),
            (
                json!({"memory": {"size": "512M"}}),
                format!(r#"memory.size is "512M", and {}"#, number(u64::MAX)),
            ),
            (
                json!({"memory": {"size": 4096, "shared": "on"}}),
                r#"memory: shared is "on", and must be true or false"#.to_owned(),
            ),
            (
                json!({"memory": {"size": 0, "zones": [{"id": "a", "size": 4096, "prefault": 1}]}}),
                "memory.zones[0]: prefault is 1, and must be true or false".to_owned(),
            ),
            (
                json!({"disks": [{"path": "/a"}, {"path": 7}]}),
                "disks[1].path is 7, and must be a path".to_owned(),
            ),
            (
                json!({"serial": {"mode": "Loud"}}),
                r#"serial.mode is "Loud", and must be one of Off, Null, Tty, Pty, File, Socket"#.to_owned(),
            ),
            (
                json!({"pm_memory": 7}),
                "pm_memory is 7, and must be an object, or a list of objects".to_owned(),
            ),
            (json!({"pm_memory": {"size": 2 << 20}}), "pm_memory.pool is missing".to_owned()),
            (
                json!({"pm_memory": [{"pool": "/p", "size": 2 << 20, "near": "a"}]}),
                format!(r#"pm_memory[0].near is "a", and {}"#, number(u32::MAX.into())),
            ),
            (
                json!({"pm_volumes": [{"pool": "/p", "name": "a", "size": "all"}]}),
                r#"pm_volumes[0].size is "all", and must be a whole number of bytes, or "remaining""#
                    .to_owned(),
            ),
        ] {
            assert_eq!(error(with(more)), told);
        }
        assert_eq!(error(json!({})), "payload is missing");
        assert_eq!(
            error(with(json!({"memory": {"size": 3}}))),
            "--memory: size is 3 bytes, which is not a multiple of 4 KiB"
        );
        assert!(error(json!({"payload": {}})).starts_with("--kernel is missing"));
    }

    /// Any JSON under names that are known, and some that are not.
    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z/]{0,8}".prop_map(Value::from),
        ];
        let name = prop_oneof![
            prop::sample::select(SECTIONS.map(|(name, _)| name.to_owned()).to_vec()),
            prop::sample::select(memory::SYNTAX.keys).prop_map(str::to_owned),
            prop::sample::select(vec!["zones", "numa", "net", "boot_vcpus", "kernel", "pm_memory", "x"])
                .prop_map(str::to_owned),
        ];
        leaf.prop_recursive(4, 48, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map(name.clone(), inner, 0..6)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_json_panics(json in anything()) {
            if let Value::Object(fields) = json {
                let _ = VmConfig::from_json(fields);
            }
        }
    }
}
