//! Layout of the virtio structures on PCI (virtio 1.3, 4.1.4): one BAR, and capabilities that point
//! into it.

use super::registers;
use crate::pci::msix;
use crate::pci::{ConfigSpace, FunctionIds};

pub const BAR: u8 = 0;
/// Length of the BAR in bytes.
pub const BAR_LEN: u32 = 0x8000;
pub const COMMON_OFFSET: u32 = 0x0000;
pub const ISR_OFFSET: u32 = 0x1000;
pub const DEVICE_OFFSET: u32 = 0x2000;
/// Length of the device configuration in bytes.
pub const DEVICE_LEN: u32 = 0x1000;
/// Offset of the notification structure. Each queue has its own address, so that an ioeventfd need
/// not match the written value.
pub const NOTIFY_OFFSET: u32 = 0x3000;
/// Distance in bytes between the notification addresses of two queues.
pub const NOTIFY_MULTIPLIER: u32 = 4;
pub const MSIX_TABLE_OFFSET: u32 = 0x4000;
/// Offset of the MSI-X pending bits.
pub const MSIX_PBA_OFFSET: u32 = 0x6000;

/// Maximum number of queues that fit into the structures.
pub const QUEUES_MAX: u16 = 256;

const VENDOR_VIRTIO: u16 = 0x1af4;
/// PCI device ids are this value plus the device type (4.1.2).
const DEVICE_ID_BASE: u16 = 0x1040;
/// Modern devices have revision 1 or higher and a subsystem id of 0x40 or higher (4.1.2.1).
const REVISION: u8 = 1;
const SUBSYSTEM: u16 = 0x40;

const VENDOR_CAPABILITY: u8 = 0x09;
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;

/// Offsets in the PCI configuration access capability (4.1.4.9).
pub mod access {
    pub const BAR: usize = 4;
    pub const OFFSET: usize = 8;
    /// Length of the access.
    pub const LEN: usize = 12;
    /// Data window of the access.
    pub const DATA: u16 = 16;
}

/// Offsets of capabilities in configuration space.
pub struct Capabilities {
    pub msix: u16,
    pub access: u16,
}

/// Builds the header and capabilities of a device.
pub fn config_space(device_type: u16, queues: u16) -> (ConfigSpace, Capabilities) {
    let mut config = ConfigSpace::new(&FunctionIds {
        vendor: VENDOR_VIRTIO,
        device: DEVICE_ID_BASE + device_type,
        revision: REVISION,
        class: class(device_type),
        subsystem_vendor: VENDOR_VIRTIO,
        subsystem: SUBSYSTEM,
    });
    config.add_bar(BAR, BAR_LEN);
    let (body, writable) = msix::capability(queues + 1, BAR, MSIX_TABLE_OFFSET, MSIX_PBA_OFFSET);
    let msix = config.add_capability(msix::CAPABILITY_ID, &body, &writable);
    let mut add = |cfg_type, offset, len, extra: &[u8], writable: &[u8]| {
        config.add_capability(
            VENDOR_CAPABILITY,
            &capability(cfg_type, offset, len, extra),
            writable,
        )
    };
    add(CFG_COMMON, COMMON_OFFSET, registers::LEN as u32, &[], &[]);
    add(CFG_ISR, ISR_OFFSET, 1, &[], &[]);
    add(CFG_DEVICE, DEVICE_OFFSET, DEVICE_LEN, &[], &[]);
    let notify_len = u32::from(queues) * NOTIFY_MULTIPLIER;
    add(CFG_NOTIFY, NOTIFY_OFFSET, notify_len, &NOTIFY_MULTIPLIER.to_le_bytes(), &[]);
    // In the access capability, BAR, offset and length are writable. The mask does not include the
    // id and the link.
    let mut writable = [0; 18];
    writable[access::BAR - 2] = 0xff;
    writable[access::OFFSET - 2..].fill(0xff);
    let access = add(CFG_PCI, 0, 0, &[0; 4], &writable);
    (config, Capabilities { msix, access })
}

/// Returns a struct virtio_pci_cap without its id and link (4.1.4).
fn capability(cfg_type: u8, offset: u32, len: u32, extra: &[u8]) -> Vec<u8> {
    let mut body = vec![(16 + extra.len()) as u8, cfg_type, BAR, 0, 0, 0];
    body.extend(offset.to_le_bytes());
    body.extend(len.to_le_bytes());
    body.extend(extra);
    body
}

/// Returns the PCI class, which tools display and drivers ignore.
fn class(device_type: u16) -> u32 {
    match device_type {
        1 => 0x02_00_00,
        2 => 0x01_00_00,
        3 => 0x07_80_00,
        19 => 0x02_80_00,
        _ => 0x00_ff_00,
    }
}
