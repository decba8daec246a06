//! Checks each report against earlier reports of the same guest.

use foreshore_proto::{AgentMessage, Refusal, Report, ZoneKind, decode_agent_message};

use crate::TimeMs;

/// Largest lead that the guest's clock may gain on the host's clock between two reports. The limit
/// is generous, because it must detect false reports rather than clock drift.
const MAX_CLOCK_LEAD_MS: u64 = 5_000;

/// Largest speed-up of the guest's clock relative to the host's clock, as a fraction: one tenth.
/// Linux allows a tick that is longer by a tenth (adjtimex(2), `tick`).
const CLOCK_SLEW_PART: u64 = 10;

/// Time after which refused reports are accepted, if they are consistent with each other but not
/// with the last accepted one. By then they are more likely to be true than the accepted one, and
/// the governor must not refuse true reports forever.
const OVERRIDE_MS: u64 = 3_000;

/// Parses one line of the agent, without its newline. Parsing needs no state, so any thread can do
/// it.
pub fn parse_line(line: &[u8]) -> Result<AgentMessage, Refusal> {
    AgentMessage::try_from(decode_agent_message(line)?)
}

/// Returns true if `report` is from an agent. An agent's report contains the zones below 4 GiB that
/// every x86-64 guest has, and the size of memory blocks. A report made from balloon statistics
/// contains neither.
pub(crate) fn is_by_agent(report: &Report) -> bool {
    let is_low = |kind| matches!(kind, ZoneKind::Dma | ZoneKind::Dma32);
    report.blocks().block_bytes > 0 || report.zones().iter().any(|zone| is_low(zone.kind))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReportStamp {
    seq: u64,
    guest_ms: u64,
    at: TimeMs,
}

impl ReportStamp {
    /// Returns the guest's clock at `now`, assuming that this report arrived without delay.
    fn clock_at(&self, now: TimeMs) -> u64 {
        self.guest_ms.saturating_add(now.since(self.at))
    }

    fn check_not_after(&self, bound: u64) -> Result<(), Refusal> {
        if self.guest_ms > bound {
            return Err(Refusal::FromTheFuture { value: self.guest_ms, bound });
        }
        Ok(())
    }
}

/// Sequence of reports that are consistent with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReportSequence {
    last: ReportStamp,
    /// Report with the smallest delay, which is used to compare the clocks. A delayed report makes
    /// the guest's clock seem slow. If it were used, the next report without delay would seem to be
    /// from the future.
    least_delayed: ReportStamp,
    since: TimeMs,
    /// True if reports have shown for long enough that the guest is older than its VM.
    is_older_than_vm: bool,
}

impl ReportSequence {
    fn start(stamp: ReportStamp) -> Self {
        Self { last: stamp, least_delayed: stamp, since: stamp.at, is_older_than_vm: false }
    }

    fn extend(&self, next: ReportStamp) -> Result<Self, Refusal> {
        let last = self.last;
        if next.seq <= last.seq {
            return Err(Refusal::OutOfOrder { field: "seq", value: next.seq, last: last.seq });
        }
        if next.guest_ms < last.guest_ms {
            return Err(Refusal::OutOfOrder {
                field: "monotonic_ms",
                value: next.guest_ms,
                last: last.guest_ms,
            });
        }
        let clock = self.least_delayed.clock_at(next.at);
        next.check_not_after(clock.saturating_add(MAX_CLOCK_LEAD_MS))?;
        let least_delayed = if next.guest_ms >= clock { next } else { self.least_delayed };
        Ok(Self { last: next, least_delayed, ..*self })
    }
}

/// State of an agent's connection that determines which reports are accepted.
///
/// A false report must not determine forever which reports are accepted, because it would lock out
/// the true ones. Therefore the state starts empty on each new connection.
///
/// The first report is bounded by the host's clock, because a guest that was booted in its VM is
/// not older than the VM. A guest that was hibernated in another VM is older, because its clock
/// continues from the image. After the first report, the last accepted report bounds the next one.
/// A long enough sequence of refused reports overrides both bounds. False reports harm only their
/// own guest, and refusing all reports would harm it too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intake {
    /// Start of the guest.
    started: TimeMs,
    has_hello: bool,
    /// Reports that were accepted on this connection.
    accepted: Option<ReportSequence>,
    /// Reports that were refused since the last accepted one, if they are consistent with each
    /// other.
    refused: Option<ReportSequence>,
}

impl Intake {
    /// Creates the intake of a guest that starts at `now` or later.
    pub fn new(now: TimeMs) -> Self {
        Self { started: now, has_hello: false, accepted: None, refused: None }
    }

    /// Resets the state when an agent opens a new connection.
    pub fn connected(&mut self) {
        *self = Self::new(self.started);
    }

    /// Parses one line, without its newline, and checks the message. Combines [`parse_line`] and
    /// [`Self::accept`].
    pub fn accept_line(&mut self, line: &[u8], now: TimeMs) -> Result<AgentMessage, Refusal> {
        self.accept(parse_line(line)?, now)
    }

    /// Checks one message. A refused message does not affect the check of the next one. However,
    /// messages are accepted after all if they have been consistent with each other for
    /// `OVERRIDE_MS`.
    pub fn accept(&mut self, message: AgentMessage, now: TimeMs) -> Result<AgentMessage, Refusal> {
        match &message {
            AgentMessage::Hello(_) => self.has_hello = true,
            AgentMessage::Report(report) => self.check_order(report, now)?,
        }
        Ok(message)
    }

    fn check_order(&mut self, report: &Report, now: TimeMs) -> Result<(), Refusal> {
        if !self.has_hello {
            return Err(Refusal::BeforeHello);
        }
        let stamp = ReportStamp { seq: report.seq(), guest_ms: report.monotonic_ms(), at: now };
        let accepted = match self.check_sequence(stamp) {
            Ok(sequence) => sequence,
            Err(refusal) => {
                let refused = self.refused.and_then(|sequence| sequence.extend(stamp).ok());
                let refused = refused.unwrap_or_else(|| ReportSequence::start(stamp));
                self.refused = Some(refused);
                if now.since(refused.since) < OVERRIDE_MS {
                    return Err(refusal);
                }
                ReportSequence { is_older_than_vm: self.check_age(stamp).is_err(), ..refused }
            }
        };
        self.accepted = Some(accepted);
        self.refused = None;
        Ok(())
    }

    /// Checks a report against the accepted ones. Returns the accepted reports including this one.
    fn check_sequence(&self, stamp: ReportStamp) -> Result<ReportSequence, Refusal> {
        if !self.accepted.is_some_and(|sequence| sequence.is_older_than_vm) {
            self.check_age(stamp)?;
        }
        self.accepted
            .map_or_else(|| Ok(ReportSequence::start(stamp)), |sequence| sequence.extend(stamp))
    }

    /// Checks that a guest that was booted in its VM is not older than the VM. Its kernel may have
    /// started later than the VM, or again (kexec), but never earlier.
    fn check_age(&self, stamp: ReportStamp) -> Result<(), Refusal> {
        let age_ms = stamp.at.since(self.started);
        stamp.check_not_after(
            age_ms.saturating_add(age_ms / CLOCK_SLEW_PART).saturating_add(MAX_CLOCK_LEAD_MS),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HELLO: &str = r#"{"type":"hello","version":1,"agent_version":"0.1.0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;

    fn report_line(seq: u64, guest_ms: u64) -> Vec<u8> {
        format!(
            r#"{{"type":"report","version":1,"seq":{seq},"monotonic_ms":{guest_ms},
            "memory":{{"total_bytes":536870912,"free_bytes":0,"available_bytes":0}},
            "zones":[{{"node":0,"kind":"dma32","free_pages":0,"min_pages":0,"low_pages":0,"high_pages":0,"managed_pages":0}}]}}"#
        )
        .into_bytes()
    }

    fn greeted() -> Intake {
        let mut intake = Intake::new(TimeMs(0));
        greet(&mut intake, TimeMs(0));
        intake
    }

    fn greet(intake: &mut Intake, now: TimeMs) {
        intake.connected();
        intake.accept_line(HELLO.as_bytes(), now).expect("hello");
    }

    fn label(result: Result<AgentMessage, Refusal>) -> &'static str {
        result.expect_err("must be refused").label()
    }

    #[test]
    fn report_before_hello_is_refused() {
        let mut intake = Intake::new(TimeMs(0));
        assert_eq!(label(intake.accept_line(&report_line(1, 10), TimeMs(0))), "before_hello");
    }

    #[test]
    fn repeated_and_reordered_reports_are_refused_and_next_is_accepted() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(4, 1000), TimeMs(10)).is_ok());
        assert_eq!(label(intake.accept_line(&report_line(4, 1000), TimeMs(11))), "out_of_order");
        assert_eq!(label(intake.accept_line(&report_line(3, 1001), TimeMs(12))), "out_of_order");
        assert_eq!(label(intake.accept_line(&report_line(5, 999), TimeMs(13))), "out_of_order");
        assert!(intake.accept_line(&report_line(5, 1000), TimeMs(14)).is_ok());
    }

    #[test]
    fn report_from_the_future_is_refused_and_does_not_change_the_clock() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, 1000), TimeMs(0)).is_ok());
        let bound = 1000 + 50 + MAX_CLOCK_LEAD_MS;
        assert_eq!(
            label(intake.accept_line(&report_line(2, bound + 1), TimeMs(50))),
            "from_the_future"
        );
        assert!(intake.accept_line(&report_line(3, 1050), TimeMs(50)).is_ok());
        assert_eq!(
            label(intake.accept_line(&report_line(4, bound + 1), TimeMs(50))),
            "from_the_future"
        );
    }

    #[test]
    fn delayed_reports_in_a_burst_are_accepted() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, 1000), TimeMs(0)).is_ok());
        for n in 1..=30 {
            let line = report_line(1 + n, 1000 + 1000 * n);
            assert!(intake.accept_line(&line, TimeMs(30_000)).is_ok(), "report {n}");
        }
    }

    const DAY_MS: u64 = 86_400_000;

    #[test]
    fn report_after_a_delayed_one_is_not_from_the_future() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, 1000), TimeMs(1000)).is_ok());
        // The guest's reports were not read for three minutes.
        assert!(intake.accept_line(&report_line(2, 2000), TimeMs(180_000)).is_ok());
        assert!(intake.accept_line(&report_line(3, 180_040), TimeMs(180_050)).is_ok());
        let bound = 180_060 + MAX_CLOCK_LEAD_MS;
        assert_eq!(
            label(intake.accept_line(&report_line(4, bound + 1), TimeMs(180_060))),
            "from_the_future"
        );
        assert!(intake.accept_line(&report_line(4, bound), TimeMs(180_060)).is_ok());
    }

    #[test]
    fn reconnected_agent_starts_a_new_sequence() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(900, 50_000), TimeMs(50_000)).is_ok());
        intake.connected();
        assert_eq!(
            label(intake.accept_line(&report_line(1, 50_001), TimeMs(50_001))),
            "before_hello"
        );
        intake.accept_line(HELLO.as_bytes(), TimeMs(50_001)).expect("hello");
        assert_eq!(
            label(intake.accept_line(&report_line(1, 90_000), TimeMs(50_001))),
            "from_the_future"
        );
        assert!(
            intake.accept_line(&report_line(1, 200), TimeMs(50_001)).is_ok(),
            "a new kernel's clock"
        );
    }

    #[test]
    fn false_clock_does_not_lock_out_later_connections() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, DAY_MS), TimeMs(DAY_MS)).is_ok());
        greet(&mut intake, TimeMs(DAY_MS));
        assert!(
            intake.accept_line(&report_line(1, 10), TimeMs(DAY_MS)).is_ok(),
            "the report is far behind, or from a new kernel"
        );
        greet(&mut intake, TimeMs(DAY_MS));
        assert!(intake.accept_line(&report_line(1, DAY_MS), TimeMs(DAY_MS)).is_ok());
    }

    #[test]
    fn guest_that_seems_older_than_its_vm_is_not_accepted_at_once() {
        let mut intake = Intake::new(TimeMs(700));
        greet(&mut intake, TimeMs(DAY_MS));
        let bound = (DAY_MS - 700) + (DAY_MS - 700) / 10 + MAX_CLOCK_LEAD_MS;
        // Any number of reports is refused if they are not consistent with each other.
        for n in 1..100 {
            let now = TimeMs(DAY_MS + n * 100);
            let line = report_line(n, bound + 1 + n * 110 + (n % 2) * DAY_MS);
            assert_eq!(label(intake.accept_line(&line, now)), "from_the_future");
        }
        assert!(intake.accept_line(&report_line(1, bound), TimeMs(DAY_MS)).is_ok());
    }

    #[test]
    fn guest_hibernated_elsewhere_is_accepted_after_consistent_reports() {
        // The agent's old connection ended with the earlier VM. The agent reports once per second.
        let mut intake = greeted();
        let send = |intake: &mut Intake, n: u64| {
            intake.accept_line(&report_line(n, 30 * DAY_MS + n * 1000), TimeMs(n * 1000)).is_ok()
        };
        let accepted: Vec<bool> = (1..60).map(|n| send(&mut intake, n)).collect();
        let refused_count = (OVERRIDE_MS / 1000) as usize;
        assert_eq!(
            accepted.iter().filter(|accepted| !**accepted).count(),
            refused_count,
            "{accepted:?}"
        );
        assert!(accepted[refused_count..].iter().all(|accepted| *accepted), "and all later ones");
        // The guest's clock is still bounded by the host's clock.
        let bound = 30 * DAY_MS + 60_000 + MAX_CLOCK_LEAD_MS;
        assert_eq!(
            label(intake.accept_line(&report_line(60, bound + 1), TimeMs(60_000))),
            "from_the_future"
        );
        assert!(send(&mut intake, 60));
        // After false reports of such an age, true reports are accepted again, and the VM's age
        // bounds the guest's age again.
        let true_report = ReportStamp { seq: 1, guest_ms: 61_000, at: TimeMs(61_000) };
        assert!(is_accepted_within(&mut intake, true_report, OVERRIDE_MS));
        let rising_clock = |n: u64| (100 + n, 64_000 + n * 4_000);
        let age_bound = 64_000 + 6_400 + MAX_CLOCK_LEAD_MS;
        for (seq, guest_ms) in (1..6).map(rising_clock) {
            let is_accepted =
                intake.accept_line(&report_line(seq, guest_ms), TimeMs(64_000)).is_ok();
            assert_eq!(is_accepted, guest_ms <= age_bound, "{guest_ms}");
        }
    }

    /// Sends a report every 100 ms, and returns true if one of them is accepted within
    /// `deadline_ms`.
    fn is_accepted_within(intake: &mut Intake, first: ReportStamp, deadline_ms: u64) -> bool {
        (0..=deadline_ms / 100).any(|n| {
            let line = report_line(first.seq + n, first.guest_ms + n * 100);
            intake.accept_line(&line, first.at + n * 100).is_ok()
        })
    }

    #[test]
    fn one_false_report_does_not_lock_out_later_ones() {
        let now = TimeMs(DAY_MS);
        let true_report = ReportStamp { seq: 8, guest_ms: DAY_MS, at: now };
        for false_report in
            [report_line(7, 10), report_line(1 << 53, DAY_MS), report_line(7, DAY_MS + 4000)]
        {
            let mut intake = greeted();
            assert!(intake.accept_line(&false_report, now).is_ok());
            assert!(intake.accept_line(&report_line(8, DAY_MS), now).is_err());
            assert!(is_accepted_within(&mut intake, true_report, OVERRIDE_MS));
            let next = report_line(true_report.seq + 31, true_report.guest_ms + 3100);
            assert!(intake.accept_line(&next, now + 3100).is_ok(), "and all later ones");
        }
    }

    #[test]
    fn repeated_and_cyclic_reports_are_never_accepted() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(9, 1000), TimeMs(1000)).is_ok());
        for n in 0..1000 {
            let now = TimeMs(1000 + n * 50);
            let (seq, guest_ms) =
                ([9, 9, 3, 4, 5, 3, 4, 5], [1000, 1000, 300, 400, 500, 300, 400, 500]);
            let nth = (n % 8) as usize;
            assert_eq!(
                label(intake.accept_line(&report_line(seq[nth], guest_ms[nth]), now)),
                "out_of_order"
            );
        }
        assert!(intake.accept_line(&report_line(10, 51_000), TimeMs(51_000)).is_ok());
    }

    /// Action of a client that has access to the agent's port.
    #[derive(Clone, Debug)]
    enum ClientAction {
        Connect,
        Hello,
        Report { seq: u64, guest_ms: u64 },
        Wait(u64),
    }

    fn action() -> impl Strategy<Value = ClientAction> {
        let clock = prop_oneof![0..20_000u64, 0..2 * DAY_MS, any::<u64>()];
        let seq = prop_oneof![0..20u64, any::<u64>()];
        prop_oneof![
            1 => Just(ClientAction::Connect),
            2 => Just(ClientAction::Hello),
            8 => (seq, clock).prop_map(|(seq, guest_ms)| ClientAction::Report { seq, guest_ms }),
            3 => (0..10_000u64).prop_map(ClientAction::Wait),
        ]
    }

    proptest! {
        #[test]
        fn honest_agent_is_accepted_after_any_sequence_of_actions(
            actions in prop::collection::vec(action(), 0..60),
            age_ms in 0..DAY_MS,
            booted_after_ms in 0..DAY_MS,
            reconnects in any::<bool>(),
        ) {
            let (mut intake, mut now) = (greeted(), TimeMs(age_ms));
            let mut connected = TimeMs(0);
            let mut last: Option<ReportStamp> = None;
            for action in actions {
                match action {
                    ClientAction::Wait(ms) => now = now + ms,
                    ClientAction::Connect => {
                        intake.connected();
                        connected = now;
                        last = None;
                    }
                    ClientAction::Hello => drop(intake.accept_line(HELLO.as_bytes(), now)),
                    ClientAction::Report { seq, guest_ms } => {
                        let is_accepted = intake.accept_line(&report_line(seq, guest_ms), now).is_ok();
                        if is_accepted {
                            let is_old_enough = guest_ms <= now.0 + now.0 / 10 + MAX_CLOCK_LEAD_MS;
                            prop_assert!(is_old_enough || now.since(connected) >= OVERRIDE_MS);
                            // An older report or a repeated one is refused.
                            prop_assert!(intake.accept_line(&report_line(seq, guest_ms), now).is_err());
                            prop_assert!(intake.accept_line(&report_line(seq.saturating_sub(1), guest_ms), now).is_err());
                            last = Some(ReportStamp { seq, guest_ms, at: now });
                        }
                    }
                }
            }
            // These reports are true. Their kernel started some time after the VM.
            let guest_ms = now.0.saturating_sub(booted_after_ms);
            if reconnects {
                greet(&mut intake, now);
                prop_assert!(intake.accept_line(&report_line(1, guest_ms), now).is_ok());
            } else {
                intake.accept_line(HELLO.as_bytes(), now).expect("hello");
                let seq = last.map_or(1, |last| last.seq / 2 + 1);
                let first = ReportStamp { seq, guest_ms, at: now };
                prop_assert!(is_accepted_within(&mut intake, first, OVERRIDE_MS));
            }
        }
    }
}
