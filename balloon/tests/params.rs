//! Checks that docs/reference/policies.md lists all parameters and reasons, and that
//! docs/reference/simulator.md lists all parameters of workloads.

use std::fmt::Write;

use balloon::controller::Rules;
use balloon::params::{Param, Parameters, Unit};
use balloon::plan::Reason;
use balloon::policy::Policy;
use balloon::sim::{Workload, WorkloadParams};

const DOCS: &str = include_str!("../../docs/reference/policies.md");
const SIMULATOR_DOCS: &str = include_str!("../../docs/reference/simulator.md");

/// Returns a table of parameters in the format of the documentation.
fn documented(table: &[Param]) -> String {
    let mut text =
        "| parameter | unit | from | to | default | meaning |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for param in table {
        let show = |value| param.unit.show(value);
        let (low, high, default) = (show(param.low), show(param.high), show(param.default));
        let (name, unit, about) = (param.name, param.unit.label(), param.about.trim());
        writeln!(text, "| `{name}` | {unit} | {low} | {high} | {default} | {about} |")
            .expect("a String");
    }
    text
}

#[test]
fn each_parameter_is_documented_with_its_bounds() {
    let policies = Policy::NAMES.into_iter().filter_map(Policy::from_name);
    let tables =
        policies.map(|policy| (policy.name(), policy.table())).chain([("rules", Rules::TABLE)]);
    let mut missing = String::new();
    for (name, table) in tables.filter(|(_, table)| !table.is_empty()) {
        let text = documented(table);
        if !DOCS.contains(&text) {
            write!(missing, "{name}:\n\n{text}\n").expect("a String");
        }
    }
    assert!(missing.is_empty(), "docs/reference/policies.md lacks:\n{missing}");
}

#[test]
fn changed_table_is_detected() {
    for (index, param) in Rules::TABLE.iter().enumerate() {
        let others = [
            Param { name: "tide", ..*param },
            Param {
                unit: if param.unit == Unit::Count { Unit::Ms } else { Unit::Count },
                ..*param
            },
            Param { low: param.low + 2, ..*param },
            Param { high: param.high - 2, ..*param },
            Param { default: param.default + 2, ..*param },
        ];
        for other in others {
            let mut table = Rules::TABLE.to_vec();
            table[index] = other;
            assert!(!DOCS.contains(&documented(&table)), "{other:?}");
        }
    }
}

#[test]
fn each_pair_of_parameters_is_documented() {
    let policies: Vec<_> = Policy::NAMES.into_iter().filter_map(Policy::from_name).collect();
    let of_policies = policies.iter().filter_map(Policy::parameters).flat_map(Parameters::order);
    let pairs: Vec<_> = of_policies.chain(Rules::default().order()).copied().collect();
    assert!(
        pairs.contains(&("floor", "ceiling")) && pairs.contains(&("idle", "max_idle")),
        "{pairs:?}"
    );
    for (lesser, greater) in pairs {
        assert!(DOCS.contains(&format!("`{lesser}` <= `{greater}`")), "{lesser}, {greater}");
    }
}

#[test]
fn each_reason_is_documented() {
    let mut text = "| reason | meaning |\n|---|---|\n".to_owned();
    for reason in Reason::ALL {
        writeln!(text, "| `{}` | {} |", reason.label(), reason.about()).expect("a String");
    }
    assert!(DOCS.contains(&text), "docs/reference/policies.md lacks:\n{text}");
}

/// Returns the content of a cell in the first row that starts with `begin`.
fn cell(begin: &str, nth: usize) -> Option<&'static str> {
    let row = SIMULATOR_DOCS.lines().find(|line| line.starts_with(begin))?;
    row.split('|').nth(nth).map(str::trim)
}

#[test]
fn each_workload_parameter_is_documented_with_bounds_and_defaults() {
    for param in WorkloadParams::TABLE {
        let begin = format!("| `{}` | ", param.name);
        for (value, nth) in [(param.low, 3), (param.high, 4), (param.default, 5)] {
            assert_eq!(
                cell(&begin, nth),
                Some(param.unit.show(value).as_str()),
                "{} {nth}",
                param.name
            );
        }
    }
    for workload in Workload::ALL {
        let begin = format!("| `{}` | ", workload.name());
        let ignored: Vec<_> = workload.ignores().iter().map(|name| format!("`{name}`")).collect();
        assert_eq!(cell(&begin, 3), Some(ignored.join(", ").as_str()), "{}", workload.name());
        let defaults = workload.defaults();
        let own = WorkloadParams::TABLE.iter().enumerate().filter_map(|(index, param)| {
            let value = defaults.value(index);
            (value != param.default).then(|| format!("`{}` {}", param.name, param.unit.show(value)))
        });
        let mut own: Vec<_> = own.collect();
        let documented = cell(&begin, 4).expect("a cell");
        let mut found: Vec<_> = documented.split(", ").filter(|text| !text.is_empty()).collect();
        own.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, own, "{}", workload.name());
    }
}
