//! Interrupts through KVM's in-kernel controllers.

use std::collections::BTreeMap;
use std::io;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KvmIrqRouting,
    kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::MsiController;
use crate::memory::layout::FIRST_MSI_GSI;
use crate::pci::msix::MsiMessage;

impl MsiController for VmFd {
    fn set_msi_routes(&self, messages: &BTreeMap<u32, MsiMessage>) -> io::Result<()> {
        let mut entries = fixed_routes();
        entries.extend(messages.iter().map(|(&gsi, &message)| msi_route(gsi, message)));
        let table = KvmIrqRouting::from_entries(&entries).map_err(io::Error::other)?;
        Ok(self.set_gsi_routing(&table)?)
    }

    fn register_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(VmFd::register_irqfd(self, irqfd, gsi)?)
    }

    fn unregister_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(VmFd::unregister_irqfd(self, irqfd, gsi)?)
    }

    fn set_line(&self, gsi: u32, high: bool) -> io::Result<()> {
        Ok(self.set_irq_line(gsi, high)?)
    }

    fn signal_msi(&self, message: MsiMessage) -> io::Result<()> {
        let (address_lo, address_hi) = halves(message.address);
        let msi = kvm_msi { address_lo, address_hi, data: message.data, ..Default::default() };
        // A result of 0 means that the guest blocks the interrupt, which is not an error.
        VmFd::signal_msi(self, msi)?;
        Ok(())
    }
}

/// Routes for all pins of the I/O APIC. KVM's default routes also connect the first 16 interrupts
/// to emulated 8259 controllers. Guests do not mask these controllers, because no table describes
/// them (MADT without PCAT_COMPAT). Until a guest has masked LINT0, the controllers would raise
/// vectors that belong to exceptions.
fn fixed_routes() -> Vec<kvm_irq_routing_entry> {
    (0..FIRST_MSI_GSI).map(|gsi| chip_route(gsi, KVM_IRQCHIP_IOAPIC, gsi)).collect()
}

fn chip_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry =
        kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
    entry
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let (address_lo, address_hi) = halves(message.address);
    entry.u.msi =
        kvm_irq_routing_msi { address_lo, address_hi, data: message.data, ..Default::default() };
    entry
}

fn halves(address: u64) -> (u32, u32) {
    (address as u32, (address >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pin_of_the_io_apic_has_a_route_and_the_8259s_have_none() {
        let chips: Vec<_> = fixed_routes()
            .iter()
            .map(|route| {
                // SAFETY: all of these entries are of type irqchip.
                let chip = unsafe { route.u.irqchip };
                (route.gsi, chip.irqchip, chip.pin)
            })
            .collect();
        assert_eq!(chips, (0..24).map(|pin| (pin, KVM_IRQCHIP_IOAPIC, pin)).collect::<Vec<_>>());
    }
}
