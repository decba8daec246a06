//! State machine of a stream connection (virtio 1.3, 5.10.6). It uses no files, queues or clock.
//!
//! Credit (5.10.6.3) ensures that a sender never has more payload in flight than fits into the
//! receiver's buffer. Each side announces the size of its buffer and the total number of bytes that
//! it has removed from the buffer, modulo 2^32.

use std::num::Wrapping;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::packet::{Credit, Ended, Op};

/// Size of the VMM's receive buffer for each connection. The buffer has room for two of Linux's
/// largest packets, so that one can be in flight while the host has not read the other yet.
pub(super) const BUFFER_BYTES: u32 = 128 * 1024;

/// Number of freed bytes at which a credit update is sent to the guest. A guest without credit
/// always receives an update after the host has read everything, because all bytes of the buffer
/// have then been freed.
const UPDATE_THRESHOLD_BYTES: u32 = BUFFER_BYTES / 4;

/// Time limit for the guest's answer to a connection request. The driver answers without waiting
/// for a program, but the guest may be short of CPU time or run in an emulator.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the guest to confirm that a connection has ended after the host has closed it.
/// The guest confirms this only after a program has read the remaining data. Linux uses the same
/// limit.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(8);

/// Violation of the protocol by the guest. The connection is then reset.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Violation {
    /// The operation is invalid in the current state of the connection.
    #[error("{op:?} is not allowed in this state")]
    Unexpected { op: Op },
    #[error("payload of {len_bytes} bytes exceeds the credit of {credit_bytes}")]
    CreditExceeded {
        /// Length of the payload.
        len_bytes: u32,
        /// Number of bytes that the guest was allowed to send.
        credit_bytes: u32,
    },
}

/// Effect of a packet from the guest on the host's side of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    None,
    /// The guest accepted the host's request.
    Connected,
    /// A payload follows. The connection already counts it as received.
    Data {
        /// Length of the payload.
        len_bytes: u32,
    },
    /// The guest has ended one or both directions, see [`Connection::guest_ended`].
    Ended,
    Reset,
}

/// Next packet to send to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    Control(Op),
    /// Payload from the host.
    Data {
        /// Maximum length, never zero.
        max_bytes: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The host requests the connection. The request is in flight if `sent` is true.
    Requesting {
        sent: bool,
    },
    /// The guest requests the connection and waits for the response.
    Responding,
    Established,
}

#[derive(Debug)]
pub(super) struct Connection {
    phase: Phase,
    deadline: Option<Instant>,

    guest_credit: Credit,
    /// Number of payload bytes sent to the guest.
    sent: Wrapping<u32>,
    credit_requested: bool,

    /// Number of payload bytes received from the guest.
    received: Wrapping<u32>,
    /// Number of payload bytes forwarded to the host.
    forwarded: Wrapping<u32>,
    /// Last value of `forwarded` that was announced to the guest.
    announced_forwarded: Wrapping<u32>,
    is_credit_update_due: bool,

    guest_ended: Ended,
    host_ended: Ended,
    /// Last value of `host_ended` that was sent to the guest.
    announced_ended: Ended,
}

impl Connection {
    fn new(phase: Phase) -> Self {
        Self {
            phase,
            deadline: None,
            guest_credit: Credit::default(),
            sent: Wrapping(0),
            credit_requested: false,
            received: Wrapping(0),
            forwarded: Wrapping(0),
            announced_forwarded: Wrapping(0),
            is_credit_update_due: false,
            guest_ended: Ended::default(),
            host_ended: Ended::default(),
            announced_ended: Ended::default(),
        }
    }

    /// Creates a connection that the host requests.
    pub(super) fn requested(now: Instant) -> Self {
        Self {
            deadline: Some(now + REQUEST_TIMEOUT),
            ..Self::new(Phase::Requesting { sent: false })
        }
    }

    /// Creates a connection that the guest requests. `guest_credit` is the credit in its request.
    pub(super) fn accepted(guest_credit: Credit) -> Self {
        Self { guest_credit, ..Self::new(Phase::Responding) }
    }

    /// Time at which the connection is reset unless its state changes earlier.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns true while the host's request is not answered yet.
    pub(super) fn is_requesting(&self) -> bool {
        matches!(self.phase, Phase::Requesting { .. })
    }

    /// Directions that the guest has ended.
    pub(super) fn guest_ended(&self) -> Ended {
        self.guest_ended
    }

    /// Number of payload bytes that were received but not forwarded. At most [`BUFFER_BYTES`].
    pub(super) fn unforwarded_bytes(&self) -> u32 {
        (self.received - self.forwarded).0
    }

    pub(super) fn on_guest_packet(&mut self, op: Op, credit: Credit) -> Result<Event, Violation> {
        self.guest_credit = credit;
        if self.guest_room_bytes() > 0 {
            self.credit_requested = false;
        }
        match (self.phase, op) {
            (_, Op::Reset) => Ok(Event::Reset),
            (Phase::Requesting { sent: true }, Op::Response) => {
                self.phase = Phase::Established;
                if !self.host_ended.both() {
                    self.deadline = None;
                }
                Ok(Event::Connected)
            }
            // A response without a request, an answer that is not a response, or a second request.
            (Phase::Requesting { .. }, _) | (_, Op::Request | Op::Response) => {
                Err(Violation::Unexpected { op })
            }
            (_, Op::Shutdown(ended)) => {
                self.guest_ended = self.guest_ended.union(ended);
                Ok(Event::Ended)
            }
            (_, Op::Data { len_bytes }) => self.receive(len_bytes),
            (_, Op::CreditUpdate) => Ok(Event::None),
            (_, Op::CreditRequest) => {
                self.is_credit_update_due = true;
                Ok(Event::None)
            }
        }
    }

    fn receive(&mut self, len_bytes: u32) -> Result<Event, Violation> {
        if self.guest_ended.sending {
            return Err(Violation::Unexpected { op: Op::Data { len_bytes } });
        }
        let credit_bytes = BUFFER_BYTES - self.unforwarded_bytes();
        if len_bytes > credit_bytes {
            return Err(Violation::CreditExceeded { len_bytes, credit_bytes });
        }
        self.received += len_bytes;
        Ok(Event::Data { len_bytes })
    }

    /// Records that the host has received `bytes` of the guest's payload or will never receive
    /// them.
    pub(super) fn forwarded(&mut self, bytes: u32) {
        assert!(bytes <= self.unforwarded_bytes(), "more forwarded than was received");
        self.forwarded += bytes;
        if (self.forwarded - self.announced_forwarded).0 >= UPDATE_THRESHOLD_BYTES {
            self.is_credit_update_due = true;
        }
    }

    /// Records that the host sends no more payload and that all earlier payload was sent to the
    /// guest.
    pub(super) fn host_ended_sending(&mut self, now: Instant) {
        self.host_ended.sending = true;
        self.begin_closing(now);
    }

    /// Records that the host receives no more payload.
    pub(super) fn host_ended_receiving(&mut self, now: Instant) {
        self.host_ended.receiving = true;
        self.begin_closing(now);
    }

    fn begin_closing(&mut self, now: Instant) {
        // If a request is still unanswered, its deadline remains in effect.
        if self.host_ended.both() && self.deadline.is_none() {
            self.deadline = Some(now + CLOSE_TIMEOUT);
        }
    }

    /// Returns the free bytes in the guest's buffer. If the guest claims to have removed more bytes
    /// than were sent, the difference wraps around and the result is 0.
    fn guest_room_bytes(&self) -> u32 {
        let in_flight = self.sent - Wrapping(self.guest_credit.fwd_cnt);
        self.guest_credit.buf_alloc.saturating_sub(in_flight.0)
    }

    /// Returns the next packet to send. `host_readable` is true if the host may have sent payload.
    pub(super) fn next(&self, host_readable: bool) -> Next {
        match self.phase {
            Phase::Requesting { sent: false } => return Next::Control(Op::Request),
            Phase::Requesting { sent: true } => return Next::Nothing,
            Phase::Responding => return Next::Control(Op::Response),
            Phase::Established => {}
        }
        let has_data = host_readable && !self.guest_ended.receiving && !self.host_ended.sending;
        let max_bytes = self.guest_room_bytes();
        // Payload is sent before a pure credit update, because its header contains the credit as
        // well.
        if has_data && max_bytes > 0 {
            return Next::Data { max_bytes };
        }
        if self.is_credit_update_due {
            return Next::Control(Op::CreditUpdate);
        }
        if self.announced_ended != self.host_ended {
            return Next::Control(Op::Shutdown(self.host_ended));
        }
        if has_data && !self.credit_requested {
            return Next::Control(Op::CreditRequest);
        }
        Next::Nothing
    }

    /// Records that `op`, which [`Connection::next`] has allowed, is sent. Returns the credit for
    /// the packet's header.
    pub(super) fn send(&mut self, op: Op) -> Credit {
        match op {
            Op::Request => self.phase = Phase::Requesting { sent: true },
            Op::Response => self.phase = Phase::Established,
            Op::Data { len_bytes } => {
                assert!(
                    len_bytes <= self.guest_room_bytes(),
                    "sent more than the guest has room for"
                );
                self.sent += len_bytes;
            }
            Op::Shutdown(ended) => self.announced_ended = ended,
            Op::CreditRequest => self.credit_requested = true,
            Op::CreditUpdate | Op::Reset => {}
        }
        self.is_credit_update_due = false;
        self.announced_forwarded = self.forwarded;
        Credit { buf_alloc: BUFFER_BYTES, fwd_cnt: self.forwarded.0 }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
