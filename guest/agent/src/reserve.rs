//! Adapts the DRAM reserve for the kernel.
//!
//! Hotplugged memory is movable, so it serves only user pages. User pages first fill the nearest
//! node, down to the watermark at which kswapd is woken, and only then the PM node. After that,
//! every page table, socket buffer or page descriptor takes DRAM below the watermark. kswapd then
//! swaps, although gigabytes of PM are free. Linux' `vm.lowmem_reserve_ratio` prevents this. It
//! reserves pages of a zone against allocations that a higher zone of the same node could serve.
//! Its defaults reserve half a megabyte in a small guest. This module adapts it to the kernel's
//! need.
//!
//! The guest's own setting is restored when the agent ends. A killed agent cannot do that, and its
//! successor must not mistake the current value for the guest's own. Therefore, the guest's value
//! and all values written by agents are kept in a record until the guest reboots. The record is
//! written before the setting. A current value that is not in the record is therefore the guest's
//! own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::{KERNEL_ZONES, LINUX_RESERVE_RATIOS, Zone, reserve_ratios};

use crate::record;

/// Name of the sysctl and of its record.
const NAME: &str = "lowmem_reserve_ratio";

/// Sysctl and its value before any agent changed it.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    record: PathBuf,
    initial: Vec<u64>,
    /// Ratios that result in the smallest reserve. They are `initial`, or Linux' defaults if
    /// `initial` comes from the kernel's command line. The VMM computes the latter ratios for the
    /// zones at boot. When plugged DRAM becomes ZONE_NORMAL, they would reserve memory that the
    /// kernel needs.
    min_reserve_ratios: Vec<u64>,
    current: Vec<u64>,
    /// Values written by agents, according to the record.
    written: Vec<Vec<u64>>,
    /// Input from which the current setting was computed: managed pages of the zones, and memory
    /// that can be added to them.
    computed_for: (Vec<u64>, u64),
}

impl Reserve {
    /// Reads the setting below `root`, which is /proc/sys/vm outside of tests, and the record below
    /// `run`, which exists until the guest reboots. `cmdline` is the kernel's command line.
    pub(crate) fn open(root: &Path, run: &Path, cmdline: &str) -> io::Result<Self> {
        let (path, record) = (root.join(NAME), run.join(NAME));
        let current = ratios_of(&fs::read_to_string(&path)?);
        if current.len() < KERNEL_ZONES.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        // The first line is the guest's setting. The others were written by agents.
        let text = fs::read_to_string(&record).unwrap_or_default();
        let mut recorded = text.lines().map(ratios_of);
        let (initial, written) = match recorded.next() {
            Some(initial) if initial.len() == current.len() => (initial, recorded.collect()),
            _ => (current.clone(), Vec::new()),
        };
        let is_ours = written.contains(&current);
        let (initial, written) =
            if is_ours { (initial, written) } else { (current.clone(), Vec::new()) };
        let is_of_cmdline = ratios_on(cmdline).is_some_and(|ratios| ratios == initial);
        let min_reserve_ratios =
            if is_of_cmdline { LINUX_RESERVE_RATIOS.to_vec() } else { initial.clone() };
        Ok(Reserve {
            path,
            record,
            initial,
            min_reserve_ratios,
            current,
            written,
            computed_for: Default::default(),
        })
    }

    /// Adapts the setting to the guest's zones and to the memory that can be added to them, unless
    /// both are unchanged.
    pub(crate) fn adapt(&mut self, zones: &[Zone], hotplug_bytes: u64) -> io::Result<()> {
        let (managed, before_bytes) = &mut self.computed_for;
        let managed_now = zones.iter().map(|zone| zone.managed_pages);
        if managed_now.clone().eq(managed.iter().copied()) && *before_bytes == hotplug_bytes {
            return Ok(());
        }
        managed.clear();
        managed.extend(managed_now);
        *before_bytes = hotplug_bytes;
        let wanted = reserve_ratios(zones, hotplug_bytes, &self.min_reserve_ratios);
        if wanted != self.current {
            self.save_record(&wanted);
            fs::write(&self.path, text_of(&wanted))?;
            self.current = wanted;
        }
        Ok(())
    }

    fn save_record(&mut self, wanted: &[u64]) {
        if *wanted == *self.initial || self.written.iter().any(|ratios| *ratios == *wanted) {
            return;
        }
        self.written.push(wanted.to_vec());
        let lines = std::iter::once(&self.initial)
            .chain(&self.written)
            .map(|ratios| text_of(ratios) + "\n");
        record::save("vm.lowmem_reserve_ratio", &self.record, &lines.collect::<String>());
    }

    /// Restores the guest's setting after a killed agent left it changed.
    pub(crate) fn restore_leftover(root: &Path, run: &Path) -> io::Result<()> {
        match run.join(NAME).try_exists()? {
            true => Self::open(root, run, "")?.restore(),
            false => Ok(()),
        }
    }

    /// Restores the guest's setting if an agent wrote the current value.
    pub(crate) fn restore(self) -> io::Result<()> {
        let is_ours = ratios_of(&fs::read_to_string(&self.path)?) == self.current;
        if is_ours && self.current != self.initial {
            fs::write(&self.path, text_of(&self.initial))?;
        }
        record::replace(&self.record, "")
    }
}

fn ratios_of(text: &str) -> Vec<u64> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Returns the ratios from the kernel's command line: `sysctl.vm.lowmem_reserve_ratio="256 1 32 0
/// 0"`.
fn ratios_on(cmdline: &str) -> Option<Vec<u64>> {
    let (_, rest) = cmdline.rsplit_once("sysctl.vm.lowmem_reserve_ratio=")?;
    let value = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next(),
        None => rest.split_whitespace().next(),
    };
    value.map(ratios_of)
}

fn text_of(ratios: &[u64]) -> String {
    ratios.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use foreshore_proto::ZoneKind;

    use super::*;
    use crate::tree::Tree;

    const PAGE_BYTES: u64 = 4096;

    fn zone(kind: ZoneKind, mib: u64) -> Zone {
        Zone { kind, managed_pages: (mib << 20) / PAGE_BYTES, ..Zone::default() }
    }

    /// Fake guest with a sysctl and a folder for the record.
    struct Guest(Tree);

    /// Setting as Linux prints it, and as the agent writes it.
    const DEFAULTS: &str = "256\t256\t32\t0\t0\n";
    const RESTORED: &str = "256 256 32 0 0";

    impl Guest {
        fn new() -> Self {
            Guest(Tree::new(&[(NAME, DEFAULTS)]))
        }

        fn set(&self, text: &str) {
            self.0.put(NAME, text);
        }

        fn setting(&self) -> String {
            self.0.get(NAME)
        }

        fn open(&self, cmdline: &str) -> Reserve {
            Reserve::open(self.0.path(), &self.0.at("run/agent"), cmdline).expect("opens")
        }

        fn reserve(&self) -> Reserve {
            self.open("")
        }

        /// Runs an agent that adapts the setting to these zones and is then killed.
        fn agent(&self, zones: &[Zone]) {
            self.reserve().adapt(zones, 0).expect("writes");
        }
    }

    /// Zones of a guest without plugged memory, and with two different amounts of it. Each amount
    /// requires different ratios.
    fn zones() -> [Vec<Zone>; 3] {
        let boot = zone(ZoneKind::Dma32, 337);
        let plugged = |mib| vec![boot, zone(ZoneKind::Movable, mib)];
        [vec![boot], plugged(128), plugged(256)]
    }

    #[test]
    fn setting_of_the_command_line_is_for_the_zones_at_boot() {
        let guest = Guest::new();
        guest.set("256\t8\t32\t0\t0\n");
        // DRAM converted for the kernel is in ZONE_NORMAL, so ZONE_DMA32 does not have to keep 32
        // MiB.
        let zones =
            [zone(ZoneKind::Dma32, 295), zone(ZoneKind::Normal, 256), zone(ZoneKind::Movable, 36)];
        let mut reserve =
            guest.open(r#"console=hvc0 sysctl.vm.lowmem_reserve_ratio="256 8 32 0 0" quiet"#);
        reserve.adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 256 1 0 0");
        reserve.restore().expect("restores");
        assert_eq!(guest.setting(), "256 8 32 0 0");
        // The guest's own setting is kept.
        guest.open("sysctl.vm.lowmem_reserve_ratio=1").adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 8 1 0 0");
    }

    #[test]
    fn changed_watermark_does_not_change_the_setting() {
        let guest = Guest::new();
        let mut reserve = guest.reserve();
        let mut zones = [zone(ZoneKind::Dma32, 115), zone(ZoneKind::Movable, 50)];
        reserve.adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0", "a sixteenth, 10 MiB: 12.5 MiB are kept");
        zones[0].high_pages = (8 << 20) / PAGE_BYTES;
        zones[0].low_pages = (6 << 20) / PAGE_BYTES;
        reserve.adapt(&zones, 0).expect("nothing to do");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        let now = reserve_ratios(&zones, 0, &LINUX_RESERVE_RATIOS);
        assert_eq!(now[1], 4, "an agent that starts now wants the same");
    }

    #[test]
    fn setting_is_written_only_when_zones_change() {
        let guest = Guest::new();
        let [boot, plugged, _] = zones();
        let mut reserve = guest.reserve();
        reserve.adapt(&boot, 0).expect("nothing to do");
        assert_eq!(guest.setting(), DEFAULTS);
        reserve.adapt(&plugged, 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        guest.set("mine");
        reserve.adapt(&plugged, 0).expect("nothing to do");
        assert_eq!(guest.setting(), "mine");
        reserve.adapt(&boot, 0).expect("writes");
        assert_eq!(guest.setting(), RESTORED);
    }

    #[test]
    fn ending_agent_restores_the_setting() {
        let guest = Guest::new();
        let [_, plugged, _] = zones();
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged, 0).expect("writes");
        reserve.restore().expect("restores");
        assert_eq!(guest.setting(), RESTORED);
        // The agent does not replace another program's value, and writes nothing if nothing has
        // changed.
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged, 0).expect("writes");
        guest.set("64 64 64 0 0");
        reserve.restore().expect("leaves it");
        assert_eq!(guest.setting(), "64 64 64 0 0");
        guest.set("64\t64\t64\t0\t0\n");
        guest.reserve().restore().expect("nothing to do");
        assert_eq!(guest.setting(), "64\t64\t64\t0\t0\n");
    }

    #[test]
    fn successor_of_a_killed_agent_knows_the_setting_of_the_guest() {
        let guest = Guest::new();
        let [boot, small, large] = zones();
        for zones in [&small, &large, &small] {
            guest.agent(zones);
            assert_ne!(guest.setting(), RESTORED);
        }
        // Plugged memory has been unplugged in the meantime.
        guest.agent(&boot);
        assert_eq!(guest.setting(), RESTORED);
        guest.agent(&large);
        guest.reserve().restore().expect("restores");
        assert_eq!(guest.setting(), RESTORED);
        assert!(!guest.0.at("run/agent").join(NAME).exists());
    }

    #[test]
    fn setting_changed_after_a_kill_belongs_to_the_guest() {
        let guest = Guest::new();
        let [_, small, large] = zones();
        guest.agent(&small);
        guest.set("128 128 32 0 0");
        guest.agent(&large);
        assert_ne!(guest.setting(), "128 128 32 0 0");
        guest.reserve().restore().expect("restores");
        assert_eq!(guest.setting(), "128 128 32 0 0");
    }

    #[test]
    fn invalid_record_is_ignored_and_a_missing_one_is_no_error() {
        let guest = Guest::new();
        let record = format!("run/agent/{NAME}");
        for text in ["", "\n", "\n256 256 32 0 0\n", "7\n256 256 32 0 0\n", "junk"] {
            guest.0.put(&record, text);
            let reserve = guest.reserve();
            assert_eq!(
                (&reserve.initial[..], reserve.written.len()),
                (&LINUX_RESERVE_RATIOS[..], 0)
            );
        }
        guest.0.remove(&record);
        guest.0.remove("run/agent");
        guest.0.remove("run");
        guest.0.put("run", "no directory");
        let [boot, plugged, _] = zones();
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged, 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        reserve.adapt(&boot, 0).expect("writes");
        assert_eq!(guest.setting(), RESTORED);
    }

    #[test]
    fn agent_without_a_reserve_restores_that_of_another() {
        let guest = Guest::new();
        let restore = || Reserve::restore_leftover(guest.0.path(), &guest.0.at("run/agent"));
        restore().expect("nothing to do");
        assert_eq!(guest.setting(), DEFAULTS);
        guest.agent(&zones()[1]);
        restore().expect("restores");
        assert_eq!(guest.setting(), RESTORED);
    }
}
