//! vCPUs: their CPUID, their initial state, and the threads that run them.

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

/// Failure to create or start a vCPU.
#[derive(Debug, Error)]
pub(crate) enum CpuError {
    #[error("KVM refused to {what} vCPU {index}")]
    Kvm {
        what: &'static str,
        index: u8,
        #[source]
        source: kvm_ioctls::Error,
    },
    #[error("cannot start the thread of vCPU {index}")]
    Thread {
        index: u8,
        #[source]
        source: io::Error,
    },
    /// The thread of a vCPU cannot be pinned.
    #[error(
        "cannot pin vCPU {index} to the host CPUs {host_cpus:?} (--cpus affinity=); the host's CPUs: {known}"
    )]
    Pin {
        index: u8,
        host_cpus: Vec<usize>,
        /// Online CPUs of the host, as the kernel lists them.
        known: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot install the handler of the signal that interrupts vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    #[error("KVM accepted {taken} of {given} MSRs of vCPU {index}")]
    Msrs {
        index: u8,
        /// Number of MSRs that KVM accepted, from the first.
        taken: usize,
        given: usize,
    },
    /// An ejected vCPU is still busy with its last exit and cannot be added again.
    #[error("vCPU {index} is still busy with its last exit; retry later")]
    Busy { index: u8 },
}
