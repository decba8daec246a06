//! The governor's threads: clock, connections of the agent, notifications of devices, and calls of
//! the API.
//!
//! Only `_pressure`, the governor's own thread, accesses the state of [`Core`]. `_agent` sends its
//! input through a queue of one entry. The API and scrapes send calls and wait for the reply.
//!
//! `_pressure` has raised priority if the host allows it, because a guest that is short of memory
//! waits for it. So vCPUs and devices that use all CPUs do not delay it. Calls of API clients and
//! scrapers run on this thread between events, and each delays the guest by its own duration.
//! Therefore they only copy state, and the callers convert it to text. `_agent` reads and parses
//! the agent's lines at normal priority, because the guest determines their number.

use std::cell::RefCell;
use std::future::pending;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use balloon::TimeMs;
use balloon::governor::FAST_INTERVAL_MS;
use balloon::proto::Settings;
use foreshore_devices::log::sparsely;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Interval, MissedTickBehavior};
use tracing::debug;

use super::GovernedZones;
use super::agent::{self, Heard, LineBudget, Parse};
use super::core::Core;
use crate::governor::metrics::{PressureSample, PressureSource};

/// Interval of ticks. The controller must be called at least once a second.
const TICK: Duration = Duration::from_millis(500);

/// Interval while a guest without an agent is short of memory and its statistics are requested.
const FAST_TICK: Duration = Duration::from_millis(FAST_INTERVAL_MS);

/// Smallest interval of ticks. The guest can cause ticks at any rate, and this thread has priority
/// over others.
const APART: Duration = Duration::from_millis(10);

/// Nice value of the governor's thread, the same as the agent's in its guest.
const NICE: libc::c_int = -10;

/// Milliseconds since the governor started. Clones share their state.
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
    /// Start of the present pause, by the host's clock.
    since: Option<Duration>,
    /// Sum of the earlier pauses.
    before: Duration,
}

type Read = fn(libc::clockid_t) -> Duration;

impl Clock {
    pub fn start() -> Self {
        let [started, started_with_sleep] = [libc::CLOCK_MONOTONIC, libc::CLOCK_BOOTTIME].map(read);
        Self { read, started, started_with_sleep, held: Arc::default() }
    }

    /// Present time, without the time during which the host slept or the VM was paused. The guest
    /// could neither report nor follow requests then, so that time must not make anything late.
    pub fn now(&self) -> TimeMs {
        let held = self.held.lock();
        let now = held.since.unwrap_or_else(|| (self.read)(libc::CLOCK_MONOTONIC));
        millis(now.saturating_sub(self.started + held.before))
    }

    /// Present time, including host sleep and pauses. The guest's clock may have continued
    /// (kvm-clock does), and its reports must not appear to be from the future.
    pub fn with_sleep(&self) -> TimeMs {
        millis((self.read)(libc::CLOCK_BOOTTIME).saturating_sub(self.started_with_sleep))
    }

    /// Stops the time during a pause of the VM.
    pub fn hold(&self) {
        let mut held = self.held.lock();
        held.since.get_or_insert_with(|| (self.read)(libc::CLOCK_MONOTONIC));
    }

    /// Continues the time after a pause.
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
    // SAFETY: `time` is a timespec that outlives the call, which writes nothing else.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // Only a clock that does not exist fails, and Linux has both since 2.6.39.
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Receives agents' connections, which are non-blocking. One is served at a time, and a new one
/// replaces it.
pub type Connections = mpsc::Receiver<StdUnixStream>;

/// Passes on accepted connections of agents.
pub type Agents = mpsc::Sender<StdUnixStream>;

/// Call of another thread, with the present time.
type Call = Box<dyn FnOnce(&mut Core, TimeMs) + Send>;

/// A running governor. Dropping it ends its threads. Requests to the guest stay in place.
pub struct GovernorHandle {
    /// Each caller waits for its reply, which bounds the queue.
    calls: mpsc::UnboundedSender<Call>,
    clock: Clock,
    zones: GovernedZones,
    /// Weakly held by metrics.
    source: Arc<Source>,
    _threads: Vec<Thread>,
}

/// A thread with its own runtime. Dropping it ends the thread.
struct Thread {
    handle: Option<JoinHandle<()>>,
    end: Option<oneshot::Sender<()>>,
}

impl Thread {
    /// Runs `task` on a thread called `name`, after `prepare`.
    fn spawn<F: Future<Output = ()>>(
        name: &str,
        prepare: fn(),
        task: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (end, ended) = oneshot::channel();
        let handle = thread::Builder::new().name(name.to_owned()).spawn(move || {
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
            // A panic has been logged by the thread.
            let _ = handle.join();
        }
    }
}

enum AgentInput {
    Connected,
    Gone,
    /// The sender is notified of the decision. It is closed if the message's connection is gone.
    Message(Box<Heard>, oneshot::Sender<()>),
}

/// The agent thread's end of the channels.
struct AgentLink {
    input: mpsc::Sender<AgentInput>,
    settings: watch::Receiver<Settings>,
    bytes: Arc<AtomicU64>,
}

impl AgentLink {
    async fn send(&self, input: AgentInput) {
        // An error means that the governor's thread has ended or panicked. If it has ended, this
        // thread ends as well.
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

    /// Returns the agent thread's end. `input` leads to the queue of [`decide`].
    fn link(&self, input: mpsc::Sender<AgentInput>) -> AgentLink {
        let bytes = self.core.borrow().agent_bytes();
        AgentLink { input, settings: self.settings.subscribe(), bytes }
    }

    /// Runs `act` with the present time, and publishes the agent's settings if they have changed.
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
    /// Starts the governor. `plugged` is notified whenever a device's plugged size changes.
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
        // A queue of one, so that the agent's next line waits for the decision on the last one.
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
        threads.push(Thread::spawn("_pressure", go_before_others, move || async move {
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

    /// Source of metrics. It ends with the governor.
    pub fn pressure_source(&self) -> Arc<dyn PressureSource> {
        Arc::clone(&self.source) as _
    }
}

/// Runs `call` on the governor's thread. `None` if the thread has ended.
fn call_on<R: Send + 'static>(
    calls: &mpsc::UnboundedSender<Call>,
    call: impl FnOnce(&mut Core, TimeMs) -> R + Send + 'static,
) -> Option<R> {
    // The caller may be a task of a runtime, which must not wait on a channel of that runtime.
    let (reply, result) = std::sync::mpsc::sync_channel(1);
    let call = move |core: &mut Core, now| {
        // Cannot fail, because the caller waits.
        let _ = reply.send(call(core, now));
    };
    calls.send(Box::new(call)).ok()?;
    result.recv().ok()
}

/// The governor, as a source of metrics.
#[derive(Debug)]
struct Source {
    calls: mpsc::UnboundedSender<Call>,
}

impl PressureSource for Source {
    fn sample(&self) -> Option<PressureSample> {
        call_on(&self.calls, |core, now| core.sample(now))
    }
}

/// Raises the priority of the calling thread if the host allows it.
fn go_before_others() {
    // SAFETY: no pointers. On Linux 0 is the calling thread.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if done != 0 {
        debug!(err = %io::Error::last_os_error(), "Cannot raise the priority of the governor's thread");
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
    /// The first tick is due at once.
    fn new() -> Self {
        let [rest, fast, apart] = [TICK, FAST_TICK, APART].map(|period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        });
        Self { rest, fast, apart }
    }

    /// Waits until the next tick is due. Notifications before [`APART`] has passed are merged into
    /// one tick. No task waits for them until then, so they wake no thread.
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

/// Handles the input of agents in its order. A message whose connection is gone is dropped.
async fn decide(state: &GovernorTask, mut queue: mpsc::Receiver<AgentInput>) {
    while let Some(input) = queue.recv().await {
        match input {
            AgentInput::Connected => state.act(Core::agent_connected),
            AgentInput::Gone => state.act(Core::agent_gone),
            AgentInput::Message(heard, done) => {
                let Heard { message, at } = *heard;
                if !done.is_closed() {
                    let with_sleep = state.clock.with_sleep();
                    state.act(|core, now| core.message(message, now, with_sleep, || at.elapsed()));
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

/// Serves agents until no more can connect, and then waits for the end of the thread.
async fn listen(link: &AgentLink, mut agents: Connections, parse: Parse) {
    let decide = async |heard| {
        let (done, is_done) = oneshot::channel();
        link.send(AgentInput::Message(Box::new(heard), done)).await;
        let _ = is_done.await;
    };
    let settings = || *link.settings.borrow();
    // One budget for all connections. Otherwise, a new connection for each line would have no
    // limit.
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
            // A restarted agent may connect before the end of its old connection is noticed.
            newer = agents.recv() => {
                sparsely!(warn, "Another agent has connected; dropped the older connection");
                newer
            }
        };
    }
    pending().await
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
