//! Opens KVM, and refuses hosts that cannot run an unmodified guest.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::sync::Arc;

use foreshore_devices::interrupt::MsiController;
use foreshore_devices::memory::layout::{KVM_IDENTITY_MAP_START, KVM_TSS_START};
use foreshore_devices::memory::slots::disable_zap_all;
use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_CAP_PMU_CAPABILITY, KVM_MAX_CPUID_ENTRIES, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use rustix::process::geteuid;
use thiserror::Error;
use tracing::debug;

use crate::cpu::cpuid;

const DEVICE: &str = "/dev/kvm";

#[derive(Debug, Error)]
pub(crate) enum KvmError {
    #[error("cannot open {DEVICE}; load the module kvm_intel or kvm_amd")]
    Open(#[source] kvm_ioctls::Error),
    #[error(
        "cannot open {DEVICE} as user {user}; add the user to the group of the device, usually kvm"
    )]
    Denied {
        user: u32,
        #[source]
        source: kvm_ioctls::Error,
    },
    #[error("{DEVICE} has API version {found}, and must have {KVM_API_VERSION}")]
    Version { found: i32 },
    /// A para-virtual KVM accepts the ioctls, but emulates the guest's kernel code.
    #[error(
        "{DEVICE} cannot run a stock guest: the processor shows neither svm nor vmx in /proc/cpuinfo; use a \
         machine with hardware or nested virtualization"
    )]
    NoHardware,
    #[error("{DEVICE} lacks {capability}; Linux 5.10 and later have it")]
    Capability { capability: &'static str },
    #[error("cannot route interrupts")]
    Routes(#[source] io::Error),
    #[error("--cpus: features=amx: this host has no AMX for guests")]
    NoAmx(#[source] Option<io::Error>),
    #[error("KVM refused to {what}")]
    Call {
        what: &'static str,
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    fn of_open(source: kvm_ioctls::Error) -> Self {
        match source.errno() {
            libc::EACCES => Self::Denied { user: geteuid().as_raw(), source },
            _ => Self::Open(source),
        }
    }
}

/// KVM, and an empty VM that the machine is built on.
pub(super) struct Hypervisor {
    pub vm: Arc<VmFd>,
    pub cpuid: CpuId,
    /// True if the timer of the local APIC supports TSC-deadline mode.
    pub tsc_deadline: bool,
    pub slot_limit: u32,
}

const NEEDED: [(Cap, &str); 8] = [
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
];

/// Returns true if the text from /proc/cpuinfo reports hardware virtualization.
fn shows_hardware_virtualisation(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_ascii_whitespace().any(|flag| flag == "svm" || flag == "vmx"))
}

/// Requests that guests of this process may use the AMX tile state
/// (Documentation/arch/x86/xstate.rst).
fn permit_amx() -> io::Result<()> {
    const ARCH_REQ_XCOMP_GUEST_PERM: libc::c_ulong = 0x1025;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: a system call that takes only numbers.
    match unsafe {
        libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_GUEST_PERM, XFEATURE_XTILEDATA)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Disables the emulation of performance counters. Returns true if KVM supports that (Linux 5.18
/// and later). CPUID then reports no counters, but AMD processors have four counters that software
/// may use without a report. Must be called before the first vCPU is created.
fn disable_performance_counters(vm: &VmFd) -> io::Result<bool> {
    let offered = vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if offered < 0 || offered as u32 & KVM_PMU_CAP_DISABLE == 0 {
        return Ok(false);
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, ..Default::default() };
    cap.args[0] = KVM_PMU_CAP_DISABLE.into();
    vm.enable_cap(&cap)?;
    Ok(true)
}

impl Hypervisor {
    /// Creates an empty VM with interrupt controllers in the kernel. Opens KVM unless it was opened
    /// at the start, because its module may have been loaded since.
    ///
    /// If `amx` is true, the vCPUs may use AMX. The process requests this permission first, because
    /// the CPUID that KVM reports as supported depends on it. The process cannot give up the
    /// permission again.
    pub(super) fn open(opened: Option<&Kvm>, amx: bool) -> Result<Self, KvmError> {
        if amx {
            permit_amx().map_err(|err| KvmError::NoAmx(Some(err)))?;
        }
        let call = |what| move |source| KvmError::Call { what, source };
        let opened_now;
        let kvm = match opened {
            Some(kvm) => kvm,
            None => {
                opened_now = Kvm::new().map_err(KvmError::of_open)?;
                &opened_now
            }
        };
        if kvm.get_api_version() != KVM_API_VERSION as i32 {
            return Err(KvmError::Version { found: kvm.get_api_version() });
        }
        // If /proc/cpuinfo cannot be read, the host may still have hardware support.
        if let Ok(cpuinfo) = fs::read_to_string("/proc/cpuinfo")
            && !shows_hardware_virtualisation(&cpuinfo)
        {
            return Err(KvmError::NoHardware);
        }
        for (capability, name) in NEEDED {
            if !kvm.check_extension(capability) {
                return Err(KvmError::Capability { capability: name });
            }
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(call("list the supported CPUID leaves"))?;
        if amx && !cpuid::has_amx(&cpuid) {
            return Err(KvmError::NoAmx(None));
        }
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        let slot_limit = u32::try_from(kvm.get_nr_memslots()).unwrap_or(u32::MAX);
        let vm = kvm.create_vm().map_err(call("create a VM"))?;
        // Best effort: if this fails, removing a memory slot drops all page tables, which only
        // costs time.
        if let Err(err) = disable_zap_all(&vm) {
            debug!(%err, "KVM drops all page tables when a memory slot is removed");
        }
        // Best effort: if this fails, the guest may find counters that CPUID does not report.
        if let Err(err) = disable_performance_counters(&vm) {
            debug!(%err, "KVM emulates performance counters that the guest was not offered");
        }
        // The order matters: the identity map and the TSS must be placed before the first vCPU is
        // created (required on Intel, harmless on AMD). The interrupt controllers must exist before
        // a vCPU is created with its local APIC.
        vm.set_identity_map_address(KVM_IDENTITY_MAP_START)
            .map_err(call("place the identity map"))?;
        vm.set_tss_address(KVM_TSS_START as usize).map_err(call("place the TSS"))?;
        vm.create_irq_chip().map_err(call("create the interrupt controllers"))?;
        // Interrupts that occur before the guest sets up MSIs use the same routes as later
        // interrupts.
        vm.set_msi_routes(&BTreeMap::new()).map_err(KvmError::Routes)?;
        Ok(Self { vm: Arc::new(vm), cpuid, tsc_deadline, slot_limit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_an_open_has_the_remedy() {
        let text = |errno| KvmError::of_open(kvm_ioctls::Error::new(errno)).to_string();
        assert_eq!(
            text(libc::ENOENT),
            "cannot open /dev/kvm; load the module kvm_intel or kvm_amd"
        );
        let user = geteuid().as_raw();
        assert_eq!(
            text(libc::EACCES),
            format!(
                "cannot open /dev/kvm as user {user}; add the user to the group of the device, \
                 usually kvm"
            )
        );
    }

    #[test]
    fn hardware_virtualization_is_detected_by_whole_flag() {
        assert!(shows_hardware_virtualisation("processor\t: 0\nflags\t\t: fpu vme svm npt\n"));
        assert!(shows_hardware_virtualisation("flags : fpu vmx\n"));
        assert!(!shows_hardware_virtualisation("model name : svm\nflags : fpu svm_lock xvmx\n"));
        assert!(!shows_hardware_virtualisation(""));
    }
}
