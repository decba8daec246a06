//! DRAM that grows by DIMMs, using ACPI.

use foreshore_devices::events::Event;
use foreshore_devices::memory::dimms::DimmError;
use foreshore_types::size::Size;
use thiserror::Error;
use tracing::{info, warn};

use crate::acpi::ged;
use crate::governor::{DESCRIPTOR_LACK, DescriptorLack};
use crate::vm::machine::KvmMachine;
use crate::vm::request::VmError;

/// Kind of device in the hotplug metrics.
pub(super) const KIND: &str = "dimm";

/// Reason why a DIMM is refused. While there is little room for page descriptors, virtio-mem memory
/// is plugged in steps, but a DIMM is added completely or not at all.
#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Dimm(#[from] DimmError),
    #[error(transparent)]
    Descriptors(#[from] DescriptorLack),
}

impl KvmMachine {
    /// Returns the number of bytes that must be added to reach `size_bytes`. Fails if they cannot
    /// be added as a single DIMM.
    pub(in crate::vm) fn missing_bytes(&self, size_bytes: u64) -> Result<u64, VmError> {
        // At the next boot, the requested size is boot memory. If the VM could not boot with that
        // layout, a reboot by the guest would end the VM.
        self.memory.could_boot_with(0, size_bytes).map_err(|err| {
            VmError::BadRequest(format!(
                "memory {}: the VM could not boot again: {err}",
                Size(size_bytes)
            ))
        })?;
        let more = size_bytes.saturating_sub(self.dram_bytes());
        match &self.dimms {
            _ if more == 0 => Ok(0),
            Some(dimms) => {
                let check = || {
                    dimms.plan().next_range(more)?;
                    Ok(self.governor.call(move |core, now| core.check_dimm(more, now))?)
                };
                check().map_err(|err| self.refuse(size_bytes, err))?;
                Ok(more)
            }
            None => Err(VmError::BadRequest(format!(
                "memory {}: the VM has {} of boot memory and no hotplug_size",
                Size(size_bytes),
                Size(self.dram_bytes())
            ))),
        }
    }

    /// Total size of boot memory and all added DIMMs.
    fn dram_bytes(&self) -> u64 {
        self.memory.zones()[0].boot_bytes + self.dimm_bytes()
    }

    fn dimm_bytes(&self) -> u64 {
        self.dimms.as_ref().map_or(0, |dimms| dimms.plan().used_bytes())
    }

    fn refuse(&self, size_bytes: u64, err: Refusal) -> VmError {
        self.hotplug.metrics.count(KIND, "add", "error");
        match err {
            Refusal::Dimm(err) => {
                let text = format!("memory {}: {}", Size(size_bytes), foreshore_types::chain(&err));
                if err.is_the_hosts() { VmError::Failed(text) } else { VmError::BadRequest(text) }
            }
            Refusal::Descriptors(DescriptorLack { dimm_bytes, most_bytes }) => {
                let zone = &self.memory.zones()[0].id;
                self.context.machine.events.expect_of_zone(zone);
                self.context.machine.events.emit_of_guest(Event::MemoryRefused {
                    zone,
                    reason: DESCRIPTOR_LACK,
                    requested_bytes: self.dimm_bytes(),
                });
                VmError::NoRoomForDescriptors { size_bytes, dimm_bytes, most_bytes }
            }
        }
    }

    /// Adds a DIMM of `more` bytes, so that the zone grows to `size_bytes`, and notifies the guest.
    /// DIMMs cannot be removed, so a smaller size takes effect only at the next boot.
    pub(in crate::vm) fn grow_by_dimm(
        &mut self,
        size_bytes: u64,
        more: u64,
    ) -> Result<(), VmError> {
        let there = self.dram_bytes();
        let Some(dimms) = self.dimms.as_mut().filter(|_| more > 0) else {
            if size_bytes < there {
                let (wanted, there) = (Size(size_bytes), Size(there));
                warn!(%wanted, %there, "Boot memory and DIMMs cannot be removed before the next boot");
            }
            return Ok(());
        };
        // The room for page descriptors may have been used since the plan was made. The room is
        // checked before the DIMM is populated, which may take a long time, and again when the DIMM
        // is accounted for.
        let governor = &self.governor;
        let check = || Ok(governor.call(move |core, now| core.check_dimm(more, now))?);
        let account = || Ok(governor.call(move |core, now| core.add_dimm(more, now))?);
        let added = check().and_then(|()| dimms.add(more, account));
        let dimm = added.map_err(|err| self.refuse(size_bytes, err))?;
        let node = self.memory.zones()[0].guest_node;
        self.hotplug.metrics.count(KIND, "add", "ok");
        self.hotplug.page.dimms(|registers| registers.put(dimm, node));
        // If the interrupt fails, the guest finds the DIMM at its next scan.
        if let Err(err) = self.hotplug.ged.notify(ged::Event::Memory) {
            warn!(%err, "Cannot notify the guest of the DIMM; it finds the DIMM at its next scan");
        }
        info!(start = dimm.start, bytes = dimm.len, "The DIMM is added");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use foreshore_devices::events::WatcherItem;
    use foreshore_devices::memory::slots::SlotTable;
    use foreshore_devices::memory::slots::fake::FakeSlots;
    use foreshore_devices::memory::zone::{Growth, ZoneSpec};
    use foreshore_devices::memory::{MemoryOptions, build};

    use super::*;
    use crate::acpi::dimms::NONE;
    use crate::vm::machine::tests::machine;
    use crate::vm::request::{Resize, ResizeRequest, ResizeZoneRequest};
    use crate::vm::vm_task::MachineResize;

    const MIB: u64 = 1 << 20;

    fn growing(hotplug_bytes: u64) -> (KvmMachine, Arc<FakeSlots>) {
        let spec = ZoneSpec {
            id: crate::config::DRAM_ZONE.to_owned(),
            growth: Growth::Dimms,
            boot_bytes: 65 * MIB,
            hotplug_bytes,
            ..ZoneSpec::default()
        };
        let table = Arc::new(FakeSlots::default());
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let mut memory =
            build(vec![spec], None, Arc::clone(&table) as Arc<dyn SlotTable>, options).unwrap();
        let mut machine = machine();
        machine.dimms = memory.take_dimms();
        machine.memory = memory;
        (machine, table)
    }

    fn dram(size_bytes: u64) -> Resize {
        Resize::Vm(ResizeRequest { desired_ram: Some(size_bytes), ..ResizeRequest::default() })
    }

    fn resize(machine: &mut KvmMachine, mib: u64) -> Result<(), VmError> {
        for step in machine.plan_resize(&dram(mib * MIB))? {
            machine.resize(step)?;
        }
        Ok(())
    }

    fn notified_slot(machine: &KvmMachine) -> u32 {
        machine.hotplug.page.dimms(|registers| registers.read(0x1c))
    }

    #[test]
    fn growth_adds_a_dimm_and_shrink_has_no_effect() {
        let (mut machine, _table) = growing(1024 * MIB);
        resize(&mut machine, 65 + 256).unwrap();
        assert_eq!(
            (machine.memory_bytes(), notified_slot(&machine), notified_slot(&machine)),
            ((65 + 256) * MIB, 0, NONE)
        );
        for mib in [65 + 256, 65 + 128, 65, 16] {
            resize(&mut machine, mib).unwrap();
        }
        assert_eq!((machine.memory_bytes(), notified_slot(&machine)), ((65 + 256) * MIB, NONE));
        resize(&mut machine, 65 + 1024).unwrap();
        assert_eq!((machine.memory_bytes(), notified_slot(&machine)), ((65 + 1024) * MIB, 1));
    }

    #[test]
    fn size_that_could_not_be_booted_is_refused() {
        let (machine, _table) = growing(1024 * MIB);
        for (size_bytes, text) in
            [(MIB, "below the minimum"), (1 << 50, "40-bit physical address space")]
        {
            let error = machine.plan_resize(&dram(size_bytes)).unwrap_err();
            assert!(
                matches!(&error, VmError::BadRequest(reason) if reason.contains("boot again") && reason.contains(text)),
                "{error}"
            );
        }
        assert_eq!((machine.memory_bytes(), notified_slot(&machine)), (65 * MIB, NONE));
    }

    #[test]
    fn impossible_dimm_is_refused_without_notifying_the_guest() {
        let (mut machine, table) = growing(1024 * MIB);
        machine.plan_resize(&dram((65 + 128) * MIB)).unwrap();
        for (mib, text) in [
            (66, "memory 66 MiB: an increase of 1 MiB is not a multiple of the block size 128 MiB"),
            (65 + 1024 + 128, "an increase of 1152 MiB exceeds the 1 GiB that hotplug_size leaves"),
        ] {
            let error = resize(&mut machine, mib).unwrap_err();
            assert!(
                matches!(&error, VmError::BadRequest(reason) if reason.contains(text)),
                "{error}"
            );
        }
        let zone = ResizeZoneRequest { id: "dram".to_owned(), desired_ram: 193 * MIB };
        assert!(matches!(machine.plan_resize(&Resize::Zone(zone)), Err(VmError::BadRequest(_))));
        *table.calls_left.lock() = Some(0);
        let error = resize(&mut machine, 193).unwrap_err();
        assert!(
            matches!(&error, VmError::Failed(reason) if reason.contains("KVM refused")),
            "{error}"
        );
        *table.calls_left.lock() = None;
        assert_eq!((machine.memory_bytes(), notified_slot(&machine)), (65 * MIB, NONE));
        let (mut machine, _table) = growing(0);
        let error = resize(&mut machine, 193).unwrap_err();
        assert!(
            matches!(&error, VmError::BadRequest(reason) if reason.contains("no hotplug_size")),
            "{error}"
        );
        resize(&mut machine, 32).unwrap();
    }

    #[test]
    fn dimm_without_room_for_its_descriptors_is_refused() {
        // The guest has 384 MiB of boot memory, and no agent sends reports.
        const MOST_MIB: u64 = 384 * 8;
        let (mut machine, _table) = growing(8192 * MIB);
        resize(&mut machine, 65 + 256).unwrap();
        let mut watcher = machine.context.machine.events.watch();
        let error = resize(&mut machine, 65 + MOST_MIB + 128).unwrap_err();
        machine.context.machine.events.end();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut refused = Vec::new();
        while let Some(WatcherItem::Event(event)) = runtime.block_on(watcher.next()) {
            refused.push((event.event, event.properties.clone().unwrap()));
        }
        let properties =
            [("zone", "dram"), ("reason", "descriptors"), ("requested_bytes", "268435456")];
        let event =
            ("memory-refused", properties.map(|(key, value)| (key, value.to_owned())).into());
        assert_eq!(refused, [event]);
        let text = "page descriptors of 2944 MiB more, which take 46 MiB; it has room for those of 2816 MiB";
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(
            (machine.memory_bytes(), notified_slot(&machine), notified_slot(&machine)),
            ((65 + 256) * MIB, 0, NONE)
        );
        resize(&mut machine, 65 + MOST_MIB).unwrap();
    }

    #[test]
    fn dimm_that_lost_its_room_is_refused_before_population() {
        const MOST_MIB: u64 = 384 * 8;
        let (mut machine, table) = growing(8192 * MIB);
        let plan = machine.plan_resize(&dram((65 + MOST_MIB) * MIB)).unwrap();
        machine.governor.call(|core, now| core.add_dimm(128 * MIB, now)).unwrap();
        // KVM refuses the slot, which is created after the DIMM is populated.
        *table.calls_left.lock() = Some(0);
        for step in plan {
            let error = machine.resize(step).unwrap_err();
            assert!(
                matches!(
                    error,
                    VmError::NoRoomForDescriptors { dimm_bytes, most_bytes, .. }
                        if (dimm_bytes, most_bytes) == (MOST_MIB * MIB, (MOST_MIB - 128) * MIB)
                ),
                "{error}"
            );
        }
        *table.calls_left.lock() = None;
        assert_eq!((machine.memory_bytes(), notified_slot(&machine)), (65 * MIB, NONE));
        // The refused DIMM uses neither address space nor room for page descriptors.
        resize(&mut machine, 65 + MOST_MIB - 128).unwrap();
    }

    #[test]
    fn dimm_that_the_host_refuses_uses_up_no_room() {
        const MOST_MIB: u64 = 384 * 8;
        let (mut machine, table) = growing(8192 * MIB);
        *table.calls_left.lock() = Some(0);
        resize(&mut machine, 65 + MOST_MIB).unwrap_err();
        *table.calls_left.lock() = None;
        resize(&mut machine, 65 + MOST_MIB).unwrap();
    }
}
