//! A queue pair in the kernel, which is an open file of /dev/vhost-net.

use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;
use vhost::net::VhostNet;
use vhost::vhost_kern::net::Net;
use vhost::{VhostBackend, VringConfigData};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

use super::engine::{Rings, Setup};
use super::table::Table;
use super::{RING_FEATURES, VhostError};
use crate::memory::backing::Reservation;
use crate::memory::view::Regions;

/// Indices that the kernel uses for the two queues.
const QUEUES: [usize; 2] = [0, 1];

fn call(operation: &'static str) -> impl Fn(vhost::Error) -> VhostError {
    move |source| VhostError::Call { operation, source }
}

/// Guest memory that contains the rings of a pair.
#[derive(Clone, Default)]
struct RingMemory(Arc<Mutex<Arc<GuestMemoryMmap>>>);

impl GuestAddressSpace for RingMemory {
    type M = GuestMemoryMmap;
    type T = Arc<GuestMemoryMmap>;

    fn memory(&self) -> Self::T {
        Arc::clone(&self.0.lock())
    }
}

/// Open file of [`super::DEVICE`].
struct OpenFile {
    net: Net<RingMemory>,
    memory: RingMemory,
}

impl OpenFile {
    fn open() -> Result<Self, VhostError> {
        let memory = RingMemory::default();
        let net = Net::new(memory.clone()).map_err(|err| match err {
            vhost::Error::VhostOpen(source) => VhostError::Open(source),
            source => VhostError::Call { operation: "anything", source },
        })?;
        Ok(Self { net, memory })
    }
}

/// Files that no device uses at present. A VMM that has changed its user or its root folder may be
/// unable to open others. Clones share the files.
#[derive(Clone, Default)]
pub struct VhostFiles(Arc<Mutex<Vec<OpenFile>>>);

impl VhostFiles {
    /// Opens a file for each of `pairs` queue pairs, after a check that vhost-net is usable.
    pub fn open(pairs: u16) -> Result<Self, VhostError> {
        super::probe(&Self::default())?;
        let files = (0..pairs).map(|_| OpenFile::open()).collect::<Result<_, _>>()?;
        Ok(Self(Arc::new(Mutex::new(files))))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    fn take(&self) -> Result<OpenFile, VhostError> {
        let file = self.0.lock().pop();
        file.map_or_else(OpenFile::open, Ok)
    }
}

/// Files of a device that serve no pair at present. They are opened with the device, because a
/// driver activates the device on threads whose seccomp filters allow no open().
#[derive(Clone)]
pub(super) struct IdleFiles(Arc<FilesOfDevice>);

struct FilesOfDevice {
    files: Mutex<Vec<OpenFile>>,
    /// Receives the files when the device has ended.
    unused: VhostFiles,
}

impl IdleFiles {
    /// Takes a file for each of `pairs` queue pairs. Opens those that are missing.
    pub(super) fn take(pairs: u16, unused: &VhostFiles) -> Result<Self, VhostError> {
        let mut device = FilesOfDevice { files: Mutex::default(), unused: unused.clone() };
        for _ in 0..pairs {
            device.files.get_mut().push(unused.take()?);
        }
        Ok(Self(Arc::new(device)))
    }
}

impl Drop for FilesOfDevice {
    fn drop(&mut self) {
        self.unused.0.lock().append(self.files.get_mut());
    }
}

/// Returns the features that the kernel's vhost-net supports.
pub(super) fn features() -> Result<u64, VhostError> {
    OpenFile::open()?.net.get_features().map_err(call("a request for its features"))
}

struct KernelRings {
    /// `None` only while this value is dropped.
    file: Option<OpenFile>,
    /// Receives the file when this value is dropped.
    idle: IdleFiles,
    tap: File,
    /// Start addresses of the rings in this process. The kernel uses these addresses even if the
    /// table changes.
    ring_starts: Vec<u64>,
    /// Address space of the table and the rings. The address space must not be unmapped while the
    /// kernel may access it, because other memory of this process could then be placed there.
    reservations: Vec<Arc<Reservation>>,
}

/// Passes a queue pair to the kernel. The pair is not attached yet.
pub(super) fn connect(idle: &IdleFiles, setup: Setup<'_>) -> Result<Box<dyn Rings>, VhostError> {
    let Setup { regions, features, queues, kicks, calls, errors, tap } = setup;
    let table = Table::new(&regions.memory)?;
    let file = idle.0.files.lock().pop().ok_or(VhostError::NoFile)?;
    *file.memory.0.lock() = Arc::new(regions.memory.clone());
    let (idle, reservations) = (idle.clone(), regions.reservations.clone());
    // Returns the file if a later step fails.
    let mut rings =
        KernelRings { file: Some(file), idle, tap, ring_starts: Vec::new(), reservations };
    let net = rings.net();
    net.set_owner().map_err(call("an owner"))?;
    net.set_features(features & RING_FEATURES).map_err(call("the features"))?;
    net.set_mem_table(&table.regions()).map_err(call("the memory table"))?;
    let mut ring_starts = Vec::new();
    for index in QUEUES {
        ring_starts.extend(set_ring(net, &table, index, queues[index])?);
        net.set_vring_kick(index, kicks[index]).map_err(call("a notification event"))?;
        net.set_vring_call(index, calls[index]).map_err(call("an interrupt event"))?;
        net.set_vring_err(index, errors[index]).map_err(call("an error event"))?;
    }
    rings.ring_starts = ring_starts;
    Ok(Box::new(rings))
}

/// Passes the addresses of a ring, which the driver has set, to the kernel. Returns the start
/// addresses of the ring's parts in this process.
fn set_ring(
    net: &Net<RingMemory>,
    table: &Table,
    index: usize,
    queue: &Queue,
) -> Result<[u64; 3], VhostError> {
    let size = u64::from(queue.size());
    let (descriptors, available, used) =
        (queue.desc_table(), queue.avail_ring(), queue.used_ring());
    // The lengths of both rings include the event index at their end (virtio 1.3, 2.7.6 and 2.7.8).
    let starts = [
        table.find("descriptor table", descriptors, 16 * size)?,
        table.find("available ring", available, 6 + 2 * size)?,
        table.find("used ring", used, 6 + 8 * size)?,
    ];
    let config = VringConfigData {
        queue_max_size: queue.max_size(),
        queue_size: queue.size(),
        flags: 0,
        desc_table_addr: descriptors,
        used_ring_addr: used,
        avail_ring_addr: available,
        log_addr: None,
    };
    net.set_vring_num(index, queue.size()).map_err(call("a queue size"))?;
    net.set_vring_base(index, queue.next_avail()).map_err(call("the first index of a queue"))?;
    net.set_vring_addr(index, &config).map_err(call("the addresses of a queue"))?;
    Ok(starts)
}

impl KernelRings {
    fn net(&self) -> &Net<RingMemory> {
        &self.file.as_ref().expect("the file of a pair in use").net
    }
}

impl Drop for KernelRings {
    /// The reset ends all accesses of the kernel to guest memory (vhost_net_reset_owner), so that
    /// the reservations can be dropped. If the reset fails, closing the file ends them.
    fn drop(&mut self) {
        if let Some(file) = self.file.take()
            && file.net.reset_owner().is_ok()
        {
            *file.memory.0.lock() = Arc::default();
            self.idle.0.files.lock().push(file);
        }
    }
}

impl Rings for KernelRings {
    fn attach(&mut self) -> Result<(), VhostError> {
        QUEUES.into_iter().try_for_each(|index| {
            self.net().set_backend(index, Some(&self.tap)).map_err(call("a queue of the interface"))
        })
    }

    /// The kernel waits for requests in progress (vhost_net_set_backend takes the queue's mutex and
    /// flushes its thread). It returns frames that it had already taken from the interface. It
    /// retains its position in the available ring, and when it resumes, it reads its position in
    /// the used ring from memory (vhost_vq_init_access).
    fn detach(&mut self) -> Result<(), VhostError> {
        QUEUES.into_iter().try_for_each(|index| {
            self.net().set_backend(index, None).map_err(call("the removal of a queue"))
        })
    }

    fn set_regions(&mut self, regions: &Regions) -> Result<(), VhostError> {
        let table = Table::new(&regions.memory)?;
        self.net().set_mem_table(&table.regions()).map_err(call("the memory table"))?;
        self.reservations = reserved(&self.reservations, &regions.reservations, &self.ring_starts);
        Ok(())
    }
}

/// Returns the reservations that must exist while the kernel's table contains `new`: all of `new`,
/// and those of `old` that contain the start of a ring's part. The kernel accesses rings by their
/// original addresses.
fn reserved(
    old: &[Arc<Reservation>],
    new: &[Arc<Reservation>],
    ring_starts: &[u64],
) -> Vec<Arc<Reservation>> {
    let holds_a_ring = |old: &&Arc<Reservation>| {
        ring_starts.iter().any(|start| (old.addr()..old.addr() + old.len_bytes()).contains(start))
    };
    let is_new = |old: &Arc<Reservation>| new.iter().any(|new| Arc::ptr_eq(old, new));
    let retained = old.iter().filter(holds_a_ring).filter(|old| !is_new(old));
    new.iter().chain(retained).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_device_return_when_it_has_ended() {
        let unused = match VhostFiles::open(2) {
            Ok(files) => files,
            Err(error) => return eprintln!("skipped: {}", foreshore_types::chain(&error)),
        };
        let count = || unused.0.lock().len();
        let device = IdleFiles::take(1, &unused).unwrap();
        let large = IdleFiles::take(3, &unused).unwrap();
        assert_eq!((count(), device.0.files.lock().len(), large.0.files.lock().len()), (0, 1, 3));
        drop((device, large));
        assert_eq!(count(), 4);
    }

    #[test]
    fn reservation_of_a_ring_outlives_its_region() {
        let [ram, file, zone] =
            [(); 3].map(|()| Arc::new(Reservation::new(4 << 20, 2 << 20).unwrap()));
        let names = |retained: &[Arc<Reservation>]| {
            let all = [("ram", &ram), ("file", &file), ("zone", &zone)];
            let of = |one| all.iter().find(|(_, known)| Arc::ptr_eq(known, one)).unwrap().0;
            let mut names: Vec<_> = retained.iter().map(of).collect();
            names.sort_by_key(|name| all.iter().position(|(known, _)| known == name));
            names
        };
        let old = [ram.clone(), file.clone()];
        let last = file.addr() + file.len_bytes() - 1;
        for (new, rings, expected) in [
            (vec![ram.clone()], vec![ram.addr()], vec!["ram"]),
            (vec![ram.clone()], vec![ram.addr(), file.addr()], vec!["ram", "file"]),
            (vec![ram.clone()], vec![last], vec!["ram", "file"]),
            (vec![ram.clone()], vec![file.addr() + file.len_bytes()], vec!["ram"]),
            (
                vec![ram.clone(), file.clone(), zone.clone()],
                vec![file.addr()],
                vec!["ram", "file", "zone"],
            ),
            (vec![], vec![], vec![]),
        ] {
            assert_eq!(names(&reserved(&old, &new, &rings)), expected);
        }
    }

    #[test]
    fn error_without_the_device_names_it() {
        // If the device exists, its features must be readable.
        match features() {
            Ok(features) => assert_eq!(features & RING_FEATURES, RING_FEATURES),
            Err(err) => assert!(err.to_string().contains("/dev/vhost-net"), "{err}"),
        }
    }
}
