//! Tests that compare docs/reference/openapi.json with the calls of the server and the types of its
//! JSON.

use std::collections::BTreeSet;
use std::fmt::Debug;

use foreshore::api::{MemoryAnswer, PoolsAnswer, VolumesAnswer, call_names};
use foreshore::config::{PmMemoryConfig, PmVolumeConfig, PressureConfig, SWITCHES, VmConfig};
use foreshore::governor::info::{GovernedZoneInfo, PressureChange, PressureInfo, RecordingInfo};
use foreshore::vm::decision::{
    DecisionInfo, DecisionInput, DecisionSizes, DecisionTarget, ReportDigest,
};
use foreshore::vm::request::{
    BalloonInfo, GrowPoolRequest, PoolInfo, VmInfo, VolumeInfo, ZoneInfo,
};
use foreshore_devices::events::Event;
use foreshore_devices::volume::kernel_gate::GuestKernel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::calls::Api;
use crate::names::of_kind;
use crate::verdict::Verdict;

fn document() -> Value {
    serde_json::from_str(include_str!("../../../docs/reference/openapi.json")).expect("JSON")
}

fn names(object: &Value) -> BTreeSet<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn described_calls_equal_those_of_the_server() {
    let document = document();
    let paths = &document["paths"];
    let described: BTreeSet<_> =
        names(paths).into_iter().map(|path| path.trim_start_matches('/')).collect();
    assert_eq!(described, call_names().into_iter().collect());
    Api::run(async |api| {
        for call in described {
            let described = &paths[&format!("/{call}")];
            for (method, name) in [("GET", "get"), ("PUT", "put")] {
                let tried = api.attempt(method, call).await;
                let mut answered: BTreeSet<_> = tried.statuses.iter().map(u16::to_string).collect();
                let expected = match tried.verdict {
                    Verdict::NotThere(_) => None,
                    Verdict::Refused(_) => Some(answered),
                    // Invalid requests must have a documented status too.
                    _ => {
                        answered.insert("default".to_owned());
                        Some(answered)
                    }
                };
                let statuses = described.get(name).map(|operation| names(&operation["responses"]));
                let statuses: Option<BTreeSet<_>> =
                    statuses.map(|all| all.into_iter().map(str::to_owned).collect());
                assert_eq!(statuses, expected, "{method} {call}");
            }
        }
    });
}

/// Example value with all fields of a schema.
fn sample(document: &Value, schema: &Value) -> Value {
    if let Some(example) = schema.get("example") {
        return example.clone();
    }
    if let Some(path) = schema.get("$ref") {
        let path = path
            .as_str()
            .and_then(|path| path.strip_prefix('#'))
            .expect("a schema of this document");
        return sample(
            document,
            document.pointer(path).unwrap_or_else(|| panic!("no schema {path}")),
        );
    }
    if let Some(values) = schema.get("enum") {
        return values[0].clone();
    }
    match schema["type"].as_str() {
        Some("object") => {
            let properties = schema["properties"].as_object().expect("properties");
            properties
                .iter()
                .map(|(name, schema)| (name.clone(), sample(document, schema)))
                .collect()
        }
        Some("array") => json!([sample(document, &schema["items"])]),
        Some("integer") => json!(1),
        Some("boolean") => json!(true),
        Some("string") => json!("text"),
        other => panic!("{other:?} in {schema}"),
    }
}

/// Names of a struct's fields, including fields that JSON omits if they are empty.
fn fields(value: &impl Debug) -> BTreeSet<String> {
    let lines = format!("{value:#?}");
    let fields = lines.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    fields.map(|(name, _)| name).filter(|name| !name.starts_with(' ')).map(str::to_owned).collect()
}

/// Checks that a type and its schema have the same fields.
#[track_caller]
fn check<T: Serialize + DeserializeOwned + Debug>(schema: &str) {
    let document = document();
    let described = &document["components"]["schemas"][schema];
    let whole = sample(&document, described);
    let read: T = serde_json::from_value(whole.clone())
        .unwrap_or_else(|error| panic!("{schema}: {error}: {whole}"));
    assert_eq!(serde_json::to_value(&read).unwrap(), whole, "{schema}: something is not read");
    let described_fields = names(&described["properties"]).into_iter().map(str::to_owned).collect();
    assert_eq!(fields(&read), described_fields, "{schema}");
    // The required fields are sufficient to parse the type.
    let required: BTreeSet<_> =
        described["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let least: Map<_, _> = whole
        .as_object()
        .unwrap()
        .clone()
        .into_iter()
        .filter(|(name, _)| required.contains(&**name))
        .collect();
    assert!(
        serde_json::from_value::<T>(Value::Object(least)).is_ok(),
        "{schema}: more is required"
    );
}

#[test]
fn schemas_match_the_types_of_bodies_and_answers() {
    check::<BalloonInfo>("BalloonInfo");
    check::<GrowPoolRequest>("GrowPoolRequest");
    check::<GuestKernel>("GuestKernel");
    check::<PmMemoryConfig>("PmMemoryConfig");
    check::<PmVolumeConfig>("PmVolumeConfig");
    check::<PressureConfig>("PressureConfig");
    check::<MemoryAnswer>("MemoryAnswer");
    check::<ZoneInfo>("ZoneInfo");
    check::<VolumesAnswer>("VolumesAnswer");
    check::<VolumeInfo>("VolumeInfo");
    check::<PoolsAnswer>("PoolsAnswer");
    check::<PoolInfo>("PoolInfo");
    check::<PressureInfo>("PressureInfo");
    check::<GovernedZoneInfo>("GovernedZone");
    check::<DecisionInfo>("Decision");
    check::<DecisionInput>("DecisionInput");
    check::<ReportDigest>("Report");
    check::<DecisionSizes>("DecisionSizes");
    check::<DecisionTarget>("DecisionTarget");
    check::<RecordingInfo>("Recording");
    check::<PressureChange>("PressureChange");
}

/// Generated clients can then detect a misspelled key before the server refuses it.
#[test]
fn strict_sections_declare_no_additional_properties() {
    let document = document();
    let with_another = |schema: &str| {
        let described = &document["components"]["schemas"][schema];
        assert_eq!(described["additionalProperties"], json!(false), "{schema}");
        let mut object = sample(&document, described);
        object["another"] = json!(1);
        object
    };
    for (section, schema, value) in [
        ("pm_memory", "PmMemoryConfig", json!([with_another("PmMemoryConfig")])),
        ("pm_volumes", "PmVolumeConfig", json!([with_another("PmVolumeConfig")])),
        ("pressure", "PressureConfig", with_another("PressureConfig")),
    ] {
        let config = json!({"payload": {"kernel": "/k"}, section: value});
        let error =
            VmConfig::from_json(config.as_object().unwrap().clone()).unwrap_err().to_string();
        assert!(error.contains(r#": unknown key "another"; the keys are "#), "{schema}: {error}");
    }
    Api::run(async |api| {
        let body = with_another("PressureChange").to_string();
        let (status, answer) = api.exchange("PUT", "vm.pressure", &body).await;
        assert!(status == 400 && answer.contains("unknown key"), "{answer}");
    });
}

/// For Cloud Hypervisor's sections, the description contains exactly the fields that Foreshore
/// adds.
#[test]
fn added_fields_are_described() {
    let document = document();
    let config =
        VmConfig::from_json(json!({"payload": {"kernel": "/k"}}).as_object().unwrap().clone())
            .unwrap();
    let info = json!({"config": config, "state": "Running", "memory_actual_size": 1});
    let info: VmInfo = serde_json::from_value(info).unwrap();
    // In place of a flattened section, its keys appear.
    let mut keys = fields(&config);
    assert!(keys.remove("switches"));
    keys.extend(SWITCHES.iter().map(|switch| switch.key.to_owned()));
    for (schema, fields) in [("VmConfig", keys), ("VmInfo", fields(&info))] {
        let theirs: BTreeSet<_> = of_kind("field")
            .filter_map(|(name, _)| name.strip_prefix(schema)?.strip_prefix('.'))
            .collect();
        let ours: BTreeSet<_> =
            fields.iter().map(String::as_str).filter(|field| !theirs.contains(field)).collect();
        assert_eq!(
            names(&document["components"]["schemas"][schema]["properties"]),
            ours,
            "{schema}"
        );
    }
}

#[test]
fn events_match_their_description() {
    let document = document();
    let described = sample(&document, &document["components"]["schemas"]["Event"]);
    let (events, _runtime) = (foreshore_devices::events::Events::start(), ());
    let mut watcher = events.watch();
    events.emit(Event::VmBooted);
    let seen =
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(watcher.next());
    let Some(foreshore_devices::events::WatcherItem::Event(event)) = seen else {
        panic!("{seen:?}")
    };
    let event = serde_json::to_value(&*event).unwrap();
    assert_eq!(names(&event), names(&described));
    assert_eq!(names(&event["timestamp"]), names(&described["timestamp"]));
}
