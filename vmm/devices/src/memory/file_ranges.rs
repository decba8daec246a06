//! Files that are mapped into guest memory outside of zones: volumes and the files of `--pmem`.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vm_memory::GuestAddress;

use super::backing::{Access, Reservation};
use super::build::{MemoryError, region, reserve};
use super::layout::GuestRange;
use super::slots::Slots;
use super::view::GuestView;
use crate::log::rate_limited;

/// State that is shared by all [`MappedRange`]s of a VM.
pub(super) struct FileRanges {
    view: GuestView,
    slots: Arc<Slots>,
    /// Mapped bytes in all ranges.
    bytes: Arc<AtomicU64>,
    /// Ranges that were removed since the last call of [`Self::take_removed`].
    removed: Mutex<Vec<GuestRange>>,
}

impl FileRanges {
    pub(super) fn new(view: GuestView, slots: Arc<Slots>) -> Arc<Self> {
        Arc::new(Self { view, slots, bytes: Arc::default(), removed: Mutex::default() })
    }

    pub(super) fn bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.bytes)
    }

    /// Returns the removed ranges. Their addresses are free again.
    pub(super) fn take_removed(&self) -> Vec<GuestRange> {
        std::mem::take(&mut self.removed.lock())
    }

    /// Maps extents of `file` next to each other, and makes them accessible to the guest and to
    /// devices at `guest`.
    pub(super) fn add(
        self: &Arc<Self>,
        guest: GuestRange,
        file: BorrowedFd<'_>,
        extents: &[Range<u64>],
        access: Access,
    ) -> Result<MappedRange, MemoryError> {
        let reservation = reserve(guest, None)?;
        let mut at = 0;
        for extent in extents {
            let len = extent.end - extent.start;
            reservation
                .map_file(at, len, file, extent.start, access)
                .map_err(|source| MemoryError::Map { len, source })?;
            at += len;
        }
        let mut memory = self.view.exclusive();
        memory.add_region(region(guest, &reservation)?, Arc::clone(&reservation))?;
        if access == Access::Read {
            memory.forbid_writes(guest.start, guest.len);
        }
        drop(memory);
        match self.slots.add(guest, &reservation, 0, access) {
            Ok(slot) => {
                self.bytes.fetch_add(guest.len, Ordering::Relaxed);
                Ok(MappedRange { guest, reservation, slot, files: Arc::clone(self) })
            }
            Err(err) => {
                self.remove_region(guest, &reservation);
                Err(err.into())
            }
        }
    }

    fn remove_region(&self, guest: GuestRange, reservation: &Arc<Reservation>) {
        let start = GuestAddress(guest.start);
        self.view.exclusive().remove_region(start, guest.len, reservation);
    }
}

/// File that is mapped into guest memory. Dropping it takes access from the guest and from devices,
/// and waits for device accesses in progress. If KVM fails to remove the slot, the range remains
/// mapped.
pub struct MappedRange {
    /// Guest-physical addresses.
    pub guest: GuestRange,
    /// Host-virtual addresses.
    pub reservation: Arc<Reservation>,
    slot: u32,
    files: Arc<FileRanges>,
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        let Self { guest, reservation, slot, files } = self;
        // 1. Remove the file from the guest, 2. remove it from devices, 3. free its addresses for
        //    the next file.
        if let Err(err) = files.slots.remove(*slot) {
            let (start, len) = (guest.start, guest.len);
            rate_limited!(error, start, len, %err, "Cannot remove a file from guest memory; it stays mapped");
            return;
        }
        files.remove_region(*guest, reservation);
        files.bytes.fetch_sub(guest.len, Ordering::Relaxed);
        files.removed.lock().push(*guest);
    }
}
