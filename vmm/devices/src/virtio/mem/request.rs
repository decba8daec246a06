//! Parses requests in guest memory and writes answers (virtio 1.3, 5.15.6).

use std::io::{self, Read};

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::guest_memory::Error as AccessError;
use vm_memory::{Bytes, GuestAddress};

use crate::memory::view::MappedMemory;

/// Length of each request.
const REQUEST_BYTES: usize = 24;
/// Length of each answer.
const RESPONSE_BYTES: usize = 10;

/// Consecutive blocks that a request names, before any check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRun {
    /// Guest-physical address of the first block.
    pub(super) addr: u64,
    pub(super) count: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Plug(BlockRun),
    Unplug(BlockRun),
    UnplugAll,
    State(BlockRun),
    /// A request type that no feature bit allows. It is answered with ERROR.
    Unknown(u16),
}

impl Request {
    fn parse(bytes: &[u8; REQUEST_BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut addr = [0; 8];
        addr.copy_from_slice(&bytes[8..16]);
        // The padding between the fields MUST be ignored.
        let run = BlockRun { addr: u64::from_le_bytes(addr), count: u16_at(16) };
        match u16_at(0) {
            0 => Self::Plug(run),
            1 => Self::Unplug(run),
            2 => Self::UnplugAll,
            3 => Self::State(run),
            other => Self::Unknown(other),
        }
    }
}

/// State of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockState {
    Plugged,
    Unplugged,
    Mixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    Ack,
    AckState(BlockState),
    Nack,
    Busy,
    Error,
}

impl Response {
    fn to_bytes(self) -> [u8; RESPONSE_BYTES] {
        let (code, state) = match self {
            Self::Ack => (0u16, 0u16),
            Self::AckState(BlockState::Plugged) => (0, 0),
            Self::AckState(BlockState::Unplugged) => (0, 1),
            Self::AckState(BlockState::Mixed) => (0, 2),
            Self::Nack => (1, 0),
            Self::Busy => (2, 0),
            Self::Error => (3, 0),
        };
        let mut bytes = [0; RESPONSE_BYTES];
        bytes[0..2].copy_from_slice(&code.to_le_bytes());
        bytes[8..10].copy_from_slice(&state.to_le_bytes());
        bytes
    }
}

/// Error in a descriptor chain without a valid request. The error is returned without an answer,
/// because only a broken driver sends one.
#[derive(Debug, Error)]
pub(super) enum ChainError {
    #[error("descriptor points outside of plugged memory")]
    Descriptors(#[from] virtio_queue::Error),
    #[error("request is shorter than {REQUEST_BYTES} bytes or unreadable")]
    Read(#[source] io::Error),
    #[error("response buffer has {bytes} bytes, {RESPONSE_BYTES} are needed")]
    NoRoom { bytes: usize },
}

/// Buffers for an answer. Unlike a descriptor chain, this value holds no guard of guest memory, so
/// blocks can be unplugged in the meantime.
#[derive(Debug)]
pub(super) struct ReplySlot {
    segments: Vec<(GuestAddress, usize)>,
}

/// Reads the request in `chain` and returns it with the buffers of its answer. The driver may
/// divide both into descriptors at any byte (virtio 1.3, 2.7.4.3).
pub(super) fn read_request(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
) -> Result<(Request, ReplySlot), ChainError> {
    let mut bytes = [0; REQUEST_BYTES];
    chain.clone().reader(memory)?.read_exact(&mut bytes).map_err(ChainError::Read)?;
    let mut segments = Vec::new();
    let mut room = 0;
    for descriptor in chain.writable() {
        let len = (descriptor.len() as usize).min(RESPONSE_BYTES - room);
        room += len;
        segments.push((descriptor.addr(), len));
        if room == RESPONSE_BYTES {
            return Ok((Request::parse(&bytes), ReplySlot { segments }));
        }
    }
    Err(ChainError::NoRoom { bytes: room })
}

impl ReplySlot {
    /// Writes the answer and returns its length for the used ring. Fails if the request has
    /// unplugged the memory that its own answer should be written to.
    pub(super) fn write(
        &self,
        memory: &MappedMemory,
        response: Response,
    ) -> Result<u32, AccessError> {
        let bytes = response.to_bytes();
        let mut rest = &bytes[..];
        for &(addr, len) in &self.segments {
            let (part, after) = rest.split_at(len);
            memory.write_slice(part, addr)?;
            rest = after;
        }
        Ok(RESPONSE_BYTES as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(code: u16, addr: u64, count: u16) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0xee; REQUEST_BYTES];
        bytes[0..2].copy_from_slice(&code.to_le_bytes());
        bytes[8..16].copy_from_slice(&addr.to_le_bytes());
        bytes[16..18].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    #[test]
    fn requests_are_parsed_and_padding_is_ignored() {
        let run = BlockRun { addr: 0x1_2345_6789, count: 0x102 };
        assert_eq!(Request::parse(&bytes(0, run.addr, run.count)), Request::Plug(run));
        assert_eq!(Request::parse(&bytes(1, run.addr, run.count)), Request::Unplug(run));
        assert_eq!(Request::parse(&bytes(2, run.addr, run.count)), Request::UnplugAll);
        assert_eq!(Request::parse(&bytes(3, run.addr, run.count)), Request::State(run));
        assert_eq!(Request::parse(&bytes(4, run.addr, run.count)), Request::Unknown(4));
    }

    #[test]
    fn answers_have_the_codes_of_the_specification() {
        let codes = |response: Response| {
            let bytes = response.to_bytes();
            assert_eq!(bytes[2..8], [0; 6]);
            (bytes[0], bytes[8])
        };
        assert_eq!(codes(Response::Ack), (0, 0));
        assert_eq!(codes(Response::Nack), (1, 0));
        assert_eq!(codes(Response::Busy), (2, 0));
        assert_eq!(codes(Response::Error), (3, 0));
        assert_eq!(codes(Response::AckState(BlockState::Plugged)), (0, 0));
        assert_eq!(codes(Response::AckState(BlockState::Unplugged)), (0, 1));
        assert_eq!(codes(Response::AckState(BlockState::Mixed)), (0, 2));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed(bytes: [u8; REQUEST_BYTES]) {
            let known = u16::from_le_bytes([bytes[0], bytes[1]]) < 4;
            prop_assert_eq!(known, !matches!(Request::parse(&bytes), Request::Unknown(_)));
        }
    }
}
