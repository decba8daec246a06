//! Keeps some DRAM for the kernel's own needs.
//!
//! Hotplugged memory is movable: it serves user pages only. User pages fill the nearest node first,
//! down to the watermark at which kswapd is woken, and only then go to the PM node. After that
//! every page table, socket buffer or page descriptor takes the DRAM node under the watermark, and
//! kswapd swaps, with gigabytes of PM free. Linux has a lever against it: `vm.lowmem_reserve_ratio`
//! keeps pages of a zone from allocations that a higher zone of the same node could serve. Its
//! defaults keep half a megabyte of a small guest; this sizes it to what the kernel needs.
//!
//! The guest gets its own setting back when the agent ends. An agent that is killed cannot do that,
//! and the next one must not take what it finds for the guest's: so what was there, and what agents
//! have written, is on record for as long as the guest runs. The record is written first: what is
//! in force and not on record is the guest's own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::{KERNEL_ZONES, LINUX_RESERVE_RATIOS, Zone, reserve_ratios};

use crate::record;

/// The name of the sysctl, and of the record.
const NAME: &str = "lowmem_reserve_ratio";

/// The sysctl and what it held before any agent wrote to it.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    record: PathBuf,
    initial: Vec<u64>,
    /// Ratios that give the smallest reserve of the zones: `initial`, or Linux' defaults if
    /// `initial` comes from the kernel's command line. The VMM computes those ratios for the zones
    /// at boot. When plugged DRAM becomes ZONE_NORMAL, they would reserve memory that the kernel
    /// needs.
    least: Vec<u64>,
    current: Vec<u64>,
    /// What agents have written, as on record.
    ours: Vec<Vec<u64>>,
    /// Input of the present setting: managed pages of the zones, and the memory that can be added
    /// to them.
    made_for: (Vec<u64>, u64),
}

impl Reserve {
    /// Reads the setting under `root`, which is /proc/sys/vm outside of tests, and the record under
    /// `run`, which lasts as long as the guest runs. `cmdline` is the kernel's command line.
    pub fn open(root: &Path, run: &Path, cmdline: &str) -> io::Result<Self> {
        let (path, record) = (root.join(NAME), run.join(NAME));
        let current = ratios_of(&fs::read_to_string(&path)?);
        if current.len() < KERNEL_ZONES.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        // The guest's setting, and then ours, each on a line.
        let text = fs::read_to_string(&record).unwrap_or_default();
        let mut recorded = text.lines().map(ratios_of);
        let (initial, ours) = match recorded.next() {
            Some(initial) if initial.len() == current.len() => (initial, recorded.collect()),
            _ => (current.clone(), Vec::new()),
        };
        let is_ours = ours.contains(&current);
        let (initial, ours) = if is_ours { (initial, ours) } else { (current.clone(), Vec::new()) };
        let is_of_cmdline = ratios_on(cmdline).is_some_and(|ratios| ratios == initial);
        let least = if is_of_cmdline { LINUX_RESERVE_RATIOS.to_vec() } else { initial.clone() };
        Ok(Reserve { path, record, initial, least, current, ours, made_for: Default::default() })
    }

    /// Adapts the setting to the guest's zones and to the memory that can be added to them, if one
    /// of these has changed.
    pub fn adapt(&mut self, zones: &[Zone], hotplug_bytes: u64) -> io::Result<()> {
        let (managed, before_bytes) = &mut self.made_for;
        let managed_now = zones.iter().map(|zone| zone.managed_pages);
        if managed_now.clone().eq(managed.iter().copied()) && *before_bytes == hotplug_bytes {
            return Ok(());
        }
        managed.clear();
        managed.extend(managed_now);
        *before_bytes = hotplug_bytes;
        let wanted = reserve_ratios(zones, hotplug_bytes, &self.least);
        if wanted != self.current {
            // Without a record the guest is served all the same; only who is killed leaves no
            // trace.
            if let Err(error) = self.put_on_record(&wanted) {
                let record = self.record.display();
                eprintln!(
                    "foreshore-agent: Cannot note the guest's vm.lowmem_reserve_ratio in {record}: {error}"
                );
            }
            fs::write(&self.path, text_of(&wanted))?;
            self.current = wanted;
        }
        Ok(())
    }

    fn put_on_record(&mut self, wanted: &[u64]) -> io::Result<()> {
        if *wanted == *self.initial || self.ours.iter().any(|ours| *ours == *wanted) {
            return Ok(());
        }
        self.ours.push(wanted.to_vec());
        let lines =
            std::iter::once(&self.initial).chain(&self.ours).map(|ratios| text_of(ratios) + "\n");
        record::replace(&self.record, &lines.collect::<String>())
    }

    /// Gives the guest back what an agent that was killed has not.
    pub fn restore_after_another(root: &Path, run: &Path) -> io::Result<()> {
        match run.join(NAME).try_exists()? {
            true => Self::open(root, run, "")?.restore(),
            false => Ok(()),
        }
    }

    /// Gives the guest its setting back, if what is in force is ours.
    pub fn restore(self) -> io::Result<()> {
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

/// Ratios on the kernel's command line: `sysctl.vm.lowmem_reserve_ratio="256 1 32 0 0"`.
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

    const PAGE_BYTES: u64 = 4096;

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
        assert_eq!(reserve_ratios(&zones, 0, &DEFAULTS), [256, 4, 32, 0, 0]);
    }

    #[test]
    fn zone_below_a_small_one_keeps_the_rest_of_the_reserve() {
        let zones = [
            zone(0, ZoneKind::Dma, 15),
            zone(0, ZoneKind::Dma32, 2900),
            zone(0, ZoneKind::Normal, 256),
            zone(0, ZoneKind::Movable, 512),
        ];
        // A sixteenth of 3683 MiB is 230 MiB, and the descriptors of 16 GiB take 256 MiB.
        assert_eq!(reserve_ratios(&zones, 16 << 30, &DEFAULTS), [256, 2, 2, 0, 0]);
    }

    #[test]
    fn setting_of_the_command_line_is_for_the_zones_at_boot() {
        let guest = Guest::new();
        guest.set("256\t8\t32\t0\t0\n");
        let cmdline = r#"console=hvc0 sysctl.vm.lowmem_reserve_ratio="256 8 32 0 0" quiet"#;
        let open =
            |cmdline| Reserve::open(guest.0.path(), &guest.0.path().join("run/agent"), cmdline);
        // DRAM that the kernel got is ZONE_NORMAL, and ZONE_DMA32 need not keep 32 MiB of it.
        let zones = [
            zone(0, ZoneKind::Dma32, 295),
            zone(0, ZoneKind::Normal, 256),
            zone(0, ZoneKind::Movable, 36),
        ];
        let mut reserve = open(cmdline).expect("opens");
        reserve.adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 256 1 0 0");
        reserve.restore().expect("restores");
        assert_eq!(guest.setting(), "256 8 32 0 0");
        // The guest's own setting is kept.
        open("sysctl.vm.lowmem_reserve_ratio=1").expect("opens").adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 8 1 0 0");
    }

    #[test]
    fn descriptors_of_memory_that_can_be_added_are_kept_as_well() {
        // 512 MiB, 144 MiB of them movable. A sixteenth is 32 MiB, and the descriptors of 7 GiB
        // take 112 MiB.
        let zones = [zone(0, ZoneKind::Dma32, 311), zone(0, ZoneKind::Movable, 144)];
        assert_eq!(reserve_ratios(&zones, 0, &DEFAULTS)[1], 5);
        assert_eq!(reserve_ratios(&zones, 7 << 30, &DEFAULTS)[1], 1);
        // Never more than half of the kernel's zones: 155 MiB of these.
        let zones = [zone(0, ZoneKind::Dma32, 311), zone(0, ZoneKind::Movable, 1024)];
        assert_eq!(reserve_ratios(&zones, 1 << 40, &DEFAULTS)[1], 1024 / 155);
        // Two nodes: each keeps its share.
        let zones = [
            zone(0, ZoneKind::Dma32, 1000),
            zone(0, ZoneKind::Movable, 1000),
            zone(1, ZoneKind::Normal, 3000),
            zone(1, ZoneKind::Movable, 1000),
        ];
        let shares = [125 + 4, 250 + 12];
        assert_eq!(reserve_ratios(&zones, 1 << 30, &DEFAULTS)[1..3], shares.map(|mib| 1000 / mib));
    }

    #[test]
    fn watermarks_are_linuxs_to_add_and_one_that_moves_changes_nothing() {
        let guest = Guest::new();
        let mut reserve = guest.reserve();
        let mut zones = [zone(0, ZoneKind::Dma32, 115), zone(0, ZoneKind::Movable, 50)];
        reserve.adapt(&zones, 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0", "a sixteenth, 10 MiB: 12.5 MiB are kept");
        zones[0].high_pages = (8 << 20) / PAGE_BYTES;
        zones[0].low_pages = (6 << 20) / PAGE_BYTES;
        reserve.adapt(&zones, 0).expect("nothing to do");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        assert_eq!(
            reserve_ratios(&zones, 0, &DEFAULTS)[1],
            4,
            "an agent that starts now wants the same"
        );
    }

    #[test]
    fn a_large_guest_keeps_no_more_than_it_needs() {
        let zones = [
            zone(0, ZoneKind::Dma32, 3000),
            zone(0, ZoneKind::Normal, 62_000),
            zone(0, ZoneKind::Movable, 65_536),
        ];
        assert_eq!(reserve_ratios(&zones, 0, &DEFAULTS), DEFAULTS, "2 GiB by the default already");
    }

    #[test]
    fn without_movable_memory_beside_the_kernels_nothing_is_kept() {
        let zones = [zone(0, ZoneKind::Dma32, 337), zone(1, ZoneKind::Movable, 1024)];
        assert_eq!(reserve_ratios(&zones, 0, &DEFAULTS), DEFAULTS);
        assert_eq!(reserve_ratios(&[], 0, &DEFAULTS), DEFAULTS);
        let tiny = [zone(0, ZoneKind::Dma32, 337), zone(0, ZoneKind::Movable, 2)];
        assert_eq!(reserve_ratios(&tiny, 0, &DEFAULTS)[1], 1);
    }

    /// A guest's sysctl, and a place for the record.
    struct Guest(tempfile::TempDir);

    impl Guest {
        fn new() -> Self {
            let guest = Guest(tempfile::tempdir().expect("tempdir"));
            guest.set("256\t256\t32\t0\t0\n");
            guest
        }

        fn set(&self, text: &str) {
            fs::write(self.0.path().join(NAME), text).expect("write");
        }

        fn setting(&self) -> String {
            fs::read_to_string(self.0.path().join(NAME)).expect("read")
        }

        fn reserve(&self) -> Reserve {
            Reserve::open(self.0.path(), &self.0.path().join("run/agent"), "").expect("opens")
        }

        /// An agent starts, sees these zones, and is killed.
        fn agent(&self, zones: &[Zone]) {
            self.reserve().adapt(zones, 0).expect("writes");
        }
    }

    const BOOT: Zone = Zone {
        node: 0,
        kind: ZoneKind::Dma32,
        free_pages: 0,
        min_pages: 0,
        low_pages: 0,
        high_pages: 0,
        managed_pages: (337 << 20) / PAGE_BYTES,
        largest_free_blocks: None,
        user_pages: None,
        protected_pages: None,
    };

    /// Two sizes of plugged memory, of which each wants ratios of its own.
    fn plugged() -> [[Zone; 2]; 2] {
        [128, 256].map(|mib| [BOOT, zone(0, ZoneKind::Movable, mib)])
    }

    #[test]
    fn the_setting_is_written_when_the_zones_change_and_only_then() {
        let guest = Guest::new();
        let mut reserve = guest.reserve();
        reserve.adapt(&[BOOT], 0).expect("nothing to do");
        assert_eq!(guest.setting(), "256\t256\t32\t0\t0\n");
        let [plugged, _] = plugged();
        reserve.adapt(&plugged, 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        guest.set("mine");
        reserve.adapt(&plugged, 0).expect("nothing to do");
        assert_eq!(guest.setting(), "mine");
        reserve.adapt(&[BOOT], 0).expect("writes");
        assert_eq!(guest.setting(), "256 256 32 0 0", "back to what it was");
    }

    #[test]
    fn an_agent_that_ends_gives_the_guest_its_setting_back() {
        let guest = Guest::new();
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged()[0], 0).expect("writes");
        reserve.restore().expect("restores");
        assert_eq!(guest.setting(), "256 256 32 0 0");
        // Somebody else's is not ours to take back, and nothing is written where nothing was.
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged()[0], 0).expect("writes");
        guest.set("64 64 64 0 0");
        reserve.restore().expect("leaves it");
        assert_eq!(guest.setting(), "64 64 64 0 0");
        guest.set("64\t64\t64\t0\t0\n");
        guest.reserve().restore().expect("nothing to do");
        assert_eq!(guest.setting(), "64\t64\t64\t0\t0\n");
    }

    #[test]
    fn an_agent_after_one_that_was_killed_knows_what_the_guest_had() {
        let guest = Guest::new();
        let [small, large] = plugged();
        for zones in [&small[..], &large, &small] {
            guest.agent(zones);
            assert_ne!(ratios_of(&guest.setting()), DEFAULTS);
        }
        // What was plugged has gone meanwhile.
        guest.agent(&[BOOT]);
        assert_eq!(guest.setting(), "256 256 32 0 0");
        guest.agent(&large);
        guest.reserve().restore().expect("restores");
        assert_eq!(guest.setting(), "256 256 32 0 0");
        assert!(!guest.0.path().join("run/agent").join(NAME).exists());
    }

    #[test]
    fn what_the_guest_sets_after_an_agent_was_killed_is_the_guests() {
        let guest = Guest::new();
        let [small, large] = plugged();
        guest.agent(&small);
        guest.set("128 128 32 0 0");
        guest.agent(&large);
        assert_ne!(guest.setting(), "128 128 32 0 0");
        guest.reserve().restore().expect("restores");
        assert_eq!(guest.setting(), "128 128 32 0 0");
    }

    #[test]
    fn a_record_that_is_none_is_not_believed_and_one_that_cannot_be_made_is_done_without() {
        let guest = Guest::new();
        let run = guest.0.path().join("run/agent");
        fs::create_dir_all(&run).expect("mkdir");
        for text in ["", "\n", "\n256 256 32 0 0\n", "7\n256 256 32 0 0\n", "junk"] {
            fs::write(run.join(NAME), text).expect("write");
            let reserve = guest.reserve();
            assert_eq!((reserve.initial, reserve.ours.len()), (DEFAULTS.to_vec(), 0), "{text:?}");
        }
        fs::remove_dir_all(guest.0.path().join("run")).expect("rmdir");
        fs::write(guest.0.path().join("run"), "no directory").expect("write");
        let mut reserve = guest.reserve();
        reserve.adapt(&plugged()[0], 0).expect("writes");
        assert_eq!(guest.setting(), "256 4 32 0 0");
        reserve.adapt(&[BOOT], 0).expect("writes");
        assert_eq!(guest.setting(), "256 256 32 0 0");
    }

    #[test]
    fn an_agent_that_keeps_nothing_gives_back_what_another_kept() {
        let guest = Guest::new();
        let restore =
            || Reserve::restore_after_another(guest.0.path(), &guest.0.path().join("run/agent"));
        restore().expect("nothing to do");
        assert_eq!(guest.setting(), "256\t256\t32\t0\t0\n");
        guest.agent(&plugged()[0]);
        restore().expect("restores");
        assert_eq!(guest.setting(), "256 256 32 0 0");
    }
}
