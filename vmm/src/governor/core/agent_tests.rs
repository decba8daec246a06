//! What agents say and do: lines of every kind, floods, lies, silence.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use balloon::governor::AgentState;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::agent::{self, Heard, LineBudget};
use crate::governor::fake::serve;
use crate::governor::fake::{Fixture, MIB, Shown, fixture, hello, report};
use crate::governor::task::Clock;
use crate::vm::decision::{DECISIONS_KEPT, DECISIONS_SHOWN};

#[test]
fn lines_that_are_no_reports_are_counted_by_reason_and_change_nothing() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.bytes(Ok(b"\xff"), TimeMs(0));
    f.bytes(Ok(b"{}"), TimeMs(0));
    f.bytes(Err(Refusal::TooLong { bound_bytes: 1 }), TimeMs(0));
    f.line(&json!({"type": "report", "version": 99}));
    let refused = &f.core.counters().refused;
    assert_eq!(refused.values().sum::<u64>(), 4);
    assert_eq!(refused["too_long"], 1);
    assert_eq!(refused["wrong_version"], 1);
    assert_eq!(f.core.counters().reports, 0);
}

#[test]
fn an_agent_that_tells_of_more_memory_than_the_vm_can_have_is_refused() {
    let mut f = fixture("psi", false, true);
    let beside = Beside::default();
    f.core = f.core.with_beside(beside.clone());
    f.greet();
    let most = (384 + 128 + 1024) * MIB;
    let say = |f: &mut Fixture, total_bytes: u64| {
        f.seq += 1;
        let mut line = report(f.seq, 300, [0, 0]);
        line["memory"]["total_bytes"] = json!(total_bytes);
        f.line(&line);
        (
            f.core.counters().reports,
            f.core.counters().refused.get("out_of_range").copied().unwrap_or(0),
        )
    };
    assert_eq!(say(&mut f, most + 4096), (0, 1));
    assert_eq!(say(&mut f, 1 << 46), (0, 2));
    assert_eq!(say(&mut f, most), (1, 2), "all that is plugged, and nothing that the kernel keeps");
    // A guest makes memory of a volume, and some has come by ACPI.
    beside.mapped_bytes.store(512 * MIB, Ordering::Relaxed);
    beside.dimm_bytes.store(128 * MIB, Ordering::Relaxed);
    assert_eq!(say(&mut f, most + 640 * MIB), (2, 2));
    assert_eq!(say(&mut f, most + 640 * MIB + 4096), (2, 3));
}

/// Each of several zones may be as large as any machine's, by the protocol alone.
#[test]
fn an_agent_whose_zones_have_more_than_the_vm_can_have_together_is_refused() {
    let mut f = fixture("psi", false, true);
    f.greet();
    let most_pages = (384 + 128 + 1024) * MIB / 4096;
    let say = |f: &mut Fixture, free_pages: u64, high_pages: u64, managed_pages: u64| {
        f.seq += 1;
        let mut line = report(f.seq, 300, [0, 0]);
        let zone = |node: u32| {
            json!({ "node": node, "kind": "normal", "free_pages": free_pages, "min_pages": 0, "low_pages": 0,
                "high_pages": high_pages, "managed_pages": managed_pages })
        };
        line["zones"] = json!([zone(0), zone(1)]);
        f.line(&line);
        (
            f.core.counters().reports,
            f.core.counters().refused.get("out_of_range").copied().unwrap_or(0),
        )
    };
    let (half, slack) = (most_pages / 2, 65_536 / 2);
    assert_eq!(say(&mut f, 0, 0, half), (1, 0));
    assert_eq!(say(&mut f, 0, 0, half + 1), (1, 1), "managed");
    assert_eq!(say(&mut f, half + slack, 0, half), (2, 1), "counts are folded in late");
    assert_eq!(say(&mut f, half + slack + 1, 0, half), (2, 2), "free");
    assert_eq!(say(&mut f, 0, half + 1024, half), (3, 2), "a zone without memory has watermarks");
    assert_eq!(say(&mut f, 0, half + 1025, half), (3, 3), "to be kept free");
    // The loop goes on with the next one that can be true.
    assert_eq!(say(&mut f, 0, 0, half), (4, 3));
}

#[test]
fn no_more_is_shown_as_online_than_is_plugged() {
    let mut f = fixture("off", false, true);
    f.greet();
    f.core.resize_zone("pm", 64 * MIB, TimeMs(0)).unwrap();
    let mut line = report(1, 300, [128 * MIB, 1024 * MIB]);
    line["memory"]["total_bytes"] = json!(384 * MIB);
    f.line(&line);
    assert_eq!((f.core.online_bytes("dram"), f.core.online_bytes("pm")), (Some(0), Some(64 * MIB)));
}

#[test]
fn that_plugged_memory_is_not_onlined_movable_is_said_once() {
    let mut f = fixture("psi", false, true);
    f.greet();
    let log = Shown::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut said = |policy: &str| {
            for _ in 0..3 {
                f.seq += 1;
                let mut line = report(f.seq, 300, [0, 0]);
                line["blocks"]["online_policy"] = json!(policy);
                f.line(&line);
            }
            let text = String::from_utf8(std::mem::take(&mut *log.0.lock())).unwrap();
            let lines = text.lines().filter(|line| line.contains("movable"));
            lines.map(|line| line.split_whitespace().nth(1).unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(said("online_movable"), [""; 0], "as it should be");
        assert_eq!(said("online"), ["WARN"]);
        assert_eq!(said("unknown"), [""; 0], "no news");
        assert_eq!(said("online"), [""; 0]);
        assert_eq!(said("online_movable"), ["INFO"]);
        assert_eq!(said("offline"), ["WARN"]);
    });
}

#[test]
fn who_lied_about_the_clock_does_not_lock_the_agent_out() {
    let mut f = fixture("psi", false, true);
    let now = TimeMs(3_600_000);
    let line =
        |f: &mut Fixture, line: serde_json::Value| f.bytes(Ok(line.to_string().as_bytes()), now);
    f.core.agent_connected(now);
    line(&mut f, hello());
    // 50 ms after a boot that was an hour ago.
    line(&mut f, report(1, 200, [0, 0]));
    f.core.agent_connected(now);
    line(&mut f, hello());
    let mut honest = report(1, 200, [0, 0]);
    honest["monotonic_ms"] = json!(now.0 - 100);
    line(&mut f, honest);
    assert_eq!((f.core.counters().reports, f.core.counters().refused.len()), (2, 0));
    // A guest that seems older than its VM has to insist.
    let mut future = report(2, 200, [0, 0]);
    future["monotonic_ms"] = json!(2 * now.0);
    line(&mut f, future);
    assert_eq!(f.core.counters().refused["from_the_future"], 1);
}

/// Eight hours in which nobody could report or follow: only the guest's clock has gone on.
#[test]
fn a_host_that_has_slept_takes_its_guest_neither_for_a_liar_nor_for_late() {
    const SLEPT_MS: u64 = 8 * 3_600_000;
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    let asked = f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    assert!(asked > 0);
    let now = TimeMs(f.seq * 50 + 50);
    f.core.tick(now);
    assert_eq!(f.core.agent_state(now), AgentState::Live);
    let mut next = report(f.seq + 1, 20, [0, 0]);
    next["monotonic_ms"] = json!(now.0 + SLEPT_MS);
    f.core.line(Ok(next.to_string().as_bytes()), now, now + SLEPT_MS, Duration::default);
    assert_eq!((f.core.counters().reports, f.core.counters().refused.len()), (2, 0));
    assert_eq!(f.core.counters().reminders, 0);
    assert!(
        f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes >= asked,
        "it is still to follow"
    );
}

#[test]
fn an_agent_is_never_there_then_live_then_silent_then_live_then_gone() {
    let mut f = fixture("psi", false, true);
    let state = |f: &Fixture, now| f.core.info(0, TimeMs(now)).agent;
    assert_eq!(state(&f, 0), AgentState::Never);
    f.greet();
    f.report(200);
    let at = f.seq * 50;
    assert_eq!(state(&f, at + 2_999), AgentState::Live);
    assert_eq!(state(&f, at + 3_000), AgentState::Silent);
    // What cannot be believed does not count.
    f.bytes(Ok(b"{}"), TimeMs(at + 3_000));
    assert_eq!(state(&f, at + 3_000), AgentState::Silent);
    f.core.tick(TimeMs(at + 3_000));
    f.seq = 100;
    f.report(200);
    assert_eq!(state(&f, 5_000), AgentState::Live);
    f.core.agent_gone(TimeMs(5_000));
    assert_eq!(state(&f, 5_000), AgentState::Gone);
    f.core.agent_connected(TimeMs(60_000));
    assert_eq!((state(&f, 60_000), state(&f, 63_000)), (AgentState::Live, AgentState::Silent));
}

/// Rule 6 of docs/policy.md, through the whole governor.
#[test]
fn an_agent_that_falls_silent_while_the_guest_is_short_fails_open_and_no_further() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.report(20);
    let requested = |f: &Fixture| f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    let (before, from) = (requested(&f), f.seq * 50);
    for now in (from..from + 60_000).step_by(500) {
        f.core.tick(TimeMs(now));
    }
    assert_eq!(requested(&f) - before, (64 + 128 + 256 + 512) * MIB);
    let at_rest = requested(&f);
    f.core.tick(TimeMs(from + 600_000));
    assert_eq!(requested(&f), at_rest);
    let reasons = f.core.info(DECISIONS_SHOWN, TimeMs(0)).decisions;
    assert!(reasons.iter().any(|decision| {
        (decision.direction.as_str(), decision.reason.as_str()) == ("grow", "reports_lost")
    }));
}

#[test]
fn lines_of_an_agent_that_has_closed_its_end_count() {
    use std::io::Write;
    let Fixture { core, .. } = fixture("psi", false, true);
    let core = RefCell::new(core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    agent.write_all(b"this is no report\nnor is this\n").unwrap();
    drop(agent);
    vmm.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
    });
    assert_eq!(core.borrow().counters().refused.values().sum::<u64>(), 2);
}

/// A flood costs the host so many lines a second, and waits in the guest.
#[test]
fn a_flood_is_taken_a_bounded_number_of_lines_at_a_time() {
    use std::io::Write;
    let Fixture { core, .. } = fixture("psi", false, true);
    let core = RefCell::new(core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    agent.write_all("no report\n".repeat(1_000).as_bytes()).unwrap();
    drop(agent);
    vmm.set_nonblocking(true).unwrap();
    // A clock that jumps as soon as everybody waits: it shows what was waited for, and not how long
    // this takes.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        let begin = tokio::time::Instant::now();
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(4), "{:?}", begin.elapsed());
    });
    assert_eq!(core.borrow().counters().refused.values().sum::<u64>(), 1_000);
}

/// A line that never ends is no line that could be counted, and costs the host no more than lines
/// do.
#[test]
fn an_endless_line_is_taken_a_bounded_number_of_bytes_at_a_time() {
    use std::io::Write;
    /// Four seconds' worth, of which the first is there at once.
    const FLOOD_BYTES: usize = 4 * 200 * 64 * 1024;
    let core = RefCell::new(fixture("psi", false, true).core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    vmm.set_nonblocking(true).unwrap();
    let flood = std::thread::spawn(move || {
        let piece = [b'x'; 64 * 1024];
        (0..FLOOD_BYTES / piece.len()).for_each(|_| agent.write_all(&piece).unwrap());
        agent.shutdown(std::net::Shutdown::Write).unwrap();
        agent
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        let begin = tokio::time::Instant::now();
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(3), "{:?}", begin.elapsed());
    });
    flood.join().unwrap();
    assert_eq!(core.borrow().counters().refused, BTreeMap::from([("too_long", 1)]));
}

/// What it is told waits for it, the newest alone, and keeps nobody from hearing what it says.
#[test]
fn an_agent_that_does_not_read_is_heard_all_the_same() {
    use std::os::fd::AsRawFd;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
    const LINES: u64 = 100;
    const LAST: u64 = LINES << 20;
    let core = RefCell::new(fixture("off", false, true).core);
    let settings = Cell::new(Settings::with_watermark(0));
    let [agent, vmm] = {
        let (agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
        // The least that Linux gives: a few lines.
        let bytes: libc::c_int = 1;
        // SAFETY: the socket is open, and `bytes` is an int that outlives the call.
        let result = unsafe {
            let (at, len) = ((&raw const bytes).cast(), size_of::<libc::c_int>() as u32);
            libc::setsockopt(vmm.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, at, len)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        [agent, vmm]
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let [agent, vmm] = [agent, vmm].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            tokio::net::UnixStream::from_std(stream).unwrap()
        });
        let (from, mut to) = agent.into_split();
        let talk = async {
            for line in 1..=LINES {
                settings.set(Settings::with_watermark(line << 20));
                to.write_all(b"no report\n").await.unwrap();
                while core.borrow().counters().refused.values().sum::<u64>() < line {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            let mut told = tokio::io::BufReader::new(from).lines();
            let mut count = 1;
            while !told.next_line().await.unwrap().unwrap().contains(&LAST.to_string()) {
                count += 1;
            }
            assert!(count < LINES, "{count} lines waited for it");
        };
        let (clock, mut budget) = (Clock::start(), LineBudget::new());
        let (bytes, decide) = (AtomicU64::new(0), async |Heard { message, .. }| {
            core.borrow_mut().message(message, clock.now(), clock.with_sleep(), Duration::default);
        });
        let serve = agent::serve(vmm, || settings.get(), &bytes, &mut budget, balloon::parse_line, decide);
        tokio::select! {
            result = serve => panic!("{result:?}"),
            heard = tokio::time::timeout(Duration::from_secs(60), talk) => heard.expect("it is heard"),
        }
    });
}

proptest! {
    /// Whatever a report says, zones are asked for whole blocks within their bounds: the fake
    /// devices insist.
    #[test]
    fn an_agent_that_lies_gets_at_most_what_the_zones_hold(
        lies in proptest::collection::vec(
            (any::<u16>(), 0u64..1 << 46, 0u64..1 << 46, 0u64..1 << 40, 0u64..1 << 40, any::<bool>()), 1..60),
        policy in prop::sample::select(Policy::NAMES.iter().filter(|name| **name != "fixed").collect::<Vec<_>>()),
    ) {
        let mut f = fixture(policy, false, true);
        f.greet();
        for (ms, total, available, pages, us, ahead) in lies {
            f.seq += u64::from(ahead || f.seq == 0);
            // What the VM can have: more is refused, whatever else is said.
            let total = (total % (1536 * MIB + 1)).max(1 << 27);
            let (available, pages, us) = (available % total, pages % (total / 4096), us % (f.seq * 50_000));
            let line = json!({
                "type": "report", "version": 1, "seq": f.seq, "monotonic_ms": f.seq * 50 + u64::from(ms) % 4000,
                "memory": {"total_bytes": total, "free_bytes": available / 2, "available_bytes": available,
                           "swap_total_bytes": total, "swap_free_bytes": available},
                "stall": {"some_us": us, "full_us": us / 2, "some_avg10_basis_points": 0,
                          "full_avg10_basis_points": 0},
                "counters": {"pswpin": pages, "pswpout": us, "workingset_refault_anon": pages},
                "zones": [{"node": 0, "kind": "dma32", "free_pages": pages, "min_pages": pages / 4,
                           "low_pages": pages / 3, "high_pages": pages / 2, "managed_pages": total / 4096}],
            });
            f.line(&line);
            f.core.tick(TimeMs(f.seq * 50 + 20));
        }
        prop_assert!(f.core.counters().reports > 0, "{:?}", f.core.counters().refused);
        prop_assert!(f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50)).decisions.len() <= DECISIONS_KEPT);
    }
}
