use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

words! {
    /// Kind of a thing.
    pub(crate) enum Kind {
        /// As it grew.
        Raw = "Raw" ("RAW") "raw" "uncooked",
        /// Heated.
        WellDone = "WellDone" "well-done",
        /// Known elsewhere.
        Foreign = "Foreign" "foreign" hidden,
    }
}

section! {
    /// Part of a thing.
    pub(crate) struct Inner: "--thing" "part" {
        shared: bool = false => "Share the thing",
    }
    defaults true;
    parse none;
}

section! {
    /// Thing.
    pub(crate) struct Thing: "--thing" "things of every kind" {
        path: PathBuf => "Place",
        size (range (7..=8 << 20)): u64 = 4 << 20 => "Size",
        count_max (flag "count" range (1..=9)): u8 = 1 => "Number",
        kind: Kind = Kind::Raw => "Kind",
        list: Option<Vec<u8>> => "Numbers",
        limit (usually (3_u8)): Option<u8> => "Limit",
        inner (flatten): Inner => "Part",
        parts (json_only): Vec<Part> => "Parts",
    }
    words &["tty"];
    refused &[&[Refused { key: "hugepages", neutral: OFF, why: "huge pages do not exist" }]];
}

section! {
    /// Section that exists only in JSON.
    pub(crate) struct Part: "--thing" {
        name: String => "Name",
        width (json_required): u16 = 0 => "Width",
        on (shown): Option<bool> => "Switch",
    }
    strict true;
}

section! {
    /// Section in which all keys are optional.
    pub(crate) struct Whole: "--whole" "things that may be left out" {
        count: u8 = 3 => "Number",
        most (derived): u8 = count => "Largest number",
        kind (json_only): Kind = Kind::WellDone => "Kind",
        list (json_only): Vec<u8> => "Numbers",
        path: Option<PathBuf> => "Place",
        inner (flatten): Inner => "Part",
    }
    defaults true;
}

section! {
    /// Section whose first value may be given without its key.
    pub(crate) struct Place: "--place" "places" {
        path (bare): Option<PathBuf> => "Place",
        name (repeated): Option<String> => "Names",
        size: u64 = 1 => "Size",
    }
}

use std::path::PathBuf;

fn thing(text: &str) -> Thing {
    Thing::parse(text).unwrap()
}

fn error(text: &str) -> String {
    Thing::parse(text).unwrap_err().to_string()
}

#[test]
fn flag_is_read_with_defaults() {
    let read = thing("path=/a=b,size=8M,count=7,kind=well-done,shared=on,list=[1,3-5]");
    assert_eq!((&*read.path.to_string_lossy(), read.size, read.count_max), ("/a=b", 8 << 20, 7));
    assert_eq!(
        (read.kind, read.inner.shared, read.list),
        (Kind::WellDone, true, Some(vec![1, 3, 4, 5]))
    );
    let least = thing("path=/a");
    assert_eq!(
        (least.size, least.count_max, least.kind, least.list),
        (4 << 20, 1, Kind::Raw, None)
    );
    assert!(!least.inner.shared && least.parts.is_empty());
    assert_eq!(Options::parse(&Table::of::<Thing>(), &[], "tty,path=/a").unwrap().words(), ["tty"]);
}

#[test]
fn defaults_are_those_of_the_table_everywhere() {
    let expected = Whole {
        count: 3,
        most: 3,
        kind: Kind::WellDone,
        list: Vec::new(),
        path: None,
        inner: Inner { shared: false },
    };
    assert_eq!(Whole::default(), expected);
    assert_eq!(Whole::parse("").unwrap(), expected);
    assert_eq!(read_body::<Whole>(b"{}").unwrap().0, expected);
}

/// Cloud Hypervisor's parser behaves in the same way.
#[test]
fn values_are_trimmed_and_an_empty_one_is_not_given() {
    assert_eq!(thing(" path=/a , size= 8M ,count= "), thing("path=/a,size=8M"));
    assert_eq!(thing("path=/a,size=,kind=,list=,shared="), thing("path=/a"));
    assert_eq!(error("path=,size=1M"), "--thing: path= is missing");
    assert_eq!(error("path=\"\""), r#"--thing: path="" is not a path"#);
    assert_eq!(error("size"), r#"--thing: size="" is not a value"#);
    assert_eq!(Options::parse(&Table::of::<Thing>(), &[], " ").unwrap().given().count(), 0);
}

#[test]
fn option_words_and_switches_are_read_in_any_case_after_a_key() {
    for (text, shared) in
        [("on", true), ("On", true), ("TRUE", true), ("off", false), ("False", false)]
    {
        assert_eq!(thing(&format!("path=/a,shared={text}")).inner.shared, shared);
    }
    for text in ["well-done", "Well-Done", "WellDone", "WELLDONE"] {
        assert_eq!(thing(&format!("path=/a,kind={text}")).kind, Kind::WellDone);
    }
    assert_eq!(thing("path=/a,kind=Uncooked").kind, Kind::Raw);
    assert_eq!(thing("path=/a,kind=foreign").kind, Kind::Foreign);
    assert!(
        error("TTY,path=/a").starts_with(r#"--thing: unknown key "TTY""#),
        "words without a value"
    );
    assert!(error("Path=/a").starts_with(r#"--thing: unknown key "Path""#), "keys");
    assert_eq!(
        error("path=/a,kind=rare"),
        r#"--thing: kind="rare" is not raw or well-done (did you mean 'raw'?)"#
    );
    assert_eq!(error("path=/a,shared=maybe"), r#"--thing: shared="maybe" is not on or off"#);
}

#[test]
fn lists_may_be_without_brackets() {
    let list = |text: &str| thing(&format!("path=/a,list={text}")).list;
    assert_eq!(list("3"), Some(vec![3]));
    assert_eq!(list("0-2"), Some(vec![0, 1, 2]));
    assert_eq!(list("[0-2, 5]"), Some(vec![0, 1, 2, 5]));
    assert_eq!(list("0-2:5"), Some(vec![0, 1, 2, 5]));
    assert_eq!(list("[]"), Some(Vec::new()));
    for text in ["a", "3-1", "0-", "256", "1::2", "[1,]", "+1"] {
        let expected = format!("--thing: list={text:?} is not a list of numbers");
        assert!(error(&format!("path=/a,list={text}")).starts_with(&expected), "{text}");
    }
}

#[test]
fn quotes_keep_commas_and_are_removed() {
    assert_eq!(thing(r#"path="/a,b",count=1"#).path, PathBuf::from("/a,b"));
    assert_eq!(thing(r#"path=/a","b"#).path, PathBuf::from("/a,b"));
    assert_eq!(thing(r#"path="/a""b""#).path, PathBuf::from(r#"/a"b"#));
}

/// Cloud Hypervisor parses `--api-socket` in the same way.
#[test]
fn bare_value_is_literal_up_to_the_next_key() {
    let place = |text: &str| Place::parse(text).unwrap();
    let path = |text: &str| place(text).path.map(|path| path.display().to_string());
    for bare in ["/a", "a=b", "/a,b", r#"/a"[b"#, "path", "/a,sizes=1"] {
        assert_eq!(path(bare).as_deref(), Some(bare));
        assert_eq!((path(&format!(" {bare} ,size=2")), place("/a,size=2").size), (path(bare), 2));
    }
    for none in ["", " ", "path=", "size=1"] {
        assert_eq!(path(none), None, "{none:?}");
    }
    let error = |text: &str| Place::parse(text).unwrap_err().to_string();
    assert_eq!(error("/a,path=/b"), "--place: path is given twice");
    assert_eq!(error("path=/a,b"), r#"--place: unknown key "b"; the keys are path=, name=, size="#);
}

#[test]
fn values_of_repeated_key_are_joined() {
    let name = |text: &str| Place::parse(text).unwrap().name;
    assert_eq!(name("/a,name=b,size=2,name= c ,name="), Some("b,c".to_owned()));
    assert_eq!(name("/a,name=,size=2"), None);
}

#[test]
fn numbers_and_sizes_have_bounds() {
    let checked = |text: &str| thing(text).check_ranges().map_err(|error| error.to_string());
    assert_eq!(checked("path=/a,count=9,size=7"), Ok(()));
    let error = |text: &str| checked(text).unwrap_err();
    assert_eq!(error("path=/a,count=10"), "--thing: count is 10, and must be 1 to 9");
    assert_eq!(error("path=/a,size=6"), "--thing: size is 6 bytes, and must be at least 7 bytes");
    assert_eq!(error("path=/a,size=9M"), "--thing: size is 9 MiB, and must be at most 8 MiB");
}

#[test]
fn sizes_are_read_as_in_all_programs() {
    for text in ["64MiB", "64M", "65536K", "0.0625G", "67108864"] {
        assert_eq!(thing(&format!("path=/a,size={text}")).size, 64 << 20, "{text}");
    }
}

#[test]
fn unknown_keys_are_named_with_the_known_ones() {
    let known = "tty, path=, size=, count=, kind=, list=, limit=, shared=";
    assert_eq!(
        error("sise=4M"),
        format!(r#"--thing: unknown key "sise" (did you mean 'size='?); the keys are {known}"#)
    );
    assert!(error("tty=1").contains(r#"unknown key "tty"; the keys are"#));
    assert!(error("path=/a,").contains(r#"unknown key """#));
    assert!(error("count_max=1").contains(r#"unknown key "count_max""#));
}

#[test]
fn key_is_given_once() {
    assert_eq!(error("size=1,size=1"), "--thing: size is given twice");
    assert_eq!(error("size=,size=1"), "--thing: size is given twice");
}

#[test]
fn refused_keys_are_accepted_with_a_neutral_value() {
    for text in ["off", "OFF", "false", "", " off"] {
        assert_eq!(thing(&format!("path=/a,hugepages={text}")), thing("path=/a"));
    }
    let refused = "--thing: hugepages=on is not supported by foreshore: huge pages do not exist";
    assert_eq!(error("path=/a,hugepages=on"), refused);
    assert_eq!(
        error("hugepages"),
        "--thing: hugepages is not supported by foreshore: huge pages do not exist"
    );
    assert!(!error("hugepages=a\nb").contains('\n'));
}

#[test]
fn unreadable_values_are_named() {
    let expected = r#"--thing: size="4Q" is not a size: bytes, or a number with K, M, G or T"#;
    assert_eq!(error("path=/a,size=4Q"), expected);
    let expected = r#"--thing: size="64MB" could be 64000000 or 67108864 bytes; use 64M, 64MiB or the number of bytes"#;
    assert_eq!(error("path=/a,size=64MB"), expected);
    assert_eq!(
        error("path=/a,count=256"),
        r#"--thing: count="256" is not a whole number from 0 to 255"#
    );
    assert_eq!(error("list=[1,2"), r#"--thing: "list=[1,2" has an unclosed bracket"#);
    assert!(error("list=1]").contains("bracket"));
    assert!(error(r#"path="a"#).contains("quote"));
}

fn read(json: Value) -> Result<(Thing, Vec<String>), JsonError> {
    read_body(json.to_string().as_bytes())
}

fn json_error(json: Value) -> String {
    read(json).unwrap_err().to_string()
}

#[test]
fn json_is_read_and_shown() {
    let json = json!({"path": "/a", "size": 7, "count_max": 2, "kind": "WellDone", "list": [1], "shared": true,
                      "parts": [{"name": "n", "width": 3, "on": null}]});
    let (read_thing, warnings) = read(json.clone()).unwrap();
    assert_eq!((warnings, serde_json::to_value(&read_thing).unwrap()), (Vec::new(), json.clone()));
    assert_eq!(serde_json::from_value::<Thing>(json).unwrap(), read_thing);
    let alias = read(json!({"path": "/a", "kind": "RAW"})).unwrap().0;
    assert_eq!(serde_json::to_value(alias.kind).unwrap(), "Raw");
    let least =
        read(json!({"path": "/a", "size": null, "hugepages": false, "parts": null, "other": null}));
    assert_eq!(least.unwrap(), (thing("path=/a"), Vec::new()));
    let shown = r#"{"path":"/a","size":4194304,"count_max":1,"kind":"Raw","shared":false}"#;
    assert_eq!(
        serde_json::to_string(&thing("path=/a")).unwrap(),
        shown,
        "in the order of the table"
    );
}

#[test]
fn json_errors_name_field_value_and_bound() {
    let with = |key: &str, value: Value| json!({"path": "/a", key: value});
    for (json, expected) in [
        (json!({}), "path is missing"),
        (json!({"path": 7}), "path is 7, and must be a path"),
        (json!({"path": ["a"]}), "path is a list, and must be a path"),
        (
            with("count_max", json!(256)),
            "count_max is 256, and must be a whole number from 0 to 255",
        ),
        (with("count_max", json!(-1)), "count_max is -1, and must be a whole number from 0 to 255"),
        (
            with("count_max", json!(0.5)),
            "count_max is 0.5, and must be a whole number from 0 to 255",
        ),
        (
            with("count_max", json!("a")),
            r#"count_max is "a", and must be a whole number from 0 to 255"#,
        ),
        (
            with("kind", json!("Rare")),
            r#"kind is "Rare", and must be Raw or WellDone (did you mean 'Raw'?)"#,
        ),
        (
            with("kind", json!("raw")),
            r#"kind is "raw", and must be Raw or WellDone (did you mean 'Raw'?)"#,
        ),
        (with("kind", json!("uncooked")), r#"kind is "uncooked", and must be Raw or WellDone"#),
        (
            with("kind", json!("well-done")),
            r#"kind is "well-done", and must be Raw or WellDone (did you mean 'WellDone'?)"#,
        ),
        (with("kind", json!(1)), "kind is 1, and must be Raw or WellDone"),
        (with("shared", json!("on")), r#"shared is "on", and must be true or false"#),
        (with("parts", json!({"a": 1})), "parts is an object, and must be a list"),
        (with("parts", json!([true])), "parts[0] is true, and must be an object"),
        (with("parts", json!([[]])), "parts[0] is a list, and must be an object"),
        (
            with("parts", json!([{"name": "a", "width": 1}, {"width": 1}])),
            "parts[1].name is missing",
        ),
        (with("parts", json!([{"name": "a"}])), "parts[0].width is missing"),
        (
            with("parts", json!([{"nam\n": 1}])),
            r#"--thing: unknown key "nam\n" (did you mean 'name'?); the keys are name, width, on"#,
        ),
        (
            with("hugepages", json!(true)),
            "--thing: hugepages=true is not supported by foreshore: huge pages do not exist",
        ),
        (json!(7), "it is 7, and must be an object"),
    ] {
        assert_eq!(json_error(json), expected);
    }
}

/// A client should accept responses of a newer VMM.
#[test]
fn unknown_fields_of_an_answer_are_ignored() {
    let part =
        serde_json::from_value::<Part>(json!({"name": "a", "width": 1, "later": 1})).unwrap();
    assert_eq!(part, Part { name: "a".to_owned(), width: 1, on: None });
    assert!(serde_json::from_value::<Part>(json!({"name": "a"})).is_err());
}

#[test]
fn error_about_invalid_json_has_its_position() {
    let error = |text: &str| read_body::<Part>(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(error(r#"{"name": }"#), "expected value at line 1 column 10");
    assert_eq!(error(r#"{"name": "a""#), "EOF while parsing an object at line 1 column 12");
    assert_eq!(error("{}{}"), "trailing characters at line 1 column 3");
    let twice = error(r#"{"name": "a", "name": "b", "width": 1}"#);
    assert!(twice.starts_with("name is given twice at line 1 column "), "{twice}");
    assert!(error("[{\"a\nb\": 1}]").starts_with("control character"));
}

#[test]
fn unknown_fields_are_ignored_with_one_warning() {
    let warnings = |json| read(json).unwrap().1;
    assert_eq!(warnings(json!({"path": "/a", "count": 1})), ["Ignored unknown field: count"]);
    let many: serde_json::Map<_, _> = (0..10_000)
        .map(|nth| (format!("k{nth}"), json!(0)))
        .chain([("path".to_owned(), json!("/a"))])
        .collect();
    let [warning] = &warnings(Value::Object(many))[..] else { panic!() };
    assert!(
        warning.starts_with("Ignored unknown fields: k0, ") && warning.ends_with(" and 9992 more"),
        "{warning}"
    );
    let long = warnings(json!({"path": "/a", "x".repeat(100_000): 0}));
    assert!(long[0].len() < 128, "{}", long[0].len());
    assert_eq!(warnings(json!({"path": "/a", "a\nb": 1})), [r"Ignored unknown field: a\nb"]);
}

#[test]
fn help_has_every_key_with_form_and_default() {
    let table = Table::of::<Thing>();
    let line = "tty,path=PATH,size=SIZE,count=N,kind=raw|well-done,list=[N-N,N],limit=N,shared=on|off: things of every kind \
                [default: size=4M,count=1,kind=raw,limit=3]";
    assert_eq!(table.line(), line);
    let place = "[path=]PATH,name=NAME...,size=SIZE: places [default: size=1]";
    assert_eq!(Table::of::<Place>().line(), place);
    let listing = table.listing();
    assert!(listing.starts_with(
        "things of every kind\n  tty\n  path=PATH: Place\n  size=SIZE: Size (7 to 8M) [default: 4M]\n"
    ));
    assert!(
        listing.ends_with(
            "\n  limit=N: Limit [default: 3]\n  shared=on|off: Share the thing [default: off]"
        ),
        "{listing}"
    );
}

proptest! {
    #[test]
    fn no_text_panics_and_every_error_is_one_line(text in ".*") {
        if let Err(error) = Thing::parse(&text) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_body::<Thing>(&bytes);
    }
}
