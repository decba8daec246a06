//! The task around [`Core`]: the clock, the agent's connections, the devices' news.

use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use balloon::TimeMs;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tracing::debug;

use super::agent;
use super::core::Core;
use crate::log::sparsely;
use crate::metrics::{PressureSample, PressureSource};

/// The controller is to be called at least once a second.
const TICK: Duration = Duration::from_millis(500);

/// Milliseconds since the governor started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The present time.
    pub fn now(self) -> TimeMs {
        TimeMs(u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

/// Where agents' connections come from, non-blocking: one at a time is served, a new one replaces it.
pub type Connections = mpsc::Receiver<StdUnixStream>;

/// A running governor. Dropping it ends its tasks; what it has requested stays requested.
pub struct Governor {
    core: Arc<Mutex<Core>>,
    clock: Clock,
    /// Metrics hold it weakly.
    source: Arc<Source>,
    ticker: JoinHandle<()>,
    listener: Option<JoinHandle<()>>,
}

impl Governor {
    /// Starts the governor on the present runtime. `plugged` is notified whenever a device's plugged size changes.
    pub fn spawn(core: Core, clock: Clock, plugged: Arc<Notify>, agents: Option<Connections>) -> Self {
        let core = Arc::new(Mutex::new(core));
        let ticker = tokio::spawn(tick(Arc::clone(&core), clock, plugged));
        let listener = agents.map(|agents| tokio::spawn(listen(Arc::clone(&core), clock, agents)));
        let source = Arc::new(Source { core: Arc::clone(&core), clock });
        Self { core, clock, source, ticker, listener }
    }

    /// The governor's state, for the API and for metrics.
    pub fn core(&self) -> &Arc<Mutex<Core>> {
        &self.core
    }

    /// The governor's clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// What metrics are made of; gone with the governor.
    pub fn pressure_source(&self) -> Arc<dyn PressureSource> {
        Arc::clone(&self.source) as _
    }
}

/// The governor as metrics see it.
#[derive(Debug)]
struct Source {
    core: Arc<Mutex<Core>>,
    clock: Clock,
}

impl PressureSource for Source {
    fn sample(&self) -> PressureSample {
        self.core.lock().sample(self.clock.now())
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        self.ticker.abort();
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}

async fn tick(core: Arc<Mutex<Core>>, clock: Clock, plugged: Arc<Notify>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = plugged.notified() => {}
        }
        core.lock().tick(clock.now());
    }
}

async fn listen(core: Arc<Mutex<Core>>, clock: Clock, mut agents: Connections) {
    let mut next = agents.recv().await;
    while let Some(stream) = next {
        let connection = async { agent::serve(UnixStream::from_std(stream)?, &core, clock).await };
        core.lock().agent_connected(clock.now());
        next = tokio::select! {
            result = connection => {
                if let Err(err) = result {
                    debug!(%err, "The agent's connection has broken");
                }
                core.lock().agent_gone();
                agents.recv().await
            }
            // An agent that was restarted may be back before the old connection's end is seen.
            newer = agents.recv() => {
                sparsely!(warn, "Another agent connects; the older connection is dropped");
                newer
            }
        };
    }
}
