//! Files that are mapped into guest memory outside of zones: volumes and the files of `--pmem`.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vm_memory::GuestAddress;

use super::backing::{Access, HeldMappings, MappingBudget, Reservation};
use super::build::{MemoryError, region, reserve};
use super::holes::{ChunkAccess, HoleFiller, HoleSource};
use super::layout::GuestRange;
use super::slots::Slots;
use super::view::GuestView;
use crate::bus::BusRange;
use crate::log::rate_limited;
use crate::pool::CHUNK_BYTES;

/// Parts of a file that are mapped into one range of guest memory.
pub struct FileMapping<'a> {
    pub file: BorrowedFd<'a>,
    pub len_bytes: u64,
    /// Offsets in the range, and parts of the file, in order. The gaps are holes, which read as
    /// zeros and consist of whole chunks.
    pub parts: Vec<(u64, Range<u64>)>,
    pub access: Access,
    /// Fills holes into which the guest stores. Required if there are holes, unless the guest may
    /// only read.
    pub holes: Option<HoleSource>,
}

impl<'a> FileMapping<'a> {
    /// Maps the first `len_bytes` of a file.
    pub fn of_file(file: BorrowedFd<'a>, len_bytes: u64, access: Access) -> Self {
        Self { file, len_bytes, parts: vec![(0, 0..len_bytes)], access, holes: None }
    }

    /// Returns the holes of the range.
    pub(super) fn holes(&self) -> Vec<Range<u64>> {
        let starts = std::iter::once(0).chain(self.parts.iter().map(|part| part_range(part).end));
        let ends = self.parts.iter().map(|(at, _)| *at).chain([self.len_bytes]);
        starts.zip(ends).map(|(start, end)| start..end).filter(|hole| !hole.is_empty()).collect()
    }

    /// Returns true for each chunk that is not a hole.
    fn mapped_chunks(&self) -> Vec<bool> {
        let mut is_mapped = vec![true; (self.len_bytes / CHUNK_BYTES) as usize];
        for hole in self.holes() {
            let chunks = (hole.start / CHUNK_BYTES) as usize..(hole.end / CHUNK_BYTES) as usize;
            is_mapped[chunks].fill(false);
        }
        is_mapped
    }
}

fn part_range((at, part): &(u64, Range<u64>)) -> Range<u64> {
    *at..at + (part.end - part.start)
}

/// State that is shared by all [`MappedRange`]s of a VM.
pub(super) struct FileRanges {
    view: GuestView,
    slots: Arc<Slots>,
    budget: Arc<MappingBudget>,
    /// Mapped bytes in all ranges.
    bytes: Arc<AtomicU64>,
    /// Ranges that were removed since the last call of [`Self::take_removed`].
    removed: Mutex<Vec<GuestRange>>,
}

impl FileRanges {
    pub(super) fn new(view: GuestView, slots: Arc<Slots>, budget: Arc<MappingBudget>) -> Arc<Self> {
        Arc::new(Self { view, slots, budget, bytes: Arc::default(), removed: Mutex::default() })
    }

    pub(super) fn bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.bytes)
    }

    /// Returns the removed ranges. Their addresses are free again.
    pub(super) fn take_removed(&self) -> Vec<GuestRange> {
        std::mem::take(&mut self.removed.lock())
    }

    /// Maps parts of a file, and makes them accessible to the guest at `guest`, and to devices
    /// unless the guest fills holes.
    ///
    /// A copy by a device into a hole would wait under the view's lock, or in the host's kernel
    /// (vhost). While the pool is full, an unplug that would return memory to it would wait for the
    /// lock, and all other devices for the unplug. Nor could the VM be paused. No driver needs such
    /// copies, because only volumes with a BTT are mapped with holes, and Linux copies their
    /// sectors itself.
    pub(super) fn add(
        self: &Arc<Self>,
        guest: GuestRange,
        mapping: FileMapping<'_>,
    ) -> Result<MappedRange, MemoryError> {
        let reservation = reserve(guest, None)?;
        let access = mapping.access;
        let held = self.hold(&mapping)?;
        for (at, part) in &mapping.parts {
            let len = part.end - part.start;
            reservation
                .map_file(*at, len, mapping.file, part.start, access)
                .map_err(|source| MemoryError::Map { len, source })?;
        }
        // The holes are mapped before the guest can store into them.
        let holes = self.map_holes(&reservation, mapping)?;
        if holes.is_none() {
            let mut memory = self.view.exclusive();
            memory.add_region(region(guest, &reservation)?, Arc::clone(&reservation))?;
            if access == Access::Read {
                memory.forbid_writes(guest.start, guest.len);
            }
        }
        match self.slots.add(guest, &reservation, 0, access) {
            Ok(slot) => {
                self.bytes.fetch_add(guest.len, Ordering::Relaxed);
                let files = Arc::clone(self);
                let emulated_stores = None;
                Ok(MappedRange { guest, reservation, slot, emulated_stores, files, holes, held })
            }
            Err(err) => {
                if holes.is_none() {
                    self.remove_region(guest, &reservation);
                }
                Err(err.into())
            }
        }
    }

    /// Maps the holes, and starts to fill them if the guest may store there.
    fn map_holes(
        &self,
        reservation: &Arc<Reservation>,
        mapping: FileMapping<'_>,
    ) -> Result<Option<HoleFiller>, MemoryError> {
        let (holes, is_mapped) = (mapping.holes(), mapping.mapped_chunks());
        if holes.is_empty() && mapping.holes.is_none() {
            return Ok(None);
        }
        let map_all = |map: &dyn Fn(u64, u64) -> io::Result<()>| {
            holes.iter().try_for_each(|hole| {
                let len = hole.end - hole.start;
                map(hole.start, len).map_err(|source| MemoryError::Map { len, source })
            })
        };
        let Some(source) = mapping.holes else {
            assert_eq!(mapping.access, Access::Read, "stores into holes would be lost");
            return map_all(&|at, len| reservation.map_anonymous(at, len)).map(|()| None);
        };
        let userfaults = source.device.create().map_err(MemoryError::Userfaults)?;
        map_all(&|at, len| userfaults.map_zeros(reservation, at, len))?;
        let reservation = Arc::clone(reservation);
        let filler = HoleFiller::start(source, userfaults, reservation, is_mapped, mapping.access);
        Ok(Some(filler.map_err(MemoryError::Userfaults)?))
    }

    /// Reserves the mappings that a file with holes can need. A few mappings of files without holes
    /// are part of the rest that the budget leaves.
    fn hold(&self, mapping: &FileMapping<'_>) -> Result<Option<HeldMappings>, MemoryError> {
        let count = match (&mapping.holes, mapping.holes().len()) {
            // Each chunk can need a mapping of its own.
            (Some(_), _) => mapping.mapped_chunks().len(),
            (None, 0) => return Ok(None),
            (None, holes) => mapping.parts.len() + holes,
        };
        self.budget.hold(count).map(Some)
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
    /// Receives stores that fail, as long as the guest can access the range.
    emulated_stores: Option<BusRange>,
    files: Arc<FileRanges>,
    /// Dropped last, because stores of the guest and devices wait for it until the range is
    /// removed.
    holes: Option<HoleFiller>,
    held: Option<HeldMappings>,
}

impl MappedRange {
    /// Returns a handle that takes access to chunks from the guest, if the guest fills holes.
    pub fn chunk_access(&self) -> Option<ChunkAccess> {
        self.holes.as_ref().map(HoleFiller::chunk_access)
    }

    /// Holds the device that receives stores of emulated instructions.
    pub(crate) fn hold_emulated_stores(&mut self, device: BusRange) {
        self.emulated_stores = Some(device);
    }
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        let Self { guest, reservation, slot, emulated_stores, files, holes, held } = self;
        // 1. Remove the file from the guest, 2. remove it from devices, 3. free its addresses for
        //    the next file.
        if let Err(err) = files.slots.remove(*slot) {
            let (start, len) = (guest.start, guest.len);
            rate_limited!(error, start, len, %err, "Cannot remove a file from guest memory; it stays mapped");
            // The guest can still store into holes.
            std::mem::forget((emulated_stores.take(), holes.take(), held.take()));
            return;
        }
        // Stores to a removed range do not concern the volume.
        *emulated_stores = None;
        if holes.is_none() {
            files.remove_region(*guest, reservation);
        }
        files.bytes.fetch_sub(guest.len, Ordering::Relaxed);
        files.removed.lock().push(*guest);
    }
}
