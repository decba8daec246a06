//! Page from which the guest reads the common configuration without an exit.
//!
//! Since Linux 6.12, the driver of virtio-pmem reads the device status before each flush
//! (drivers/nvdimm/nd_virtio.c, `virtio_pmem_flush`). No register of the structure changes when it
//! is read (virtio 1.3, 4.1.4.3), so KVM can serve reads from a read-only memory slot. Writes still
//! cause exits (Linux Documentation/virt/kvm/api.rst, `KVM_MEM_READONLY`). The ISR status, which a
//! read clears, is in another page.
//!
//! If an exit changes a register, the page changes before the exit ends, and before an interrupt
//! about the change is sent.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use foreshore_types::PAGE_BYTES;
use parking_lot::Mutex;

use super::layout::COMMON_OFFSET;
use super::registers::{self, Image};
use crate::log::rate_limited;
use crate::memory::backing::{Access, Reservation};
use crate::memory::layout::GuestRange;
use crate::memory::slots::Slots;

const WORD_BYTES: usize = size_of::<u32>();

pub(super) struct RegisterPage {
    reservation: Arc<Reservation>,
    /// Content of the page. Locked while the page changes, because a worker may request a reset
    /// while a vCPU writes registers.
    image: Mutex<Image>,
}

impl RegisterPage {
    /// Allocates a page of zeros.
    fn new() -> io::Result<Self> {
        let reservation = Reservation::new(PAGE_BYTES, PAGE_BYTES)?;
        reservation.map_anonymous(0, PAGE_BYTES)?;
        Ok(Self { reservation: Arc::new(reservation), image: Mutex::new([0; registers::LEN]) })
    }

    /// Changes the image and then the page. This may wait for other changes, so `change` itself
    /// must read any state that other threads change.
    pub(super) fn change(&self, change: impl FnOnce(&mut Image)) {
        let mut image = self.image.lock();
        change(&mut image);
        for (index, word) in image.as_chunks::<WORD_BYTES>().0.iter().enumerate() {
            // A driver reads a register of up to 32 bits in one piece, and each is within a word.
            self.word(index).store(u32::from_le_bytes(*word), Ordering::Release);
        }
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < registers::LEN / WORD_BYTES);
        let address = self.reservation.addr() as usize + index * WORD_BYTES;
        // SAFETY: the word is aligned and in the mapped page (checked above), which lives as long
        // as `self`. The VMM accesses it only here, and the guest cannot write to it.
        unsafe { AtomicU32::from_ptr(address as *mut u32) }
    }
}

/// Memory slot through which the guest reads a [`RegisterPage`].
pub(super) struct PageSlot {
    /// Name of the device, for log lines.
    device: String,
    page: Arc<RegisterPage>,
    slots: Arc<Slots>,
    /// Slot and its guest-physical address. `None` if reads cause exits.
    mapped: Option<(u32, u64)>,
}

impl PageSlot {
    /// Allocates a page for `device`, which is not mapped yet.
    pub(super) fn new(device: String, slots: Arc<Slots>) -> io::Result<Self> {
        Ok(Self { device, page: Arc::new(RegisterPage::new()?), slots, mapped: None })
    }

    pub(super) fn page(&self) -> Arc<RegisterPage> {
        Arc::clone(&self.page)
    }

    /// Maps the page into the BAR at `bar_base`, or removes it from the guest.
    pub(super) fn follow(&mut self, bar_base: Option<u64>) {
        let wanted = bar_base.map(|base| base + u64::from(COMMON_OFFSET));
        if self.mapped.map(|(_, at)| at) == wanted {
            return;
        }
        let device = &self.device;
        if let Some((slot, at)) = self.mapped {
            if let Err(err) = self.slots.remove(slot) {
                rate_limited!(error, device, %err, at, "Cannot remove the page with a device's registers from the guest");
                return;
            }
            self.mapped = None;
        }
        let Some(start) = wanted else { return };
        let range = GuestRange { start, len: PAGE_BYTES };
        match self.slots.add(range, &self.page.reservation, 0, Access::Read) {
            Ok(slot) => self.mapped = Some((slot, start)),
            // Reads then cause exits, which are only slower.
            Err(err) => {
                rate_limited!(warn, device, %err, start, "Cannot map a device's registers; their reads cause exits")
            }
        }
    }
}

impl Drop for PageSlot {
    fn drop(&mut self) {
        self.follow(None);
    }
}
