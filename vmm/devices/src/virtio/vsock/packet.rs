//! Packets in the queues (virtio 1.3, 5.10.6). Each header is parsed once, before the muxer handles
//! it.
//!
//! The crate virtio-vsock cannot be used, because it requires that a payload be in one descriptor
//! and in contiguous memory. Linux guests since 6.7 may use one descriptor per page (MSG_ZEROCOPY).

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The host's context id (virtio 1.3, 5.10.4).
pub(super) const HOST_CID: u64 = 2;

/// `struct virtio_vsock_hdr` (virtio 1.3, 5.10.6).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub src_cid: U64,
    pub dst_cid: U64,
    pub src_port: U32,
    pub dst_port: U32,
    /// Length of the payload after the header.
    pub len: U32,
    /// Type of the socket, such as stream.
    pub socket_type: U16,
    /// Operation of the packet.
    pub op: U16,
    pub flags: U32,
    /// Size of the sender's receive buffer in bytes.
    pub buf_alloc: U32,
    /// Number of bytes that the sender has removed from that buffer since the connection began,
    /// modulo 2^32.
    pub fwd_cnt: U32,
}

pub(super) const HEADER_LEN: usize = size_of::<RawHeader>();
const _: () = assert!(HEADER_LEN == 44);

const TYPE_STREAM: u16 = 1;

const OP_REQUEST: u16 = 1;
const OP_RESPONSE: u16 = 2;
const OP_RST: u16 = 3;
const OP_SHUTDOWN: u16 = 4;
const OP_RW: u16 = 5;
const OP_CREDIT_UPDATE: u16 = 6;
const OP_CREDIT_REQUEST: u16 = 7;

/// A port on the host's side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct HostPort(pub u32);

/// A port on the guest's side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct GuestPort(pub u32);

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host:{}", self.0)
    }
}

impl fmt::Display for GuestPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest:{}", self.0)
    }
}

/// Ports that identify a connection. The context ids are the same for all connections of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Link {
    pub host: HostPort,
    pub guest: GuestPort,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.host, self.guest)
    }
}

/// State of one side's receive buffer. Each header contains it (virtio 1.3, 5.10.6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Credit {
    /// Size of the buffer in bytes.
    pub buf_alloc: u32,
    /// Number of bytes removed from the buffer so far, modulo 2^32.
    pub fwd_cnt: u32,
}

/// Directions that one side has ended (virtio 1.3, 5.10.6.5). Bits are never cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ended {
    /// This side receives no more data.
    pub receiving: bool,
    /// This side sends no more data.
    pub sending: bool,
}

impl Ended {
    const RECEIVING: u32 = 1;
    const SENDING: u32 = 2;

    pub(super) fn both(self) -> bool {
        self.receiving && self.sending
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self {
            receiving: self.receiving || other.receiving,
            sending: self.sending || other.sending,
        }
    }

    fn from_flags(flags: u32) -> Self {
        Self { receiving: flags & Self::RECEIVING != 0, sending: flags & Self::SENDING != 0 }
    }

    fn flags(self) -> u32 {
        u32::from(self.receiving) * Self::RECEIVING + u32::from(self.sending) * Self::SENDING
    }
}

/// Operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Requests a connection.
    Request,
    Response,
    /// Refuses or ends a connection.
    Reset,
    /// Ends directions of a connection.
    Shutdown(Ended),
    Data {
        len_bytes: u32,
    },
    /// Announces the sender's credit.
    CreditUpdate,
    /// Requests the receiver's credit.
    CreditRequest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestPacket {
    pub link: Link,
    pub op: Op,
    /// State of the guest's receive buffer.
    pub credit: Credit,
}

/// Error in a packet from the guest that can only be answered with a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotUnderstood {
    /// Ports of the connection to reset.
    pub link: Link,
    /// True if the packet is itself a reset. Resets are never answered.
    pub is_reset: bool,
}

impl RawHeader {
    /// Returns true if the packet is addressed from the guest `guest_cid` to the host. All other
    /// packets are ignored.
    pub(super) fn is_to_host_from(&self, guest_cid: u64) -> bool {
        self.src_cid.get() == guest_cid && self.dst_cid.get() == HOST_CID
    }

    pub(super) fn parse_guest_packet(&self) -> Result<GuestPacket, NotUnderstood> {
        let link =
            Link { host: HostPort(self.dst_port.get()), guest: GuestPort(self.src_port.get()) };
        let not_understood = NotUnderstood { link, is_reset: self.op.get() == OP_RST };
        if self.socket_type.get() != TYPE_STREAM {
            return Err(not_understood);
        }
        let op = match self.op.get() {
            OP_REQUEST => Op::Request,
            OP_RESPONSE => Op::Response,
            OP_RST => Op::Reset,
            OP_SHUTDOWN => Op::Shutdown(Ended::from_flags(self.flags.get())),
            OP_RW => Op::Data { len_bytes: self.len.get() },
            OP_CREDIT_UPDATE => Op::CreditUpdate,
            OP_CREDIT_REQUEST => Op::CreditRequest,
            _ => return Err(not_understood),
        };
        let credit = Credit { buf_alloc: self.buf_alloc.get(), fwd_cnt: self.fwd_cnt.get() };
        Ok(GuestPacket { link, op, credit })
    }

    /// Builds the header of a packet from the host to the guest `guest_cid`.
    pub(super) fn to_guest(guest_cid: u64, link: Link, op: Op, credit: Credit) -> Self {
        let (op, flags, len) = match op {
            Op::Request => (OP_REQUEST, 0, 0),
            Op::Response => (OP_RESPONSE, 0, 0),
            Op::Reset => (OP_RST, 0, 0),
            Op::Shutdown(ended) => (OP_SHUTDOWN, ended.flags(), 0),
            Op::Data { len_bytes } => (OP_RW, 0, len_bytes),
            Op::CreditUpdate => (OP_CREDIT_UPDATE, 0, 0),
            Op::CreditRequest => (OP_CREDIT_REQUEST, 0, 0),
        };
        Self {
            src_cid: HOST_CID.into(),
            dst_cid: guest_cid.into(),
            src_port: link.host.0.into(),
            dst_port: link.guest.0.into(),
            len: len.into(),
            socket_type: TYPE_STREAM.into(),
            op: op.into(),
            flags: flags.into(),
            buf_alloc: credit.buf_alloc.into(),
            fwd_cnt: credit.fwd_cnt.into(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    const CID: u64 = 3;

    /// Builds the header of the same packet from the guest to the host.
    pub(crate) fn from_guest(guest_cid: u64, link: Link, op: Op, credit: Credit) -> RawHeader {
        let header = RawHeader::to_guest(guest_cid, link, op, credit);
        RawHeader {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            ..header
        }
    }

    /// Parses the header of a packet to the guest.
    pub(crate) fn parse_by_guest(header: &RawHeader) -> GuestPacket {
        RawHeader { src_port: header.dst_port, dst_port: header.src_port, ..*header }
            .parse_guest_packet()
            .expect("a valid operation")
    }

    #[test]
    fn header_has_the_byte_order_of_the_specification() {
        let link = Link { host: HostPort(0x0102_0304), guest: GuestPort(0x0506_0708) };
        let credit = Credit { buf_alloc: 0x1112_1314, fwd_cnt: 0x2122_2324 };
        let header = RawHeader::to_guest(3, link, Op::Data { len_bytes: 0x99 }, credit);
        let expected = [
            2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1, 8, 7, 6, 5, 0x99, 0, 0, 0,
            1, 0, 5, 0, 0, 0, 0, 0, 0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21,
        ];
        assert_eq!(header.as_bytes(), expected);
    }

    #[test]
    fn unknown_types_and_operations_are_not_understood() {
        let link = Link { host: HostPort(1), guest: GuestPort(2) };
        let good = from_guest(CID, link, Op::Request, Credit::default());
        assert!(good.parse_guest_packet().is_ok());
        let seqpacket = RawHeader { socket_type: 2.into(), ..good };
        assert_eq!(seqpacket.parse_guest_packet(), Err(NotUnderstood { link, is_reset: false }));
        for op in [0, 8, u16::MAX] {
            let odd = RawHeader { op: op.into(), ..good };
            assert_eq!(odd.parse_guest_packet(), Err(NotUnderstood { link, is_reset: false }));
        }
        let reset = RawHeader { op: OP_RST.into(), socket_type: 9.into(), ..good };
        assert_eq!(reset.parse_guest_packet(), Err(NotUnderstood { link, is_reset: true }));
    }

    #[test]
    fn only_packets_from_the_guest_to_the_host_are_accepted() {
        let link = Link { host: HostPort(1), guest: GuestPort(2) };
        let good = from_guest(CID, link, Op::Request, Credit::default());
        assert!(good.is_to_host_from(CID));
        assert!(!good.is_to_host_from(CID + 1));
        assert!(!RawHeader { dst_cid: 5.into(), ..good }.is_to_host_from(CID));
        assert!(!RawHeader { dst_cid: (HOST_CID | 1 << 32).into(), ..good }.is_to_host_from(CID));
    }

    proptest! {
        #[test]
        fn parsed_packet_equals_its_bytes(bytes: [u8; HEADER_LEN]) {
            let raw = RawHeader::read_from_bytes(&bytes).unwrap();
            if let Ok(packet) = raw.parse_guest_packet() {
                let reparsed = from_guest(raw.src_cid.get(), packet.link, packet.op, packet.credit);
                prop_assert_eq!(reparsed.parse_guest_packet(), Ok(packet));
                prop_assert_eq!(reparsed.op.get(), raw.op.get());
                prop_assert_eq!(reparsed.dst_port.get(), raw.dst_port.get());
            }
        }
    }
}
