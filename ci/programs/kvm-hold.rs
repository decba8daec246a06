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

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::thread;

use anyhow::{Context, Result};

// Requests without an argument structure (Linux, include/uapi/linux/kvm.h): _IO(0xae, n).
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;

fn main() -> Result<()> {
    let kvm =
        File::options().read(true).write(true).open("/dev/kvm").context("Cannot open /dev/kvm")?;
    let vm = owned(ioctl(kvm.as_raw_fd(), KVM_CREATE_VM).context("Cannot create a VM")?);
    // The vCPU's local APIC starts software-disabled, and stays so: it never runs.
    ioctl(vm.as_raw_fd(), KVM_CREATE_IRQCHIP).context("Cannot create the interrupt controllers")?;
    let _vcpu = owned(ioctl(vm.as_raw_fd(), KVM_CREATE_VCPU).context("Cannot create a vCPU")?);
    println!("held");
    loop {
        thread::park();
    }
}

fn ioctl(fd: RawFd, request: libc::c_ulong) -> io::Result<RawFd> {
    // SAFETY: these requests take a number, 0 here, and touch none of our memory.
    let result = unsafe { libc::ioctl(fd, request, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: KVM has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
