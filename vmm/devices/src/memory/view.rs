//! View through which all threads of the VMM access guest memory.
//!
//! A descriptor may refer to a block that is unplugged or is just being unplugged by another
//! thread. Unplugged blocks are PROT_NONE on the host, so an unchecked access would kill the VMM
//! with SIGSEGV. The view therefore checks every range against the plugged blocks, and gives access
//! to memory under a read guard. An unplug takes the write guard, and thus waits for all accesses
//! in flight.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use parking_lot::{ArcRwLockReadGuard, RawRwLock, RwLock, RwLockWriteGuard};
use thiserror::Error;
use vm_memory::guest_memory::{
    Error as AccessError, GuestMemoryBackendSliceIterator, GuestMemorySliceIterator,
};
use vm_memory::{
    Address, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend, GuestMemoryMmap,
    GuestRegionCollectionError, GuestRegionMmap, Permissions,
};

use super::backing::Reservation;
use super::lost_memory::{LossFlag, MemoryLost};

#[derive(Debug, Error, PartialEq, Eq)]
pub enum ViewError {
    /// The range is empty, not block-aligned, or ends beyond the address space.
    #[error(
        "pluggable range {start:#x}+{len:#x} is not a multiple of the block size {block_size:#x}"
    )]
    BadRange {
        start: u64,
        /// Length in bytes.
        len: u64,
        block_size: u64,
    },
    #[error("pluggable range {start:#x}+{len:#x} overlaps another one")]
    Overlap {
        start: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// Pluggable range, with one bit for each block that is set while the block is plugged.
#[derive(Debug)]
struct PluggableRange {
    start: u64,
    len: u64,
    block_size: u64,
    plugged: Vec<u64>,
}

impl PluggableRange {
    fn end(&self) -> u64 {
        self.start + self.len
    }

    fn is_plugged(&self, block: u64) -> bool {
        self.plugged[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    fn set(&mut self, block: u64, plugged: bool) {
        let mask = 1 << (block % 64);
        let word = &mut self.plugged[(block / 64) as usize];
        *word = if plugged { *word | mask } else { *word & !mask };
    }

    /// Returns true if every byte in the intersection of `start..end` and this range is plugged.
    fn allows(&self, start: u64, end: u64) -> bool {
        let (from, to) = (start.max(self.start), end.min(self.end()));
        if from >= to {
            return true;
        }
        let first = (from - self.start) / self.block_size;
        let last = (to - 1 - self.start) / self.block_size;
        (first..=last).all(|block| self.is_plugged(block))
    }
}

/// Regions of guest memory, with the reservations that keep them mapped.
#[derive(Clone, Debug)]
pub struct Regions {
    /// Address map of plugged and unplugged memory, for users that access memory through the host's
    /// page tables, in which unplugged memory is inaccessible.
    pub memory: GuestMemoryMmap,
    pub reservations: Vec<Arc<Reservation>>,
}

/// User of guest memory that bypasses the view and uses host-virtual addresses, for example the
/// host's kernel.
pub trait RegionWatcher: Send + Sync {
    /// Notifies the watcher that the regions have changed. When this returns, the watcher accesses
    /// only the new regions.
    fn regions_changed(&self, regions: &Regions);
}

/// State of guest memory, accessible through a guard of [`GuestView`].
///
/// It implements [`GuestMemory`], so that queues, descriptor readers and `Bytes` can use it. An
/// access to unplugged memory fails in the same way as an access to an address without memory.
#[derive(Debug)]
pub struct MappedMemory {
    regions: GuestMemoryMmap,
    pluggable: Vec<PluggableRange>,
    /// Start and end addresses of ranges that are mapped read-only on the host. A store to them
    /// would also raise SIGSEGV.
    read_only: Vec<(u64, u64)>,
    reservations: Vec<Arc<Reservation>>,
    loss: LossFlag,
    watchers: Vec<Weak<dyn RegionWatcher>>,
}

impl MappedMemory {
    pub fn regions(&self) -> Regions {
        Regions { memory: self.regions.clone(), reservations: self.reservations.clone() }
    }

    /// Adds a watcher. It is notified of changed regions until it is dropped.
    pub fn watch_regions(&mut self, watcher: Weak<dyn RegionWatcher>) {
        self.watchers.retain(|known| known.strong_count() > 0);
        self.watchers.push(watcher);
    }

    fn notify_watchers(&self) {
        let watchers: Vec<_> = self.watchers.iter().filter_map(Weak::upgrade).collect();
        if !watchers.is_empty() {
            let regions = self.regions();
            watchers.iter().for_each(|watcher| watcher.regions_changed(&regions));
        }
    }

    fn allows(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        let start = addr.raw_value();
        let Some(end) = start.checked_add(count as u64) else { return false };
        let writes = matches!(access, Permissions::Write | Permissions::ReadWrite);
        let forbidden = writes && self.read_only.iter().any(|&(from, to)| from < end && start < to);
        !forbidden && self.pluggable.iter().all(|range| range.allows(start, end))
    }

    /// Adds a region that points into `reservation`. All of the region is accessible until it is
    /// declared pluggable.
    pub fn add_region(
        &mut self,
        region: Arc<GuestRegionMmap>,
        reservation: Arc<Reservation>,
    ) -> Result<(), GuestRegionCollectionError> {
        self.regions = self.regions.insert_region(region)?;
        self.retain_reservation(reservation);
        self.notify_watchers();
        Ok(())
    }

    /// Removes a complete region that [`Self::add_region`] added.
    ///
    /// # Panics
    /// If no region with this range was added.
    pub fn remove_region(&mut self, start: GuestAddress, len: u64, reservation: &Arc<Reservation>) {
        let removed = self.regions.remove_region(start, len);
        (self.regions, _) = removed.expect("an added region");
        self.reservations.retain(|retained| !Arc::ptr_eq(retained, reservation));
        self.read_only.retain(|&(from, _)| from != start.raw_value());
        self.notify_watchers();
    }

    /// Keeps the reservation of regions that were passed to [`GuestView::new`] until the view is
    /// dropped.
    pub fn retain_reservation(&mut self, reservation: Arc<Reservation>) {
        self.reservations.push(reservation);
    }

    /// Checks that no page has been lost. A device must call this after each copy from or to guest
    /// memory, before it uses the copy, because a lost page reads as zeros.
    pub fn check_whole(&self) -> Result<(), MemoryLost> {
        if self.loss.is_raised() { Err(MemoryLost) } else { Ok(()) }
    }

    /// Wraps a reader of guest memory. The result fails if a page was lost.
    pub fn whole<R: io::Read>(&self, reader: R) -> impl io::Read {
        Whole { reader, memory: self }
    }

    /// Makes later writes to `start..start + len` fail.
    pub fn forbid_writes(&mut self, start: u64, len: u64) {
        self.read_only.push((start, start.saturating_add(len)));
    }

    /// Adds a pluggable range in which no block is plugged. The regions that contain it must have
    /// been added before.
    pub fn add_pluggable(
        &mut self,
        start: GuestAddress,
        len: u64,
        block_size: u64,
    ) -> Result<(), ViewError> {
        let start = start.raw_value();
        let bad = ViewError::BadRange { start, len, block_size };
        if len == 0 || block_size == 0 || !len.is_multiple_of(block_size) {
            return Err(bad);
        }
        let end = start.checked_add(len).ok_or(bad)?;
        if self.pluggable.iter().any(|range| range.start < end && start < range.end()) {
            return Err(ViewError::Overlap { start, len });
        }
        let words = (len / block_size).div_ceil(64);
        let plugged = vec![0; usize::try_from(words).expect("a bitmap that fits in memory")];
        self.pluggable.push(PluggableRange { start, len, block_size, plugged });
        Ok(())
    }

    /// Marks `start..start+len` as plugged or unplugged.
    ///
    /// # Panics
    /// If the range does not consist of whole blocks of one pluggable range. The caller must
    /// validate the guest's request first.
    pub fn set_plugged(&mut self, start: GuestAddress, len: u64, plugged: bool) {
        let start = start.raw_value();
        let range = self
            .pluggable
            .iter_mut()
            .find(|range| range.start <= start && start + len <= range.end())
            .expect("blocks of a pluggable range");
        assert!(
            (start - range.start).is_multiple_of(range.block_size)
                && len.is_multiple_of(range.block_size)
        );
        let first = (start - range.start) / range.block_size;
        for block in first..first + len / range.block_size {
            range.set(block, plugged);
        }
    }
}

/// Reader of guest memory: see [`MappedMemory::whole`].
struct Whole<'a, R> {
    reader: R,
    memory: &'a MappedMemory,
}

impl<R: io::Read> io::Read for Whole<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(into)?;
        self.memory.check_whole().map_err(io::Error::other)?;
        Ok(count)
    }
}

impl GuestMemory for MappedMemory {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        self.allows(addr, count, access)
            && GuestMemoryBackend::check_range(&self.regions, addr, count)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>, AccessError> {
        if !self.allows(addr, count, access) {
            return Err(AccessError::InvalidGuestAddress(addr));
        }
        let slices: GuestMemoryBackendSliceIterator<'a, GuestMemoryMmap> =
            GuestMemoryBackend::get_slices(&self.regions, addr, count);
        Ok(slices)
    }

    // `physical_memory` keeps its default, `None`, because it would bypass the check.
}

/// Handle to guest memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GuestView {
    memory: Arc<RwLock<MappedMemory>>,
}

/// Read guard. Memory that is plugged when the guard is acquired remains plugged and mapped until
/// the guard is dropped.
#[derive(Clone)]
pub struct ViewGuard(Arc<ArcRwLockReadGuard<RawRwLock, MappedMemory>>);

impl Deref for ViewGuard {
    type Target = MappedMemory;

    fn deref(&self) -> &MappedMemory {
        &self.0
    }
}

impl GuestView {
    /// Creates a view of `regions`. All memory is accessible until ranges are declared pluggable.
    pub fn new(regions: GuestMemoryMmap) -> Self {
        let memory = MappedMemory {
            regions,
            pluggable: Vec::new(),
            read_only: Vec::new(),
            reservations: Vec::new(),
            loss: LossFlag::default(),
            watchers: Vec::new(),
        };
        Self { memory: Arc::new(RwLock::new(memory)) }
    }

    /// Flag to raise when pages are lost.
    pub fn loss(&self) -> LossFlag {
        self.memory.read().loss.clone()
    }

    /// Exclusive access for plug and unplug. Waits until no guard is held, and blocks new guards.
    pub fn exclusive(&self) -> RwLockWriteGuard<'_, MappedMemory> {
        self.memory.write()
    }

    /// Returns true if a thread holds exclusive access or waits for it.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.memory.try_read().is_none()
    }
}

impl GuestAddressSpace for GuestView {
    type M = MappedMemory;
    type T = ViewGuard;

    /// Acquires a guard. A thread that already holds a guard must not acquire another. If a second
    /// thread has started to wait for exclusive access in between, both threads would wait forever.
    fn memory(&self) -> ViewGuard {
        ViewGuard(Arc::new(self.memory.read_arc()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use vm_memory::Bytes;

    use super::*;

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 2 * MIB;

    fn view() -> GuestView {
        let boot = (GuestAddress(0), BLOCK as usize);
        let hotplug = (GuestAddress(BLOCK), 4 * BLOCK as usize);
        let view = GuestView::new(GuestMemoryMmap::from_ranges(&[boot, hotplug]).unwrap());
        view.exclusive().add_pluggable(GuestAddress(BLOCK), 4 * BLOCK, BLOCK).unwrap();
        view
    }

    #[test]
    fn only_plugged_blocks_are_accessible() {
        let view = view();
        let at = GuestAddress(2 * BLOCK);
        assert!(view.memory().write_obj(1u64, GuestAddress(8)).is_ok());
        assert!(view.memory().write_obj(1u64, at).is_err());
        view.exclusive().set_plugged(at, BLOCK, true);
        assert!(view.memory().write_obj(7u64, at).is_ok());
        assert_eq!(view.memory().read_obj::<u64>(at).unwrap(), 7);
        view.exclusive().set_plugged(at, BLOCK, false);
        assert!(view.memory().read_obj::<u64>(at).is_err());
    }

    #[test]
    fn region_watcher_is_notified_of_changed_regions() {
        struct Watcher(parking_lot::Mutex<Vec<(usize, usize)>>);
        impl RegionWatcher for Watcher {
            fn regions_changed(&self, regions: &Regions) {
                self.0.lock().push((regions.memory.num_regions(), regions.reservations.len()));
            }
        }
        let view = view();
        let reservation = Arc::new(Reservation::new(BLOCK, BLOCK).unwrap());
        let at = GuestAddress(16 * BLOCK);
        let region = || {
            let other = GuestMemoryMmap::<()>::from_ranges(&[(at, BLOCK as usize)]).unwrap();
            other.remove_region(at, BLOCK).unwrap().1
        };
        let watcher = Arc::new(Watcher(parking_lot::Mutex::default()));
        let weak: Weak<Watcher> = Arc::downgrade(&watcher);
        view.exclusive().watch_regions(weak);
        view.exclusive().add_region(region(), Arc::clone(&reservation)).unwrap();
        assert_eq!(std::mem::take(&mut *watcher.0.lock()), [(3, 1)]);
        view.exclusive().remove_region(at, BLOCK, &reservation);
        assert_eq!(*watcher.0.lock(), [(2, 0)]);
        // A dropped watcher is not notified.
        drop(watcher);
        view.exclusive().add_region(region(), reservation).unwrap();
    }

    #[test]
    fn access_to_one_unplugged_byte_is_refused_completely() {
        let view = view();
        view.exclusive().set_plugged(GuestAddress(2 * BLOCK), BLOCK, true);
        let memory = view.memory();
        let check = |start, len| memory.check_range(GuestAddress(start), len, Permissions::Write);
        assert!(check(2 * BLOCK, BLOCK as usize));
        assert!(!check(2 * BLOCK, BLOCK as usize + 1));
        assert!(!check(2 * BLOCK - 1, 2));
        // Boot memory followed by an unplugged block.
        assert!(check(BLOCK - 8, 8));
        assert!(!check(BLOCK - 8, 9));
        assert!(!check(u64::MAX - 1, 8));
        assert!(memory.write_slice(&[1; 16], GuestAddress(3 * BLOCK - 8)).is_err());
    }

    #[test]
    fn unplug_waits_for_guards() {
        let view = view();
        let at = GuestAddress(BLOCK);
        view.exclusive().set_plugged(at, BLOCK, true);
        let guard = view.memory();
        let (done, unplugged) = mpsc::channel();
        let unplugger = thread::spawn({
            let view = view.clone();
            move || {
                view.exclusive().set_plugged(at, BLOCK, false);
                done.send(()).unwrap();
            }
        });
        assert!(guard.write_obj(1u8, at).is_ok());
        assert_eq!(unplugged.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(guard);
        unplugged.recv().unwrap();
        unplugger.join().unwrap();
        assert!(view.memory().write_obj(1u8, at).is_err());
    }

    #[test]
    fn unaligned_or_overlapping_ranges_are_refused() {
        let view = view();
        let mut memory = view.exclusive();
        assert!(matches!(
            memory.add_pluggable(GuestAddress(64 * MIB), 3 * MIB, BLOCK),
            Err(ViewError::BadRange { .. })
        ));
        assert!(matches!(
            memory.add_pluggable(GuestAddress(0), 0, BLOCK),
            Err(ViewError::BadRange { .. })
        ));
        assert!(matches!(
            memory.add_pluggable(GuestAddress(4 * BLOCK), 4 * BLOCK, BLOCK),
            Err(ViewError::Overlap { .. })
        ));
    }
}
