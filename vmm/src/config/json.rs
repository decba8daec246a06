//! JSON form of a VM's configuration, as the API accepts it.
//!
//! Fields have the names that Cloud Hypervisor uses. Unsupported fields are refused with the same
//! reason as the flag. Neutral values are accepted, because clients write out defaults. Unknown
//! fields are ignored with a warning, as in Cloud Hypervisor. In sections that only Foreshore has,
//! they are refused.

use foreshore_config::{JsonError, JsonValue, Walk};
use serde_json::{Map, Value};

use super::{ConsoleConfig, PmMemoryConfig, VmConfig, unsupported};

impl VmConfig {
    /// Reads and validates a configuration.
    pub fn from_json(json: Map<String, Value>) -> Result<Self, JsonError> {
        Self::from_json_warned(json).map(|(config, _)| config)
    }

    /// Reads and validates a configuration. Returns it with warnings, including warnings about
    /// ignored fields.
    pub fn from_json_warned(
        mut json: Map<String, Value>,
    ) -> Result<(Self, Vec<String>), JsonError> {
        unsupported::take_sections(&mut json)?;
        let mut walk = Walk::default();
        let config: Self = walk.object(Value::Object(json))?;
        config.validate()?;
        let mut warnings = config.warnings();
        warnings.extend(walk.into_warnings());
        Ok((config, warnings))
    }
}

/// Reads the section of the serial port, which has the same keys as `--console`.
pub(super) fn serial(json: Value, walk: &mut Walk) -> Result<ConsoleConfig, JsonError> {
    walk.named("--serial", |walk| ConsoleConfig::from_json(json, walk))
}

/// Reads the sections of PM zones. A client that supports only one zone sends an object instead of
/// a list.
pub(super) fn one_or_many(json: Value, walk: &mut Walk) -> Result<Vec<PmMemoryConfig>, JsonError> {
    match json {
        Value::Object(_) => PmMemoryConfig::from_json(json, walk).map(|zone| vec![zone]),
        Value::Array(_) => Vec::from_json(json, walk),
        _ => Err(walk.wrong(&json, "an object, or a list of objects")),
    }
}

/// Names of all fields of every section, including refused fields.
#[cfg(test)]
pub(crate) fn fields() -> Vec<(&'static str, Vec<&'static str>)> {
    use super::*;
    use foreshore_config::Object;

    fn of<T: Object>(section: &'static str) -> (&'static str, Vec<&'static str>) {
        let refused = T::REFUSED.iter().copied().flatten().map(|refused| refused.key);
        (section, T::names().into_iter().chain(refused).collect())
    }

    vec![
        of::<PayloadConfig>("payload"),
        of::<CpusConfig>("cpus"),
        of::<MemoryConfig>("memory"),
        of::<BalloonConfig>("balloon"),
        of::<DiskConfig>("disks"),
        of::<NetConfig>("net"),
        of::<ConsoleConfig>("serial"),
        of::<ConsoleConfig>("console"),
        of::<RngConfig>("rng"),
        of::<VsockConfig>("vsock"),
        of::<PmemConfig>("pmem"),
        of::<PlatformConfig>("platform"),
        of::<PmMemoryConfig>("pm_memory"),
        of::<PmVolumeConfig>("pm_volumes"),
        of::<PressureConfig>("pressure"),
        of::<LandlockConfig>("landlock_rules"),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::config::{ConsoleMode, DiskConfig, HotplugMethod, MemoryConfig, test_config};
    use foreshore_config::Object;

    fn read(json: Value) -> Result<VmConfig, JsonError> {
        let Value::Object(fields) = json else { panic!("{json} is not an object") };
        VmConfig::from_json(fields)
    }

    fn error(json: Value) -> String {
        read(json).unwrap_err().to_string()
    }

    /// Valid configuration with additional sections.
    fn with(more: Value) -> Value {
        let mut config = json!({"payload": {"kernel": "/vmlinux"}});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    }

    #[test]
    fn defaults_that_clients_write_out_are_accepted() {
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
        // The configuration is accepted again after serialization.
        let shown = serde_json::to_value(&config).unwrap();
        assert_eq!(read(shown).unwrap(), config);
    }

    /// Clients may send `fds`, because `vm.info` returns it for an interface with inherited
    /// descriptors.
    #[test]
    fn descriptors_of_an_interface_are_ignored_with_a_warning() {
        let read = |nets: Value| {
            let Value::Object(json) = with(json!({ "net": nets })) else { panic!() };
            VmConfig::from_json_warned(json).unwrap()
        };
        let (config, warnings) = read(json!([{"id": "a", "fds": [-1]}, {"id": "b", "fds": [7]}]));
        assert!(config.net.iter().all(|net| net.fds.is_empty()));
        assert!(
            matches!(&warnings[..], [one] if one.starts_with("--net: fds in JSON")),
            "{warnings:?}"
        );
        let (plain, none) = read(json!([{"id": "a"}, {"id": "b", "fds": []}]));
        assert_eq!((plain, none), (config, Vec::new()));
    }

    #[test]
    fn unsupported_fields_are_refused_with_the_reason_of_the_flag() {
        for (more, text) in [
            (json!({"fs": [{"tag": "a", "socket": "/s"}]}), "--fs is not supported by foreshore: "),
            (json!({"net": [{"vhost_user": true}]}), "--net: vhost_user=true is not supported"),
            (json!({"net": [{"fds": ["3"]}]}), "--net: fds=[\"3\"] is not supported"),
            (json!({"tpm": {"socket": "/s"}}), "--tpm is not supported by foreshore: "),
            (json!({"platform": {"num_pci_segments": 2, "uuid": "x"}}), "--platform: uuid="),
            (
                json!({"memory": {"size": 536870912, "shared": true, "mergeable": true}}),
                "--memory: mergeable=on excludes",
            ),
            (
                json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "kvm_hyperv": true}}),
                "--cpus: kvm_hyperv=true is not supported",
            ),
            (
                json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "profile": "Other"}}),
                "--cpus: profile=",
            ),
            (
                json!({"disks": [{"path": "/a"}, {"path": "/b", "iommu": true}]}),
                "--disk: iommu=true",
            ),
            (
                json!({"disks": [{"path": "/a", "rate_limiter_config": {"bandwidth": {"size": 1}}}]}),
                "--disk: rate",
            ),
            (
                json!({"payload": {"kernel": "/k", "igvm": "/i"}}),
                "payload: igvm=\"/i\" is not supported",
            ),
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
    fn unknown_keys_are_refused_only_in_foreshore_sections() {
        let zone = json!({"pool": "/p", "size": 2 << 20, "hugepages": true});
        let keys = "pool, size, id, guest_numa_node, near, read_latency, write_latency, bandwidth, scrub_bandwidth, storage_min, storage_low, storage_high, spill, spill_file, plug_bandwidth";
        let message = format!(r#"--pm-memory: unknown key "hugepages"; the keys are {keys}"#);
        assert_eq!(error(with(json!({ "pm_memory": zone }))), message);
        assert_eq!(error(with(json!({ "pm_memory": [zone] }))), message);
        let volume = |key: &str| json!({"pm_volumes": [{"pool": "/p", "name": "a"}, {"pool": "/p", "name": "b", key: true}]});
        assert!(error(with(volume("read_only"))).starts_with(
            r#"--pm-volume: unknown key "read_only" (did you mean 'readonly'?); the"#
        ));
        assert!(read(with(volume("readonly"))).is_ok());
        assert_eq!(
            error(with(json!({"pressure": {"policy": "psi", "idle": "10s"}}))),
            r#"--pressure: unknown key "idle"; the keys are policy, size, params, rules, dry_run, paused, record, record_size"#
        );
        // Clients written for a later Cloud Hypervisor continue to work.
        let later = json!({"balloon": {"size": 0, "later": 1}, "disks": [{"path": "/d", "later": {}}], "later": [1]});
        assert!(read(with(later)).is_ok());
    }

    #[test]
    fn words_of_flags_are_refused_in_json() {
        let memory =
            |word: &str| with(json!({"memory": {"size": 512 << 20, "hotplug_method": word}}));
        let console = |word: &str| with(json!({"console": {"mode": word}}));
        let scheduling = |word: &str| {
            with(json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "core_scheduling": word}}))
        };
        let image = |word: &str| with(json!({"disks": [{"path": "/d", "image_type": word}]}));
        for (config, expected) in [
            (
                memory("virtio-mem"),
                "memory.hotplug_method is \"virtio-mem\", and must be Acpi or VirtioMem",
            ),
            (memory("acpi"), "memory.hotplug_method is \"acpi\", and must be Acpi or VirtioMem"),
            (scheduling("vcpu"), "cpus.core_scheduling is \"vcpu\", and must be Vm, Vcpu or Off"),
            (
                console("off"),
                "console.mode is \"off\", and must be Off, Null, Tty, Pty, File or Socket",
            ),
            (image("fixed-vhd"), "disks[0].image_type is \"fixed-vhd\", and must be Raw"),
            (image("RAW"), "disks[0].image_type is \"RAW\", and must be Raw"),
        ] {
            let message = error(config);
            assert!(message.starts_with(expected), "{message}");
        }
        for config in [
            memory("VirtioMem"),
            scheduling("Vcpu"),
            console("Off"),
            image("raw"),
            image("unknown"),
        ] {
            assert!(read(config.clone()).is_ok(), "{config}");
        }
        for (word, name) in
            [("qcow2", "qcow2"), ("vhd", "vhd"), ("vhdx", "vhdx"), ("FixedVhd", "vhd")]
        {
            let refused = format!("--disk: image_type={name} is not supported by foreshore");
            assert!(error(image(word)).starts_with(&refused), "{word}");
        }
    }

    #[test]
    fn unknown_fields_are_named_by_their_path() {
        let config = json!({
            "payload": {"kernel": "/k", "initrd": "/i"},
            "cpus": {"boot": 1, "boot_vcpus": 1, "max_vcpus": 1, "features": {"avx": true}},
            "memory": {"size": 0, "hotplug_methd": "VirtioMem", "zones": [{"id": "a", "size": 4096, "fle": "/f"}]},
            "disks": [{"path": "/a"}, {"path": "/b", "read_only": true}],
            "numa": [{"guest_numa_id": 0, "cpu": [0]}],
        });
        let mut walk = Walk::default();
        let read = walk.object::<VmConfig>(config);
        read.unwrap();
        let warnings = walk.into_warnings();
        let names = "cpus.boot, cpus.features.avx, disks[1].read_only, memory.hotplug_methd, memory.zones[0].fle, \
                     numa[0].cpu, payload.initrd";
        let mut named: Vec<_> =
            warnings[0].strip_prefix("Ignored unknown fields: ").unwrap().split(", ").collect();
        named.sort_unstable();
        assert_eq!(named, names.split(", ").collect::<Vec<_>>());
    }

    #[test]
    fn configuration_that_is_shown_has_no_unknown_field() {
        let mut config = test_config();
        config.disks = vec![DiskConfig::parse("path=/d,readonly=on").unwrap()];
        let Value::Object(shown) = serde_json::to_value(&config).unwrap() else { panic!() };
        assert_eq!(VmConfig::from_json_warned(shown).unwrap(), (config, Vec::new()));
    }

    #[test]
    fn invalid_configuration_is_reported() {
        let number = |most: u64| format!("must be a whole number from 0 to {most}");
        for (more, message) in [
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
                r#"memory.shared is "on", and must be true or false"#.to_owned(),
            ),
            (
                json!({"memory": {"size": 0, "zones": [{"id": "a", "size": 4096, "prefault": 1}]}}),
                "memory.zones[0].prefault is 1, and must be true or false".to_owned(),
            ),
            (
                json!({"disks": [{"path": "/a"}, {"path": 7}]}),
                "disks[1].path is 7, and must be a path".to_owned(),
            ),
            (
                json!({"serial": {"mode": "Loud"}}),
                r#"serial.mode is "Loud", and must be Off, Null, Tty, Pty, File or Socket"#.to_owned(),
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
            assert_eq!(error(with(more)), message);
        }
        assert_eq!(error(json!({})), "payload is missing");
        assert_eq!(
            error(with(json!({"memory": {"size": 3}}))),
            "--memory: size is 3 bytes, which is not a multiple of 4 KiB"
        );
        assert!(error(json!({"payload": {}})).starts_with("--kernel is missing"));
    }

    /// Arbitrary JSON with known and unknown names.
    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z/]{0,8}".prop_map(Value::from),
        ];
        let name = prop_oneof![
            prop::sample::select(VmConfig::names()).prop_map(str::to_owned),
            prop::sample::select(MemoryConfig::names()).prop_map(str::to_owned),
            prop::sample::select(vec![
                "zones",
                "numa",
                "net",
                "boot_vcpus",
                "kernel",
                "pm_memory",
                "x"
            ])
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
