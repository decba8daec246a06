//! Builds guest memory from zones, reservations, KVM slots and the view.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use foreshore_types::size::Size;
use thiserror::Error;
use vm_memory::{
    GuestAddress, GuestMemoryMmap, GuestRegionCollectionError, GuestRegionMmap, MmapRegion,
};

use super::backing::resident::resident_bytes;
use super::backing::{
    Access, AccessBarrier, Backing, BackingError, BarrierError, DramBacking, DramError, DramSource,
    HostNode, HostNodeError, MappingBudget, Reservation, SpillFile, SpillFileError, SpillPlan,
    SpillPlanError, SpillStatistics, Spiller, ZoneFile, ZoneFileError,
};
use super::dimms::{DimmPlan, Dimms};
use super::file_ranges::{FileMapping, FileRanges, MappedRange};
use super::holes::UserfaultDevice;
use super::layout::{GuestRange, HOTPLUG_ALIGN, LayoutError, MemoryMap};
use super::populate::populate;
use super::private_ranges::PrivateRanges;
use super::slots::{HOTPLUG_SLOT_BYTES, HotplugSlots, SlotError, SlotTable, Slots, check_ranges};
use super::view::{GuestView, ViewError};
use super::zone::{Growth, Tier, ZoneSpec};
use crate::pool::PmPool;

/// Unit of plugging: a chunk of the pool, and a huge page of host and guest.
pub const BLOCK_BYTES: u64 = 2 << 20;

#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// Width of guest-physical addresses, which CPUID reports to the guest.
    pub address_bits: u8,
    /// KVM_CAP_NR_MEMSLOTS.
    pub slot_limit: u32,
    pub host_bytes: u64,
}

#[derive(Debug, Error)]
pub enum MemoryError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("zone {zone:?} is PM, but the VM has no pool")]
    NoPool { zone: String },
    #[error("zone {zone:?} is PM and cannot have boot memory (size {size_bytes})")]
    PmBoot {
        zone: String,
        /// Boot memory that the configuration requests.
        size_bytes: u64,
    },
    #[error("cannot bind zone {zone:?} to a host node")]
    HostNode {
        zone: String,
        #[source]
        source: HostNodeError,
    },
    #[error("zone {zone:?}")]
    Dram {
        zone: String,
        #[source]
        source: DramError,
    },
    #[error(
        "zone {zone:?}: cannot allocate {} of huge pages of {}; the host has {free} of them free; raise vm.nr_hugepages",
        Size(*len), Size(*page_bytes)
    )]
    HugePages {
        zone: String,
        len: u64,
        page_bytes: u64,
        /// Number of free huge pages on the host.
        free: u64,
        #[source]
        source: io::Error,
    },
    #[error("zone {zone:?}: file={}", path.display())]
    File {
        zone: String,
        path: PathBuf,
        #[source]
        source: ZoneFileError,
    },
    #[error("zone {zone:?}: cannot populate {} at start (prefault=on)", Size(*len))]
    Prefault {
        zone: String,
        len: u64,
        #[source]
        source: io::Error,
    },
    #[error("spill")]
    Spill(#[from] SpillPlanError),
    #[error("zone {zone:?}: spill_file={}", path.display())]
    SpillFile {
        zone: String,
        path: PathBuf,
        #[source]
        source: SpillFileError,
    },
    #[error(transparent)]
    Barrier(#[from] BarrierError),
    #[error("cannot reserve or map {len} bytes of guest memory")]
    Map {
        len: u64,
        #[source]
        source: io::Error,
    },
    /// The vm-memory crate rejects a region.
    #[error("cannot combine the regions of guest memory")]
    Regions(#[from] GuestRegionCollectionError),
    #[error("cannot receive stores to the holes of a thin volume (userfaultfd)")]
    Userfaults(#[source] io::Error),
    #[error(
        "the holes of a thin volume can need {needed} mappings, but {used} of {limit} are in use; raise vm.max_map_count, \
         or use interface=virtio-blk"
    )]
    Mappings {
        /// Number of chunks, or of parts and holes if the guest may only read.
        needed: usize,
        used: usize,
        limit: usize,
    },
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(transparent)]
    View(#[from] ViewError),
}

/// Resources of the host for PM zones.
#[derive(Clone, Copy)]
pub struct PmSource<'a> {
    pub pool: &'a Arc<dyn PmPool>,
    /// Only used if memory is moved to files.
    pub userfaults: &'a UserfaultDevice,
}

/// Hotplug part of a zone. The zone's virtio-mem device plugs and unplugs it.
pub struct HotplugPart {
    pub spec: ZoneSpec,
    pub range: GuestRange,
    /// Size of the blocks in which Linux adds memory.
    pub linux_block_bytes: u64,
    pub backing: Box<dyn Backing>,
    pub slots: HotplugSlots,
}

/// Boot part or hotplug part of a zone.
struct Part {
    zone: usize,
    range: GuestRange,
    reservation: Arc<Reservation>,
    /// Allocate all pages before the guest runs.
    prefault: bool,
    /// Backing file, which another process may truncate.
    file: Option<Arc<ZoneFile>>,
}

/// Memory of one VM. Drop it only after all vCPU threads have ended.
pub struct Memory {
    map: MemoryMap,
    zones: Vec<ZoneSpec>,
    /// Host-virtual address and length of each part, by zone.
    host_ranges: Vec<Vec<(u64, u64)>>,
    parts: Vec<Part>,
    boot: GuestMemoryMmap,
    view: GuestView,
    slots: Arc<Slots>,
    budget: Arc<MappingBudget>,
    hotplug: Vec<HotplugPart>,
    dimms: Option<Dimms>,
    files: Arc<FileRanges>,
    /// Moved memory of each zone.
    spills: Vec<Arc<SpillStatistics>>,
    _spiller: Option<Spiller>,
}

/// Builds the memory of `zones`. Boot memory is mapped and gets KVM slots. For hotplug parts, only
/// address space is reserved.
pub fn build(
    zones: Vec<ZoneSpec>,
    pm: Option<PmSource<'_>>,
    table: Arc<dyn SlotTable>,
    options: MemoryOptions,
) -> Result<Memory, MemoryError> {
    for zone in zones.iter().filter(|zone| zone.tier == Tier::Pm) {
        if zone.boot_bytes > 0 {
            return Err(MemoryError::PmBoot { zone: zone.id.clone(), size_bytes: zone.boot_bytes });
        }
        if pm.is_none() {
            return Err(MemoryError::NoPool { zone: zone.id.clone() });
        }
    }
    let map = MemoryMap::new(&zones, options.address_bits)?;
    check_ranges(
        map.zones().iter().flat_map(|zone| zone.boot.iter().copied()),
        options.host_bytes,
    )?;
    let host_nodes = zones.iter().map(host_node).collect::<Result<Vec<_>, _>>()?;
    let slots = Arc::new(Slots::new(table, options.slot_limit));
    let budget = Arc::new(MappingBudget::of_host());
    let limit_bytes = zones.iter().map(|zone| zone.spill_bytes).sum();
    let mut spill = SpillPlan::new(pm.map(|pm| pm.pool), limit_bytes)?;
    let mut spill_files = spill_files(&zones, pm)?;
    let mut spills = vec![Arc::default(); zones.len()];
    let mut host_ranges = vec![Vec::new(); zones.len()];
    let mut boot = Vec::new();
    let (mut hotplug, mut dimms, mut parts) = (Vec::new(), None, Vec::new());

    for (index, (placement, spec)) in map.zones().iter().zip(&zones).enumerate() {
        let file = open_file(spec)?;
        let mut in_file = 0;
        for range in &placement.boot {
            let reservation = reserve(*range, host_nodes[index])?;
            let source = DramSource::of_boot(
                &spec.host,
                range.len,
                file.as_deref().map(|file| (file, in_file)),
            );
            let source =
                source.map_err(|source| MemoryError::Dram { zone: spec.id.clone(), source })?;
            let mut backing =
                DramBacking::new(Arc::clone(&reservation), Arc::clone(&budget), source);
            backing.plug(0, range.len).map_err(|err| not_mapped(spec, range.len, err))?;
            slots.add(*range, &reservation, 0, Access::ReadWrite)?;
            host_ranges[index].push((reservation.addr(), range.len));
            parts.push(Part {
                zone: index,
                range: *range,
                reservation: Arc::clone(&reservation),
                prefault: spec.host.prefault,
                file: file.clone(),
            });
            boot.push((*range, reservation));
            in_file += range.len;
        }
    }
    let regions: Result<Vec<_>, _> =
        boot.iter().map(|(range, reservation)| region(*range, reservation)).collect();
    let mut regions = regions?;
    regions.sort_by_key(|region| vm_memory::GuestMemoryRegion::start_addr(region.as_ref()));
    let boot_regions = GuestMemoryMmap::from_arc_regions(regions)?;
    let view = GuestView::new(boot_regions.clone());
    for (_, reservation) in &boot {
        view.exclusive().retain_reservation(Arc::clone(reservation));
    }

    for (index, (placement, spec)) in map.zones().iter().zip(&zones).enumerate() {
        let Some(range) = placement.hotplug else { continue };
        let reservation = reserve(range, host_nodes[index])?;
        host_ranges[index].push((reservation.addr(), range.len));
        let (of, prefault) = (Arc::clone(&reservation), false);
        parts.push(Part { zone: index, range, reservation: of, prefault, file: None });
        {
            let mut memory = view.exclusive();
            memory.add_region(region(range, &reservation)?, Arc::clone(&reservation))?;
            memory.add_pluggable(GuestAddress(range.start), range.len, BLOCK_BYTES)?;
        }
        if spec.tier == Tier::Dram && spec.growth == Growth::Dimms {
            let source = DramSource::of_dimms(&spec.host, range.len)
                .map_err(|source| MemoryError::Dram { zone: spec.id.clone(), source })?;
            let page_bytes = source.huge_page_bytes().unwrap_or(0);
            let backing = DramBacking::new(Arc::clone(&reservation), Arc::clone(&budget), source);
            let plan = DimmPlan::new(range, spec.hotplug_bytes, map.boot_end(), page_bytes);
            let (slots, view) = (Arc::clone(&slots), view.clone());
            dimms = Some(Dimms::new(spec.clone(), plan, backing, reservation, slots, view));
            continue;
        }
        let backing: Box<dyn Backing> = match (spec.tier, pm) {
            (Tier::Pm, Some(PmSource { pool, .. })) => {
                let (limit_bytes, file) = (spec.spill_bytes, spill_files[index].take());
                let (backing, statistics) =
                    spill.add_zone(pool, &reservation, &budget, limit_bytes, file);
                spills[index] = statistics;
                Box::new(backing)
            }
            _ => {
                let source = DramSource::of_hotplug(&spec.host, range.len, BLOCK_BYTES)
                    .map_err(|source| MemoryError::Dram { zone: spec.id.clone(), source })?;
                Box::new(DramBacking::new(Arc::clone(&reservation), Arc::clone(&budget), source))
            }
        };
        let slots = HotplugSlots::new(Arc::clone(&slots), range, reservation, HOTPLUG_SLOT_BYTES);
        let linux_block_bytes = map.linux_block_bytes();
        hotplug.push(HotplugPart { spec: spec.clone(), range, linux_block_bytes, backing, slots });
    }
    let files = FileRanges::new(view.clone(), Arc::clone(&slots), Arc::clone(&budget));
    let boot = boot_regions;
    let spiller = spill.start()?;
    Ok(Memory {
        _spiller: spiller,
        spills,
        map,
        zones,
        host_ranges,
        parts,
        boot,
        view,
        slots,
        budget,
        hotplug,
        dimms,
        files,
    })
}

impl Memory {
    pub fn map(&self) -> &MemoryMap {
        &self.map
    }

    /// The zones, in the order of [`MemoryMap::zones`].
    pub fn zones(&self) -> &[ZoneSpec] {
        &self.zones
    }

    /// Memory of a zone that was moved from the pool.
    pub fn spill_of(&self, zone: &ZoneSpec) -> Option<&SpillStatistics> {
        let nth = self.zones.iter().position(|other| other.id == zone.id)?;
        Some(&self.spills[nth])
    }

    /// Checks that the VM could reboot with `boot_bytes` of boot memory in the zone with index
    /// `nth`, if nothing else changes.
    pub fn could_boot_with(&self, nth: usize, boot_bytes: u64) -> Result<(), LayoutError> {
        let mut next = self.zones.clone();
        next[nth].boot_bytes = boot_bytes;
        self.map.has_room_for(&self.zones, &next)
    }

    /// All parts of all zones, including unplugged memory.
    pub fn parts(&self) -> impl Iterator<Item = (&ZoneSpec, &Arc<Reservation>)> {
        self.placed_parts().map(|(zone, _, reservation)| (zone, reservation))
    }

    /// All parts of all zones with their guest-physical ranges.
    pub fn placed_parts(&self) -> impl Iterator<Item = (&ZoneSpec, GuestRange, &Arc<Reservation>)> {
        self.parts.iter().map(|part| (&self.zones[part.zone], part.range, &part.reservation))
    }

    /// Backing file of a part, if another process may truncate it.
    pub fn file_of(&self, reservation: &Reservation) -> Option<&File> {
        let part = self.parts.iter().find(|part| std::ptr::eq(&*part.reservation, reservation))?;
        part.file.as_deref().map(|file| &**file.file())
    }

    /// Allocates all pages of boot memory in zones with `prefault`. Existing contents are
    /// preserved.
    pub fn prefault(&self) -> Result<(), MemoryError> {
        for part in self.parts.iter().filter(|part| part.prefault) {
            let zone = || self.zones[part.zone].id.clone();
            let len = part.range.len;
            populate(&part.reservation, 0, len).map_err(|source| MemoryError::Prefault {
                zone: zone(),
                len,
                source,
            })?;
        }
        Ok(())
    }

    /// Only the boot memory, for kernel loaders. Access needs no guard, because boot memory is
    /// never unplugged. The result must not outlive `self`.
    pub fn boot(&self) -> &GuestMemoryMmap {
        &self.boot
    }

    /// Ranges of boot memory that no other process can access.
    pub fn private_boot(&self) -> PrivateRanges {
        let zones = self.map.zones().iter().zip(&self.zones);
        let private = zones.filter(|(_, spec)| spec.host.is_private());
        PrivateRanges::new(private.flat_map(|(placement, _)| placement.boot.clone()).collect())
    }

    /// All guest memory, for devices.
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    pub fn mapping_budget(&self) -> &Arc<MappingBudget> {
        &self.budget
    }

    /// Returns the hotplug parts, one for each virtio-mem device. Later calls return an empty list.
    pub fn take_hotplug(&mut self) -> Vec<HotplugPart> {
        std::mem::take(&mut self.hotplug)
    }

    /// Returns the DIMMs of the zone that grows by DIMMs. Later calls return `None`.
    pub fn take_dimms(&mut self) -> Option<Dimms> {
        self.dimms.take()
    }

    /// Resident bytes of each zone, in the order of the zones. See [`resident_bytes`] for the cost.
    pub fn resident_bytes(&self) -> io::Result<Vec<u64>> {
        resident_bytes(&self.host_ranges)
    }

    /// Host-virtual addresses and lengths of all parts, by zone. Another thread can pass them to
    /// [`resident_bytes`].
    pub fn host_ranges(&self) -> &[Vec<(u64, u64)>] {
        &self.host_ranges
    }

    /// Number of bytes that [`Self::add_file_range`] has mapped and that are still mapped.
    pub fn file_bytes(&self) -> Arc<AtomicU64> {
        self.files.bytes()
    }

    /// Maps parts of a file into a new range of guest memory, for a volume. Devices can access the
    /// range too, unless the guest fills holes, because a guest may do I/O from and to mapped PM.
    pub fn add_file_range(&mut self, mapping: FileMapping<'_>) -> Result<MappedRange, MemoryError> {
        self.files.take_removed().into_iter().for_each(|range| self.map.give_back(range));
        let range = self.map.allocate(mapping.len_bytes, HOTPLUG_ALIGN)?;
        self.files.add(range, mapping).inspect_err(|_| self.map.give_back(range))
    }
}

fn open_file(zone: &ZoneSpec) -> Result<Option<Arc<ZoneFile>>, MemoryError> {
    let Some(path) = &zone.host.file else { return Ok(None) };
    let file = ZoneFile::open(path, zone.boot_bytes, zone.host.shared);
    let error = |source| MemoryError::File { zone: zone.id.clone(), path: path.clone(), source };
    file.map(|file| Some(Arc::new(file))).map_err(error)
}

/// Creates the spill files of the zones.
fn spill_files(
    zones: &[ZoneSpec],
    pm: Option<PmSource<'_>>,
) -> Result<Vec<Option<SpillFile>>, MemoryError> {
    let has_file = zones.iter().any(|zone| zone.spill_file.is_some());
    let barrier = pm.filter(|_| has_file).map(|pm| AccessBarrier::new(pm.userfaults));
    let barrier = barrier.transpose()?.map(Arc::new);
    let create = |zone: &ZoneSpec| {
        let (Some(path), Some(barrier)) = (&zone.spill_file, &barrier) else { return Ok(None) };
        let file = SpillFile::create(path, zone.hotplug_bytes, Arc::clone(barrier));
        file.map(Some).map_err(|source| {
            let (zone, path) = (zone.id.clone(), path.clone());
            MemoryError::SpillFile { zone, path, source }
        })
    };
    zones.iter().map(create).collect()
}

fn not_mapped(zone: &ZoneSpec, len: u64, err: BackingError) -> MemoryError {
    match err {
        BackingError::HugePages { page_bytes, available_bytes, source, .. } => {
            let (zone, free) = (zone.id.clone(), available_bytes / page_bytes);
            MemoryError::HugePages { zone, len, page_bytes, free, source }
        }
        err => MemoryError::Map { len, source: io::Error::other(err) },
    }
}

fn host_node(zone: &ZoneSpec) -> Result<Option<HostNode>, MemoryError> {
    let error = |source| MemoryError::HostNode { zone: zone.id.clone(), source };
    zone.host_node.map(|node| HostNode::find(node).map_err(error)).transpose()
}

pub(super) fn reserve(
    range: GuestRange,
    node: Option<HostNode>,
) -> Result<Arc<Reservation>, MemoryError> {
    // Guest and host addresses are both multiples of 1 GiB. Boot memory above the hole also starts
    // at a multiple of 1 GiB. Boot memory of a second zone may start elsewhere. It can then use
    // pages of 2 MiB, but not of 1 GiB.
    let reservation = Reservation::new(range.len, HOTPLUG_ALIGN)
        .map_err(|source| MemoryError::Map { len: range.len, source })?;
    if let Some(node) = node {
        reservation.bind_to(node);
    }
    Ok(Arc::new(reservation))
}

pub(super) fn region(
    range: GuestRange,
    reservation: &Reservation,
) -> Result<Arc<GuestRegionMmap>, MemoryError> {
    assert!(range.len <= reservation.len_bytes());
    let too_large =
        || MemoryError::Map { len: range.len, source: io::ErrorKind::InvalidInput.into() };
    let len = usize::try_from(range.len).map_err(|_| too_large())?;
    let flags = libc::MAP_NORESERVE;
    // SAFETY: the range is reserved. The view and loaders (through `Memory::boot`) hold the region
    // only while they also hold the reservation. The view guards the PROT_NONE parts.
    let mapping = unsafe {
        MmapRegion::build_raw(
            reservation.addr() as *mut u8,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
        )
    };
    let mapping = mapping
        .map_err(|err| MemoryError::Map { len: range.len, source: io::Error::other(err) })?;
    GuestRegionMmap::new(mapping, GuestAddress(range.start)).map(Arc::new).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryBackend};

    use super::super::backing::policy_at;
    use super::super::dimms::DimmError;
    use super::super::layout::{GIB, MIB};
    use super::super::slots::fake::FakeSlots;
    use super::super::zone::{HostMemory, HostPages};
    use super::*;

    const OPTIONS: MemoryOptions =
        MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };

    fn dram_zone(boot_bytes: u64, hotplug_bytes: u64) -> ZoneSpec {
        ZoneSpec { id: "dram".into(), boot_bytes, hotplug_bytes, ..ZoneSpec::default() }
    }

    #[test]
    fn boot_memory_of_shared_zones_and_of_files_is_not_private() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = folder.path().join("memory");
        File::create(&file).unwrap().set_len(64 * MIB).unwrap();
        let host = |shared, file| HostMemory { shared, file, ..HostMemory::default() };
        let zones = [
            host(false, None),
            host(true, None),
            host(false, Some(file.clone())),
            host(true, Some(file)),
            host(false, Some(folder.path().to_owned())),
            host(false, None),
        ];
        let zones = zones.map(|host| ZoneSpec { host, ..dram_zone(64 * MIB, 0) });
        let memory = build(zones.into(), None, Arc::new(FakeSlots::default()), OPTIONS).unwrap();
        let private = memory.private_boot();
        let starts = (0..6).map(|nth| private.start_of(64 * nth * MIB..GIB));
        let expected = [Some(0..64 * MIB), None, None, None, None, Some(320 * MIB..384 * MIB)];
        assert_eq!(starts.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn boot_memory_is_accessible_and_hotplug_memory_is_not() {
        let table = Arc::new(FakeSlots::default());
        let zones = vec![dram_zone(4 * GIB, GIB)];
        let mut memory =
            build(zones, None, Arc::clone(&table) as Arc<dyn SlotTable>, OPTIONS).unwrap();
        assert_eq!(memory.boot().num_regions(), 2);
        assert_eq!(memory.slots().used(), 2);
        assert!(table.covers(3 * GIB - 1) && !table.covers(3 * GIB) && table.covers(5 * GIB - 1));
        let view = memory.view().clone();
        view.memory().write_obj(7u64, GuestAddress(4 * GIB)).unwrap();
        assert_eq!(memory.boot().read_obj::<u64>(GuestAddress(4 * GIB)).unwrap(), 7);
        assert!(view.memory().write_obj(7u64, GuestAddress(5 * GIB)).is_err());
        let parts = memory.take_hotplug();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].range, GuestRange { start: 5 * GIB, len: GIB });
        let resident = memory.resident_bytes().unwrap()[0];
        assert!(resident > 0 && resident <= 4 * MIB, "{resident}");
        drop((parts, memory));
        assert!(table.slots.lock().is_empty());
        // The view keeps the memory mapped for devices that stop later.
        assert_eq!(view.memory().read_obj::<u64>(GuestAddress(4 * GIB)).unwrap(), 7);
    }

    #[test]
    fn pm_zone_needs_a_pool_and_has_no_boot_memory() {
        let table = || Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        let pm = |boot_bytes| ZoneSpec {
            id: "pm".into(),
            tier: Tier::Pm,
            guest_node: 1,
            boot_bytes,
            hotplug_bytes: GIB,
            ..ZoneSpec::default()
        };
        let err = build(vec![dram_zone(GIB, 0), pm(0)], None, table(), OPTIONS).err().unwrap();
        assert!(matches!(err, MemoryError::NoPool { zone } if zone == "pm"));
        let err = build(vec![dram_zone(GIB, 0), pm(GIB)], None, table(), OPTIONS).err().unwrap();
        assert!(matches!(err, MemoryError::PmBoot { .. }));
    }

    #[test]
    fn zones_are_bound_to_existing_host_nodes() {
        let table = || Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        let zones = |node| {
            vec![
                ZoneSpec { host_node: Some(node), ..dram_zone(64 * MIB, GIB) },
                dram_zone(64 * MIB, 0),
            ]
        };
        let error = build(zones(77), None, table(), OPTIONS).err().unwrap();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(
            error.to_string().contains("\"dram\"") && source.starts_with("host_numa_node=77: "),
            "{error}: {source}"
        );
        let mut memory = build(zones(0), None, table(), OPTIONS).unwrap();
        memory.take_hotplug()[0].backing.plug(0, 2 * MIB).unwrap();
        let policy = |nth: usize| policy_at(memory.parts[nth].reservation.addr());
        // The order of parts is: boot part of the first zone, boot part of the second zone, hotplug
        // part of the first zone.
        assert_eq!(
            [0, 1, 2].map(policy),
            [(libc::MPOL_BIND, 1), (libc::MPOL_DEFAULT, 0), (libc::MPOL_BIND, 1)]
        );
    }

    #[test]
    fn prefault_allocates_boot_memory_after_the_kernel_is_loaded() {
        let table = || Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        for shared in [false, true] {
            let host = HostMemory { prefault: true, shared, ..HostMemory::default() };
            let zones = vec![ZoneSpec { host, ..dram_zone(65 * MIB, 0) }, dram_zone(64 * MIB, 0)];
            let memory = build(zones, None, table(), OPTIONS).unwrap();
            memory.boot().write_obj(7u64, GuestAddress(64 * MIB)).unwrap();
            memory.prefault().unwrap();
            assert_eq!(memory.resident_bytes().unwrap(), [65 * MIB, 0]);
            assert_eq!(memory.boot().read_obj::<u64>(GuestAddress(64 * MIB)).unwrap(), 7);
        }
    }

    #[test]
    fn zone_file_backs_only_the_boot_part_on_both_sides_of_the_hole() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(4 * GIB).unwrap();
        let of = |file: &std::path::Path, shared| {
            let host = HostMemory { file: Some(file.to_owned()), shared, ..HostMemory::default() };
            let zone = ZoneSpec { host, ..dram_zone(4 * GIB, GIB) };
            build(vec![zone], None, Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>, OPTIONS)
        };
        let mut memory = of(file.path(), true).unwrap();
        for (at, in_file) in [(MIB, MIB), (4 * GIB + MIB, 3 * GIB + MIB)] {
            memory.boot().write_obj(at, GuestAddress(at)).unwrap();
            let mut bytes = [0; 8];
            file.as_file().read_exact_at(&mut bytes, in_file).unwrap();
            assert_eq!(u64::from_ne_bytes(bytes), at);
        }
        memory.take_hotplug()[0].backing.plug(0, 2 * MIB).unwrap();
        let reservations: Vec<_> =
            memory.parts().map(|(_, reservation)| Arc::clone(reservation)).collect();
        let has_file = |nth: usize| memory.file_of(&reservations[nth]).is_some();
        assert_eq!([0, 1, 2].map(has_file), [true, true, false]);
        drop((memory, reservations));
        // Without `shared`, a file that contains data of an earlier guest is refused. With
        // `shared`, the file is emptied.
        let error = of(file.path(), false).err().unwrap();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(error.to_string().starts_with("zone \"dram\": file=/dev/shm/"), "{error}");
        assert!(source.starts_with("it has data at offset 1048576"), "{source}");
        let memory = of(file.path(), true).unwrap();
        assert_eq!(memory.boot().read_obj::<u64>(GuestAddress(MIB)).unwrap(), 0);
    }

    #[test]
    fn missing_huge_pages_are_reported_with_their_size() {
        let host = HostMemory { pages: HostPages::Huge(2 * MIB), ..HostMemory::default() };
        // More huge pages than any host that runs this test has reserved.
        let zones = vec![ZoneSpec { host, ..dram_zone(1 << 40, 0) }];
        let table = Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        let options = MemoryOptions { address_bits: 48, ..OPTIONS };
        let error = build(zones, None, table, options).err().unwrap().to_string();
        assert!(
            error.starts_with("zone \"dram\": cannot allocate 3 GiB of huge pages of 2 MiB"),
            "{error}"
        );
        let host = HostMemory { pages: HostPages::Huge(GIB), ..HostMemory::default() };
        let zones = vec![ZoneSpec { host, ..dram_zone(GIB, GIB) }];
        let table = Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        assert!(build(zones, None, table, OPTIONS).is_err());
    }

    #[test]
    fn adjacent_zones_are_contiguous_memory() {
        let table = Arc::new(FakeSlots::default());
        let zones = vec![dram_zone(64 * MIB, 0), dram_zone(64 * MIB, 0)];
        let memory = build(zones, None, Arc::clone(&table) as Arc<dyn SlotTable>, OPTIONS).unwrap();
        let (border, text) = (GuestAddress(64 * MIB - 4), *b"over the border");
        memory.view().memory().write_slice(&text, border).unwrap();
        let mut read = [0; 15];
        memory.boot().read_slice(&mut read, border).unwrap();
        assert_eq!(read, text);
        assert!(table.covers(128 * MIB - 1) && !table.covers(128 * MIB));
        assert_eq!(memory.resident_bytes().unwrap().len(), 2);
        assert!(
            memory.resident_bytes().unwrap().iter().all(|bytes| (4096..=2 * MIB).contains(bytes))
        );
    }

    #[test]
    fn extents_of_a_volume_are_contiguous_and_read_only_rejects_writes() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;
        let table = Arc::new(FakeSlots::default());
        let mut memory =
            build(vec![dram_zone(GIB, 0)], None, Arc::clone(&table) as Arc<dyn SlotTable>, OPTIONS)
                .unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * MIB).unwrap();
        file.write_all_at(b"first", 4 * MIB).unwrap();
        file.write_all_at(b"second", 0).unwrap();
        let mapping = FileMapping {
            len_bytes: 8 * MIB,
            parts: vec![(0, 4 * MIB..6 * MIB), (4 * MIB, 0..2 * MIB)],
            ..FileMapping::of_file(file.as_fd(), 0, Access::Read)
        };
        assert_eq!(mapping.holes(), [2 * MIB..4 * MIB, 6 * MIB..8 * MIB]);
        let volume = memory.add_file_range(mapping).unwrap();
        assert_eq!(volume.guest, GuestRange { start: 4 * GIB, len: 8 * MIB });
        assert!(table.covers(4 * GIB));
        let guard = memory.view().memory();
        let read = |at, len| {
            let mut bytes = vec![0; len];
            guard.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            bytes
        };
        assert_eq!(read(4 * GIB, 5), b"first");
        assert_eq!(read(4 * GIB + 2 * MIB, 6), [0; 6], "a hole");
        assert_eq!(read(4 * GIB + 4 * MIB, 6), b"second");
        assert_eq!(read(4 * GIB + 8 * MIB - 6, 6), [0; 6], "a hole");
        assert!(guard.write_obj(1u8, GuestAddress(4 * GIB)).is_err());
    }

    #[test]
    fn removed_file_leaves_neither_slot_nor_addresses_in_use() {
        use std::os::fd::AsFd;
        let table = Arc::new(FakeSlots::default());
        let mut memory =
            build(vec![dram_zone(GIB, 0)], None, Arc::clone(&table) as Arc<dyn SlotTable>, OPTIONS)
                .unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * MIB).unwrap();
        let mapping = |access| FileMapping::of_file(file.as_fd(), 2 * MIB, access);
        let used = memory.slots().used();
        for access in [Access::Read, Access::ReadWrite, Access::ReadWrite] {
            let range = memory.add_file_range(mapping(access)).unwrap();
            assert_eq!(range.guest, GuestRange { start: 4 * GIB, len: 2 * MIB });
            let at = GuestAddress(4 * GIB);
            assert_eq!(
                memory.view().memory().write_obj(7u8, at).is_ok(),
                access == Access::ReadWrite
            );
            let reservation = Arc::clone(&range.reservation);
            drop(range);
            assert_eq!(Arc::strong_count(&reservation), 1, "a mapping still holds the range");
            assert!(memory.view().memory().read_obj::<u8>(at).is_err() && !table.covers(4 * GIB));
            assert_eq!(memory.slots().used(), used);
        }
        // If KVM refuses a range, the range is removed completely.
        *table.calls_left.lock() = Some(0);
        assert!(memory.add_file_range(mapping(Access::ReadWrite)).is_err());
        *table.calls_left.lock() = None;
        assert!(memory.view().memory().read_obj::<u8>(GuestAddress(4 * GIB)).is_err());
        let range = memory.add_file_range(mapping(Access::ReadWrite)).unwrap();
        assert_eq!(range.guest.start, 4 * GIB);
    }
    #[test]
    fn added_dimm_is_accessible_to_guest_and_devices() {
        let table = Arc::new(FakeSlots::default());
        let zone = ZoneSpec { growth: Growth::Dimms, ..dram_zone(GIB, GIB) };
        let mut memory =
            build(vec![zone], None, Arc::clone(&table) as Arc<dyn SlotTable>, OPTIONS).unwrap();
        assert!(memory.take_hotplug().is_empty(), "a virtio-mem device has it");
        let mut dimms = memory.take_dimms().unwrap();
        let accept = || Ok::<(), DimmError>(());
        let at = |address| memory.view().memory().write_obj(7u64, GuestAddress(address)).is_ok();
        assert!(!at(4 * GIB) && !table.covers(4 * GIB));
        assert_eq!(
            dimms.add(128 * MIB, accept).unwrap(),
            GuestRange { start: 4 * GIB, len: 128 * MIB }
        );
        assert!(at(4 * GIB) && at(4 * GIB + 128 * MIB - 8) && !at(4 * GIB + 128 * MIB));
        assert!(table.covers(4 * GIB + 128 * MIB - 1) && !table.covers(4 * GIB + 128 * MIB));
        // If KVM refuses a DIMM, the DIMM is removed completely, and the next DIMM uses its
        // address.
        *table.calls_left.lock() = Some(0);
        let error = dimms.add(256 * MIB, accept).unwrap_err();
        assert!(error.is_the_hosts(), "{error}");
        *table.calls_left.lock() = None;
        assert!(!at(4 * GIB + 128 * MIB));
        assert_eq!(dimms.add(256 * MIB, accept).unwrap().start, 4 * GIB + 128 * MIB);
        assert!(at(4 * GIB + 384 * MIB - 8) && at(4 * GIB + 128 * MIB));
        assert_eq!(dimms.plan().used_bytes(), 384 * MIB);
        assert_eq!(dimms.came_bytes().load(Ordering::Relaxed), 384 * MIB);
    }
}
