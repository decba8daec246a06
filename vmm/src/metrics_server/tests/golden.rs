//! Compares the scrape in both formats with files. After an intended change, write the files with
//! `UPDATE_SCRAPE=1 cargo test -p foreshore --lib metrics_server::tests::golden`.

use super::*;

/// Replaces values that depend on the process, the host or the version.
fn stable(scrape: &str) -> String {
    let mut lines: Vec<_> = scrape.lines().map(stable_line).collect();
    // Other tests of this process have threads with names of vCPUs, too.
    lines.dedup();
    lines.join("\n") + "\n"
}

fn stable_line(line: &str) -> String {
    let is_of = |prefixes: &[&str]| prefixes.iter().any(|prefix| line.starts_with(prefix));
    if is_of(&["process_", "foreshore_process_"]) {
        format!("{} VALUE", line.rsplit_once(' ').unwrap().0)
    } else if is_of(&["foreshore_vcpu_run_", "foreshore_vcpu_steal_"]) {
        format!("{},vcpu=\"VCPU\"}} VALUE", line.split_once(",vcpu=").unwrap().0)
    } else {
        line.replace(concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), "version=\"VERSION\"")
    }
}

#[test]
fn scrape_equals_the_golden_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/metrics_server/tests");
    let scrape = text();
    for (format, file) in [
        (Format::OpenMetrics, "scrape.openmetrics.txt"),
        (Format::Prometheus, "scrape.prometheus.txt"),
    ] {
        let path = folder.join(file);
        let shown = stable(&format.convert(scrape.clone()));
        if std::env::var_os("UPDATE_SCRAPE").is_some() {
            std::fs::write(&path, &shown).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap();
        let differing = shown.lines().zip(golden.lines()).find(|(shown, golden)| shown != golden);
        assert!(shown == golden, "{file}: first difference (scrape, file): {differing:?}");
    }
}
