//! Speed of swap devices.

use serde::Serialize;

/// A swap device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SwapDevice {
    /// Name that `--swap` accepts.
    pub name: &'static str,
    /// Size of the device.
    pub size_bytes: u64,
    /// Time from a page fault until the page is present.
    pub in_us: u64,
    /// Time to write one page in a sequence of pages.
    pub out_us: u64,
    /// True if the device is in persistent memory, which is worn by writes.
    pub is_pm: bool,
}

impl SwapDevice {
    /// Names that `--swap` accepts.
    pub const NAMES: [&'static str; 3] = ["none", "disk", "pm"];

    /// Returns the device called `name`.
    ///
    /// The values of `pm` are those that SAY-Go measured for swap on persistent memory. The values
    /// of `disk` are those of a virtio-blk disk. A guest that touched 60,000 pages in random order
    /// took 10.8 s instead of 0.032 s, which is 180 us per page. Pages were written at about 200
    /// MB/s.
    pub fn from_name(name: &str, size_bytes: u64) -> Option<Self> {
        let device = |name, size_bytes, in_us, out_us, is_pm| {
            Some(SwapDevice { name, size_bytes, in_us, out_us, is_pm })
        };
        match name {
            "none" => device("none", 0, 0, 0, false),
            "disk" => device("disk", size_bytes, 180, 20, false),
            "pm" => device("pm", size_bytes, 6, 41, true),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_a_device_of_that_name() {
        for name in SwapDevice::NAMES {
            assert_eq!(SwapDevice::from_name(name, 1 << 30).expect("listed").name, name);
        }
        assert_eq!(SwapDevice::from_name("tape", 1 << 30), None);
        assert_eq!(SwapDevice::from_name("none", 1 << 30).expect("listed").size_bytes, 0);
    }
}
