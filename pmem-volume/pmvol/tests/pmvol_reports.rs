//! Tests of `pmvol` reports: JSON documents, usable sizes and hints.

#[path = "shell/overwrite.rs"]
mod overwrite;
mod shell;

use std::process::Command;

use foreshore_types::size::Size;
use overwrite::overwrite;
use serde_json::Value;
use shell::Folder;

fn listed(folder: &Folder) -> Vec<Value> {
    let document = folder.json(&["volume", "list", "pool", "--json"]);
    document["volumes"].as_array().unwrap().clone()
}

#[test]
fn deletion_of_a_volume_with_data_needs_force() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    let names = || -> Vec<String> {
        let volumes = listed(&folder);
        volumes.iter().map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    };
    std::fs::write(folder.path("one"), [0x5a; 4096]).unwrap();
    for (name, format, size) in [("data", "btt", "20M"), ("dax", "raw", "8M")] {
        folder.succeed(&["volume", "create", "pool", name, "--size", size, "--format", format]);
        folder.succeed(&["volume", "delete", "pool", name]);
        assert!(names().is_empty(), "an empty {format} volume needs no --force");

        folder.succeed(&["volume", "create", "pool", name, "--size", size, "--format", format]);
        folder.succeed(&["btt", "import", "pool", name, "--from", "one"]);
        let words = [&format!("\"{name}\" holds data"), "--force deletes it with its data"];
        folder.fail(&["volume", "delete", "pool", name], &words);
        assert_eq!(names(), [name]);
        folder.succeed(&["volume", "delete", "pool", name, "--force"]);
        assert!(names().is_empty());
    }
    // A raw volume with only its last byte set holds data, and so does an unreadable BTT.
    folder.succeed(&["volume", "create", "pool", "dax", "--size", "8M", "--format", "raw"]);
    overwrite(&folder.path("pool"), (12 << 20) - 1, &[1]);
    folder.fail(&["volume", "delete", "pool", "dax"], &["holds data"]);
    folder.succeed(&["volume", "create", "pool", "data", "--size", "20M", "--thick"]);
    overwrite(&folder.path("pool"), (12 << 20) + 4096, &[0; 4096]);
    overwrite(&folder.path("pool"), (32 << 20) - 4096, &[0; 4096]);
    folder.fail(&["volume", "delete", "pool", "data"], &["holds data"]);
    folder.succeed(&["volume", "delete", "pool", "data", "--force"]);
}

#[test]
fn changes_are_reported_in_json() {
    let folder = Folder::new();
    let made = folder.json(&["create", "pool", "--size", "64M", "--json"]);
    assert_eq!((&made["path"], &made["total_bytes"]), (&"pool".into(), &(64 << 20).into()));
    let made = folder.json(&["volume", "create", "pool", "v", "--size", "20M", "--json"]);
    assert_eq!(made["volumes"], serde_json::Value::Array(listed(&folder)));
    let grown = folder.json(&["grow", "pool", "--size", "96M", "--json"]);
    assert_eq!(grown["total_bytes"], 96 << 20);
    let resized = folder.run(&["volume", "resize", "pool", "v", "--size", "48M", "--json"]);
    assert!(resized.stderr.is_empty(), "the hint is in the document");
    let resized: Value = serde_json::from_slice(&resized.stdout).unwrap();
    assert_eq!(resized["volumes"][0]["size_bytes"], 48 << 20);
    assert!(resized["hints"][0].as_str().unwrap().contains("resize2fs"), "{resized}");
    let renamed = folder.json(&["volume", "rename", "pool", "v", "w", "--json"]);
    assert_eq!(
        (&renamed["instead_of"], &renamed["volumes"][0]["name"]),
        (&"v".into(), &"w".into())
    );
    let split = ["volume", "split", "pool", "w", "--into", "a=20M", "--into", "b=rest", "--json"];
    let split = folder.json(&split);
    assert_eq!(split["instead_of"], "w");
    assert_eq!(split["volumes"], serde_json::Value::Array(listed(&folder)));
    let deleted = folder.json(&["volume", "delete", "pool", "a", "--json"]);
    assert_eq!((&deleted["instead_of"], &deleted["volumes"]), (&"a".into(), &Value::Array(vec![])));
    assert_eq!(folder.json(&["scrub", "pool", "--json"])["erased_bytes"], 0);
    for arguments in [
        &["info", "pool"][..],
        &["check", "pool"],
        &["repair", "pool"],
        &["btt", "info", "pool", "b"],
    ] {
        folder.json(&[arguments, &["--json"]].concat());
    }
}

#[test]
fn usable_size_is_the_size_of_all_sectors() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    let made = folder.succeed(&["volume", "create", "pool", "v", "--size", "20M", "--thick"]);
    let info = folder.json(&["btt", "info", "pool", "v", "--json"]);
    let usable = info["sectors"].as_u64().unwrap() * 4096;
    assert_eq!(made, format!("volume v created: 20 MiB, btt, {} usable\n", Size(usable).rounded()));
    folder.succeed(&["volume", "create", "pool", "dax", "--size", "4M", "--format", "raw"]);
    let volumes = listed(&folder);
    assert_eq!(
        (&volumes[0]["usable_bytes"], &volumes[1]["usable_bytes"]),
        (&(4 << 20).into(), &usable.into())
    );
    let list = folder.succeed(&["volume", "list", "pool"]);
    let columns = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let rounded = Size(usable).rounded();
    let line = columns(list.lines().nth(2).unwrap());
    assert_eq!(line[..5], ["v", "20", "MiB", &rounded[..rounded.len() - 4], "MiB"], "{list}");
    // Erases both info blocks, so that the number of sectors is unknown.
    overwrite(&folder.path("pool"), (4 << 20) + 4096, &[0; 4096]);
    overwrite(&folder.path("pool"), (24 << 20) - 4096, &[0; 4096]);
    assert_eq!(listed(&folder)[1]["usable_bytes"], Value::Null);
    let list = folder.succeed(&["volume", "list", "pool"]);
    assert_eq!(columns(list.lines().nth(2).unwrap())[3], "-", "{list}");
}

#[test]
fn growth_of_a_volume_prints_a_hint() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "dax", "--size", "4M", "--format", "raw"]);
    let note = |arguments: &[&str]| {
        let resize = ["volume", "resize", "pool", "dax", "--size"];
        String::from_utf8(folder.run(&[&resize, arguments].concat()).stderr).unwrap()
    };
    let grown = note(&["8M"]);
    assert!(grown.starts_with("hint: a guest sees the new size"), "{grown}");
    assert!(grown.contains("growpart") && grown.contains("resize2fs"), "{grown}");
    assert_eq!(note(&["4M", "--shrink"]), "");
}

#[test]
fn json_reports_match_text_reports() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M", "--reserve", "8M"]);
    let (text, json) =
        (folder.succeed(&["info", "pool"]), folder.json(&["info", "pool", "--json"]));
    for name in ["path", "uuid", "durability", "durability_meaning"] {
        assert!(text.contains(json[name].as_str().unwrap()), "{name}: {text}");
    }
    let sizes = [
        "total",
        "free",
        "longest_free_run",
        "memory",
        "volume",
        "scrubbing",
        "retired",
        "metadata",
    ];
    for name in sizes.iter().chain(&["reserve", "reserved", "promised", "lendable"]) {
        let bytes = json[format!("{name}_bytes")].as_u64().unwrap();
        assert!(text.contains(&Size(bytes).rounded()), "{name}: {text}");
    }
    assert_eq!(
        (&json["volumes"], &json["format_version"], &json["in_use_by"]),
        (&0.into(), &1.into(), &Value::Null)
    );
}

/// Runs a program of util-linux. Returns `None` if it is missing.
fn util_linux(folder: &Folder, words: &[&str]) -> Option<String> {
    match Command::new(words[0]).args(&words[1..]).current_dir(folder.0.path()).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: {} is not installed (Debian: util-linux)", words[0]);
            None
        }
        output => Some(String::from_utf8(output.unwrap().stdout).unwrap()),
    }
}

#[test]
fn wipefs_and_blkid_recognize_a_pool() {
    let folder = Folder::new();
    let made = folder.json(&["create", "pool", "--size", "64M", "--json"]);
    let uuid = made["uuid"].as_str().unwrap();
    let Some(text) = util_linux(&folder, &["wipefs", "--noheadings", "pool"]) else { return };
    assert!(text.contains("0x1fe") && text.contains("dos"), "{text}");
    let Some(text) = util_linux(&folder, &["blkid", "-p", "-o", "export", "pool"]) else { return };
    let id: String = (0..4).rev().map(|at| &uuid[2 * at..2 * at + 2]).collect();
    assert!(text.contains(&format!("PTUUID={id}\nPTTYPE=dos")), "{text}");
    // A repair restores the signature that wipefs removed.
    assert!(util_linux(&folder, &["wipefs", "-a", "-f", "pool"]).is_some());
    assert!(folder.succeed(&["info", "pool"]).contains("degraded: 1 finding"));
    folder.succeed(&["repair", "pool"]);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    let text = util_linux(&folder, &["wipefs", "--noheadings", "pool"]).unwrap();
    assert!(text.contains("dos"), "{text}");
}
