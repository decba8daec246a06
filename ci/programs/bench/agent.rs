//! Measures the agent's CPU time in a guest at rest, with the guest's own counters and clock.

use anyhow::{Context, Result, bail};
use guest_tests::Guest;

use crate::samples::{Row, Samples};
use crate::vmm::FORESHORE;

/// Duration of a measurement. The duration covers thirty reports, and more than one check of idle
/// memory.
const SPAN_S: u64 = 30;
/// Maximum number of reports during a measurement. At rest, the agent sends one report per second.
/// With more reports the guest is not at rest, but one or two may be early.
const MAX_REPORTS: u64 = SPAN_S + 3;
/// Maximum number of measurements before the guest should have come to rest after boot.
const MAX_SPANS: usize = 10;

/// CPU time used so far, in nanoseconds.
struct Spent {
    uptime_s: f64,
    agent_ns: f64,
    monitors_ns: f64,
}

/// Prints the uptime, the CPU time of all threads of the agent, and the CPU time of DAMON's
/// threads, which find idle memory for the agent.
const SPENT: &str = "sum() { awk '{ ns += $1 } END { printf \"%.0f\\n\", ns }'; }; \
    cut -d ' ' -f 1 /proc/uptime; cat /proc/$(pidof foreshore-agent)/task/*/schedstat | sum; \
    for comm in $(grep -ls ^kdamond /proc/[0-9]*/comm); do cat ${comm%comm}schedstat; done | sum";

impl Spent {
    fn read(guest: &Guest) -> Result<Self> {
        Self::parse(&guest.run(SPENT)?)
    }

    fn parse(text: &str) -> Result<Self> {
        let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
        match numbers.with_context(|| format!("Unexpected CPU statistics: {text:?}"))?[..] {
            [uptime_s, agent_ns, monitors_ns] => Ok(Self { uptime_s, agent_ns, monitors_ns }),
            _ => bail!("Unexpected CPU statistics: {text:?}"),
        }
    }

    /// Returns the CPU use since `before` in percent, separately for the agent and for the
    /// monitors.
    fn since(&self, before: &Self) -> (f64, f64) {
        let percent = |ns: f64| ns / 1e9 / (self.uptime_s - before.uptime_s) * 100.0;
        (percent(self.agent_ns - before.agent_ns), percent(self.monitors_ns - before.monitors_ns))
    }
}

pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    let guest = Guest::builder().memory("size=1G").pressure("psi").boot()?;
    let reports = || -> Result<u64> {
        let info = guest.get("vm.pressure")?;
        info["details"]["reports"]
            .as_u64()
            .with_context(|| format!("vm.pressure has no number of reports: {info}"))
    };
    for _ in 0..MAX_SPANS {
        let (before, reports_before) = (Spent::read(&guest)?, reports()?);
        guest.run(&format!("sleep {SPAN_S}"))?;
        let (reported, after) = (reports()? - reports_before, Spent::read(&guest)?);
        if reported > MAX_REPORTS {
            eprintln!("bench:     {reported} reports in {SPAN_S} s: the agent is not at rest yet");
            continue;
        }
        let (agent, monitors) = after.since(&before);
        samples.add(Row::AgentCpu, FORESHORE, agent);
        samples.add(Row::MonitorsCpu, FORESHORE, monitors);
        let rss =
            guest.run("awk '/^VmRSS:/ { print $2 }' /proc/$(pidof foreshore-agent)/status")?;
        let rss_kib: f64 = rss.trim().parse().with_context(|| format!("VmRSS is {rss:?}"))?;
        samples.add(Row::AgentRss, FORESHORE, rss_kib / 1024.0);
        return Ok(());
    }
    bail!("The agent does not become idle")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_use_is_a_share_of_the_elapsed_time() {
        let before = Spent::parse("10.00\n1000000\n0\n").unwrap();
        let after = Spent::parse("40.00\n31000000\n3000000\n").unwrap();
        let (agent, monitors) = after.since(&before);
        assert!((agent - 0.1).abs() < 1e-9 && (monitors - 0.01).abs() < 1e-9, "{agent} {monitors}");
        assert!(Spent::parse("10.00\n\n0\n").is_err());
    }
}
