//! Memory that is added by ACPI, as DIMMs. They are adjacent in one range above boot memory, and
//! are never removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foreshore_types::size::Size;
use thiserror::Error;
use vm_memory::GuestAddress;

use super::backing::{Access, Backing, BackingError, DramBacking, Reservation};
use super::layout::{GuestRange, LINUX_LARGEST_BLOCK_BYTES, linux_block_bytes};
use super::slots::{SlotError, Slots};
use super::view::GuestView;
use super::zone::ZoneSpec;

/// Number of DIMM devices of the guest. The ACPI tables describe all of them from boot, as empty
/// devices.
pub const MAX_DIMMS: usize = 64;

#[derive(Debug, Error)]
pub enum DimmError {
    #[error(
        "an increase of {} is not a multiple of the block size {}",
        Size(*wanted_bytes),
        Size(*block_bytes)
    )]
    NotWhole {
        wanted_bytes: u64,
        /// Block size of the guest or page size of the host, whichever is larger.
        block_bytes: u64,
    },
    #[error(
        "all {MAX_DIMMS} DIMMs are plugged; shut the VM down to set a larger size for the next boot"
    )]
    NoneLeft,
    #[error(
        "an increase of {} exceeds the {} that hotplug_size leaves",
        Size(*wanted_bytes),
        Size(*left_bytes)
    )]
    TooLarge { wanted_bytes: u64, left_bytes: u64 },
    #[error("cannot map its memory")]
    Backing(#[from] BackingError),
    #[error(transparent)]
    Slot(#[from] SlotError),
}

impl DimmError {
    /// Returns true if the request was valid but the host could not fulfill it.
    pub fn is_the_hosts(&self) -> bool {
        matches!(self, Self::Backing(_) | Self::Slot(_))
    }
}

/// Assigns adjacent addresses to DIMMs in a range, without side effects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DimmPlan {
    range: GuestRange,
    /// Usable bytes in the range.
    max_bytes: u64,
    block_bytes: u64,
    dimms: Vec<GuestRange>,
}

impl DimmPlan {
    /// Creates a plan for a guest whose boot memory ends at `boot_end`, on a host with pages of at
    /// most `page_bytes`. `range` is rounded up, but only `max_bytes` of it may be used.
    pub fn new(range: GuestRange, max_bytes: u64, boot_end: u64, page_bytes: u64) -> Self {
        assert!(max_bytes <= range.len && range.start.is_multiple_of(LINUX_LARGEST_BLOCK_BYTES));
        let block_bytes = linux_block_bytes(boot_end).max(page_bytes);
        Self { range, max_bytes, block_bytes, dimms: Vec::new() }
    }

    pub fn used_bytes(&self) -> u64 {
        self.dimms.iter().map(|dimm| dimm.len).sum()
    }

    /// All DIMMs, in the order of their addition.
    pub fn dimms(&self) -> &[GuestRange] {
        &self.dimms
    }

    /// Range of the next DIMM, which has `len` bytes. `len` must not be 0.
    pub fn next_range(&self, len: u64) -> Result<GuestRange, DimmError> {
        let used = self.used_bytes();
        let left_bytes = self.max_bytes - used;
        if !len.is_multiple_of(self.block_bytes) {
            return Err(DimmError::NotWhole { wanted_bytes: len, block_bytes: self.block_bytes });
        }
        if len > left_bytes {
            return Err(DimmError::TooLarge { wanted_bytes: len, left_bytes });
        }
        if self.dimms.len() == MAX_DIMMS {
            return Err(DimmError::NoneLeft);
        }
        Ok(GuestRange { start: self.range.start + used, len })
    }

    /// Records a DIMM at the range that [`Self::next_range`] returned.
    fn put(&mut self, dimm: GuestRange) {
        self.dimms.push(dimm);
    }
}

/// DIMMs of a zone.
pub struct Dimms {
    spec: ZoneSpec,
    plan: DimmPlan,
    backing: DramBacking,
    reservation: Arc<Reservation>,
    slots: Arc<Slots>,
    view: GuestView,
    /// DIMM that could neither be added nor be removed again completely.
    unfinished: Option<Unfinished>,
    /// Bytes of all DIMMs, shared with other threads.
    came_bytes: Arc<AtomicU64>,
}

/// Memory of a DIMM that is not added completely.
struct Unfinished {
    offset: u64,
    len: u64,
    slot: Option<u32>,
}

impl Dimms {
    /// Creates an empty set of DIMMs. Their range must already be pluggable in `view`.
    pub(super) fn new(
        spec: ZoneSpec,
        plan: DimmPlan,
        backing: DramBacking,
        reservation: Arc<Reservation>,
        slots: Arc<Slots>,
        view: GuestView,
    ) -> Self {
        let (unfinished, came_bytes) = (None, Arc::default());
        Self { spec, plan, backing, reservation, slots, view, unfinished, came_bytes }
    }

    pub fn zone(&self) -> &ZoneSpec {
        &self.spec
    }

    pub fn plan(&self) -> &DimmPlan {
        &self.plan
    }

    /// Counter of the bytes in all DIMMs. The counter includes a new DIMM before the guest is
    /// notified of the DIMM.
    pub fn came_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.came_bytes)
    }

    /// Adds a DIMM of `len` bytes: maps it, adds a KVM slot for it and makes it accessible to
    /// devices. The guest is not notified yet. `accept` is called as the last step that can fail.
    /// If it fails, the memory is returned to the host. If that fails as well, the next call
    /// retries it, because the next DIMM uses the same addresses.
    pub fn add<E: From<DimmError>>(
        &mut self,
        len: u64,
        accept: impl FnOnce() -> Result<(), E>,
    ) -> Result<GuestRange, E> {
        let dimm = self.plan.next_range(len)?;
        let offset = self.plan.used_bytes();
        self.undo()?;
        self.backing.plug(offset, len).map_err(DimmError::from)?;
        let added = match self.slots.add(dimm, &self.reservation, offset, Access::ReadWrite) {
            Ok(slot) => accept().map_err(|err| (Some(slot), err)),
            Err(err) => Err((None, DimmError::from(err).into())),
        };
        if let Err((slot, err)) = added {
            self.unfinished = Some(Unfinished { offset, len, slot });
            if let Err(err) = self.undo() {
                let (start, err) = (dimm.start, foreshore_types::chain(&err));
                tracing::error!(
                    err,
                    start,
                    bytes = len,
                    "Cannot return memory of a refused DIMM to the host; the next DIMM \
                     retries this"
                );
            }
            return Err(err);
        }
        self.view.exclusive().set_plugged(GuestAddress(dimm.start), len, true);
        self.plan.put(dimm);
        self.came_bytes.store(self.plan.used_bytes(), Ordering::Relaxed);
        Ok(dimm)
    }

    /// Undoes the addition of a DIMM. The memory remains mapped until KVM has removed its slot,
    /// because a guest access to an unmapped slot would end the VM.
    fn undo(&mut self) -> Result<(), DimmError> {
        let Some(unfinished) = &mut self.unfinished else { return Ok(()) };
        if let Some(slot) = unfinished.slot {
            self.slots.remove(slot)?;
            unfinished.slot = None;
        }
        self.backing.detach(unfinished.offset, unfinished.len)?;
        self.unfinished = None;
        Ok(self.backing.free_detached()?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{GIB, LINUX_MEMORY_BLOCK_BYTES, MIB};
    use super::super::slots::SlotTable;
    use super::super::slots::fake::FakeSlots;
    use super::super::zone::Growth;
    use super::super::{MemoryOptions, build};
    use super::*;

    fn plan(max_bytes: u64) -> DimmPlan {
        let len = max_bytes.next_multiple_of(LINUX_MEMORY_BLOCK_BYTES);
        DimmPlan::new(GuestRange { start: 4 * GIB, len }, max_bytes, GIB, 0)
    }

    #[test]
    fn dimms_are_adjacent_until_the_range_ends() {
        let mut plan = plan(GIB + MIB);
        for (len, start) in [
            (128 * MIB, 4 * GIB),
            (512 * MIB, 4 * GIB + 128 * MIB),
            (384 * MIB, 4 * GIB + 640 * MIB),
        ] {
            let dimm = plan.next_range(len).unwrap();
            assert_eq!(dimm, GuestRange { start, len });
            plan.put(dimm);
        }
        assert_eq!((plan.used_bytes(), plan.dimms().len()), (GIB, 3));
        // Less than a block is left, although the range was rounded up to whole blocks.
        let error = plan.next_range(128 * MIB).unwrap_err();
        assert_eq!(
            error.to_string(),
            "an increase of 128 MiB exceeds the 1 MiB that hotplug_size leaves"
        );
        assert!(!error.is_the_hosts());
    }

    #[test]
    fn dimm_consists_of_whole_blocks_and_their_number_is_limited() {
        let mut plan = plan(64 * GIB);
        let error = plan.next_range(100 * MIB).unwrap_err().to_string();
        assert_eq!(error, "an increase of 100 MiB is not a multiple of the block size 128 MiB");
        let of_large_pages = DimmPlan::new(plan.range, GIB, GIB, GIB);
        let error = of_large_pages.next_range(128 * MIB).unwrap_err().to_string();
        assert!(error.contains("not a multiple of the block size 1 GiB"), "{error}");
        for _ in 0..MAX_DIMMS {
            let dimm = plan.next_range(128 * MIB).unwrap();
            plan.put(dimm);
        }
        assert!(
            plan.next_range(128 * MIB)
                .unwrap_err()
                .to_string()
                .starts_with("all 64 DIMMs are plugged")
        );
    }

    const DIMM_BYTES: u64 = 128 * MIB;

    /// Zone with 1 GiB of boot memory, which can grow by 1 GiB.
    fn dimms() -> (Dimms, Arc<FakeSlots>) {
        let spec = ZoneSpec {
            id: "dram".to_owned(),
            growth: Growth::Dimms,
            boot_bytes: GIB,
            hotplug_bytes: GIB,
            ..ZoneSpec::default()
        };
        let table = Arc::new(FakeSlots::default());
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let slots = Arc::clone(&table) as Arc<dyn SlotTable>;
        (build(vec![spec], None, slots, options).unwrap().take_dimms().unwrap(), table)
    }

    #[test]
    fn refused_dimm_leaves_neither_slot_nor_memory() {
        let (mut dimms, table) = dimms();
        let slots = table.slots.lock().len();
        let error = dimms.add(DIMM_BYTES, || Err(DimmError::NoneLeft)).unwrap_err();
        assert!(matches!(error, DimmError::NoneLeft));
        assert_eq!((table.slots.lock().len(), dimms.plan().used_bytes()), (slots, 0));
        assert!(dimms.reservation.populate(0, 2 * MIB).is_err());
    }

    #[test]
    fn range_of_refused_dimm_is_reused_only_after_its_slot_is_removed() {
        let (mut dimms, table) = dimms();
        let slots = table.slots.lock().len();
        *table.calls_left.lock() = Some(1);
        dimms.add(DIMM_BYTES, || Err(DimmError::NoneLeft)).unwrap_err();
        for _ in 0..2 {
            assert!(table.covers(4 * GIB));
            dimms.reservation.populate(0, 2 * MIB).expect("a slot with memory");
            let error = dimms.add(2 * DIMM_BYTES, || Ok::<(), DimmError>(())).unwrap_err();
            assert!(matches!(error, DimmError::Slot(SlotError::Kvm { len: 0, .. })), "{error}");
        }
        *table.calls_left.lock() = None;
        let dimm = dimms.add(2 * DIMM_BYTES, || Ok::<(), DimmError>(())).unwrap();
        assert_eq!(dimm, GuestRange { start: 4 * GIB, len: 2 * DIMM_BYTES });
        assert_eq!(table.slots.lock().len(), slots + 1);
        assert!(table.covers(4 * GIB + 2 * DIMM_BYTES - 1));
    }
}
