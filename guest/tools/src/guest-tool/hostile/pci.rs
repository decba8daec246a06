//! Drives a modern virtio PCI device (virtio 1.3, 4.1) from user space through sysfs.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, bail, ensure};

use super::queue::{QUEUE_SIZE, Queue};

const VIRTIO_VENDOR: u16 = 0x1af4;
const CAPABILITY_VENDOR: u8 = 0x09;
const CAP_COMMON: u8 = 1;
const CAP_NOTIFY: u8 = 2;
const CAP_DEVICE: u8 = 4;

// Offsets in the common configuration structure (4.1.4.3).
const DEVICE_FEATURE_SELECT: usize = 0;
const DEVICE_FEATURE: usize = 4;
const DRIVER_FEATURE_SELECT: usize = 8;
const DRIVER_FEATURE: usize = 12;
const NUM_QUEUES: usize = 18;
const DEVICE_STATUS: usize = 20;
const QUEUE_SELECT: usize = 22;
const QUEUE_SIZE_AT: usize = 24;
const QUEUE_ENABLE: usize = 28;
const QUEUE_NOTIFY_OFF: usize = 30;
const QUEUE_DESC: usize = 32;

/// Maximum number of polls during a reset. It is more than any reset takes, because each poll is an
/// exit.
const RESET_POLLS: u32 = 100_000;

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

struct Bar {
    base: *mut u8,
    len: usize,
}

#[derive(Clone, Copy)]
struct Region {
    bar: u8,
    offset: usize,
    notify_multiplier: usize,
}

/// Device that has been taken over from its kernel driver.
pub(super) struct Device {
    common: Bar,
    common_offset: usize,
    notify: Bar,
    notify_region: Region,
    notify_offsets: Vec<u16>,
    /// Device-specific configuration structure, if the device has one.
    own: Option<(Bar, usize)>,
}

impl Device {
    /// Finds the device by its PCI device ID, unbinds its driver and maps it.
    pub(super) fn take(device_id: u16) -> Result<Self> {
        let dir = find(device_id)?;
        let driver = dir.join("driver/unbind");
        if driver.exists() {
            let address = dir.file_name().context("no address")?.as_encoded_bytes();
            fs::write(&driver, address).context("Cannot unbind the driver")?;
        }
        let config = OpenOptions::new().read(true).write(true).open(dir.join("config"))?;
        // Enables memory space and bus mastering, which unbinding has disabled (PCI 3.0, 6.2.2).
        config.write_all_at(&[0x06, 0x00], 4).context("Cannot write the command register")?;
        let mut space = [0u8; 256];
        config.read_exact_at(&mut space, 0).context("Cannot read the configuration space")?;
        let common =
            capability(&space, CAP_COMMON).context("The device has no common configuration")?;
        let notify =
            capability(&space, CAP_NOTIFY).context("The device has no notification area")?;
        let own = capability(&space, CAP_DEVICE)
            .map(|own| Ok::<_, Error>((Bar::map(&dir, own.bar)?, own.offset)));
        Ok(Self {
            common: Bar::map(&dir, common.bar)?,
            common_offset: common.offset,
            notify: Bar::map(&dir, notify.bar)?,
            notify_region: notify,
            notify_offsets: Vec::new(),
            own: own.transpose()?,
        })
    }

    /// Reads 8 bytes of the device-specific configuration (virtio 1.3, 4.1.4.6).
    pub(super) fn own_u64(&self, offset: usize) -> Result<u64> {
        let (bar, begin) =
            self.own.as_ref().context("The device has no device-specific configuration")?;
        let half = |at: usize| u64::from(bar.read::<u32>(begin + offset + at));
        Ok(half(0) | half(4) << 32)
    }

    /// Resets the device, and accepts VERSION_1 and the device's own features, bits 0 to 23 (virtio
    /// 1.3, 6). Ring features are not accepted, so using one of them is also an attack.
    pub(super) fn negotiate(&mut self) -> Result<()> {
        ensure!(self.try_negotiate(0)?, "The device refuses the features that it offers");
        self.notify_offsets.clear();
        Ok(())
    }

    /// Resets the device, and negotiates without some of the features that it offers. Returns false
    /// if the device rejects that.
    pub(super) fn try_negotiate(&mut self, without: u32) -> Result<bool> {
        self.reset()?;
        self.set_status(ACKNOWLEDGE | DRIVER);
        self.common.write(self.common_offset + DEVICE_FEATURE_SELECT, 0u32);
        let own: u32 = self.common.read(self.common_offset + DEVICE_FEATURE);
        for (select, features) in [(0u32, own & 0x00ff_ffff & !without), (1, 1)] {
            self.common.write(self.common_offset + DRIVER_FEATURE_SELECT, select);
            self.common.write(self.common_offset + DRIVER_FEATURE, features);
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        Ok(self.status() & FEATURES_OK != 0)
    }

    /// Resets the device and waits for a status of 0 (4.1.4.3.2). If the status does not become 0,
    /// returns an error that contains it.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.set_status(0);
        ensure!(
            (0..RESET_POLLS).any(|_| self.status() == 0),
            "The status is {:#x} after a reset",
            self.status()
        );
        Ok(())
    }

    pub(super) fn queue_count(&self) -> u16 {
        self.common.read(self.common_offset + NUM_QUEUES)
    }

    /// Enables a queue. Returns false if the device does not have this queue.
    pub(super) fn enable_queue(&mut self, queue: &Queue) -> bool {
        let at = self.common_offset;
        self.common.write(at + QUEUE_SELECT, queue.index);
        let largest: u16 = self.common.read(at + QUEUE_SIZE_AT);
        let offset: u16 = self.common.read(at + QUEUE_NOTIFY_OFF);
        self.notify_offsets.push(offset);
        if largest < QUEUE_SIZE {
            return false;
        }
        self.common.write(at + QUEUE_SIZE_AT, QUEUE_SIZE);
        for (number, address) in queue.addresses().into_iter().enumerate() {
            self.common.write(at + QUEUE_DESC + 8 * number, address as u32);
            self.common.write(at + QUEUE_DESC + 8 * number + 4, (address >> 32) as u32);
        }
        self.common.write(at + QUEUE_ENABLE, 1u16);
        true
    }

    pub(super) fn driver_ok(&mut self) {
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    pub(super) fn notify(&mut self, queue: u16) {
        let offset = usize::from(self.notify_offsets[usize::from(queue)])
            * self.notify_region.notify_multiplier;
        self.notify.write(self.notify_region.offset + offset, queue);
    }

    pub(super) fn needs_reset(&self) -> bool {
        self.status() & NEEDS_RESET != 0
    }

    pub(super) fn status(&self) -> u8 {
        self.common.read(self.common_offset + DEVICE_STATUS)
    }

    fn set_status(&mut self, status: u8) {
        self.common.write(self.common_offset + DEVICE_STATUS, status);
    }
}

fn find(device_id: u16) -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/pci/devices").context("Cannot read /sys/bus/pci/devices")? {
        let dir = entry?.path();
        if id(&dir, "vendor")? == VIRTIO_VENDOR && id(&dir, "device")? == device_id {
            return Ok(dir);
        }
    }
    bail!("No virtio device with PCI id {device_id:#06x}")
}

fn id(dir: &Path, file: &str) -> Result<u16> {
    let text = fs::read_to_string(dir.join(file))?;
    Ok(u16::from_str_radix(text.trim().trim_start_matches("0x"), 16)?)
}

/// Searches the capability list for virtio's structure of this type (4.1.4).
fn capability(space: &[u8; 256], wanted: u8) -> Option<Region> {
    let byte = |at: usize| space.get(at).copied();
    let word =
        |at: usize| Some(u32::from_le_bytes(space.get(at..at + 4)?.try_into().ok()?) as usize);
    let mut at = usize::from(space[0x34]);
    // Bounded, so that the search ends even if the list has a loop. There is room for at most 48
    // capabilities.
    for _ in 0..48 {
        if at == 0 {
            return None;
        }
        if byte(at)? == CAPABILITY_VENDOR && byte(at + 3)? == wanted {
            let notify_multiplier = if wanted == CAP_NOTIFY { word(at + 16)? } else { 0 };
            return Some(Region { bar: byte(at + 4)?, offset: word(at + 8)?, notify_multiplier });
        }
        at = usize::from(byte(at + 1)?);
    }
    None
}

/// Type of a register that is read and written as a whole.
trait Register: Copy {}
impl Register for u8 {}
impl Register for u16 {}
impl Register for u32 {}

impl Bar {
    fn map(dir: &Path, number: u8) -> Result<Self> {
        let path = dir.join(format!("resource{number}"));
        let file: File = OpenOptions::new().read(true).write(true).open(&path)?;
        let len = usize::try_from(file.metadata()?.len())?;
        // SAFETY: a new shared mapping of a BAR that no driver uses anymore. The result is checked.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(
            base != libc::MAP_FAILED,
            "Cannot map {}: {}",
            path.display(),
            io::Error::last_os_error()
        );
        Ok(Self { base: base.cast(), len })
    }

    fn at<T: Register>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.len, "register {offset:#x} is outside the BAR");
        // SAFETY: the offset is within the mapping, as just asserted.
        let register = unsafe { self.base.add(offset) }.cast::<T>();
        assert!(register.is_aligned(), "register {offset:#x} is not aligned");
        register
    }

    fn read<T: Register>(&self, offset: usize) -> T {
        // SAFETY: at() returns an aligned register within the mapping. Every bit pattern is a valid
        // number.
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    fn write<T: Register>(&mut self, offset: usize, value: T) {
        // SAFETY: as in read().
        unsafe { self.at::<T>(offset).write_volatile(value) };
    }
}
