//! vCPU thread, which runs the guest, handles exits, and stops on request.
//!
//! To stop a vCPU in the guest, two steps are needed in this order (KVM API, 5: `immediate_exit`):
//! 1. Set `immediate_exit` in the vCPU's shared page, so that a later KVM_RUN returns immediately.
//! 2. Send the thread a signal, so that a KVM_RUN in progress returns with EINTR.
//!
//! Without the first step, a signal that arrives just before KVM_RUN would be lost.

use std::os::unix::thread::JoinHandleExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use foreshore_devices::bus::Bus;
use foreshore_devices::entry_inhibitor::{self, EntryInhibitor};
use foreshore_devices::log::rate_limited;
use foreshore_devices::memory::holes::StoreWaits;
use kvm_bindings::{KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, kvm_run};
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex};
use rustix::thread::gettid;
use thiserror::Error;
use tracing::{debug, error};
use vmm_sys_util::signal::{Killable, SIGRTMIN};

use super::CpuError;
use super::next_step::{Next, next_after};
use super::placement::{self, Cores};
use super::ports;
use super::state::Fresh;

/// Event that the vCPU thread cannot handle itself.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum VcpuEvent {
    /// The vCPU shut down because it could not deliver an exception.
    #[error("triple fault of vCPU {index} at RIP {rip:#x}")]
    TripleFault { index: u8, rip: u64 },
    /// The guest accessed a part of a memory slot to which no accessible memory is mapped. KVM_RUN
    /// then fails with EFAULT. Linux 6.1 and 6.12 do not report the accessed address.
    #[error("unplugged-access: vCPU {index} touched memory that is not plugged, at RIP {rip:#x}")]
    UnpluggedAccess {
        index: u8,
        /// Address of the instruction in the guest.
        rip: u64,
    },
    #[error("vCPU {index} cannot continue: {what}")]
    Failed { index: u8, what: String },
}

/// Receiver of vCPU events. The receiver is called on vCPU threads.
pub(crate) type EventSink = Arc<dyn Fn(VcpuEvent) + Send + Sync>;

/// Maximum number of KVM_RUN calls to complete the instruction at which a vCPU stopped. KVM returns
/// from a repeated instruction after 1,024 iterations.
const MOST_ROUNDS: usize = 4096;

/// Buses and callbacks of a vCPU thread.
#[derive(Clone)]
pub(crate) struct Surroundings {
    pub ports: Arc<Bus>,
    pub mmio: Arc<Bus>,
    /// Receives events that the vCPU thread cannot handle.
    pub events: EventSink,
    pub inhibitor: Arc<EntryInhibitor>,
    /// Checks whether guest memory is lost, and returns true if it is. If so, guest entry is
    /// inhibited and the VM task is notified.
    pub memory_is_lost: Arc<dyn Fn() -> bool + Send + Sync>,
    pub store_waits: Arc<StoreWaits>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Run,
    Pause,
    Stop,
}

/// Returns true if the vCPU must not enter the guest.
fn wanted_waits(wanted: Wanted, inhibited: bool) -> bool {
    match wanted {
        Wanted::Run => inhibited,
        Wanted::Pause => true,
        Wanted::Stop => false,
    }
}

struct Shared {
    wanted: Mutex<Wanted>,
    /// True while the thread waits outside the guest, and after it has ended. Changed only while
    /// `wanted` is locked.
    is_out: AtomicBool,
    changed: Condvar,
    inhibitor: Arc<EntryInhibitor>,
    /// True if the thread has waited since it last ran the guest. Before the next entry, KVM then
    /// tells the guest that it was paused.
    has_waited: AtomicBool,
    /// True if an NMI must be delivered before the next guest entry.
    nmi: AtomicBool,
    /// True if a reset to the initial state is pending. Changed only while `wanted` is locked.
    afresh: AtomicBool,
    /// `immediate_exit` byte in the shared page. `None` once the thread no longer uses the page.
    immediate_exit: Mutex<Option<ImmediateExit>>,
}

struct ImmediateExit(NonNull<u8>);

// SAFETY: any thread may write the byte while it holds the mutex around the pointer. The thread
// that owns the mapping removes the pointer under the same mutex before unmapping the page.
unsafe impl Send for ImmediateExit {}

impl Shared {
    /// Creates the state of a paused vCPU.
    fn new(inhibitor: Arc<EntryInhibitor>) -> Self {
        Self {
            wanted: Mutex::new(Wanted::Pause),
            is_out: AtomicBool::new(true),
            changed: Condvar::new(),
            inhibitor,
            has_waited: AtomicBool::new(false),
            nmi: AtomicBool::new(false),
            afresh: AtomicBool::new(false),
            immediate_exit: Mutex::new(None),
        }
    }

    /// Waits while the vCPU is paused or guest entry is inhibited. The wait also ends if a paused
    /// vCPU must be reset. Returns false if the thread must end.
    fn wait_until_wanted(&self) -> bool {
        let mut wanted = self.wanted.lock();
        // Releasing the inhibitor does not need to notify `changed`. The vCPU is paused before the
        // release, and the next request notifies `changed`.
        while wanted_waits(*wanted, self.inhibitor.is_set()) && !self.may_begin_afresh() {
            self.is_out.store(true, Ordering::Relaxed);
            self.has_waited.store(true, Ordering::Relaxed);
            self.changed.notify_all();
            self.changed.wait(&mut wanted);
        }
        self.is_out.store(false, Ordering::Relaxed);
        if *wanted == Wanted::Run {
            // The byte is cleared under the lock, so that a later request sets it again.
            self.set_immediate_exit(0);
        }
        *wanted != Wanted::Stop
    }

    /// Returns true if a reset is pending and can be done now. A reset enters KVM, which is
    /// inhibited while guest memory is lost.
    fn may_begin_afresh(&self) -> bool {
        self.afresh.load(Ordering::SeqCst) && !self.inhibitor.is_set()
    }

    fn set_afresh(&self, afresh: bool) {
        let _wanted = self.wanted.lock();
        self.afresh.store(afresh, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Waits until a pending reset has been done. Returns false if it has not been done by
    /// `deadline`.
    fn wait_until_fresh(&self, deadline: Instant) -> bool {
        let mut wanted = self.wanted.lock();
        // The inhibitor may have been released since the thread checked it.
        self.changed.notify_all();
        while self.afresh.load(Ordering::SeqCst) {
            if self.changed.wait_until(&mut wanted, deadline).timed_out() {
                return !self.afresh.load(Ordering::SeqCst);
            }
        }
        true
    }

    fn want(&self, wanted: Wanted) {
        *self.wanted.lock() = wanted;
        self.changed.notify_all();
    }

    /// Waits until the vCPU is outside the guest, or until a later request replaces the pause.
    fn wait_until_out(&self) {
        let mut wanted = self.wanted.lock();
        while *wanted == Wanted::Pause && !self.is_out.load(Ordering::Relaxed) {
            self.changed.wait(&mut wanted);
        }
    }

    /// Clears a pending NMI. Returns true if one was pending.
    fn take_nmi(&self) -> bool {
        self.nmi.swap(false, Ordering::SeqCst)
    }

    fn end(&self) {
        self.immediate_exit.lock().take();
        let _wanted = self.wanted.lock();
        self.is_out.store(true, Ordering::Relaxed);
        self.afresh.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Pauses a vCPU that cannot continue, unless it was requested to end in the meantime. In that
    /// case, the requester already waits for the thread.
    fn park(&self) {
        let mut wanted = self.wanted.lock();
        if *wanted == Wanted::Run {
            *wanted = Wanted::Pause;
        }
    }

    fn set_immediate_exit(&self, value: u8) {
        if let Some(byte) = self.immediate_exit.lock().as_ref() {
            // SAFETY: while the pointer is present, the page is mapped (see `Send` above). The
            // kernel only reads the byte.
            unsafe { byte.0.write_volatile(value) };
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// Host CPUs that the thread may run on; empty if it may run on any.
    pub host_cpus: Vec<usize>,
    pub cores: Cores,
}

/// Pause of a vCPU that has been requested.
pub(crate) struct Pausing(Arc<Shared>);

impl Pausing {
    /// Pause of a vCPU that is not running.
    #[cfg(test)]
    pub(crate) fn over() -> Self {
        Self(Arc::new(Shared::new(Arc::default())))
    }

    /// Waits until the vCPU has left the guest and completed its exit, or until a later request
    /// replaces the pause.
    pub(crate) fn wait(self) {
        self.0.wait_until_out();
    }
}

/// vCPU with its thread. Dropping it stops the thread.
pub(crate) struct Vcpu {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    thread_id: i32,
}

/// Thread for a vCPU that does not exist yet. Dropping it ends the thread.
///
/// The thread is started before the vCPU is created. If starting it fails, no vCPU is left in KVM,
/// which cannot remove vCPUs.
pub(crate) struct VcpuThread {
    index: u8,
    thread: JoinHandle<()>,
    thread_id: i32,
    runner: mpsc::Sender<Runner>,
}

impl VcpuThread {
    pub(crate) fn start(index: u8, placement: Placement) -> Result<Self, CpuError> {
        entry_inhibitor::install_handler().map_err(CpuError::Signal)?;
        let Placement { host_cpus, cores } = placement;
        let (runner, given) = mpsc::channel::<Runner>();
        let (started, start) = mpsc::channel();
        // libvirt searches for vCPU threads by this name when it pins them.
        let work = move || {
            // The send fails if pinning has failed.
            let _ = started.send(gettid().as_raw_nonzero().get());
            cores.claim(index);
            // If creating the vCPU failed, the channel is closed without a vCPU.
            given.into_iter().for_each(Runner::run);
        };
        let thread = spawn_confined(ThreadKind::Vcpu, format!("vcpu{index}"), work)
            .map_err(|source| CpuError::Thread { index, source })?;
        placement::pin(thread.as_pthread_t(), index, &host_cpus)?;
        let thread_id = start.recv().expect("the thread sends its ID first");
        Ok(Self { index, thread, thread_id, runner })
    }

    /// Passes the vCPU to its thread. It is paused until [`Vcpu::resume`].
    ///
    /// `fresh` is the initial state for [`Vcpu::begin_afresh`], or `None` for a vCPU that cannot be
    /// reset.
    pub(crate) fn run(self, fd: VcpuFd, fresh: Option<Fresh>, surroundings: Surroundings) -> Vcpu {
        let Self { index, thread, thread_id, runner } = self;
        let Surroundings { ports, mmio, events, inhibitor, memory_is_lost, store_waits } =
            surroundings;
        let shared = Arc::new(Shared::new(inhibitor));
        let shared_too = Arc::clone(&shared);
        let vcpu = Runner {
            fd,
            index,
            fresh,
            ports,
            mmio,
            events,
            memory_is_lost,
            store_waits,
            shared: shared_too,
        };
        assert!(runner.send(vcpu).is_ok(), "the thread waits for it");
        Vcpu { shared, thread: Some(thread), thread_id }
    }
}

impl Vcpu {
    pub(crate) fn thread_id(&self) -> i32 {
        self.thread_id
    }

    fn set(&self, wanted: Wanted) {
        self.shared.want(wanted);
        if wanted != Wanted::Run {
            self.interrupt();
        }
    }

    /// Interrupts the vCPU if it is in the guest. It may enter the guest again immediately.
    fn interrupt(&self) {
        self.shared.set_immediate_exit(1);
        if let Some(thread) = &self.thread {
            // The thread may already have ended by itself.
            if let Err(err) = thread.kill(SIGRTMIN()) {
                debug!(thread = thread.thread().name(), %err, "The thread of the vCPU has ended");
            }
        }
    }

    /// Sends a non-maskable interrupt to the vCPU. A paused vCPU receives it when it resumes.
    ///
    /// 1. Set the pending flag.
    /// 2. Interrupt the vCPU.
    ///
    /// Before each guest entry, the vCPU clears `immediate_exit` and then checks the flag. It
    /// therefore either finds the flag set, or is interrupted again.
    pub(crate) fn send_nmi(&self) {
        self.shared.nmi.store(true, Ordering::SeqCst);
        self.interrupt();
    }

    /// Resets a paused vCPU to its initial state once its last exit is complete. After it is
    /// resumed, the vCPU waits for INIT and SIPI from the guest. The vCPU must not have been
    /// resumed between its pause and this call.
    pub(crate) fn begin_afresh(&self) {
        self.shared.nmi.store(false, Ordering::SeqCst);
        self.shared.set_afresh(true);
    }

    /// Waits until the reset has been done. Returns false if it has not been done by `deadline`.
    pub(crate) fn wait_until_fresh(&self, deadline: Instant) -> bool {
        self.shared.wait_until_fresh(deadline)
    }

    pub(crate) fn resume(&self) {
        self.set(Wanted::Run);
    }

    /// Requests that the vCPU leave the guest and wait. It does so once its current exit is
    /// complete.
    pub(crate) fn pause(&self) -> Pausing {
        self.set(Wanted::Pause);
        Pausing(Arc::clone(&self.shared))
    }

    /// Ends the vCPU's thread and waits until it has ended.
    pub(crate) fn stop(&mut self) {
        self.set(Wanted::Stop);
        if let Some(thread) = self.thread.take() {
            assert_ne!(thread.as_pthread_t(), self_thread(), "a vCPU does not stop itself");
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "A vCPU thread has panicked");
            }
        }
    }
}

fn self_thread() -> libc::pthread_t {
    // SAFETY: pthread_self has no preconditions.
    unsafe { libc::pthread_self() }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Runner {
    fd: VcpuFd,
    index: u8,
    fresh: Option<Fresh>,
    ports: Arc<Bus>,
    mmio: Arc<Bus>,
    events: EventSink,
    memory_is_lost: Arc<dyn Fn() -> bool + Send + Sync>,
    store_waits: Arc<StoreWaits>,
    shared: Arc<Shared>,
}

/// On drop, clears the pointer to the shared page and wakes all waiting threads.
struct ClearOnDrop<'a>(&'a Shared);

impl Drop for ClearOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Runner {
    fn run(mut self) {
        let byte = NonNull::from(&mut self.fd.get_kvm_run().immediate_exit);
        *self.shared.immediate_exit.lock() = Some(ImmediateExit(byte));
        let shared = Arc::clone(&self.shared);
        // Dropped before `self`, so that the pointer is cleared before the page is unmapped, even
        // if this thread panics.
        let _clear = ClearOnDrop(&shared);
        while self.shared.wait_until_wanted() {
            if self.shared.afresh.load(Ordering::SeqCst) {
                self.begin_afresh();
                self.shared.set_afresh(false);
                // A pause that was requested takes effect before the next guest entry.
                continue;
            }
            if self.shared.has_waited.swap(false, Ordering::Relaxed) {
                // Informs the guest of the pause. Otherwise its watchdog would report a soft
                // lockup. The call fails if the guest does not use kvm-clock, which is harmless.
                let _ = self.fd.kvmclock_ctrl();
            }
            match self.deliver_nmi().unwrap_or_else(|| self.run_once()) {
                Next::Again => {}
                Next::Wait => self.store_waits.wait(),
                Next::Park(event) => {
                    error!(vcpu = self.index, %event, "The vCPU has stopped");
                    self.shared.park();
                    (self.events)(event);
                }
            }
        }
    }

    /// Resets the vCPU to its initial state.
    ///
    /// The next KVM_RUN would complete the instruction of the last exit, whatever the new register
    /// values are. The pending instruction is therefore completed first, without entering the
    /// guest. With `immediate_exit` set, KVM_RUN does nothing else.
    fn begin_afresh(&mut self) {
        self.shared.set_immediate_exit(1);
        let is_over = (0..MOST_ROUNDS).any(|_| self.fd.run().is_err());
        if let Some(fresh) = &self.fresh {
            fresh.restore_if_possible(&self.fd, self.index, is_over);
        }
    }

    /// Delivers a pending NMI. Returns the next step if the delivery fails. A vCPU that has not
    /// been started drops the NMI, because KVM would loop on it.
    fn deliver_nmi(&mut self) -> Option<Next> {
        if !self.shared.take_nmi() {
            return None;
        }
        let waits = [KVM_MP_STATE_UNINITIALIZED, KVM_MP_STATE_INIT_RECEIVED];
        if self.fd.get_mp_state().is_ok_and(|state| waits.contains(&state.mp_state)) {
            return None;
        }
        let failed = self.fd.nmi().err()?;
        let what = format!("KVM_NMI: {failed}");
        Some(Next::Park(VcpuEvent::Failed { index: self.index, what }))
    }

    fn run_once(&mut self) -> Next {
        let inhibitor = &self.shared.inhibitor;
        if !inhibitor.enter(self.index) {
            return Next::Again;
        }
        let run: *const kvm_run = self.fd.get_kvm_run();
        let (exit, lacked_space) = self.store_waits.attempt(|| self.fd.run());
        inhibitor.leave(self.index);
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => {
                // SAFETY: the page is mapped as long as the vCPU exists, and the exit is a port
                // access.
                let element_bytes = unsafe { ports::element_bytes(run) };
                if !ports::read(&self.ports, port, data, element_bytes) {
                    rate_limited!(
                        debug,
                        port = format_args!("{port:#x}"),
                        len = data.len(),
                        "No device answers a port read"
                    );
                }
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                // SAFETY: as above.
                let element_bytes = unsafe { ports::element_bytes(run) };
                if !ports::write(&self.ports, port, data, element_bytes) {
                    rate_limited!(
                        debug,
                        port = format_args!("{port:#x}"),
                        ?data,
                        "No device answers a port write"
                    );
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                if !self.mmio.read(address, data) {
                    let address = format_args!("{address:#x}");
                    rate_limited!(
                        debug,
                        address,
                        len = data.len(),
                        "No device answers a memory read"
                    );
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                if !self.mmio.write(address, data) {
                    let address = format_args!("{address:#x}");
                    rate_limited!(debug, address, ?data, "No device answers a memory write");
                }
            }
            Ok(VcpuExit::Intr) => {}
            // KVM may describe the access of an EFAULT (KVM_CAP_MEMORY_FAULT_INFO).
            Ok(VcpuExit::MemoryFault { .. }) => {
                return self.handle_error(kvm_ioctls::Error::new(libc::EFAULT), lacked_space);
            }
            Ok(VcpuExit::Shutdown) => {
                return Next::Park(VcpuEvent::TripleFault { index: self.index, rip: self.rip() });
            }
            Ok(exit) => {
                let what = format!("unexpected exit {exit:?}");
                return Next::Park(VcpuEvent::Failed { index: self.index, what });
            }
            Err(err) => return self.handle_error(err, lacked_space),
        }
        Next::Again
    }

    fn handle_error(&mut self, err: kvm_ioctls::Error, lacked_space: bool) -> Next {
        next_after(err.errno(), self.index, &*self.memory_is_lost, lacked_space, || self.rip())
    }

    fn rip(&self) -> u64 {
        self.fd.get_regs().map_or(0, |regs| regs.rip)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn thread_without_a_vcpu_ends() {
        let start =
            |host_cpus| VcpuThread::start(3, Placement { host_cpus, cores: Cores::Anybody });
        let VcpuThread { thread, thread_id, runner, .. } = start(Vec::new()).unwrap();
        let comm = std::fs::read_to_string(format!("/proc/self/task/{thread_id}/comm")).unwrap();
        assert_eq!(comm, "vcpu3\n");
        assert_eq!(thread.thread().name(), Some("vcpu3"));
        drop(runner);
        thread.join().unwrap();
        assert!(matches!(start(vec![1023]), Err(CpuError::Pin { index: 3, .. })));
    }

    /// Loop of a vCPU thread, without KVM. For each entry, it sends the number of the entry and
    /// whether the inhibitor was set. It sets the inhibitor in the exit after entry `inhibit_in`,
    /// as a device would.
    fn vcpu(
        shared: &Arc<Shared>,
        inhibit_in: u32,
    ) -> (mpsc::Receiver<(u32, bool)>, thread::JoinHandle<()>) {
        let (entered, entries) = mpsc::sync_channel(0);
        let shared = Arc::clone(shared);
        let thread = thread::spawn(move || {
            for number in 1.. {
                let runs = shared.wait_until_wanted();
                if !runs || entered.send((number, shared.inhibitor.is_set())).is_err() {
                    return;
                }
                if number == inhibit_in {
                    shared.inhibitor.set();
                }
            }
        });
        (entries, thread)
    }

    #[test]
    fn vcpu_that_inhibits_entry_stays_out_until_paused_and_resumed() {
        let inhibitor = Arc::new(EntryInhibitor::default());
        let shared = Arc::new(Shared::new(Arc::clone(&inhibitor)));
        let (entries, thread) = vcpu(&shared, 3);
        shared.want(Wanted::Run);
        let before: Vec<_> = (0..3).map(|_| entries.recv_timeout(LIMIT).unwrap()).collect();
        assert_eq!(before, [(1, false), (2, false), (3, false)]);
        while !inhibitor.is_set() {
            thread::yield_now();
        }
        // 1. A thread that has not received the event requests that the vCPU run.
        shared.want(Wanted::Run);
        // 2. The VM task handles the event, and resumes the vCPU later.
        shared.want(Wanted::Pause);
        inhibitor.release();
        shared.want(Wanted::Run);
        assert_eq!(entries.recv_timeout(LIMIT), Ok((4, false)));
        shared.want(Wanted::Stop);
        drop(entries);
        thread.join().unwrap();
    }

    #[test]
    fn pause_completes_when_the_exit_completes() {
        let shared = Arc::new(Shared::new(Arc::new(EntryInhibitor::default())));
        let ((entered, entries), (leave, leaves)) = (mpsc::sync_channel(0), mpsc::sync_channel(0));
        let vcpu = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while vcpu.wait_until_wanted() {
                entered.send(()).unwrap();
                leaves.recv().unwrap();
            }
            vcpu.end();
        });
        // A vCPU that has not started yet is outside the guest.
        shared.wait_until_out();
        shared.want(Wanted::Run);
        entries.recv_timeout(LIMIT).unwrap();
        shared.want(Wanted::Pause);
        assert!(!shared.is_out.load(Ordering::Relaxed), "the vCPU is in the guest");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| shared.wait_until_out());
            leave.send(()).unwrap();
            waiter.join().unwrap();
        });
        assert!(shared.is_out.load(Ordering::Relaxed) && entries.try_recv().is_err());
        // The wait ends if the vCPU is resumed or its thread ends.
        shared.want(Wanted::Run);
        shared.wait_until_out();
        entries.recv_timeout(LIMIT).unwrap();
        shared.want(Wanted::Stop);
        leave.send(()).unwrap();
        thread.join().unwrap();
        shared.want(Wanted::Pause);
        shared.wait_until_out();
    }

    /// Checks only the pending flag. A guest test covers the delivery by KVM.
    #[test]
    fn nmi_of_paused_vcpu_is_delivered_once_on_resume() {
        let shared = Arc::new(Shared::new(Arc::new(EntryInhibitor::default())));
        let vcpu = Vcpu { shared: Arc::clone(&shared), thread: None, thread_id: 0 };
        let (entered, entries) = mpsc::sync_channel(0);
        let runner = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while runner.wait_until_wanted() {
                if runner.afresh.load(Ordering::SeqCst) {
                    runner.set_afresh(false);
                } else if entered.send(runner.take_nmi()).is_err() {
                    break;
                }
            }
            runner.end();
        });
        let next = || entries.recv_timeout(LIMIT).unwrap();
        let pause = || {
            drop(vcpu.pause());
            while !shared.is_out.load(Ordering::Relaxed) {
                let _ = entries.try_recv();
            }
        };
        vcpu.send_nmi();
        vcpu.send_nmi();
        vcpu.resume();
        assert_eq!([next(), next()], [true, false]);
        pause();
        vcpu.send_nmi();
        assert!(entries.try_recv().is_err(), "the vCPU stays out of the guest");
        vcpu.resume();
        assert_eq!([next(), next()], [true, false]);
        // The reset clears a pending NMI.
        pause();
        vcpu.send_nmi();
        vcpu.begin_afresh();
        vcpu.resume();
        assert!(!next());
        drop(vcpu);
        drop(entries);
        thread.join().unwrap();
    }

    /// The reset is also done while the VM remains paused.
    #[test]
    fn paused_vcpu_is_reset_when_its_exit_completes() {
        let shared = Arc::new(Shared::new(Arc::new(EntryInhibitor::default())));
        let vcpu = Vcpu { shared: Arc::clone(&shared), thread: None, thread_id: 0 };
        let ((entered, entries), (leave, leaves)) = (mpsc::sync_channel(0), mpsc::sync_channel(0));
        let runner = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while runner.wait_until_wanted() {
                let afresh = runner.afresh.load(Ordering::SeqCst);
                entered.send(afresh).unwrap();
                leaves.recv().unwrap();
                if afresh {
                    runner.set_afresh(false);
                }
            }
            runner.end();
        });
        let soon = || Instant::now() + LIMIT;
        assert!(vcpu.wait_until_fresh(Instant::now()), "no fresh start was requested");
        vcpu.resume();
        assert_eq!(entries.recv_timeout(LIMIT), Ok(false));
        drop(vcpu.pause());
        vcpu.begin_afresh();
        assert!(!vcpu.wait_until_fresh(Instant::now()), "the vCPU is still in its exit");
        leave.send(()).unwrap();
        assert_eq!(entries.recv_timeout(LIMIT), Ok(true));
        assert!(!vcpu.wait_until_fresh(Instant::now()), "the vCPU has only begun its fresh start");
        leave.send(()).unwrap();
        assert!(vcpu.wait_until_fresh(soon()));
        assert!(entries.try_recv().is_err(), "the vCPU stays out of the guest");
        // While memory is lost, the reset waits until the inhibitor is released.
        shared.inhibitor.set();
        vcpu.begin_afresh();
        assert!(!vcpu.wait_until_fresh(Instant::now()) && entries.try_recv().is_err());
        shared.inhibitor.release();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| vcpu.wait_until_fresh(soon()));
            assert_eq!(entries.recv_timeout(LIMIT), Ok(true));
            leave.send(()).unwrap();
            assert!(waiter.join().unwrap());
        });
        drop(vcpu);
        thread.join().unwrap();
        // A wait for the reset also returns if the thread has ended.
        assert!(shared.wait_until_fresh(soon()));
    }

    #[test]
    fn parking_does_not_override_a_stop_request() {
        let shared = Shared::new(Arc::new(EntryInhibitor::default()));
        shared.want(Wanted::Run);
        shared.park();
        assert_eq!(*shared.wanted.lock(), Wanted::Pause);
        // The stop was requested between the last exit and parking.
        shared.want(Wanted::Stop);
        shared.park();
        assert!(!shared.wait_until_wanted(), "stop waits for the thread");
    }

    #[test]
    fn inhibited_entry_holds_back_only_running_vcpus() {
        let waits = |wanted| [false, true].map(|inhibited| wanted_waits(wanted, inhibited));
        assert_eq!(waits(Wanted::Run), [false, true]);
        assert_eq!(waits(Wanted::Pause), [true, true]);
        assert_eq!(waits(Wanted::Stop), [false, false]);
    }

    #[test]
    fn vcpu_ends_while_entry_is_inhibited() {
        let inhibitor = Arc::new(EntryInhibitor::default());
        let shared = Arc::new(Shared::new(Arc::clone(&inhibitor)));
        inhibitor.set();
        let (entries, thread) = vcpu(&shared, 0);
        shared.want(Wanted::Run);
        shared.want(Wanted::Stop);
        thread.join().unwrap();
        assert!(entries.recv().is_err());
    }
}
