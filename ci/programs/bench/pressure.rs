//! Measures how long the governor takes to decide, and how long memory takes to arrive, in a guest
//! that runs short.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tests::guest::Script;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool, host_memory, wait_for};
use serde_json::{Value, json};

use crate::forget;
use crate::idle::{IdleThread, WakeTimes};
use crate::samples::{Row, Samples, median, p99};
use crate::vmm::{FORESHORE, MIB};

const FILL_MIB: u64 = 640;
const LIMIT: Duration = Duration::from_secs(120);

/// Memory that the guest uses permanently in the test with bursts. The memory exceeds the DRAM, so
/// that the policy determines the guest's size.
const BASE_MIB: u64 = 300;
/// Size of a burst. The size exceeds the free memory at rest.
const BURST_MIB: u64 = 192;
const BURSTS: usize = 16;
/// Time without a change of size after which a guest is at rest. Any surplus would have been
/// unplugged within this time.
const IDLE_TIME: Duration = Duration::from_secs(4);
/// Wait after a burst got its memory. Without a grow in this time, the burst was too small.
const ENOUGH: Duration = Duration::from_secs(3);
/// Number of lines used to compare the clocks of host and guest.
const TICKS: usize = 8;

pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    fill(samples)?;
    bursts(samples)
}

fn pool() -> Result<Pool> {
    forget(&this_tests_dir().join("pool"))?;
    Pool::create("1G")
}

/// Fills a guest of 384 MiB that can get another 128 MiB of DRAM and 512 MiB of PM.
fn fill(samples: &mut Samples) -> Result<()> {
    let pool = pool()?;
    let guest = Guest::builder()
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("psi")
        .boot()?;
    let _hog = guest.hog(FILL_MIB, LIMIT)?;
    let took_ms = wait_for("memory has come online", LIMIT, || {
        let info = guest.get("vm.pressure")?;
        Ok(info["details"]["report_to_online_ms"].as_f64())
    })?;
    samples.add(Row::ReportToOnline, FORESHORE, took_ms / 1e3);
    Ok(())
}

/// Measures two cases alternately in one guest. In one, a burst of allocations makes the policy
/// grow the guest. In the other, the API plugs the same amount while the guest is idle. Both times
/// end when the first memory is online, because the guest can use it from then on.
fn bursts(samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let pool = pool()?;
    let guest = Guest::builder()
        .cpus(2)
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=768M", pool.name()))
        // With the default parameters, the policy would wait longer than REST before it unplugs the
        // memory of the last burst. The guest would then have enough memory for the next burst. The
        // policy would also have become slower to shrink, because the guest grew during boot and
        // then shrank.
        .pressure("psi,idle=1s,max_idle=1s")
        .boot()?;
    let _base = guest.hog(BASE_MIB, LIMIT)?;
    let mut idle = IdleThread::start()?;
    let (mut bursts, mut requests) = (Vec::new(), Vec::new());
    let mut enough = 0;
    while bursts.len() < BURSTS {
        let before_bytes = wait_until_idle(&guest)?;
        let Some(burst) = idle.during(|| burst_to_online(&guest))? else {
            enough += 1;
            ensure!(enough < BURSTS, "The guest had enough memory for {BURSTS} bursts");
            continue;
        };
        resize(&guest, before_bytes)?;
        let request = request_to_online(&guest, before_bytes + burst.requested_bytes)?;
        resize(&guest, before_bytes)?;
        guest.put("vm.pressure", json!({ "resume": true, "zone": "pm" }))?;
        eprintln!(
            "bench:     {} MiB requested on top of {}",
            burst.requested_bytes / MIB,
            before_bytes / MIB
        );
        samples.add(Row::BurstToPlan, FORESHORE, burst.to_plan.as_secs_f64());
        samples.add(Row::BurstToOnline, FORESHORE, burst.to_online.as_secs_f64());
        samples.add(Row::RequestToOnline, FORESHORE, request.as_secs_f64());
        bursts.push(burst.to_online.as_secs_f64());
        requests.push(request.as_secs_f64());
    }
    let (burst, request) = (
        median(&bursts).context("no burst was measured")?,
        median(&requests).context("no request was measured")?,
    );
    samples.add(Row::BurstOverRequest, FORESHORE, burst - request);
    let metrics = guest.metrics()?;
    for (row, share) in [(Row::ReportToPlan, 0.5), (Row::ReportToPlanP99, 0.99)] {
        samples.add(
            row,
            FORESHORE,
            metrics.quantile("foreshore_pressure_report_to_plan_seconds", share)?,
        );
    }
    add_idle(samples, &idle.times)
}

/// Adds the times of an idle thread at the same time. They are the host's share of the time from a
/// report to a plan.
fn add_idle(samples: &mut Samples, times: &[WakeTimes]) -> Result<()> {
    eprintln!("bench:     an idle thread was woken {} times", times.len());
    let wake: Vec<f64> = times.iter().map(|time| time.wake_s).collect();
    let decide: Vec<f64> = times.iter().map(|time| time.decide_s).collect();
    for (row, value) in [
        (Row::IdleWake, median(&wake)),
        (Row::IdleWakeP99, p99(&wake)),
        (Row::IdleDecide, median(&decide)),
        (Row::IdleDecideP99, p99(&decide)),
    ] {
        samples.add(row, FORESHORE, value.context("The idle thread was never woken")?);
    }
    Ok(())
}

fn plugged_and_requested(guest: &Guest) -> Result<(u64, u64)> {
    let info = guest.get("vm.memory")?;
    let zones = info["zones"].as_array().context("vm.memory has no zones")?;
    let zone = zones.iter().find(|zone| zone["id"] == "pm").context("vm.memory has no PM")?;
    let number =
        |key: &str| zone[key].as_u64().with_context(|| format!("The zone has no {key}: {zone}"));
    Ok((number("plugged_bytes")?, number("requested_bytes")?))
}

/// Waits until the policy makes no more changes, and returns the plugged size.
fn wait_until_idle(guest: &Guest) -> Result<u64> {
    let mut since = (Instant::now(), 0);
    wait_for("the guest has its size", LIMIT, || {
        let (plugged, requested) = plugged_and_requested(guest)?;
        if plugged != requested || plugged != since.1 {
            since = (Instant::now(), plugged);
        }
        Ok((since.0.elapsed() >= IDLE_TIME).then_some(plugged))
    })
}

/// Resizes the zone through the API, and waits until it has reached the size.
fn resize(guest: &Guest, bytes: u64) -> Result<()> {
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": bytes }))?;
    guest.wait_until(
        "the zone has its size",
        LIMIT,
        || Ok(plugged_and_requested(guest)?.0 == bytes),
    )
}

struct Burst {
    to_plan: Duration,
    to_online: Duration,
    requested_bytes: u64,
}

/// Measures a burst until the first memory is online, with the guest's clock. The plan is the first
/// one that contains a request. Returns `None` if the guest had enough memory, because a policy may
/// hold more memory for some time after a wrong decision.
fn burst_to_online(guest: &Guest) -> Result<Option<Burst>> {
    let last = guest.get("vm.pressure?decisions=1")?["decisions_total"].as_u64();
    let last = last.context("vm.pressure counts no decisions")?;
    let mut clocks = Clocks::new();
    let mut script = guest.start_script(LIMIT, &format!("exec guest-tool burst {BURST_MIB}"))?;
    let (mut started_at, mut held_at) = (None, None);
    let online = loop {
        match clocks.next(&mut script).context("During the burst")? {
            (Line::Begin, at) => started_at = Some(at),
            (Line::Total, at) => break at,
            (Line::Held, at) => held_at = Some(at),
            (Line::Tick, at) if held_at.is_some_and(|held_at| at > held_at + ENOUGH) => {
                return Ok(None);
            }
            (Line::Tick, at) => ensure!(at < LIMIT, "The burst did not end within {at:?}"),
        }
    };
    let started_at = started_at.context("Memory came online before the burst")?;
    let info = guest.get("vm.pressure?decisions=1000")?;
    let requested_at = clocks.started.elapsed();
    let decisions = info["decisions"].as_array().context("vm.pressure has no decisions")?;
    let is_grow = |decision: &&Value| {
        decision["direction"] == "grow"
            && decision["seq"].as_u64() > Some(last)
            && requested_growth(decision) > 0
    };
    // The list starts with the newest decision.
    let grow = decisions.iter().rev().find(is_grow);
    let grow = grow.with_context(|| format!("Memory came online without a decision: {info}"))?;
    let age =
        grow["age_ms"].as_u64().map(Duration::from_millis).context("Decision without an age")?;
    drop(script);
    guest.wait_until_run("the burst's memory is free", LIMIT, "! pgrep -f '^guest-tool burst'")?;
    Ok(Some(Burst {
        to_plan: requested_at.saturating_sub(age).saturating_sub(started_at + clocks.offset),
        to_online: online - started_at,
        requested_bytes: requested_growth(grow),
    }))
}

fn requested_growth(decision: &Value) -> u64 {
    decision["requested_bytes"].as_u64().unwrap_or(0)
}

/// Measures the time from a request until the first memory is online, in an idle guest.
fn request_to_online(guest: &Guest, bytes: u64) -> Result<Duration> {
    let mut clocks = Clocks::new();
    let mut script = guest.start_script(LIMIT, "exec guest-tool burst 0")?;
    for _ in 0..TICKS {
        let (line, _) = clocks.next(&mut script)?;
        ensure!(line != Line::Total, "Memory came online without a request");
    }
    let requested = clocks.started.elapsed();
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": bytes }))?;
    let online = loop {
        let (line, at) = clocks.next(&mut script)?;
        if line == Line::Total {
            break at;
        }
        ensure!(at < LIMIT, "No memory came online within {at:?}");
    };
    Ok((online + clocks.offset).saturating_sub(requested))
}

/// Offset between the host's clock and the clock of `guest-tool burst`, which starts later. The
/// line with the shortest delay determines the offset. A line cannot arrive before it was written.
/// The error is the line's delay, which is some tenths of a millisecond.
struct Clocks {
    started: Instant,
    offset: Duration,
}

impl Clocks {
    /// Must be created before the program is started.
    fn new() -> Self {
        Self { started: Instant::now(), offset: Duration::MAX }
    }

    /// Returns the next line, and its time according to the guest's clock.
    fn next(&mut self, script: &mut Script) -> Result<(Line, Duration)> {
        let line = script.next_line().context("guest-tool burst has ended")?;
        let now = self.started.elapsed();
        let (line, at) = Line::parse(&line)?;
        self.offset = self.offset.min(now.saturating_sub(at));
        Ok((line, at))
    }
}

/// Line that `guest-tool burst` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Begin,
    Held,
    Total,
    Tick,
}

impl Line {
    /// Parses a line and its time, which is relative to the program's start.
    fn parse(line: &str) -> Result<(Self, Duration)> {
        let (name, at) = match line.split(' ').collect::<Vec<_>>()[..] {
            ["begin", at] => (Self::Begin, at),
            ["held", at] => (Self::Held, at),
            ["total", at, _] => (Self::Total, at),
            ["tick", at] => (Self::Tick, at),
            _ => bail!("Unexpected line of guest-tool burst: {line:?}"),
        };
        Ok((name, Duration::from_micros(at.parse()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_time() {
        assert_eq!(
            Line::parse("total 1500 4096").unwrap(),
            (Line::Total, Duration::from_micros(1500))
        );
        assert_eq!(Line::parse("tick 7").unwrap(), (Line::Tick, Duration::from_micros(7)));
        assert!(Line::parse("total 1500").is_err() && Line::parse("tick x").is_err());
    }
}
