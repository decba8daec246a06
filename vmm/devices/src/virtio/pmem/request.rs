//! Parses requests of the virtio-pmem driver and writes answers (virtio 1.3, 5.19.6).

use thiserror::Error;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Value of VIRTIO_PMEM_REQ_TYPE_FLUSH.
const TYPE_FLUSH: u32 = 0;
/// Length of `struct virtio_pmem_req` and of `struct virtio_pmem_resp`: one 32-bit word each.
const WORD_LEN: u32 = 4;

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Make all earlier writes to the range durable.
    Flush,
    /// A type that the specification does not define.
    Unknown(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub head: u16,
    pub kind: Kind,
    /// Address of the answer.
    response: GuestAddress,
}

/// Reason why a chain is not a valid request. The chain is returned without an answer.
#[derive(Debug, Error)]
pub(super) enum RequestError {
    #[error("chain ends before its {0} descriptor")]
    Missing(&'static str),
    #[error("{0} descriptor has the wrong direction")]
    Direction(&'static str),
    #[error("{which} descriptor has {len} bytes, {WORD_LEN} are needed")]
    Short { which: &'static str, len: u32 },
    /// A descriptor points outside of memory.
    #[error("{which} descriptor points outside of memory")]
    Memory {
        which: &'static str,
        #[source]
        source: vm_memory::guest_memory::Error,
    },
}

/// Status of an answer. 0 is success. The guest treats all other values as I/O errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// All writes before the request are durable.
    Durable,
    /// The writes may not be durable, or the request was invalid.
    Failed,
}

impl Answer {
    fn code(self) -> u32 {
        match self {
            Self::Durable => 0,
            Self::Failed => u32::MAX,
        }
    }
}

impl Request {
    /// Parses a request from `chain`, which was popped from the queue in `memory`.
    pub(super) fn parse<M: GuestMemory>(
        memory: &M,
        chain: &mut DescriptorChain<&M>,
    ) -> Result<Self, RequestError> {
        let head = chain.head_index();
        let request = word(chain.next(), "request", false)?;
        let response = word(chain.next(), "response", true)?;
        let kind = match memory.read_obj::<u32>(request).map(u32::from_le) {
            Ok(TYPE_FLUSH) => Kind::Flush,
            Ok(other) => Kind::Unknown(other),
            Err(source) => return Err(RequestError::Memory { which: "request", source }),
        };
        Ok(Self { head, kind, response })
    }

    /// Writes the answer. Returns the number of bytes written, for the used ring.
    pub(super) fn answer<M: GuestMemory>(
        &self,
        memory: &M,
        answer: Answer,
    ) -> Result<u32, RequestError> {
        memory
            .write_obj(answer.code().to_le(), self.response)
            .map_err(|source| RequestError::Memory { which: "response", source })?;
        Ok(WORD_LEN)
    }
}

fn word(
    descriptor: Option<Descriptor>,
    which: &'static str,
    writable: bool,
) -> Result<GuestAddress, RequestError> {
    let descriptor = descriptor.ok_or(RequestError::Missing(which))?;
    if descriptor.is_write_only() != writable {
        return Err(RequestError::Direction(which));
    }
    if descriptor.len() < WORD_LEN {
        return Err(RequestError::Short { which, len: descriptor.len() });
    }
    Ok(descriptor.addr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::read_once;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    #[test]
    fn request_and_its_descriptors_are_read_once() {
        let mut driver = TestDriver::new(1);
        for (word, kind) in [(0u32, Kind::Flush), (7, Kind::Unknown(7))] {
            driver.write(BUFFERS, &word.to_le_bytes());
            let buffers = [Buffer::Out(BUFFERS, 4), Buffer::In(BUFFERS + 4, 4)];
            let request = read_once::with_chain(&mut driver, &buffers, |memory, chain| {
                let request = Request::parse(memory, chain).unwrap();
                request.answer(memory, Answer::Durable).unwrap();
                request
            });
            assert_eq!(request.kind, kind);
        }
    }
}
