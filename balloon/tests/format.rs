//! Checks that docs/reference/format.md lists all keys of a report.

use std::collections::BTreeSet;

use balloon::proto::{
    Cause, KernelUse, NodeBlocks, NodeIdle, OnlinePolicy, RawReport, Zone, ZoneKind,
};
use serde::Serialize;
use serde_json::Value;

const DOCS: &str = include_str!("../../docs/reference/format.md");

/// Report that contains all optional fields.
fn full() -> RawReport {
    let mut report = RawReport {
        kernel: Some(KernelUse {
            unused_dentries: Some(1),
            unused_inodes: Some(1),
            ..KernelUse::default()
        }),
        zones: vec![Zone {
            largest_free_blocks: Some(1),
            user_pages: Some(1),
            protected_pages: Some(1),
            ..Zone::default()
        }],
        idle: vec![NodeIdle::default()],
        ..RawReport::default()
    };
    report.blocks.nodes = vec![NodeBlocks::default()];
    report
}

fn keys_of(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            keys.insert(key.clone());
            keys_of(value, keys);
        }),
        Value::Array(values) => values.iter().for_each(|value| keys_of(value, keys)),
        _ => {}
    }
}

/// Returns the words in backquotes from the table.
fn documented() -> BTreeSet<String> {
    let (_, section) = DOCS.split_once("\n### A report\n").expect("a section");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| row.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Returns the name of a value in JSON.
fn word(value: impl Serialize) -> String {
    let value = serde_json::to_value(value).expect("a word");
    value.as_str().expect("a word").to_owned()
}

#[test]
fn documentation_lists_exactly_the_keys_of_a_report() {
    let mut known = BTreeSet::new();
    keys_of(&serde_json::to_value(full()).expect("JSON"), &mut known);
    known.extend([Cause::Rest, Cause::Watermark, Cause::Stall, Cause::Other].map(word));
    let kinds = [ZoneKind::Dma, ZoneKind::Dma32, ZoneKind::Normal, ZoneKind::Movable];
    known.extend(kinds.into_iter().chain([ZoneKind::Device, ZoneKind::Other]).map(word));
    let online = [OnlinePolicy::Offline, OnlinePolicy::Online, OnlinePolicy::OnlineKernel];
    known.extend(
        online.into_iter().chain([OnlinePolicy::OnlineMovable, OnlinePolicy::Unknown]).map(word),
    );
    assert_eq!(documented(), known);
}
