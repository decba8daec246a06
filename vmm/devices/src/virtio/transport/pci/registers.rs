//! The common configuration structure (virtio 1.3, 4.1.4.3) and the device status.
//!
//! Drivers may write registers in any order. A write only changes plain values here, and all
//! effects on the device are calls of [`Device`].

use std::sync::Arc;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};

use super::interrupt::VectorMap;
use crate::virtio::read_config_bytes;

/// Length of the structure in bytes.
pub(super) const LEN: usize = 0x40;

/// The structure as a driver reads it.
pub(super) type Image = [u8; LEN];

const ACKNOWLEDGE: u8 = VIRTIO_CONFIG_S_ACKNOWLEDGE as u8;
const DRIVER: u8 = VIRTIO_CONFIG_S_DRIVER as u8;
const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
const NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;
const FAILED: u8 = VIRTIO_CONFIG_S_FAILED as u8;

/// Status bits in the order in which a driver sets them, and for each the bit that must already be
/// set (virtio 1.3, 3.1.1).
const STEPS: [(u8, u8); 4] =
    [(ACKNOWLEDGE, 0), (DRIVER, ACKNOWLEDGE), (FEATURES_OK, DRIVER), (DRIVER_OK, FEATURES_OK)];

/// The device behind the registers.
pub(super) trait Device {
    /// Checks that the device can work with `features`, a subset of the offered features.
    fn accepts_features(&mut self, features: u64) -> bool;
    /// Checks that the rings of the queue are in memory and aligned.
    fn accepts_queue(&mut self, index: u16, queue: &QueueRegisters) -> bool;
    /// Activates the device at DRIVER_OK. If it returns false, DEVICE_NEEDS_RESET is set.
    fn activate(&mut self, features: u64, queues: &[QueueRegisters]) -> bool;
    /// Signals DEVICE_NEEDS_RESET to the driver by a configuration change (2.1.2).
    fn needs_reset(&mut self);
    /// Returns true if the device has failed since its activation.
    fn is_broken(&self) -> bool;
    /// Stops the device after the driver has reset it or cleared Bus Master. When this returns, the
    /// device's workers have stopped.
    fn reset(&mut self);
    /// Returns the value of config_generation. If the configuration has changed since the last
    /// call, the value differs from the previous one.
    fn config_generation(&mut self) -> u8;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueRegisters {
    /// Maximum size, which the device offers.
    pub size_max: u16,
    /// Size set by the driver. A power of two, at most `size_max`.
    pub size: u16,
    pub enabled: bool,
    pub descriptors: u64,
    /// Address of the available ring, which the specification calls the driver area.
    pub available: u64,
    /// Address of the used ring, which the specification calls the device area.
    pub used: u64,
}

impl QueueRegisters {
    fn new(size_max: u16) -> Self {
        Self { size_max, size: size_max, enabled: false, descriptors: 0, available: 0, used: 0 }
    }
}

pub(super) struct CommonRegisters {
    features_offered: u64,
    features: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
    vectors: Arc<VectorMap>,
}

/// Offsets of fields.
mod field {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const CONFIG_MSIX_VECTOR: u64 = 0x10;
    pub(super) const DEVICE_STATUS: u64 = 0x14;
    pub(super) const CONFIG_GENERATION: u64 = 0x15;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_MSIX_VECTOR: u64 = 0x1a;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DRIVER: u64 = 0x28;
    pub(super) const QUEUE_DEVICE: u64 = 0x30;
}

impl CommonRegisters {
    pub(super) fn new(
        features_offered: u64,
        queue_sizes_max: &[u16],
        vectors: Arc<VectorMap>,
    ) -> Self {
        Self {
            features_offered,
            features: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            status: 0,
            queue_select: 0,
            queues: queue_sizes_max.iter().map(|&size_max| QueueRegisters::new(size_max)).collect(),
            vectors,
        }
    }

    /// Reads any part of the structure.
    pub(super) fn read(&self, offset: u64, data: &mut [u8], device: &mut dyn Device) {
        let status = self.status | if device.is_broken() { NEEDS_RESET } else { 0 };
        let image = self.image(status, || device.config_generation(), offset, data.len());
        read_config_bytes(&image, offset, data);
    }

    fn image(&self, status: u8, generation: impl FnOnce() -> u8, offset: u64, len: usize) -> Image {
        let mut image = [0; LEN];
        let mut put = |at: usize, value: &[u8]| image[at..at + value.len()].copy_from_slice(value);
        put(0x00, &self.device_feature_select.to_le_bytes());
        put(0x04, &half(self.features_offered, self.device_feature_select).to_le_bytes());
        put(0x08, &self.driver_feature_select.to_le_bytes());
        put(0x0c, &half(self.features, self.driver_feature_select).to_le_bytes());
        put(0x10, &self.vectors.config().to_le_bytes());
        put(0x12, &(self.queues.len() as u16).to_le_bytes());
        put(0x14, &[status]);
        // Computing the generation is expensive, so it is computed only if the driver reads it.
        let at = field::CONFIG_GENERATION;
        if offset <= at && offset.saturating_add(len as u64) > at {
            put(at as usize, &[generation()]);
        }
        put(0x16, &self.queue_select.to_le_bytes());
        // A queue that does not exist reads as size 0 (4.1.4.3.1).
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(0x18, &queue.size.to_le_bytes());
            put(0x1a, &self.vectors.queue(self.queue_select).to_le_bytes());
            put(0x1c, &u16::from(queue.enabled).to_le_bytes());
            put(0x1e, &self.queue_select.to_le_bytes());
            put(0x20, &queue.descriptors.to_le_bytes());
            put(0x28, &queue.available.to_le_bytes());
            put(0x30, &queue.used.to_le_bytes());
        }
        // queue_notif_config_data, queue_reset and the admin queues belong to features that are not
        // offered.
        image
    }

    /// Writes one field with an access of the field's width, or half of a 64-bit field (4.1.3.1).
    /// Ignores all other writes.
    pub(super) fn write(&mut self, offset: u64, data: &[u8], device: &mut dyn Device) {
        match *data {
            [byte] if offset == field::DEVICE_STATUS => self.write_status(byte, device),
            [low, high] => self.write_u16(offset, u16::from_le_bytes([low, high]), device),
            [b0, b1, b2, b3] => self.write_u32(offset, u32::from_le_bytes([b0, b1, b2, b3])),
            [_, _, _, _, _, _, _, _]
                if matches!(
                    offset,
                    field::QUEUE_DESC | field::QUEUE_DRIVER | field::QUEUE_DEVICE
                ) =>
            {
                self.write(offset, &data[..4], device);
                self.write(offset + 4, &data[4..], device);
            }
            _ => (),
        }
    }

    fn write_u32(&mut self, offset: u64, value: u32) {
        match offset {
            field::DEVICE_FEATURE_SELECT => self.device_feature_select = value,
            field::DRIVER_FEATURE_SELECT => self.driver_feature_select = value,
            // Negotiated features are fixed until the next reset.
            field::DRIVER_FEATURE if self.status & FEATURES_OK == 0 => {
                set_half(&mut self.features, self.driver_feature_select, value);
            }
            field::QUEUE_DESC..0x38 => {
                let Some(queue) = self.configurable_queue() else { return };
                let address = match offset & !7 {
                    field::QUEUE_DESC => &mut queue.descriptors,
                    field::QUEUE_DRIVER => &mut queue.available,
                    field::QUEUE_DEVICE => &mut queue.used,
                    _ => return,
                };
                match offset & 7 {
                    0 => set_half(address, 0, value),
                    4 => set_half(address, 1, value),
                    _ => (),
                }
            }
            _ => (),
        }
    }

    fn write_u16(&mut self, offset: u64, value: u16, device: &mut dyn Device) {
        match offset {
            field::CONFIG_MSIX_VECTOR => self.vectors.set_config(value),
            field::QUEUE_SELECT => self.queue_select = value,
            field::QUEUE_SIZE => {
                if let Some(queue) = self.configurable_queue()
                    && value.is_power_of_two()
                    && value <= queue.size_max
                {
                    queue.size = value;
                }
            }
            field::QUEUE_MSIX_VECTOR => self.vectors.set_queue(self.queue_select, value),
            // Drivers never write 0 (4.1.4.3.2).
            field::QUEUE_ENABLE if value == 1 && self.status & FEATURES_OK != 0 => {
                let index = self.queue_select;
                if let Some(queue) = self.configurable_queue() {
                    queue.enabled = device.accepts_queue(index, queue);
                }
            }
            _ => (),
        }
    }

    /// Returns the selected queue. Returns `None` if it is already enabled or DRIVER_OK is set.
    fn configurable_queue(&mut self) -> Option<&mut QueueRegisters> {
        if self.status & DRIVER_OK != 0 {
            return None;
        }
        self.queues.get_mut(usize::from(self.queue_select)).filter(|queue| !queue.enabled)
    }

    fn write_status(&mut self, value: u8, device: &mut dyn Device) {
        if value == 0 {
            return self.reset(device);
        }
        let driver_bits = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        if self.status & driver_bits & !value != 0 {
            // Only a reset clears a bit (2.1.1).
            return;
        }
        self.status |= value & FAILED;
        for (step, before) in STEPS {
            if value & step == 0 || self.status & step != 0 {
                continue;
            }
            if self.status & before != before || self.status & (FAILED | NEEDS_RESET) != 0 {
                return;
            }
            if step == FEATURES_OK && !self.features_are_good(device) {
                return;
            }
            self.status |= step;
            if step == DRIVER_OK && !device.activate(self.features, &self.queues) {
                self.status |= NEEDS_RESET;
                device.needs_reset();
            }
        }
    }

    fn features_are_good(&self, device: &mut dyn Device) -> bool {
        self.features & !self.features_offered == 0 && device.accepts_features(self.features)
    }

    /// Resets the device. A driver requests this by writing a status of 0.
    pub(super) fn reset(&mut self, device: &mut dyn Device) {
        device.reset();
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.size_max).collect();
        self.vectors.reset();
        *self = Self::new(self.features_offered, &sizes, Arc::clone(&self.vectors));
    }

    /// Stops a device that may no longer access memory. Requests in progress are lost, so the
    /// device needs a reset even if it may access memory again later. The driver is not notified,
    /// because DRIVER_OK is cleared (2.1.2).
    pub(super) fn handle_bus_master_loss(&mut self, device: &mut dyn Device) {
        if self.status & DRIVER_OK != 0 {
            device.reset();
            self.status = self.status & !DRIVER_OK | NEEDS_RESET;
        }
    }
}

/// Changes `image` as DEVICE_NEEDS_RESET changes the registers.
pub(super) fn set_needs_reset(image: &mut Image) {
    image[field::DEVICE_STATUS as usize] |= NEEDS_RESET;
}

/// Changes `image` as a signaled change of the configuration changes the registers.
pub(super) fn advance_generation(image: &mut Image) {
    let generation = &mut image[field::CONFIG_GENERATION as usize];
    *generation = generation.wrapping_add(1);
}

/// Returns the half of a 64-bit value that a select register selects. Returns 0 if it selects
/// neither half.
fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_half(target: &mut u64, select: u32, value: u32) {
    match select {
        0 => *target = *target & !0xffff_ffff | u64::from(value),
        1 => *target = *target & 0xffff_ffff | u64::from(value) << 32,
        _ => (),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

    use super::super::interrupt::NO_VECTOR;
    use super::*;

    const OFFERED: u64 = 1 << VIRTIO_F_VERSION_1 | 0b101;

    #[derive(Default)]
    struct FakeDevice {
        refuse: bool,
        active: bool,
        resets: usize,
        needs_reset: usize,
        broken: bool,
        activations: Vec<(u64, Vec<bool>)>,
    }

    impl Device for FakeDevice {
        fn accepts_features(&mut self, features: u64) -> bool {
            features >> VIRTIO_F_VERSION_1 & 1 == 1
        }
        fn accepts_queue(&mut self, _: u16, queue: &QueueRegisters) -> bool {
            queue.descriptors != 0
        }
        fn activate(&mut self, features: u64, queues: &[QueueRegisters]) -> bool {
            assert!(!self.active, "device activated twice");
            self.active = !self.refuse;
            self.activations.push((features, queues.iter().map(|queue| queue.enabled).collect()));
            self.active
        }
        fn needs_reset(&mut self) {
            self.needs_reset += 1;
        }
        fn is_broken(&self) -> bool {
            self.broken
        }
        fn reset(&mut self) {
            (self.active, self.broken) = (false, false);
            self.resets += 1;
        }
        fn config_generation(&mut self) -> u8 {
            7
        }
    }

    struct Rig {
        registers: CommonRegisters,
        device: FakeDevice,
    }

    impl Rig {
        fn new() -> Self {
            let registers = CommonRegisters::new(OFFERED, &[256, 64], Arc::new(VectorMap::new(2)));
            Self { registers, device: FakeDevice::default() }
        }
        fn read(&mut self, offset: u64, len: usize) -> u64 {
            let mut data = [0; 8];
            self.registers.read(offset, &mut data[..len], &mut self.device);
            u64::from_le_bytes(data)
        }
        fn write(&mut self, offset: u64, len: usize, value: u64) {
            self.registers.write(offset, &value.to_le_bytes()[..len], &mut self.device);
        }
        fn status(&mut self, value: u8) -> u8 {
            self.write(0x14, 1, value.into());
            self.read(0x14, 1) as u8
        }
        fn negotiate(&mut self, features: u64) -> u8 {
            self.status(1);
            self.status(3);
            for half in 0..2 {
                self.write(0x08, 4, half);
                self.write(0x0c, 4, features >> (32 * half) & 0xffff_ffff);
            }
            self.status(11)
        }
    }

    #[test]
    fn driver_that_follows_the_specification_activates_the_device() {
        let mut rig = Rig::new();
        assert_eq!(rig.read(0x12, 2), 2);
        rig.write(0x00, 4, 1);
        assert_eq!(rig.read(0x04, 4), OFFERED >> 32);
        rig.write(0x00, 4, 2);
        assert_eq!(rig.read(0x04, 4), 0);
        assert_eq!(rig.negotiate(OFFERED & !1), 11);
        rig.write(0x16, 2, 1);
        assert_eq!(rig.read(0x18, 2), 64);
        assert_eq!(rig.read(0x1e, 2), 1);
        rig.write(0x18, 2, 16);
        rig.write(0x1a, 2, 2);
        rig.write(0x20, 4, 0x1000);
        rig.write(0x24, 4, 1);
        rig.write(0x28, 8, 0x2_0000_2000);
        rig.write(0x30, 4, 0x3000);
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 1);
        assert_eq!(rig.read(0x18, 2), 16);
        assert_eq!(rig.read(0x1a, 2), 2);
        assert_eq!(rig.read(0x20, 8), 0x1_0000_1000);
        assert_eq!(rig.read(0x28, 8), 0x2_0000_2000);
        assert_eq!(rig.status(15), 15);
        assert_eq!(rig.device.activations, [(OFFERED & !1, vec![false, true])]);
        assert_eq!(rig.read(0x15, 1), 7);
        assert_eq!(rig.status(0), 0);
        assert!(!rig.device.active);
        assert_eq!(rig.read(0x18, 2), 256, "queue 0 is selected again");
        rig.write(0x16, 2, 1);
        assert_eq!((rig.read(0x18, 2), rig.read(0x1c, 2), rig.read(0x20, 8)), (64, 0, 0));
        assert_eq!(rig.read(0x1a, 2), u64::from(NO_VECTOR));
    }

    #[test]
    fn status_bits_are_set_in_order_and_stay_set() {
        // Columns: status values that are written in order, and the status that is read after that.
        let table: &[(&[u8], u8)] = &[
            (&[2], 0),
            (&[1, 3], 3),
            (&[3], 3),
            (&[4], 0),
            (&[1, 3, 7], 3),
            (&[1, 3, 2], 3),
            (&[1, 3, 1], 3),
            (&[1, 128], 1),
            (&[1, 129, 131], 129),
            (&[64], 0),
            (&[1, 65], 1),
            (&[0x30], 0),
            (&[1, 3, 0], 0),
        ];
        for (writes, expected) in table {
            let mut rig = Rig::new();
            let status = writes.iter().map(|value| rig.status(*value)).last().unwrap();
            assert_eq!(status, *expected, "{writes:?}");
            assert_eq!(rig.device.activations, []);
        }
    }

    #[test]
    fn missing_or_unoffered_features_are_refused() {
        for features in [0, 0b101, OFFERED | 0b10] {
            let mut rig = Rig::new();
            assert_eq!(rig.negotiate(features), 3);
        }
        let mut rig = Rig::new();
        rig.negotiate(OFFERED);
        rig.write(0x08, 4, 0);
        rig.write(0x0c, 4, 0);
        rig.status(15);
        assert_eq!(rig.device.activations[0].0, OFFERED, "negotiated features cannot change");
    }

    #[test]
    fn queues_are_checked_when_enabled_and_fixed_afterwards() {
        let mut rig = Rig::new();
        rig.write(0x20, 8, 0x1000);
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 0, "before FEATURES_OK");
        rig.negotiate(OFFERED);
        rig.write(0x20, 8, 0);
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 0, "the device refused the features");
        for bad in [0, 3, 512, 0xffff] {
            rig.write(0x18, 2, bad);
            assert_eq!(rig.read(0x18, 2), 256);
        }
        rig.write(0x20, 8, 0x1000);
        rig.write(0x1c, 2, 1);
        rig.write(0x1c, 2, 0);
        rig.write(0x18, 2, 8);
        rig.write(0x20, 8, 0x5000);
        assert_eq!((rig.read(0x1c, 2), rig.read(0x18, 2), rig.read(0x20, 8)), (1, 256, 0x1000));
        rig.write(0x16, 2, 1);
        rig.write(0x20, 8, 0x1000);
        rig.status(15);
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 0, "after DRIVER_OK");
    }

    #[test]
    fn unknown_queue_reads_as_zero() {
        let mut rig = Rig::new();
        rig.negotiate(OFFERED);
        rig.write(0x16, 2, 2);
        rig.write(0x18, 2, 8);
        rig.write(0x1a, 2, 1);
        rig.write(0x20, 8, 0x1000);
        rig.write(0x1c, 2, 1);
        assert_eq!((rig.read(0x18, 8), rig.read(0x20, 8)), (0, 0));
    }

    #[test]
    fn unknown_vector_reads_as_none() {
        let mut rig = Rig::new();
        for (offset, value, expected) in
            [(0x10, 2, 2), (0x10, 3, 0xffff), (0x1a, 0, 0), (0x1a, 0x1000, 0xffff)]
        {
            rig.write(offset, 2, value);
            assert_eq!(rig.read(offset, 2), expected);
        }
    }

    #[test]
    fn failed_activation_needs_a_reset() {
        let mut rig = Rig::new();
        rig.device.refuse = true;
        rig.negotiate(OFFERED);
        assert_eq!(rig.status(15), 15 | 64);
        assert_eq!(rig.status(15 | 64), 15 | 64);
        assert_eq!((rig.device.activations.len(), rig.device.needs_reset), (1, 1));
        assert_eq!(rig.status(0), 0);
        rig.device.refuse = false;
        rig.negotiate(OFFERED);
        assert_eq!(rig.status(15), 15);
    }

    #[test]
    fn device_without_bus_master_stops_until_its_reset() {
        let mut rig = Rig::new();
        rig.negotiate(OFFERED);
        rig.registers.handle_bus_master_loss(&mut rig.device);
        assert_eq!((rig.status(11), rig.device.resets), (11, 0), "the device is not active yet");
        assert_eq!(rig.status(15), 15);
        rig.registers.handle_bus_master_loss(&mut rig.device);
        assert_eq!(
            (rig.read(0x14, 1), rig.device.active, rig.device.needs_reset),
            (11 | 64, false, 0)
        );
        assert_eq!(rig.status(15), 11 | 64);
        assert_eq!(rig.status(15 | 64), 11 | 64);
        assert_eq!(rig.device.activations.len(), 1);
        assert_eq!(rig.status(0), 0);
        rig.negotiate(OFFERED);
        assert_eq!(rig.status(15), 15);
    }

    #[test]
    fn writes_of_invalid_width_are_ignored() {
        let mut rig = Rig::new();
        rig.write(0x14, 2, 1);
        rig.write(0x14, 4, 1);
        rig.write(0x00, 2, 1);
        rig.write(0x16, 1, 1);
        rig.write(0x11, 2, 1);
        rig.registers.write(0x14, &[], &mut rig.device);
        rig.registers.write(u64::MAX, &[0; 8], &mut rig.device);
        assert_eq!((rig.read(0x14, 1), rig.read(0x16, 2)), (0, 0));
        assert_eq!(rig.read(0x00, 4), 0);
    }

    proptest! {
        #[test]
        fn any_access_is_survived(
            accesses in prop::collection::vec((0..0x48u64, 0..10usize, any::<bool>(), any::<u64>()), 0..200),
        ) {
            let mut rig = Rig::new();
            for (offset, len, write, value) in accesses {
                // Makes small values more frequent, because drivers write them.
                let value = if value % 3 == 0 { value >> 60 } else { value };
                let mut data = value.to_le_bytes().to_vec();
                data.resize(len, 0);
                let before = rig.registers.status;
                if write {
                    rig.registers.write(offset, &data, &mut rig.device);
                } else {
                    rig.registers.read(offset, &mut data, &mut rig.device);
                }
                let after = rig.registers.status;
                prop_assert!(after == 0 || after & before == before);
                prop_assert_eq!(rig.device.active, after & DRIVER_OK != 0 && after & NEEDS_RESET == 0);
            }
        }
    }
}
