//! Holds an idle VM open for as long as it runs, in the emulated KVM host.
//!
//! With the first VM that starts and the last that ends, KVM switches static keys
//! (preempt_notifier_key in the scheduler, apic_sw_disabled in its own code), that is, it patches
//! running kernel text. QEMU's emulation on several threads does not always get that right: a CPU
//! runs into the breakpoint that is there while the text is patched, and finds nobody who knows of
//! it ("Oops: int3" in __schedule): VMs that start and end for 45 s crash the host. While
//! this VM is there the keys stay as they are, and the same load does not. A probe on
//! text_poke_bp_batch saw no text patched while VMs booted, rebooted and ended beside it. KVM's
//! other key of this kind, kvm_has_noapic_vcpu, counts vCPUs without an in-kernel APIC, which
//! nobody here makes.

#![forbid(unsafe_code)]

use std::thread;

use anyhow::{Context, Result};
use kvm_ioctls::Kvm;

fn main() -> Result<()> {
    let kvm = Kvm::new().context("Cannot open /dev/kvm")?;
    let vm = kvm.create_vm().context("Cannot create a VM")?;
    // The vCPU's local APIC starts software-disabled, and stays so: it never runs.
    vm.create_irq_chip().context("Cannot create the interrupt controllers")?;
    let _vcpu = vm.create_vcpu(0).context("Cannot create a vCPU")?;
    println!("held");
    loop {
        thread::park();
    }
}
