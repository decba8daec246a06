//! Policies: how much hotplugged memory a guest should have.
//!
//! A policy is a pure function: parameters, state, input and time go in; a new state and a
//! [`Decision`] come out. It knows nothing of zones' limits, of cool-downs, or of what the guest
//! refused: that is the controller's business, and the same for every policy.

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

/// What a policy sees.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The guest's latest report.
    pub report: &'a Report,
    /// The VM's zones.
    pub host: &'a HostView,
    /// What is decided is carried out, as far as the rules above let it. Else, in a dry run or a
    /// pause, nothing that takes several steps begins.
    pub is_carried_out: bool,
}

/// What a policy wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// The hotplugged memory that the guest should have, all zones together; `None` leaves it as
    /// it is.
    pub want_bytes: Option<u64>,
    /// The guest node for whose sake the change is: memory near to it comes first and goes last.
    /// `None`: the VM as a whole.
    pub near: Option<u32>,
    /// The guest node whose memory is to go: what is nearest to it goes first, within its tier.
    /// For a shrink alone.
    pub from: Option<u32>,
    /// Why.
    pub reason: Reason,
    /// The guest is short now: no cool-down applies, and should the reports stop here, more is
    /// given.
    pub pressure: bool,
    /// Under so much memory the agent should report at its fast rate.
    pub watermark_bytes: u64,
    /// What that is of: what the policy decides by.
    pub watermark_of: Measure,
}

impl Decision {
    /// Nothing is to change, for this reason.
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

    /// So much is to be there in all, for this reason.
    fn want(bytes: u64, reason: Reason) -> Self {
        Decision { want_bytes: Some(bytes), ..Decision::hold(reason) }
    }

    /// The same with fast reports while less than this is free.
    fn watching_free(self, watermark_bytes: u64) -> Self {
        Decision { watermark_bytes, watermark_of: Measure::Free, ..self }
    }

    /// The same for a policy with one watermark: it is to be seen coming, but not by most of the
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
    /// Sizes by what the guest will need; the default.
    Psi(psi::Params),
    /// Integrates by scaled watermarks, reclaims by what page descriptors take up.
    Amf(amf::Params),
    /// Integrates node by node by scaled watermarks, reclaims by what is free.
    Dapper(dapper::Params),
    /// Moves small units at one watermark, and back when they are free.
    Pmb(pmb::Params),
    /// Lends large units before kswapd wakes, and takes them back in the background.
    Memorage(memorage::Params),
    /// Keeps one size.
    Fixed(fixed::Params),
    /// Decides nothing.
    Off,
}

/// What a policy remembers from one report to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyState {
    /// Of `psi`.
    Psi(Box<psi::State>),
    /// Of `amf`.
    Amf(Box<amf::State>),
    /// Of `dapper`.
    Dapper(Box<dapper::State>),
    /// Of `pmb`.
    Pmb(Box<pmb::State>),
    /// Of `memorage`.
    Memorage(Box<memorage::State>),
    /// Of the policies that remember nothing.
    Empty,
}

impl Default for Policy {
    fn default() -> Self {
        Policy::Psi(psi::Params::default())
    }
}

impl Policy {
    /// The names that `--pressure policy=` takes.
    pub const NAMES: [&'static str; 7] =
        ["psi", "amf", "dapper", "pmb", "memorage", "fixed", "off"];

    /// The policy's name on the command line and in metrics.
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

    /// The policy called `name`, with default parameters.
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

    /// Its parameters by name, if it has any.
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

    /// The table of its parameters.
    pub fn table(&self) -> &'static [Param] {
        self.parameters().map_or(&[], |params| params.table())
    }

    /// The same policy with these parameters changed: all of them, or, with an error, none.
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

    /// Why it grows a guest, and why it shrinks one: its own reasons, beside those of the rules
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

    /// What the policy remembers before the first report.
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

    /// For how long reports must have been the same for the passing of time alone to change nothing
    /// that is decided, where `state` does not say more: the longest time that the policy
    /// compares a distance of time with.
    pub fn settle_ms(&self) -> u64 {
        // The stretches over which rates are taken, and after which sizes count as settled.
        const WINDOWS_MS: u64 = 5_000;
        let times = self.table().iter().zip(0..).filter(|(param, _)| param.unit == Unit::Ms);
        let longest = times.filter_map(|(_, index)| Some(self.parameters()?.value(index))).max();
        match self {
            // What it learns fades over hours: its state says what is left of it.
            Policy::Psi(_) => WINDOWS_MS,
            _ => WINDOWS_MS + longest.unwrap_or(0),
        }
    }

    /// Whether `state` has nothing in it that time alone will change, once reports have been the
    /// same for [`Policy::settle_ms`].
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
        /// Calls a policy with its own state, and wraps what that becomes.
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
    fn every_name_makes_the_policy_of_that_name() {
        for name in Policy::NAMES {
            let policy = Policy::from_name(name).expect("listed");
            assert_eq!(policy.name(), name);
            policy.validate().expect("defaults are inside their bounds");
        }
        assert_eq!(Policy::from_name("Psi"), None);
        assert_eq!(Policy::default().name(), "psi");
    }

    #[test]
    fn parameters_are_changed_together_or_not_at_all() {
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
    fn no_parameter_has_two_owners() {
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
