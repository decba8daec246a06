//! Policies: how much hotplugged memory a guest should have.
//!
//! A policy is a pure function: parameters, state, input and time go in; a new state and a [`Decision`] come out. It
//! knows nothing of zones' limits, of cool-downs, or of what the guest refused: that is the controller's business,
//! and the same for every policy.

pub mod fixed;
pub mod off;
pub mod psi;

use foreshore_proto::Report;
use serde::Serialize;

use crate::plan::Reason;
use crate::{HostView, ParamError, TimeMs};

/// What a policy sees.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The guest's latest report.
    pub report: &'a Report,
    /// The VM's zones.
    pub host: &'a HostView,
}

/// What a policy wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// The hotplugged memory that the guest should have, all zones together; `None` leaves it as it is.
    pub want_bytes: Option<u64>,
    /// The guest node for whose sake the change is: memory near to it comes first and goes last. `None`: the VM as
    /// a whole.
    pub near: Option<u32>,
    /// Why.
    pub reason: Reason,
    /// The guest is short now: no cool-down applies, and should the reports stop here, more is given.
    pub pressure: bool,
    /// The available memory under which the agent should report at its fast rate.
    pub watermark_bytes: u64,
}

/// A policy with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "policy", rename_all = "snake_case")]
pub enum Policy {
    /// Sizes by what the guest will need; the default.
    Psi(psi::Params),
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
    pub const NAMES: [&'static str; 3] = ["psi", "fixed", "off"];

    /// The policy's name on the command line and in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::Psi(_) => "psi",
            Policy::Fixed(_) => "fixed",
            Policy::Off => "off",
        }
    }

    /// The policy called `name`, with default parameters.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "psi" => Some(Policy::Psi(psi::Params::default())),
            "fixed" => Some(Policy::Fixed(fixed::Params::default())),
            "off" => Some(Policy::Off),
            _ => None,
        }
    }

    /// Checks the parameters.
    pub fn validate(&self) -> Result<(), ParamError> {
        match self {
            Policy::Psi(params) => params.validate(),
            Policy::Fixed(params) => params.validate(),
            Policy::Off => Ok(()),
        }
    }

    /// What the policy remembers before the first report.
    pub fn initial_state(&self) -> PolicyState {
        match self {
            Policy::Psi(_) => PolicyState::Psi(Box::default()),
            Policy::Fixed(_) | Policy::Off => PolicyState::Empty,
        }
    }

    /// Decides on one report. A state of another policy is replaced by the initial one, so that policies can be
    /// exchanged while a VM runs.
    pub fn decide(&self, state: PolicyState, input: Input<'_>, now: TimeMs) -> (PolicyState, Decision) {
        match (self, state) {
            (Policy::Psi(params), PolicyState::Psi(state)) => {
                let (state, decision) = psi::decide(params, *state, input, now);
                (PolicyState::Psi(Box::new(state)), decision)
            }
            (Policy::Psi(_), PolicyState::Empty) => self.decide(self.initial_state(), input, now),
            (Policy::Fixed(params), _) => (PolicyState::Empty, fixed::decide(params, input.host)),
            (Policy::Off, _) => (PolicyState::Empty, off::decide()),
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
}
