//! Memory of the VMM between the guest's and the disk.
//!
//! A disk may be slow, and whoever plugs memory waits until nobody in the VMM uses guest memory: so no guard is held
//! while a disk works, and the disk works on these. They are aligned as O_DIRECT wants it, which the guest's buffers
//! need not be, and the guest cannot change what is in them while it is looked at.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const PAGE_BYTES: usize = 4096;
/// What is kept for the next request: a request of average size has no need to ask the allocator.
const KEPT_MAX: usize = 32;
/// Larger ones are not kept.
const KEPT_PAGES_MAX: usize = 64;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Bytes that begin on a page.
pub struct Buffer {
    pages: Vec<Page>,
    len: usize,
}

impl Buffer {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.pages.as_slice().as_bytes()[..self.len]
    }

    /// The bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_slice().as_mut_bytes()[..self.len]
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Buffers that were used before.
#[derive(Default)]
pub struct Buffers {
    free: Vec<Vec<Page>>,
}

impl Buffers {
    /// A buffer of `len` bytes. What is in it may be left from another request: it is for who fills all of it.
    pub fn take(&mut self, len: usize) -> Buffer {
        let mut pages = self.free.pop().unwrap_or_default();
        let count = len.div_ceil(PAGE_BYTES);
        if pages.len() < count {
            pages.resize(count, Page([0; PAGE_BYTES]));
        }
        Buffer { pages, len }
    }

    /// Takes a buffer back.
    pub fn put(&mut self, buffer: Buffer) {
        if self.free.len() < KEPT_MAX && buffer.pages.len() <= KEPT_PAGES_MAX {
            self.free.push(buffer.pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_as_long_as_asked() {
        let mut buffers = Buffers::default();
        for len in [512, 4096, 4097, 1 << 20, 512, 0] {
            let mut buffer = buffers.take(len);
            assert_eq!((buffer.len(), buffer.bytes().len(), buffer.bytes_mut().len()), (len, len, len));
            assert!(buffer.bytes().as_ptr().addr().is_multiple_of(4096));
            buffers.put(buffer);
        }
    }

    #[test]
    fn only_small_ones_are_kept() {
        let mut buffers = Buffers::default();
        let large = buffers.take(1 << 20);
        buffers.put(large);
        assert!(buffers.free.is_empty());
        let many: Vec<_> = (0..2 * KEPT_MAX).map(|_| buffers.take(4096)).collect();
        many.into_iter().for_each(|buffer| buffers.put(buffer));
        assert_eq!(buffers.free.len(), KEPT_MAX);
    }
}
