//! Threads of the governor: clock, connections of the agent, notifications from devices, and calls
//! of the API.
//!
//! Only the governor's own thread, `_pressure`, accesses the state of [`Core`]. The thread `_agent`
//! passes its input through a queue with one entry. The API and scrapes send calls to `_pressure`
//! and wait for the reply.
//!
//! `_pressure` has raised priority if the host permits it, because a guest that is short of memory
//! waits for this thread. vCPUs and devices that use all host CPUs then do not delay it. Calls of
//! API clients and scrapers run on this thread between events. Each delays the guest by its own
//! duration. Therefore these calls only copy state, and the callers convert it to text. `_agent`
//! reads and parses the agent's lines at normal priority, because the number of lines depends on
//! the guest.

use std::cell::RefCell;
use std::future::pending;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use balloon::TimeMs;
use balloon::governor::FAST_INTERVAL_MS;
use balloon::proto::Settings;
use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use foreshore_devices::log::rate_limited;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Interval, MissedTickBehavior};
use tracing::{debug, info};

use super::GovernedZones;
use super::agent::{self, Heard, LineBudget, Parse};
use super::core::Core;
use crate::governor::metrics::{PressureSample, PressureSource};

/// Interval between ticks. The controller must run at least once a second.
const TICK: Duration = Duration::from_millis(500);

/// Interval between ticks while a guest without an agent is short of memory and its statistics are
/// requested.
const FAST_TICK: Duration = Duration::from_millis(FAST_INTERVAL_MS);

/// Minimum time between two ticks. The guest can cause ticks at any rate, and this thread has
/// priority over other threads.
const APART: Duration = Duration::from_millis(10);

/// Nice value of the governor's thread. The agent has the same value in its guest.
pub const NICE: libc::c_int = -10;

/// Milliseconds since the governor started. Clones share the same state.
#[derive(Clone, Debug)]
pub struct Clock {
    read: Read,
    started: Duration,
    started_with_sleep: Duration,
    held: Arc<Mutex<Held>>,
}

/// Time during which the VM was paused.
#[derive(Debug, Default)]
struct Held {
    /// Start of the current pause, on the host's clock.
    since: Option<Duration>,
    /// Total duration of earlier pauses.
    before: Duration,
}

type Read = fn(libc::clockid_t) -> Duration;

impl Clock {
    pub fn start() -> Self {
        let [started, started_with_sleep] = [libc::CLOCK_MONOTONIC, libc::CLOCK_BOOTTIME].map(read);
        Self { read, started, started_with_sleep, held: Arc::default() }
    }

    /// Current time, without the time during which the host slept or the VM was paused. A stopped
    /// guest can neither report nor follow requests, so its reports would appear late and its
    /// requests would time out.
    pub fn now(&self) -> TimeMs {
        let held = self.held.lock();
        let now = held.since.unwrap_or_else(|| (self.read)(libc::CLOCK_MONOTONIC));
        millis(now.saturating_sub(self.started + held.before))
    }

    /// Current time, including host sleep and pauses. The guest's clock may have continued, as
    /// kvm-clock does. Its reports must not appear to be from the future.
    pub fn boottime(&self) -> TimeMs {
        millis((self.read)(libc::CLOCK_BOOTTIME).saturating_sub(self.started_with_sleep))
    }

    /// Stops this clock at the start of a pause of the VM.
    pub fn hold(&self) {
        let mut held = self.held.lock();
        held.since.get_or_insert_with(|| (self.read)(libc::CLOCK_MONOTONIC));
    }

    /// Continues this clock after a pause.
    pub fn release(&self) {
        let mut held = self.held.lock();
        if let Some(since) = held.since.take() {
            held.before += (self.read)(libc::CLOCK_MONOTONIC).saturating_sub(since);
        }
    }
}

fn millis(time: Duration) -> TimeMs {
    TimeMs(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that outlives the call, and the call writes nothing else.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // The call fails only for unknown clocks, and Linux has had both since 2.6.39.
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Receives non-blocking connections of agents. One connection is served at a time, and a new
/// connection replaces it.
pub type Connections = mpsc::Receiver<StdUnixStream>;

/// Sends accepted connections of agents to the governor.
pub type Agents = mpsc::Sender<StdUnixStream>;

/// Function that another thread passes to the governor's thread, which calls it with the current
/// time.
type Call = Box<dyn FnOnce(&mut Core, TimeMs) + Send>;

/// Handle of a running governor. Dropping it ends its threads. Requests that the guest has received
/// are not withdrawn.
pub struct GovernorHandle {
    /// Each caller waits for its reply, so the queue is limited by the number of callers.
    calls: mpsc::UnboundedSender<Call>,
    clock: Clock,
    zones: GovernedZones,
    /// Metrics hold a weak reference to it.
    source: Arc<Source>,
    _threads: Vec<Thread>,
}

/// Thread with a runtime of its own. Dropping it ends the thread.
struct Thread {
    handle: Option<JoinHandle<()>>,
    end: Option<oneshot::Sender<()>>,
}

impl Thread {
    /// Starts a thread called `name`, which runs `prepare` and then `task`.
    fn spawn<F: Future<Output = ()>>(
        name: &str,
        prepare: fn(),
        task: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (end, ended) = oneshot::channel();
        let handle = spawn_confined(ThreadKind::Governor, name, move || {
            prepare();
            runtime.block_on(async {
                tokio::select! {
                    _ = ended => {}
                    () = task() => {}
                }
            });
        })?;
        Ok(Self { handle: Some(handle), end: Some(end) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(handle) = self.handle.take() {
            // The thread has already logged its panic.
            let _ = handle.join();
        }
    }
}

enum AgentInput {
    Connected,
    Gone,
    /// Message, and the channel on which the agent thread waits for its decision. If the message's
    /// connection has ended, the channel is closed instead.
    Message(Box<Heard>, oneshot::Sender<()>),
}

/// Ends of the channels that the agent thread uses.
struct AgentLink {
    input: mpsc::Sender<AgentInput>,
    settings: watch::Receiver<Settings>,
    bytes: Arc<AtomicU64>,
}

impl AgentLink {
    async fn send(&self, input: AgentInput) {
        // An error means that the governor's thread has ended or panicked. After a regular end,
        // this thread ends as well.
        let _ = self.input.send(input).await;
    }
}

struct GovernorTask {
    core: RefCell<Core>,
    clock: Clock,
    settings: watch::Sender<Settings>,
}

impl GovernorTask {
    fn new(core: Core, clock: Clock) -> Self {
        let settings = watch::Sender::new(core.settings());
        Self { core: RefCell::new(core), clock, settings }
    }

    /// Returns the ends of the channels for the agent thread. `input` is the sender for the queue
    /// of [`decide`].
    fn link(&self, input: mpsc::Sender<AgentInput>) -> AgentLink {
        let bytes = self.core.borrow().agent_bytes();
        AgentLink { input, settings: self.settings.subscribe(), bytes }
    }

    /// Runs `act` with the current time. Then publishes the agent's settings if they have changed.
    fn act<R>(&self, act: impl FnOnce(&mut Core, TimeMs) -> R) -> R {
        let mut core = self.core.borrow_mut();
        let result = act(&mut core, self.clock.now());
        self.settings.send_if_modified(|settings| {
            let before = std::mem::replace(settings, core.settings());
            before != *settings
        });
        result
    }
}

impl GovernorHandle {
    /// Starts the threads of the governor. `plugged` is notified whenever the plugged size of a
    /// device changes.
    pub fn spawn(
        core: Core,
        clock: Clock,
        plugged: Arc<Notify>,
        agents: Option<Connections>,
    ) -> io::Result<Self> {
        Self::spawn_parsing(core, clock, plugged, agents, balloon::parse_line)
    }

    fn spawn_parsing(
        core: Core,
        clock: Clock,
        plugged: Arc<Notify>,
        agents: Option<Connections>,
        parse: Parse,
    ) -> io::Result<Self> {
        // The queue has one entry, so that the agent's next line waits for the decision on the
        // previous line.
        let (input, queue) = mpsc::channel(1);
        let (calls, called) = mpsc::unbounded_channel();
        let mut threads = Vec::new();
        let zones = core.zones().clone();
        let state = GovernorTask::new(core, clock.clone());
        if let Some(agents) = agents {
            let link = state.link(input);
            let listen = move || async move { listen(&link, agents, parse).await };
            threads.push(Thread::spawn("_agent", || {}, listen)?);
        }
        threads.push(Thread::spawn("_pressure", prioritize, move || async move {
            tokio::join!(tick(&state, &plugged), decide(&state, queue), answer(&state, called));
        })?);
        let source = Arc::new(Source { calls: calls.clone() });
        Ok(Self { calls, clock, zones, source, _threads: threads })
    }

    /// Runs `call` on the governor's thread, and returns its result.
    pub fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Core, TimeMs) -> R + Send + 'static,
    ) -> R {
        let result = call_on(&self.calls, call);
        result.expect("the governor's thread has panicked; it runs while its handle exists")
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    pub fn zones(&self) -> &GovernedZones {
        &self.zones
    }

    /// Returns the source of metrics. It provides no values once the governor has ended.
    pub fn pressure_source(&self) -> Arc<dyn PressureSource> {
        Arc::clone(&self.source) as _
    }
}

/// Runs `call` on the governor's thread. Returns `None` if the thread has ended.
fn call_on<R: Send + 'static>(
    calls: &mpsc::UnboundedSender<Call>,
    call: impl FnOnce(&mut Core, TimeMs) -> R + Send + 'static,
) -> Option<R> {
    // The caller may be a task on a runtime, which must not block on a channel of that runtime.
    let (reply, result) = std::sync::mpsc::sync_channel(1);
    let call = move |core: &mut Core, now| {
        // The send cannot fail, because the caller waits for the reply.
        let _ = reply.send(call(core, now));
    };
    calls.send(Box::new(call)).ok()?;
    result.recv().ok()
}

/// Governor as a source of metrics.
#[derive(Debug)]
struct Source {
    calls: mpsc::UnboundedSender<Call>,
}

impl PressureSource for Source {
    fn sample(&self) -> Option<PressureSample> {
        call_on(&self.calls, |core, now| core.sample(now))
    }
}

/// Raises the priority of the calling thread if the host permits it.
fn prioritize() {
    // SAFETY: the call uses no pointers. On Linux, 0 stands for the calling thread.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if done != 0 {
        let err = io::Error::last_os_error();
        info!(
            %err,
            "Cannot raise the priority of the governor's thread, so it may act later when the host \
             is busy; RLIMIT_NICE can permit it (LimitNICE=-10 of systemd)"
        );
    }
}

async fn tick(state: &GovernorTask, plugged: &Notify) {
    let mut pace = Pace::new();
    loop {
        let is_fast = state.core.borrow().is_fast();
        pace.wait(plugged, is_fast).await;
        state.act(Core::tick);
    }
}

struct Pace {
    rest: Interval,
    fast: Interval,
    apart: Interval,
}

impl Pace {
    /// The first tick is due immediately.
    fn new() -> Self {
        let [rest, fast, apart] = [TICK, FAST_TICK, APART].map(|period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        });
        Self { rest, fast, apart }
    }

    /// Waits until the next tick is due. Notifications in the first [`APART`] after a tick are
    /// merged into one tick. During that time no task waits for notifications, so they wake no
    /// thread.
    async fn wait(&mut self, plugged: &Notify, is_fast: bool) {
        self.apart.tick().await;
        tokio::select! {
            _ = self.rest.tick() => {}
            () = plugged.notified() => {}
            _ = self.fast.tick(), if is_fast => {}
        }
        self.fast.reset();
        self.apart.reset();
    }
}

/// Handles the input from agents in the order of arrival. A message is dropped if its connection
/// has been replaced.
async fn decide(state: &GovernorTask, mut queue: mpsc::Receiver<AgentInput>) {
    while let Some(input) = queue.recv().await {
        match input {
            AgentInput::Connected => state.act(Core::agent_connected),
            AgentInput::Gone => state.act(Core::agent_gone),
            AgentInput::Message(heard, done) => {
                let Heard { message, at } = *heard;
                if !done.is_closed() {
                    let boottime = state.clock.boottime();
                    state.act(|core, now| core.message(message, now, boottime, || at.elapsed()));
                }
                let _ = done.send(());
            }
        }
    }
}

async fn answer(state: &GovernorTask, mut calls: mpsc::UnboundedReceiver<Call>) {
    while let Some(call) = calls.recv().await {
        state.act(call);
    }
}

/// Serves agents until no more can connect. Then waits for the end of the thread.
async fn listen(link: &AgentLink, mut agents: Connections, parse: Parse) {
    let decide = async |heard| {
        let (done, is_done) = oneshot::channel();
        link.send(AgentInput::Message(Box::new(heard), done)).await;
        let _ = is_done.await;
    };
    let settings = || *link.settings.borrow();
    // All connections share one budget. Otherwise, an agent that opens a new connection for each
    // line would not be limited.
    let mut budget = LineBudget::new();
    let mut next = agents.recv().await;
    while let Some(stream) = next {
        budget.spend().await;
        link.send(AgentInput::Connected).await;
        let connection = async {
            let stream = UnixStream::from_std(stream)?;
            agent::serve(stream, settings, &link.bytes, &mut budget, parse, &decide).await
        };
        next = tokio::select! {
            result = connection => {
                if let Err(err) = result {
                    debug!(%err, "The connection of the agent has failed");
                }
                link.send(AgentInput::Gone).await;
                agents.recv().await
            }
            // A restarted agent may connect before the VMM notices the end of its old connection.
            newer = agents.recv() => {
                rate_limited!(warn, "Another agent has connected; dropped the older connection");
                newer
            }
        };
    }
    pending().await
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
