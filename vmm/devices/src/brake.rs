//! The brake of a VM: whoever must not let the guest run on pulls it.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::thread::{Timespec, gettid, nanosleep};
use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// How often [`Brake::stop`] looks whether the vCPUs are out, and how long it waits in between: a
/// second together. One that the host's kernel keeps for longer, as it waits for a disk, does not
/// run the guest meanwhile.
const LOOKS: usize = 10_000;
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000 };

extern "C" fn interrupt_only(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Makes the signal with which [`Brake::stop`] interrupts a vCPU harmless. Later calls do nothing.
pub fn install_handler() -> Result<(), errno::Error> {
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| result = register_signal_handler(SIGRTMIN(), interrupt_only));
    result
}

/// Keeps a vCPU whose exit has gone wrong from entering the guest again.
///
/// The owner of the VM is told by an event and pauses every vCPU, but it does so later and on
/// another thread. The vCPU that pulled the brake, inside its exit, would meanwhile run on as if
/// all were well: a flush that failed would look like one that did not. So:
/// 1. the brake is pulled, then the event is sent, then the exit ends: the owner cannot release it
///    before it is pulled;
/// 2. a vCPU does not enter the guest while the brake is pulled, whatever else it has been told;
/// 3. the owner pauses every vCPU, and only then releases the brake: from there on it is the owner
///    that decides.
#[derive(Debug, Default)]
pub struct Brake {
    pulled: AtomicBool,
    seats: Box<[Seat]>,
}

/// Where a vCPU is.
#[derive(Debug, Default)]
struct Seat {
    in_guest: AtomicBool,
    /// Its thread, as the kernel numbers them.
    thread: AtomicI32,
}

impl Brake {
    /// Released; for a VM with so many vCPUs.
    pub fn new(vcpus: u8) -> Self {
        Self {
            pulled: AtomicBool::new(false),
            seats: (0..vcpus).map(|_| Seat::default()).collect(),
        }
    }

    /// From now on no vCPU enters the guest. Those that are in it stay there until they are paused.
    pub fn pull(&self) {
        self.pulled.store(true, Ordering::SeqCst);
    }

    /// Pulls it, and brings those that are in the guest out: none is when this returns, and none
    /// enters it again. May be called in a handler of a signal, on any thread.
    pub fn stop(&self) {
        self.pull();
        let this = this_thread();
        for _ in 0..LOOKS {
            let mut are_out = true;
            for seat in self.seats.iter().filter(|seat| seat.in_guest.load(Ordering::SeqCst)) {
                let thread = seat.thread.load(Ordering::Relaxed);
                // A vCPU whose thread is here has left the guest, though it had no time yet to say
                // so.
                if thread != this {
                    are_out = false;
                    interrupt(thread);
                }
            }
            if are_out {
                return;
            }
            // A signal handler may make this call: rustix enters the kernel itself, without libc,
            // and leaves errno as it is.
            let _ = nanosleep(&LOOK_INTERVAL);
        }
    }

    /// The vCPUs have been told to pause.
    pub fn release(&self) {
        self.pulled.store(false, Ordering::SeqCst);
    }

    /// Whether it has been pulled.
    pub fn is_pulled(&self) -> bool {
        self.pulled.load(Ordering::SeqCst)
    }

    /// Says that the vCPU of this thread is about to enter the guest; false: it must not, and has
    /// not said so.
    ///
    /// First it says so, then it looks: either it sees that the brake is pulled, or who pulls it
    /// sees it in the guest.
    pub fn enter(&self, vcpu: u8) -> bool {
        let seat = &self.seats[usize::from(vcpu)];
        seat.thread.store(this_thread(), Ordering::Relaxed);
        seat.in_guest.store(true, Ordering::SeqCst);
        if self.is_pulled() {
            self.leave(vcpu);
            return false;
        }
        true
    }

    /// The vCPU is out of the guest.
    pub fn leave(&self, vcpu: u8) {
        self.seats[usize::from(vcpu)].in_guest.store(false, Ordering::SeqCst);
    }
}

fn this_thread() -> libc::pid_t {
    gettid().as_raw_nonzero().get()
}

/// The signal that ends KVM_RUN, again and again: one that arrives just before it would be lost.
fn interrupt(thread: libc::pid_t) {
    // SAFETY: a system call that takes numbers. A thread that has ended meanwhile is an error, or
    // one of this process' other threads, to which the signal does nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGRTMIN()) };
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    impl Brake {
        /// Whether a vCPU is in the guest.
        pub(crate) fn is_any_in_guest(&self) -> bool {
            self.seats.iter().any(|seat| seat.in_guest.load(Ordering::SeqCst))
        }
    }

    /// A thread that runs a guest: a system call that only a signal ends. It says when it is about
    /// to begin, each time.
    pub(crate) fn vcpu(
        brake: &Arc<Brake>,
        index: u8,
    ) -> (thread::JoinHandle<u32>, mpsc::Receiver<()>) {
        install_handler().unwrap();
        let (entering, entered) = mpsc::channel();
        let brake = Arc::clone(brake);
        let thread = thread::spawn(move || {
            let mut runs = 0;
            while brake.enter(index) {
                runs += 1;
                entering.send(()).unwrap();
                let _ = nanosleep(&Timespec { tv_sec: 60, tv_nsec: 0 });
                brake.leave(index);
            }
            runs
        });
        (thread, entered)
    }

    #[test]
    fn a_stop_brings_every_vcpu_out_of_the_guest_and_keeps_it_out() {
        let brake = Arc::new(Brake::new(3));
        let vcpus: Vec<_> = (0..2).map(|index| vcpu(&brake, index)).collect();
        for (_, entered) in &vcpus {
            entered.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        // The third has brought this thread here, as a device's register does, or a signal: it is
        // not waited for.
        assert!(brake.enter(2));
        brake.stop();
        for (index, (thread, _)) in vcpus.into_iter().enumerate() {
            assert!(!brake.seats[index].in_guest.load(Ordering::SeqCst));
            assert_eq!(thread.join().unwrap(), 1);
        }
        assert!(!brake.enter(0));
        brake.release();
        assert!(brake.enter(0));
    }
}
