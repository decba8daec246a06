//! JSON whose errors name the field that is wrong, and what it has to be, in a client's words and not in serde's.

use serde::de::{self, Deserialize, DeserializeOwned, Deserializer};
use serde_json::error::Category;
use serde_path_to_error::{Path, Segment};
use thiserror::Error;

/// What is wrong, in one line that begins with the field, unless it is no JSON.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct FieldError(String);

/// Reads what has been JSON already.
pub(super) fn read<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, FieldError> {
    let read = serde_path_to_error::deserialize(from);
    read.map_err(|error| FieldError(told(&name_of(error.path()), &error.inner().to_string())))
}

/// Reads JSON. Of what is none it is told where, of all else which field it is. `unknown` hears of every field that nobody knows.
pub fn read_bytes<T: DeserializeOwned>(
    bytes: &[u8],
    mut unknown: impl FnMut(String),
) -> Result<T, FieldError> {
    let no_json = |error: serde_json::Error| FieldError(error.to_string());
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut pass_over = |path: serde_ignored::Path<'_>| unknown(path.to_string());
    let noting = serde_ignored::Deserializer::new(&mut json, &mut pass_over);
    let value = serde_path_to_error::deserialize(noting).map_err(|error| {
        let field = name_of(error.path());
        let error = error.into_inner();
        if error.classify() != Category::Data {
            return no_json(error);
        }
        let (place, text) =
            (format!(" at line {} column {}", error.line(), error.column()), error.to_string());
        FieldError(told(&field, text.strip_suffix(&place).unwrap_or(&text)))
    })?;
    json.end().map_err(no_json)?;
    Ok(value)
}

/// For fields that are flattened into another struct: serde takes their values apart before it knows whose they are, and then
/// nobody but this knows which was wrong.
pub(super) fn flattened<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    read(from).map_err(de::Error::custom)
}

/// `disks[0].path`; empty for the whole.
fn name_of(path: &Path) -> String {
    let mut name = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => name += &format!("[{index}]"),
            // A client may have written anything, and an error is one line.
            Segment::Map { key } if name.is_empty() => name += &key.escape_debug().to_string(),
            Segment::Map { key } => name += &format!(".{}", key.escape_debug()),
            // A value, and no field.
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    name
}

/// What is wrong with `field`. A text that is none of serde's stays as it is.
fn told(field: &str, text: &str) -> String {
    let name = if field.is_empty() { "it" } else { field };
    let dot = if field.is_empty() { "" } else { "." };
    let between = |start: &str, end: &str| text.strip_prefix(start).and_then(|rest| rest.rsplit_once(end));
    if let Some((missing, "")) = between("missing field `", "`") {
        return format!("{field}{dot}{missing} is missing");
    }
    if let Some((twice, "")) = between("duplicate field `", "`") {
        return format!("{field}{dot}{twice} is given twice");
    }
    if let Some((key, known)) = between("unknown field `", "`, expected ") {
        let known = known.strip_prefix("one of ").unwrap_or(known).replace("` or `", "`, `");
        return format!("unknown key {key:?}; the keys are {}", known.replace('`', ""));
    }
    if let Some((value, known)) = between("unknown variant `", "`, expected ") {
        return format!("{name} is {value:?}, and must be {}", known.replace('`', ""));
    }
    let wrong =
        ["invalid type: ", "invalid value: "].into_iter().find_map(|kind| between(kind, ", expected "));
    if let Some((value, expected)) = wrong {
        return format!("{name} is {}, and must be {}", value_in_words(value), expected_in_words(expected));
    }
    // A list where serde would read a struct's fields one after the other.
    if let Some((_, expected)) = between("invalid length ", ", expected ")
        && expected.starts_with("struct ")
    {
        return format!("{name} is a list, and must be an object");
    }
    if field.is_empty() { text.to_owned() } else { format!("{field}: {text}") }
}

fn value_in_words(value: &str) -> &str {
    match value {
        "sequence" => "a list",
        "map" => "an object",
        _ => {
            let plain = |kind: &str| value.strip_prefix(kind)?.strip_suffix('`');
            let number = ["integer `", "floating point `", "boolean `"].into_iter().find_map(plain);
            number.or_else(|| value.strip_prefix("string ")).unwrap_or(value)
        }
    }
}

fn expected_in_words(expected: &str) -> String {
    let number = |most: u64| format!("a whole number from 0 to {most}");
    match expected {
        "u8" => number(u8::MAX.into()),
        "u16" => number(u16::MAX.into()),
        "u32" => number(u32::MAX.into()),
        "u64" | "usize" => number(u64::MAX),
        "a boolean" => "true or false".to_owned(),
        "path string" => "a path".to_owned(),
        "a sequence" => "a list".to_owned(),
        // What an enum is in JSON.
        "string or map" => "a string".to_owned(),
        _ if expected == "a map" || expected.starts_with("struct ") => "an object".to_owned(),
        _ => expected.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "they are only read")]
    struct Outer {
        list: Vec<Inner>,
        #[serde(default)]
        map: BTreeMap<String, bool>,
        #[serde(flatten, deserialize_with = "flattened")]
        flat: Flat,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "they are only read")]
    struct Inner {
        path: std::path::PathBuf,
        #[serde(default)]
        small: u8,
        #[serde(default)]
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "they are only read")]
    struct Flat {
        #[serde(default)]
        shared: bool,
    }

    #[derive(Debug, Deserialize)]
    enum Kind {
        Raw,
        Cooked,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "they are only read")]
    struct Strict {
        #[serde(default)]
        one: u64,
        #[serde(default)]
        other: u64,
    }

    /// Both ways of reading it say the same.
    #[track_caller]
    fn error(json: serde_json::Value) -> String {
        let text = json.to_string();
        let error = read::<Outer, _>(json).unwrap_err();
        assert_eq!(read_bytes::<Outer>(text.as_bytes(), |_| {}).unwrap_err(), error);
        error.to_string()
    }

    #[test]
    fn the_field_is_named_with_what_it_is_and_has_to_be() {
        for (list, told) in [
            (json!([{"path": "/a"}, {"path": 7}]), "list[1].path is 7, and must be a path"),
            (json!([{}]), "list[0].path is missing"),
            (
                json!([{"path": "/a", "small": 256}]),
                "list[0].small is 256, and must be a whole number from 0 to 255",
            ),
            (
                json!([{"path": "/a", "small": -1}]),
                "list[0].small is -1, and must be a whole number from 0 to 255",
            ),
            (
                json!([{"path": "/a", "small": 0.5}]),
                "list[0].small is 0.5, and must be a whole number from 0 to 255",
            ),
            (
                json!([{"path": "/a", "small": "a, expected b"}]),
                r#"list[0].small is "a, expected b", and must be a whole number from 0 to 255"#,
            ),
            (
                json!([{"path": "/a", "kind": "Boiled"}]),
                r#"list[0].kind is "Boiled", and must be Raw or Cooked"#,
            ),
            (json!([{"path": ["a"]}]), "list[0].path is a list, and must be a path"),
            (json!([true]), "list[0] is true, and must be an object"),
            (json!([[]]), "list[0] is a list, and must be an object"),
            (json!({"path": "/a"}), "list is an object, and must be a list"),
        ] {
            assert_eq!(error(json!({ "list": list })), told);
        }
        assert_eq!(error(json!({})), "list is missing");
        let kind = read::<Outer, _>(json!({"list": [{"path": "/a", "kind": 1}]})).unwrap_err();
        assert_eq!(kind.to_string(), "list[0].kind is 1, and must be a string");
        assert_eq!(
            error(json!({"list": [], "map": {"a\nb": 1}})),
            r"map.a\nb is 1, and must be true or false"
        );
        assert_eq!(
            error(json!({"list": [], "shared": "on"})),
            r#"shared is "on", and must be true or false"#
        );
    }

    #[test]
    fn unknown_keys_are_told_with_those_that_there_are() {
        let error = |text: &str| read_bytes::<Strict>(text.as_bytes(), |_| {}).unwrap_err().to_string();
        assert_eq!(error(r#"{"won": 1}"#), r#"unknown key "won"; the keys are one, other"#);
        assert_eq!(error(r#"{"one": 1, "one": 2}"#), "one is given twice");
    }

    #[test]
    fn of_what_is_no_json_the_place_is_told() {
        let error = |text: &str| read_bytes::<Strict>(text.as_bytes(), |_| {}).unwrap_err().to_string();
        assert_eq!(error(r#"{"one": }"#), "expected value at line 1 column 9");
        assert_eq!(error(r#"{"one": 1"#), "EOF while parsing an object at line 1 column 9");
        assert_eq!(error("{}{}"), "trailing characters at line 1 column 3");
        assert!(read_bytes::<Strict>(br#"{"one": 1}"#, |_| {}).is_ok());
    }
}
