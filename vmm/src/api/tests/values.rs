//! Values for fields. Each is invalid for most fields and valid for some. The guest test
//! `bad_bodies` includes this file.

use serde_json::{Value, json};

pub(super) fn values() -> Vec<Value> {
    vec![
        Value::Null,
        json!(true),
        json!(0),
        json!(-1),
        json!(7),
        json!(u64::MAX),
        // One more than the largest integer that serde_json can represent.
        serde_json::from_str("18446744073709551616").expect("a number"),
        json!(1e300),
        json!(0.5),
        json!(""),
        json!("a,b=\"[\u{0}\n"),
        json!("x".repeat(4000)),
        json!([]),
        json!([[null]]),
        json!([-1, "x", {}]),
        json!({}),
        json!({"a": {"b": [1]}}),
    ]
}
