//! Guest memory buffers of a request, in the order of the chain's descriptors.

use smallvec::SmallVec;
use vm_memory::guest_memory::Error as AccessError;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// A range of guest-physical addresses, in which memory may not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    pub len: u32,
}

impl Segment {
    /// Returns the segment without its first `len_bytes`. The segment must be at least that long.
    fn behind(self, len_bytes: u64) -> Self {
        // The address saturates at the end of the address space, where no memory exists.
        let address = GuestAddress(self.address.0.saturating_add(len_bytes));
        Self { address, len: self.len - len_bytes as u32 }
    }
}

/// Usual number of buffers in one direction of a request for one page. One is for the header or the
/// status, and two are for data that crosses a page boundary.
const USUAL: usize = 3;

/// A sequence of buffers, which may be outside of memory, so each access checks them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments(SmallVec<[Segment; USUAL]>);

impl Segments {
    /// Appends a segment, unless it is empty.
    pub fn push(&mut self, segment: Segment) {
        if segment.len > 0 {
            self.0.push(segment);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Total length. The sum cannot overflow, because a chain has less than 2^16 descriptors of
    /// less than 2^32 bytes each.
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|segment| u64::from(segment.len)).sum()
    }

    /// Removes the last byte and returns its address.
    pub fn cut_last_byte(&mut self) -> Option<GuestAddress> {
        let last = self.0.last_mut()?;
        last.len -= 1;
        // If the buffer extends beyond the end of the address space, its last byte has no address.
        let address = last.address.0.checked_add(u64::from(last.len));
        if last.len == 0 {
            self.0.pop();
        }
        address.map(GuestAddress)
    }

    /// Removes the first `len_bytes`.
    pub fn drop_front(&mut self, len_bytes: u64) {
        let mut left = len_bytes;
        self.0.retain(|segment| {
            let dropped = left.min(u64::from(segment.len));
            left -= dropped;
            *segment = segment.behind(dropped);
            segment.len > 0
        });
    }

    /// Keeps only the first `len_bytes`.
    pub fn truncate(&mut self, len_bytes: u64) {
        let mut left = len_bytes;
        self.0.retain(|segment| {
            segment.len = left.min(u64::from(segment.len)) as u32;
            left -= u64::from(segment.len);
            segment.len > 0
        });
    }

    /// Fills `data` from guest memory, starting `skip_bytes` into the buffers.
    pub fn read<M: GuestMemory>(
        &self,
        memory: &M,
        skip_bytes: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        let mut rest = data;
        for segment in self.part(skip_bytes, rest.len() as u64) {
            let (now, later) = rest.split_at_mut(segment.len as usize);
            memory.read_slice(now, segment.address)?;
            rest = later;
        }
        assert!(rest.is_empty(), "read more than the buffers hold");
        Ok(())
    }

    /// Copies `data` to guest memory, starting `skip_bytes` into the buffers.
    pub fn write<M: GuestMemory>(
        &self,
        memory: &M,
        skip_bytes: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let mut rest = data;
        for segment in self.part(skip_bytes, rest.len() as u64) {
            let (now, later) = rest.split_at(segment.len as usize);
            memory.write_slice(now, segment.address)?;
            rest = later;
        }
        assert!(rest.is_empty(), "wrote more than the buffers hold");
        Ok(())
    }

    /// Returns the part of at most `len_bytes` that starts after the first `skip_bytes`.
    fn part(&self, skip_bytes: u64, len_bytes: u64) -> impl Iterator<Item = Segment> {
        let (mut skip, mut left) = (skip_bytes, len_bytes);
        self.0.iter().filter_map(move |segment| {
            let skipped = skip.min(u64::from(segment.len));
            skip -= skipped;
            let rest = segment.behind(skipped);
            let len = u64::from(rest.len).min(left) as u32;
            left -= u64::from(len);
            (len > 0).then_some(Segment { len, ..rest })
        })
    }
}
