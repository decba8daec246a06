//! Entry inhibitor of a VM. While it is set, no vCPU can enter the guest.

use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::thread::{Timespec, gettid, nanosleep};
use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Number and interval of the checks with which [`EntryInhibitor::stop`] waits until vCPUs have
/// left the guest: one second in total. A vCPU that spends more time in the host's kernel, for
/// example to wait for a disk, does not run the guest meanwhile.
const MAX_POLLS: usize = 10_000;
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000 };

extern "C" fn interrupt_only(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs a handler for the signal with which [`EntryInhibitor::stop`] interrupts vCPUs, so that
/// the signal is harmless. Later calls do nothing.
pub fn install_handler() -> Result<(), errno::Error> {
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| result = register_signal_handler(SIGRTMIN(), interrupt_only));
    result
}

/// Prevents vCPUs from entering the guest again after one of them has detected a failure.
///
/// After a failure, the VM task receives an event and pauses every vCPU, but later and on another
/// thread. Without the inhibitor, the vCPU that detected the failure would meanwhile continue, and
/// a failed flush would look successful. The order is therefore:
/// 1. The vCPU sets the inhibitor, then sends the event, and then completes its exit. The VM task
///    therefore cannot release the inhibitor before it is set.
/// 2. While the inhibitor is set, no vCPU enters the guest, regardless of other requests.
/// 3. The VM task pauses every vCPU, and then releases the inhibitor. From then on, the VM task
///    decides when vCPUs run.
#[derive(Debug, Default)]
pub struct EntryInhibitor {
    is_set: AtomicBool,
    vcpus: Box<[VcpuState]>,
}

/// State of a vCPU.
#[derive(Debug, Default)]
struct VcpuState {
    in_guest: AtomicBool,
    /// Kernel ID of the vCPU's thread.
    thread: AtomicI32,
}

impl EntryInhibitor {
    /// Creates the inhibitor of a VM with `vcpus` vCPUs. It is released.
    pub fn new(vcpus: u8) -> Self {
        Self {
            is_set: AtomicBool::new(false),
            vcpus: (0..vcpus).map(|_| VcpuState::default()).collect(),
        }
    }

    /// Prevents vCPUs from entering the guest. vCPUs that are in the guest continue until they are
    /// paused.
    pub fn set(&self) {
        self.is_set.store(true, Ordering::SeqCst);
    }

    /// Sets the inhibitor and interrupts the vCPUs in the guest. When this returns, no vCPU is in
    /// the guest, and none enters it again. May be called in a signal handler, on any thread.
    pub fn stop(&self) {
        let this = this_thread();
        for _ in 0..MAX_POLLS {
            // In each round, because a pause and a resume of the VM release the inhibitor.
            self.set();
            let mut are_out = true;
            for vcpu_state in
                self.vcpus.iter().filter(|vcpu_state| vcpu_state.in_guest.load(Ordering::SeqCst))
            {
                let thread = vcpu_state.thread.load(Ordering::Relaxed);
                // Skips the vCPU of the calling thread. It has left the guest, but has not recorded
                // this yet.
                if thread != this {
                    are_out = false;
                    interrupt(thread);
                }
            }
            if are_out && self.is_set() {
                return;
            }
            // This call is allowed in a signal handler, because rustix enters the kernel directly,
            // without libc, and does not change errno.
            let _ = nanosleep(&POLL_INTERVAL);
        }
    }

    /// Releases the inhibitor. Call this after all vCPUs were requested to pause.
    pub fn release(&self) {
        self.is_set.store(false, Ordering::SeqCst);
    }

    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Records that the vCPU of this thread is about to enter the guest. If the vCPU must not
    /// enter, returns false and records nothing.
    ///
    /// The record is set before the inhibitor is checked. Therefore, either the vCPU sees that the
    /// inhibitor is set, or the thread that sets the inhibitor sees that the vCPU is in the guest.
    pub fn enter(&self, vcpu: u8) -> bool {
        let vcpu_state = &self.vcpus[usize::from(vcpu)];
        vcpu_state.thread.store(this_thread(), Ordering::Relaxed);
        vcpu_state.in_guest.store(true, Ordering::SeqCst);
        if self.is_set() {
            self.leave(vcpu);
            return false;
        }
        true
    }

    /// Records that the vCPU has left the guest.
    pub fn leave(&self, vcpu: u8) {
        self.vcpus[usize::from(vcpu)].in_guest.store(false, Ordering::SeqCst);
    }
}

/// Returns the kernel ID of the calling thread. Each thread calls gettid() only once, because a
/// system call per guest entry is expensive. A signal handler may call this function, but a forked
/// process would get the ID of a thread of its parent.
fn this_thread() -> libc::pid_t {
    thread_local! {
        /// 0 before the first call.
        static ID: Cell<libc::pid_t> = const { Cell::new(0) };
    }
    if ID.get() == 0 {
        ID.set(gettid().as_raw_nonzero().get());
    }
    ID.get()
}

/// Interrupts KVM_RUN with a signal. The caller must repeat this, because a signal that arrives
/// just before KVM_RUN is lost.
fn interrupt(thread: libc::pid_t) {
    // SAFETY: a system call with integers. If the thread has ended meanwhile, the call fails or
    // reaches another thread of this process, on which the signal has no effect.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGRTMIN()) };
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    impl EntryInhibitor {
        pub(crate) fn is_any_in_guest(&self) -> bool {
            self.vcpus.iter().any(|vcpu_state| vcpu_state.in_guest.load(Ordering::SeqCst))
        }
    }

    /// Thread that simulates a running guest by a system call that only a signal ends. The thread
    /// sends a message before each such call.
    pub(crate) fn vcpu(
        inhibitor: &Arc<EntryInhibitor>,
        index: u8,
    ) -> (thread::JoinHandle<u32>, mpsc::Receiver<()>) {
        install_handler().unwrap();
        let (entering, entered) = mpsc::channel();
        let inhibitor = Arc::clone(inhibitor);
        let thread = thread::spawn(move || {
            let mut runs = 0;
            while inhibitor.enter(index) {
                runs += 1;
                entering.send(()).unwrap();
                let _ = nanosleep(&Timespec { tv_sec: 60, tv_nsec: 0 });
                inhibitor.leave(index);
            }
            runs
        });
        (thread, entered)
    }

    #[test]
    fn stop_takes_every_vcpu_out_of_the_guest() {
        let inhibitor = Arc::new(EntryInhibitor::new(3));
        let vcpus: Vec<_> = (0..2).map(|index| vcpu(&inhibitor, index)).collect();
        for (_, entered) in &vcpus {
            entered.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        // The third vCPU calls `stop` itself, as an access to a device register or a signal handler
        // would. `stop` therefore does not wait for this vCPU.
        assert!(inhibitor.enter(2));
        inhibitor.stop();
        for (index, (thread, _)) in vcpus.into_iter().enumerate() {
            assert!(!inhibitor.vcpus[index].in_guest.load(Ordering::SeqCst));
            assert_eq!(thread.join().unwrap(), 1);
        }
        assert!(!inhibitor.enter(0));
        inhibitor.release();
        assert!(inhibitor.enter(0));
    }

    #[test]
    fn stop_outlasts_a_release() {
        install_handler().unwrap();
        let inhibitor = Arc::new(EntryInhibitor::new(1));
        let (entering, entered) = mpsc::channel();
        let of_vcpu = Arc::clone(&inhibitor);
        let thread = thread::spawn(move || {
            let mut runs = 0;
            while of_vcpu.enter(0) {
                runs += 1;
                entering.send(()).unwrap();
                let _ = nanosleep(&Timespec { tv_sec: 60, tv_nsec: 0 });
                if runs == 1 {
                    // As a pause and a resume of the VM do.
                    of_vcpu.release();
                }
                of_vcpu.leave(0);
            }
        });
        entered.recv_timeout(Duration::from_secs(20)).unwrap();
        inhibitor.stop();
        assert!(inhibitor.is_set() && !inhibitor.is_any_in_guest());
        thread.join().unwrap();
    }

    #[test]
    fn each_thread_has_its_own_id() {
        // The second call of a thread returns the stored ID.
        let check = || {
            let id = gettid().as_raw_nonzero().get();
            assert_eq!([this_thread(), this_thread()], [id, id]);
            id
        };
        let first = check();
        assert_ne!(thread::spawn(check).join().unwrap(), first);
        assert_eq!(check(), first);
    }
}
