//! A disk in memory. Tests control the results of its steps and, if it has a ring, when the steps
//! end.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{BlockDevice, Done, Executor, Geometry, ResizeError, Step};
use crate::memory::view::GuestView;

/// Time limit of each wait, long enough even for a slow host.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// Call that the device makes to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Read,
    Write,
    Flush,
    /// Discard of this many bytes.
    Discard(u64),
    /// Zeroing of this many bytes.
    WriteZeroes(u64),
}

/// Function that runs before each call, while no lock of the disk is held. If it returns an error,
/// the call fails with this error.
type Hook = Arc<dyn Fn(Call) -> io::Result<()> + Send + Sync>;

pub(super) struct Fake {
    size_bytes: AtomicU64,
    /// Content of the first bytes of the disk. The rest of the disk reads as zeros, and writes to
    /// it are dropped.
    pub bytes: Mutex<Vec<u8>>,
    pub geometry: Geometry,
    hook: Mutex<Option<Hook>>,
    pub flushes: AtomicU64,
    /// True if the disk has changed since the last flush.
    pub dirty: AtomicBool,
    pub has_rings: bool,
    /// Number of queues that will be started without a ring even if `has_rings` is true.
    pub without_ring: AtomicUsize,
    rings: Mutex<Vec<Arc<RingSteps>>>,
}

pub(super) fn geometry() -> Geometry {
    Geometry {
        block_bytes: 512,
        physical_block_bytes: 4096,
        read_only: false,
        discard: true,
        unmap: true,
    }
}

pub(super) fn io_error() -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::EIO))
}

impl Fake {
    pub(super) fn new(len: usize) -> Self {
        Self::with(len, geometry())
    }

    pub(super) fn with(len: usize, geometry: Geometry) -> Self {
        Self {
            size_bytes: AtomicU64::new(len as u64),
            bytes: Mutex::new(vec![0; len]),
            geometry,
            hook: Mutex::default(),
            flushes: AtomicU64::new(0),
            dirty: AtomicBool::new(false),
            has_rings: false,
            without_ring: AtomicUsize::new(0),
            rings: Mutex::default(),
        }
    }

    /// Creates a disk of this size that stores nothing.
    pub(super) fn without_memory(size_bytes: u64) -> Self {
        Self { size_bytes: AtomicU64::new(size_bytes), ..Self::new(0) }
    }

    /// Creates a disk whose queues have rings. [`Fake::ring`] returns the rings.
    pub(super) fn with_rings(len: usize) -> Self {
        Self { has_rings: true, ..Self::new(len) }
    }

    /// Replaces the hook, which runs before each call.
    pub(super) fn set_hook(&self, hook: impl Fn(Call) -> io::Result<()> + Send + Sync + 'static) {
        *self.hook.lock() = Some(Arc::new(hook));
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Relaxed)
    }

    /// Returns the `nth` ring that was started. A device starts one ring per queue, in the order of
    /// the queues.
    pub(super) fn ring(&self, nth: usize) -> Arc<RingSteps> {
        Arc::clone(&self.rings.lock()[nth])
    }

    pub(super) fn ring_count(&self) -> usize {
        self.rings.lock().len()
    }

    fn call(&self, call: Call) -> io::Result<()> {
        let hook = self.hook.lock().clone();
        hook.map_or(Ok(()), |hook| hook(call))
    }

    /// Checks that a transfer does not extend beyond the end of the disk.
    fn assert_inside(&self, offset_bytes: u64, len_bytes: u64) {
        let size_bytes = self.size_bytes();
        assert!(
            offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= size_bytes),
            "{offset_bytes}+{len_bytes} of {size_bytes} bytes"
        );
    }

    fn change(&self, offset_bytes: u64, change: impl FnOnce(&mut [u8])) {
        self.dirty.store(true, Ordering::Relaxed);
        change(self.bytes.lock().get_mut(offset_bytes as usize..).unwrap_or_default());
    }

    fn fill(&self, range: DiskRange, byte: u8) {
        self.change(range.offset_bytes(), |bytes| {
            bytes.iter_mut().take(range.len_bytes() as usize).for_each(|at| *at = byte);
        });
    }
}

impl BlockDevice for Fake {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        self.assert_inside(offset_bytes, data.len() as u64);
        self.call(Call::Read)?;
        let bytes = self.bytes.lock();
        let stored = bytes.get(offset_bytes as usize..).unwrap_or_default();
        data.fill(0);
        data.iter_mut().zip(stored).for_each(|(to, from)| *to = *from);
        Ok(())
    }
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.assert_inside(offset_bytes, data.len() as u64);
        self.call(Call::Write)?;
        self.change(offset_bytes, |bytes| {
            bytes.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        });
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.call(Call::Flush)?;
        self.dirty.store(false, Ordering::Relaxed);
        Ok(())
    }
    fn discard(&self, range: DiskRange) -> io::Result<()> {
        self.assert_inside(range.offset_bytes(), range.len_bytes());
        self.call(Call::Discard(range.len_bytes()))?;
        self.fill(range, 0xdd);
        Ok(())
    }
    fn write_zeroes(&self, range: DiskRange, _: Unmap) -> io::Result<()> {
        self.assert_inside(range.offset_bytes(), range.len_bytes());
        self.call(Call::WriteZeroes(range.len_bytes()))?;
        self.fill(range, 0);
        Ok(())
    }
    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.size_bytes.store(wanted_bytes, Ordering::Relaxed);
        self.bytes.lock().resize(wanted_bytes as usize, 0);
        Ok(())
    }
    fn start(self: Arc<Self>, _: u16) -> Option<Box<dyn Executor>> {
        let take_one = |left: usize| left.checked_sub(1);
        let is_refused =
            self.without_ring.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take_one).is_ok();
        (self.has_rings && !is_refused).then(|| {
            let steps = Arc::new(RingSteps::default());
            self.rings.lock().push(Arc::clone(&steps));
            let event = steps.event.try_clone().unwrap();
            Box::new(FakeRing { steps, event, added: Vec::new() }) as Box<dyn Executor>
        })
    }
}

/// Steps in a ring. Tests end them in any order.
pub(super) struct RingSteps {
    state: Mutex<State>,
    changed: Condvar,
    event: EventFd,
    is_given_up: AtomicBool,
    /// View that is locked exclusively during each call of the ring, as a plug would do.
    view: Mutex<Option<GuestView>>,
    /// Largest number of steps that were in progress concurrently.
    pub max_in_flight: AtomicUsize,
}

#[derive(Default)]
struct State {
    in_flight: Vec<(usize, Step)>,
    /// Steps that [`RingSteps::end`] has removed from `in_flight` and not yet added to `done`.
    ending: usize,
    done: VecDeque<Done>,
    is_armed: bool,
}

impl Default for RingSteps {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            event: EventFd::new(EFD_NONBLOCK).unwrap(),
            is_given_up: AtomicBool::new(false),
            view: Mutex::default(),
            max_in_flight: AtomicUsize::new(0),
        }
    }
}

impl RingSteps {
    /// Waits until at least `count` steps are in progress. Returns the number of steps in progress.
    pub(super) fn wait_for(&self, count: usize) -> usize {
        let mut state = self.state.lock();
        let few = |state: &mut State| state.in_flight.len() < count;
        let waited = self.changed.wait_while_for(&mut state, few, TIMEOUT);
        assert!(!waited.timed_out(), "{} steps, not {count}", state.in_flight.len());
        state.in_flight.len()
    }

    /// Ends the step with index `nth` among the steps in progress, in the order in which they
    /// began. If `result` is a success, `fake` executes the step.
    pub(super) fn end(&self, fake: &Fake, nth: usize, result: io::Result<()>) {
        let mut state = self.state.lock();
        let (token, mut step) = state.in_flight.remove(nth);
        state.ending += 1;
        drop(state);
        let result = result.and_then(|()| step.execute(fake));
        let mut state = self.state.lock();
        state.ending -= 1;
        state.done.push_back(Done { token, step, result });
        if state.is_armed {
            self.event.write(1).unwrap();
        }
        self.changed.notify_all();
    }

    /// Simulates a plug during each call of the ring. The plug waits until no guard is held.
    pub(super) fn plug_during_calls(&self, view: GuestView) {
        *self.view.lock() = Some(view);
    }

    fn plug(&self) {
        if let Some(view) = &*self.view.lock() {
            drop(view.exclusive());
        }
    }

    /// Makes the ring report that the kernel no longer accepts steps from it.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }
}

struct FakeRing {
    steps: Arc<RingSteps>,
    event: EventFd,
    added: Vec<(usize, Step)>,
}

impl Executor for FakeRing {
    fn add(&mut self, token: usize, step: Step) {
        self.steps.plug();
        self.added.push((token, step));
    }
    fn begin(&mut self) -> bool {
        self.steps.plug();
        if !self.added.is_empty() {
            let mut state = self.steps.state.lock();
            state.is_armed = false;
            state.in_flight.append(&mut self.added);
            self.steps.max_in_flight.fetch_max(state.in_flight.len(), Ordering::Relaxed);
            self.steps.changed.notify_all();
        }
        false
    }
    fn next_done(&mut self) -> Option<Done> {
        self.steps.plug();
        self.steps.state.lock().done.pop_front()
    }
    fn arm(&mut self) -> bool {
        self.steps.plug();
        let mut state = self.steps.state.lock();
        state.is_armed = true;
        !state.done.is_empty()
    }
    fn event(&self) -> &EventFd {
        &self.event
    }
    fn batch(&self) -> usize {
        64
    }
    fn is_given_up(&self) -> bool {
        self.steps.is_given_up.load(Ordering::Relaxed)
    }
    /// Waits until the test has ended all steps in progress.
    fn drain(&mut self) -> Vec<Done> {
        let mut state = self.steps.state.lock();
        let any = |state: &mut State| !state.in_flight.is_empty() || state.ending > 0;
        let waited = self.steps.changed.wait_while_for(&mut state, any, TIMEOUT);
        assert!(!waited.timed_out(), "{} steps are under way", state.in_flight.len());
        state.done.drain(..).collect()
    }
}
