//! Events of the VM and the VMM. Watchers receive them: a file or FIFO (`--event-monitor`), and
//! clients of `vmm.events`.
//!
//! Senders never wait. A watcher that is too slow loses events, and the lost events are counted.
//! [`limiter`] limits the rate of events that a guest causes. docs/reference/events.md lists every
//! event.

mod event;
mod limiter;
mod monitor;
mod target;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use tokio::sync::{Notify, broadcast};

pub use self::event::{DeviceEvent, Event};
use self::limiter::{Bounds, Limiter, Source, Verdict};
pub use self::monitor::{Monitor, MonitorError};
pub use self::target::EventMonitor;
use crate::metrics::{Expose, Exposition, Family, and, one};

/// Maximum number of events that are queued for a watcher. A boot sends about 20 events.
const QUEUED: usize = 1024;

/// Event in the form in which it is written. Names and order of the fields are those of Cloud
/// Hypervisor, except that `time` follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EmittedEvent {
    /// Time since the VMM's start.
    pub timestamp: Duration,
    /// `vmm`, `vm` or `virtio-device`. `foreshore` for events that Cloud Hypervisor does not have.
    pub source: &'static str,
    pub event: &'static str,
    /// Properties, or null.
    pub properties: Option<BTreeMap<&'static str, String>>,
    /// Time of the host's clock: RFC 3339, UTC, microseconds.
    #[serde(serialize_with = "with_microseconds")]
    pub time: jiff::Timestamp,
}

fn with_microseconds<S: Serializer>(time: &jiff::Timestamp, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{time:.6}"))
}

/// Sender of events. Any thread may use it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    start: Instant,
    /// `None` marks the end of the stream.
    queue: broadcast::Sender<Option<Arc<EmittedEvent>>>,
    counters: Arc<EventCounters>,
    /// Locked while a rate-limited event is sent, so that events are sent in the order in which
    /// they occurred.
    limiter: Arc<Mutex<Limiter<Message>>>,
    /// Notified when an event is withheld.
    withheld: Arc<Notify>,
}

/// Event without a timestamp.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Message {
    source: &'static str,
    event: &'static str,
    properties: Option<BTreeMap<&'static str, String>>,
}

/// Event that was queued, but not logged yet. Writing to the log may block on the log's reader, so
/// the event is logged after the limiter is unlocked. Otherwise a vCPU thread that sends an event
/// would wait for the log.
#[derive(Clone, Copy, Debug)]
#[must_use]
struct Sent {
    source: &'static str,
    event: &'static str,
}

impl Sent {
    /// Logs an event that a client caused, or that occurs only once.
    fn log(self) {
        tracing::info!(source = self.source, event = self.event, "Event");
    }

    /// Logs an event that a guest can repeat.
    fn log_of_guest(self) {
        tracing::debug!(source = self.source, event = self.event, "Event");
    }
}

impl From<&Event<'_>> for Message {
    fn from(event: &Event<'_>) -> Self {
        let (source, name) = event.name();
        Self { source, event: name, properties: event.properties() }
    }
}

/// Counters of sent, lost and withheld events.
#[derive(Debug, Default)]
pub struct EventCounters {
    emitted: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    lost: AtomicU64,
    withheld: AtomicU64,
}

impl EventCounters {
    /// Number of events of each kind, by source and name.
    pub fn emitted(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        self.emitted.lock().clone()
    }

    /// Total number of events that watchers have lost.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Number of events that were not sent immediately, because the guest caused too many.
    pub fn withheld(&self) -> u64 {
        self.withheld.load(Ordering::Relaxed)
    }

    fn add_lost(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
    }
}

impl Expose for EventCounters {
    fn expose(&self, out: &mut Exposition) {
        let emitted = self
            .emitted()
            .into_iter()
            .map(|((source, event), count)| (and(&one("source", source), "event", event), count));
        out.counters(Family("events", "Events sent.", None), emitted);
        let lost =
            Family("events_lost", "Events lost because a watcher read them too slowly.", None);
        out.counters(lost, [(vec![], self.lost())]);
        let help = "Events delayed by the rate limit because the guest caused them too often.";
        out.counters(Family("events_withheld", help, None), [(vec![], self.withheld())]);
    }
}

/// Receiver of all events that are sent after its creation.
pub struct Watcher {
    queue: broadcast::Receiver<Option<Arc<EmittedEvent>>>,
    counters: Arc<EventCounters>,
}

/// Next item that a watcher receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatcherItem {
    Event(Arc<EmittedEvent>),
    /// Number of lost events.
    Lost(u64),
}

impl Events {
    /// Creates a sender without watchers, and starts the clock for timestamps.
    pub fn start() -> Self {
        Self::start_within(Bounds::USUAL)
    }

    fn start_within(bounds: Bounds) -> Self {
        Self {
            start: Instant::now(),
            queue: broadcast::Sender::new(QUEUED),
            counters: Arc::new(EventCounters::default()),
            limiter: Arc::new(Mutex::new(Limiter::new(bounds))),
            withheld: Arc::new(Notify::new()),
        }
    }

    /// Sends an event that a client caused, or that occurs only once. Never waits.
    pub fn emit(&self, event: Event<'_>) {
        let mut limiter = self.limiter.lock();
        // Withheld events of the same source are sent first. Before the last event of all, all
        // withheld events are sent.
        let before = match event {
            Event::VmmShutdown => limiter.release_all(),
            _ => limiter.release_of(&event.concerns()).into_iter().collect(),
        };
        let before: Vec<_> = before.into_iter().map(|message| self.send(message)).collect();
        let sent = self.send(Message::from(&event));
        drop(limiter);
        before.into_iter().for_each(Sent::log_of_guest);
        sent.log();
    }

    /// Sends an event that a guest can repeat. If the limiter withholds the event, it is sent
    /// later, or never if another event replaces it. Never waits.
    pub fn emit_of_guest(&self, event: Event<'_>) {
        let message = Message::from(&event);
        let mut limiter = self.limiter.lock();
        match limiter.admit(event.concerns(), &message, Instant::now()) {
            Verdict::Emit => {
                let sent = self.send(message);
                drop(limiter);
                sent.log_of_guest();
            }
            Verdict::Repeated => {}
            Verdict::Withhold => {
                self.counters.withheld.fetch_add(1, Ordering::Relaxed);
                self.withheld.notify_one();
            }
        }
    }

    /// Records that a client requested a new size for a zone. The result is sent even if it equals
    /// the last event.
    pub fn expect_of_zone(&self, zone: &str) {
        self.limiter.lock().record_request(Source::Zone(zone.to_owned()), Instant::now());
    }

    /// Records the end of a machine, which a reboot replaces with another. Withheld events of its
    /// devices and memory are dropped. A reboot does not renew allowances.
    pub fn end_machine(&self) {
        self.limiter.lock().end_machine();
    }

    /// Task that sends withheld events as soon as the limiter permits. Never returns.
    pub async fn emit_withheld(self) {
        loop {
            let due = self.limiter.lock().due();
            match due {
                None => self.withheld.notified().await,
                Some(due) => {
                    // In the meantime, an event of another source that is due earlier may be
                    // withheld.
                    let _ = tokio::time::timeout_at(due.into(), self.withheld.notified()).await;
                }
            }
            let mut limiter = self.limiter.lock();
            let messages = limiter.release(Instant::now()).into_iter();
            let sent: Vec<_> = messages.map(|message| self.send(message)).collect();
            drop(limiter);
            sent.into_iter().for_each(Sent::log_of_guest);
        }
    }

    fn send(&self, message: Message) -> Sent {
        let Message { source, event, properties } = message;
        *self.counters.emitted.lock().entry((source, event)).or_default() += 1;
        let (timestamp, time) = (self.start.elapsed(), jiff::Timestamp::now());
        let emitted = EmittedEvent { timestamp, source, event, properties, time };
        // The send fails if there are no watchers.
        let _ = self.queue.send(Some(Arc::new(emitted)));
        Sent { source, event }
    }

    /// Ends the stream of events.
    pub fn end(&self) {
        let _ = self.queue.send(None);
    }

    /// Creates a watcher of all later events.
    pub fn watch(&self) -> Watcher {
        Watcher { queue: self.queue.subscribe(), counters: Arc::clone(&self.counters) }
    }

    pub fn counters(&self) -> Arc<EventCounters> {
        Arc::clone(&self.counters)
    }
}

impl Watcher {
    /// Waits for the next event. Returns `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<WatcherItem> {
        let received = self.queue.recv().await;
        self.item(received)
    }

    /// Same as [`Self::next`], for a thread that may block.
    fn next_blocking(&mut self) -> Option<WatcherItem> {
        let received = self.queue.blocking_recv();
        self.item(received)
    }

    fn item(
        &self,
        received: Result<Option<Arc<EmittedEvent>>, broadcast::error::RecvError>,
    ) -> Option<WatcherItem> {
        match received {
            Ok(emitted) => emitted.map(WatcherItem::Event),
            Err(broadcast::error::RecvError::Lagged(count)) => {
                self.counters.add_lost(count);
                Some(WatcherItem::Lost(count))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn event_has_cloud_hypervisors_format_and_the_time() {
        let emitted = EmittedEvent {
            timestamp: Duration::new(3, 29_228_206),
            source: "vm",
            event: "booted",
            properties: None,
            // The year begins, and no digit is omitted.
            time: jiff::Timestamp::from_second(1_767_225_600).unwrap(),
        };
        let expected = "{\n  \"timestamp\": {\n    \"secs\": 3,\n    \"nanos\": 29228206\n  },\n  \"source\": \"vm\",\n  \
                        \"event\": \"booted\",\n  \"properties\": null,\n  \"time\": \"2026-01-01T00:00:00.000000Z\"\n}";
        assert_eq!(serde_json::to_string_pretty(&emitted).unwrap(), expected);
    }

    #[test]
    fn watcher_receives_later_events_and_the_number_of_lost_ones() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let events = Events::start();
            events.emit(Event::VmBooting);
            let mut watcher = events.watch();
            events.emit(Event::VmBooted);
            let item = watcher.next().await;
            assert!(
                matches!(&item, Some(WatcherItem::Event(emitted)) if emitted.event == "booted"),
                "{item:?}"
            );
            for _ in 0..QUEUED + 7 {
                events.emit(Event::VmResizing);
            }
            assert_eq!(watcher.next().await, Some(WatcherItem::Lost(7)));
            events.end();
            let mut left = 0;
            while let Some(item) = watcher.next().await {
                left += usize::from(matches!(item, WatcherItem::Event(_)));
            }
            // The end marker has displaced one event.
            assert_eq!(left, QUEUED - 1);
            assert_eq!(events.counters().lost(), 8);
            assert_eq!(events.counters().emitted()[&("vm", "resizing")], QUEUED as u64 + 7);
        });
    }

    /// Names of all events until the end of the stream.
    async fn names(events: &Events, mut watcher: Watcher) -> Vec<&'static str> {
        events.end();
        let mut names = Vec::new();
        while let Some(WatcherItem::Event(emitted)) = watcher.next().await {
            names.push(emitted.event);
        }
        names
    }

    #[test]
    fn last_withheld_event_is_sent_when_the_allowance_permits() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let events = Events::start_within(Bounds { burst: 1, span: Duration::from_millis(20) });
            let mut watcher = events.watch();
            let later = tokio::spawn(events.clone().emit_withheld());
            for plugged_bytes in 0..100 {
                events.emit_of_guest(Event::MemoryReached { zone: "pm", plugged_bytes });
            }
            // On a slow machine, some of the other events are sent as well.
            loop {
                let Some(WatcherItem::Event(emitted)) = watcher.next().await else {
                    panic!("no event was expected")
                };
                if emitted.properties.as_ref().unwrap()["plugged_bytes"] == "99" {
                    break;
                }
            }
            assert!(events.counters().withheld() > 0);
            later.abort();
        });
    }

    #[test]
    fn withheld_events_are_sent_before_the_next_event_and_the_end() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let events = Events::start_within(Bounds { burst: 1, span: Duration::from_secs(3600) });
            let watcher = events.watch();
            for _ in 0..10 {
                events.emit_of_guest(Event::VmRebooting);
                events.emit_of_guest(Event::VmRebooted);
            }
            for _ in 0..10 {
                events.emit_of_guest(Event::DeviceActivated { id: "_net1" });
                events.emit_of_guest(Event::DeviceReset { id: "_net1" });
            }
            events.emit(Event::DeviceAdded { id: "_net2", bdf: "0000:00:05.0" });
            events.emit(Event::VmPausing);
            events.emit(Event::VmPaused);
            events.emit(Event::VmmShutdown);
            let expected =
                "rebooting activated rebooted device-added pausing paused reset shutdown";
            assert_eq!(names(&events, watcher).await.join(" "), expected);
        });
    }

    /// Log writer for tests. On each line, it checks that another thread can still send events.
    struct Log {
        events: Events,
        lines: Arc<AtomicU64>,
    }

    impl io::Write for Log {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            assert!(!self.events.limiter.is_locked(), "{}", String::from_utf8_lossy(line));
            self.lines.fetch_add(1, Ordering::Relaxed);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn senders_do_not_wait_for_the_log() {
        let events = Events::start_within(Bounds { burst: 1, span: Duration::from_secs(3600) });
        let (emitted, lines) = (events.clone(), Arc::<AtomicU64>::default());
        let counted = Arc::clone(&lines);
        let log = move || Log { events: emitted.clone(), lines: Arc::clone(&counted) };
        let log = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(log)
            .finish();
        crate::log::with_subscriber(log, || {
            events.emit(Event::VmBooted);
            for plugged_bytes in 0..3 {
                events.emit_of_guest(Event::MemoryReached { zone: "pm", plugged_bytes });
            }
            // The event that was withheld is sent before this one.
            events.emit(Event::VmmShutdown);
        });
        assert_eq!(lines.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn result_of_a_resize_is_sent_although_the_zone_is_limited() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let events = Events::start_within(Bounds { burst: 4, span: Duration::from_secs(3600) });
            let reached = |plugged_bytes| {
                events.emit_of_guest(Event::MemoryReached { zone: "pm", plugged_bytes })
            };
            let emitted = || events.counters().emitted()[&("foreshore", "memory-reached")];
            (0..1000).for_each(|nth| reached(nth % 2));
            assert_eq!(emitted(), 4);
            // Reports the same state as the last event.
            events.expect_of_zone("pm");
            reached(1);
            assert_eq!(emitted(), 5);
            reached(0);
            assert_eq!((emitted(), events.counters().withheld() > 400), (5, true));
        });
    }
}
