//! Writes the governor's notes to the log, the trace and the metrics.

use std::time::Duration;

use balloon::governor::{AgentState, Note, PlanNote};
use balloon::plan::Direction;
use balloon::proto::OnlinePolicy;
use balloon::{HostView, TimeMs, ZoneId};
use foreshore_devices::log::rate_limited;
use tracing::{info, warn};

use super::Core;
use crate::governor::metrics::GuestSoftware;

impl Core {
    pub(super) fn write_down(&mut self, note: Note, host: &HostView, now: TimeMs) {
        match note {
            Note::AgentConnected => rate_limited!(info, "The guest's agent is connected"),
            Note::AgentDisconnected => rate_limited!(info, "The guest's agent has disconnected"),
            Note::AgentMissing => {
                rate_limited!(
                    warn,
                    "The guest's agent has disconnected, and no agent has connected since; start it in the guest"
                )
            }
            Note::AgentState(AgentState::Silent) => {
                warn!(
                    "The guest's agent is connected, but sends no reports; its log in the guest has the reason"
                );
            }
            Note::AgentState(state) => {
                info!(state = state.label(), "The guest's agent reports again")
            }
            Note::Hello(hello) => {
                rate_limited!(
                    info,
                    agent = hello.agent_version(),
                    kernel = hello.kernel_release(),
                    preemption = hello.preemption(),
                    "The guest's agent has sent its hello"
                );
                self.guest
                    .update(GuestSoftware::new(hello.kernel_release(), hello.agent_version()));
                if let Some(listener) = &self.on_hello {
                    listener(&hello);
                }
            }
            Note::Refused { refusal, by_agent, count } => {
                let what = match by_agent {
                    true => "Refused a line of the agent",
                    false => "Refused statistics of the balloon",
                };
                warn!(reason = refusal.label(), count, %refusal, "{what}");
            }
            Note::StatisticsTakeOver => {
                info!("The guest is sized by balloon statistics until its agent reports")
            }
            Note::DriverReady(zone) => {
                rate_limited!(info, zone = self.name(zone), "The guest's driver is ready");
            }
            Note::NoProgress(zone) => rate_limited!(
                warn,
                zone = self.name(zone),
                "The resize makes no progress; the guest is reminded at increasing intervals"
            ),
            Note::Held(zone) => rate_limited!(
                warn,
                zone = self.name(zone),
                "The guest lacks room for the page descriptors of all requested memory; the excess is held back"
            ),
            Note::Online { took_ms, grown_bytes } => {
                info!(took_ms, grown_bytes, "The memory requested for the shortage is online");
                self.report_to_online.observe(Duration::from_millis(took_ms));
            }
            Note::Reached(zone, plugged_bytes) => {
                info!(
                    zone = self.name(zone),
                    plugged_bytes, "The zone has reached the requested size"
                );
            }
            Note::OnlinePolicy(policy) => self.log_online_policy(policy),
            Note::Resized(zone, size_bytes) => {
                info!(
                    zone = self.name(zone),
                    size_bytes,
                    "The zone was resized manually; the governor leaves it alone until it is resumed"
                );
            }
            Note::Plan(decided) => self.record_decision(&decided, host, now),
        }
    }

    pub(super) fn name(&self, zone: ZoneId) -> &str {
        &self.zones()[zone].id
    }

    fn log_online_policy(&self, policy: OnlinePolicy) {
        let online_policy = policy.label();
        if policy == OnlinePolicy::OnlineMovable {
            rate_limited!(info, online_policy, "The guest onlines plugged memory as movable again");
            return;
        }
        rate_limited!(
            warn,
            online_policy,
            lent_permille = self.governor.controller().rules().unmovable_permille,
            "The guest does not online plugged memory as movable, so it may be unable to return memory; lent_permille is the part of each zone that is lent"
        );
    }

    fn record_decision(&mut self, decided: &PlanNote, host: &HostView, now: TimeMs) {
        let PlanNote { plan, policy, is_from_report, number } = decided;
        let report = self.governor.last_report().map(|(_, report)| report);
        if let Some(recorder) = &mut self.recorder {
            if let Some(report) = report.filter(|_| *is_from_report) {
                recorder.report(report, host, now);
            }
            recorder.host(host, now);
            if number.is_some() {
                recorder.plan(plan, host, now);
            }
        }
        let Some(decision) = number else { return };
        if plan.direction != Direction::Hold {
            info!(
                decision,
                policy,
                direction = plan.direction.label(),
                reason = plan.reason.label(),
                dry_run = plan.dry_run,
                requested_bytes = plan.requested_bytes(),
                available_bytes = report.map(|report| report.memory().available_bytes),
                "Plan"
            );
        }
    }
}
