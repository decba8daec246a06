//! Who has a connection, and who gives it up where there is no room for another.
//!
//! Clients like Kata Containers keep one connection for a VM's whole life and say nothing for hours, so silence alone ends none. But
//! there are as many as [`Limits`](super::Limits) allows, and a client that forgets its connections must not lock out who wants to end
//! the VMM: where all are taken, the one that has waited longest for its client makes room. And what a client has begun to say it has
//! to go on with.

use std::future::pending;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// Its client's next request, since its last answer.
    ForRequest(Instant),
    /// The rest of a request's head, since its first byte.
    ForRest(Instant),
    /// Nothing of its client but a body, which has a time-out of its own: a call is under way, or its answer.
    ForCall,
    /// Its own end.
    Dismissed,
}

/// All connections of a server.
#[derive(Debug, Default)]
pub(super) struct Seats {
    taken: Mutex<Vec<Weak<Seat>>>,
    /// Told when an answer is done.
    answered: Arc<Notify>,
}

/// One connection's.
#[derive(Debug)]
pub(super) struct Seat {
    waits: Mutex<Waits>,
    /// Told when what it waits for has changed, and not to a call.
    changed: Notify,
    answered: Arc<Notify>,
}

impl Seats {
    /// For a connection that has been accepted.
    pub(super) fn take(&self) -> Arc<Seat> {
        let waits = Mutex::new(Waits::ForRequest(Instant::now()));
        let seat = Arc::new(Seat { waits, changed: Notify::new(), answered: Arc::clone(&self.answered) });
        let mut taken = self.taken.lock();
        taken.retain(|seat| seat.strong_count() > 0);
        taken.push(Arc::downgrade(&seat));
        seat
    }

    /// The one that has waited longest for its client, and since when.
    fn longest_waiting(&self) -> Option<Arc<Seat>> {
        let taken = self.taken.lock();
        let waiting =
            taken.iter().filter_map(Weak::upgrade).filter_map(|seat| Some((seat.waits_since()?, seat)));
        waiting.min_by_key(|(since, _)| *since).map(|(_, seat)| seat)
    }

    /// Whether one would make room.
    pub(super) fn can_make_room(&self) -> bool {
        self.longest_waiting().is_some()
    }

    /// Dismisses the one that has waited longest. Of a request whose bytes nobody has read yet its client hears no more, as of one
    /// that is sent while a server ends: HTTP clients try these again.
    pub(super) fn make_room(&self) {
        if let Some(seat) = self.longest_waiting() {
            seat.turn(|_| Waits::Dismissed);
        }
    }

    /// Returns when a connection that was busy may have begun to wait.
    pub(super) async fn somebody_waits(&self) {
        self.answered.notified().await;
    }
}

impl Seat {
    fn waits_since(&self) -> Option<Instant> {
        match *self.waits.lock() {
            Waits::ForRequest(since) | Waits::ForRest(since) => Some(since),
            Waits::ForCall | Waits::Dismissed => None,
        }
    }

    fn turn(&self, next: impl FnOnce(Waits) -> Waits) {
        let mut waits = self.waits.lock();
        let before = *waits;
        *waits = if before == Waits::Dismissed { before } else { next(before) };
        if *waits != before && *waits != Waits::ForCall {
            self.changed.notify_one();
        }
    }

    /// Bytes have come.
    pub(super) fn heard(&self) {
        self.turn(|waits| match waits {
            Waits::ForRequest(_) => Waits::ForRest(Instant::now()),
            other => other,
        });
    }

    /// A request's head is there.
    pub(super) fn called(&self) {
        self.turn(|_| Waits::ForCall);
    }

    fn answered(&self) {
        self.turn(|_| Waits::ForRequest(Instant::now()));
        self.answered.notify_one();
    }

    /// Returns when the connection has to end: it is dismissed, or its client has taken longer than that for a head.
    pub(super) async fn has_to_go(&self, head: Duration) {
        loop {
            let waits = *self.waits.lock();
            let overstays = async {
                match waits {
                    Waits::ForRest(since) => sleep_until(since + head).await,
                    Waits::Dismissed => {}
                    Waits::ForRequest(_) | Waits::ForCall => pending().await,
                }
            };
            tokio::select! {
                () = overstays => {
                    if *self.waits.lock() == waits {
                        return;
                    }
                }
                () = self.changed.notified() => {}
            }
        }
    }
}

/// An answer's body. Its connection is busy until hyper lets go of it: an answer may take as long as somebody follows events.
#[derive(Debug)]
pub(super) struct Answer {
    body: Body,
    seat: Arc<Seat>,
}

impl Answer {
    pub(super) fn new(body: Body, seat: Arc<Seat>) -> Self {
        Self { body, seat }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.seat.answered();
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

    /// What happens on a clock that stands still while anything can be done.
    fn run(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    async fn has_to_go(seat: &Seat, within: Duration) -> bool {
        tokio::time::timeout(within, seat.has_to_go(HEAD)).await.is_ok()
    }

    #[test]
    fn who_says_nothing_may_stay_and_who_has_begun_must_go_on() {
        run(async {
            let seats = Seats::default();
            let seat = seats.take();
            assert!(!has_to_go(&seat, 1000 * HEAD).await, "silence");
            seat.heard();
            assert!(!has_to_go(&seat, HEAD - Duration::from_millis(1)).await);
            // One byte more is no new beginning.
            seat.heard();
            assert!(has_to_go(&seat, Duration::from_millis(2)).await);
            let seat = seats.take();
            seat.heard();
            seat.called();
            assert!(!has_to_go(&seat, 1000 * HEAD).await, "a call takes as long as it takes");
            seat.answered();
            assert!(!has_to_go(&seat, 1000 * HEAD).await, "silence again");
            seat.heard();
            assert!(has_to_go(&seat, HEAD + Duration::from_millis(1)).await);
        });
    }

    #[test]
    fn who_has_waited_longest_makes_room_and_who_is_served_does_not() {
        run(async {
            let seats = Seats::default();
            let (served, begun, silent) = (seats.take(), seats.take(), seats.take());
            served.called();
            tokio::time::advance(HEAD / 2).await;
            begun.heard();
            for dismissed in [&silent, &begun] {
                assert!(seats.can_make_room());
                seats.make_room();
                assert!(has_to_go(dismissed, Duration::ZERO).await);
            }
            assert!(!seats.can_make_room() && !has_to_go(&served, HEAD).await);
            // What is dismissed stays so, whatever it says.
            silent.called();
            silent.answered();
            assert!(has_to_go(&silent, Duration::ZERO).await && !seats.can_make_room());
            served.answered();
            assert!(seats.can_make_room());
            drop(served);
            assert!(!seats.can_make_room(), "who has gone has none");
        });
    }
}
