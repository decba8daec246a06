//! Tests the JSON parser with the fields of a configuration.

use foreshore::config::VmConfig;
use foreshore_config::JsonError;
use serde_json::{Map, Value, json};

use crate::calls::Json;
use crate::names::{of_kind, samples};
use crate::verdict::{Verdict, of_json_error};

/// Place of a schema in the configuration, and the sections that it requires.
struct Place {
    schema: &'static str,
    /// Path (RFC 6901) of an object that contains its required fields.
    path: &'static str,
    /// Sections that must be in the configuration.
    base: Json,
}

const PLACES: &[Place] = &[
    Place { schema: "VmConfig", path: "", base: || json!({}) },
    Place { schema: "PayloadConfig", path: "/payload", base: || json!({}) },
    Place { schema: "CpusConfig", path: "/cpus", base: || json!({}) },
    Place { schema: "CpuFeatures", path: "/cpus/features", base: || cpus(json!({"features": {}})) },
    Place {
        schema: "CpuTopology",
        path: "/cpus/topology",
        base: || cpus(json!({"topology": topology()})),
    },
    Place {
        schema: "CpuAffinity",
        path: "/cpus/affinity/0",
        base: || cpus(json!({"affinity": [{"vcpu": 0, "host_cpus": [0]}]})),
    },
    Place {
        schema: "MemoryConfig",
        path: "/memory",
        base: || json!({"memory": {"size": HALF_GIB}}),
    },
    Place { schema: "MemoryZoneConfig", path: "/memory/zones/0", base: || zones("z") },
    Place { schema: "PlatformConfig", path: "/platform", base: || json!({"platform": {}}) },
    Place { schema: "DiskConfig", path: "/disks/0", base: || json!({"disks": [{"path": "/d"}]}) },
    Place { schema: "NetConfig", path: "/net/0", base: || json!({"net": [{"tap": "t"}]}) },
    Place { schema: "RngConfig", path: "/rng", base: || json!({"rng": {"src": "/dev/urandom"}}) },
    Place { schema: "BalloonConfig", path: "/balloon", base: || json!({"balloon": {"size": 0}}) },
    Place { schema: "PmemConfig", path: "/pmem/0", base: || json!({"pmem": [{"file": "/p"}]}) },
    Place {
        schema: "ConsoleConfig",
        path: "/console",
        base: || json!({"console": {"mode": "Off"}}),
    },
    Place { schema: "SerialConfig", path: "/serial", base: || json!({"serial": {"mode": "Off"}}) },
    Place {
        schema: "VsockConfig",
        path: "/vsock",
        base: || json!({"vsock": {"cid": 3, "socket": "/s"}}),
    },
    Place {
        schema: "LandlockConfig",
        path: "/landlock_rules/0",
        base: || json!({"landlock_rules": [{"path": "/l", "access": "rw"}]}),
    },
    Place { schema: "NumaConfig", path: "/numa/0", base: nodes },
    Place { schema: "NumaDistance", path: "/numa/0/distances/0", base: nodes },
];

/// Additional fields that a field requires.
const WITH: &[(&str, Json)] = &[
    ("ConsoleConfig.file", || json!({"mode": "File"})),
    ("ConsoleConfig.socket", || json!({"mode": "Socket"})),
    ("CpuTopology.cores_per_die", || json!({"threads_per_core": 2})),
    ("CpuTopology.dies_per_package", || json!({"cores_per_die": 2})),
    ("CpuTopology.packages", || json!({"cores_per_die": 2})),
    ("CpuTopology.threads_per_core", || json!({"cores_per_die": 2})),
    ("MemoryConfig.hotplug_size", || json!({"hotplug_method": "VirtioMem"})),
    (
        "MemoryConfig.hotplugged_size",
        || json!({"hotplug_method": "VirtioMem", "hotplug_size": 1u64 << 30}),
    ),
    ("MemoryConfig.hugepage_size", || json!({"hugepages": true})),
    ("MemoryConfig.zones", || json!({"size": 0})),
    ("MemoryZoneConfig.hotplugged_size", || json!({"hotplug_size": 1u64 << 30})),
    ("MemoryZoneConfig.hugepage_size", || json!({"hugepages": true})),
    ("NetConfig.host_mac", || json!({"ip": "10.0.0.1", "mask": "255.0.0.0"})),
    ("NetConfig.ip", || json!({"mask": "255.0.0.0"})),
    ("NetConfig.mask", || json!({"ip": "10.0.0.1"})),
    ("PayloadConfig.firmware", || json!({"kernel": null})),
    ("SerialConfig.file", || json!({"mode": "File"})),
    ("SerialConfig.socket", || json!({"mode": "Socket"})),
];

const HALF_GIB: u64 = 512 << 20;

fn topology() -> Value {
    json!({"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1})
}

fn cpus(more: Value) -> Value {
    let mut cpus = json!({"boot_vcpus": 2, "max_vcpus": 4});
    merge(&mut cpus, more);
    json!({ "cpus": cpus })
}

fn zones(id: &str) -> Value {
    json!({"memory": {"size": 0, "hotplug_method": "VirtioMem", "zones": [{"id": id, "size": HALF_GIB}]}})
}

/// Two nodes, each with memory and vCPUs.
fn nodes() -> Value {
    let zones = ["a", "b"].map(|id| json!({"id": id, "size": HALF_GIB}));
    let distances = json!([{"destination": 1, "distance": 21}]);
    let near =
        json!({"guest_numa_id": 0, "cpus": [0], "memory_zones": ["a"], "distances": distances});
    let far = json!({"guest_numa_id": 1, "cpus": [1, 2, 3], "memory_zones": ["b"]});
    json!({"memory": {"size": 0, "zones": zones}, "numa": [near, far]})
}

fn merge(object: &mut Value, more: Value) {
    let more = more.as_object().expect("an object").clone();
    object.as_object_mut().expect("an object").extend(more);
}

/// Configuration that contains the place for the fields of a schema.
fn base(place: &Place) -> Map<String, Value> {
    let mut config =
        json!({"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 4}});
    merge(&mut config, (place.base)());
    config.as_object().expect("an object").clone()
}

/// Parses a configuration. Returns it as JSON, and the warnings.
fn shown(config: Map<String, Value>) -> Result<(Value, Vec<String>), JsonError> {
    let (config, warnings) = VmConfig::from_json_warned(config)?;
    Ok((serde_json::to_value(&config).expect("a configuration is JSON"), warnings))
}

/// Beginning of the flag for a field, for example `--disk` for `/disks/0`.
fn flag_of(place: &Place, field: &str) -> String {
    let section = place.path.split('/').nth(1).unwrap_or(field);
    format!("--{}", section.trim_end_matches('s'))
}

fn object_of<'a>(config: &'a mut Value, place: &Place) -> &'a mut Map<String, Value> {
    config.pointer_mut(place.path).and_then(Value::as_object_mut).expect("a place")
}

fn attempt(place: &Place, name: &str, field: &str, value: &Value) -> Verdict {
    let mut plain = Value::Object(base(place));
    let object = plain.pointer_mut(place.path).expect("a place");
    if let Some((_, with)) = WITH.iter().find(|(with, _)| *with == name) {
        merge(object, with());
    }
    let with = |value: &Value| {
        let mut tried = plain.clone();
        merge(tried.pointer_mut(place.path).expect("a place"), json!({field: value}));
        tried
    };
    let (tried, nonsense) = (with(value), with(&json!("nonsense")));
    object_of(&mut plain, place).remove(field);
    let without = shown(plain.as_object().expect("an object").clone());
    match shown(tried.as_object().expect("an object").clone()) {
        Ok((tried, _)) if without.is_ok_and(|(plain, _)| plain == tried) => {
            // If the field is known, it refuses a nonsensical value.
            let is_known = shown(nonsense.as_object().expect("an object").clone()).is_err();
            let unknown = || Verdict::NotThere("it is passed over".to_owned());
            if is_known { Verdict::without_effect() } else { unknown() }
        }
        Ok((_, warnings)) => {
            Verdict::of_warnings(&warnings, &flag_of(place, field)).unwrap_or(Verdict::Implemented)
        }
        Err(error) => of_json_error(&error)
            .unwrap_or_else(|| panic!("{name}: {tried} is not a valid sample: {error}")),
    }
}

fn parse(name: &str, text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {text:?}: {error}"))
}

fn verdict(place: &Place, name: &str, field: &str, text: &'static str) -> Verdict {
    let samples = samples(text);
    let verdict = attempt(place, name, field, &parse(name, samples.other));
    if let (Verdict::Refused(_), Some(default)) = (&verdict, samples.default)
        && !matches!(attempt(place, name, field, &parse(name, default)), Verdict::Refused(_))
    {
        return verdict.and(&format!("`{default}` is accepted"));
    }
    verdict
}

/// Verdict on a field in a configuration. `None` if the schema is not part of a configuration.
pub(crate) fn of_config(name: &str, text: &'static str) -> Option<Verdict> {
    let (schema, field) = name.split_once('.').expect("a schema and a field");
    let place = PLACES.iter().find(|place| place.schema == schema)?;
    Some(verdict(place, name, field, text))
}

/// Pages in docs/ that describe the fields of a schema.
const PAGES: &[(&str, &[&str])] = &[
    ("BalloonConfig", &["balloon"]),
    ("ConsoleConfig", &["consoles"]),
    ("CpuAffinity", &["cpus"]),
    ("CpuFeatures", &["cpus"]),
    ("CpuTopology", &["cpus"]),
    ("CpusConfig", &["cpus"]),
    ("DiskConfig", &["disks"]),
    ("MemoryConfig", &["memory"]),
    ("MemoryZoneConfig", &["memory"]),
    ("NetConfig", &["net"]),
    ("LandlockConfig", &["confinement"]),
    ("NumaConfig", &["memory"]),
    ("NumaDistance", &["memory"]),
    ("PayloadConfig", &["boot"]),
    ("PlatformConfig", &["boot"]),
    ("PmemConfig", &["pmem"]),
    ("RngConfig", &["boot"]),
    ("SerialConfig", &["consoles"]),
    (
        "VmConfig",
        &[
            "balloon",
            "boot",
            "confinement",
            "consoles",
            "cpus",
            "disks",
            "memory",
            "net",
            "pmem",
            "pvpanic",
            "vsock",
            "watchdog",
        ],
    ),
    ("VsockConfig", &["vsock"]),
];

/// Returns true if a page contains `word` in code: between backticks, or in a code block.
fn has_in_code(page: &str, word: &str) -> bool {
    let has = |code: &str| {
        code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|part| part == word)
    };
    page.lines().any(|line| match line.strip_prefix("    ") {
        Some(code) => has(code),
        None => line.split('`').skip(1).step_by(2).any(has),
    })
}

/// A verdict does not describe what a field does, so its page must describe it.
#[test]
fn every_implemented_field_is_documented() {
    let mut missing = Vec::new();
    for (name, text) in of_kind("field") {
        let Some(Verdict::Implemented) = of_config(name, text.expect("values to try it with"))
        else {
            continue;
        };
        let (schema, field) = name.split_once('.').unwrap();
        let (_, pages) =
            PAGES.iter().find(|(of, _)| *of == schema).unwrap_or_else(|| panic!("{name}"));
        let is_there = pages.iter().any(|page| {
            let path = format!("{}/../docs/reference/{page}.md", env!("CARGO_MANIFEST_DIR"));
            has_in_code(&std::fs::read_to_string(&path).expect(&path), field)
        });
        if !is_there {
            missing.push(name);
        }
    }
    assert_eq!(missing, Vec::<&str>::new());
}

/// A client would not notice that a field is ignored. Therefore, every field of Cloud Hypervisor is
/// either implemented or refused.
#[test]
fn no_field_is_ignored() {
    let fields = of_kind("field").filter_map(|(name, text)| Some((name, of_config(name, text?)?)));
    let passed_over =
        fields.filter(|(_, verdict)| matches!(verdict, Verdict::NotThere(_))).map(|(name, _)| name);
    assert_eq!(passed_over.collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Configuration as returned by `vm.info` of Cloud Hypervisor 54. It contains every field that is
/// not optional. Clients copy a VM by passing this configuration to another VMM. Its fields
/// `disable_io_uring`, `disable_aio` and `gdb` are not in Cloud Hypervisor's API description.
fn as_it_is_shown() -> Value {
    json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2, "kvm_hyperv": false, "max_phys_bits": 46, "features": {"amx": false},
                 "nested": true, "core_scheduling": "Vm", "profile": "Host"},
        "memory": {"size": HALF_GIB, "mergeable": false, "hotplug_method": "Acpi", "shared": false, "hugepages": false,
                   "prefault": false, "reserve": false, "thp": true},
        "payload": {"kernel": "/k", "cmdline": "quiet"},
        "rate_limit_groups": null,
        "disks": [{"path": "/d", "readonly": false, "direct": false, "num_queues": 1, "queue_size": 128,
                   "vhost_user": false, "disable_io_uring": false, "disable_aio": false, "backing_files": false,
                   "sparse": true, "image_type": "Raw", "lock_granularity": "ByteRange", "id": "_disk0",
                   "pci_segment": 0}],
        "net": [{"num_queues": 2, "queue_size": 256, "vhost_user": false, "vhost_mode": "Client", "offload_tso": true,
                 "offload_ufo": true, "offload_csum": true, "mac": "02:00:00:00:00:02", "fds": [-1], "id": "_net1",
                 "pci_segment": 0}],
        "rng": {"src": "/dev/urandom", "id": "__rng", "pci_segment": 0},
        "balloon": {"size": 0, "deflate_on_oom": false, "free_page_reporting": false,
                    "id": "__balloon", "pci_segment": 0},
        "generic_vhost_user": null, "fs": null,
        "pmem": [{"file": "/p", "discard_writes": false, "id": "_pmem2", "pci_segment": 0}],
        "serial": {"mode": "Null"},
        "console": {"mode": "Off", "id": "__console", "pci_segment": 0},
        "debug_console": {"mode": "Off", "iobase": 233},
        "devices": null, "user_devices": null, "vdpa": null,
        "vsock": {"cid": 3, "socket": "/s", "id": "_vsock3", "pci_segment": 0},
        "pvpanic": false, "iommu": false, "numa": null, "watchdog": false, "rtc": null, "gdb": false,
        "pci_segments": null,
        "platform": {"num_pci_segments": 1, "iommu_address_width_bits": 64, "iommufd": false, "vfio_p2p_dma": true},
        "tpm": null, "landlock_enable": false, "landlock_rules": null
    })
}

#[test]
fn configuration_from_cloud_hypervisor_is_accepted() {
    let (shown, warnings) = shown(as_it_is_shown().as_object().unwrap().clone()).unwrap();
    assert_eq!(shown["disks"][0]["id"], "_disk0");
    // Inherited descriptors are valid only in another process.
    assert!(
        matches!(&warnings[..], [one] if one.starts_with("--net: fds in JSON")),
        "{warnings:?}"
    );
    let on = json!({"debug_console": {"mode": "Tty", "iobase": 233}});
    let mut other = as_it_is_shown();
    merge(&mut other, on);
    assert!(VmConfig::from_json(other.as_object().unwrap().clone()).is_err());
}

/// Fields of Cloud Hypervisor cause no warning about unknown fields, because such a warning looks
/// like a typing error.
#[test]
fn no_known_field_causes_a_warning() {
    for (name, text) in of_kind("field") {
        let (schema, field) = name.split_once('.').unwrap();
        let Some(place) = PLACES.iter().find(|place| place.schema == schema) else { continue };
        let samples = samples(text.unwrap());
        for value in [Some(samples.other), samples.default].into_iter().flatten() {
            let mut tried = Value::Object(base(place));
            object_of(&mut tried, place).insert(field.to_owned(), parse(name, value));
            let warnings = shown(tried.as_object().unwrap().clone())
                .map_or(Vec::new(), |(_, warnings)| warnings);
            assert!(
                !warnings.iter().any(|warning| warning.contains("unknown field")),
                "{name}: {warnings:?}"
            );
        }
    }
}

/// Clients write out default values.
#[test]
fn defaults_of_fields_are_accepted() {
    for (name, text) in of_kind("field") {
        let (schema, field) = name.split_once('.').unwrap();
        let Some(place) = PLACES.iter().find(|place| place.schema == schema) else { continue };
        let Some(default) = samples(text.unwrap()).default else { continue };
        let verdict = attempt(place, name, field, &parse(name, default));
        assert!(!matches!(verdict, Verdict::Refused(_)), "{name}: {default}: {verdict:?}");
    }
}
