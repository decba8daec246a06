//! One stream connection as a state machine (virtio 1.3, 5.10.6): it knows what may be sent and
//! what was promised, and nothing of files, queues or the clock.
//!
//! Credit (5.10.6.3): a sender never has more payload under way than fits in the receiver's buffer.
//! Each side tells the size of its buffer and how much it has taken out of it since the beginning,
//! modulo 2^32.

use std::num::Wrapping;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::packet::{Credit, Ended, Op};

/// The receive buffer that we promise to each connection: two of Linux's largest packets, so that
/// one may be under way while the other waits for the host.
pub(super) const BUFFER_BYTES: u32 = 128 * 1024;

/// We tell of freed buffer when at least this much is news to the guest. What is not told, what is
/// not forwarded and what is free make up the buffer: a guest out of credit gets news once the host
/// has caught up.
const UPDATE_THRESHOLD_BYTES: u32 = BUFFER_BYTES / 4;

/// How long the guest may take to answer a request. Its driver answers by itself, no program is
/// involved; the time is for guests that are short of CPU or run in an emulator.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the guest may take to confirm that a connection which the host has left is over. It
/// waits for a program to read what came before; Linux gives the other side as long.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(8);

/// How the guest broke the protocol; the connection ends with a reset.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Violation {
    /// The operation makes no sense in this state.
    #[error("{op:?} is out of place")]
    OutOfPlace { op: Op },
    #[error("{len_bytes} bytes of payload, but credit is {credit_bytes}")]
    CreditExceeded {
        /// Length of the payload.
        len_bytes: u32,
        /// What the guest may send.
        credit_bytes: u32,
    },
}

/// What a packet of the guest means for the host's side.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    None,
    /// The guest granted the host's request.
    Connected,
    /// Payload of this length follows. It counts as received.
    Data {
        /// Bytes.
        len_bytes: u32,
    },
    /// The guest ended one direction or both; see [`Connection::guest_ended`].
    Ended,
    /// The guest reset the connection.
    Reset,
}

/// What the guest is to be sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    /// A packet without payload.
    Control(Op),
    /// Payload of the host, at most this much.
    Data {
        /// Bytes; not zero.
        max_bytes: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The host asks; the request is on its way once `sent`.
    Requesting {
        sent: bool,
    },
    /// The guest asked; it is owed a response.
    Responding,
    Established,
}

#[derive(Debug)]
pub(super) struct Connection {
    phase: Phase,
    deadline: Option<Instant>,

    guest_credit: Credit,
    /// Payload sent to the guest.
    sent: Wrapping<u32>,
    credit_requested: bool,

    /// Payload that the guest has sent.
    received: Wrapping<u32>,
    /// What of it the host has taken.
    forwarded: Wrapping<u32>,
    /// What of that the guest knows of.
    told_forwarded: Wrapping<u32>,
    credit_update_owed: bool,

    guest_ended: Ended,
    host_ended: Ended,
    /// What of that the guest knows of.
    told_ended: Ended,
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
            told_forwarded: Wrapping(0),
            credit_update_owed: false,
            guest_ended: Ended::default(),
            host_ended: Ended::default(),
            told_ended: Ended::default(),
        }
    }

    /// A connection that the host asks for.
    pub(super) fn requested(now: Instant) -> Self {
        Self {
            deadline: Some(now + REQUEST_TIMEOUT),
            ..Self::new(Phase::Requesting { sent: false })
        }
    }

    /// A connection that the guest has asked for, with the credit in its request.
    pub(super) fn accepted(guest_credit: Credit) -> Self {
        Self { guest_credit, ..Self::new(Phase::Responding) }
    }

    /// When the connection is to be reset, unless something happens before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the host's request has not been answered yet.
    pub(super) fn is_requesting(&self) -> bool {
        matches!(self.phase, Phase::Requesting { .. })
    }

    /// Which directions the guest has ended.
    pub(super) fn guest_ended(&self) -> Ended {
        self.guest_ended
    }

    /// Payload that was received and is not forwarded: at most [`BUFFER_BYTES`].
    pub(super) fn unforwarded_bytes(&self) -> u32 {
        (self.received - self.forwarded).0
    }

    /// Takes a packet of the guest.
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
            // A response to what was not asked; anything but a response to what was; a second
            // request.
            (Phase::Requesting { .. }, _) | (_, Op::Request | Op::Response) => {
                Err(Violation::OutOfPlace { op })
            }
            (_, Op::Shutdown(ended)) => {
                self.guest_ended = self.guest_ended.union(ended);
                Ok(Event::Ended)
            }
            (_, Op::Data { len_bytes }) => self.receive(len_bytes),
            (_, Op::CreditUpdate) => Ok(Event::None),
            (_, Op::CreditRequest) => {
                self.credit_update_owed = true;
                Ok(Event::None)
            }
        }
    }

    fn receive(&mut self, len_bytes: u32) -> Result<Event, Violation> {
        if self.guest_ended.sending {
            return Err(Violation::OutOfPlace { op: Op::Data { len_bytes } });
        }
        let credit_bytes = BUFFER_BYTES - self.unforwarded_bytes();
        if len_bytes > credit_bytes {
            return Err(Violation::CreditExceeded { len_bytes, credit_bytes });
        }
        self.received += len_bytes;
        Ok(Event::Data { len_bytes })
    }

    /// The host has taken `bytes` of what the guest sent, or will never take them.
    pub(super) fn forwarded(&mut self, bytes: u32) {
        assert!(bytes <= self.unforwarded_bytes(), "more forwarded than was received");
        self.forwarded += bytes;
        if (self.forwarded - self.told_forwarded).0 >= UPDATE_THRESHOLD_BYTES {
            self.credit_update_owed = true;
        }
    }

    /// The host will send nothing more; all that it did send has been sent on.
    pub(super) fn host_ended_sending(&mut self, now: Instant) {
        self.host_ended.sending = true;
        self.begin_closing(now);
    }

    /// The host will take nothing more.
    pub(super) fn host_ended_receiving(&mut self, now: Instant) {
        self.host_ended.receiving = true;
        self.begin_closing(now);
    }

    fn begin_closing(&mut self, now: Instant) {
        // While the request is not answered, its own deadline holds.
        if self.host_ended.both() && self.deadline.is_none() {
            self.deadline = Some(now + CLOSE_TIMEOUT);
        }
    }

    /// What the guest's buffer has room for. A guest that claims to have taken more than it was
    /// sent gets nothing: the difference wraps around.
    fn guest_room_bytes(&self) -> u32 {
        let under_way = self.sent - Wrapping(self.guest_credit.fwd_cnt);
        self.guest_credit.buf_alloc.saturating_sub(under_way.0)
    }

    /// What to send next, if the host may have payload when `host_readable`.
    pub(super) fn next(&self, host_readable: bool) -> Next {
        match self.phase {
            Phase::Requesting { sent: false } => return Next::Control(Op::Request),
            Phase::Requesting { sent: true } => return Next::Nothing,
            Phase::Responding => return Next::Control(Op::Response),
            Phase::Established => {}
        }
        let has_data = host_readable && !self.guest_ended.receiving && !self.host_ended.sending;
        let max_bytes = self.guest_room_bytes();
        // Payload carries our credit, too, so it comes before a packet that carries nothing else.
        if has_data && max_bytes > 0 {
            return Next::Data { max_bytes };
        }
        if self.credit_update_owed {
            return Next::Control(Op::CreditUpdate);
        }
        if self.told_ended != self.host_ended {
            return Next::Control(Op::Shutdown(self.host_ended));
        }
        if has_data && !self.credit_requested {
            return Next::Control(Op::CreditRequest);
        }
        Next::Nothing
    }

    /// Notes that `op`, which [`Connection::next`] has allowed, is being sent. Returns the credit
    /// for its header.
    pub(super) fn send(&mut self, op: Op) -> Credit {
        match op {
            Op::Request => self.phase = Phase::Requesting { sent: true },
            Op::Response => self.phase = Phase::Established,
            Op::Data { len_bytes } => {
                assert!(
                    len_bytes <= self.guest_room_bytes(),
                    "more sent than the guest has room for"
                );
                self.sent += len_bytes;
            }
            Op::Shutdown(ended) => self.told_ended = ended,
            Op::CreditRequest => self.credit_requested = true,
            Op::CreditUpdate | Op::Reset => {}
        }
        self.credit_update_owed = false;
        self.told_forwarded = self.forwarded;
        Credit { buf_alloc: BUFFER_BYTES, fwd_cnt: self.forwarded.0 }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
