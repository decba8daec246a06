//! The state in which vCPUs start.
//!
//! The boot processor enters the kernel by PVH (Xen's x86 direct boot ABI): 32-bit protected mode, flat segments,
//! paging off, EBX pointing at the start info. The others wait for the kernel's INIT and SIPI, which KVM's local
//! APIC handles.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use super::CpuError;
use crate::boot::{PvhEntry, Segment};

/// MSR_IA32_MISC_ENABLE (Intel SDM 4, table 2-2); fast string operations, bit 0.
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// MSR_MTRR_DEF_TYPE: MTRRs on, the default type write-back. Without it Linux takes all memory for uncached.
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Offsets of local APIC registers (Intel SDM 3, table 11-1).
const APIC_LVT_LINT0: usize = 0x350;
const APIC_LVT_LINT1: usize = 0x360;
/// Delivery modes of the local vector table, bits 10 to 8.
const DELIVERY_EXTINT: u32 = 7 << 8;
const DELIVERY_NMI: u32 = 4 << 8;

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

/// Sets the state that every vCPU starts with: MSRs and the local APIC's interrupt pins.
pub fn initialise(vcpu: &VcpuFd, index: u8) -> Result<(), CpuError> {
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

/// Puts the boot processor at the kernel's PVH entry.
pub fn enter_pvh(vcpu: &VcpuFd, index: u8, entry: &PvhEntry) -> Result<(), CpuError> {
    let error = |what| move |source| CpuError::Kvm { what, index, source };
    let mut sregs = vcpu.get_sregs().map_err(error("read the system registers of"))?;
    let data = segment(entry.data);
    sregs.cs = segment(entry.code);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(entry.task);
    (sregs.cr0, sregs.cr4, sregs.efer) = (entry.cr0, entry.cr4, entry.efer);
    vcpu.set_sregs(&sregs).map_err(error("set the system registers of"))?;
    let regs = kvm_regs { rip: entry.rip, rbx: entry.rbx, rflags: entry.rflags, ..Default::default() };
    vcpu.set_regs(&regs).map_err(error("set the registers of"))
}
