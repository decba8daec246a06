//! Settings of the kernel that are right for memory of one kind, and wrong for a guest that grows into a second one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::Zone;

/// What Linux has by itself, and what a guest needs while a node without CPUs, which is how PM looks, has memory.
///
/// 1. A fault takes a huge page from the node that it happens on, and from another one only if it may compact
///    (mm/mempolicy.c, alloc_pages_mpol). With DRAM full, PM would serve small pages alone. Where there is nothing
///    to compact for, which is so in a node that is full, Linux goes on to the next node at once (mm/page_alloc.c,
///    __alloc_pages_slowpath: COMPACT_SKIPPED).
/// 2. khugepaged takes its huge page from the node that most of the small ones are on, and reclaims there what it lacks
///    (mm/khugepaged.c, alloc_charge_folio): it swaps DRAM while PM is free.
/// 3. A page block that changes hands wakes kswapd to restore the zone to a boosted watermark (mm/page_alloc.c,
///    boost_watermark). In a node that is full it cannot do so without swapping (mm/vmscan.c, balance_pgdat).
const SETTINGS: [Setting; 3] = [
    Setting { path: DEFRAG, usual: "madvise", beside_pm: "always" },
    Setting { path: COLLAPSE_DEFRAG, usual: "1", beside_pm: "0" },
    Setting { path: "proc/sys/vm/watermark_boost_factor", usual: "15000", beside_pm: "0" },
];

const ENABLED: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const DEFRAG: &str = "sys/kernel/mm/transparent_hugepage/defrag";
const COLLAPSE_DEFRAG: &str = "sys/kernel/mm/transparent_hugepage/khugepaged/defrag";
const ZERO_PAGE: &str = "sys/kernel/mm/transparent_hugepage/use_zero_page";

/// Guests that boot with less have no huge pages (mm/huge_memory.c, hugepage_init).
const HUGE_PAGES_FROM_BYTES: u64 = 512 << 20;

/// A setting whose value depends on whether there is PM.
#[derive(Debug)]
struct Setting {
    path: &'static str,
    usual: &'static str,
    beside_pm: &'static str,
}

/// Adapts the kernel's settings to what memory the guest has.
#[derive(Debug)]
pub struct Tuning {
    root: PathBuf,
    /// Of `SETTINGS`, those that are changed now.
    changed: [bool; SETTINGS.len()],
    /// The nodes at the last look.
    nodes: Vec<u32>,
    /// What the guest would have had of huge pages, had it booted with more memory.
    huge_pages: Option<HugePages>,
}

/// Which huge pages a guest gets that was too small for them at boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HugePages {
    /// The word for `enabled`.
    word: &'static str,
    /// From this size on.
    from_bytes: u64,
}

impl Tuning {
    /// Reads what is set under `root`, which is / outside of tests. What a kernel does not have is left out.
    pub fn open(root: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let has_been_left_out = is_off_by_size(&read(ENABLED), &read(DEFRAG), &read(ZERO_PAGE));
        let config = format!("boot/config-{}", read("proc/sys/kernel/osrelease").trim());
        let huge_pages = HugePages::wanted(&read("proc/cmdline"), &read(&config));
        // Nobody else sets all of them so: an agent that was killed has left them.
        let is_ours = |setting: &Setting| chosen(&read(setting.path)) == setting.beside_pm;
        let changed = [SETTINGS.iter().all(is_ours); SETTINGS.len()];
        Self {
            root: root.to_owned(),
            changed,
            nodes: Vec::new(),
            huge_pages: huge_pages.filter(|_| has_been_left_out),
        }
    }

    /// Adapts them to the guest's zones and size. Does nothing while these stay as they are.
    pub fn adapt(&mut self, zones: &[Zone], total_bytes: u64) -> io::Result<()> {
        if let Some(huge_pages) = self.huge_pages.filter(|huge_pages| total_bytes >= huge_pages.from_bytes) {
            self.huge_pages = None;
            self.write(DEFRAG, "madvise")?;
            self.write(COLLAPSE_DEFRAG, "1")?;
            self.write(ZERO_PAGE, "1")?;
            self.write(ENABLED, huge_pages.word)?;
            // Defrag is to be looked at again.
            self.nodes.clear();
        }
        let mut nodes: Vec<u32> = zones.iter().map(|zone| zone.node).collect();
        nodes.dedup();
        if nodes == self.nodes {
            return Ok(());
        }
        self.nodes = nodes;
        let with_cpus = fs::read_to_string(self.root.join("sys/devices/system/node/has_cpu"))?;
        let with_cpus = node_list(&with_cpus).ok_or(io::ErrorKind::InvalidData)?;
        let has_pm = self.nodes.iter().any(|node| !with_cpus.iter().any(|range| range.contains(node)));
        self.set(has_pm)
    }

    /// Puts everything back that depends on what is plugged.
    pub fn restore(&mut self) -> io::Result<()> {
        self.nodes.clear();
        self.set(false)
    }

    /// What somebody else has set stays.
    fn set(&mut self, has_pm: bool) -> io::Result<()> {
        for (index, setting) in SETTINGS.iter().enumerate() {
            if self.changed[index] == has_pm {
                continue;
            }
            let (from, to) = match has_pm {
                true => (setting.usual, setting.beside_pm),
                false => (setting.beside_pm, setting.usual),
            };
            let path = self.root.join(setting.path);
            match fs::read_to_string(path) {
                Ok(text) if chosen(&text) == from => {
                    self.write(setting.path, to)?;
                    self.changed[index] = has_pm;
                }
                Ok(_) => self.changed[index] = false,
                // Kernels without it do not do what it is about.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        fs::write(self.root.join(path), value)
    }
}

impl HugePages {
    /// By the kernel's command line, at once; else as the kernel was built, from the size on at which it would have had
    /// them itself.
    fn wanted(command_line: &str, config: &str) -> Option<Self> {
        const WORDS: [&str; 2] = ["always", "madvise"];
        let words = command_line.split_whitespace();
        if let Some(word) = words.filter_map(|word| word.strip_prefix("transparent_hugepage=")).next_back() {
            let word = WORDS.into_iter().find(|known| *known == word)?;
            return Some(Self { word, from_bytes: 0 });
        }
        let word = WORDS.into_iter().find(|word| {
            let line = format!("CONFIG_TRANSPARENT_HUGEPAGE_{}=y", word.to_uppercase());
            config.lines().any(|other| other == line)
        })?;
        Some(Self { word, from_bytes: HUGE_PAGES_FROM_BYTES })
    }
}

/// Whether huge pages are off for the guest's size at boot: then Linux clears all of these, while
/// `transparent_hugepage=never` and whoever switches them off later touch the first only.
fn is_off_by_size(enabled: &str, defrag: &str, zero_page: &str) -> bool {
    chosen(enabled) == "never" && chosen(defrag) == "never" && zero_page.trim() == "0"
}

/// The word in brackets, or all there is.
fn chosen(text: &str) -> &str {
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map_or(text.trim(), |(word, _)| word)
}

/// `0-1,3`, as the kernel prints sets of nodes.
fn node_list(text: &str) -> Option<Vec<std::ops::RangeInclusive<u32>>> {
    let text = text.trim();
    let ranges = text.split(',').filter(|range| !range.is_empty());
    ranges
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use foreshore_proto::ZoneKind;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// A guest's /proc and /sys, as far as they are looked at.
    struct Guest(tempfile::TempDir);

    impl Guest {
        fn new(files: &[(&str, &str)]) -> Self {
            let guest = Guest(tempfile::tempdir().expect("tempdir"));
            guest.put("sys/devices/system/node/has_cpu", "0\n");
            guest.put(ENABLED, "[always] madvise never\n");
            guest.put(DEFRAG, "always defer defer+madvise [madvise] never\n");
            guest.put(ZERO_PAGE, "1\n");
            guest.put(SETTINGS[1].path, "1\n");
            guest.put(SETTINGS[2].path, "15000\n");
            guest.put("proc/sys/kernel/osrelease", "6.12.1-cloud\n");
            files.iter().for_each(|(path, text)| guest.put(path, text));
            guest
        }

        /// One that was booted with less than 512 MiB.
        fn small(files: &[(&str, &str)]) -> Self {
            let guest = Guest::new(&[
                (ENABLED, "always madvise [never]\n"),
                (DEFRAG, "always defer defer+madvise madvise [never]\n"),
                (COLLAPSE_DEFRAG, "0\n"),
                (ZERO_PAGE, "0\n"),
            ]);
            files.iter().for_each(|(path, text)| guest.put(path, text));
            guest
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("has one")).expect("creates");
            fs::write(path, text).expect("writes");
        }

        fn get(&self, path: &str) -> String {
            let text = fs::read_to_string(self.0.path().join(path)).expect("reads");
            chosen(&text).to_owned()
        }

        fn settings(&self) -> [String; 3] {
            SETTINGS.map(|setting| self.get(setting.path))
        }

        fn tuning(&self) -> Tuning {
            Tuning::open(self.0.path())
        }
    }

    fn zones(nodes: &[u32]) -> Vec<Zone> {
        let zone =
            |node: &u32| Zone { node: *node, kind: ZoneKind::Movable, managed_pages: 1, ..Zone::default() };
        nodes.iter().map(zone).collect()
    }

    #[test]
    fn settings_follow_memory_of_a_node_without_cpus() {
        let guest = Guest::new(&[]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["madvise", "1", "15000"]);
        tuning.adapt(&zones(&[0, 0, 1]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["always", "0", "0"]);
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["madvise", "1", "15000"], "it has gone");
        tuning.adapt(&zones(&[0, 2]), GIB).expect("adapts");
        tuning.restore().expect("restores");
        assert_eq!(guest.settings(), ["madvise", "1", "15000"], "the agent ends");
    }

    #[test]
    fn a_second_node_with_cpus_is_dram() {
        let guest = Guest::new(&[("sys/devices/system/node/has_cpu", "0-1,3\n")]);
        guest.tuning().adapt(&zones(&[0, 1, 3]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["madvise", "1", "15000"]);
        guest.tuning().adapt(&zones(&[0, 1, 2]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["always", "0", "0"]);
    }

    #[test]
    fn what_others_have_set_stays() {
        let guest = Guest::new(&[(DEFRAG, "always [defer] defer+madvise madvise never\n")]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["defer", "0", "0"], "before");
        guest.put(SETTINGS[2].path, "20000\n");
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["defer", "1", "20000"], "meanwhile");
    }

    #[test]
    fn a_kernel_without_a_setting_does_without() {
        let guest = Guest::new(&[]);
        fs::remove_file(guest.0.path().join(SETTINGS[2].path)).expect("removes");
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.get(DEFRAG), "always");
    }

    #[test]
    fn a_guest_that_was_small_at_boot_has_the_huge_pages_of_a_large_one() {
        let config = ("boot/config-6.12.1-cloud", "CONFIG_X=y\nCONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n");
        let guest = Guest::small(&[config]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0]), HUGE_PAGES_FROM_BYTES - 1).expect("adapts");
        assert_eq!([guest.get(ENABLED), guest.get(DEFRAG)], ["never", "never"], "it still is");
        tuning.adapt(&zones(&[0]), HUGE_PAGES_FROM_BYTES).expect("adapts");
        assert_eq!(
            [guest.get(ENABLED), guest.get(DEFRAG), guest.get(ZERO_PAGE)],
            ["madvise", "madvise", "1"]
        );
        guest.put(ENABLED, "always madvise [never]\n");
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.get(ENABLED), "never", "it is done once");
    }

    #[test]
    fn the_command_line_counts_at_once_and_before_the_build() {
        let config = ("boot/config-6.12.1-cloud", "CONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n");
        let guest = Guest::small(&[config, ("proc/cmdline", "quiet transparent_hugepage=always\n")]);
        guest.tuning().adapt(&zones(&[0, 1]), 1 << 20).expect("adapts");
        assert_eq!([guest.get(ENABLED), guest.get(DEFRAG)], ["always", "always"], "beside PM");
        let guest = Guest::small(&[config, ("proc/cmdline", "transparent_hugepage=never\n")]);
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!([guest.get(ENABLED), guest.get(DEFRAG)], ["never", "never"]);
        let guest = Guest::small(&[]);
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.get(ENABLED), "never", "nobody says what it would have had");
    }

    #[test]
    fn huge_pages_that_somebody_switched_off_stay_off() {
        let config = ("boot/config-6.12.1-cloud", "CONFIG_TRANSPARENT_HUGEPAGE_ALWAYS=y\n");
        for touched in
            [(ENABLED, "[always] madvise never\n"), (DEFRAG, "[madvise] never\n"), (ZERO_PAGE, "1\n")]
        {
            let guest = Guest::small(&[config, touched]);
            let seen = || [guest.get(ENABLED), guest.get(DEFRAG), guest.get(ZERO_PAGE)];
            let before = seen();
            guest.tuning().adapt(&zones(&[0]), GIB).expect("adapts");
            assert_eq!(seen(), before);
        }
    }

    #[test]
    fn what_a_killed_agent_has_changed_the_next_one_puts_back() {
        let guest = Guest::new(&[]);
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        guest.tuning().adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["madvise", "1", "15000"]);
        guest.put(SETTINGS[2].path, "0\n");
        guest.tuning().adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["madvise", "1", "0"], "one alone is somebody else's");
    }

    #[test]
    fn sets_of_nodes() {
        assert_eq!(node_list("0\n"), Some(vec![0..=0]));
        assert_eq!(node_list("0-1,7\n"), Some(vec![0..=1, 7..=7]));
        assert_eq!(node_list("\n"), Some(vec![]));
        assert_eq!(node_list("0-x\n"), None);
    }
}
