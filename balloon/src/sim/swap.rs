//! Swap devices, as far as their speed goes.

use serde::Serialize;

/// A swap device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SwapDevice {
    /// Its name on the command line.
    pub name: &'static str,
    /// How much fits.
    pub size_bytes: u64,
    /// From a fault until its page is there.
    pub in_us: u64,
    /// For a page that goes out, when one follows another.
    pub out_us: u64,
    /// It lies in persistent memory: what is written wears that.
    pub is_pm: bool,
}

impl SwapDevice {
    /// The names that `--swap` takes.
    pub const NAMES: [&'static str; 3] = ["none", "disk", "pm"];

    /// The device called `name`.
    ///
    /// `pm` has the figures that SAY-Go measured for swap on persistent memory. `disk` has those of
    /// a virtio-blk disk of a guest that touched 60,000 pages at random: 10.8 s and not 0.032
    /// s, so 180 us each; pages went out at about 200 MB/s.
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
    fn every_name_is_a_device_of_that_name() {
        for name in SwapDevice::NAMES {
            assert_eq!(SwapDevice::from_name(name, 1 << 30).expect("listed").name, name);
        }
        assert_eq!(SwapDevice::from_name("tape", 1 << 30), None);
        assert_eq!(SwapDevice::from_name("none", 1 << 30).expect("listed").size_bytes, 0);
    }
}
