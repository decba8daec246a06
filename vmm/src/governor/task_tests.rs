//! Tests of the governor's threads, including their priority and the clock.

use std::io::{BufRead, BufReader, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use balloon::proto::{AgentMessage, Refusal};
use balloon::{Tier, ZoneSizes};

use super::*;
use crate::governor::fake::{
    Fixture, connection, core, fixture, hello, report, runtime, serve, zone,
};
use balloon::governor::AgentState;
use foreshore_devices::virtio::zone_device::ZoneDevice;

/// Only a failing test exceeds this time.
const PATIENCE: Duration = Duration::from_secs(60);

fn sample(governor: &GovernorHandle) -> PressureSample {
    governor.call(|core, now| core.sample(now))
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "{what} does not happen");
        thread::yield_now();
    }
}

/// Clocks of a host that was awake for 100 s and slept for eight hours.
fn slept(clock: libc::clockid_t) -> Duration {
    match clock {
        libc::CLOCK_MONOTONIC => Duration::from_secs(100),
        libc::CLOCK_BOOTTIME => Duration::from_secs(8 * 3_600 + 100),
        other => panic!("clock {other}"),
    }
}

/// Clock of a governor that started when the host's clocks were at zero.
fn from_zero(read: Read) -> Clock {
    Clock {
        read,
        started: Duration::ZERO,
        started_with_sleep: Duration::ZERO,
        held: Arc::default(),
    }
}

#[test]
fn guest_clock_is_compared_with_time_including_host_sleep() {
    let clock = from_zero(slept);
    assert_eq!((clock.now(), clock.boottime()), (TimeMs(100_000), TimeMs(28_900_000)));
    let Fixture { core, .. } = fixture("psi", true);
    let core = RefCell::new(core);
    let (mut agent, vmm) = connection();
    let mut report = report(1, 200, [0, 0]);
    report["monotonic_ms"] = serde_json::json!(28_900_000);
    writeln!(agent, "{}\n{report}", hello()).unwrap();
    drop(agent);
    serve(vmm, &core, &clock);
    let sample = core.borrow().sample(clock.now());
    assert_eq!(
        (sample.reports_total, sample.refused_total.len()),
        (1, 0),
        "{:?}",
        sample.refused_total
    );
    // The age is measured on the clock that excludes sleep. On that clock, the report would be from
    // the future.
    assert_eq!(sample.report.map(|(age, _)| age), Some(Duration::ZERO));
}

/// Milliseconds that have elapsed on both clocks of the host.
static GONE_BY_MS: AtomicU64 = AtomicU64::new(0);

fn gone_by(_: libc::clockid_t) -> Duration {
    Duration::from_millis(GONE_BY_MS.load(Ordering::Relaxed))
}

/// The governor's clock stops while the VM is paused. The guest's clock may continue.
#[test]
fn time_stops_while_vm_is_paused() {
    let clock = from_zero(gone_by);
    let pass = |ms| GONE_BY_MS.fetch_add(ms, Ordering::Relaxed);
    pass(2_000);
    (0..2).for_each(|_| clock.hold());
    pass(90_000);
    assert_eq!((clock.now(), clock.boottime()), (TimeMs(2_000), TimeMs(92_000)));
    (0..2).for_each(|_| clock.release());
    pass(999);
    assert_eq!(clock.now(), TimeMs(2_999));
    clock.hold();
    pass(60_000);
    clock.release();
    assert_eq!(clock.now(), TimeMs(2_999), "a second pause is like the first");
}

#[test]
fn clocks_read_monotonic_and_boottime() {
    // The first number in `/proc/uptime` is CLOCK_BOOTTIME in hundredths of a second.
    let uptime = || {
        let text = std::fs::read_to_string("/proc/uptime").unwrap();
        Duration::from_secs_f64(text.split(' ').next().unwrap().parse().unwrap())
    };
    let (before, clock, after) = (uptime(), Clock::start(), uptime() + Duration::from_millis(10));
    assert!(
        (before..=after).contains(&clock.started_with_sleep),
        "{before:?}, {clock:?}, {after:?}"
    );
    assert!(clock.started <= clock.started_with_sleep, "{clock:?}");
    let before = read(libc::CLOCK_BOOTTIME);
    let boottime = clock.boottime();
    let [before, after] = [before, read(libc::CLOCK_BOOTTIME)].map(|at| {
        let since = at - clock.started_with_sleep;
        since.as_millis() as u64
    });
    assert!((before..=after).contains(&boottime.0), "{before}, {boottime:?}, {after}");
}

/// No runtime of the VMM is running, as if all were busy forever, and other threads use all CPUs.
#[test]
fn decisions_do_not_wait_for_busy_vmm() {
    let Fixture { core, dram, .. } = fixture("psi", true);
    let (agents, connections) = mpsc::channel(1);
    let governor =
        GovernorHandle::spawn(core, Clock::start(), Arc::default(), Some(connections)).unwrap();
    let enough = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 * thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !enough.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let (mut agent, vmm) = connection();
        agents.blocking_send(vmm).unwrap();
        writeln!(agent, "{}", hello()).unwrap();
        for (seq, available_mib) in (1..).zip([200, 60, 20, 20]) {
            writeln!(agent, "{}", report(seq, available_mib, [0, 0])).unwrap();
        }
        wait_until("a grow", || dram.sizes().requested_bytes > 0);
        // The agent receives its settings.
        let mut settings = String::new();
        BufReader::new(&agent).read_line(&mut settings).unwrap();
        assert!(settings.contains("watermark_bytes"), "{settings}");
        drop(agent);
        let state = || governor.call(|core, now| core.agent_state(now));
        wait_until("the agent's end", || state() == AgentState::Gone);
        enough.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// Device that records the nice value of the governor's thread.
#[derive(Default)]
struct Watcher(parking_lot::Mutex<Vec<libc::c_int>>);

impl ZoneDevice for Watcher {
    fn sizes(&self) -> ZoneSizes {
        if thread::current().name() == Some("_pressure") {
            // SAFETY: the call uses no pointers. On Linux, 0 stands for the calling thread.
            self.0.lock().push(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) });
        }
        ZoneSizes { block_bytes: 1, ..ZoneSizes::empty(0, Tier::Dram, 0) }
    }
    fn request(&self, _: u64) {}
    fn remind(&self) {}
}

#[test]
fn governor_thread_has_priority_if_allowed() {
    // As root without CAP_SYS_NICE, a process may not raise the priority. The test uses a separate
    // thread, because the raised priority ends with it.
    let as_allowed = thread::spawn(|| {
        // SAFETY: the calls use no pointers. On Linux, 0 stands for the calling thread.
        unsafe {
            libc::setpriority(libc::PRIO_PROCESS, 0, -10);
            libc::getpriority(libc::PRIO_PROCESS, 0)
        }
    });
    let as_allowed = as_allowed.join().unwrap();
    let device = Arc::new(Watcher::default());
    let core = core(&Default::default(), vec![zone("dram", Tier::Dram, 0, &device)]);
    let governor = GovernorHandle::spawn(core, Clock::start(), Arc::default(), None).unwrap();
    wait_until("a tick", || !device.0.lock().is_empty());
    drop(governor);
    assert!(device.0.lock().iter().all(|nice| *nice == as_allowed), "{:?}", device.0.lock());
}

/// When true, the parser below returns.
static IS_PARSED: AtomicBool = AtomicBool::new(false);
/// Name and priority of the thread that parses.
static PARSER: parking_lot::Mutex<Option<(String, libc::c_int)>> = parking_lot::Mutex::new(None);

/// Parser that blocks until the test permits it to return.
fn parse_slowly(line: &[u8]) -> Result<AgentMessage, Refusal> {
    let name = thread::current().name().unwrap_or_default().to_owned();
    // SAFETY: the call uses no pointers. On Linux, 0 stands for the calling thread.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    *PARSER.lock() = Some((name, nice));
    wait_until("the end of the parser", || IS_PARSED.load(Ordering::Relaxed));
    balloon::parse_line(line)
}

/// Parsing should not delay the governor, because the amount of data depends on the guest.
#[test]
fn lines_are_parsed_at_normal_priority_without_delaying_ticks() {
    // SAFETY: the call uses no pointers. On Linux, 0 stands for the calling thread.
    let normal = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    let device = Arc::new(Watcher::default());
    let core = core(&Default::default(), vec![zone("dram", Tier::Dram, 0, &device)]);
    let (agents, connections) = mpsc::channel(1);
    let clock = Clock::start();
    let governor =
        GovernorHandle::spawn_parsing(core, clock, Arc::default(), Some(connections), parse_slowly)
            .unwrap();
    let (mut agent, vmm) = connection();
    agents.blocking_send(vmm).unwrap();
    writeln!(agent, "no report").unwrap();
    wait_until("a line is parsed", || PARSER.lock().is_some());
    let before = device.0.lock().len();
    wait_until("two more ticks", || device.0.lock().len() >= before + 2);
    let refused = || sample(&governor).refused_total.values().sum::<u64>();
    assert_eq!(refused(), 0);
    IS_PARSED.store(true, Ordering::Relaxed);
    wait_until("the line is refused", || refused() == 1);
    assert_eq!(*PARSER.lock(), Some(("_agent".to_owned(), normal)));
    assert_eq!(sample(&governor).agent_bytes_total, 10);
}

/// A line from a replaced connection should not be handled as a line of the new agent.
#[test]
fn message_of_a_closed_connection_is_dropped() {
    let state = GovernorTask::new(fixture("psi", true).core, Clock::start());
    runtime().block_on(async {
        let (sender, queue) = mpsc::channel(2);
        let send = async |is_gone: bool| {
            let (done, is_done) = oneshot::channel();
            let heard = Heard { message: balloon::parse_line(b"no report"), at: Instant::now() };
            sender
                .send(AgentInput::Message(Box::new(heard), done))
                .await
                .unwrap_or_else(|_| panic!("a queue"));
            (!is_gone).then_some(is_done)
        };
        let _gone = send(true).await;
        let there = send(false).await.unwrap();
        tokio::select! { () = decide(&state, queue) => {} result = there => result.unwrap() }
    });
    assert_eq!(state.core.borrow().sample(TimeMs(0)).refused_total.values().sum::<u64>(), 1);
}

/// The number of notifications depends on the guest, and this thread has priority over other
/// threads.
#[test]
fn rate_of_ticks_is_bounded() {
    let runtime = runtime();
    let ticks = |apart: Duration, is_fast| {
        runtime.block_on(async {
            let plugged = Notify::new();
            let guest = async {
                loop {
                    plugged.notify_one();
                    tokio::time::sleep(apart).await;
                }
            };
            let mut pace = Pace::new();
            let mut count = 0;
            let governor = async {
                loop {
                    pace.wait(&plugged, is_fast).await;
                    count += 1;
                }
            };
            let enough = tokio::time::sleep(Duration::from_secs(10));
            tokio::select! { _ = guest => {} _ = governor => {} () = enough => {} }
            count
        })
    };
    let flood = ticks(Duration::from_millis(1), false);
    assert!((800..=1_002).contains(&flood), "{flood}");
    // Rare notifications cause a tick without delay. Without notifications, the clock causes the
    // ticks.
    let few = ticks(Duration::from_millis(400), false);
    assert!((25..=46).contains(&few), "{few}");
    let (rest, fast) =
        (ticks(Duration::from_secs(60), false), ticks(Duration::from_secs(60), true));
    assert!((19..=23).contains(&rest) && (95..=125).contains(&fast), "{rest} {fast}");
}

/// An agent cannot evade the limit on lines by opening a new connection for each line.
#[test]
fn rate_of_connections_is_bounded() {
    const CONNECTIONS: u64 = 1_000;
    let state = GovernorTask::new(fixture("psi", true).core, Clock::start());
    runtime().block_on(async {
        let (agents, connections) = mpsc::channel(1);
        let begin = tokio::time::Instant::now();
        let flood = async {
            for _ in 0..CONNECTIONS {
                let (mut agent, vmm) = connection();
                writeln!(agent, "no report").unwrap();
                drop(agent);
                agents.send(vmm).await.unwrap();
            }
            while state.core.borrow().sample(TimeMs(0)).connections_total < CONNECTIONS {
                tokio::time::sleep(APART).await;
            }
        };
        let (sender, queue) = mpsc::channel(1);
        let link = state.link(sender);
        tokio::select! {
            () = listen(&link, connections, balloon::parse_line) => {}
            () = decide(&state, queue) => {}
            () = flood => {}
        }
        assert!(begin.elapsed() >= Duration::from_secs(4), "{:?}", begin.elapsed());
    });
}

#[test]
fn new_agent_replaces_old_one() {
    let Fixture { core, .. } = fixture("psi", true);
    let (agents, connections) = mpsc::channel(1);
    let governor =
        GovernorHandle::spawn(core, Clock::start(), Arc::default(), Some(connections)).unwrap();
    let connect = || {
        let (agent, vmm) = connection();
        agents.blocking_send(vmm).unwrap();
        agent
    };
    let older = connect();
    let mut newer = connect();
    // The VMM has closed the older connection, so a read from it returns the end of the stream.
    wait_until("the older connection ends", || {
        let mut lines = BufReader::new(&older).lines();
        lines.all(|line| line.is_ok())
    });
    writeln!(newer, "{}\n{}", hello(), report(1, 200, [0, 0])).unwrap();
    let reports = || sample(&governor).reports_total;
    wait_until("a report of the newer agent", || reports() == 1);
}

#[test]
fn dropped_governor_ends_threads_and_metrics() {
    let Fixture { core, dram, .. } = fixture("psi", true);
    let governor = GovernorHandle::spawn(core, Clock::start(), Arc::default(), None).unwrap();
    let source = governor.pressure_source();
    assert!(source.sample().is_some() && Arc::strong_count(&dram) == 2);
    let weak = Arc::downgrade(&source);
    drop(governor);
    assert!(source.sample().is_none(), "a scrape that has begun ends");
    drop(source);
    assert!(weak.upgrade().is_none() && Arc::strong_count(&dram) == 1);
}
