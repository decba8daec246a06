//! The one way by which the VMM's own threads reach guest memory.
//!
//! A descriptor may point anywhere: at a block that is unplugged, or that another thread is
//! unplugging right now. Unplugged blocks are PROT_NONE on the host, so an unchecked access would
//! kill the VMM with SIGSEGV. The view therefore checks every range against what is plugged, and
//! hands memory out under a read guard; whoever unplugs takes the write guard, and so waits until
//! the last access in flight is over.

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
use super::lost::{LossFlag, MemoryLost};

/// Why a pluggable range is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ViewError {
    /// Empty, off the block grid, or ending beyond the address space.
    #[error(
        "Pluggable range {start:#x}+{len:#x} is not a whole number of blocks of {block_size:#x} bytes"
    )]
    BadRange {
        start: u64,
        /// Length in bytes.
        len: u64,
        /// Block size in bytes.
        block_size: u64,
    },
    #[error("Pluggable range {start:#x}+{len:#x} overlaps another one")]
    Overlap {
        start: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// A range whose blocks come and go, with one bit for each block.
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

    /// Whether every byte of the part of `start..end` that lies in this range is plugged.
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

/// What guest memory lies in, and what keeps it there.
#[derive(Clone, Debug)]
pub struct Regions {
    /// Where which addresses are. Of what is plugged it knows nothing: it is for who counts on the
    /// host's page tables, where what is not plugged cannot be reached.
    pub memory: GuestMemoryMmap,
    /// What they point into.
    pub reservations: Vec<Arc<Reservation>>,
}

/// Who reaches guest memory past the view, by the addresses of this process, as the host's kernel
/// does.
pub trait RegionWatcher: Send + Sync {
    /// There are other regions than before. When this returns none but these is reached any more.
    fn regions_changed(&self, regions: &Regions);
}

/// Guest memory as it is at one moment: what a guard of [`GuestView`] gives access to.
///
/// It is a [`GuestMemory`], so that queues, descriptor readers and `Bytes` work on it; an access to
/// unplugged memory is an error like one to an address where there is no memory at all.
#[derive(Debug)]
pub struct MappedMemory {
    regions: GuestMemoryMmap,
    pluggable: Vec<PluggableRange>,
    /// First and end addresses of what is mapped read-only on the host: a store there is SIGSEGV,
    /// too.
    read_only: Vec<(u64, u64)>,
    /// What the regions point into.
    reservations: Vec<Arc<Reservation>>,
    loss: LossFlag,
    watchers: Vec<Weak<dyn RegionWatcher>>,
}

impl MappedMemory {
    /// What it lies in.
    pub fn regions(&self) -> Regions {
        Regions { memory: self.regions.clone(), reservations: self.reservations.clone() }
    }

    /// From now on `watcher` is told of other regions, for as long as there is one.
    pub fn watch_regions(&mut self, watcher: Weak<dyn RegionWatcher>) {
        self.watchers.retain(|known| known.strong_count() > 0);
        self.watchers.push(watcher);
    }

    fn tell_watchers(&self) {
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

    /// Adds a region that points into `reservation`, all of it accessible until it is declared
    /// pluggable.
    pub fn add_region(
        &mut self,
        region: Arc<GuestRegionMmap>,
        reservation: Arc<Reservation>,
    ) -> Result<(), GuestRegionCollectionError> {
        self.regions = self.regions.insert_region(region)?;
        self.keep(reservation);
        self.tell_watchers();
        Ok(())
    }

    /// Takes back what [`Self::add_region`] added, all of it.
    ///
    /// # Panics
    /// If there is no such region.
    pub fn remove_region(&mut self, start: GuestAddress, len: u64, reservation: &Arc<Reservation>) {
        let removed = self.regions.remove_region(start, len);
        (self.regions, _) = removed.expect("a region that was added");
        self.reservations.retain(|kept| !Arc::ptr_eq(kept, reservation));
        self.read_only.retain(|&(from, _)| from != start.raw_value());
        self.tell_watchers();
    }

    /// Keeps what the regions given to [`GuestView::new`] point into as long as there is a view of
    /// them.
    pub fn keep(&mut self, reservation: Arc<Reservation>) {
        self.reservations.push(reservation);
    }

    /// Whether all that was copied from guest memory so far, or to it, is what is or was there. To
    /// be asked after a copy, before anybody believes it: a page that was lost meanwhile has
    /// read as zeros.
    pub fn check_whole(&self) -> Result<(), MemoryLost> {
        if self.loss.is_raised() { Err(MemoryLost) } else { Ok(()) }
    }

    /// Reads what `reader` copies from guest memory, and fails instead of giving out what may not
    /// have been there.
    pub fn whole<R: io::Read>(&self, reader: R) -> impl io::Read {
        Whole { reader, memory: self }
    }

    /// Refuses writes to `start..start + len` from now on.
    pub fn forbid_writes(&mut self, start: u64, len: u64) {
        self.read_only.push((start, start.saturating_add(len)));
    }

    /// Adds a range of which nothing is plugged yet. It must lie in the regions given to
    /// [`GuestView::new`].
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

    /// Marks `start..start+len` plugged or unplugged.
    ///
    /// # Panics
    /// If the blocks are not whole blocks of one pluggable range: the caller has validated the
    /// guest's request against its own region before.
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

/// A reader of guest memory: see [`MappedMemory::whole`].
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

    // `physical_memory` stays `None`: it would be a way around the check.
}

/// A handle on guest memory, cheap to clone.
#[derive(Clone, Debug)]
pub struct GuestView {
    memory: Arc<RwLock<MappedMemory>>,
}

/// Keeps everything that was plugged when it was taken plugged and mapped.
#[derive(Clone)]
pub struct ViewGuard(Arc<ArcRwLockReadGuard<RawRwLock, MappedMemory>>);

impl Deref for ViewGuard {
    type Target = MappedMemory;

    fn deref(&self) -> &MappedMemory {
        &self.0
    }
}

impl GuestView {
    /// A view of `regions`, all of it accessible until ranges are declared pluggable.
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

    /// For whoever is told of pages that are gone.
    pub fn loss(&self) -> LossFlag {
        self.memory.read().loss.clone()
    }

    /// For whoever plugs and unplugs: waits until no guard is held, and lets none be taken while it
    /// lives.
    pub fn exclusive(&self) -> RwLockWriteGuard<'_, MappedMemory> {
        self.memory.write()
    }

    /// Whether somebody waits for exclusive access, or has it.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.memory.try_read().is_none()
    }
}

impl GuestAddressSpace for GuestView {
    type M = MappedMemory;
    type T = ViewGuard;

    /// Takes a guard. A thread that holds one must not take a second one: between the two, somebody
    /// may have begun to wait for exclusive access, and both would wait for ever.
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
    fn only_plugged_blocks_can_be_reached() {
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
    fn who_reaches_past_the_view_is_told_of_other_regions() {
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
        // One that has gone is not asked for.
        drop(watcher);
        view.exclusive().add_region(region(), reservation).unwrap();
    }

    #[test]
    fn an_access_that_touches_one_unplugged_byte_is_refused_whole() {
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
    fn ranges_off_the_grid_or_on_each_other_are_refused() {
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
