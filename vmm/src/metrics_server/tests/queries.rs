//! Checks of the alerts and queries in docs/how-to/watch.md.

use super::*;

const PAGE: &str = include_str!("../../../../docs/how-to/watch.md");

/// Labels that Prometheus adds to each series, and the label that all metrics have.
const COMMON_LABELS: [&str; 3] = ["instance", "job", "vm"];
/// Labels that identify a VM.
const VM_LABELS: [&str; 2] = ["instance", "vm"];
const AGGREGATIONS: [&str; 12] = [
    "avg",
    "bottomk",
    "count",
    "count_values",
    "group",
    "max",
    "min",
    "quantile",
    "stddev",
    "stdvar",
    "sum",
    "topk",
];
const OPERATORS: [&str; 5] = ["and", "bool", "offset", "or", "unless"];

/// Expressions of the alerts, then those of the table of queries.
fn expressions() -> (Vec<String>, Vec<String>) {
    let alerts = PAGE.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let (_, queries) = PAGE.split_once("\n## Queries\n").unwrap();
    let (queries, _) = queries.split_once("\n## ").unwrap();
    let rows = queries.lines().filter_map(|line| line.strip_suffix("` |")?.rsplit_once("| `"));
    // A bar in a table is escaped.
    (
        alerts.map(str::to_owned).collect(),
        rows.map(|(_, query)| query.replace("\\|", "|")).collect(),
    )
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token<'a> {
    /// Name, keyword, number or duration.
    Word(&'a str),
    /// Content of a string.
    Quoted(&'a str),
    Symbol(char),
}

fn tokens(mut rest: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_ascii_alphanumeric() && !"_:.".contains(c));
        let (token, end) = match (first, word.unwrap_or(rest.len())) {
            ('"', _) => {
                let end =
                    rest[1..].find('"').unwrap_or_else(|| panic!("string without end: {rest}"));
                (Token::Quoted(&rest[1..=end]), end + 2)
            }
            (_, 0) => (Token::Symbol(first), first.len_utf8()),
            (_, end) => (Token::Word(&rest[..end]), end),
        };
        tokens.push(token);
        rest = rest[end..].trim_start();
    }
    tokens
}

/// Label matcher with `=`, `!=`, `=~` or `!~`.
struct Matcher<'a> {
    label: &'a str,
    /// Alternatives of a regular expression, or one value.
    values: Vec<&'a str>,
}

#[derive(Default)]
struct Expression<'a> {
    metrics: Vec<(&'a str, Vec<Matcher<'a>>)>,
    /// Keyword that groups or joins series, and its labels.
    groupings: Vec<(&'a str, Vec<&'a str>)>,
    /// Aggregations of all series.
    ungrouped: Vec<&'a str>,
}

impl<'a> Expression<'a> {
    fn parse(tokens: &[Token<'a>]) -> Self {
        let mut found = Self::default();
        let mut rest = tokens;
        while let [token, after @ ..] = rest {
            rest = after;
            let Token::Word(word) = *token else { continue };
            if AGGREGATIONS.contains(&word) {
                if !matches!(rest, [Token::Word("by" | "without"), ..]) {
                    found.ungrouped.push(word);
                }
            } else if ["by", "without", "on", "ignoring"].contains(&word) {
                let (labels, after) = words_up_to(rest, ')');
                found.groupings.push((word, labels));
                rest = after;
            } else if ["group_left", "group_right"].contains(&word) {
                if rest.first() == Some(&Token::Symbol('(')) {
                    rest = words_up_to(rest, ')').1;
                }
            } else if let [Token::Symbol('{'), ..] = rest {
                let end = rest.iter().position(|token| *token == Token::Symbol('}')).unwrap();
                found.metrics.push((word, matchers(&rest[1..end])));
                rest = &rest[end + 1..];
            } else if !word.starts_with(|c: char| c.is_ascii_digit())
                && rest.first() != Some(&Token::Symbol('('))
                && !OPERATORS.contains(&word)
            {
                found.metrics.push((word, Vec::new()));
            }
        }
        found
    }
}

/// Words before `end`, and the tokens after it.
fn words_up_to<'a, 't>(tokens: &'t [Token<'a>], end: char) -> (Vec<&'a str>, &'t [Token<'a>]) {
    let at = tokens.iter().position(|token| *token == Token::Symbol(end)).unwrap();
    let word = |token: &Token<'a>| match *token {
        Token::Word(word) => Some(word),
        _ => None,
    };
    (tokens[..at].iter().filter_map(word).collect(), &tokens[at + 1..])
}

fn matchers<'a>(tokens: &[Token<'a>]) -> Vec<Matcher<'a>> {
    tokens
        .split(|token| *token == Token::Symbol(','))
        .map(|matcher| {
            let [Token::Word(label), operator @ .., Token::Quoted(value)] = matcher else {
                panic!("not a matcher: {matcher:?}")
            };
            let is_regex = operator.contains(&Token::Symbol('~'));
            let values = if is_regex { value.split('|').collect() } else { vec![*value] };
            Matcher { label, values }
        })
        .collect()
}

/// Problems of a PromQL expression on the metrics of a scrape.
fn problems(expression: &str, scrape: &str) -> Vec<String> {
    let exposed = exposed(scrape);
    let Expression { metrics, groupings, ungrouped } = Expression::parse(&tokens(expression));
    let mut problems: Vec<_> =
        ungrouped.iter().map(|word| format!("{word} adds the series of all VMs")).collect();
    for (keyword, labels) in &groupings {
        let keeps = *keyword == "by" || *keyword == "on";
        if VM_LABELS.iter().any(|label| labels.contains(label) != keeps) {
            problems.push(format!("{keyword} {labels:?} mixes VMs"));
        }
    }
    if groupings.is_empty() {
        problems.extend(unmatched_quotients(expression, &exposed));
    }
    // Prometheus itself generates the metric `up`.
    for (name, matchers) in metrics.iter().filter(|(name, _)| *name != "up") {
        let Some((_, labels)) = exposed.get(*name) else {
            problems.push(format!("{name} is not a metric"));
            continue;
        };
        let grouped = groupings.iter().flat_map(|(_, labels)| labels);
        for label in matchers.iter().map(|matcher| &matcher.label).chain(grouped) {
            if !COMMON_LABELS.contains(label) && !labels.contains(*label) {
                problems.push(format!("{name} has no label {label}"));
            }
        }
        for Matcher { label, values } in matchers.iter().filter(|m| labels.contains(m.label)) {
            let samples = || scrape.lines().filter(|line| line.starts_with(&format!("{name}{{")));
            let is_missing = |value: &&&str| {
                let pair = format!(",{label}=\"{value}\"");
                !samples().any(|sample| sample.contains(&pair))
            };
            problems.extend(
                values.iter().filter(is_missing).map(|value| format!("{name}: no {label}={value}")),
            );
        }
    }
    problems
}

/// Quotients of metrics with different labels. Without `on` or `ignoring`, Prometheus divides only
/// series whose labels are all equal.
fn unmatched_quotients(
    expression: &str,
    exposed: &BTreeMap<String, (String, BTreeSet<String>)>,
) -> Vec<String> {
    let labels_of = |part: &str| {
        let metrics = Expression::parse(&tokens(part)).metrics;
        metrics.iter().filter_map(|(name, _)| Some(&exposed.get(*name)?.1)).collect::<Vec<_>>()
    };
    let quotients = expression.split_once('/').into_iter();
    quotients
        .filter(|(dividend, divisor)| labels_of(dividend) != labels_of(divisor))
        .map(|(dividend, divisor)| format!("{dividend}and{divisor} differ in their labels"))
        .collect()
}

#[test]
fn alerts_and_queries_of_the_book_match_the_scrape() {
    let (alerts, queries) = expressions();
    assert_eq!(alerts.len(), PAGE.matches("- alert: ").count());
    let (_, table) = PAGE.split_once("| guests that |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
    assert_eq!(queries.len(), rows.count());
    assert!(!alerts.is_empty() && !queries.is_empty());
    let scrape = text();
    for expression in alerts.iter().chain(&queries) {
        assert!(!Expression::parse(&tokens(expression)).metrics.is_empty(), "{expression}");
        assert_eq!(problems(expression, &scrape), Vec::<String>::new(), "{expression}");
    }
}

#[test]
fn wrong_expressions_are_detected() {
    let scrape = text();
    for (expression, problem) in [
        ("foreshore_pool_size > 0", "foreshore_pool_size is not a metric"),
        ("rate(foreshore_pool_failed{zone=\"a\"}[5m])", "foreshore_pool_failed has no label zone"),
        ("foreshore_vm_state{state=~\"running|gone\"} == 1", "foreshore_vm_state: no state=gone"),
        ("sum(foreshore_pool_failed)", "sum adds the series of all VMs"),
        ("sum by (vm) (foreshore_pool_failed)", "by [\"vm\"] mixes VMs"),
        (
            "sum without (instance, pool) (foreshore_pool_failed)",
            "without [\"instance\", \"pool\"] mixes VMs",
        ),
        (
            "max by (instance, vm, disk) (foreshore_pool_failed)",
            "foreshore_pool_failed has no label disk",
        ),
        (
            "foreshore_pool_failed * on (pool) group_left (state) foreshore_pool_bytes",
            "on [\"pool\"] mixes VMs",
        ),
        (
            "foreshore_disk_bytes_total / foreshore_disk_operations_total",
            "foreshore_disk_bytes_total and foreshore_disk_operations_total differ in their labels",
        ),
    ] {
        let found = problems(expression, &scrape);
        assert!(found.iter().any(|found| found == problem), "{expression}: {found:?}");
    }
}
