//! Tests that compare docs/reference/api.md with the answers: examples, fields, and names of
//! states.

use foreshore_config::Object;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::api::PoolsAnswer;
use crate::governor::info::{PressureChange, RecordingInfo, RecordingState};
use crate::vm::decision::{
    DecisionInfo, DecisionInput, DecisionSizes, DecisionTarget, Outcome, ReportDigest,
};
use balloon::StorageSpace;
use balloon::governor::AgentState;

const DOCUMENT: &str = include_str!("../../../../docs/reference/api.md");

/// Text of the section about a call.
fn section(call: &str) -> &'static str {
    let heading = format!("\n## {call}\n");
    let (_, rest) = DOCUMENT.split_once(&heading).unwrap_or_else(|| panic!("no section {call}"));
    rest.split_once("\n## ").map_or(rest, |(section, _)| section)
}

/// Examples in a section, which are indented by four spaces.
fn examples(section: &str) -> Vec<String> {
    let mut examples = vec![String::new()];
    for line in section.lines() {
        match line.strip_prefix("    ") {
            Some(line) => *examples.last_mut().unwrap() += line,
            None => examples.push(String::new()),
        }
    }
    examples.retain(|example| !example.is_empty());
    examples
}

/// Calls in a section without their comments.
fn calls(section: &str) -> Vec<String> {
    let mut calls: Vec<String> = Vec::new();
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    let mut in_call = false;
    for line in lines {
        if line.starts_with("curl ") {
            calls.push(String::new());
        } else if !in_call {
            continue;
        }
        in_call = line.ends_with('\\');
        *calls.last_mut().unwrap() += line.trim_end_matches('\\');
    }
    calls
}

/// Checks that an example contains every field.
#[track_caller]
fn assert_whole<T: Serialize + DeserializeOwned>(example: &str) {
    let example: Value =
        serde_json::from_str(example).unwrap_or_else(|error| panic!("{error}: {example}"));
    let read: T = serde_json::from_value(example.clone())
        .unwrap_or_else(|error| panic!("{error}: {example}"));
    assert_eq!(serde_json::to_value(read).unwrap(), example);
}

/// Returns true if `answer` has all fields of `example`, with values of the same kinds. Numbers and
/// texts may differ.
fn is_part(example: &Value, answer: &Value) -> bool {
    match (example, answer) {
        (Value::Object(example), Value::Object(answer)) => example
            .iter()
            .all(|(key, value)| answer.get(key).is_some_and(|answer| is_part(value, answer))),
        (Value::Array(example), Value::Array(answer)) => {
            example.iter().all(|value| answer.iter().any(|answer| is_part(value, answer)))
        }
        _ => std::mem::discriminant(example) == std::mem::discriminant(answer),
    }
}

fn decision() -> DecisionInfo {
    let report = ReportDigest {
        seq: 97,
        age_ms: 0,
        monotonic_ms: 1,
        total_bytes: 380 << 20,
        available_bytes: 20 << 20,
        free_bytes: 0,
        swap_used_bytes: 0,
        stall_some_us: 0,
        stall_full_us: 0,
        pswpin: 0,
        pswpout: 0,
    };
    let pm = || "pm".to_owned();
    DecisionInfo {
        seq: 42,
        age_ms: 1250,
        times: 1,
        policy: "psi".to_owned(),
        direction: "grow".to_owned(),
        reason: "low_available".to_owned(),
        limited_by: None,
        near: None,
        wanted_bytes: 256 << 20,
        requested_bytes: 256 << 20,
        change_bytes: 128 << 20,
        available_bytes: Some(20 << 20),
        dry_run: false,
        input: DecisionInput {
            report: Some(report),
            pool_free_bytes: 1 << 30,
            storage: Some(StorageSpace::default()),
            zones: vec![DecisionSizes { zone: pm(), requested_bytes: 0, plugged_bytes: 0 }],
        },
        targets: vec![DecisionTarget { zone: pm(), requested_bytes: 128 << 20 }],
        outcome: Outcome::Reached { after_ms: 85 },
    }
}

#[test]
fn examples_match_the_answers() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Memory {
        zones: Vec<ZoneInfo>,
    }
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Volumes {
        volumes: Vec<VolumeInfo>,
    }
    let [memory] = &examples(section("vm.memory"))[..] else { panic!("not one example") };
    assert_whole::<Memory>(memory);
    let [volumes] = &examples(section("vm.volumes"))[..] else { panic!("not one example") };
    assert_whole::<Volumes>(volumes);
    let [pools] = &examples(section("pool.info"))[..] else { panic!("not one example") };
    assert_whole::<PoolsAnswer>(pools);
    let made =
        examples(section("vm.pressure")).into_iter().filter(|example| example.starts_with('{'));
    let [made, recording] = &made.collect::<Vec<_>>()[..] else { panic!("not two examples") };
    assert_whole::<RecordingInfo>(recording);
    // The example marks omitted fields with "...".
    let made: Value = serde_json::from_str(&made.replace(", ...", "")).unwrap();
    assert!(is_part(&made, &serde_json::to_value(decision()).unwrap()), "{made}");
}

#[test]
fn states_of_the_example_of_a_pool_add_up() {
    let [pools] = &examples(section("pool.info"))[..] else { panic!("not one example") };
    let pools: PoolsAnswer = serde_json::from_str(pools).unwrap();
    for pool in pools.pools {
        let used_bytes = pool.memory_bytes + pool.volume_bytes + pool.scrubbing_bytes;
        let states = pool.free_bytes + used_bytes + pool.retired_bytes + pool.metadata_bytes;
        assert_eq!(states, pool.total_bytes);
        let kept_bytes = pool.reserve_bytes - pool.volume_bytes;
        assert_eq!(pool.lendable_bytes, pool.free_bytes + pool.scrubbing_bytes - kept_bytes);
        let accounts = pool.reserved_bytes + pool.memory_bytes + pool.lendable_bytes;
        assert_eq!(accounts, pool.total_bytes - pool.retired_bytes - pool.metadata_bytes);
    }
}

#[test]
fn fields_of_vm_pressure_match_the_document() {
    let recording = RecordingInfo {
        file: PathBuf::from("/tmp/trace"),
        written_bytes: 0,
        lost_lines: 0,
        status: RecordingState::Recording,
    };
    let answer =
        serde_json::to_value(PressureInfo { recording: Some(recording), ..pressure() }).unwrap();
    let mut fields: Vec<_> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    let (_, table) = section("vm.pressure").split_once("| field | |\n|---|---|\n").unwrap();
    let rows = table.lines().map_while(|line| line.strip_prefix("| ")?.split_once(" | "));
    let mut documented: Vec<_> =
        rows.flat_map(|(names, _)| names.split(", ").map(|name| name.trim_matches('`'))).collect();
    documented.sort_unstable();
    assert_eq!(documented, fields);
}

#[test]
fn details_of_vm_pressure_match_the_document() {
    let mut governed = crate::governor::fake::fixture("psi", true);
    governed.greet();
    // The memory plugged after the first report is online in the second report.
    governed.report(20);
    governed.report(200);
    let info = governed.core.info(0, balloon::TimeMs(100));
    let mut details: Vec<_> = info.details.keys().map(String::as_str).chain(["source"]).collect();
    details.sort_unstable();
    let (_, table) = section("vm.pressure").split_once("| in `details` | |\n|---|---|\n").unwrap();
    let rows = table.lines().map_while(|line| line.strip_prefix("| ")?.split_once(" | "));
    let mut documented: Vec<_> =
        rows.flat_map(|(names, _)| names.split(", ").map(|name| name.trim_matches('`'))).collect();
    documented.sort_unstable();
    assert_eq!(documented, details);
}

/// Runs the calls in the order in which the document lists them. The objects in the examples exist,
/// so each call should succeed.
#[test]
fn calls_of_the_document_are_answered() {
    run(async |mut fixture| {
        let mut governed = crate::governor::fake::fixture("psi", true);
        let mut changed = PressureChange::default();
        for text in calls(section("vm.pressure")) {
            let (_, call) = text.split_once("http://localhost/api/v1/").unwrap();
            let call = call.split([' ', '\'']).next().unwrap();
            let body =
                text.split_once("-d '").map_or("", |(_, body)| body.strip_suffix('\'').unwrap());
            let (method, status) =
                if text.contains(" -X PUT ") { ("PUT", 204) } else { ("GET", 200) };
            assert_eq!(fixture.call(method, call, body).await.0, status, "{text}");
            let asked = fixture.asked.recv().await.unwrap();
            if body.is_empty() {
                continue;
            }
            let change: PressureChange = serde_json::from_str(body).unwrap();
            assert!(asked.contains(&format!("{change:?}")), "{asked}");
            governed
                .core
                .change(&change, balloon::TimeMs(0))
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            note(&mut changed, change);
        }
        let shown = serde_json::to_value(&changed).unwrap();
        let mut names = PressureChange::names();
        names.retain(|name| shown.get(name).is_none());
        assert!(names.is_empty(), "no example has {names:?}");
    });
}

/// Merges `one` into `all`.
fn note(all: &mut PressureChange, one: PressureChange) {
    let PressureChange { policy, size, dry_run, pause, resume, zone, params, rules } =
        std::mem::take(all);
    *all = PressureChange {
        policy: one.policy.or(policy),
        size: one.size.or(size),
        dry_run: one.dry_run.or(dry_run),
        pause: one.pause.or(pause),
        resume: one.resume.or(resume),
        zone: one.zone.or(zone),
        params: one.params.or(params),
        rules: one.rules.or(rules),
    };
}

/// Checks that the section mentions the serialized name of each state.
#[track_caller]
fn assert_named<T: Serialize>(call: &str, statuses: &[T]) {
    for status in statuses {
        let answer = serde_json::to_value(status).unwrap();
        let state = answer["state"].as_str().unwrap_or_else(|| panic!("{answer} has no state"));
        assert!(
            section(call).contains(&format!("`{state}`")),
            "{call} does not document {state:?}"
        );
    }
}

#[test]
fn states_have_the_names_of_the_document() {
    let why = || "why".to_owned();
    let (moved_bytes, after_ms, by) = (0, 0, 1);
    assert_named(
        "vm.memory",
        &[
            ResizeStatus::Reached,
            ResizeStatus::Pending,
            ResizeStatus::NoDriver,
            ResizeStatus::Stuck(why()),
        ],
    );
    assert_named("vm.volumes", &[VolumeStatus::Ok, VolumeStatus::Failed(why())]);
    assert_named("pool.info", &[PoolStatus::Ok, PoolStatus::ReadOnly(why())]);
    assert_named(
        "vm.pressure",
        &[RecordingState::Recording, RecordingState::Full, RecordingState::Failed(why())],
    );
    assert_named(
        "vm.pressure",
        &[
            Outcome::None,
            Outcome::DryRun,
            Outcome::Pending { moved_bytes },
            Outcome::Stuck { moved_bytes },
            Outcome::Reached { after_ms },
            Outcome::Partly { moved_bytes, after_ms, by: Some(by), lack: None },
            Outcome::Withdrawn { after_ms, by },
            Outcome::Superseded { moved_bytes, after_ms, by },
            Outcome::ByHand { moved_bytes, after_ms },
        ],
    );
    for agent in AgentState::ALL {
        assert!(section("vm.pressure").contains(&format!("`{}`", agent.label())), "{agent:?}");
    }
}

#[test]
fn every_call_of_the_document_exists() {
    let calls: Vec<_> = DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | `"))
        .filter(|(method, _)| ["GET", "PUT"].contains(method))
        .map(|(method, rest)| (method, rest.split_once('`').unwrap().0))
        .collect();
    assert!(calls.len() >= 11, "{calls:?}");
    run(async |fixture| {
        // The call that ends the VMM must run last.
        let (end, others): (Vec<_>, _) =
            calls.into_iter().partition(|(_, call)| *call == "vmm.shutdown");
        for (method, call) in others.iter().chain(&end) {
            let (status, body) = fixture.call(method, call, "").await;
            assert!(
                !body.contains("no such call") && !body.contains("does not support"),
                "{call}: {status} {body}"
            );
        }
    });
}
