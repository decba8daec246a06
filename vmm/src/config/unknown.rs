//! Keys of a configuration in JSON that nobody knows.
//!
//! They are passed over, as Cloud Hypervisor does, so that clients of a later one go on working (docs/decisions/0019). A key that
//! was mistyped is passed over as well, and then a setting is silently not made: so they are told.

use serde_json::{Map, Value};

use super::json::{OURS, SECTIONS};
use super::option_parser::Syntax;
use super::{foreign, memory_zone, numa};

/// So many are told by name: a client may send as many as a body has room for.
const MOST_NAMES: usize = 8;
/// And of a name so many characters.
const MOST_CHARS: usize = 64;

/// Sections that are one value, or have no flag of their own in [`SECTIONS`].
const OTHER_SECTIONS: [&str; 2] = ["numa", "watchdog"];

/// What a section has in JSON beside the keys of its flag.
fn beside_flag(section: &str) -> &'static [&'static str] {
    match section {
        "cpus" => &["boot_vcpus", "max_vcpus"],
        "memory" => &["zones"],
        "net" => &["fds"],
        "serial" | "console" => &["mode"],
        _ => &[],
    }
}

/// What its flag has and JSON calls otherwise.
fn flag_only(section: &str) -> &'static [&'static str] {
    match section {
        "cpus" => &["boot", "max"],
        "net" => &["fd"],
        _ => &[],
    }
}

/// The keys that a section's object may have, those that are refused included.
pub(super) fn keys(section: &str, syntax: &Syntax) -> Vec<&'static str> {
    let of_flag = syntax.keys.iter().copied().filter(|key| !flag_only(section).contains(key));
    let refused = syntax.refused().map(|refused| refused.key);
    of_flag.chain(refused).chain(beside_flag(section).iter().copied()).collect()
}

fn is_section(name: &str) -> bool {
    let has_syntax = SECTIONS.iter().map(|(section, _)| *section);
    let mut known = has_syntax.chain(OURS.iter().map(|(section, ..)| *section)).chain(OTHER_SECTIONS);
    known.any(|section| section == name) || foreign::section(name).is_some()
}

/// Those of a whole configuration, in one line.
pub(super) fn warning(config: &Map<String, Value>) -> Option<String> {
    let mut unknown = Unknown::default();
    config.keys().filter(|name| !is_section(name)).for_each(|name| unknown.add("", name));
    for (section, syntax) in SECTIONS {
        unknown.look(section, config.get(section), &keys(section, syntax));
    }
    let zones = config.get("memory").and_then(|memory| memory.get("zones"));
    unknown.look("memory.zones", zones, &keys("memory.zones", &memory_zone::SYNTAX));
    unknown.look("numa", config.get("numa"), &keys("numa", &numa::SYNTAX));
    unknown.told()
}

/// Those of one device.
pub(super) fn warning_of_device(
    section: &str,
    syntax: &Syntax,
    device: &Map<String, Value>,
) -> Option<String> {
    let (mut unknown, known) = (Unknown::default(), keys(section, syntax));
    unknown.look_in(section, device, &known);
    unknown.told()
}

/// Names of what nobody knows, as they are found.
#[derive(Debug, Default)]
pub struct Unknown {
    names: Vec<String>,
    count: usize,
}

impl Unknown {
    /// Another one, in what is called `of`, or in the whole.
    pub fn add(&mut self, of: &str, key: &str) {
        self.count += 1;
        if self.names.len() < MOST_NAMES {
            let dot = if of.is_empty() { "" } else { "." };
            // Anything may be in it, and a warning is one line.
            let key: String = key.chars().take(MOST_CHARS).collect();
            self.names.push(format!("{of}{dot}{}", key.escape_debug()));
        }
    }

    /// Looks in a section that is an object, or a list of them. What is neither is for others to refuse.
    fn look(&mut self, name: &str, section: Option<&Value>, known: &[&str]) {
        match section {
            Some(Value::Object(object)) => self.look_in(name, object, known),
            Some(Value::Array(list)) => {
                for (nth, object) in list.iter().enumerate() {
                    if let Value::Object(object) = object {
                        self.look_in(&format!("{name}[{nth}]"), object, known);
                    }
                }
            }
            _ => {}
        }
    }

    fn look_in(&mut self, name: &str, object: &Map<String, Value>, known: &[&str]) {
        object.keys().filter(|key| !known.contains(&key.as_str())).for_each(|key| self.add(name, key));
    }

    /// All of them in one line, if there are any.
    pub fn told(self) -> Option<String> {
        let more = match self.count - self.names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = self.names.join(", ");
        (self.count > 0).then(|| format!("What nobody knows is passed over: {names}{more}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::{DiskConfig, disk, test_config};

    fn warned(config: &Value) -> Option<String> {
        warning(config.as_object().unwrap())
    }

    #[test]
    fn what_nobody_knows_is_told_by_where_it_is() {
        let config = json!({
            "payload": {"kernel": "/k", "initrd": "/i"},
            "cpus": {"boot": 1, "boot_vcpus": 1, "max_vcpus": 1},
            "memory": {"size": 0, "hotplug_methd": "VirtioMem", "zones": [{"id": "a", "file": "/f", "fle": "/f"}]},
            "disks": [{"path": "/a"}, {"path": "/b", "read_only": true}],
            "numa": [{"guest_numa_id": 0, "cpu": [0]}],
            "a\nb": 1,
        });
        let mut names: Vec<_> = warned(&config)
            .unwrap()
            .replace("What nobody knows is passed over: ", "")
            .split(", ")
            .map(str::to_owned)
            .collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                r"a\nb",
                "cpus.boot",
                "disks[1].read_only",
                "memory.hotplug_methd",
                "memory.zones[0].fle",
                "numa[0].cpu",
                "payload.initrd",
            ]
        );
    }

    #[test]
    fn what_is_shown_has_nothing_that_nobody_knows() {
        let mut config = test_config();
        config.disks = vec![DiskConfig::parse("path=/d,readonly=on").unwrap()];
        assert_eq!(warned(&serde_json::to_value(config).unwrap()), None);
        assert_eq!(warned(&json!({"fs": [], "watchdog": true, "pm_memory": {"pool": "/p"}})), None);
    }

    #[test]
    fn a_body_full_of_it_is_one_line() {
        let many: Map<String, Value> = (0..10_000).map(|nth| (format!("k{nth}"), json!(0))).collect();
        let told = warning(&many).unwrap();
        assert!(told.ends_with(" and 9992 more"), "{told}");
        let long = warning(&Map::from_iter([("x".repeat(100_000), json!(0))])).unwrap();
        assert!(long.len() < 128, "{}", long.len());
    }

    #[test]
    fn a_device_that_comes_later_is_looked_at_as_well() {
        let device = json!({"path": "/d", "iommu": false, "read_only": true});
        let told = warning_of_device("disk", &disk::SYNTAX, device.as_object().unwrap());
        assert_eq!(told.as_deref(), Some("What nobody knows is passed over: disk.read_only"));
    }
}
