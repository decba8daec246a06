//! A large buffer that lives for a moment.

use std::io;

use vm_memory::MmapRegion;

/// Zeroed bytes that belong to no allocator: dropping them gives the memory back to the host at
/// once, and does not raise the allocator's threshold for mappings, after which later buffers would
/// stay in the heap.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `None` if there are no bytes: a mapping cannot be empty.
    region: Option<MmapRegion<()>>,
}

impl Scratch {
    /// Maps `len` bytes; they use memory as they are written.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { region: None });
        }
        let region = MmapRegion::new(len).map_err(io::Error::other)?;
        // A few huge pages instead of thousands of faults; where the host has none, small ones do.
        // SAFETY: the range is exactly the mapping that `region` owns; the advice changes no
        // contents.
        unsafe { libc::madvise(region.as_ptr().cast(), region.size(), libc::MADV_HUGEPAGE) };
        Ok(Self { region: Some(region) })
    }

    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.region {
            None => &[],
            // SAFETY: the mapping is private, readable, zero-initialised and lives as long as
            // `self`; nobody else has its address, and `bytes_mut` borrows `self`
            // exclusively.
            Some(region) => unsafe { std::slice::from_raw_parts(region.as_ptr(), region.size()) },
        }
    }

    /// The bytes, to be written.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match &self.region {
            None => &mut [],
            // SAFETY: as in `bytes`; the mapping is writable and `self` is borrowed exclusively.
            Some(region) => unsafe {
                std::slice::from_raw_parts_mut(region.as_ptr(), region.size())
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_zeroed_writable_and_may_be_empty() {
        let mut scratch = Scratch::new(5000).unwrap();
        assert!(scratch.bytes().iter().all(|&byte| byte == 0));
        scratch.bytes_mut()[4999] = 7;
        assert_eq!((scratch.bytes().len(), scratch.bytes()[4999]), (5000, 7));
        let mut empty = Scratch::new(0).unwrap();
        assert!(empty.bytes().is_empty() && empty.bytes_mut().is_empty());
    }
}
