//! Tests that compare the tables with other places that name keys: help, parser,
//! docs/reference/openapi.json and docs/reference/compatibility.md.

use std::collections::BTreeSet;
use std::path::Path;

use foreshore_cli::misspelled::{check_suggestions, misspelled};
use foreshore_config::{Key, Options, Table};
use foreshore_types::size;
use serde_json::Value;

use super::cli::{TABLES, description, parse_command_line};
use super::{ConfigError, json};

type Names = BTreeSet<String>;

fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Names {
    names.into_iter().map(str::to_owned).collect()
}

/// Keys of a flag in the format of its table, for example `off` or `file=`.
fn table_keys(table: &Table) -> Names {
    let keys = (table.keys)().into_iter().map(|key: Key| format!("{}=", key.name));
    keys.chain(table.words.iter().map(|&word| word.to_owned())).collect()
}

/// Paragraph about a flag in the help.
fn help_of<'a>(help: &'a str, flag: &str) -> &'a str {
    let begin =
        help.find(&format!("      {flag} ")).unwrap_or_else(|| panic!("{flag} is not in the help"));
    let paragraph = &help[begin + flag.len()..];
    paragraph.find("\n\n").map_or(paragraph, |end| &paragraph[..end])
}

/// Keys and values that a flag requires.
fn needed(flag: &str) -> &'static [(&'static str, &'static str)] {
    match flag {
        "--memory-zone" => &[("id", "a"), ("size", "1G")],
        "--numa" => &[("guest_numa_id", "0")],
        "--pm-memory" => &[("pool", "/p"), ("size", "2M")],
        "--pm-volume" => &[("pool", "/p"), ("name", "a")],
        "--disk" | "--api-socket" => &[("path", "/d")],
        "--pmem" | "--serial" | "--console" => &[("file", "/f")],
        "--landlock-rules" => &[("path", "/l"), ("access", "r")],
        "--metrics" => &[("address", "1")],
        "--vsock" => &[("cid", "3"), ("socket", "/s")],
        _ => &[],
    }
}

/// Error for a command line with `key=value` in `flag`, if the error is about that key.
fn refusal(flag: &str, key: &str, value: &str) -> Option<String> {
    let others = needed(flag).iter().filter(|(other, _)| *other != key);
    let pairs: Vec<_> =
        others.chain([&(key, value)]).map(|(key, value)| format!("{key}={value}")).collect();
    let zones_alone: &[_] = if flag == "--memory-zone" { &["--memory", "size=0"] } else { &[] };
    let pairs = pairs.join(",");
    let args = [&["foreshore", "--kernel", "/k"], zones_alone, &[flag, &*pairs]].concat();
    let error = parse_command_line(args.into_iter().map(Into::into)).err()?.to_string();
    let is_about_key = error.strip_prefix(&format!("{flag}: {key}"))?.starts_with(['=', ' ']);
    is_about_key.then_some(error)
}

/// Invalid words, numbers, paths, lists and names, and a value that is too long. Every type refuses
/// at least one of them.
fn unreadable() -> [String; 5] {
    ["!", "\"\"", "a::b", "__a", &"x".repeat(1 << 10)].map(str::to_owned)
}

/// Words in the form of a key's value. Placeholders such as `SIZE` are upper case.
fn words_of(key: &Key) -> Vec<String> {
    let syntax = (key.syntax)();
    let is_word =
        |form: &&str| form.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !form.is_empty();
    syntax.split('|').filter(is_word).map(str::to_owned).collect()
}

#[test]
fn error_about_a_misspelled_word_lists_and_suggests_words() {
    let mut count = 0;
    for table in TABLES {
        for key in (table.keys)() {
            let words = words_of(&key);
            for word in &words {
                let error = refusal(table.flag, key.name, &misspelled(word)).unwrap();
                let suggested = error.contains(&format!("(did you mean '{word}'?)"));
                assert!(suggested && words.iter().all(|word| error.contains(word)), "{error}");
            }
            count += words.len();
        }
        for word in table.words {
            let error = Options::parse(&table, &[], &misspelled(word)).unwrap_err().to_string();
            let suggested = error.contains(&format!("(did you mean '{word}'?)"));
            assert!(suggested && table.words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
    assert!(count > 70, "{count} words");
    assert!(check_suggestions(&description()) >= 4);
}

/// The parser accepts the keys in the tables. Only an error about the value proves that the section
/// reads the key. The test also covers sections that parse their flag themselves, or that share the
/// key with another section.
#[test]
fn unreadable_value_of_every_key_is_refused_with_its_name() {
    for table in TABLES {
        // `name` of `--pm-volume` is left out: its errors do not mention the key, which is required
        // and therefore read.
        for name in table.names().filter(|name| (table.flag, *name) != ("--pm-volume", "name")) {
            let mut errors =
                unreadable().into_iter().map(|value| refusal(table.flag, name, &value));
            assert!(errors.any(|error| error.is_some()), "{} {name}", table.flag);
        }
    }
}

#[test]
fn bounds_in_the_help_are_enforced() {
    let mut seen = 0;
    for table in TABLES {
        for Key { name, range, .. } in (table.keys)() {
            let Some(range) = range else { continue };
            let (least, most) = range.split_once(" to ").unwrap();
            let [least, most] = [least, most].map(|bound| size::parse(bound).unwrap());
            let outside = least.checked_sub(1).into_iter().chain(most.checked_add(1));
            for value in outside {
                let error = refusal(table.flag, name, &value.to_string());
                assert!(error.is_some(), "{} {name}={value}", table.flag);
            }
            seen += 1;
        }
    }
    assert!(seen > 10, "{seen}");
}

#[test]
fn long_help_lists_the_keys_that_the_parser_takes() {
    let help = description().render_long_help().to_string();
    for table in TABLES {
        let lines: Vec<_> = help_of(&help, table.flag).lines().skip(2).map(str::trim).collect();
        // The help encloses optional keys in brackets.
        let name = |line: &str| Some(line.split_once('=')?.0.trim_start_matches('[').to_owned());
        let keys = lines.iter().filter_map(|line| name(line)).map(|name| name + "=");
        let words = table.words.join("|");
        let words_line = lines.iter().filter(|line| **line == words && !words.is_empty());
        let listed: Names =
            keys.chain(words_line.flat_map(|line| line.split('|')).map(str::to_owned)).collect();
        // The first key is set by name, because some flags accept the value of their first key
        // without its name.
        let unknown = format!("{}=,no such key=1", table.names().next().unwrap());
        let parsed = match Options::parse(&table, &[], &unknown) {
            Err(ConfigError::UnknownKey { known, .. }) => names(known.split(", ")),
            other => panic!("{other:?}"),
        };
        assert_eq!(listed, parsed, "{}", table.flag);
    }
}

#[test]
fn short_help_has_every_key_in_one_line() {
    let help = description().render_help().to_string();
    for table in TABLES {
        let line = help
            .lines()
            .find(|line| line.trim_start().starts_with(&format!("{} ", table.flag)))
            .unwrap();
        for key in table_keys(&table) {
            let has =
                line.split([' ', ',', '|', '[']).any(|part| part == key || part.starts_with(&key));
            assert!(has, "{} {key}: {line}", table.flag);
        }
    }
}

#[test]
fn schemas_of_foreshores_own_sections_have_their_keys() {
    let document: Value =
        serde_json::from_str(include_str!("../../../docs/reference/openapi.json")).unwrap();
    let fields = json::fields();
    for (schema, section) in [
        ("PmMemoryConfig", "pm_memory"),
        ("PmVolumeConfig", "pm_volumes"),
        ("PressureConfig", "pressure"),
    ] {
        let properties =
            document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        let (_, fields) = fields.iter().find(|(name, _)| *name == section).unwrap();
        assert_eq!(
            names(properties.keys().map(String::as_str)),
            names(fields.iter().copied()),
            "{schema}"
        );
    }
}

/// Names in a table of the compatibility page with their verdicts. A cell lists names with the same
/// verdict: "`NAME`, `NAME`; `OWNER`, `OWNER`: `PART`, `PART`". Each part is returned as "OWNER
/// PART" for each owner.
fn rows(title: &str) -> Vec<(String, &'static str)> {
    let page = include_str!("../../../docs/reference/compatibility.md");
    let (_, tables) = page.split_once(&format!("## {title}\n")).unwrap();
    let table = tables.split("\n## ").next().unwrap();
    let code = |text: &'static str| text.split('`').skip(1).step_by(2);
    let mut rows = Vec::new();
    for line in table.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        for names in cells[1].split("; ") {
            let Some((owners, parts)) = names.split_once(": ") else {
                rows.extend(code(names).map(|name| (name.to_owned(), cells[2])));
                continue;
            };
            for owner in code(owners) {
                rows.extend(code(parts).map(|part| (format!("{owner} {part}"), cells[2])));
            }
        }
    }
    rows
}

#[test]
fn keys_of_the_compatibility_page_are_in_the_tables() {
    let mut seen = 0;
    for (name, verdict) in &rows("Flags and their keys") {
        let Some((flag, key)) = name.split_once(' ') else { continue };
        let Some(table) = TABLES.iter().find(|table| table.flag == flag) else { continue };
        let refused = table.refused.iter().copied().flatten().map(|refused| refused.key);
        let known = table.names().chain(refused).chain(table.words.iter().copied());
        let is_known = known.into_iter().any(|known| known == key);
        assert_eq!(is_known, *verdict != "not there", "{name}");
        seen += 1;
    }
    assert!(seen > 100, "{seen}");
}

#[test]
fn fields_of_the_compatibility_page_are_in_the_tables() {
    let schema = |section| match section {
        "disks" => "DiskConfig ",
        "cpus" => "CpusConfig ",
        "payload" => "PayloadConfig ",
        "memory" => "MemoryConfig ",
        "net" => "NetConfig ",
        "serial" => "SerialConfig ",
        "console" => "ConsoleConfig ",
        "rng" => "RngConfig ",
        "balloon" => "BalloonConfig ",
        "vsock" => "VsockConfig ",
        "pmem" => "PmemConfig ",
        "platform" => "PlatformConfig ",
        "landlock_rules" => "LandlockConfig ",
        own => panic!("{own} has no schema in Cloud Hypervisor's description"),
    };
    let rows = rows("Fields");
    for (section, known) in json::fields() {
        if ["pm_memory", "pm_volumes", "pressure"].contains(&section) {
            continue;
        }
        let fields: Vec<_> =
            rows.iter().filter_map(|(name, _)| name.strip_prefix(schema(section))).collect();
        assert!(!fields.is_empty(), "{section}");
        for field in fields {
            assert!(known.contains(&field), "{section}.{field}");
        }
    }
}

/// Pages in docs/ that are not generated.
fn pages() -> Vec<String> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")];
    let mut pages = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is_generated = path.file_name().is_some_and(|name| name == "compatibility.md");
            if path.is_dir() {
                folders.push(path);
            } else if !is_generated && path.extension().is_some_and(|extension| extension == "md") {
                pages.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    pages
}

/// Returns true if a page mentions `flag` itself, not only a longer flag that begins with it.
fn names_flag(page: &str, flag: &str) -> bool {
    let is_end = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || "-_".contains(c));
    page.match_indices(flag).any(|(at, _)| is_end(&page[at + flag.len()..]))
}

/// Returns true if a page contains `word` in code: between backticks, or in a code block.
fn has_in_code(page: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let has = |code: &str| code.split(|c| !is_part(c)).any(|part| part == word);
    page.lines().any(|line| match line.strip_prefix("    ") {
        Some(code) => has(code),
        None => line.split('`').skip(1).step_by(2).any(has),
    })
}

#[test]
fn page_that_names_a_longer_flag_does_not_name_the_flag() {
    assert!(names_flag("`--memory-zone id=a` and `--memory`", "--memory"));
    assert!(!names_flag("`--memory-zone id=a`, `--memory_x`", "--memory"));
}

#[test]
fn every_key_is_documented_on_a_page_that_names_its_flag() {
    let pages = pages();
    for table in TABLES {
        for name in table.names() {
            let is_documented =
                |page: &String| names_flag(page, table.flag) && has_in_code(page, name);
            assert!(pages.iter().any(is_documented), "{} {name}", table.flag);
        }
    }
}
