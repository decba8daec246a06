//! Subcommand `pressure`: shows and changes the state of the governor.

use std::fmt;

use anyhow::{Context, Result, bail};
use balloon::controller::Rules;
use balloon::params::{Param, Setting};
use balloon::policy::Policy;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand};
use foreshore::api::Client;
use foreshore::config::{FIXED_SIZE, ParamSettings, parameter_names};
use foreshore::governor::info::{PressureChange, PressureInfo};
use foreshore::vm::decision::{DecisionInfo, MAX_DECISIONS, Outcome};
use foreshore_config::FlagValue;
use foreshore_types::similar::suggestion;
use foreshore_types::size;

use crate::output::{Origin, Output};
use crate::table::{size_cell, table};
use crate::{WrongCommandLine, put};

/// Name of the subcommand in errors.
const CALLER: &str = "pressure";

/// Default number of decisions to show.
const SHOWN: u64 = 10;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Pressure {
    #[command(subcommand)]
    verb: Option<PressureVerb>,
    /// Number of decisions to show, at most 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=MAX_DECISIONS as u64))]
    log: Option<u64>,
    /// Print JSON, including all inputs of each decision
    #[arg(long)]
    json: bool,
    /// Show all parameters of the policy and of the rules above it
    #[arg(long, conflicts_with_all = ["log", "json"])]
    params: bool,
    #[command(flatten)]
    set: Choice,
    /// Same as `pressure dry-run`
    #[arg(long, value_name = "SWITCH", value_parser = switch_parser(), ignore_case = true)]
    dry_run: Option<bool>,
    /// Same as `pressure resume`
    #[arg(long)]
    resume: bool,
}

#[derive(Debug, Subcommand)]
enum PressureVerb {
    /// Stop deciding until resumed; reports are still received
    Pause,
    /// Decide again, and resize zones that were resized manually; with a zone, resume only that
    /// zone
    Resume {
        /// ID of the zone
        zone: Option<String>,
    },
    /// Decide without changing anything
    DryRun {
        /// New value
        #[arg(action = ArgAction::Set, value_parser = switch_parser(), ignore_case = true)]
        switch: bool,
    },
    /// Set the policy or parameters
    Set {
        #[command(flatten)]
        set: Choice,
        /// Settings in the syntax of the VMM's --pressure, separated by commas or spaces:
        /// policy=amf, dry_run=on, parameters of the policy and of the rules above it (idle=5s,
        /// ceiling=1G); `pressure --params` lists them
        #[arg(value_name = "NAME=VALUE")]
        settings: Vec<String>,
    },
}

#[derive(Debug, Default, Args)]
struct Choice {
    /// Policy, with parameters after commas: amf,reclaim=40
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Hotplugged memory for policy fixed
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
}

impl Choice {
    /// Builds the change from the options and from `more`, which have the syntax of the VMM's
    /// `--pressure`.
    ///
    /// The client checks the parts that do not depend on the VM, such as names, so that an error in
    /// them is a wrong command line. The VMM validates the values, because their bounds depend on
    /// its present policy and on its VM.
    fn change(self, more: &[String]) -> Result<PressureChange> {
        let mut change = PressureChange { size: self.size, ..PressureChange::default() };
        let policy = self.policy.map(|policy| format!("policy={policy}"));
        for setting in policy.iter().chain(more).flat_map(|text| text.split(',')) {
            let known = setting.split_once('=').filter(|(name, _)| !name.is_empty());
            let (name, value) = known.with_context(|| {
                format!("{setting:?} is not NAME=VALUE, such as policy=amf or idle=5s")
            })?;
            set(&mut change, name, value)?;
        }
        change.check(CALLER)?;
        Ok(change)
    }
}

/// Adds one setting to a change: the policy, a parameter of the policy, or a parameter of the rules
/// above every policy.
fn set(change: &mut PressureChange, name: &str, value: &str) -> Result<()> {
    let is_rule = Rules::TABLE.iter().any(|param| param.name == name);
    let new = match name {
        "policy" => change.policy.replace(value.to_owned()).is_none(),
        "dry_run" => change.dry_run.replace(switch(value)?).is_none(),
        "record" | "record_size" => bail!("{name}= is for the command line of the VMM alone"),
        _ if name != FIXED_SIZE && !parameter_names().contains(&name) => {
            let known = ["policy", "dry_run", FIXED_SIZE].into_iter().chain(parameter_names());
            let similar = suggestion(name, known);
            bail!(
                "no policy and no rule has the parameter {name:?}{similar}; `pressure --params` lists those in use"
            )
        }
        _ => {
            let settings: &mut ParamSettings =
                if is_rule { &mut change.rules } else { &mut change.params }
                    .get_or_insert_default();
            let new = settings.insert(name.to_owned(), Setting::from(value)).is_none();
            // `--size` sets the same parameter.
            new && (name != FIXED_SIZE || change.size.is_none())
        }
    };
    if !new {
        bail!("{name} is given twice");
    }
    Ok(())
}

/// Parses the value of `dry_run` in the syntax of the VMM's flags.
fn switch(value: &str) -> Result<bool> {
    bool::read(value).with_context(|| {
        let similar = suggestion(value, bool::words());
        format!("dry_run={value:?} is not {}{similar}", bool::expected())
    })
}

fn switch_parser() -> impl TypedValueParser<Value = bool> {
    let words = [PossibleValue::new("on").alias("true"), PossibleValue::new("off").alias("false")];
    PossibleValuesParser::new(words).map(|word| bool::read(&word).expect("a possible value"))
}

impl Pressure {
    /// Executes the subcommand, and returns the text to print.
    pub(crate) async fn execute(self, vmm: &Client) -> Result<String> {
        let (log, params) = (self.log.unwrap_or(SHOWN), self.params);
        let output = Output { json: self.json };
        let change = self.change().map_err(|error| WrongCommandLine(error.to_string()))?;
        match change {
            Some(change) => put(vmm, "vm.pressure", Some(serde_json::to_string(&change)?)).await,
            None => {
                let answer = vmm.get(&format!("vm.pressure?decisions={log}")).await?;
                let table = if params { parameters_table } else { show };
                output.format(Origin::Foreshore, &answer, table)
            }
        }
    }

    /// Change to request, or `None` to show the state.
    fn change(self) -> Result<Option<PressureChange>> {
        let none = PressureChange::default();
        Ok(Some(match self.verb {
            Some(PressureVerb::Pause) => PressureChange { pause: Some(true), ..none },
            Some(PressureVerb::Resume { zone }) => {
                PressureChange { resume: Some(true), zone, ..none }
            }
            Some(PressureVerb::DryRun { switch }) => {
                PressureChange { dry_run: Some(switch), ..none }
            }
            Some(PressureVerb::Set { set, settings }) => {
                if set.policy.is_none() && set.size.is_none() && settings.is_empty() {
                    bail!("pressure set needs NAME=VALUE, such as policy=amf or idle=5s");
                }
                set.change(&settings)?
            }
            None => {
                let asks = self.set.policy.is_some()
                    || self.set.size.is_some()
                    || self.dry_run.is_some()
                    || self.resume;
                if !asks {
                    return Ok(None);
                }
                PressureChange {
                    dry_run: self.dry_run,
                    resume: self.resume.then_some(true),
                    ..self.set.change(&[])?
                }
            }
        }))
    }
}

/// Formats the state as lines, and zones and decisions as tables.
fn show(info: &PressureInfo) -> String {
    let mut text = format!("policy {}, agent {}", info.policy, info.agent.label());
    match info.report_age_ms {
        Some(age_ms) => text.push_str(&format!(", last report {} ago\n", span(age_ms))),
        None => text.push_str(", no report yet\n"),
    }
    if info.paused {
        text.push_str("paused: nothing is decided\n");
    }
    if info.dry_run {
        text.push_str("dry run: nothing is requested from the guest\n");
    }
    let set: Vec<_> =
        parameters(info).filter(Parameter::is_set).map(|set| set.to_string()).collect();
    if !set.is_empty() {
        text.push_str(&format!("set: {} (--params shows all)\n", set.join(" ")));
    }
    let yes_or_no = |yes| if yes { "yes" } else { "no" }.to_owned();
    let zones = info
        .zones
        .iter()
        .map(|zone| [zone.id.clone(), yes_or_no(zone.driver_ready), yes_or_no(zone.pinned)]);
    text.push_str(&table(["ZONE", "DRIVER", "PINNED"], 2, zones));
    if info.decisions.is_empty() {
        return text;
    }
    let header = [
        "DECISION",
        "AGE",
        "TIMES",
        "POLICY",
        "ACTION",
        "AVAILABLE",
        "CHANGE",
        "REQUESTED",
        "REASON",
        "OUTCOME",
    ];
    // The newest decision is last, as in a log.
    text.push('\n');
    text.push_str(&decisions(header, &info.decisions));
    text
}

/// Parameter and its current value in the VMM.
struct Parameter {
    /// Policy that has the parameter, or `rules`.
    scope: String,
    param: &'static Param,
    value: u64,
}

impl Parameter {
    fn is_set(&self) -> bool {
        self.value != self.param.default
    }
}

/// Formats the parameter in the syntax of `pressure set`.
impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.param.name, self.param.unit.show(self.value))
    }
}

/// Parameters of the policy, then parameters of the rules. If the VMM has another version,
/// parameters unknown to this version appear only in JSON.
fn parameters(info: &PressureInfo) -> impl Iterator<Item = Parameter> {
    let policy = Policy::from_name(&info.policy).map_or(&[][..], |policy| policy.table());
    let tables = [(info.policy.as_str(), "params", policy), ("rules", "rules", Rules::TABLE)];
    tables.into_iter().flat_map(|(scope, key, table)| {
        let values = info.details.get(key);
        table.iter().filter_map(move |param| {
            let value = values?.get(param.name)?.as_u64()?;
            Some(Parameter { scope: scope.to_owned(), param, value })
        })
    })
}

fn parameters_table(info: &PressureInfo) -> String {
    let rows = parameters(info).map(|Parameter { scope, param, value }| {
        let [value, default] = [value, param.default].map(|value| param.unit.show(value));
        [param.name.to_owned(), scope, value, default, param.about.trim().to_owned()]
    });
    table(["PARAMETER", "SCOPE", "VALUE", "DEFAULT", "MEANING"], 2, rows)
}

fn decisions(header: [&str; 10], decisions: &[DecisionInfo]) -> String {
    let rows = decisions.iter().rev().map(|decision| {
        let why = match &decision.limited_by {
            Some(limit) => format!("{} ({limit})", decision.reason),
            None => decision.reason.clone(),
        };
        [
            decision.seq.to_string(),
            span(decision.age_ms),
            decision.times.to_string(),
            decision.policy.clone(),
            decision.direction.clone(),
            decision.available_bytes.map_or_else(|| "-".to_owned(), size_cell),
            size_cell(decision.change_bytes),
            size_cell(decision.requested_bytes),
            why,
            outcome(&decision.outcome),
        ]
    });
    table(header, 0, rows)
}

fn outcome(outcome: &Outcome) -> String {
    let bytes = |bytes: &u64| size_cell(*bytes);
    match outcome {
        Outcome::None => "-".to_owned(),
        Outcome::DryRun => "dry run".to_owned(),
        Outcome::Pending { moved_bytes } => format!("pending, {} so far", bytes(moved_bytes)),
        Outcome::Stuck { moved_bytes } => format!("stuck, {} so far", bytes(moved_bytes)),
        Outcome::Reached { after_ms } => format!("reached after {}", span(*after_ms)),
        Outcome::Partly { moved_bytes, after_ms, by, lack } => {
            let why = match (by, lack) {
                (_, Some(lack)) => format!("the host lacks the rest: {lack}"),
                (Some(by), None) => format!("{by} withdrew the rest"),
                (None, None) => "no more".to_owned(),
            };
            format!("{} after {}, {why}", bytes(moved_bytes), span(*after_ms))
        }
        Outcome::Withdrawn { after_ms, by } => {
            format!("nothing after {}, withdrawn by {by}", span(*after_ms))
        }
        Outcome::Superseded { moved_bytes, after_ms, by } => {
            format!("{} after {}, then superseded by {by}", bytes(moved_bytes), span(*after_ms))
        }
        Outcome::ByHand { moved_bytes, after_ms } => {
            format!("{} after {}, then resized by hand", bytes(moved_bytes), span(*after_ms))
        }
    }
}

/// Formats a duration for people.
fn span(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

#[cfg(test)]
mod tests {
    use balloon::governor::AgentState;
    use clap::Parser;
    use foreshore::governor::info::GovernedZoneInfo;
    use foreshore::vm::decision::{DecisionInput, DecisionTarget};

    use super::*;
    use crate::{Call, Flags, Verb};

    fn change(args: &[&str]) -> Result<Option<String>> {
        let args = [&["foreshore-remote", "--api-socket", "/s", "pressure"], args].concat();
        let Verb::Call(Call::Pressure(pressure)) = Flags::try_parse_from(args)?.verb else {
            panic!()
        };
        Ok(pressure.change()?.map(|change| {
            let all = serde_json::to_value(&change).unwrap();
            let said = all.as_object().unwrap().iter().filter(|(_, value)| !value.is_null());
            said.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
        }))
    }

    #[test]
    fn pressure_changes_only_given_settings() {
        for shown in [&[][..], &["--log", "1000"], &["--json"], &["--params"]] {
            assert_eq!(change(shown).unwrap(), None, "{shown:?}");
        }
        for (args, expected) in [
            (&["--resume"][..], "resume=true"),
            (&["--policy", "off", "--dry-run", "off"], r#"dry_run=false policy="off""#),
            (&["pause"], "pause=true"),
            (&["resume"], "resume=true"),
            (&["resume", "pm"], r#"resume=true zone="pm""#),
            (&["dry-run", "ON"], "dry_run=true"),
            (&["set", "--policy", "fixed", "--size", "1G"], r#"policy="fixed" size=1073741824"#),
            (&["set", "idle=5s", "ceiling=1G"], r#"params={"idle":"5s"} rules={"ceiling":"1G"}"#),
        ] {
            assert_eq!(change(args).unwrap().unwrap(), expected, "{args:?}");
        }
        for wrong in [
            &["idle=5s"][..],
            &["dry-run"],
            &["--log", "1001"],
            &["--resume", "pause"],
            &["--params", "--json"],
            &["fly"],
        ] {
            assert!(change(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn settings_have_the_syntax_of_the_vmm() {
        let expected =
            r#"dry_run=true params={"reclaim":"40"} policy="amf" rules={"ceiling":"1G"}"#;
        for args in [
            &["set", "policy=amf,reclaim=40,ceiling=1G,dry_run=on"][..],
            &["set", "policy=amf", "reclaim=40", "ceiling=1G,dry_run=true"],
            // Syntax of the simulator.
            &["set", "--policy", "amf,reclaim=40,ceiling=1G,dry_run=on"],
            &["set", "--policy", "amf", "reclaim=40", "ceiling=1G", "dry_run=on"],
            &["--policy", "amf,reclaim=40,ceiling=1G", "--dry-run", "on"],
        ] {
            assert_eq!(change(args).unwrap().unwrap(), expected, "{args:?}");
        }
        let fixed = change(&["set", "policy=fixed,size=1G"]).unwrap().unwrap();
        assert_eq!(fixed, r#"params={"size":"1G"} policy="fixed""#);
    }

    #[test]
    fn errors_of_settings_name_the_valid_form() {
        let form = "such as policy=amf or idle=5s";
        for (args, message) in [
            (&["set"][..], format!("pressure set needs NAME=VALUE, {form}")),
            (&["set", "amf"], format!(r#""amf" is not NAME=VALUE, {form}"#)),
            (&["set", "idle=5s,"], format!(r#""" is not NAME=VALUE, {form}"#)),
            (&["set", "=5s"], format!(r#""=5s" is not NAME=VALUE, {form}"#)),
            (&["set", "idle=5s", "idle=5s"], "idle is given twice".to_owned()),
            (&["set", "--policy", "psi", "policy=amf"], "policy is given twice".to_owned()),
            (&["set", "--size", "1G", "policy=fixed,size=1G"], "size is given twice".to_owned()),
            (&["set", "dry_run=maybe"], r#"dry_run="maybe" is not on or off"#.to_owned()),
            (
                &["set", "dry_run=onn"],
                r#"dry_run="onn" is not on or off (did you mean 'on'?)"#.to_owned(),
            ),
            (
                &["set", "idel=5s"],
                r#"no policy and no rule has the parameter "idel" (did you mean 'idle'?); `pressure --params` lists those in use"#.to_owned(),
            ),
            (
                &["set", "policy=ps"],
                r#"pressure: policy="ps" is not one of the policies psi, amf, dapper, pmb, memorage, fixed, off (did you mean 'psi'?)"#.to_owned(),
            ),
            (&["--policy", "fixed"], "pressure: size= is missing: policy=fixed needs it".to_owned()),
            (&["set", "record=/t"], "record= is for the command line of the VMM alone".to_owned()),
        ] {
            assert_eq!(change(args).unwrap_err().to_string(), message, "{args:?}");
        }
    }

    fn decision() -> DecisionInfo {
        DecisionInfo {
            seq: 7,
            age_ms: 61_250,
            times: 1,
            policy: "psi".to_owned(),
            direction: "grow".to_owned(),
            reason: "low_available".to_owned(),
            limited_by: Some("descriptors".to_owned()),
            near: None,
            wanted_bytes: 1 << 30,
            requested_bytes: 256 << 20,
            change_bytes: 128 << 20,
            available_bytes: Some(20 << 20),
            dry_run: false,
            input: DecisionInput {
                report: None,
                pool_free_bytes: 0,
                storage: None,
                zones: Vec::new(),
            },
            targets: vec![DecisionTarget { zone: "pm".to_owned(), requested_bytes: 256 << 20 }],
            outcome: Outcome::Reached { after_ms: 85 },
        }
    }

    #[test]
    fn state_is_shown_in_lines_and_decisions_in_columns_newest_last() {
        let older = DecisionInfo {
            seq: 6,
            age_ms: 8_000_000,
            times: 12,
            policy: "amf".to_owned(),
            direction: "hold".to_owned(),
            reason: "enough".to_owned(),
            limited_by: None,
            change_bytes: 0,
            requested_bytes: 128 << 20,
            available_bytes: None,
            outcome: Outcome::None,
            ..decision()
        };
        let info = PressureInfo {
            policy: "psi".to_owned(),
            paused: true,
            pinned_zones: vec!["pm".to_owned()],
            agent: AgentState::Silent,
            agent_connected: true,
            report_age_ms: Some(4_210),
            zones: vec![GovernedZoneInfo { id: "pm".to_owned(), driver_ready: true, pinned: true }],
            decisions_total: 7,
            decisions: vec![decision(), older],
            ..PressureInfo::default()
        };
        let expected = "\
policy psi, agent silent, last report 4.2 s ago
paused: nothing is decided
ZONE  DRIVER  PINNED
pm    yes     yes

DECISION     AGE  TIMES  POLICY  ACTION  AVAILABLE   CHANGE  REQUESTED                       REASON  OUTCOME
       6     2 h     12     amf    hold          -        0    128 MiB                       enough  -
       7  61.2 s      1     psi    grow     20 MiB  128 MiB    256 MiB  low_available (descriptors)  reached after 85 ms
";
        assert_eq!(show(&info), expected);
    }

    fn info_with(policy: &str, details: serde_json::Value) -> PressureInfo {
        PressureInfo {
            policy: policy.to_owned(),
            details: serde_json::from_value(details).unwrap(),
            ..PressureInfo::default()
        }
    }

    #[test]
    fn changed_parameters_are_shown_in_the_syntax_of_set() {
        let shown = |policy, details| {
            let text = show(&info_with(policy, details));
            text.lines().find_map(|line| line.strip_prefix("set: ")).map(str::to_owned)
        };
        let default =
            serde_json::json!({"params": {"idle": 10_000}, "rules": {"ceiling": 1u64 << 46}});
        assert_eq!(shown("psi", default), None);
        let set = serde_json::json!({"params": {"idle": 9_000, "stall": 100}, "rules": {"ceiling": 1 << 30}});
        assert_eq!(shown("psi", set).unwrap(), "idle=9s ceiling=1G (--params shows all)");
        let fixed = serde_json::json!({"params": {"size": 256 << 20}, "rules": {}});
        assert_eq!(shown("fixed", fixed).unwrap(), "size=256M (--params shows all)");
        // A VMM of another version lacks some parameters and has others that this version does not
        // know.
        let other = serde_json::json!({"params": {"tide": 7}});
        assert_eq!(shown("psi", other.clone()), None);
        assert_eq!(shown("moon", other), None);
    }

    #[test]
    fn all_parameters_are_shown_in_columns_on_demand() {
        let info = info_with(
            "amf",
            serde_json::json!({"params": {"watermark-scale": 1024, "reclaim": 40}, "rules": {"lost": 3_000}}),
        );
        let expected = "\
PARAMETER        SCOPE  VALUE  DEFAULT  MEANING
watermark-scale  amf     1024     1024  Multiplier of each node's watermarks for the limits of free memory in Table 2 of the paper.
reclaim          amf       40       30  Share of DRAM that page descriptors of free sections may take before these sections are returned.
lost             rules     3s       3s  Time without a report after which reports count as lost.
";
        assert_eq!(parameters_table(&info), expected);
    }

    #[test]
    fn every_outcome_has_a_text() {
        let (moved_bytes, after_ms) = (64 << 20, 5_000);
        for (end, words) in [
            (Outcome::DryRun, "dry run"),
            (Outcome::Pending { moved_bytes }, "pending, 64 MiB so far"),
            (Outcome::Stuck { moved_bytes }, "stuck, 64 MiB so far"),
            (
                Outcome::Partly { moved_bytes, after_ms, by: Some(9), lack: None },
                "64 MiB after 5.0 s, 9 withdrew the rest",
            ),
            (
                Outcome::Partly {
                    moved_bytes,
                    after_ms,
                    by: None,
                    lack: Some("pool-full".to_owned()),
                },
                "64 MiB after 5.0 s, the host lacks the rest: pool-full",
            ),
            (Outcome::Withdrawn { after_ms, by: 9 }, "nothing after 5.0 s, withdrawn by 9"),
            (
                Outcome::Superseded { moved_bytes, after_ms, by: 9 },
                "64 MiB after 5.0 s, then superseded by 9",
            ),
            (Outcome::ByHand { moved_bytes, after_ms }, "64 MiB after 5.0 s, then resized by hand"),
        ] {
            assert_eq!(outcome(&end), words);
        }
    }
}
