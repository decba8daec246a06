//! Compares the scrape in both formats with files. After an intended change, write the files with
//! `UPDATE_SCRAPE=1 cargo test -p foreshore --lib metrics_server::tests::golden`.

use super::*;

/// Replaces values that depend on the process, the host or the version.
fn stable(scrape: &str) -> String {
    scrape.lines().map(|line| stable_line(line) + "\n").collect()
}

fn stable_line(line: &str) -> String {
    let is_of = |prefixes: &[&str]| prefixes.iter().any(|prefix| line.starts_with(prefix));
    let from_proc =
        ["process_", "foreshore_process_", "foreshore_vcpu_run_", "foreshore_vcpu_steal_"];
    if is_of(&from_proc) {
        format!("{} VALUE", line.rsplit_once(' ').unwrap().0)
    } else {
        line.replace(concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), "version=\"VERSION\"")
    }
}

/// Series that occur more than once, with any value.
fn duplicates(scrape: &str) -> Vec<&str> {
    let samples = scrape.lines().filter(|line| !line.starts_with('#'));
    let mut known = BTreeSet::new();
    let series = samples.filter_map(|line| Some(line.rsplit_once(' ')?.0));
    series.filter(|series| !known.insert(*series)).collect()
}

#[test]
fn each_series_is_exposed_once() {
    let twice = "# TYPE a gauge\na{b=\"c d\"} 1\na 1\na{b=\"c d\"} 2\n";
    assert_eq!(duplicates(twice), ["a{b=\"c d\"}"]);
    assert_eq!(duplicates(&text()), Vec::<&str>::new());
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
