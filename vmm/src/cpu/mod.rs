//! vCPUs: what they look like to the guest, the state they start in, and the threads that run them.

pub(crate) mod config;
pub(crate) mod cpuid;
pub(crate) mod metrics;
pub(crate) mod packages;
pub(crate) mod placement;
mod ports;
pub(crate) mod run;
pub(crate) mod state;

use std::io;

use thiserror::Error;

/// Why a vCPU cannot be made or started.
#[derive(Debug, Error)]
pub(crate) enum CpuError {
    #[error("KVM refuses to {what} vCPU {index}")]
    Kvm {
        what: &'static str,
        index: u8,
        #[source]
        source: kvm_ioctls::Error,
    },
    #[error("Cannot start the thread of vCPU {index}")]
    Thread {
        index: u8,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// The thread of a vCPU cannot run where it is to.
    #[error(
        "Cannot let vCPU {index} run on CPUs {host_cpus:?} of the host alone (--cpus affinity=); the host's CPUs: {known}"
    )]
    Pin {
        index: u8,
        /// Where it was to run.
        host_cpus: Vec<usize>,
        /// What there is, as the kernel lists it.
        known: String,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    #[error("Cannot install the handler of the signal that interrupts vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    #[error("KVM takes {taken} of {given} MSRs of vCPU {index}")]
    Msrs {
        index: u8,
        /// How many it took.
        taken: usize,
        /// How many were given.
        given: usize,
    },
    /// One that the guest has let go is still about what it did last, and cannot be given back.
    #[error("vCPU {index} has not ended what it did when the guest let it go: try again later")]
    Busy { index: u8 },
}
