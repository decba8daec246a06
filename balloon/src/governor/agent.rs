//! State of the guest's agent, derived from its connections.

use super::{AgentState, Effects, Governor, Note};
use crate::TimeMs;

/// State of the guest's agent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agent {
    pub connected: bool,
    /// Time of the last report, or of the connection if no report has arrived on it.
    pub last_contact: Option<TimeMs>,
    /// Time at which the connection ended.
    disconnected_at: Option<TimeMs>,
    /// Last state for which a note was written.
    noted_state: Option<AgentState>,
    /// True if a note about the missing agent was already written.
    is_missing_noted: bool,
}

impl Agent {
    /// Returns true once if no agent has connected for too long. A disconnect alone is normal,
    /// because the agent also disconnects when its guest shuts down.
    fn is_newly_missing(&mut self, now: TimeMs, lost_ms: u64) -> bool {
        let is_late = self.disconnected_at.is_some_and(|at| now.since(at) >= lost_ms);
        let is_new = is_late && !self.is_missing_noted;
        self.is_missing_noted |= is_new;
        is_new
    }
}

impl Governor {
    pub(super) fn agent_connected(&mut self, now: TimeMs, effects: &mut Effects) {
        self.intake.connected();
        self.agent = Agent {
            connected: true,
            last_contact: Some(now),
            disconnected_at: None,
            noted_state: Some(AgentState::Live),
            is_missing_noted: false,
        };
        self.counters.connections += 1;
        effects.notes.push(Note::AgentConnected);
    }

    pub(super) fn agent_disconnected(&mut self, now: TimeMs, effects: &mut Effects) {
        self.agent.connected = false;
        self.agent.disconnected_at = Some(now);
        self.agent.noted_state = Some(AgentState::Gone);
        effects.notes.push(Note::AgentDisconnected);
    }

    /// Returns the agent's state. A connected agent is silent if it sends no valid reports.
    pub fn agent_state(&self, now: TimeMs) -> AgentState {
        match self.agent {
            Agent { last_contact: None, .. } => AgentState::Never,
            Agent { connected: false, .. } => AgentState::Gone,
            Agent { last_contact: Some(at), .. }
                if now.since(at) >= self.controller.rules().lost_ms =>
            {
                AgentState::Silent
            }
            _ => AgentState::Live,
        }
    }

    /// Writes one note if an agent has become silent or has not reconnected, and one when it
    /// reports again.
    pub(super) fn watch_agent(&mut self, now: TimeMs, effects: &mut Effects) {
        if self.agent.is_newly_missing(now, self.controller.rules().lost_ms) {
            effects.notes.push(Note::AgentMissing);
        }
        let state = self.agent_state(now);
        if self.agent.noted_state.is_some_and(|noted| noted != state) {
            effects.notes.push(Note::AgentState(state));
            self.agent.noted_state = Some(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostView;
    use crate::controller::Rules;
    use crate::governor::Event;
    use crate::policy::Policy;

    /// A disconnect alone causes no warning, because an agent also disconnects when its guest shuts
    /// down.
    #[test]
    fn agent_that_is_gone_is_missed_once_if_none_connects() {
        let (host, rules) = (HostView::default(), Rules::default());
        let mut governor =
            Governor::new(Policy::default(), rules, false, &host, TimeMs(0)).expect("defaults");
        assert_eq!(governor.agent_state(TimeMs(60_000)), AgentState::Never);
        let mut step = |event, now| {
            let effects = governor.effects_of(event, &host, TimeMs(now));
            effects.notes.iter().any(|note| matches!(note, Note::AgentMissing))
        };
        assert!(!step(Event::Tick, 60_000), "no agent was connected");
        step(Event::AgentConnected, 60_000);
        assert!(!step(Event::Tick, 120_000), "it is connected");
        step(Event::AgentDisconnected, 120_000);
        let missed = [122_999, 123_000, 129_000].map(|now| step(Event::Tick, now));
        assert_eq!(missed, [false, true, false]);
        step(Event::AgentConnected, 130_000);
        step(Event::AgentDisconnected, 130_000);
        assert!(step(Event::Tick, 133_000), "another agent");
    }
}
