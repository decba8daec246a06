//! Memory of the VMM between the guest's and the disk.
//!
//! A disk may be slow, and whoever plugs memory waits until nobody in the VMM uses guest memory: so
//! no guard is held while a disk works, and the disk works on these. They are aligned as O_DIRECT
//! wants it, which the guest's buffers need not be, and the guest cannot change what is in them
//! while it is looked at.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const PAGE_BYTES: usize = 4096;
/// Buffers that are kept for the next request: it has no need to ask the allocator, which zeroes
/// them.
const KEPT_MAX: usize = 32;
/// Pages that all of these have at most.
const KEPT_PAGES_MAX: usize = 2048;

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
    free_pages: usize,
}

impl Buffers {
    /// A buffer of `len` bytes. What is in it may be left from another request: it is for who fills
    /// all of it.
    pub fn take(&mut self, len: usize) -> Buffer {
        let count = len.div_ceil(PAGE_BYTES);
        // The smallest that is large enough: the large ones stay for who needs them.
        let fitting = self.free.iter().enumerate().filter(|(_, pages)| pages.len() >= count);
        let best = fitting.min_by_key(|(_, pages)| pages.len()).map(|(at, _)| at);
        let pages = match best {
            Some(at) => {
                let pages = self.free.swap_remove(at);
                self.free_pages -= pages.len();
                pages
            }
            None => vec![Page([0; PAGE_BYTES]); count],
        };
        Buffer { pages, len }
    }

    /// Takes a buffer back.
    pub fn put(&mut self, buffer: Buffer) {
        let pages = buffer.pages.len();
        if self.free.len() < KEPT_MAX && self.free_pages + pages <= KEPT_PAGES_MAX {
            self.free.push(buffer.pages);
            self.free_pages += pages;
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
            assert_eq!(
                (buffer.len(), buffer.bytes().len(), buffer.bytes_mut().len()),
                (len, len, len)
            );
            assert!(buffer.bytes().as_ptr().addr().is_multiple_of(4096));
            buffers.put(buffer);
        }
    }

    #[test]
    fn pieces_are_used_again_and_small_ones_leave_them_alone() {
        let mut buffers = Buffers::default();
        let (piece, small) = (buffers.take(1 << 20), buffers.take(4096));
        let address = |buffer: &Buffer| buffer.bytes().as_ptr().addr();
        let (piece_at, small_at) = (address(&piece), address(&small));
        buffers.put(small);
        buffers.put(piece);
        let (small, piece) = (buffers.take(512), buffers.take(1 << 20));
        assert_eq!((address(&small), address(&piece)), (small_at, piece_at));
        assert_eq!((buffers.free.len(), buffers.free_pages), (0, 0));
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut buffers = Buffers::default();
        for (len, kept) in [(1 << 20, KEPT_PAGES_MAX / 256), (4096, KEPT_MAX)] {
            let many: Vec<_> = (0..2 * KEPT_MAX).map(|_| buffers.take(len)).collect();
            many.into_iter().for_each(|buffer| buffers.put(buffer));
            assert_eq!(buffers.free.len(), kept);
            assert!(buffers.free_pages <= KEPT_PAGES_MAX);
            buffers = Buffers::default();
        }
    }
}
