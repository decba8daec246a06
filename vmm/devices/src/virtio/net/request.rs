//! Buffer chains of the virtio-net driver (virtio 1.3, 5.1.6). Each descriptor is read only once,
//! and a chain is limited to the length of the longest frame.
//!
//! A driver may divide a frame into descriptors at any byte (2.7.4.1), so parsing ignores
//! descriptor boundaries.

use thiserror::Error;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::frames::{FRAME_LEN_MIN, PACKET_LEN_MAX};
use super::header::{self, HEADER_LEN, HeaderError, Offloads};

/// Maximum number of descriptors in a chain. Linux uses at most 19 for a frame.
pub const DESCRIPTORS_MAX: u16 = 1024;

#[derive(Debug, Error)]
pub enum RequestError {
    /// The last valid descriptor refers to a next one, which is missing or invalid.
    #[error("chain is broken after {descriptors} descriptors")]
    Broken {
        /// Number of valid descriptors.
        descriptors: u16,
    },
    #[error("chain has more than {max} descriptors")]
    TooManyDescriptors { max: u16 },
    /// The chain has a device-writable descriptor in a transmit queue or a device-readable
    /// descriptor in a receive queue.
    #[error("descriptor has the wrong direction")]
    Direction,
    /// The chain is shorter than the shortest frame or has no room for a header.
    #[error("chain has {len} bytes, at least {least} are needed")]
    TooShort { len: usize, least: usize },
    #[error("chain has more than {PACKET_LEN_MAX} bytes")]
    TooLong,
    #[error("buffer is outside of guest memory")]
    Memory(#[source] vm_memory::guest_memory::Error),
    /// The header is invalid or uses an offload that was not negotiated.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

/// Limits that chains are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of descriptors in a chain.
    pub max_descriptors: u16,
    /// Offloads that the driver may use in frames to the device.
    pub offloads: Offloads,
}

/// Calls `each` for every descriptor of a chain until a call returns an error.
fn walk<M: GuestMemory>(
    chain: &mut DescriptorChain<&M>,
    max: u16,
    mut each: impl FnMut(Descriptor) -> Result<(), RequestError>,
) -> Result<(), RequestError> {
    let (mut descriptors, mut has_next) = (0, true);
    for descriptor in chain {
        if descriptors == max {
            return Err(RequestError::TooManyDescriptors { max });
        }
        descriptors += 1;
        has_next = descriptor.has_next();
        each(descriptor)?;
    }
    // The iterator ends without an error at a loop, an invalid descriptor, or a nested indirect
    // table.
    if has_next { Err(RequestError::Broken { descriptors }) } else { Ok(()) }
}

/// Copies a packet from the driver to `room` and converts its header for the tap. Returns the
/// length including the header.
pub fn read_packet<M: GuestMemory>(
    memory: &M,
    chain: &mut DescriptorChain<&M>,
    limits: &Limits,
    room: &mut [u8; PACKET_LEN_MAX],
) -> Result<usize, RequestError> {
    let mut len = 0;
    walk(chain, limits.max_descriptors, |descriptor| {
        if descriptor.is_write_only() {
            return Err(RequestError::Direction);
        }
        let end = len + descriptor.len() as usize;
        let part = room.get_mut(len..end).ok_or(RequestError::TooLong)?;
        if !part.is_empty() {
            memory.read_slice(part, descriptor.addr()).map_err(RequestError::Memory)?;
        }
        len = end;
        Ok(())
    })?;
    let least = HEADER_LEN + FRAME_LEN_MIN;
    if len < least {
        return Err(RequestError::TooShort { len, least });
    }
    let header = room.first_chunk_mut::<HEADER_LEN>().expect("a header");
    header::check_sent(header, len - HEADER_LEN, limits.offloads)?;
    Ok(len)
}

/// A range of guest-physical addresses, in which memory may not exist.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: GuestAddress,
    len: usize,
}

/// A device-writable chain that can be filled.
#[derive(Clone, Copy, Debug)]
struct Taken {
    head: u16,
    /// Number of segments in the chain.
    segments: usize,
    /// Usable bytes, limited to the length of the longest frame.
    capacity: usize,
}

/// Device-writable chains that were taken from the ring and are not yet filled, in order. The
/// worker takes no more chains than one frame needs, so the number of segments is limited by the
/// frame's length.
#[derive(Default)]
pub struct ChainBuffer {
    segments: Vec<Segment>,
    chains: Vec<Taken>,
    capacity: usize,
}

/// Result of [`ChainBuffer::fit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitResult {
    /// The frame fits into the first chains. Contains their number.
    Chains(usize),
    /// The frame does not fit yet, and another chain must be taken.
    More,
    /// The frame does not fit into any number of chains.
    Never,
}

impl ChainBuffer {
    /// Adds a chain. If this fails, the caller must return the chain to the driver.
    pub fn take<M: GuestMemory>(
        &mut self,
        chain: &mut DescriptorChain<&M>,
        max_descriptors: u16,
    ) -> Result<(), RequestError> {
        let (head, first, mut capacity) = (chain.head_index(), self.segments.len(), 0);
        let result = walk(chain, max_descriptors, |descriptor| {
            if !descriptor.is_write_only() {
                return Err(RequestError::Direction);
            }
            let len = (descriptor.len() as usize).min(PACKET_LEN_MAX - capacity);
            if len > 0 {
                self.segments.push(Segment { address: descriptor.addr(), len });
                capacity += len;
            }
            Ok(())
        });
        let short = RequestError::TooShort { len: capacity, least: HEADER_LEN };
        let result = result.and(if capacity < HEADER_LEN { Err(short) } else { Ok(()) });
        if result.is_err() {
            self.segments.truncate(first);
            return result;
        }
        self.chains.push(Taken { head, segments: self.segments.len() - first, capacity });
        self.capacity += capacity;
        Ok(())
    }

    /// Determines how many chains a packet of `len` bytes needs. `chains_max` is the size of the
    /// ring. If buffers are not mergeable, the packet must fit into one chain.
    pub fn fit(&self, len: usize, chains_max: usize, is_mergeable: bool) -> FitResult {
        if !is_mergeable {
            return match self.chains.first() {
                None => FitResult::More,
                Some(chain) if chain.capacity >= len => FitResult::Chains(1),
                Some(_) => FitResult::Never,
            };
        }
        if self.capacity < len {
            return if self.chains.len() < chains_max { FitResult::More } else { FitResult::Never };
        }
        let mut room = 0;
        let mut chains = self.chains.iter();
        let before = chains.position(|chain| {
            room += chain.capacity;
            room >= len
        });
        FitResult::Chains(before.expect("the capacity of all chains") + 1)
    }

    /// Writes `packet` to the first `count` chains and removes these chains. [`ChainBuffer::fit`]
    /// determines `count`. Appends the head and used length of each chain to `used`. If the write
    /// fails, all lengths are 0, because the content of the chains is invalid.
    pub fn write<M: GuestMemory>(
        &mut self,
        memory: &M,
        packet: &mut [u8],
        count: usize,
        used: &mut Vec<(u16, u32)>,
    ) -> Result<(), RequestError> {
        let buffers = u16::try_from(count).expect("no more chains than a ring has");
        header::set_num_buffers(packet, buffers);
        let (first, mut rest, mut result) = (used.len(), &*packet, Ok(()));
        let mut segments = self.segments.iter();
        for chain in &self.chains[..count] {
            let (part, later) = rest.split_at(rest.len().min(chain.capacity));
            rest = later;
            used.push((chain.head, part.len() as u32));
            result = result.and(write_part(memory, part, segments.by_ref().take(chain.segments)));
        }
        assert!(rest.is_empty() || result.is_err(), "a packet that fits");
        let gone: usize = self.chains[..count].iter().map(|chain| chain.segments).sum();
        self.capacity -= self.chains[..count].iter().map(|chain| chain.capacity).sum::<usize>();
        self.segments.drain(..gone);
        self.chains.drain(..count);
        if result.is_err() {
            used[first..].iter_mut().for_each(|(_, len)| *len = 0);
        }
        result
    }
}

fn write_part<'s, M: GuestMemory>(
    memory: &M,
    part: &[u8],
    segments: impl Iterator<Item = &'s Segment>,
) -> Result<(), RequestError> {
    let (mut rest, mut result) = (part, Ok(()));
    // The loop consumes all segments even after an error.
    for segment in segments {
        let (now, later) = rest.split_at(rest.len().min(segment.len));
        rest = later;
        if result.is_ok() && !now.is_empty() {
            result = memory.write_slice(now, segment.address).map_err(RequestError::Memory);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::QueueT;
    use vm_memory::GuestAddressSpace;

    use super::*;
    use crate::memory::view::MappedMemory;
    use crate::virtio::read_once;
    use crate::virtio::testing::{BUFFERS, Buffer, MEMORY_LEN, TestDriver};

    const LIMITS: Limits = Limits {
        max_descriptors: 8,
        offloads: Offloads { csum: true, tso4: false, tso6: false, ecn: false, ufo: false },
    };

    /// Parses a chain of `buffers`.
    fn read(driver: &mut TestDriver, buffers: &[Buffer]) -> Result<Vec<u8>, RequestError> {
        with_chain(driver, buffers, |memory, chain| {
            let mut room = [0xaa; PACKET_LEN_MAX];
            read_packet(memory, chain, &LIMITS, &mut room).map(|len| room[..len].to_vec())
        })
    }

    fn with_chain<R>(
        driver: &mut TestDriver,
        buffers: &[Buffer],
        run: impl FnOnce(&MappedMemory, &mut DescriptorChain<&MappedMemory>) -> R,
    ) -> R {
        let mut activation = driver.activation(0);
        let mut queue = activation.queues.remove(0).unwrap().queue;
        driver.add(0, buffers);
        let guard = activation.view.memory();
        let memory: &MappedMemory = &guard;
        let mut chain = queue.pop_descriptor_chain(memory).unwrap();
        run(memory, &mut chain)
    }

    #[test]
    fn frame_may_be_divided_at_any_byte() {
        let mut driver = TestDriver::new(1);
        let packet: Vec<u8> = (0..100).map(|nth| if nth < 12 { 0 } else { nth }).collect();
        driver.write(BUFFERS, &packet);
        for cuts in [vec![100], vec![12, 88], vec![5, 0, 20, 75], vec![1, 1, 1, 1, 1, 1, 1, 93]] {
            let mut at = BUFFERS;
            let buffers: Vec<_> = cuts
                .iter()
                .map(|len| {
                    at += u64::from(*len);
                    Buffer::Out(at - u64::from(*len), *len)
                })
                .collect();
            assert_eq!(read(&mut driver, &buffers).unwrap(), packet, "{cuts:?}");
        }
    }

    #[test]
    fn packet_and_its_descriptors_are_read_once() {
        let mut driver = TestDriver::new(1);
        driver.write(BUFFERS, &[0; 12]);
        driver.write(BUFFERS + 12, &[7; 88]);
        for cut in [0, 5, 12, 20, 100] {
            let parts =
                [Buffer::Out(BUFFERS, cut), Buffer::Out(BUFFERS + u64::from(cut), 100 - cut)];
            let packet = read_once::with_chain(&mut driver, &parts, |memory, chain| {
                let mut room = [0xaa; PACKET_LEN_MAX];
                read_packet(memory, chain, &LIMITS, &mut room).map(|len| room[..len].to_vec())
            });
            assert_eq!(packet.unwrap(), [[0; 12].as_slice(), &[7; 88]].concat(), "{cut}");
        }
        let mut chain_buffer = ChainBuffer::default();
        let parts = [Buffer::In(BUFFERS, 30), Buffer::In(BUFFERS + 30, 70)];
        read_once::with_chain(&mut driver, &parts, |memory, chain| {
            chain_buffer.take(chain, 2).unwrap();
            let mut used = Vec::new();
            chain_buffer.write(memory, &mut [1; 100], 1, &mut used).unwrap();
            assert_eq!(used, [(0, 100)]);
        });
    }

    #[test]
    fn invalid_frames_are_refused() {
        let mut driver = TestDriver::new(1);
        let mut error = |buffers: &[Buffer]| read(&mut driver, buffers).unwrap_err().to_string();
        assert!(error(&[Buffer::Out(BUFFERS, 25)]).contains("25 bytes, at least 26"));
        assert!(
            error(&[Buffer::Out(BUFFERS, 12), Buffer::In(BUFFERS, 100)])
                .contains("wrong direction")
        );
        assert!(error(&[Buffer::Out(BUFFERS, PACKET_LEN_MAX as u32 + 1)]).contains("more than"));
        assert!(
            error(&[Buffer::Out(BUFFERS, 60_000), Buffer::Out(BUFFERS, 6000)])
                .contains("more than")
        );
        assert!(error(&[Buffer::Out(BUFFERS, u32::MAX)]).contains("more than"));
        assert!(error(&[Buffer::Out(MEMORY_LEN - 10, 26)]).contains("outside of guest memory"));
        assert!(error(&[Buffer::Out(u64::MAX - 10, 26)]).contains("outside of guest memory"));
        assert!(error(&[Buffer::Out(BUFFERS, 8); 9]).contains("more than 8 descriptors"));
        driver.write(BUFFERS, &[1, 1, 0, 0, 0, 5]);
        assert!(matches!(
            read(&mut driver, &[Buffer::Out(BUFFERS, 100)]),
            Err(RequestError::Header(HeaderError::Gso { gso_type: 1 }))
        ));
    }

    #[test]
    fn unsuitable_receive_chains_are_refused() {
        let mut driver = TestDriver::new(1);
        let mut chain_buffer = ChainBuffer::default();
        let mut take = |buffers: &[Buffer]| {
            with_chain(&mut driver, buffers, |_, chain| chain_buffer.take(chain, 4))
                .unwrap_err()
                .to_string()
        };
        assert!(take(&[Buffer::Out(BUFFERS, 100)]).contains("wrong direction"));
        assert!(
            take(&[Buffer::In(BUFFERS, 50), Buffer::Out(BUFFERS, 50)]).contains("wrong direction")
        );
        assert!(take(&[Buffer::In(BUFFERS, 11)]).contains("11 bytes, at least 12"));
        assert!(take(&[Buffer::In(BUFFERS, 100); 5]).contains("more than 4"));
        assert_eq!((chain_buffer.segments.len(), chain_buffer.chains.len()), (0, 0));
    }

    #[test]
    fn capacity_of_a_chain_is_limited_to_a_frame() {
        let mut driver = TestDriver::new(1);
        let mut chain_buffer = ChainBuffer::default();
        with_chain(
            &mut driver,
            &[Buffer::In(0, 0), Buffer::In(0, 60_000), Buffer::In(0, u32::MAX - 60_000)],
            |_, chain| chain_buffer.take(chain, 4),
        )
        .unwrap();
        assert_eq!(
            (chain_buffer.segments.len(), chain_buffer.chains[0].capacity),
            (2, PACKET_LEN_MAX)
        );
    }

    #[test]
    fn frame_without_sufficient_chains_never_fits() {
        let chain_buffer = |capacities: &[usize]| ChainBuffer {
            segments: Vec::new(),
            chains: capacities
                .iter()
                .map(|&capacity| Taken { head: 0, segments: 0, capacity })
                .collect(),
            capacity: capacities.iter().sum(),
        };
        assert_eq!(chain_buffer(&[]).fit(100, 4, true), FitResult::More);
        assert_eq!(chain_buffer(&[]).fit(100, 4, false), FitResult::More);
        assert_eq!(chain_buffer(&[60, 40, 10]).fit(100, 4, true), FitResult::Chains(2));
        assert_eq!(chain_buffer(&[60, 40, 10]).fit(100, 4, false), FitResult::Never);
        assert_eq!(chain_buffer(&[20, 20, 20]).fit(100, 4, true), FitResult::More);
        assert_eq!(chain_buffer(&[20, 20, 20, 20]).fit(100, 4, true), FitResult::Never);
    }

    #[test]
    fn missing_buffer_loses_only_its_frame() {
        let mut driver = TestDriver::new(1);
        let mut chain_buffer = ChainBuffer::default();
        let mut packet = [7; 40];
        let (mut used, at) = (vec![(9, 9)], BUFFERS);
        for buffers in
            [[Buffer::In(MEMORY_LEN, 20)], [Buffer::In(at, 30)], [Buffer::In(at + 100, 40)]]
        {
            with_chain(&mut driver, &buffers, |memory, chain| {
                chain_buffer.take(chain, 4).unwrap();
                if chain_buffer.fit(40, 32, true) == FitResult::Chains(2) {
                    chain_buffer.write(memory, &mut packet, 2, &mut used).unwrap_err();
                } else if chain_buffer.chains.len() == 1 && used.len() > 1 {
                    chain_buffer.write(memory, &mut packet, 1, &mut used).unwrap();
                }
            });
        }
        // After each activation, the driver begins with head 0.
        assert_eq!(used, [(9, 9), (0, 0), (0, 0), (0, 40)]);
        assert_eq!(driver.read(at + 112, 28), [7; 28]);
    }

    proptest! {
        /// For any sizes of buffers, the driver can reassemble the frame from the used chains.
        #[test]
        fn frame_is_complete_in_any_chains(
            chains in prop::collection::vec(prop::collection::vec(0u32..600, 1..4), 1..16),
            len in 12usize..4000,
        ) {
            let mut driver = TestDriver::new(1);
            let mut activation = driver.activation(0);
            let mut queue = activation.queues.remove(0).unwrap().queue;
            let mut at = BUFFERS;
            let mut places = Vec::new();
            let mut descriptors = 0;
            for lens in &chains {
                descriptors += lens.len();
                if descriptors > 32 {
                    break;
                }
                let buffers: Vec<_> = lens.iter().map(|&len| {
                    at += 1000;
                    Buffer::In(at, len)
                }).collect();
                driver.add(0, &buffers);
                places.push(buffers);
            }
            let guard = activation.view.memory();
            let memory: &MappedMemory = &guard;
            let (mut chain_buffer, mut used) = (ChainBuffer::default(), Vec::new());
            let mut packet: Vec<u8> = (0..len).map(|nth| (nth % 251) as u8).collect();
            // Buffers by the head of their chain. Includes refused chains.
            let mut of_head = std::collections::HashMap::new();
            let fit = loop {
                match chain_buffer.fit(len, 32, true) {
                    FitResult::More => {}
                    fit => break Some(fit),
                }
                let Some(mut chain) = queue.pop_descriptor_chain(memory) else { break None };
                of_head.insert(chain.head_index(), places.remove(0));
                let _ = chain_buffer.take(&mut chain, 4);
            };
            if let Some(FitResult::Chains(count)) = fit {
                chain_buffer.write(memory, &mut packet, count, &mut used).unwrap();
                prop_assert_eq!(used.len(), count);
                let mut found = Vec::new();
                for (head, written) in &used {
                    let mut left = *written;
                    for buffer in &of_head[head] {
                        let Buffer::In(at, len) = *buffer else { unreachable!() };
                        let part = left.min(len);
                        found.extend(driver.read(at, part));
                        left -= part;
                    }
                    prop_assert_eq!(left, 0);
                }
                prop_assert_eq!(&found, &packet);
                prop_assert_eq!(usize::from(u16::from_le_bytes([found[10], found[11]])), count);
                prop_assert!(chain_buffer.chains.is_empty() && chain_buffer.segments.is_empty());
            }
        }
    }
}
