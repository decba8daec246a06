//! What happens to the VM and the VMM, told to whoever watches: a file or FIFO (`--event-monitor`), and clients of
//! `vmm.events`.
//!
//! Who tells never waits: what a watcher is too slow for is lost to that watcher, and counted. docs/events.md lists every event.

mod event;
mod memory;
mod monitor;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::broadcast;

pub use self::event::Event;
pub use self::memory::{Verdict, ZoneDigest, ZoneNews};
pub use self::monitor::{Monitor, MonitorError};

/// So many events may wait for a watcher. A boot tells some twenty.
const QUEUED: usize = 1024;

/// One event as it is written. Field names and their order are Cloud Hypervisor's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Told {
    /// Since the VMM's start.
    pub timestamp: Duration,
    /// Who tells: `vmm`, `vm`, `virtio-device`, and `foreshore` of what Cloud Hypervisor has no event for.
    pub source: &'static str,
    /// What.
    pub event: &'static str,
    /// More about it; null if there is nothing more.
    pub properties: Option<BTreeMap<&'static str, String>>,
}

/// Tells events, from any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    start: Instant,
    /// `None` is the end.
    queue: broadcast::Sender<Option<Arc<Told>>>,
    counters: Arc<EventCounters>,
}

/// How many events there have been, and how many a watcher has missed.
#[derive(Debug, Default)]
pub struct EventCounters {
    told: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    lost: AtomicU64,
    withheld: AtomicU64,
}

impl EventCounters {
    /// How many of each, by source and name.
    pub fn told(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        self.told.lock().clone()
    }

    /// How many watchers have missed, all together.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// How many a guest has caused too often to be told.
    pub fn withheld(&self) -> u64 {
        self.withheld.load(Ordering::Relaxed)
    }

    /// Counts one more.
    pub fn add_withheld(&self) {
        self.withheld.fetch_add(1, Ordering::Relaxed);
    }

    fn add_lost(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
    }
}

/// Somebody who watches from now on.
pub struct Watcher {
    queue: broadcast::Receiver<Option<Arc<Told>>>,
    counters: Arc<EventCounters>,
}

/// What a watcher sees next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// An event.
    Event(Arc<Told>),
    /// So many were missed.
    Lost(u64),
}

impl Events {
    /// Nobody watches yet; the clock starts.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            queue: broadcast::Sender::new(QUEUED),
            counters: Arc::new(EventCounters::default()),
        }
    }

    /// Tells an event. Never waits.
    pub fn tell(&self, event: Event<'_>) {
        let (source, name) = event.name();
        tracing::debug!(source, event = name, "Event");
        *self.counters.told.lock().entry((source, name)).or_default() += 1;
        let properties = event.properties();
        let told = Told { timestamp: self.start.elapsed(), source, event: name, properties };
        // Nobody may watch.
        let _ = self.queue.send(Some(Arc::new(told)));
    }

    /// Everybody has seen everything that will be told.
    pub fn end(&self) {
        let _ = self.queue.send(None);
    }

    /// Sees what is told from now on.
    pub fn watch(&self) -> Watcher {
        Watcher { queue: self.queue.subscribe(), counters: Arc::clone(&self.counters) }
    }

    /// Counts.
    pub fn counters(&self) -> Arc<EventCounters> {
        Arc::clone(&self.counters)
    }
}

impl Watcher {
    /// Waits for the next event; `None` at the end.
    pub async fn next(&mut self) -> Option<Seen> {
        let received = self.queue.recv().await;
        self.seen(received)
    }

    /// The same on a thread that may block.
    fn next_blocking(&mut self) -> Option<Seen> {
        let received = self.queue.blocking_recv();
        self.seen(received)
    }

    fn seen(&self, received: Result<Option<Arc<Told>>, broadcast::error::RecvError>) -> Option<Seen> {
        match received {
            Ok(told) => told.map(Seen::Event),
            Err(broadcast::error::RecvError::Lagged(count)) => {
                self.counters.add_lost(count);
                Some(Seen::Lost(count))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_written_as_cloud_hypervisor_writes_it() {
        let told =
            Told { timestamp: Duration::new(3, 29_228_206), source: "vm", event: "booted", properties: None };
        let expected = "{\n  \"timestamp\": {\n    \"secs\": 3,\n    \"nanos\": 29228206\n  },\n  \"source\": \"vm\",\n  \
                        \"event\": \"booted\",\n  \"properties\": null\n}";
        assert_eq!(serde_json::to_string_pretty(&told).unwrap(), expected);
    }

    #[test]
    fn who_watches_sees_what_is_told_from_then_on_and_how_much_was_missed() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let events = Events::start();
            events.tell(Event::VmBooting);
            let mut watcher = events.watch();
            events.tell(Event::VmBooted);
            let seen = watcher.next().await;
            assert!(matches!(&seen, Some(Seen::Event(told)) if told.event == "booted"), "{seen:?}");
            for _ in 0..QUEUED + 7 {
                events.tell(Event::VmResizing);
            }
            assert_eq!(watcher.next().await, Some(Seen::Lost(7)));
            events.end();
            let mut left = 0;
            while let Some(seen) = watcher.next().await {
                left += usize::from(matches!(seen, Seen::Event(_)));
            }
            // The end has taken one's place.
            assert_eq!(left, QUEUED - 1);
            assert_eq!(events.counters().lost(), 8);
            assert_eq!(events.counters().told()[&("vm", "resizing")], QUEUED as u64 + 7);
        });
    }
}
