//! Tables in docs/reference/compatibility.md that this test generates. The text above the tables is
//! written by hand.

use std::fmt::Write;
use std::{env, fs};

use foreshore::config::COMPATIBLE_WITH;

use crate::calls::{self, Api};
use crate::names::of_kind;
use crate::verdict::Verdict;
use crate::{fields, flags};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/compatibility.md");
/// Last line before the generated part.
const MARK: &str =
    "<!-- UPDATE=1 cargo test -p foreshore --test compatibility writes all below -->\n";

/// Schemas of unsupported calls and fields, each with the call or field that it belongs to. Once
/// that call or field is supported, its schemas need a place in `fields` or `calls`.
const PARTS: &[(&str, &str)] = &[
    ("DebugConsoleConfig", "field VmConfig.debug_console"),
    ("DeviceConfig", "call PUT vm.add-device"),
    ("FsConfig", "call PUT vm.add-fs"),
    ("GenericVhostUserConfig", "call PUT vm.add-generic-vhost-user"),
    ("LandlockConfig", "field VmConfig.landlock_rules"),
    ("PciSegmentConfig", "field VmConfig.pci_segments"),
    ("RateLimitGroupConfig", "field VmConfig.rate_limit_groups"),
    ("RateLimiterConfig", "field DiskConfig.rate_limiter_config"),
    ("ReceiveMigrationData", "call PUT vm.receive-migration"),
    ("RestoreConfig", "call PUT vm.restore"),
    ("RtcConfig", "field VmConfig.rtc"),
    ("SendMigrationData", "call PUT vm.send-migration"),
    ("TokenBucket", "field DiskConfig.rate_limiter_config"),
    ("TpmConfig", "field VmConfig.tpm"),
    ("UserDeviceConfig", "field VmConfig.user_devices"),
    ("VdpaConfig", "call PUT vm.add-vdpa"),
    ("VirtQueueAffinity", "field DiskConfig.queue_affinity"),
    ("VmAddUserDevice", "call PUT vm.add-user-device"),
    ("VmCoredumpData", "call PUT vm.coredump"),
    ("VmMemoryZoneUpdateData", "call PUT vm.restore"),
    ("VmSnapshotConfig", "call PUT vm.snapshot"),
];

type Rows = Vec<(String, Verdict)>;

fn find<'a>(rows: &'a Rows, name: &str) -> &'a Verdict {
    &rows.iter().find(|(row, _)| row == name).unwrap_or_else(|| panic!("no row {name}")).1
}

async fn field_rows(api: &Api, calls: &Rows) -> Rows {
    let mut rows = Rows::new();
    let mut parts = Vec::new();
    for (name, text) in of_kind("field") {
        let text = text.unwrap_or_else(|| panic!("{name} needs values to try it with"));
        let verdict = match fields::of_config(name, text) {
            Some(verdict) => Some(verdict),
            None => calls::of_field(api, name, text).await,
        };
        match verdict {
            Some(verdict) => rows.push((name.to_owned(), verdict)),
            None => parts.push(name),
        }
    }
    for name in parts {
        let schema = name.split('.').next().expect("a schema");
        let (_, whole) = PARTS
            .iter()
            .find(|(part, _)| *part == schema)
            .unwrap_or_else(|| panic!("{name} has no verdict"));
        let (kind, whole) = whole.split_once(' ').expect("a kind and a name");
        let verdict = find(if kind == "call" { calls } else { &rows }, whole).clone();
        assert!(
            !matches!(verdict, Verdict::Implemented),
            "{whole} is there, and so {name} needs a try of its own"
        );
        rows.push((name.to_owned(), verdict));
    }
    rows
}

/// Groups items by their verdicts, in the order of the first item of each group.
fn groups<'a, T>(items: impl Iterator<Item = (T, &'a Verdict)>) -> Vec<(&'a Verdict, Vec<T>)> {
    let mut groups: Vec<(&Verdict, Vec<T>)> = Vec::new();
    for (item, verdict) in items {
        match groups.iter_mut().find(|(of, _)| *of == verdict) {
            Some((_, items)) => items.push(item),
            None => groups.push((verdict, vec![item])),
        }
    }
    groups
}

/// Calls of a method, keys of flags, or fields of schemas with the same verdict.
struct Names<'a> {
    /// Methods, flags or schemas. Empty for names that are not parts of one.
    owners: Vec<&'a str>,
    /// An empty name stands for the owner itself.
    names: Vec<&'a str>,
    verdict: &'a Verdict,
}

impl Names<'_> {
    /// Returns "`OWNER`, `OWNER`: `NAME`, `NAME`".
    fn text(&self) -> String {
        let list = |names: &[&str]| {
            let named = names.iter().filter(|name| !name.is_empty());
            named.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        };
        let parts = [list(&self.owners), list(&self.names)];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": ")
    }
}

/// Groups sorted verdicts. `separator` separates an owner from its part, as a flag from its key.
/// Names without it come first.
fn parts(verdicts: &Rows, separator: char) -> Vec<Names<'_>> {
    let split = |row: &(String, Verdict)| {
        row.0.find(separator).map_or((row.0.len(), row.0.len()), |at| (at, at + 1))
    };
    let (mut alone, mut parts) = (Vec::new(), Vec::<Names<'_>>::new());
    for chunk in verdicts.chunk_by(|one, next| one.0[..split(one).0] == next.0[..split(next).0]) {
        let owner = &chunk[0].0[..split(&chunk[0]).0];
        if let [(name, verdict)] = chunk
            && name == owner
        {
            alone.push((owner, verdict));
            continue;
        }
        for (verdict, names) in groups(chunk.iter().map(|row| (&row.0[split(row).1..], &row.1))) {
            let same = |part: &&mut Names<'_>| part.names == names && part.verdict == verdict;
            match parts.iter_mut().find(same) {
                Some(part) if !names.contains(&"") => part.owners.push(owner),
                _ => parts.push(Names { owners: vec![owner], names, verdict }),
            }
        }
    }
    let alone = groups(alone.into_iter()).into_iter();
    let alone = alone.map(|(verdict, names)| Names { owners: Vec::new(), names, verdict });
    alone.chain(parts).collect()
}

/// Writes a table. Each owner has a row for its implemented parts. Other names share a row if they
/// have the same reason.
fn table(page: &mut String, title: &str, head: &str, separator: char, mut rows: Rows) {
    rows.sort_by(|(one, _), (next, _)| one.cmp(next));
    let parts = parts(&rows, separator).into_iter();
    let (there, others): (Vec<_>, Vec<_>) =
        parts.partition(|part| *part.verdict == Verdict::Implemented);
    let others = groups(others.iter().map(|part| (part.text(), part.verdict))).into_iter();
    let rows = there.iter().map(|part| (part.verdict, vec![part.text()])).chain(others);
    write!(page, "\n## {title}\n\n| {head} | state | reason |\n|---|---|---|\n").unwrap();
    for (verdict, names) in rows {
        let (state, why) = verdict.columns();
        let why = why.replace('|', "\\|");
        writeln!(page, "| {} | {state} | {why} |", names.join("; ")).unwrap();
    }
}

fn tables() -> String {
    let (calls, fields) = Api::run(async |api| {
        let calls = calls::rows(&api).await;
        let fields = field_rows(&api, &calls).await;
        (calls, fields)
    });
    let mut page = String::new();
    table(&mut page, "Calls", "method: calls", ' ', calls);
    table(&mut page, "Flags and their keys", "flags: keys", ' ', flags::rows());
    table(&mut page, "Fields", "schemas: fields", '.', fields);
    page
}

#[test]
fn page_names_the_compatible_version() {
    let page = fs::read_to_string(PATH).expect("docs/reference/compatibility.md");
    let (by_hand, _) = page.split_once(MARK).expect("the mark above the tables");
    assert!(
        by_hand.contains(COMPATIBLE_WITH) && by_hand.contains("description 0.3.0"),
        "{COMPATIBLE_WITH}"
    );
}

#[test]
fn page_matches_the_verdicts() {
    let old = fs::read_to_string(PATH).expect("docs/reference/compatibility.md");
    let (by_hand, old_tables) = old.split_once(MARK).expect("the mark above the tables");
    let tables = tables();
    if env::var_os("UPDATE").is_some() {
        fs::write(PATH, format!("{by_hand}{MARK}{tables}")).unwrap();
        return;
    }
    let lacks = |page: &str, line: &&str| !page.lines().any(|other| other == *line);
    let stale: Vec<_> = old_tables.lines().filter(|line| lacks(&tables, line)).collect();
    let new: Vec<_> = tables.lines().filter(|line| lacks(old_tables, line)).collect();
    assert!(
        tables == old_tables,
        "docs/reference/compatibility.md is stale; UPDATE=1 cargo test -p foreshore --test compatibility rewrites it.\n\
         Rows to remove:\n{}\nRows to add:\n{}",
        stale.join("\n"),
        new.join("\n")
    );
}
