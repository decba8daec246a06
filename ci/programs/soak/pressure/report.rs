//! Tables of results, and checks against targets.

use std::fmt::{self, Write as _};

use guest_tests::pressure::{Condition, MIB, Outcome};

/// Allowed ratios of times under psi to times with only DRAM: for a whole run, and for the two
/// phases of `touch`.
const MAX_RUN_RATIO: f64 = 1.05;
const MAX_FILL_RATIO: f64 = 1.3;
const MAX_TOUCH_RATIO: f64 = 1.05;
/// Maximum time from a report to a plan, in 99 of 100 cases.
const MAX_REPORT_TO_PLAN_S: f64 = 0.001;

pub(super) struct Row {
    pub workload: &'static str,
    /// DRAM as a percentage of the need.
    pub share: u64,
    pub config: String,
    /// File with the time series.
    pub csv: String,
    pub outcome: Outcome,
}

pub(super) struct Verdict {
    pub description: String,
    pub met: bool,
    /// True for a condition that must hold, false for a time, which is only reported.
    pub is_condition: bool,
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", if self.met { "met" } else { "NOT MET" }, self.description)
    }
}

impl Row {
    /// Returns a progress line, which is printed while more runs follow.
    pub(super) fn line(&self) -> String {
        let Outcome { run_s, failure, .. } = &self.outcome;
        let end = failure.as_deref().map_or_else(|| format!("{run_s:.2} s"), str::to_owned);
        format!("{} at {} % with {}: {end}", self.workload, self.share, self.config)
    }

    fn is(&self, other: &Row) -> bool {
        (self.workload, self.share, &self.config) == (other.workload, other.share, &other.config)
    }
}

/// Groups rows of the same kind. They are rounds of the same run.
fn kinds(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut kinds: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match kinds.iter_mut().find(|kind| kind[0].is(row)) {
            Some(kind) => kind.push(row),
            None => kinds.push(vec![row]),
        }
    }
    kinds
}

fn median(rows: &[&Row], value: impl Fn(&Outcome) -> f64) -> f64 {
    let mut values: Vec<f64> = rows.iter().map(|row| value(&row.outcome)).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

fn phase(outcome: &Outcome, name: &str) -> f64 {
    outcome.phases.iter().find(|(other, _)| other == name).map_or(f64::NAN, |(_, seconds)| *seconds)
}

/// Returns the rounds in which a workload had only DRAM.
fn dram_only_rows<'a>(rows: &'a [Row], workload: &str) -> Vec<&'a Row> {
    rows.iter().filter(|row| row.workload == workload && row.share == 100).collect()
}

/// Returns a table with the medians over all rounds.
pub(super) fn markdown(rows: &[Row]) -> String {
    let mut text =
        "| workload | DRAM | with | run | of DRAM alone | phases, s | swapped in, out, MiB | major faults | \
                    stall some, full, s | need, held at peak, MiB | held at last | back after | report to plan, p99 |\n"
            .to_owned();
    text += &"|---".repeat(13);
    text += "|\n";
    for kind in kinds(rows) {
        let of = |value: &dyn Fn(&Outcome) -> f64| median(&kind, value);
        let first = kind[0];
        let failure = kind.iter().find_map(|row| row.outcome.failure.clone());
        let run =
            failure.clone().unwrap_or_else(|| format!("{:.2} s", of(&|outcome| outcome.run_s)));
        let dram_s = median(&dram_only_rows(rows, first.workload), |outcome| outcome.run_s);
        let ratio = match failure {
            Some(_) => String::new(),
            None => format!("{:.2}", of(&|outcome| outcome.run_s) / dram_s),
        };
        let phases: Vec<String> =
            first.outcome.phases.iter().map(|(name, _)| name.clone()).collect();
        let phases: Vec<String> = phases
            .iter()
            .map(|name| format!("{name} {:.3}", of(&|outcome| phase(outcome, name))))
            .collect();
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let back = match kind.iter().all(|row| row.outcome.return_s.is_some()) {
            true => format!("{:.0} s", of(&|outcome| outcome.return_s.unwrap_or(f64::NAN))),
            false => "not".to_owned(),
        };
        let report_to_plan =
            kind.iter().filter_map(|row| row.outcome.report_to_plan_s).max_by(f64::total_cmp);
        let report_to_plan = report_to_plan
            .map_or_else(String::new, |report_to_plan_s| format!("{} ms", report_to_plan_s * 1e3));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} % | {} | {run} | {ratio} | {} | {:.1}, {:.1} | {:.0} | {:.2}, {:.2} | {:.0}, {:.0} | {:.0} | {back} | {report_to_plan} |",
            first.workload,
            first.share,
            first.config,
            phases.join(", "),
            of(&|outcome| mib(outcome.swapped_in_bytes)),
            of(&|outcome| mib(outcome.swapped_out_bytes)),
            of(&|outcome| outcome.major_faults as f64),
            of(&|outcome| outcome.stall_some_s),
            of(&|outcome| outcome.stall_full_s),
            of(&|outcome| mib(outcome.peak_need_bytes)),
            of(&|outcome| mib(outcome.peak_held_bytes)),
            of(&|outcome| mib(outcome.last_held_bytes)),
        );
    }
    text
}

/// Returns verdicts on the conditions for psi, and on whether all runs have the same results.
pub(super) fn verdicts(rows: &[Row]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let mut add_verdict = |is_condition: bool, met: bool, description: String| {
        verdicts.push(Verdict { description, met, is_condition })
    };
    for kind in kinds(rows) {
        let first = kind[0];
        let dram = dram_only_rows(rows, first.workload);
        let alone = &dram[0].outcome;
        let description = format!("{} at {} % with {}", first.workload, first.share, first.config);
        if first.config != "psi" {
            if kind.iter().any(|row| row.outcome.contradicts(alone)) {
                add_verdict(
                    true,
                    false,
                    format!("{description}: its result differs from that with DRAM alone"),
                );
            }
            continue;
        }
        let ratio = |value: &dyn Fn(&Outcome) -> f64| median(&kind, value) / median(&dram, value);
        let mut time = |name: &str, ratio: f64, max: f64| {
            add_verdict(
                false,
                ratio <= max,
                format!("{description}: {name} takes {ratio:.2} of DRAM alone, at most {max}"),
            );
        };
        if first.workload == "touch" {
            time("filling", ratio(&|outcome| phase(outcome, "fill")), MAX_FILL_RATIO);
            time("touching", ratio(&|outcome| phase(outcome, "touch")), MAX_TOUCH_RATIO);
        } else {
            time("it", ratio(&|outcome| outcome.run_s), MAX_RUN_RATIO);
        }
        if let Some(report_to_plan_s) =
            kind.iter().filter_map(|row| row.outcome.report_to_plan_s).max_by(f64::total_cmp)
        {
            let ms = |seconds: f64| seconds * 1e3;
            let text = format!(
                "{description}: from report to plan {} ms in 99 of 100, at most {}",
                ms(report_to_plan_s),
                ms(MAX_REPORT_TO_PLAN_S)
            );
            add_verdict(false, report_to_plan_s <= MAX_REPORT_TO_PLAN_S, text);
        }
        // Reports a round in which the condition did not hold, if there is one.
        let rounds: Vec<Vec<Condition>> =
            kind.iter().map(|row| row.outcome.conditions(alone)).collect();
        for index in 0..rounds[0].len() {
            let worst =
                rounds.iter().map(|round| &round[index]).min_by_key(|condition| condition.met);
            let Condition { met, description: condition, .. } = worst.expect("a kind has a row");
            add_verdict(true, *met, format!("{description}: {condition}"));
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(share: u64, config: &str, run_s: f64) -> Row {
        let outcome =
            Outcome { run_s, sum: Some("1".to_owned()), return_s: Some(1.0), ..Outcome::default() };
        Row { workload: "bfs", share, config: config.to_owned(), csv: String::new(), outcome }
    }

    fn missed(rows: &[Row]) -> Vec<(bool, String)> {
        let verdicts = verdicts(rows).into_iter().filter(|verdict| !verdict.met);
        verdicts.map(|verdict| (verdict.is_condition, verdict.description)).collect()
    }

    #[test]
    fn rounds_of_a_kind_become_a_row_of_medians() {
        let rows = [
            row(100, "all-dram", 2.0),
            row(50, "psi", 2.0),
            row(50, "psi", 2.2),
            row(50, "psi", 9.0),
        ];
        let text = markdown(&rows);
        assert!(text.contains("| bfs | 50 % | psi | 2.20 s | 1.10 |"), "{text}");
        assert_eq!(text.lines().count(), 4, "{text}");
    }

    #[test]
    fn only_conditions_count_and_times_are_reported() {
        assert!(missed(&[row(100, "all-dram", 2.0), row(50, "psi", 2.1)]).is_empty());
        let slow = missed(&[row(100, "all-dram", 2.0), row(50, "psi", 2.2)]);
        assert!(matches!(&slow[..], [(false, _)]), "{slow:?}");
        let mut late = [row(100, "all-dram", 2.0), row(50, "psi", 2.0), row(50, "psi", 2.0)];
        late[2].outcome.report_to_plan_s = Some(0.005);
        assert!(
            matches!(&missed(&late)[..], [(false, description)] if description.contains("plan 5 ms"))
        );
        late[2].outcome.report_to_plan_s = Some(0.001);
        assert!(missed(&late).is_empty());
        for spoil in [
            (|outcome| outcome.swapped_in_bytes = 4096) as fn(&mut Outcome),
            |outcome| outcome.oom_kills = 1,
            |outcome| outcome.return_s = None,
            |outcome| outcome.return_s = Some(61.0),
            |outcome| outcome.sum = Some("2".to_owned()),
            |outcome| outcome.failure = Some("cut off".to_owned()),
        ] {
            let mut rows = [row(100, "all-dram", 2.0), row(50, "psi", 2.0)];
            spoil(&mut rows[1].outcome);
            let found = missed(&rows);
            assert!(matches!(&found[..], [(true, _)]), "{found:?}");
        }
    }
}
