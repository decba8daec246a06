//! Interrupts as KVM's in-kernel controllers take them.

use std::collections::BTreeMap;
use std::io;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi, kvm_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::MsiController;
use crate::memory::layout::FIRST_MSI_GSI;
use crate::pci::msix::MsiMessage;

/// Interrupts of one of the two legacy controllers.
const PIC_PINS: u32 = 8;

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
        // 0 means that the guest blocks it, which is its own affair.
        VmFd::signal_msi(self, msi)?;
        Ok(())
    }
}

/// The routes of KVM's in-kernel controllers as KVM makes them itself: a new table replaces the old one whole.
fn fixed_routes() -> Vec<kvm_irq_routing_entry> {
    let mut routes = Vec::new();
    for gsi in 0..FIRST_MSI_GSI {
        match gsi / PIC_PINS {
            0 => routes.push(chip_route(gsi, KVM_IRQCHIP_PIC_MASTER, gsi)),
            1 => routes.push(chip_route(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - PIC_PINS)),
            _ => (),
        }
        routes.push(chip_route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    }
    routes
}

fn chip_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
    entry
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let (address_lo, address_hi) = halves(message.address);
    entry.u.msi = kvm_irq_routing_msi { address_lo, address_hi, data: message.data, ..Default::default() };
    entry
}

fn halves(address: u64) -> (u32, u32) {
    (address as u32, (address >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_routes_reach_every_pin() {
        let routes = fixed_routes();
        let pins = |chip| {
            let of_chip = routes.iter().filter(move |route| {
                // SAFETY: all of these entries are of the irqchip kind.
                unsafe { route.u.irqchip }.irqchip == chip
            });
            // SAFETY: as above.
            of_chip.map(|route| (route.gsi, unsafe { route.u.irqchip }.pin)).collect::<Vec<_>>()
        };
        assert_eq!(pins(KVM_IRQCHIP_IOAPIC), (0..24).map(|pin| (pin, pin)).collect::<Vec<_>>());
        assert_eq!(pins(KVM_IRQCHIP_PIC_MASTER), (0..8).map(|pin| (pin, pin)).collect::<Vec<_>>());
        assert_eq!(pins(KVM_IRQCHIP_PIC_SLAVE), (0..8).map(|pin| (pin + 8, pin)).collect::<Vec<_>>());
    }
}
