//! KVM memory slots.
//!
//! Each range of boot memory and each volume has one permanent slot. A hotplug part is divided into
//! slots of 128 MiB. Plugging the first block of a slot adds the slot, and unplugging the last
//! block removes it. The guest cannot access memory without a slot. Unplugged memory therefore
//! needs no page tables and no dirty log.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foreshore_types::PAGE_BYTES;
use foreshore_types::size::Size;
use kvm_bindings::{
    KVM_CAP_DISABLE_QUIRKS2, KVM_MEM_READONLY, KVM_X86_QUIRK_SLOT_ZAP_ALL, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use thiserror::Error;
use tracing::error;

use super::backing::{Access, Reservation};
use super::layout::{GuestRange, MIB};

/// Size of the slots in a hotplug part.
pub const HOTPLUG_SLOT_BYTES: u64 = 128 * MIB;

/// Delay between the last unplug and the removal of empty slots. Removing a slot may destroy the
/// page tables of every vCPU.
pub const QUIET_TIME: Duration = Duration::from_secs(1);

/// Maximum size of a slot. KVM stores its number of pages in 31 bits (KVM_MEM_MAX_NR_PAGES in Linux
/// virt/kvm/kvm_main.c).
const MAX_SLOT_BYTES: u64 = ((1 << 31) - 1) * PAGE_BYTES;

#[derive(Debug, Error)]
pub enum SlotError {
    #[error(
        "all {limit} memory slots of KVM are in use; use fewer or larger zones, disks or volumes"
    )]
    NoneLeft { limit: u32 },
    #[error(
        "{} at {start:#x} exceeds KVM's maximum of {} for one slot; divide it, for example into several zones, disks or volumes",
        Size(*len), Size(MAX_SLOT_BYTES)
    )]
    TooLarge { start: u64, len: u64 },
    #[error(
        "{} of guest memory can make KVM allocate {} for itself, but the host has only {} of memory",
        Size(*guest_bytes), Size(kvms_own_bytes(*guest_bytes)), Size(*host_bytes)
    )]
    MoreThanHost { guest_bytes: u64, host_bytes: u64 },
    #[error("KVM refused slot {slot} for {len:#x} bytes at {start:#x}")]
    Kvm {
        slot: u32,
        start: u64,
        /// Length in bytes. 0 for a slot to be removed.
        len: u64,
        #[source]
        source: io::Error,
    },
}

/// Upper limit of the memory that KVM allocates for slots with `guest_bytes` in total: a pointer
/// for each page (Linux arch/x86/kvm/x86.c, memslot_rmap_alloc). The TDP MMU uses less, unless the
/// guest runs guests of its own.
fn kvms_own_bytes(guest_bytes: u64) -> u64 {
    guest_bytes / PAGE_BYTES * size_of::<u64>() as u64
}

/// Checks that KVM can allocate slots for `ranges` on a host with `host_bytes` of memory.
///
/// Call this before adding the first slot. KVM allocates memory for each slot that it accepts, and
/// Linux kills processes if it runs out of memory.
pub fn check_ranges(
    ranges: impl Iterator<Item = GuestRange>,
    host_bytes: u64,
) -> Result<(), SlotError> {
    let mut guest_bytes = 0u64;
    for range in ranges {
        check_range(range)?;
        guest_bytes = guest_bytes.saturating_add(range.len);
    }
    match kvms_own_bytes(guest_bytes) > host_bytes {
        true => Err(SlotError::MoreThanHost { guest_bytes, host_bytes }),
        false => Ok(()),
    }
}

fn check_range(range: GuestRange) -> Result<(), SlotError> {
    match range.len > MAX_SLOT_BYTES {
        true => Err(SlotError::TooLarge { start: range.start, len: range.len }),
        false => Ok(()),
    }
}

pub fn host_bytes() -> u64 {
    // SAFETY: the call takes no pointers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(PAGE_BYTES)
}

/// Slots of KVM, or a fake for tests.
pub trait SlotTable: Send + Sync {
    /// KVM_SET_USER_MEMORY_REGION: adds the slot, or removes it if its size is 0.
    ///
    /// # Safety
    /// The host-virtual range must remain reserved for the guest until the slot is removed, because
    /// the guest can access all memory mapped there.
    unsafe fn set_user_memory_region(&self, region: kvm_userspace_memory_region) -> io::Result<()>;
}

impl SlotTable for VmFd {
    unsafe fn set_user_memory_region(&self, region: kvm_userspace_memory_region) -> io::Result<()> {
        // SAFETY: the caller upholds the contract.
        unsafe { VmFd::set_user_memory_region(self, region) }.map_err(Into::into)
    }
}

/// Makes KVM keep the page tables of other slots when one slot is removed. Returns false if KVM
/// does not support this (before Linux 6.12).
pub fn disable_zap_all(vm: &VmFd) -> io::Result<bool> {
    let quirks = vm.check_extension_raw(KVM_CAP_DISABLE_QUIRKS2.into());
    if quirks < 0 || quirks as u32 & KVM_X86_QUIRK_SLOT_ZAP_ALL == 0 {
        return Ok(false);
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_DISABLE_QUIRKS2, ..Default::default() };
    cap.args[0] = KVM_X86_QUIRK_SLOT_ZAP_ALL.into();
    vm.enable_cap(&cap)?;
    Ok(true)
}

#[derive(Clone, Debug)]
struct Entry {
    guest: GuestRange,
    /// Keeps the host-virtual range reserved while the guest can access it.
    _reservation: Arc<Reservation>,
}

/// All slots of one VM, by number.
pub struct Slots {
    table: Arc<dyn SlotTable>,
    entries: Mutex<Vec<Option<Entry>>>,
    limit: u32,
}

impl Slots {
    /// Creates an empty set of slots. `limit` is KVM_CAP_NR_MEMSLOTS.
    pub fn new(table: Arc<dyn SlotTable>, limit: u32) -> Self {
        Self { table, entries: Mutex::default(), limit }
    }

    /// Adds a slot that makes present and later mappings at `offset` in `reservation` accessible to
    /// the guest at `guest`. Returns the slot's number.
    pub fn add(
        &self,
        guest: GuestRange,
        reservation: &Arc<Reservation>,
        offset: u64,
        access: Access,
    ) -> Result<u32, SlotError> {
        let inside =
            offset.checked_add(guest.len).is_some_and(|end| end <= reservation.len_bytes());
        assert!(
            inside,
            "a slot of {:#x} bytes at {offset:#x} outside of its reservation",
            guest.len
        );
        check_range(guest)?;
        let mut entries = self.entries.lock();
        let slot = entries.iter().position(Option::is_none).unwrap_or(entries.len());
        if slot >= self.limit as usize {
            return Err(SlotError::NoneLeft { limit: self.limit });
        }
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: if access == Access::Read { KVM_MEM_READONLY } else { 0 },
            guest_phys_addr: guest.start,
            memory_size: guest.len,
            userspace_addr: reservation.addr() + offset,
        };
        // SAFETY: the range is inside the reservation (checked above), which the entry keeps alive
        // until the slot is removed.
        unsafe { self.table.set_user_memory_region(region) }.map_err(|source| SlotError::Kvm {
            slot: slot as u32,
            start: guest.start,
            len: guest.len,
            source,
        })?;
        let entry = Entry { guest, _reservation: Arc::clone(reservation) };
        if slot == entries.len() {
            entries.push(Some(entry));
        } else {
            entries[slot] = Some(entry);
        }
        Ok(slot as u32)
    }

    /// Removes a slot.
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn remove(&self, slot: u32) -> Result<(), SlotError> {
        let mut entries = self.entries.lock();
        let entry = entries[slot as usize].as_ref().expect("a slot in use");
        let start = entry.guest.start;
        let region = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: start,
            memory_size: 0,
            ..Default::default()
        };
        // SAFETY: removing a slot gives the guest no access.
        unsafe { self.table.set_user_memory_region(region) }.map_err(|source| SlotError::Kvm {
            slot,
            start,
            len: 0,
            source,
        })?;
        entries[slot as usize] = None;
        Ok(())
    }

    /// Number of slots in use.
    pub fn used(&self) -> usize {
        self.entries.lock().iter().flatten().count()
    }
}

impl Drop for Slots {
    /// Removes all slots before the reservations are dropped, because the file descriptor of a vCPU
    /// may keep the VM in KVM alive.
    fn drop(&mut self) {
        let count = self.entries.get_mut().len() as u32;
        for slot in 0..count {
            if self.entries.get_mut()[slot as usize].is_none() {
                continue;
            }
            if let Err(err) = self.remove(slot) {
                // Leaks the reservation, because memory must not be unmapped while KVM still has a
                // slot for it.
                error!(slot, %err, "Cannot remove a memory slot of KVM; its memory stays mapped");
                std::mem::forget(self.entries.get_mut()[slot as usize].take());
            }
        }
    }
}

/// Piece of a hotplug part that has its own slot.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    slot: Option<u32>,
    plugged_bytes: u64,
}

/// Slots of one hotplug part. Offsets are relative to the start of the part.
pub struct HotplugSlots {
    slots: Arc<Slots>,
    range: GuestRange,
    reservation: Arc<Reservation>,
    slot_bytes: u64,
    parts: Vec<Part>,
    /// Time when a slot last became empty. `None` if there are no empty slots.
    emptied: Option<Instant>,
}

impl HotplugSlots {
    /// Divides `range` into slots of `slot_bytes`. No memory is plugged yet.
    pub fn new(
        slots: Arc<Slots>,
        range: GuestRange,
        reservation: Arc<Reservation>,
        slot_bytes: u64,
    ) -> Self {
        assert!(slot_bytes > 0 && range.len <= reservation.len_bytes());
        let parts = vec![Part::default(); range.len.div_ceil(slot_bytes) as usize];
        Self { slots, range, reservation, slot_bytes, parts, emptied: None }
    }

    /// Adds the missing slots for `offset..offset + len` before this range is plugged. On an error,
    /// no slot is added.
    pub fn acquire(&mut self, offset: u64, len: u64) -> Result<(), SlotError> {
        let pieces = self.pieces(offset, len);
        let mut added = Vec::new();
        for &(index, _) in &pieces {
            if self.parts[index].slot.is_some() {
                continue;
            }
            match self.add_part(index) {
                Ok(()) => added.push(index),
                Err(err) => {
                    for index in added {
                        self.remove_part(index);
                    }
                    return Err(err);
                }
            }
        }
        for (index, bytes) in pieces {
            self.parts[index].plugged_bytes += bytes;
            assert!(
                self.parts[index].plugged_bytes <= self.slot_bytes,
                "blocks were plugged twice"
            );
        }
        Ok(())
    }

    /// Adds the next slot before a request needs it, if the existing slots have no room for another
    /// `wanted_bytes`. Returns true if it added a slot.
    ///
    /// Adding a slot waits until no vCPU uses the old set of slots. The wait takes longer than the
    /// rest of a plug, so the slot is added early, before the driver needs it. A slot alone gives
    /// the guest no access, because unplugged memory is PROT_NONE. A sweep removes the slot if no
    /// blocks have been plugged into it by then.
    pub fn prepare(&mut self, wanted_bytes: u64, now: Instant) -> Result<bool, SlotError> {
        let room = |part: &Part| {
            part.slot.map_or(0, |_| self.slot_bytes.saturating_sub(part.plugged_bytes))
        };
        if self.parts.iter().map(room).sum::<u64>() >= wanted_bytes {
            return Ok(false);
        }
        let Some(index) = self.parts.iter().position(|part| part.slot.is_none()) else {
            return Ok(false);
        };
        self.add_part(index)?;
        self.emptied = Some(now);
        Ok(true)
    }

    /// Records that `offset..offset + len` is unplugged. [`HotplugSlots::sweep`] removes empty
    /// slots after the quiet time.
    pub fn release(&mut self, offset: u64, len: u64, now: Instant) {
        for (index, bytes) in self.pieces(offset, len) {
            let part = &mut self.parts[index];
            part.plugged_bytes =
                part.plugged_bytes.checked_sub(bytes).expect("only plugged blocks are released");
            if part.plugged_bytes == 0 {
                self.emptied = Some(now);
            }
        }
    }

    /// Time when [`HotplugSlots::sweep`] should be called next.
    pub fn sweep_due(&self) -> Option<Instant> {
        self.emptied.map(|at| at + QUIET_TIME)
    }

    /// Removes empty slots if the quiet time has passed. Returns the number of removed slots.
    pub fn sweep(&mut self, now: Instant) -> usize {
        if self.sweep_due().is_none_or(|due| now < due) { 0 } else { self.remove_empty() }
    }

    /// Removes empty slots now. Returns the number of removed slots.
    fn remove_empty(&mut self) -> usize {
        self.emptied = None;
        let empty: Vec<_> = (0..self.parts.len())
            .filter(|&index| {
                self.parts[index].plugged_bytes == 0 && self.parts[index].slot.is_some()
            })
            .collect();
        empty.into_iter().filter(|&index| self.remove_part(index)).count()
    }

    /// Number of slots of this part in KVM.
    pub fn used(&self) -> usize {
        self.parts.iter().filter(|part| part.slot.is_some()).count()
    }

    fn add_part(&mut self, index: usize) -> Result<(), SlotError> {
        let start = index as u64 * self.slot_bytes;
        let len = self.slot_bytes.min(self.range.len - start);
        let guest = GuestRange { start: self.range.start + start, len };
        self.parts[index].slot =
            Some(self.slots.add(guest, &self.reservation, start, Access::ReadWrite)?);
        Ok(())
    }

    fn remove_part(&mut self, index: usize) -> bool {
        let Some(slot) = self.parts[index].slot else { return false };
        match self.slots.remove(slot) {
            Ok(()) => {
                self.parts[index].slot = None;
                true
            }
            Err(err) => {
                // The remaining slot gives the guest no access, because all of its memory is
                // PROT_NONE.
                error!(slot, %err, "Cannot remove an empty memory slot of KVM; it stays in use");
                false
            }
        }
    }

    /// Divides a range at slot boundaries. Returns the index of each slot and the bytes of the
    /// range in it.
    fn pieces(&self, offset: u64, len: u64) -> Vec<(usize, u64)> {
        assert!(len > 0 && offset + len <= self.range.len);
        let (first, last) = (offset / self.slot_bytes, (offset + len - 1) / self.slot_bytes);
        (first..=last)
            .map(|index| {
                let start = (index * self.slot_bytes).max(offset);
                let end = ((index + 1) * self.slot_bytes).min(offset + len);
                (index as usize, end - start)
            })
            .collect()
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod fake {
    //! Fake slots that follow KVM's rules (Documentation/virt/kvm/api.rst, 4.35).

    use std::collections::BTreeMap;

    use super::*;

    #[derive(Default)]
    pub struct FakeSlots {
        pub slots: Mutex<BTreeMap<u32, kvm_userspace_memory_region>>,
        /// Number of calls that succeed before all calls fail with ENOMEM.
        pub calls_left: Mutex<Option<usize>>,
    }

    impl FakeSlots {
        pub fn covers(&self, addr: u64) -> bool {
            let covers = |slot: &kvm_userspace_memory_region| {
                (slot.guest_phys_addr..slot.guest_phys_addr + slot.memory_size).contains(&addr)
            };
            self.slots.lock().values().any(covers)
        }
    }

    impl SlotTable for FakeSlots {
        unsafe fn set_user_memory_region(
            &self,
            region: kvm_userspace_memory_region,
        ) -> io::Result<()> {
            let fail = |errno| Err(io::Error::from_raw_os_error(errno));
            if let Some(left) = self.calls_left.lock().as_mut() {
                if *left == 0 {
                    return fail(libc::ENOMEM);
                }
                *left -= 1;
            }
            let aligned = |value: u64| value.is_multiple_of(4096);
            if !aligned(region.guest_phys_addr)
                || !aligned(region.memory_size)
                || !aligned(region.userspace_addr)
            {
                return fail(libc::EINVAL);
            }
            let mut slots = self.slots.lock();
            if region.memory_size == 0 {
                return slots
                    .remove(&region.slot)
                    .map(drop)
                    .ok_or(io::Error::from_raw_os_error(libc::EINVAL));
            }
            if slots.contains_key(&region.slot) {
                // KVM can move an existing slot or change its flags, but cannot resize it. The VMM
                // neither moves nor changes slots.
                return fail(libc::EINVAL);
            }
            let end = region.guest_phys_addr + region.memory_size;
            let overlaps = |other: &kvm_userspace_memory_region| {
                other.guest_phys_addr < end
                    && region.guest_phys_addr < other.guest_phys_addr + other.memory_size
            };
            if slots.values().any(overlaps) {
                return fail(libc::EEXIST);
            }
            slots.insert(region.slot, region);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::FakeSlots;
    use super::*;

    const SLOT: u64 = 4 * MIB;
    const START: u64 = 1 << 32;

    fn hotplug(limit: u32) -> (HotplugSlots, Arc<FakeSlots>) {
        let table = Arc::new(FakeSlots::default());
        let slots = Arc::new(Slots::new(Arc::clone(&table) as Arc<dyn SlotTable>, limit));
        let len = 5 * SLOT / 2;
        let reservation = Arc::new(Reservation::new(len, 2 * MIB).unwrap());
        (HotplugSlots::new(slots, GuestRange { start: START, len }, reservation, SLOT), table)
    }

    #[test]
    fn range_larger_than_a_slot_is_refused_with_the_limit() {
        let slots = Slots::new(Arc::new(FakeSlots::default()), 4);
        let reservation = Arc::new(Reservation::new(9 << 40, 1 << 21).unwrap());
        let guest = GuestRange { start: 4 << 30, len: 9 << 40 };
        let error = slots.add(guest, &reservation, 0, Access::ReadWrite).unwrap_err().to_string();
        assert!(error.starts_with("9 TiB at 0x100000000 exceeds KVM's maximum of "), "{error}");
        assert!(
            slots
                .add(
                    GuestRange { len: MAX_SLOT_BYTES, ..guest },
                    &reservation,
                    0,
                    Access::ReadWrite
                )
                .is_ok()
        );
    }

    /// Without the check, KVM allocated 24 GiB for these two ranges, and Linux killed processes.
    #[test]
    fn boot_memory_is_refused_if_kvms_own_data_would_exceed_the_host() {
        const TIB: u64 = 1 << 40;
        let check = |lens: &[u64], host_gib: u64| {
            let ranges = lens.iter().scan(4 << 30, |end, &len| {
                let start = *end;
                *end += len;
                Some(GuestRange { start, len })
            });
            check_ranges(ranges, host_gib << 30).map_err(|error| error.to_string())
        };
        check(&[6 * TIB, 6 * TIB], 24).unwrap();
        let error = check(&[6 * TIB, 6 * TIB], 23).unwrap_err();
        assert_eq!(
            error,
            "12 TiB of guest memory can make KVM allocate 24 GiB for itself, but the host has only 23 GiB of memory"
        );
        // All ranges are checked before the first slot is added.
        assert!(
            check(&[TIB, 9 * TIB], 1024).unwrap_err().starts_with("9 TiB at 0x10100000000 exceeds")
        );
        check(&[], 0).unwrap();
    }

    #[test]
    fn slot_is_prepared_if_room_is_short_and_removed_if_it_stays_empty() {
        let (mut slots, table) = hotplug(8);
        let now = Instant::now();
        slots.acquire(0, SLOT).unwrap();
        assert!(!slots.prepare(0, now).unwrap());
        assert!(slots.prepare(SLOT, now).unwrap());
        assert!(table.covers(START + SLOT) && !table.covers(START + 2 * SLOT));
        assert!(!slots.prepare(SLOT, now).unwrap(), "a slot already exists for the requested size");
        // A slot with plugged blocks is kept. A slot that remains empty is removed.
        slots.acquire(SLOT, 2 * MIB).unwrap();
        assert!(slots.prepare(SLOT, now).unwrap());
        assert_eq!(slots.sweep(now + QUIET_TIME), 1);
        assert!(table.covers(START + SLOT) && !table.covers(START + 2 * SLOT));
    }

    #[test]
    fn slots_are_added_with_their_first_block_and_removed_after_the_quiet_time() {
        let (mut slots, table) = hotplug(8);
        slots.acquire(2 * MIB, 4 * MIB).unwrap();
        assert_eq!(slots.used(), 2);
        assert!(
            table.covers(START)
                && table.covers(START + 2 * SLOT - 1)
                && !table.covers(START + 2 * SLOT)
        );
        let now = Instant::now();
        slots.release(2 * MIB, 2 * MIB, now);
        assert_eq!(slots.sweep(now), 0);
        assert_eq!(slots.sweep_due(), Some(now + QUIET_TIME));
        assert_eq!(slots.sweep(now + QUIET_TIME), 1);
        assert!(!table.covers(START) && table.covers(START + SLOT));
        assert_eq!(slots.sweep_due(), None);
        slots.release(4 * MIB, 2 * MIB, now);
        assert_eq!(slots.remove_empty(), 1);
        assert!(table.slots.lock().is_empty());
    }

    #[test]
    fn slot_that_is_refilled_within_the_quiet_time_stays() {
        let (mut slots, table) = hotplug(8);
        let now = Instant::now();
        slots.acquire(0, 2 * MIB).unwrap();
        slots.release(0, 2 * MIB, now);
        slots.acquire(2 * MIB, 2 * MIB).unwrap();
        assert_eq!(slots.sweep(now + QUIET_TIME), 0);
        assert!(table.covers(START));
    }

    #[test]
    fn last_slot_ends_at_the_end_of_the_part() {
        let (mut slots, table) = hotplug(8);
        slots.acquire(0, 5 * SLOT / 2).unwrap();
        assert_eq!(slots.used(), 3);
        assert!(table.covers(START + 5 * SLOT / 2 - 1) && !table.covers(START + 5 * SLOT / 2));
    }

    #[test]
    fn plug_without_all_its_slots_adds_none() {
        let (mut slots, table) = hotplug(2);
        assert!(matches!(slots.acquire(0, 5 * SLOT / 2), Err(SlotError::NoneLeft { limit: 2 })));
        assert_eq!(slots.used(), 0);
        *table.calls_left.lock() = Some(0);
        assert!(matches!(slots.acquire(0, 2 * MIB), Err(SlotError::Kvm { slot: 0, .. })));
        *table.calls_left.lock() = None;
        slots.acquire(0, 2 * MIB).unwrap();
        assert_eq!(slots.used(), 1);
    }

    #[test]
    fn slots_are_removed_before_their_memory_is_unmapped() {
        let (mut slots, table) = hotplug(8);
        slots.acquire(0, SLOT).unwrap();
        drop(slots);
        assert!(table.slots.lock().is_empty());
    }
}
