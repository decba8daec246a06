//! vCPUs: their CPUID, their initial state, and their threads.

pub(crate) mod config;
pub(crate) mod cpu_topology;
pub(crate) mod cpuid;
pub(crate) mod metrics;
mod next_step;
pub(crate) mod placement;
mod ports;
pub(crate) mod run;
pub(crate) mod state;

use std::io;

use thiserror::Error;

/// Error of creating or starting a vCPU.
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
    /// The thread of a vCPU cannot be pinned to its host CPUs.
    #[error(
        "cannot pin vCPU {index} to the host CPUs {host_cpus:?} (--cpus affinity=); the host's CPUs: {known}"
    )]
    Pin {
        index: u8,
        host_cpus: Vec<usize>,
        /// Online CPUs of the host, in the kernel's list format.
        known: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot install the handler of the signal that interrupts vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    #[error("KVM accepted {taken} of {given} MSRs of vCPU {index}")]
    Msrs {
        index: u8,
        /// Number of MSRs that KVM accepted before it refused one.
        taken: usize,
        given: usize,
    },
    /// An ejected vCPU has not finished its last exit, so it cannot be added again yet.
    #[error("vCPU {index} is still busy with its last exit; retry later")]
    Busy { index: u8 },
}
