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

fn table(page: &mut String, title: &str, mut rows: Rows) {
    rows.sort_by(|(one, _), (next, _)| one.cmp(next));
    write!(page, "\n## {title}\n\n| | | |\n|---|---|---|\n").unwrap();
    for (name, verdict) in rows {
        let (column, why) = verdict.columns();
        // Each row is a line of its own, so that rows change independently.
        writeln!(page, "| `{name}` | {column} | {} |", why.replace('|', "\\|")).unwrap();
    }
}

fn tables() -> String {
    let (calls, fields) = Api::run(async |api| {
        let calls = calls::rows(&api).await;
        let fields = field_rows(&api, &calls).await;
        (calls, fields)
    });
    let mut page = String::new();
    table(&mut page, "Calls", calls);
    table(&mut page, "Flags and their keys", flags::rows());
    table(&mut page, "Fields", fields);
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
