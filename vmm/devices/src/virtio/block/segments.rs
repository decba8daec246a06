//! Buffers of the guest as its driver lists them, one after the other.

use smallvec::SmallVec;
use vm_memory::guest_memory::Error as AccessError;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Consecutive bytes of guest memory, if they are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    pub len: u32,
}

impl Segment {
    /// What is left behind the first `len_bytes`, of which it has as many.
    fn behind(self, len_bytes: u64) -> Self {
        // Where it goes beyond the address space, an address that nothing is at does as well.
        let address = GuestAddress(self.address.0.saturating_add(len_bytes));
        Self { address, len: self.len - len_bytes as u32 }
    }
}

/// Number of buffers in one direction of a request for one page: the header or the status, and data
/// that may cross a page boundary.
const USUAL: usize = 3;

/// Consecutive buffers. They may lie outside of memory; an access to them checks that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments(SmallVec<[Segment; USUAL]>);

impl Segments {
    /// Adds one at the end; an empty one is nothing.
    pub fn push(&mut self, segment: Segment) {
        if segment.len > 0 {
            self.0.push(segment);
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of all: a chain has less than 2^16 descriptors of less than 2^32 bytes, so they add
    /// up.
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|segment| u64::from(segment.len)).sum()
    }

    /// Takes the last byte away: its address.
    pub fn cut_last_byte(&mut self) -> Option<GuestAddress> {
        let last = self.0.last_mut()?;
        last.len -= 1;
        // A buffer that goes beyond the address space has no last byte.
        let address = last.address.0.checked_add(u64::from(last.len));
        if last.len == 0 {
            self.0.pop();
        }
        address.map(GuestAddress)
    }

    /// Takes the first `len_bytes` away.
    pub fn drop_front(&mut self, len_bytes: u64) {
        let mut left = len_bytes;
        self.0.retain(|segment| {
            let dropped = left.min(u64::from(segment.len));
            left -= dropped;
            *segment = segment.behind(dropped);
            segment.len > 0
        });
    }

    /// Leaves out what is behind `len_bytes`.
    pub fn truncate(&mut self, len_bytes: u64) {
        let mut left = len_bytes;
        self.0.retain(|segment| {
            segment.len = left.min(u64::from(segment.len)) as u32;
            left -= u64::from(segment.len);
            segment.len > 0
        });
    }

    /// Copies from guest memory, beginning `skip_bytes` into the buffers, until `data` is full.
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
        assert!(rest.is_empty(), "more is read than the buffers have");
        Ok(())
    }

    /// Copies `data` to guest memory, beginning `skip_bytes` into the buffers.
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
        assert!(rest.is_empty(), "more is written than the buffers have");
        Ok(())
    }

    /// Up to `len_bytes` behind the first `skip_bytes`.
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
