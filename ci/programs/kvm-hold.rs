//! Holds an idle VM open until it is killed, in the emulated KVM host.
//!
//! When the first VM starts and when the last one ends, KVM switches static keys
//! (preempt_notifier_key in the scheduler, apic_sw_disabled in its own code), which patches running
//! kernel text. QEMU's multithreaded emulation does not always handle that correctly. A CPU hits
//! the breakpoint that exists during the patch, for which there is no handler ("Oops: int3" in
//! __schedule). VMs that start and end for 45 s crash the host.
//!
//! While this VM exists the keys do not change, and the same load does not crash the host. A probe
//! on text_poke_bp_batch saw no patches while VMs booted, rebooted and ended beside it. KVM's other
//! key of this kind, kvm_has_noapic_vcpu, counts vCPUs without an in-kernel APIC, which are not
//! used here.

#![forbid(unsafe_code)]

use std::thread;

use anyhow::{Context, Result};
use kvm_ioctls::Kvm;

fn main() -> Result<()> {
    let kvm = Kvm::new().context("Cannot open /dev/kvm")?;
    let vm = kvm.create_vm().context("Cannot create a VM")?;
    // The vCPU's local APIC starts software-disabled and stays so, because the vCPU never runs.
    vm.create_irq_chip().context("Cannot create the interrupt controllers")?;
    let _vcpu = vm.create_vcpu(0).context("Cannot create a vCPU")?;
    println!("held");
    loop {
        thread::park();
    }
}
