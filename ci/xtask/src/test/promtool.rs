//! Checks by Debian's promtool: the format of the metrics, and the alerts and queries of the book
//! on two hosts. The package is unpacked but not installed.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, read, write};
use crate::jobs;
use crate::programs;

/// Scrape with every kind of source. `VALUE` stands for values that differ from run to run.
const SCRAPE: &str = "vmm/src/metrics_server/tests/scrape.prometheus.txt";
/// Page with the alerts and queries.
const PAGE: &str = "docs/how-to/watch.md";
const TWO_HOSTS: &str = include_str!("promtool/two_hosts.yml");
/// Name of the file with the alerts, to which [`TWO_HOSTS`] refers.
const ALERTS: &str = "alerts.yml";

/// Returns false if promtool rejects the scrape, the alerts or their results.
pub(super) fn check(checkout: &Checkout) -> Result<bool> {
    let program = Apt::new(checkout).unpacked("prometheus")?.join("usr/bin/promtool");
    let folder = checkout.ci("promtool");
    create_folder(&folder)?;
    write(&folder.join("scrape.txt"), with_values(&read(&checkout.path(SCRAPE))?))?;
    write(&folder.join(ALERTS), alerts(&read(&checkout.path(PAGE))?)?)?;
    write(&folder.join("two_hosts.yml"), TWO_HOSTS)?;
    let scrape = std::fs::File::open(folder.join("scrape.txt"))?;
    let mut metrics = promtool(&program, &folder, &["check", "metrics"]);
    let is_lint_free = jobs::status(metrics.stdin(scrape))?.success();
    let mut rules = promtool(&program, &folder, &["test", "rules", "two_hosts.yml"]);
    Ok(jobs::status(&mut rules)?.success() && is_lint_free)
}

fn promtool(program: &Path, folder: &Path, arguments: &[&str]) -> Command {
    let mut command = programs::user(program);
    command.args(arguments).current_dir(folder);
    command
}

fn with_values(scrape: &str) -> String {
    let lines = scrape.lines().map(|line| match line.strip_suffix(" VALUE") {
        Some(series) => format!("{series} 1\n"),
        None => format!("{line}\n"),
    });
    lines.collect()
}

/// Returns the file of alerts that the page shows.
fn alerts(page: &str) -> Result<&str> {
    let blocks = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.into_iter().find(|block| block.starts_with("groups:")).context("no alerts in the page")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queries in the table of the page. A bar in a table is escaped.
    fn queries(page: &str) -> Vec<String> {
        let (_, queries) = page.split_once("\n## Queries\n").unwrap();
        let (queries, _) = queries.split_once("\n## ").unwrap();
        let rows = queries.lines().filter_map(|line| line.strip_suffix("` |")?.rsplit_once("| `"));
        rows.map(|(_, query)| query.replace("\\|", "|")).collect()
    }

    #[test]
    fn every_alert_and_query_of_the_page_is_tested_on_two_hosts() {
        let page = read(&Checkout::new().unwrap().path(PAGE)).unwrap();
        let alerts = alerts(&page).unwrap();
        let name = |line: &str| {
            let alert = line.trim().strip_prefix("- alert: ")?;
            alert.split_whitespace().next().map(str::to_owned)
        };
        let mut tested: Vec<_> = alerts.lines().filter_map(name).collect();
        tested.iter_mut().for_each(|name| name.insert_str(0, "- alertname: "));
        assert!(tested.len() > 10, "{tested:?}");
        let queries = queries(&page);
        assert!(queries.len() > 5, "{queries:?}");
        tested.extend(queries.into_iter().map(|query| format!("- expr: '{query}'")));
        for line in tested {
            assert!(TWO_HOSTS.lines().any(|found| found.trim() == line), "no {line}");
        }
    }

    /// Without this check, a renamed metric would leave a test of a series that does not exist.
    #[test]
    fn tests_have_only_metrics_of_the_scrape() {
        let scrape = read(&Checkout::new().unwrap().path(SCRAPE)).unwrap();
        let series = TWO_HOSTS.lines().filter_map(|line| line.split_once("{series: '"));
        let names: Vec<_> = series.map(|(_, series)| series.split('{').next().unwrap()).collect();
        assert!(names.len() > 40);
        for name in names.into_iter().filter(|name| *name != "up") {
            let start = format!("{name}{{");
            assert!(scrape.lines().any(|line| line.starts_with(&start)), "{name}");
        }
    }

    #[test]
    fn placeholders_of_values_are_replaced() {
        assert_eq!(
            with_values("# HELP a b VALUE c\na VALUE\nb 2\n"),
            "# HELP a b VALUE c\na 1\nb 2\n"
        );
    }
}
