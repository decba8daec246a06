//! Split virtqueue (virtio 1.3, 2.7) in one locked page with a known physical address.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, ensure};

/// Queue size that all devices support (the smallest is that of QEMU's rng). All three rings fit
/// into one page.
pub(super) const QUEUE_SIZE: u16 = 8;
/// VIRTQ_DESC_F_NEXT: the chain continues.
pub(super) const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes to the buffer.
pub(super) const WRITE: u16 = 2;

const PAGE_BYTES: usize = 4096;
const AVAILABLE_AT: usize = 1024;
const USED_AT: usize = 2048;
/// Offset of the rest of the page, which is used for requests and their responses.
const BUFFER_AT: usize = 3072;

/// Descriptor in the layout that the device reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

/// Keeps locked pages in place. Otherwise compaction would move them without the device's
/// knowledge, and the device would access memory that is reused
/// (Documentation/admin-guide/sysctl/vm.rst).
pub(super) fn disable_compaction_of_locked_pages() -> Result<()> {
    let path = "/proc/sys/vm/compact_unevictable_allowed";
    std::fs::write(path, "0").with_context(|| format!("Cannot write {path}"))
}

/// A queue and its page. The page is never unmapped, because a late device must not write to memory
/// that is reused.
pub(super) struct Queue {
    pub index: u16,
    page: *mut u8,
    physical: u64,
    offered: u16,
    /// Index of the used ring before the last offer.
    used_before: u16,
}

impl Queue {
    pub(super) fn new(index: u16) -> Result<Self> {
        // SAFETY: a new anonymous mapping. The result is checked.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        ensure!(page != libc::MAP_FAILED, "Cannot map a page: {}", io::Error::last_os_error());
        let mut queue = Self { index, page: page.cast(), physical: 0, offered: 0, used_before: 0 };
        queue.physical = physical_address(page as u64)?;
        Ok(queue)
    }

    /// Guest-physical addresses of the descriptor table, the available ring and the used ring.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [self.physical, self.physical + AVAILABLE_AT as u64, self.physical + USED_AT as u64]
    }

    /// Guest-physical address of byte `at` of the buffer that follows the rings.
    pub(super) fn buffer_address(&self, at: usize) -> u64 {
        self.physical + (BUFFER_AT + at) as u64
    }

    pub(super) fn write_buffer(&mut self, bytes: &[u8]) {
        assert!(BUFFER_AT + bytes.len() <= PAGE_BYTES, "{} bytes do not fit", bytes.len());
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: the assertion above keeps the byte inside the page. The access is volatile
            // because the device may read the page at the same time.
            unsafe { self.page.add(BUFFER_AT + at).write_volatile(*byte) };
        }
    }

    /// Reads the little-endian number at byte `at` of the buffer.
    pub(super) fn read_buffer(&self, at: usize) -> u16 {
        assert!(BUFFER_AT + at + 2 <= PAGE_BYTES, "byte {at} lies outside of the buffer");
        // SAFETY: the assertion above keeps the bytes inside the page. The access is volatile
        // because the device writes them.
        let byte = |at: usize| unsafe { self.page.add(BUFFER_AT + at).read_volatile() };
        u16::from_le_bytes([byte(at), byte(at + 1)])
    }

    /// Writes descriptors from the start of the table, makes `head` available, and advances the
    /// ring's index by `step`.
    pub(super) fn offer(&mut self, descriptors: &[Descriptor], head: u16, step: u16) {
        self.used_before = self.used();
        for (index, descriptor) in descriptors.iter().enumerate().take(usize::from(QUEUE_SIZE)) {
            // SAFETY: the table's 8 entries of 16 bytes are in the page and aligned. The access is
            // volatile because the device may read at the same time.
            unsafe { self.page.cast::<Descriptor>().add(index).write_volatile(*descriptor) };
        }
        let slot = usize::from(self.offered % QUEUE_SIZE);
        self.offered = self.offered.wrapping_add(step);
        // SAFETY: the flags, the index and 8 entries of 2 bytes are in the page from AVAILABLE_AT
        // on, and are aligned.
        unsafe {
            let available = self.page.add(AVAILABLE_AT).cast::<u16>();
            available.add(2 + slot).write_volatile(head);
            // The index publishes the entry (virtio 1.3, 2.7.13.3).
            fence(Ordering::SeqCst);
            available.add(1).write_volatile(self.offered);
        }
        fence(Ordering::SeqCst);
    }

    /// Polls up to `polls` times until the device has used a buffer since the last offer. Returns
    /// false if the device has not used one.
    pub(super) fn wait_until_used(&self, polls: u32) -> bool {
        (0..polls).any(|_| {
            std::hint::spin_loop();
            self.used() != self.used_before
        })
    }

    /// Returns true if the device has returned all offered buffers. The result is valid only if
    /// each offer advanced the index by at most one.
    pub(super) fn are_all_buffers_returned(&self) -> bool {
        self.used() == self.offered
    }

    fn used(&self) -> u16 {
        // SAFETY: the used ring's index is in the page and aligned. The access is volatile because
        // the device writes it.
        unsafe { self.page.add(USED_AT).cast::<u16>().add(1).read_volatile() }
    }
}

fn physical_address(virtual_address: u64) -> Result<u64> {
    let map = File::open("/proc/self/pagemap").context("Cannot open pagemap")?;
    let mut entry = [0u8; 8];
    map.read_exact_at(&mut entry, virtual_address / PAGE_BYTES as u64 * 8)
        .context("Cannot read pagemap")?;
    // Bits 0 to 54 are the page frame number. They are 0 if the process lacks the privilege
    // (Documentation/admin-guide/mm/pagemap.rst).
    let frame = u64::from_le_bytes(entry) & ((1 << 55) - 1);
    ensure!(frame != 0, "pagemap hides the frame number; run as root");
    Ok(frame * PAGE_BYTES as u64)
}
