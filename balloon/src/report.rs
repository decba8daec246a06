//! From lines to verified reports: what one message cannot show by itself.

use foreshore_proto::{AgentMessage, Refusal, Report, decode_agent_message};

use crate::TimeMs;

/// How much further than the host's clock a guest's may run between two reports. Reports may be delivered in a
/// burst after a delay, so the bound is loose; it catches lies and not drift, because every accepted report sets
/// the clocks side by side again.
const MAX_CLOCK_LEAD_MS: u64 = 5_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Accepted {
    seq: u64,
    guest_ms: u64,
    at: TimeMs,
}

/// The state of an agent's connection as far as it decides which reports to believe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intake {
    greeted: bool,
    /// The last report of this connection.
    last: Option<Accepted>,
    /// The last report of any connection.
    clock: Option<Accepted>,
}

impl Intake {
    /// An intake for a guest that has just started.
    pub fn new() -> Self {
        Self::default()
    }

    /// An agent has connected: its numbers start again, the guest's clock does not jump ahead.
    pub fn connected(&mut self) {
        self.greeted = false;
        self.last = None;
    }

    /// Takes one line, without its newline. A refusal changes nothing.
    pub fn accept_line(&mut self, line: &[u8], now: TimeMs) -> Result<AgentMessage, Refusal> {
        let message = AgentMessage::try_from(decode_agent_message(line)?)?;
        match &message {
            AgentMessage::Hello(_) => self.greeted = true,
            AgentMessage::Report(report) => self.check_order(report, now)?,
        }
        Ok(message)
    }

    fn check_order(&mut self, report: &Report, now: TimeMs) -> Result<(), Refusal> {
        if !self.greeted {
            return Err(Refusal::BeforeHello);
        }
        let (seq, guest_ms) = (report.seq(), report.monotonic_ms());
        if let Some(last) = self.last {
            if seq <= last.seq {
                return Err(Refusal::OutOfOrder { field: "seq", value: seq, last: last.seq });
            }
            if guest_ms < last.guest_ms {
                return Err(Refusal::OutOfOrder {
                    field: "monotonic_ms",
                    value: guest_ms,
                    last: last.guest_ms,
                });
            }
        }
        // A new connection may be of a new kernel (kexec), whose clock starts again: behind is fine, ahead is not.
        if let Some(clock) = self.clock {
            let bound = clock.guest_ms.saturating_add(now.since(clock.at)).saturating_add(MAX_CLOCK_LEAD_MS);
            if guest_ms > bound {
                return Err(Refusal::FromTheFuture { value: guest_ms, bound });
            }
        }
        let accepted = Some(Accepted { seq, guest_ms, at: now });
        self.last = accepted;
        self.clock = accepted;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
        let mut intake = Intake::new();
        intake.connected();
        intake.accept_line(HELLO.as_bytes(), TimeMs(0)).expect("hello");
        intake
    }

    fn label(result: Result<AgentMessage, Refusal>) -> &'static str {
        result.expect_err("must be refused").label()
    }

    #[test]
    fn a_report_before_the_hello_is_refused() {
        let mut intake = Intake::new();
        assert_eq!(label(intake.accept_line(&report_line(1, 10), TimeMs(0))), "before_hello");
    }

    #[test]
    fn repeated_and_reordered_reports_are_refused_and_the_next_is_taken() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(4, 1000), TimeMs(10)).is_ok());
        assert_eq!(label(intake.accept_line(&report_line(4, 1000), TimeMs(11))), "out_of_order");
        assert_eq!(label(intake.accept_line(&report_line(3, 1001), TimeMs(12))), "out_of_order");
        assert_eq!(label(intake.accept_line(&report_line(5, 999), TimeMs(13))), "out_of_order");
        assert!(intake.accept_line(&report_line(5, 1000), TimeMs(14)).is_ok());
    }

    #[test]
    fn a_report_from_the_future_is_refused_and_does_not_move_the_clock() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, 1000), TimeMs(0)).is_ok());
        let bound = 1000 + 50 + MAX_CLOCK_LEAD_MS;
        assert_eq!(label(intake.accept_line(&report_line(2, bound + 1), TimeMs(50))), "from_the_future");
        assert!(intake.accept_line(&report_line(3, 1050), TimeMs(50)).is_ok());
        assert_eq!(label(intake.accept_line(&report_line(4, bound + 1), TimeMs(50))), "from_the_future");
    }

    #[test]
    fn reports_that_arrive_late_in_a_burst_are_taken() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(1, 1000), TimeMs(0)).is_ok());
        for n in 1..=30 {
            let line = report_line(1 + n, 1000 + 1000 * n);
            assert!(intake.accept_line(&line, TimeMs(30_000)).is_ok(), "report {n}");
        }
    }

    #[test]
    fn an_agent_that_comes_back_starts_counting_again() {
        let mut intake = greeted();
        assert!(intake.accept_line(&report_line(900, 50_000), TimeMs(0)).is_ok());
        intake.connected();
        assert_eq!(label(intake.accept_line(&report_line(1, 50_001), TimeMs(1))), "before_hello");
        intake.accept_line(HELLO.as_bytes(), TimeMs(1)).expect("hello");
        assert_eq!(label(intake.accept_line(&report_line(1, 90_000), TimeMs(1))), "from_the_future");
        assert!(intake.accept_line(&report_line(1, 200), TimeMs(1)).is_ok(), "a new kernel's clock");
    }
}
