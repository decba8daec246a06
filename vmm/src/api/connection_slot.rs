//! Connections of a server, and the choice of a connection to close when a new client connects.
//!
//! Clients such as Kata Containers keep one connection for the lifetime of a VM and send nothing
//! for hours. The server therefore does not close a connection merely because it is silent.
//! [`Limits`] bounds the number of connections. Clients that connect and send nothing may occupy
//! only part of them ([`Limits::silent`]), so that the rest is available to clients that send
//! requests. To make room, the server closes the connection that has waited longest for its client.
//! It chooses first among connections that have never delivered a whole request. It never closes a
//! connection with a call in progress.

use std::future::pending;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::server::Limits;

/// Event that a connection waits for. The time is the start of the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// First read from the connection. The client may already have sent its request.
    ForRead,
    /// First byte of the client's next request.
    ForRequest(Instant),
    /// Rest of a request's head, whose first byte has arrived.
    ForRest(Instant),
    /// Rest of a request's body, whose head has arrived. The call has not started.
    ForBody(Instant),
    /// End of a call that is in progress, or of its answer.
    ForCall,
    Dismissed,
}

impl Waits {
    /// Start of the wait for the client.
    fn since(self) -> Option<Instant> {
        match self {
            Self::ForRequest(since) | Self::ForRest(since) | Self::ForBody(since) => Some(since),
            Self::ForRead | Self::ForCall | Self::Dismissed => None,
        }
    }
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    waits: Waits,
    /// True after the first whole request was received.
    has_asked: bool,
}

/// Number of connections that a server has accepted, and of those that it has closed.
#[derive(Debug, Default)]
pub struct ConnectionCounters {
    pub accepted: AtomicU64,
    /// Connections that were closed to make room before they delivered a request.
    pub silent: AtomicU64,
    /// Connections that were closed to make room after they had delivered requests.
    pub idle: AtomicU64,
    /// Connections closed because their client was too slow. The time to send the head of a request
    /// and the time to read an answer are limited. The time until the next request may be limited
    /// too.
    pub timed_out: AtomicU64,
}

/// Room for one more connection on the server.
#[derive(Debug)]
pub(super) enum Room {
    /// There is a free slot.
    Free,
    /// There is room if this connection is closed.
    Instead(Arc<ConnectionSlot>),
    /// No connection can be closed before this time.
    From(Instant),
    /// The server accepts no further connection until a call is answered or a connection ends.
    None,
}

/// All connections of a server.
#[derive(Debug)]
pub(super) struct ConnectionSlots {
    limits: Limits,
    taken: Mutex<Vec<Weak<ConnectionSlot>>>,
    /// Notified when a connection begins to wait for its client.
    idle: Arc<Notify>,
    counters: Arc<ConnectionCounters>,
}

/// State of one connection, shared between its task and the server.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    state: Mutex<State>,
    /// Notified when the state changes, except to [`Waits::ForCall`].
    changed: Notify,
    idle: Arc<Notify>,
}

impl ConnectionSlots {
    pub(super) fn new(limits: Limits, counters: Arc<ConnectionCounters>) -> Self {
        Self { limits, taken: Mutex::default(), idle: Arc::default(), counters }
    }

    /// Creates the slot of an accepted connection.
    pub(super) fn take(&self) -> Arc<ConnectionSlot> {
        let state = Mutex::new(State { waits: Waits::ForRead, has_asked: false });
        let slot = Arc::new(ConnectionSlot {
            state,
            changed: Notify::new(),
            idle: Arc::clone(&self.idle),
        });
        let mut taken = self.taken.lock();
        taken.retain(|slot| slot.strong_count() > 0);
        taken.push(Arc::downgrade(&slot));
        self.counters.accepted.fetch_add(1, Ordering::Relaxed);
        slot
    }

    /// Returns the room for one more connection.
    pub(super) fn room(&self) -> Room {
        let taken: Vec<_> = self.taken.lock().iter().filter_map(Weak::upgrade).collect();
        let states = taken.iter().map(|slot| (*slot.state.lock(), slot));
        let states: Vec<_> = states.filter(|(state, _)| state.waits != Waits::Dismissed).collect();
        let silent = states.iter().filter(|(state, _)| !state.has_asked).count();
        if states.len() < self.limits.connections && silent < self.limits.silent {
            return Room::Free;
        }
        // A silent connection is closed before any connection that has delivered requests.
        let candidates = states.iter().filter(|(state, _)| state.has_asked == (silent == 0));
        let longest = candidates.filter_map(|(state, slot)| Some((state.waits.since()?, slot)));
        match longest.min_by_key(|(since, _)| *since) {
            Some((since, slot)) if since.elapsed() >= self.limits.grace => {
                Room::Instead(Arc::clone(slot))
            }
            Some((since, _)) => Room::From(since + self.limits.grace),
            None => Room::None,
        }
    }

    /// Closes the connection of `slot`, unless its client has sent a request in the meantime.
    pub(super) fn dismiss(&self, slot: &ConnectionSlot) {
        let mut has_asked = None;
        slot.turn(|state| match state.waits.since() {
            Some(_) => {
                has_asked = Some(state.has_asked);
                Waits::Dismissed
            }
            None => state.waits,
        });
        if let Some(has_asked) = has_asked {
            let counter = if has_asked { &self.counters.idle } else { &self.counters.silent };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until a connection may have started to wait for its client.
    pub(super) async fn one_waits(&self) {
        self.idle.notified().await;
    }
}

impl ConnectionSlot {
    /// Changes the state unless the server has chosen to close the connection. Returns true if the
    /// connection is to be closed now.
    fn turn(&self, next: impl FnOnce(&mut State) -> Waits) -> bool {
        let mut state = self.state.lock();
        let before = *state;
        if before.waits != Waits::Dismissed {
            state.waits = next(&mut state);
        }
        if state.waits != before.waits && state.waits != Waits::ForCall {
            self.changed.notify_one();
        }
        // Only after its first read may this connection be closed to make room. After its first
        // request, it is closed later than silent ones.
        let is_read = before.waits == Waits::ForRead && state.waits != Waits::ForRead;
        if is_read || state.has_asked != before.has_asked {
            self.idle.notify_one();
        }
        state.waits == Waits::Dismissed
    }

    /// Records a read and whether it returned bytes.
    pub(super) fn read(&self, has_bytes: bool) {
        self.turn(|state| match state.waits {
            Waits::ForRead | Waits::ForRequest(_) if has_bytes => Waits::ForRest(Instant::now()),
            Waits::ForRead => Waits::ForRequest(Instant::now()),
            other => other,
        });
    }

    /// Records that the head of a request with a body was received. Returns false if the connection
    /// is to be closed.
    fn promised_body(&self) -> bool {
        let is_dismissed = self.turn(|_| Waits::ForBody(Instant::now()));
        self.idle.notify_one();
        !is_dismissed
    }

    /// Records that a whole request was received. Returns false if the connection is to be closed.
    /// The call must not be made then.
    fn called(&self) -> bool {
        !self.turn(|state| {
            state.has_asked = true;
            Waits::ForCall
        })
    }

    fn answered(&self) {
        self.turn(|_| Waits::ForRequest(Instant::now()));
        self.idle.notify_one();
    }

    /// Waits until the connection must end. Returns true if it was chosen to make room, and false
    /// if the client exceeded `head`, the time limit for the head of a request.
    pub(super) async fn has_to_go(&self, head: Duration) -> bool {
        loop {
            let waits = self.state.lock().waits;
            let overstays = async {
                match waits {
                    Waits::ForRest(since) => sleep_until(since + head).await,
                    Waits::Dismissed => {}
                    // A body has its own time limit (`JsonBody`).
                    Waits::ForRead | Waits::ForRequest(_) | Waits::ForBody(_) | Waits::ForCall => {
                        pending().await
                    }
                }
            };
            tokio::select! {
                () = overstays => {
                    if self.state.lock().waits == waits {
                        return waits == Waits::Dismissed;
                    }
                }
                () = self.changed.notified() => {}
            }
        }
    }
}

/// Request body that reports its progress to the slot. The call starts with the last byte of the
/// body. Until then, the connection may be closed to make room.
#[derive(Debug)]
pub(super) struct Question {
    body: Incoming,
    slot: Arc<ConnectionSlot>,
    is_whole: bool,
}

impl Question {
    /// Returns `None` if the connection is to be closed and the request must not be served.
    pub(super) fn new(body: Incoming, slot: Arc<ConnectionSlot>) -> Option<Self> {
        let is_whole = body.is_end_stream();
        let is_served = if is_whole { slot.called() } else { slot.promised_body() };
        is_served.then_some(Self { body, slot, is_whole })
    }
}

impl hyper::body::Body for Question {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        let is_end = self.body.is_end_stream() || matches!(polled, Poll::Ready(None));
        if !is_end || self.is_whole {
            return polled;
        }
        self.is_whole = true;
        // The connection is about to be dropped together with its call.
        if self.slot.called() { polled } else { Poll::Pending }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Question {
    /// Records the request as received if the call ends without reading its whole body, because it
    /// refuses the request or reaches its time limit.
    fn drop(&mut self) {
        if !self.is_whole {
            self.slot.called();
        }
    }
}

/// Answer body that reports its end to the slot. The connection is busy until hyper drops the body.
/// A stream of events can last indefinitely.
#[derive(Debug)]
pub(super) struct Answer {
    body: Body,
    slot: Arc<ConnectionSlot>,
}

impl Answer {
    pub(super) fn new(body: Body, slot: Arc<ConnectionSlot>) -> Self {
        Self { body, slot }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.slot.answered();
    }
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Duration = Duration::from_secs(10);
    const MS: Duration = Duration::from_millis(1);
    const LIMITS: Limits =
        Limits { connections: 4, silent: 2, grace: Duration::from_millis(20), ..Limits::API };

    /// Runs `test` with a paused clock, which advances only while all tasks are idle.
    fn run(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    async fn has_to_go(slot: &ConnectionSlot, within: Duration) -> bool {
        tokio::time::timeout(within, slot.has_to_go(HEAD)).await.is_ok()
    }

    async fn is_ready(future: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(Duration::ZERO, future).await.is_ok()
    }

    fn slots() -> ConnectionSlots {
        ConnectionSlots::new(LIMITS, Arc::default())
    }

    /// Connection whose client has sent nothing yet.
    fn silent(slots: &ConnectionSlots) -> Arc<ConnectionSlot> {
        let slot = slots.take();
        slot.read(false);
        slot
    }

    /// Connection whose client waits for an answer.
    fn busy(slots: &ConnectionSlots) -> Arc<ConnectionSlot> {
        let slot = slots.take();
        slot.read(true);
        assert!(slot.called());
        slot
    }

    /// Connection whose last call is answered.
    fn idle(slots: &ConnectionSlots) -> Arc<ConnectionSlot> {
        let slot = busy(slots);
        slot.answered();
        slot
    }

    fn closed_instead(slots: &ConnectionSlots) -> Option<Arc<ConnectionSlot>> {
        match slots.room() {
            Room::Instead(slot) => Some(slot),
            Room::Free | Room::From(_) | Room::None => None,
        }
    }

    #[test]
    fn silence_has_no_timeout_but_a_head_has() {
        run(async {
            let slots = slots();
            let slot = silent(&slots);
            assert!(!has_to_go(&slot, 1000 * HEAD).await, "silence");
            slot.read(true);
            assert!(!has_to_go(&slot, HEAD - MS).await);
            // One more byte does not restart the time limit.
            slot.read(true);
            assert!(has_to_go(&slot, 2 * MS).await);
            let slot = busy(&slots);
            assert!(!has_to_go(&slot, 1000 * HEAD).await, "a call takes as long as it takes");
            slot.answered();
            assert!(!has_to_go(&slot, 1000 * HEAD).await, "silence again");
            slot.read(true);
            assert!(has_to_go(&slot, HEAD + MS).await);
        });
    }

    #[test]
    fn silent_connections_do_not_take_seats_of_clients_that_send_requests() {
        run(async {
            let slots = slots();
            let (kept, served) = (idle(&slots), busy(&slots));
            tokio::time::advance(HEAD).await;
            let mut last = [silent(&slots), silent(&slots)];
            for _ in 0..100 {
                tokio::time::advance(LIMITS.grace).await;
                let oldest = closed_instead(&slots).expect("a silent connection");
                assert!(Arc::ptr_eq(&oldest, &last[0]));
                slots.dismiss(&oldest);
                assert!(has_to_go(&oldest, Duration::ZERO).await);
                last.rotate_left(1);
                last[1] = silent(&slots);
            }
            assert!(
                !has_to_go(&kept, Duration::ZERO).await
                    && !has_to_go(&served, Duration::ZERO).await
            );
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            assert_eq!((count(&slots.counters.silent), count(&slots.counters.idle)), (100, 0));
            assert_eq!(count(&slots.counters.accepted), 104);
        });
    }

    #[test]
    fn silent_connections_may_not_fill_free_seats() {
        run(async {
            let slots = slots();
            let first = silent(&slots);
            assert!(matches!(slots.room(), Room::Free));
            let _second = silent(&slots);
            assert!(matches!(slots.room(), Room::From(_)), "2 of 4 slots");
            assert!(first.called());
            assert!(matches!(slots.room(), Room::Free), "a request makes room");
        });
    }

    #[test]
    fn connection_has_time_to_send_its_request() {
        run(async {
            let slots = slots();
            let (first, second) = (slots.take(), slots.take());
            tokio::time::advance(HEAD).await;
            // The server has not read from either connection yet, so both may have a request.
            assert!(matches!(slots.room(), Room::None));
            first.read(false);
            let Room::From(time) = slots.room() else { panic!("a time") };
            assert_eq!(time, Instant::now() + LIMITS.grace);
            tokio::time::advance(LIMITS.grace).await;
            let longest = closed_instead(&slots).unwrap();
            assert!(Arc::ptr_eq(&longest, &first));
            // A request that arrives after the connection was chosen is still served.
            assert!(first.called());
            slots.dismiss(&longest);
            assert!(!has_to_go(&first, Duration::ZERO).await);
            drop(second);
        });
    }

    #[test]
    fn among_clients_that_sent_requests_the_longest_waiting_is_closed() {
        run(async {
            let slots = slots();
            let (served, first) = (busy(&slots), idle(&slots));
            tokio::time::advance(MS).await;
            let (_second, _third) = (idle(&slots), idle(&slots));
            tokio::time::advance(LIMITS.grace).await;
            let longest = closed_instead(&slots).unwrap();
            assert!(Arc::ptr_eq(&longest, &first));
            slots.dismiss(&longest);
            assert!(!first.called(), "the connection is dismissed, whatever its client sends");
            assert!(matches!(slots.room(), Room::Free));
            assert!(!has_to_go(&served, Duration::ZERO).await);
            assert_eq!(slots.counters.idle.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn connection_with_an_endless_body_is_closed_like_a_silent_one() {
        run(async {
            let slots = slots();
            let kept = idle(&slots);
            let stalled = [silent(&slots), silent(&slots)];
            for slot in &stalled {
                assert!(slot.promised_body());
            }
            tokio::time::advance(LIMITS.grace).await;
            let longest = closed_instead(&slots).unwrap();
            assert!(Arc::ptr_eq(&longest, &stalled[0]));
            slots.dismiss(&longest);
            assert!(!longest.called(), "its call is not made");
            // With a complete body, the call counts as in progress.
            assert!(stalled[1].called());
            let _others = [silent(&slots), silent(&slots)];
            tokio::time::advance(1000 * HEAD).await;
            let closed = closed_instead(&slots).unwrap();
            assert!(!Arc::ptr_eq(&closed, &stalled[1]) && !Arc::ptr_eq(&closed, &kept));
            // Among clients that have sent requests, one that has sent an incomplete body counts as
            // waiting.
            let slots = self::slots();
            let first = idle(&slots);
            assert!(first.promised_body());
            let _busy = [busy(&slots), busy(&slots), busy(&slots)];
            tokio::time::advance(LIMITS.grace).await;
            assert!(Arc::ptr_eq(&closed_instead(&slots).unwrap(), &first));
        });
    }

    /// The accept loop checks for room, then waits. A change between the two steps ends the wait.
    #[test]
    fn change_between_check_and_wait_is_not_lost() {
        type Change = fn(&ConnectionSlot);
        let changes: [(&str, Change, Change); 6] = [
            ("a read without bytes", |_| (), |slot| slot.read(false)),
            ("the first byte", |_| (), |slot| slot.read(true)),
            ("the first request", |slot| slot.read(true), |slot| assert!(slot.called())),
            ("the head of a body", |slot| slot.read(true), |slot| assert!(slot.promised_body())),
            (
                "the end of a body",
                |slot| assert!(slot.promised_body()),
                |slot| assert!(slot.called()),
            ),
            ("an answer", |slot| assert!(slot.called()), ConnectionSlot::answered),
        ];
        run(async {
            for (name, prepare, change) in changes {
                let slots = slots();
                let slot = slots.take();
                prepare(&slot);
                // Consumes the notifications of `take` and `prepare`, so that only `change` can
                // cause others.
                for _ in 0..2 {
                    is_ready(slots.one_waits()).await;
                    is_ready(slot.changed.notified()).await;
                }
                change(&slot);
                assert!(is_ready(slots.one_waits()).await, "{name}: the accept loop sleeps");
                let is_waiting = slot.state.lock().waits != Waits::ForCall;
                assert_eq!(is_ready(slot.changed.notified()).await, is_waiting, "{name}");
            }
        });
    }

    #[test]
    fn calls_in_progress_are_never_closed() {
        run(async {
            let slots = slots();
            let busy = [busy(&slots), busy(&slots), busy(&slots), busy(&slots)];
            tokio::time::advance(1000 * HEAD).await;
            assert!(matches!(slots.room(), Room::None));
            busy[0].answered();
            assert!(matches!(slots.room(), Room::From(_)));
            drop(busy);
            assert!(matches!(slots.room(), Room::Free));
        });
    }
}
