//! Initial state of vCPUs.
//!
//! The boot processor enters the kernel by PVH (Xen's x86 direct boot ABI): in 32-bit protected
//! mode with flat segments and without paging. EBX contains the address of the start info. The
//! other processors wait for INIT and SIPI from the kernel, which KVM's local APIC handles.

use kvm_bindings::{
    KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_segment, kvm_sregs, kvm_vcpu_events,
};
use kvm_ioctls::VcpuFd;
use tracing::warn;

use super::CpuError;
use crate::boot::{PvhEntry, Segment};

/// MSR_IA32_MISC_ENABLE (Intel SDM 4, table 2-2). Bit 0 enables fast string operations.
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// MSR_MTRR_DEF_TYPE: enables MTRRs, with write-back as the default memory type. Otherwise, Linux
/// treats all memory as uncached.
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Offsets of local APIC registers (Intel SDM 3, table 11-1).
const APIC_LVT_LINT0: usize = 0x350;
const APIC_LVT_LINT1: usize = 0x360;
/// Delivery modes in the local vector table, bits 10 to 8.
const DELIVERY_EXTINT: u32 = 7 << 8;
const DELIVERY_NMI: u32 = 4 << 8;

/// MSRs that INIT does not change, and MSRs by which KVM writes to guest memory. The time stamp
/// counter is not included, so that it remains synchronous with those of other vCPUs.
const KEPT_BY_INIT: [u32; 16] = [
    0x48,  // IA32_SPEC_CTRL
    0x174, // IA32_SYSENTER_CS
    0x175, // IA32_SYSENTER_ESP
    0x176, // IA32_SYSENTER_EIP
    MSR_IA32_MISC_ENABLE,
    0x277, // IA32_PAT
    MSR_MTRR_DEF_TYPE,
    0xc000_0081, // STAR
    0xc000_0082, // LSTAR
    0xc000_0083, // CSTAR
    0xc000_0084, // SFMASK
    0xc000_0103, // TSC_AUX
    0x4b56_4d01, // MSR_KVM_SYSTEM_TIME_NEW
    0x4b56_4d02, // MSR_KVM_ASYNC_PF_EN
    0x4b56_4d03, // MSR_KVM_STEAL_TIME
    0x4b56_4d04, // MSR_KVM_PV_EOI_EN
];

fn segment(segment: Segment) -> kvm_segment {
    kvm_segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
        type_: segment.kind,
        present: 1,
        dpl: 0,
        db: segment.default_32.into(),
        s: segment.code_or_data.into(),
        l: 0,
        g: segment.page_granular.into(),
        ..Default::default()
    }
}

/// Sets the state that all vCPUs start with: MSRs and the interrupt pins of the local APIC.
pub(crate) fn initialise(vcpu: &VcpuFd, index: u8) -> Result<(), CpuError> {
    let error = |what| move |source| CpuError::Kvm { what, index, source };
    let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let msrs = Msrs::from_entries(&[
        msr(MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        msr(MSR_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
    ])
    .expect("two entries fit");
    let given = msrs.as_slice().len();
    let taken = vcpu.set_msrs(&msrs).map_err(error("set the MSRs of"))?;
    if taken != given {
        return Err(CpuError::Msrs { index, taken, given });
    }

    let mut lapic = vcpu.get_lapic().map_err(error("read the local APIC of"))?;
    for (offset, mode) in [(APIC_LVT_LINT0, DELIVERY_EXTINT), (APIC_LVT_LINT1, DELIVERY_NMI)] {
        let register = &mut lapic.regs[offset..offset + 4];
        for (byte, value) in register.iter_mut().zip(mode.to_le_bytes()) {
            *byte = value.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).map_err(error("set the local APIC of"))
}

/// Sets the registers of the boot processor for the kernel's PVH entry point.
pub(crate) fn enter_pvh(vcpu: &VcpuFd, index: u8, entry: &PvhEntry) -> Result<(), CpuError> {
    let error = |what| move |source| CpuError::Kvm { what, index, source };
    let mut sregs = vcpu.get_sregs().map_err(error("read the system registers of"))?;
    let data = segment(entry.data);
    sregs.cs = segment(entry.code);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(entry.task);
    (sregs.cr0, sregs.cr4, sregs.efer) = (entry.cr0, entry.cr4, entry.efer);
    vcpu.set_sregs(&sregs).map_err(error("set the system registers of"))?;
    let regs =
        kvm_regs { rip: entry.rip, rbx: entry.rbx, rflags: entry.rflags, ..Default::default() };
    vcpu.set_regs(&regs).map_err(error("set the registers of"))
}

/// State of a vCPU before the guest ran it for the first time. The state is restored when the vCPU
/// is added again, because KVM cannot delete and recreate a vCPU.
pub(crate) struct Fresh {
    sregs: kvm_sregs,
    regs: kvm_regs,
    events: kvm_vcpu_events,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
}

impl Fresh {
    /// Saves the current state of `vcpu`.
    pub(crate) fn of(vcpu: &VcpuFd, index: u8) -> Result<Self, CpuError> {
        let error = |what| move |source| CpuError::Kvm { what, index, source };
        let msr = |&number: &u32| {
            let entry = kvm_msr_entry { index: number, ..Default::default() };
            let mut one = Msrs::from_entries(&[entry]).expect("one entry fits");
            // MSRs that the processor does not have are skipped.
            matches!(vcpu.get_msrs(&mut one), Ok(1)).then(|| one.as_slice()[0])
        };
        Ok(Self {
            sregs: vcpu.get_sregs().map_err(error("read the system registers of"))?,
            regs: vcpu.get_regs().map_err(error("read the registers of"))?,
            events: vcpu.get_vcpu_events().map_err(error("read the pending events of"))?,
            lapic: vcpu.get_lapic().map_err(error("read the local APIC of"))?,
            msrs: KEPT_BY_INIT.iter().filter_map(msr).collect(),
        })
    }

    /// Resets `vcpu`, or logs that KVM refuses this. `is_over` is true if the instruction of the
    /// last exit is complete.
    pub(crate) fn restore_if_possible(&self, vcpu: &VcpuFd, index: u8, is_over: bool) {
        if let Err(err) = self.restore(vcpu, index) {
            // The guest can put a vCPU into a state that KVM cannot reset, which is acceptable: the
            // guest must start the vCPU again, and its INIT clears most of the remaining state.
            warn!(vcpu = index, is_over, %err, "Cannot reset the vCPU; it keeps the state in which the guest left it");
        }
    }

    /// Resets `vcpu` so that it waits for INIT and SIPI as if it had never run. The instruction of
    /// its last exit must be complete.
    ///
    /// 1. Read the MP state. KVM then handles a latched INIT or SIPI, so that none remains pending.
    /// 2. Set the MP state, so that the vCPU does not run if a later step fails. Its reset
    ///    registers point to memory that does not exist.
    /// 3. Restore the system registers before the APIC registers, because they select the APIC's
    ///    addressing mode.
    /// 4. Set the MP state again, because the earlier steps may have changed it.
    fn restore(&self, vcpu: &VcpuFd, index: u8) -> Result<(), CpuError> {
        let error = |what| move |source| CpuError::Kvm { what, index, source };
        let waiting = kvm_mp_state { mp_state: KVM_MP_STATE_UNINITIALIZED };
        vcpu.get_mp_state().map_err(error("read the state of"))?;
        vcpu.set_mp_state(waiting).map_err(error("set the state of"))?;
        vcpu.set_sregs(&self.sregs).map_err(error("set the system registers of"))?;
        vcpu.set_regs(&self.regs).map_err(error("set the registers of"))?;
        let msrs = Msrs::from_entries(&self.msrs).expect("as many as were read");
        let (given, taken) =
            (self.msrs.len(), vcpu.set_msrs(&msrs).map_err(error("set the MSRs of"))?);
        if taken != given {
            return Err(CpuError::Msrs { index, taken, given });
        }
        vcpu.set_vcpu_events(&self.events).map_err(error("set the pending events of"))?;
        vcpu.set_lapic(&self.lapic).map_err(error("set the local APIC of"))?;
        vcpu.set_mp_state(waiting).map_err(error("set the state of"))
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::KVM_MP_STATE_RUNNABLE;
    use kvm_ioctls::{Kvm, VmFd};

    use super::*;
    use crate::governor::fake::logged;

    const INDEX: u8 = 1;
    /// Value that the guest has left in a register.
    const LEFT: u64 = 0x1234;

    /// Returns a running vCPU with its initial state, or `None` if the host has no KVM.
    fn running_vcpu() -> Option<(VmFd, VcpuFd, Fresh)> {
        let kvm = Kvm::new().ok()?;
        let vm = kvm.create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        let vcpu = vm.create_vcpu(u64::from(INDEX)).unwrap();
        initialise(&vcpu, INDEX).unwrap();
        let fresh = Fresh::of(&vcpu, INDEX).unwrap();
        vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE }).unwrap();
        vcpu.set_regs(&kvm_regs { rbx: LEFT, ..vcpu.get_regs().unwrap() }).unwrap();
        Some((vm, vcpu, fresh))
    }

    #[test]
    fn vcpu_that_kvm_cannot_reset_keeps_its_registers_and_waits_for_init() {
        let Some((_vm, vcpu, mut fresh)) = running_vcpu() else {
            return eprintln!("skipped: the host has no KVM");
        };
        let rbx = || vcpu.get_regs().unwrap().rbx;
        let valid_efer = fresh.sregs.efer;
        // KVM refuses reserved bits.
        fresh.sregs.efer = u64::MAX;
        let lines = logged(|| fresh.restore_if_possible(&vcpu, INDEX, true));
        assert_eq!(lines.len(), 1, "{lines:?}");
        let expected = "Cannot reset the vCPU; it keeps the state in which the guest left it";
        assert!(lines[0].contains("WARN") && lines[0].contains(expected), "{lines:?}");
        assert!(lines[0].contains("vcpu=1 is_over=true"), "{lines:?}");
        assert_eq!(rbx(), LEFT);
        assert_eq!(vcpu.get_mp_state().unwrap().mp_state, KVM_MP_STATE_UNINITIALIZED);
        fresh.sregs.efer = valid_efer;
        assert_eq!(logged(|| fresh.restore_if_possible(&vcpu, INDEX, true)), [""; 0]);
        assert_ne!(rbx(), LEFT);
        assert_eq!(vcpu.get_mp_state().unwrap().mp_state, KVM_MP_STATE_UNINITIALIZED);
    }
}
