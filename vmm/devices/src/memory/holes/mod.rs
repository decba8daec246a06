//! Holes of a thin volume that is mapped into guest memory.
//!
//! Holes are mapped as zeros that the kernel protects. A store there waits until this process has
//! allocated a chunk of the pool, mapped it in place of the zeros, and woken the store. The owner
//! word of the chunk is durable before that, and a chunk without data reads as zeros, so a crash at
//! any time is harmless. If the pool is full, the vCPU waits outside KVM (`store_waits`).
//!
//! The vCPU that waits may hold a lock of the guest, or one of KVM. Therefore, the thread that
//! fills holes takes no lock of guest memory, of KVM slots or of the VM. Another thread allocates
//! chunks in advance, so that most stores wait only for the mapping. It does not exceed the reserve
//! of the volume, because these chunks could otherwise be the space that a store lacks.

mod chunk_access;
mod emulated_stores;
mod stock;
mod store_waits;
#[cfg(test)]
mod tests;
pub(super) mod userfault;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::{Condvar, Mutex};
use pmem_volume::media::MediaError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

pub use self::chunk_access::ChunkAccess;
use self::chunk_access::{Orders, Withdrawn};
pub use self::emulated_stores::EmulatedStores;
use self::stock::{Step, Stock, Taken};
pub use self::store_waits::StoreWaits;
pub use self::userfault::{UserfaultDevice, Userfaults};
use super::backing::{Access, Reservation};
use crate::log::rate_limited;
use crate::metrics::LatencyHistogram;
use crate::pool::{CHUNK_BYTES, PmPool, PoolVolume};

/// Delay before another attempt to allocate a chunk in a full pool.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Minimum interval between two reports of a full pool.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Counters of the holes of a volume.
#[derive(Debug, Default)]
pub struct HoleMetrics {
    /// Times from the report of a store to its repetition.
    pub fills: LatencyHistogram,
    /// Stores for which no chunk was allocated in advance.
    pub unstocked: AtomicU64,
    /// Chunks that are allocated in advance.
    pub stocked: AtomicU64,
    /// Bytes that the guest's trim commands have released.
    pub released_bytes: AtomicU64,
    /// Stores that have found no space in the pool.
    pub full_writes: AtomicU64,
    /// Stores that wait for space in the pool.
    pub waiting: AtomicU64,
}

impl HoleMetrics {
    /// Returns `Some(false)` while stores wait for space. The thread that fills holes retries them,
    /// so `None` follows when the pool has space.
    pub fn has_space_for_waiting(&self) -> Option<bool> {
        (self.waiting.load(Ordering::SeqCst) > 0).then_some(false)
    }
}

/// Prevents the guest from continuing, for a reason.
pub type OnFailure = Arc<dyn Fn(String) + Send + Sync>;

/// Thin volume that the guest may write, and actions for stores that cannot be carried out.
pub struct HoleSource {
    pub device: Arc<UserfaultDevice>,
    pub pool: Arc<dyn PmPool>,
    pub volume: Arc<dyn PoolVolume>,
    pub metrics: Arc<HoleMetrics>,
    /// Stores of all volumes of the VM that wait for space.
    pub waits: Arc<StoreWaits>,
    /// Called at most once a second while a store waits for space.
    pub on_full: Box<dyn Fn() + Send>,
    /// Called with the reason when the first store does not reach the pool. Must prevent the guest
    /// from continuing.
    pub on_failure: OnFailure,
}

/// Volume with chunks that are allocated before the guest stores into them.
struct Stocked {
    volume: Arc<dyn PoolVolume>,
    metrics: Arc<HoleMetrics>,
    /// Held while a chunk is allocated.
    allocating: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stock: Stock,
    is_ended: bool,
    #[cfg(test)]
    broken: Option<Broken>,
}

/// Broken variant.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// Withdrawn chunks stay in the stock.
    KeepsWithdrawn,
    /// Chunks are allocated in advance beyond the reserve.
    IgnoresReserve,
    /// Stores that find no space reach memory of this process.
    IgnoresFull,
    /// Stores that find no space wait in the kernel.
    WaitsInKernel,
    /// Stores into a hole fail even after its wait was forgotten.
    FailsAfterWait,
}

/// Threads that fill the holes of a mapped volume. They end when the value is dropped. Drop it only
/// when the guest no longer accesses the range.
pub struct HoleFiller {
    end: Arc<OwnedFd>,
    orders: Arc<Orders>,
    stocked: Arc<Stocked>,
    threads: Vec<JoinHandle<()>>,
}

impl HoleFiller {
    /// Starts to fill holes of the volume, which is mapped at the start of `reservation`. Only the
    /// chunks in `is_mapped` are present. The others were mapped by `userfaults`.
    pub fn start(
        source: HoleSource,
        userfaults: Userfaults,
        reservation: Arc<Reservation>,
        is_mapped: Vec<bool>,
        access: Access,
    ) -> io::Result<Self> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let stocked = Arc::new(Stocked {
            volume: Arc::clone(&source.volume),
            metrics: Arc::clone(&source.metrics),
            allocating: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let orders = Arc::new(Orders::new()?);
        let server = Server {
            end: Arc::clone(&end),
            orders: Arc::clone(&orders),
            withdrawn: Withdrawn::new(),
            stocked: Arc::clone(&stocked),
            source,
            userfaults,
            reservation,
            is_mapped,
            access,
            reported: None,
            resumes: 0,
            has_failed: false,
        };
        // After an error, dropping this value ends the first thread.
        let mut filler = Self { end, orders, stocked, threads: Vec::new() };
        let stocked = Arc::clone(&filler.stocked);
        let threads = &mut filler.threads;
        threads.push(spawn_confined(ThreadKind::Scrubber, "_stock", move || stocked.run())?);
        threads.push(spawn_confined(ThreadKind::Holes, "_holes", move || server.run())?);
        Ok(filler)
    }

    /// Returns a handle that takes access to chunks from the guest.
    pub fn chunk_access(&self) -> ChunkAccess {
        ChunkAccess(Arc::clone(&self.orders))
    }
}

impl Drop for HoleFiller {
    fn drop(&mut self) {
        rustix::io::write(&*self.end, &1u64.to_ne_bytes()).expect("an open eventfd");
        self.stocked.state.lock().is_ended = true;
        self.stocked.changed.notify_all();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
        while self.stocked.release_oldest() {}
    }
}

impl Stocked {
    /// Carries out the steps of the stock.
    fn run(&self) {
        while let Some(step) = self.next_step() {
            let succeeded = match step {
                Step::Provision(index) => self.provision_within_reserve(index),
                Step::Release(index) => self.volume.release(index).is_ok(),
            };
            self.update(|stock| stock.finish(step, succeeded));
        }
    }

    /// Allocates a chunk if it is guaranteed. Returns true if it is allocated.
    fn provision_within_reserve(&self, index: u32) -> bool {
        // Otherwise, a store could take the last guaranteed chunk after the check.
        let _no_other = self.allocating.lock();
        let has_reserve = self.volume.allocated_bytes() < self.volume.reserve_bytes();
        #[cfg(test)]
        let has_reserve = has_reserve || self.is_broken(Broken::IgnoresReserve);
        has_reserve && self.volume.provision(index).is_ok()
    }

    /// Returns the offset of a chunk in the pool's file, which is allocated if it is not in the
    /// stock.
    fn provision(&self, index: u32, is_stocked: bool) -> Result<u64, MediaError> {
        let _no_other = (!is_stocked).then(|| self.allocating.lock());
        self.volume.provision(index)
    }

    /// Releases the chunk that was stocked first. Returns false if the stock is empty.
    fn release_oldest(&self) -> bool {
        let Some(index) = self.update(Stock::pop_oldest) else { return false };
        // If the pool has failed, the chunk stays allocated, and reads as zeros.
        let _ = self.volume.release(index);
        true
    }

    /// Waits for the next step. `None` at the end.
    fn next_step(&self) -> Option<Step> {
        let mut state = self.state.lock();
        loop {
            if state.is_ended {
                return None;
            }
            if let Some(step) = state.stock.begin() {
                return Some(step);
            }
            self.changed.wait(&mut state);
        }
    }

    fn update<T>(&self, change: impl FnOnce(&mut Stock) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state.stock);
        self.metrics.stocked.store(state.stock.len() as u64, Ordering::Relaxed);
        self.changed.notify_all();
        result
    }

    /// Removes the chunk at `index` from the stock for a store, so that it is not released. Returns
    /// false if it was not in the stock.
    fn take(&self, index: u32) -> bool {
        loop {
            match self.update(|stock| stock.take(index)) {
                Taken::Stocked => return true,
                Taken::Missing => return false,
                Taken::Releasing => self.wait_for_release(index),
            }
        }
    }

    /// Removes the chunk at `index` from the stock, without a store.
    fn forget(&self, index: u32) {
        #[cfg(test)]
        if self.is_broken(Broken::KeepsWithdrawn) {
            return;
        }
        self.update(|stock| stock.forget(index));
        self.wait_for_release(index);
    }

    #[cfg(test)]
    fn is_broken(&self, variant: Broken) -> bool {
        self.state.lock().broken == Some(variant)
    }

    fn wait_for_release(&self, index: u32) {
        let is_being_released = |state: &mut State| state.stock.is_releasing(index);
        self.changed.wait_while(&mut self.state.lock(), is_being_released);
    }
}

/// Hole into which stores wait.
struct Store {
    index: u32,
    since: Instant,
    /// Set when the lack of a stocked chunk is counted.
    is_counted: bool,
    /// Time of the next attempt of a store that has found no space.
    retry_at: Option<Instant>,
}

impl Store {
    fn new(index: u32) -> Self {
        Self { index, since: Instant::now(), is_counted: false, retry_at: None }
    }
}

/// Thread that fills holes.
struct Server {
    end: Arc<OwnedFd>,
    orders: Arc<Orders>,
    withdrawn: Withdrawn,
    stocked: Arc<Stocked>,
    source: HoleSource,
    userfaults: Userfaults,
    reservation: Arc<Reservation>,
    /// Chunks that are mapped from the pool or withdrawn. The others are holes, for which the stock
    /// may allocate chunks.
    is_mapped: Vec<bool>,
    access: Access,
    /// Time of the last report of a full pool.
    reported: Option<Instant>,
    /// Value of [`StoreWaits::resumes`] at the last check.
    resumes: u64,
    /// Set when a store has not reached the pool.
    has_failed: bool,
}

/// Reason why a store does not reach the pool.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error(transparent)]
    Media(MediaError),
    #[error("cannot map its chunk")]
    Map(#[source] io::Error),
}

impl Server {
    fn run(mut self) {
        let mut waiting: Vec<Store> = Vec::new();
        while self.wait(waiting.is_empty()) {
            self.obey();
            loop {
                match self.userfaults.next() {
                    Ok(Some(address)) => {
                        let index = ((address - self.reservation.addr()) / CHUNK_BYTES) as u32;
                        // Several vCPUs may store into one hole.
                        if waiting.iter().all(|store| store.index != index) {
                            waiting.push(Store::new(index));
                        }
                    }
                    Ok(None) => break,
                    Err(err) => {
                        rate_limited!(error, %err, "Cannot read faults of a thin volume");
                        break;
                    }
                }
            }
            self.forget_waits_after_resume(&mut waiting);
            waiting.retain_mut(|store| !self.serve(store));
        }
        waiting.iter().filter(|store| store.retry_at.is_some()).for_each(|_| self.end_wait());
        self.orders.close();
    }

    /// Waits for stores, or for the next attempt to serve those that wait. Returns false at the
    /// end.
    fn wait(&self, is_idle: bool) -> bool {
        let retry = Timespec::try_from(RETRY_INTERVAL).expect("a short time");
        let mut fds = [self.userfaults.as_fd(), self.end.as_fd(), self.orders.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, (!is_idle).then_some(&retry)) {
            Ok(_) => fds[1].revents().is_empty(),
            Err(rustix::io::Errno::INTR) => true,
            Err(err) => unreachable!("poll of own descriptors: {err}"),
        }
    }

    /// Fills the hole, and repeats the store. Returns false if the store waits for space.
    fn serve(&mut self, store: &mut Store) -> bool {
        let at = store.index as usize;
        let is_early = store.retry_at.is_some_and(|at| Instant::now() < at);
        if is_early || self.withdrawn.contains_key(&store.index) {
            return false;
        }
        if !self.is_mapped[at] {
            // At each attempt, because other stores may have added the chunk to the stock since.
            let is_stocked = self.stocked.take(store.index);
            if !is_stocked && !std::mem::replace(&mut store.is_counted, true) {
                self.source.metrics.unstocked.fetch_add(1, Ordering::Relaxed);
            }
            match self.fill_before_stock(store.index, is_stocked) {
                // The stock is filled after the store, so that the store gets the reserve first.
                Ok(()) => self.stocked.update(|stock| {
                    stock.expect_after(store.index, is_stocked, &self.is_mapped);
                }),
                Err(FillError::Media(MediaError::Full { .. })) => match self.begin_wait(store) {
                    Ok(()) => return false,
                    Err(err) => self.give_up(store.index, &FillError::Map(err)),
                },
                Err(err) => self.give_up(store.index, &err),
            }
            self.is_mapped[at] = true;
            self.source.metrics.fills.observe(store.since.elapsed());
        }
        if store.retry_at.is_some() {
            self.end_wait();
        }
        self.wake(store.index);
        true
    }

    /// Lets stores into a hole fail, so that they do not wait in the kernel.
    fn begin_wait(&mut self, store: &mut Store) -> io::Result<()> {
        if store.retry_at.replace(Instant::now() + RETRY_INTERVAL).is_none() {
            self.source.metrics.full_writes.fetch_add(1, Ordering::Relaxed);
            self.source.metrics.waiting.fetch_add(1, Ordering::SeqCst);
            self.source.waits.begin(|| self.allow_stores(store.index, false))?;
            self.wake(store.index);
        }
        self.report_full();
        Ok(())
    }

    /// Sets whether stores into a hole are reported or fail.
    fn allow_stores(&self, index: u32, allow: bool) -> io::Result<()> {
        let offset = u64::from(index) * CHUNK_BYTES;
        #[cfg(test)]
        match (self.stocked.state.lock().broken, allow) {
            (Some(Broken::IgnoresFull), false) => {
                return self.reservation.map_anonymous(offset, CHUNK_BYTES);
            }
            (Some(Broken::WaitsInKernel), false) | (Some(Broken::FailsAfterWait), true) => {
                return Ok(());
            }
            _ => {}
        }
        self.reservation.allow_stores(offset, CHUNK_BYTES, allow)
    }

    fn end_wait(&self) {
        self.source.waits.end();
        self.source.metrics.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// After the vCPUs were resumed, stores into holes without space are reported again, so that
    /// none is retried that no vCPU repeats.
    fn forget_waits_after_resume(&mut self, waiting: &mut Vec<Store>) {
        let resumes = self.source.waits.resumes();
        if std::mem::replace(&mut self.resumes, resumes) == resumes {
            return;
        }
        waiting.retain(|store| {
            // After an error, the store is retried.
            let is_forgotten =
                store.retry_at.is_some() && self.allow_stores(store.index, true).is_ok();
            if is_forgotten {
                self.end_wait();
            }
            !is_forgotten
        });
    }

    /// Repeats the stores that wait in the kernel for a chunk.
    fn wake(&self, index: u32) {
        let start = self.reservation.addr() + u64::from(index) * CHUNK_BYTES;
        if let Err(err) = self.userfaults.wake(start, CHUNK_BYTES) {
            rate_limited!(error, %err, "Cannot wake a store to a thin volume");
        }
    }

    /// Fills a hole. If the pool is full, the hole gets the space of the stock.
    fn fill_before_stock(&self, index: u32, is_stocked: bool) -> Result<(), FillError> {
        loop {
            match self.fill(index, is_stocked) {
                Err(FillError::Media(MediaError::Full { .. })) if self.stocked.release_oldest() => {
                }
                filled => return filled,
            }
        }
    }

    fn fill(&self, index: u32, is_stocked: bool) -> Result<(), FillError> {
        let file_offset = self.stocked.provision(index, is_stocked).map_err(FillError::Media)?;
        self.map(index, file_offset).map_err(FillError::Map)
    }

    fn map(&self, index: u32, file_offset: u64) -> io::Result<()> {
        let (offset, file) = (u64::from(index) * CHUNK_BYTES, self.source.pool.file());
        self.reservation.map_file(offset, CHUNK_BYTES, file, file_offset, self.access)
    }

    fn report_full(&mut self) {
        let now = Instant::now();
        if self.reported.is_none_or(|at| now >= at + REPORT_INTERVAL) {
            self.reported = Some(now);
            (self.source.on_full)();
        }
    }

    /// Lets the store change memory of this process only, because a vCPU that waits forever could
    /// not be stopped. Before that, prevents the guest from continuing.
    fn give_up(&mut self, index: u32, err: &FillError) {
        let reason = foreshore_types::chain(err);
        rate_limited!(error, index, reason, "Store to a hole of a thin volume failed");
        self.fail(reason);
        let offset = u64::from(index) * CHUNK_BYTES;
        if let Err(err) = self.reservation.map_anonymous(offset, CHUNK_BYTES) {
            rate_limited!(error, index, %err, "Cannot map memory in place of a chunk");
        }
    }

    /// Prevents the guest from continuing. This takes time if a vCPU waits for another store, so
    /// later failures do not repeat it.
    fn fail(&mut self, reason: String) {
        if !std::mem::replace(&mut self.has_failed, true) {
            (self.source.on_failure)(reason);
        }
    }
}
