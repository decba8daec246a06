//! Keeps an idle VM open on the emulated KVM host until killed.
//!
//! When the first VM starts and when the last VM ends, KVM switches static keys
//! (preempt_notifier_key in the scheduler, apic_sw_disabled in its own code). This patches running
//! kernel text. QEMU's multithreaded emulation does not always handle that correctly. A CPU may hit
//! the breakpoint that exists during the patch, and there is no handler for it ("Oops: int3" in
//! __schedule). If VMs start and end for 45 s, the host crashes.
//!
//! While this VM exists, the keys do not change, and the same load does not crash the host. A probe
//! on text_poke_bp_batch found no patches while other VMs booted, rebooted and ended. KVM has one
//! more key of this kind, kvm_has_noapic_vcpu. It counts vCPUs without an in-kernel APIC, which are
//! not used here.

#![forbid(unsafe_code)]

use std::thread;

use anyhow::{Context, Result};
use kvm_ioctls::Kvm;

fn main() -> Result<()> {
    let kvm = Kvm::new().context("Cannot open /dev/kvm")?;
    let vm = kvm.create_vm().context("Cannot create a VM")?;
    // The vCPU's local APIC is software-disabled at first. It remains so, because the vCPU never
    // runs.
    vm.create_irq_chip().context("Cannot create the interrupt controllers")?;
    let _vcpu = vm.create_vcpu(0).context("Cannot create a vCPU")?;
    println!("held");
    loop {
        thread::park();
    }
}
