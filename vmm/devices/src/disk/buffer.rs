//! Buffers of the VMM between guest memory and the disk.
//!
//! A disk may be slow, and a memory plug waits until no thread of the VMM uses guest memory. Disk
//! I/O therefore uses these buffers, and holds no guard of guest memory. The buffers are aligned
//! for O_DIRECT, and the guest's own buffers may not be. In addition, the guest cannot change the
//! content of these buffers during a check.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const PAGE_BYTES: usize = 4096;
/// Maximum number of buffers that are kept for later requests. Reusing a buffer avoids allocating
/// and zeroing a new one.
const MAX_POOLED_BUFFERS: usize = 32;
/// Maximum number of pages in all kept buffers.
const MAX_POOLED_PAGES: usize = 2048;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Page-aligned bytes.
pub struct Buffer {
    pages: Vec<Page>,
    len: usize,
}

impl Buffer {
    pub fn bytes(&self) -> &[u8] {
        &self.pages.as_slice().as_bytes()[..self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_slice().as_mut_bytes()[..self.len]
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Buffers for reuse.
#[derive(Default)]
pub struct Buffers {
    free: Vec<Vec<Page>>,
    free_pages: usize,
}

impl Buffers {
    /// Returns a buffer of `len` bytes. The caller must fill it completely, because it may contain
    /// data of another request.
    pub fn take(&mut self, len: usize) -> Buffer {
        let count = len.div_ceil(PAGE_BYTES);
        // Chooses the smallest sufficient buffer, so that large buffers remain for large requests.
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

    /// Keeps a buffer for reuse.
    pub fn put(&mut self, buffer: Buffer) {
        let pages = buffer.pages.len();
        if self.free.len() < MAX_POOLED_BUFFERS && self.free_pages + pages <= MAX_POOLED_PAGES {
            self.free.push(buffer.pages);
            self.free_pages += pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_have_the_requested_length() {
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
    fn large_buffers_are_reused_for_large_requests() {
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
    fn number_of_pooled_buffers_is_limited() {
        let mut buffers = Buffers::default();
        for (len, pooled) in [(1 << 20, MAX_POOLED_PAGES / 256), (4096, MAX_POOLED_BUFFERS)] {
            let many: Vec<_> = (0..2 * MAX_POOLED_BUFFERS).map(|_| buffers.take(len)).collect();
            many.into_iter().for_each(|buffer| buffers.put(buffer));
            assert_eq!(buffers.free.len(), pooled);
            assert!(buffers.free_pages <= MAX_POOLED_PAGES);
            buffers = Buffers::default();
        }
    }
}
