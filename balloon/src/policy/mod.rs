//! Policies, which decide on the size of a guest's hotplugged memory.
//!
//! A policy is a pure function of parameters, state, input and time. It returns a new state and a
//! [`Decision`]. Limits of zones, cool-downs and requests without progress are the same for every
//! policy, so the controller handles them.

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
    /// Last report of the guest.
    pub report: &'a Report,
    /// Sizes of the zones and of the pool.
    pub host: &'a HostView,
    /// The decision is carried out within the rules above every policy. False in a dry run or a
    /// pause, in which a policy must not begin anything that takes several steps.
    pub is_carried_out: bool,
}

/// Decision of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// Hotplugged memory that the guest should have in all zones together. `None` leaves it
    /// unchanged.
    pub want_bytes: Option<u64>,
    /// Guest node for which the size changes: memory near it is added first and removed last.
    /// `None` for the VM as a whole.
    pub near: Option<u32>,
    /// Guest node from which memory is removed: within a tier, the memory nearest to it goes first.
    /// For a shrink only.
    pub from: Option<u32>,
    /// Reason for the decision.
    pub reason: Reason,
    /// The guest is short now, so no cool-down applies. If reports are lost after this one, the
    /// guest grows.
    pub pressure: bool,
    /// Size below which the agent should report at its fast rate.
    pub watermark_bytes: u64,
    /// Measure of `watermark_bytes`, which is the one that the policy decides by.
    pub watermark_of: Measure,
}

impl Decision {
    /// Leaves the size unchanged.
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

    /// Requests a total size of `bytes`.
    fn want(bytes: u64, reason: Reason) -> Self {
        Decision { want_bytes: Some(bytes), ..Decision::hold(reason) }
    }

    /// Adds fast reports while less than `watermark_bytes` are free.
    fn watching_free(self, watermark_bytes: u64) -> Self {
        Decision { watermark_bytes, watermark_of: Measure::Free, ..self }
    }

    /// Adds fast reports for a policy with one watermark: below 1.5 times the watermark, so that
    /// they begin before it is reached, but at most below half of the guest's memory.
    fn watching_one(self, watermark_bytes: u64, input: Input<'_>) -> Self {
        let watch_bytes = watermark_bytes.saturating_add(watermark_bytes / 2);
        self.watching_free(watch_bytes.min(input.report.memory().total_bytes / 2))
    }
}

/// A policy with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "policy", rename_all = "snake_case")]
pub enum Policy {
    /// Sizes by available memory and signs of pressure. The default.
    Psi(psi::Params),
    /// Integrates by scaled watermarks, and reclaims by the size of page descriptors.
    Amf(amf::Params),
    /// Integrates for each node by scaled watermarks, and reclaims by free memory.
    Dapper(dapper::Params),
    /// Moves small units at one watermark, and returns them when they are free.
    Pmb(pmb::Params),
    /// Lends large units before kswapd wakes, and returns them in the background.
    Memorage(memorage::Params),
    /// Keeps a fixed size.
    Fixed(fixed::Params),
    /// Makes no decisions.
    Off,
}

/// State of a policy between two reports.
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
    /// For policies without state.
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

    /// Returns the policy called `name`, with default parameters.
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

    /// Returns the table of the parameters.
    pub fn table(&self) -> &'static [Param] {
        self.parameters().map_or(&[], |params| params.table())
    }

    /// Returns this policy with changed parameters. On an error, none is changed.
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

    /// Checks the parameters.
    pub fn validate(&self) -> Result<(), ParamError> {
        self.parameters().map_or(Ok(()), |params| params.validate())
    }

    /// Returns the policy's own reasons to grow and to shrink a guest, without those of the rules
    /// above every policy.
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

    /// Returns the time for which reports must have been the same before the passing of time alone
    /// changes no decision, unless `state` requires more. This is the longest time that the policy
    /// compares a duration with.
    pub fn settle_ms(&self) -> u64 {
        // Longest period over which rates are computed, and after which sizes count as settled.
        const WINDOWS_MS: u64 = 5_000;
        let times = self.table().iter().zip(0..).filter(|(param, _)| param.unit == Unit::Ms);
        let longest = times.filter_map(|(_, index)| Some(self.parameters()?.value(index))).max();
        match self {
            // Learned values fade over hours, so [`Policy::is_settled`] checks the state.
            Policy::Psi(_) => WINDOWS_MS,
            _ => WINDOWS_MS + longest.unwrap_or(0),
        }
    }

    /// Returns true if time alone does not change `state`, once reports have been the same for
    /// [`Policy::settle_ms`].
    pub fn is_settled(&self, state: &PolicyState, now: TimeMs) -> bool {
        match (self, state) {
            (Policy::Psi(params), PolicyState::Psi(state)) => state.is_settled(params, now),
            _ => true,
        }
    }

    /// Decides on one report. A state of another policy is replaced by the initial one, so that
    /// policies can be exchanged while a VM runs.
    pub fn decide(
        &self,
        state: PolicyState,
        input: Input<'_>,
        now: TimeMs,
    ) -> (PolicyState, Decision) {
        match self {
            Policy::Amf(_) | Policy::Dapper(_) | Policy::Pmb(_) | Policy::Memorage(_) => {
                let (left, reserve_bytes) = reserve::without_reserve(input.report, input.host);
                let (state, decision) =
                    self.decide_on(state, Input { report: &left, ..input }, now);
                // The agent compares its watermark with free memory that includes the reserve.
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
        /// Calls a policy with its own state, and wraps the new state.
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
        assert_eq!(error.to_string(), r#"parameter "calm" is unknown; those of off are none"#);
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
