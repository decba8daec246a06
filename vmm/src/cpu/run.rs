//! The thread of a vCPU: runs the guest, answers its exits, and stops when it is told.
//!
//! Stopping a vCPU that is in the guest takes two steps whose order matters (KVM API, 5: `immediate_exit`):
//! 1. `immediate_exit` is set in the vCPU's shared page: a KVM_RUN that begins from now on returns at once;
//! 2. a signal is sent to the thread: a KVM_RUN that has begun returns with EINTR.
//!
//! Without the first, a signal that arrives just before KVM_RUN would be lost.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr::NonNull;
use std::sync::{Arc, Once};
use std::thread::{Builder, JoinHandle};

use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex};
use thiserror::Error;
use tracing::{debug, error, trace};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::CpuError;
use crate::bus::Bus;

/// What a vCPU cannot handle by itself.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum VcpuEvent {
    /// The guest's processor shut down: an exception it could not deliver.
    #[error("Triple fault of vCPU {index} at RIP {rip:#x}")]
    TripleFault {
        /// Which vCPU.
        index: u8,
        /// Where.
        rip: u64,
    },
    /// The guest touched memory whose slot maps nothing accessible: KVM_RUN fails with EFAULT, and 6.1 and 6.12
    /// do not say which address it was.
    #[error("unplugged-access: vCPU {index} touched memory that is not plugged, at RIP {rip:#x}")]
    UnpluggedAccess {
        /// Which vCPU.
        index: u8,
        /// Where its code was.
        rip: u64,
    },
    /// KVM cannot go on.
    #[error("vCPU {index} cannot go on: {what}")]
    Failed {
        /// Which vCPU.
        index: u8,
        /// What KVM said.
        what: String,
    },
}

/// Where vCPU events go; called on vCPU threads.
pub type EventSink = Arc<dyn Fn(VcpuEvent) + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Run,
    Pause,
    Stop,
}

struct Shared {
    wanted: Mutex<Wanted>,
    changed: Condvar,
    /// The `immediate_exit` byte of the shared page; `None` once the thread is done with it.
    immediate_exit: Mutex<Option<ImmediateExit>>,
}

struct ImmediateExit(NonNull<u8>);

// SAFETY: the byte is written by any thread that holds the mutex around it, and the thread that owns the mapping
// takes the pointer away, under the same mutex, before it unmaps the page.
unsafe impl Send for ImmediateExit {}

impl Shared {
    fn set_immediate_exit(&self, value: u8) {
        if let Some(byte) = self.immediate_exit.lock().as_ref() {
            // SAFETY: the page is mapped while the pointer is here (see `Send` above). The kernel only reads it.
            unsafe { byte.0.write_volatile(value) };
        }
    }
}

/// A vCPU with its thread. Dropping it stops the thread.
pub struct Vcpu {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

extern "C" fn interrupt_only(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn install_handler() -> Result<(), CpuError> {
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        result = register_signal_handler(SIGRTMIN(), interrupt_only).map_err(CpuError::Signal);
    });
    result
}

impl Vcpu {
    /// Makes the thread of `fd`, paused: [`Vcpu::resume`] lets it run.
    pub fn spawn(
        fd: VcpuFd,
        index: u8,
        ports: Arc<Bus>,
        mmio: Arc<Bus>,
        events: EventSink,
    ) -> Result<Self, CpuError> {
        install_handler()?;
        let shared = Arc::new(Shared {
            wanted: Mutex::new(Wanted::Pause),
            changed: Condvar::new(),
            immediate_exit: Mutex::new(None),
        });
        let runner = Runner { fd, index, ports, mmio, events, shared: Arc::clone(&shared) };
        // The name is what libvirt looks for when it pins vCPUs.
        let thread = Builder::new()
            .name(format!("vcpu{index}"))
            .spawn(move || runner.run())
            .map_err(|source| CpuError::Thread { index, source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn set(&self, wanted: Wanted) {
        *self.shared.wanted.lock() = wanted;
        self.shared.changed.notify_all();
        if wanted != Wanted::Run {
            self.shared.set_immediate_exit(1);
            if let Some(thread) = &self.thread {
                // The thread may have ended by itself; then there is nobody to interrupt.
                if let Err(err) = thread.kill(SIGRTMIN()) {
                    debug!(%err, "vCPU thread is gone");
                }
            }
        }
    }

    /// Lets the vCPU run.
    pub fn resume(&self) {
        self.set(Wanted::Run);
    }

    /// Asks the vCPU to leave the guest and wait.
    pub fn pause(&self) {
        self.set(Wanted::Pause);
    }

    /// Ends the vCPU's thread and waits for it.
    pub fn stop(&mut self) {
        self.set(Wanted::Stop);
        if let Some(thread) = self.thread.take() {
            assert_ne!(thread.as_pthread_t(), self_thread(), "a vCPU does not stop itself");
            if thread.join().is_err() {
                error!("A vCPU thread panicked");
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
    ports: Arc<Bus>,
    mmio: Arc<Bus>,
    events: EventSink,
    shared: Arc<Shared>,
}

/// What follows an exit.
enum Next {
    Again,
    /// This vCPU has nothing more to do; it waits to be stopped.
    Park(VcpuEvent),
}

impl Runner {
    fn run(mut self) {
        let byte = NonNull::from(&mut self.fd.get_kvm_run().immediate_exit);
        *self.shared.immediate_exit.lock() = Some(ImmediateExit(byte));
        while self.wait_until_wanted() {
            if let Next::Park(event) = self.run_once() {
                error!(%event, "vCPU stops");
                *self.shared.wanted.lock() = Wanted::Pause;
                (self.events)(event);
            }
        }
        // From here on nobody writes to the page that `self.fd` unmaps.
        self.shared.immediate_exit.lock().take();
    }

    /// Waits while the vCPU is paused; false when it shall end.
    fn wait_until_wanted(&self) -> bool {
        let mut wanted = self.shared.wanted.lock();
        while *wanted == Wanted::Pause {
            self.shared.changed.wait(&mut wanted);
        }
        if *wanted == Wanted::Run {
            // Under the lock: whoever wants something else next sets the byte after this.
            self.shared.set_immediate_exit(0);
        }
        *wanted == Wanted::Run
    }

    fn run_once(&mut self) -> Next {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                if !self.ports.read(u64::from(port), data) {
                    trace!(port, len = data.len(), "Nobody answers this port read");
                }
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                if !self.ports.write(u64::from(port), data) {
                    trace!(port, ?data, "Nobody answers this port write");
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                if !self.mmio.read(address, data) {
                    trace!(address, len = data.len(), "Nobody answers this memory read");
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                if !self.mmio.write(address, data) {
                    trace!(address, ?data, "Nobody answers this memory write");
                }
            }
            Ok(VcpuExit::Intr) => {}
            Ok(VcpuExit::Shutdown) => {
                return Next::Park(VcpuEvent::TripleFault { index: self.index, rip: self.rip() });
            }
            Ok(exit) => {
                let what = format!("unexpected exit {exit:?}");
                return Next::Park(VcpuEvent::Failed { index: self.index, what });
            }
            Err(err) => return self.handle_error(err),
        }
        Next::Again
    }

    fn handle_error(&mut self, err: kvm_ioctls::Error) -> Next {
        match err.errno() {
            libc::EINTR | libc::EAGAIN => Next::Again,
            libc::EFAULT => Next::Park(VcpuEvent::UnpluggedAccess { index: self.index, rip: self.rip() }),
            errno => {
                let what = io::Error::from_raw_os_error(errno).to_string();
                Next::Park(VcpuEvent::Failed { index: self.index, what })
            }
        }
    }

    fn rip(&self) -> u64 {
        self.fd.get_regs().map_or(0, |regs| regs.rip)
    }
}
