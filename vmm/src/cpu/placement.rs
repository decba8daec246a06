//! Host CPUs of vCPU threads, and core scheduling.

use std::fs;
use std::io;
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::Pid;
use rustix::thread::CoreSchedulingScope::Thread;
use rustix::thread::{create_core_scheduling_cookie, gettid, pull_core_scheduling_cookie};
use tracing::{debug, warn};

use super::CpuError;
use super::config::CoreScheduling;

/// File with the online host CPUs, as a list of ranges such as `0-1,3`.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Core scheduling of a VM's vCPUs. At any time, the kernel runs only threads with the same cookie
/// on a core.
#[derive(Clone, Debug)]
pub(crate) enum Cores {
    Anybody,
    /// Each vCPU thread has a cookie of its own, so no other thread may share its core.
    Nobody,
    /// All vCPU threads of the VM have the same cookie. The first thread creates it, and the others
    /// copy it.
    Vm(Arc<Mutex<Option<Pid>>>),
}

impl Cores {
    pub(crate) fn new(scheduling: CoreScheduling) -> Self {
        match scheduling {
            CoreScheduling::Off => Self::Anybody,
            CoreScheduling::Vcpu => Self::Nobody,
            CoreScheduling::Vm => Self::Vm(Arc::default()),
        }
    }

    /// Sets the cookie of the calling thread, which must be the thread of vCPU `index`.
    pub(crate) fn claim(&self, index: u8) {
        match self {
            Self::Anybody => {}
            Self::Nobody => {
                if let Err(err) = create_core_scheduling_cookie(gettid(), Thread) {
                    warn!(vcpu = index, %err, "Core scheduling is not available: the vCPU may share a core of the host with other tasks");
                }
            }
            Self::Vm(first) => {
                let mut first = first.lock();
                let result = match *first {
                    Some(thread) => pull_core_scheduling_cookie(thread, Thread),
                    None => create_core_scheduling_cookie(gettid(), Thread),
                };
                match result {
                    // A vCPU thread lives as long as the VM, so the others can copy its cookie.
                    Ok(()) => drop(first.get_or_insert_with(gettid)),
                    // Not a warning, because core scheduling is on by default, and many hosts have
                    // no threads that share a core.
                    Err(err) => debug!(vcpu = index, %err, "Core scheduling is not available"),
                }
            }
        }
    }
}

/// Restricts the thread of vCPU `index` to `host_cpus`. Each must be below `CPU_SETSIZE`. If
/// `host_cpus` is empty, the thread may run on any CPU.
pub(crate) fn pin(thread: libc::pthread_t, index: u8, host_cpus: &[usize]) -> Result<(), CpuError> {
    if host_cpus.is_empty() {
        return Ok(());
    }
    // SAFETY: the type is a bit set, for which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for &cpu in host_cpus {
        assert!(cpu < libc::CPU_SETSIZE as usize, "CPU {cpu} of the host");
        // SAFETY: the assertion above has checked that the CPU number fits into the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the caller holds the thread's handle, so the thread has not been joined. The call
    // only reads the set.
    match unsafe { libc::pthread_setaffinity_np(thread, mem::size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        errno => {
            // The kernel only returns EINVAL, so the error also reports the online CPUs.
            let known = fs::read_to_string(ONLINE).unwrap_or_else(|_| "unknown".to_owned());
            let (host_cpus, known) = (host_cpus.to_vec(), known.trim().to_owned());
            Err(CpuError::Pin {
                index,
                host_cpus,
                known,
                source: io::Error::from_raw_os_error(errno),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use rustix::thread::{CpuSet, core_scheduling_cookie, sched_getaffinity};

    use super::*;

    /// CPUs that the calling thread may run on.
    fn allowed() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
    }

    #[test]
    fn thread_is_pinned_to_its_host_cpus() {
        let (go, wait) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            wait.recv().unwrap();
            allowed()
        });
        let here = allowed();
        let last = *here.last().unwrap();
        // An empty list, and a CPU that the host does not have.
        pin(thread.as_pthread_t(), 3, &[]).unwrap();
        if !here.contains(&1023) {
            let error = pin(thread.as_pthread_t(), 3, &[1023]).unwrap_err().to_string();
            let online = fs::read_to_string(ONLINE).unwrap();
            let message =
                "cannot pin vCPU 3 to the host CPUs [1023] (--cpus affinity=); the host's CPUs: ";
            assert_eq!(error, format!("{message}{}", online.trim()));
        }
        pin(thread.as_pthread_t(), 3, &[last]).unwrap();
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), [last]);
        assert_eq!(allowed(), here, "the affinity of another thread is unchanged");
    }

    /// If the kernel has no core scheduling, the test checks only that `claim` returns.
    #[test]
    fn core_scheduling_cookies_match_the_configuration() {
        let cookies = |scheduling| {
            let cores = Cores::new(scheduling);
            // Both threads exist at the same time, like vCPU threads.
            let claimed = Barrier::new(2);
            let claim = |index| {
                cores.claim(index);
                claimed.wait();
                let cookie = core_scheduling_cookie(gettid(), Thread);
                claimed.wait();
                cookie
            };
            thread::scope(|scope| {
                let threads = [0, 1].map(|index| {
                    let claim = &claim;
                    scope.spawn(move || claim(index))
                });
                threads.map(|thread| thread.join().unwrap().ok())
            })
        };
        let [none, own, shared] =
            [CoreScheduling::Off, CoreScheduling::Vcpu, CoreScheduling::Vm].map(cookies);
        assert!(matches!(none, [None | Some(0), None | Some(0)]), "{none:?}");
        let [Some(first), Some(second)] = own else { return };
        assert!(first != 0 && second != 0 && first != second, "{own:?}");
        assert!(
            shared[0].is_some_and(|cookie| cookie != 0) && shared[0] == shared[1],
            "{shared:?}"
        );
    }
}
