//! Keeps some DRAM for the kernel's own needs.
//!
//! Hotplugged memory is movable: it serves user pages only. User pages fill the nearest node first, down to the
//! watermark at which kswapd is woken, and only then go to the PM node. After that every page table, socket buffer
//! or page descriptor takes the DRAM node under the watermark, and kswapd swaps, with gigabytes of PM free. Linux has
//! a lever against it: `vm.lowmem_reserve_ratio` keeps pages of a zone from allocations that a higher zone of the
//! same node could serve. Its defaults keep half a megabyte of a small guest; this sizes it to what the kernel needs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::{Zone, ZoneKind};

const PAGE_BYTES: u64 = 4096;

/// The part of a node's memory that is kept: page descriptors of PM four times as large as DRAM take a sixteenth.
const RESERVE_PART: u64 = 16;
const MIN_RESERVE_PAGES: u64 = (8 << 20) / PAGE_BYTES;
const MAX_RESERVE_PAGES: u64 = (512 << 20) / PAGE_BYTES;

/// The zones in the order of the sysctl's numbers, as far as they can serve the kernel.
const KERNEL_ZONES: [ZoneKind; 3] = [ZoneKind::Dma, ZoneKind::Dma32, ZoneKind::Normal];

/// The sysctl and what it held when the agent started.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    initial: Vec<u64>,
    current: Vec<u64>,
    /// What the present setting was made for.
    managed: Vec<u64>,
}

impl Reserve {
    /// Reads the setting under `root`, which is /proc/sys/vm outside of tests.
    pub fn open(root: &Path) -> io::Result<Self> {
        let path = root.join("lowmem_reserve_ratio");
        let text = fs::read_to_string(&path)?;
        let initial: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if initial.len() < KERNEL_ZONES.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        Ok(Reserve { path, current: initial.clone(), initial, managed: Vec::new() })
    }

    /// Adapts the setting to the guest's zones. Does nothing while they stay as they are.
    pub fn adapt(&mut self, zones: &[Zone]) -> io::Result<()> {
        if zones.iter().map(|zone| zone.managed_pages).eq(self.managed.iter().copied()) {
            return Ok(());
        }
        self.managed.clear();
        self.managed.extend(zones.iter().map(|zone| zone.managed_pages));
        let wanted = ratios(zones, &self.initial);
        if wanted != self.current {
            let text: Vec<String> = wanted.iter().map(u64::to_string).collect();
            fs::write(&self.path, text.join(" "))?;
            self.current = wanted;
        }
        Ok(())
    }
}

/// The ratios that keep the reserve in the highest kernel zone of every node that also has movable memory. A zone
/// keeps the pages above it divided by its ratio; one ratio serves all nodes, so the largest need decides. Never less
/// is kept than with the `initial` ratios.
fn ratios(zones: &[Zone], initial: &[u64]) -> Vec<u64> {
    let mut ratios = initial.to_vec();
    for movable in zones.iter().filter(|zone| zone.kind == ZoneKind::Movable) {
        let same_node = || zones.iter().filter(|zone| zone.node == movable.node);
        let top =
            same_node().filter_map(|zone| KERNEL_ZONES.iter().position(|kind| *kind == zone.kind)).max();
        let Some(ratio) = top.and_then(|top| ratios.get_mut(top)) else { continue };
        let total_pages = same_node().fold(0u64, |sum, zone| sum.saturating_add(zone.managed_pages));
        let reserve_pages = (total_pages / RESERVE_PART).clamp(MIN_RESERVE_PAGES, MAX_RESERVE_PAGES);
        *ratio = (*ratio).min((movable.managed_pages / reserve_pages).max(1));
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: [u64; 5] = [256, 256, 32, 0, 0];

    fn zone(node: u32, kind: ZoneKind, mib: u64) -> Zone {
        Zone { node, kind, managed_pages: (mib << 20) / PAGE_BYTES, ..Zone::default() }
    }

    #[test]
    fn a_small_guest_keeps_a_sixteenth_of_its_dram() {
        let zones = [
            zone(0, ZoneKind::Dma, 15),
            zone(0, ZoneKind::Dma32, 337),
            zone(0, ZoneKind::Movable, 128),
            zone(1, ZoneKind::Movable, 1024),
        ];
        // 480 MiB / 16 = 30 MiB; 128 / 30 = 4, which keeps 32 MiB of DMA32.
        assert_eq!(ratios(&zones, &DEFAULTS), [256, 4, 32, 0, 0]);
    }

    #[test]
    fn a_large_guest_keeps_no_more_than_it_needs() {
        let zones = [
            zone(0, ZoneKind::Dma32, 3000),
            zone(0, ZoneKind::Normal, 62_000),
            zone(0, ZoneKind::Movable, 65_536),
        ];
        assert_eq!(ratios(&zones, &DEFAULTS), DEFAULTS, "2 GiB by the default already");
    }

    #[test]
    fn without_movable_memory_beside_the_kernels_nothing_is_kept() {
        let zones = [zone(0, ZoneKind::Dma32, 337), zone(1, ZoneKind::Movable, 1024)];
        assert_eq!(ratios(&zones, &DEFAULTS), DEFAULTS);
        assert_eq!(ratios(&[], &DEFAULTS), DEFAULTS);
        let tiny = [zone(0, ZoneKind::Dma32, 337), zone(0, ZoneKind::Movable, 2)];
        assert_eq!(ratios(&tiny, &DEFAULTS)[1], 1);
    }

    #[test]
    fn the_setting_is_written_when_the_zones_change_and_only_then() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("lowmem_reserve_ratio");
        fs::write(&path, "256\t256\t32\t0\t0\n").expect("write");
        let mut reserve = Reserve::open(dir.path()).expect("opens");
        reserve.adapt(&[zone(0, ZoneKind::Dma32, 337)]).expect("nothing to do");
        assert_eq!(fs::read_to_string(&path).expect("read"), "256\t256\t32\t0\t0\n");
        let plugged = [zone(0, ZoneKind::Dma32, 337), zone(0, ZoneKind::Movable, 128)];
        reserve.adapt(&plugged).expect("writes");
        assert_eq!(fs::read_to_string(&path).expect("read"), "256 4 32 0 0");
        fs::write(&path, "mine").expect("write");
        reserve.adapt(&plugged).expect("nothing to do");
        assert_eq!(fs::read_to_string(&path).expect("read"), "mine");
        reserve.adapt(&[zone(0, ZoneKind::Dma32, 337)]).expect("writes");
        assert_eq!(fs::read_to_string(&path).expect("read"), "256 256 32 0 0", "back to what it was");
    }
}
