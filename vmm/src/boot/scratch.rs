//! Large temporary buffer.

use std::io;

use vm_memory::MmapRegion;

/// Zeroed bytes in a mapping of their own, outside the allocator.
///
/// When they are dropped, the memory is returned to the host immediately. If the allocator freed
/// such a buffer, it would raise its mmap threshold, and later buffers would stay in the heap.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `None` for an empty buffer, because a mapping cannot be empty.
    region: Option<MmapRegion<()>>,
}

impl Scratch {
    /// Maps `len` bytes, which use memory only once they are written.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { region: None });
        }
        let region = MmapRegion::new(len).map_err(io::Error::other)?;
        // A few huge pages avoid thousands of page faults. If the host has no huge pages, it uses
        // small ones. SAFETY: the range is exactly the mapping that `region` owns. The advice does
        // not change the contents.
        unsafe { libc::madvise(region.as_ptr().cast(), region.size(), libc::MADV_HUGEPAGE) };
        Ok(Self { region: Some(region) })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match &self.region {
            None => &[],
            // SAFETY: the mapping is private, readable and zero-initialized, and lives as long as
            // `self`. No other code has its address, and `bytes_mut` borrows `self` exclusively.
            Some(region) => unsafe { std::slice::from_raw_parts(region.as_ptr(), region.size()) },
        }
    }

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
