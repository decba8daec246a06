//! Policies, which decide how much hotplugged memory a guest should have.
//!
//! A policy is a pure function of parameters, state, input and time. It returns a new state and a
//! [`Decision`]. The controller handles zone limits, cool-downs and requests without progress,
//! because they are the same for every policy.

pub mod amf;
pub mod dapper;
pub mod fixed;
mod memorage;
pub mod off;
mod pmb;
pub mod psi;
mod reserve;

pub(crate) mod boot_memory;
mod numa_view;
pub(crate) mod offlining;
mod onlining;
#[cfg(test)]
mod testing;
mod threshold_table;

use foreshore_proto::{Measure, Report};
use serde::Serialize;

use crate::params::{Param, Parameters, Setting, Unit};
use crate::plan::Reason;
use crate::{HostView, ParamError, TimeMs};

/// Input of a policy.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Last report from the guest.
    pub report: &'a Report,
    /// Sizes of the zones and the pool.
    pub host: &'a HostView,
    /// True if the decision will be carried out, within the rules that apply to every policy. False
    /// in a dry run or a pause. The policy must then not start a change that takes several steps.
    pub is_carried_out: bool,
}

/// Decision of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// Total hotplugged memory that the guest should have in all zones. `None` leaves the size
    /// unchanged.
    pub want_bytes: Option<u64>,
    /// Guest node for which the size changes. Memory near this node is added first and removed
    /// last. `None` for the VM as a whole.
    pub near: Option<u32>,
    /// Guest node from which a shrink removes memory. Within a tier, memory nearest to this node is
    /// removed first.
    pub from: Option<u32>,
    /// Reason for the decision.
    pub reason: Reason,
    /// The guest is short of memory now, so no cool-down applies. If no further report arrives, the
    /// guest still grows.
    pub pressure: bool,
    /// Size below which the agent should report at its fast rate.
    pub watermark_bytes: u64,
    /// Measure that is compared with `watermark_bytes`. It is the measure that the policy itself
    /// uses.
    pub watermark_of: Measure,
}

impl Decision {
    /// Returns a decision that leaves the size unchanged.
    fn hold(reason: Reason) -> Self {
        Decision {
            want_bytes: None,
            near: None,
            from: None,
            reason,
            pressure: false,
            watermark_bytes: 0,
            watermark_of: Measure::default(),
        }
    }

    /// Returns a decision that requests a total size of `bytes`.
    fn want(bytes: u64, reason: Reason) -> Self {
        Decision { want_bytes: Some(bytes), ..Decision::hold(reason) }
    }

    /// Requests fast reports while free memory is below `watermark_bytes`.
    fn watching_free(self, watermark_bytes: u64) -> Self {
        Decision { watermark_bytes, watermark_of: Measure::Free, ..self }
    }

    /// Requests fast reports for a policy with a single watermark. Fast reports start below 1.5
    /// times the watermark, before the watermark itself is reached, but at most below half of the
    /// guest's memory.
    fn watching_one(self, watermark_bytes: u64, input: Input<'_>) -> Self {
        let watch_bytes = watermark_bytes.saturating_add(watermark_bytes / 2);
        self.watching_free(watch_bytes.min(input.report.memory().total_bytes / 2))
    }
}

/// A policy with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "policy", rename_all = "snake_case")]
pub enum Policy {
    /// Sizes the guest by its available memory and by signs of pressure. The default policy.
    Psi(psi::Params),
    /// Adds memory if free memory is below scaled watermarks, and removes it if page descriptors
    /// take too much DRAM.
    Amf(amf::Params),
    /// Adds memory to a node if its free memory is below scaled watermarks, and removes memory if a
    /// large part of it is free.
    Dapper(dapper::Params),
    /// Adds small units of memory below a single watermark, and returns units that are completely
    /// free.
    Pmb(pmb::Params),
    /// Lends large units of memory before kswapd wakes, and returns them in the background.
    Memorage(memorage::Params),
    /// Keeps a fixed size.
    Fixed(fixed::Params),
    /// Makes no decisions.
    Off,
}

/// State that a policy keeps between two reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyState {
    /// State of `psi`.
    Psi(Box<psi::State>),
    /// State of `amf`.
    Amf(Box<amf::State>),
    /// State of `dapper`.
    Dapper(Box<dapper::State>),
    /// State of `pmb`.
    Pmb(Box<pmb::State>),
    /// State of `memorage`.
    Memorage(Box<memorage::State>),
    /// No state, for policies that need none.
    Empty,
}

impl Default for Policy {
    fn default() -> Self {
        Policy::Psi(psi::Params::default())
    }
}

impl Policy {
    /// Names that `--pressure policy=` accepts.
    pub const NAMES: [&'static str; 7] =
        ["psi", "amf", "dapper", "pmb", "memorage", "fixed", "off"];

    /// Returns the name on the command line and in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::Psi(_) => "psi",
            Policy::Amf(_) => "amf",
            Policy::Dapper(_) => "dapper",
            Policy::Pmb(_) => "pmb",
            Policy::Memorage(_) => "memorage",
            Policy::Fixed(_) => "fixed",
            Policy::Off => "off",
        }
    }

    /// Returns the policy called `name` with default parameters.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "psi" => Policy::Psi(psi::Params::default()),
            "amf" => Policy::Amf(amf::Params::default()),
            "dapper" => Policy::Dapper(dapper::Params::default()),
            "pmb" => Policy::Pmb(pmb::Params::default()),
            "memorage" => Policy::Memorage(memorage::Params::default()),
            "fixed" => Policy::Fixed(fixed::Params::default()),
            "off" => Policy::Off,
            _ => return None,
        })
    }

    /// Returns the parameters, if the policy has any.
    pub fn parameters(&self) -> Option<&dyn Parameters> {
        Some(match self {
            Policy::Psi(params) => params,
            Policy::Amf(params) => params,
            Policy::Dapper(params) => params,
            Policy::Pmb(params) => params,
            Policy::Memorage(params) => params,
            Policy::Fixed(params) => params,
            Policy::Off => return None,
        })
    }

    fn parameters_mut(&mut self) -> Option<&mut dyn Parameters> {
        Some(match self {
            Policy::Psi(params) => params,
            Policy::Amf(params) => params,
            Policy::Dapper(params) => params,
            Policy::Pmb(params) => params,
            Policy::Memorage(params) => params,
            Policy::Fixed(params) => params,
            Policy::Off => return None,
        })
    }

    /// Returns the table of the policy's parameters.
    pub fn table(&self) -> &'static [Param] {
        self.parameters().map_or(&[], |params| params.table())
    }

    /// Returns this policy with changed parameters. If one of them is invalid, none is changed.
    pub fn with<'a>(
        &self,
        settings: impl IntoIterator<Item = (&'a str, &'a Setting)>,
    ) -> Result<Self, ParamError> {
        let (mut changed, of) = (self.clone(), self.name());
        for (name, setting) in settings {
            match changed.parameters_mut() {
                Some(params) => params.set(of, name, setting)?,
                None => {
                    return Err(ParamError::Unknown {
                        name: name.to_owned(),
                        of,
                        known: "none".to_owned(),
                    });
                }
            }
        }
        changed.validate()?;
        Ok(changed)
    }

    /// Checks that all parameters are valid.
    pub fn validate(&self) -> Result<(), ParamError> {
        self.parameters().map_or(Ok(()), |params| params.validate())
    }

    /// Returns the policy's own reasons to grow and to shrink a guest. Reasons of the rules that
    /// apply to every policy are not included.
    pub fn reasons(&self) -> (&'static [Reason], &'static [Reason]) {
        match self {
            Policy::Psi(_) => (
                &[
                    Reason::LowAvailable,
                    Reason::Filling,
                    Reason::Swapping,
                    Reason::Stalled,
                    Reason::Thrashing,
                ],
                &[Reason::Surplus],
            ),
            Policy::Amf(_) => {
                (&[Reason::LowFree, Reason::AtWatermarks], &[Reason::DescriptorSpace])
            }
            Policy::Dapper(_) => (&[Reason::LowFree, Reason::AtWatermarks], &[Reason::FreeShare]),
            Policy::Pmb(_) => (&[Reason::LowFree], &[Reason::FreeUnits]),
            Policy::Memorage(_) => (&[Reason::LowFree], &[Reason::Calm, Reason::StorageShort]),
            Policy::Fixed(_) => (&[Reason::FixedSize], &[Reason::FixedSize]),
            Policy::Off => (&[], &[]),
        }
    }

    /// Returns the state before the first report.
    pub fn initial_state(&self) -> PolicyState {
        match self {
            Policy::Psi(_) => PolicyState::Psi(Box::default()),
            Policy::Amf(_) => PolicyState::Amf(Box::default()),
            Policy::Dapper(_) => PolicyState::Dapper(Box::default()),
            Policy::Pmb(_) => PolicyState::Pmb(Box::default()),
            Policy::Memorage(_) => PolicyState::Memorage(Box::default()),
            Policy::Fixed(_) | Policy::Off => PolicyState::Empty,
        }
    }

    /// Returns how long reports must have been the same before time alone no longer changes a
    /// decision: the longest time that the policy compares with a duration. `state` may require
    /// more time.
    pub fn quiesce_ms(&self) -> u64 {
        // Longest period over which rates are computed, and after which sizes count as stable.
        const WINDOWS_MS: u64 = 5_000;
        let times = self.table().iter().zip(0..).filter(|(param, _)| param.unit == Unit::Ms);
        let longest = times.filter_map(|(_, index)| Some(self.parameters()?.value(index))).max();
        match self {
            // [`Policy::is_quiescent`] checks the state instead, because learned values decay over
            // hours.
            Policy::Psi(_) => WINDOWS_MS,
            _ => WINDOWS_MS + longest.unwrap_or(0),
        }
    }

    /// Returns true if time alone does not change `state` after reports have been the same for
    /// [`Policy::quiesce_ms`].
    pub fn is_quiescent(&self, state: &PolicyState, now: TimeMs) -> bool {
        match (self, state) {
            (Policy::Psi(params), PolicyState::Psi(state)) => state.is_quiescent(params, now),
            _ => true,
        }
    }

    /// Makes a decision after a report. If the state belongs to another policy, it is replaced by
    /// the initial state, so the policy can be changed while a VM runs.
    pub fn decide(
        &self,
        state: PolicyState,
        input: Input<'_>,
        now: TimeMs,
    ) -> (PolicyState, Decision) {
        match self {
            Policy::Amf(_) | Policy::Dapper(_) | Policy::Pmb(_) | Policy::Memorage(_) => {
                let (left, reserve_bytes) = reserve::exclude_reserve(input.report, input.host);
                let (state, decision) =
                    self.decide_on(state, Input { report: &left, ..input }, now);
                // The agent compares the watermark with free memory that includes the reserve.
                let watermark_bytes = match decision.watermark_of {
                    Measure::Free => decision.watermark_bytes.saturating_add(reserve_bytes),
                    Measure::Available => decision.watermark_bytes,
                };
                (state, Decision { watermark_bytes, ..decision })
            }
            _ => self.decide_on(state, input, now),
        }
    }

    fn decide_on(
        &self,
        state: PolicyState,
        input: Input<'_>,
        now: TimeMs,
    ) -> (PolicyState, Decision) {
        /// Calls a policy with its own type of state, and wraps the new state.
        macro_rules! by {
            ($policy:ident, $variant:ident, $params:expr) => {{
                let own = match state {
                    PolicyState::$variant(state) => *state,
                    _ => $policy::State::default(),
                };
                let (own, decision) = $policy::decide($params, own, input, now);
                (PolicyState::$variant(Box::new(own)), decision)
            }};
        }
        match self {
            Policy::Psi(params) => by!(psi, Psi, params),
            Policy::Amf(params) => by!(amf, Amf, params),
            Policy::Dapper(params) => by!(dapper, Dapper, params),
            Policy::Pmb(params) => by!(pmb, Pmb, params),
            Policy::Memorage(params) => by!(memorage, Memorage, params),
            Policy::Fixed(params) => (PolicyState::Empty, fixed::decide(params, input.host)),
            Policy::Off => (PolicyState::Empty, off::decide()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_selects_policy_of_that_name() {
        for name in Policy::NAMES {
            let policy = Policy::from_name(name).expect("listed");
            assert_eq!(policy.name(), name);
            policy.validate().expect("defaults are inside their bounds");
        }
        assert_eq!(Policy::from_name("Psi"), None);
        assert_eq!(Policy::default().name(), "psi");
    }

    #[test]
    fn parameters_change_together_or_not_at_all() {
        let policy = Policy::from_name("memorage").expect("listed");
        let (unit, calm) = (Setting::from("512M"), Setting::from("2s"));
        let changed = policy.with([("unit", &unit), ("calm", &calm)]).expect("in bounds");
        let params = changed.parameters().expect("has some");
        assert_eq!((params.get("unit"), params.get("calm")), (Some(512 << 20), Some(2_000)));
        let error = policy.with([("unit", &unit), ("calm", &"1ms".into())]).expect_err("too short");
        assert_eq!(error.to_string(), "calm is 1ms, must be 100ms to 24h");
        let error = Policy::Off.with([("calm", &calm)]).expect_err("off has none");
        assert_eq!(error.to_string(), r#"parameter "calm" is unknown; parameters of off: none"#);
    }

    #[test]
    fn each_parameter_has_one_owner() {
        for name in Policy::NAMES {
            let table = Policy::from_name(name).expect("listed").table();
            for param in table {
                let rule =
                    crate::controller::Rules::TABLE.iter().any(|rule| rule.name == param.name);
                assert!(!rule, "{} is of {name} and of the rules", param.name);
                assert_eq!(table.iter().filter(|other| other.name == param.name).count(), 1);
            }
        }
    }
}
