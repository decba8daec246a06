//! Kernel settings whose defaults suit guests with only DRAM, but not guests with DRAM and PM.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::{Zone, full_pm_pages};

use crate::record;

/// Linux' defaults, and the values for a guest in which a node without CPUs has memory. PM is such
/// a node.
///
/// 1. A page fault allocates a huge page from the local node. It uses another node only if it may
///    compact memory (mm/mempolicy.c, alloc_pages_mpol). With full DRAM, PM would only serve small
///    pages. If compaction is impossible, as in a full node, Linux immediately tries the next node
///    (mm/page_alloc.c, __alloc_pages_slowpath: COMPACT_SKIPPED).
/// 2. khugepaged allocates a huge page from the node with most of the small pages, and reclaims
///    memory there if necessary (mm/khugepaged.c, alloc_charge_folio). It swaps DRAM while PM is
///    free.
/// 3. When a page block changes its type, Linux wakes kswapd to restore the zone to a boosted
///    watermark (mm/page_alloc.c, boost_watermark). In a full node, kswapd has to swap for that
///    (mm/vmscan.c, balance_pgdat).
/// 4. Reclaim of DRAM swaps or drops pages unless it may move them to a slower node (mm/vmscan.c,
///    can_demote). Kernels since 6.7 find that node in the HMAT (drivers/acpi/numa/hmat.c). Older
///    kernels do not find it, and the setting has no effect. If PM is full, no page can be moved.
///    Without swap, Linux then still counts all pages as reclaimable (can_reclaim_anon_pages), and
///    scans DRAM for minutes before it calls the OOM killer. Therefore, demotion is disabled while
///    PM is full.
const SETTINGS: [Setting; 4] = [
    Setting {
        path: DEFRAG,
        default_value: "madvise",
        value_with_pm: "always",
        needs_free_pm: false,
    },
    Setting { path: COLLAPSE_DEFRAG, default_value: "1", value_with_pm: "0", needs_free_pm: false },
    Setting {
        path: BOOST_FACTOR,
        default_value: "15000",
        value_with_pm: "0",
        needs_free_pm: false,
    },
    Setting { path: DEMOTION, default_value: "false", value_with_pm: "true", needs_free_pm: true },
];

const ENABLED: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const DEFRAG: &str = "sys/kernel/mm/transparent_hugepage/defrag";
const COLLAPSE_DEFRAG: &str = "sys/kernel/mm/transparent_hugepage/khugepaged/defrag";
const BOOST_FACTOR: &str = "proc/sys/vm/watermark_boost_factor";
const DEMOTION: &str = "sys/kernel/mm/numa/demotion_enabled";
const ZERO_PAGE: &str = "sys/kernel/mm/transparent_hugepage/use_zero_page";

/// Minimum size at boot for huge pages. Linux disables them in smaller guests (mm/huge_memory.c,
/// hugepage_init).
const HUGE_PAGES_FROM_BYTES: u64 = 512 << 20;

/// Kernel setting that depends on whether the guest has PM.
#[derive(Debug)]
struct Setting {
    path: &'static str,
    default_value: &'static str,
    value_with_pm: &'static str,
    /// Set if the setting applies only while PM has free memory.
    needs_free_pm: bool,
}

/// Name of the record. The record contains a line for each changed setting, with its path and its
/// previous value.
const NAME: &str = "settings";

/// Adapts kernel settings to the guest's memory.
///
/// A killed agent leaves settings changed, and its values could also have been set by the owner.
/// Therefore, a record contains the previous values until the guest reboots. The record is written
/// before a setting.
#[derive(Debug)]
pub(crate) struct Tuning {
    root: PathBuf,
    record: PathBuf,
    /// Previous values of those `SETTINGS` that are currently changed.
    previous: [Option<String>; SETTINGS.len()],
    /// Nodes found by the last call.
    nodes: Vec<u32>,
    /// Nodes without CPUs.
    pm_nodes: Vec<u32>,
    has_free_pm: bool,
    huge_pages: HugePages,
    /// Guest size when the kernel's build configuration could not be found, and the number of calls
    /// since then.
    missing_config: (u64, u64),
}

/// State of huge pages in a guest that was too small for them at boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HugePages {
    /// Nothing to do: the guest was not too small, already has huge pages, or another program has
    /// changed the setting.
    Done,
    /// The guest was too small. `has_started` is true if some settings have already been written
    /// and so no longer look unchanged. `by_command_line` is the value chosen on the command line.
    DisabledAtBoot { has_started: bool, by_command_line: Option<Option<&'static str>> },
}

impl Tuning {
    /// Reads the settings below `root`, which is / outside of tests, and the record below `run`,
    /// which exists until the guest reboots.
    pub(crate) fn open(root: &Path, run: &Path) -> Self {
        let mut tuning = Self {
            root: root.to_owned(),
            record: run.join(NAME),
            previous: [const { None }; SETTINGS.len()],
            nodes: Vec::new(),
            pm_nodes: Vec::new(),
            has_free_pm: false,
            huge_pages: HugePages::Done,
            missing_config: (0, 0),
        };
        let text = fs::read_to_string(&tuning.record).unwrap_or_default();
        let recorded = |path: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            lines
                .find(|(recorded, previous)| *recorded == path && !previous.is_empty())
                .map(|(_, previous)| previous.to_owned())
        };
        for (index, setting) in SETTINGS.iter().enumerate() {
            // A setting in the record may be unchanged: the agent was killed before it wrote the
            // setting, or the owner has changed it since.
            tuning.previous[index] = recorded(setting.path)
                .filter(|_| selected_word(&tuning.read(setting.path)) == setting.value_with_pm);
        }
        let has_started = recorded(ENABLED).is_some();
        if has_started || tuning.were_disabled_at_boot() {
            let by_command_line = word_of_command_line(&tuning.read("proc/cmdline"));
            tuning.huge_pages = HugePages::DisabledAtBoot { has_started, by_command_line };
        }
        if tuning.text_of_record() != text {
            tuning.save_record();
        }
        tuning
    }

    /// Adapts the settings to the guest's zones and size. Does nothing while both are unchanged.
    /// After an error, the next attempt is made when the zones or the size change.
    pub(crate) fn adapt(&mut self, zones: &[Zone], total_bytes: u64) -> io::Result<()> {
        let huge_pages = self.enable_huge_pages(total_bytes);
        let nodes = zones.chunk_by(|one, next| one.node == next.node).map(|zones| zones[0].node);
        let are_nodes_unchanged = nodes.clone().eq(self.nodes.iter().copied());
        if !are_nodes_unchanged {
            self.nodes.clear();
            self.nodes.extend(nodes);
            let found = self.find_pm_nodes();
            if found.is_err() {
                return huge_pages.and(found);
            }
        }
        let had_free_pm = self.has_free_pm;
        self.has_free_pm = self.is_pm_free(zones);
        if are_nodes_unchanged && self.has_free_pm == had_free_pm {
            return huge_pages;
        }
        huge_pages.and(self.apply())
    }

    /// Returns true if PM is not full. Two different thresholds prevent a change with every report.
    fn is_pm_free(&self, zones: &[Zone]) -> bool {
        let pm = zones.iter().filter(|zone| self.pm_nodes.contains(&zone.node));
        let (free_pages, managed_pages) = pm.fold((0u64, 0u64), |(free, managed), zone| {
            (free.saturating_add(zone.free_pages), managed.saturating_add(zone.managed_pages))
        });
        // PM that was full counts as full until twice the limit is free.
        let full_pages = full_pm_pages(managed_pages);
        managed_pages > 0
            && free_pages >= if self.has_free_pm { full_pages } else { 2 * full_pages }
    }

    /// Restores all settings that depend on plugged memory.
    pub(crate) fn restore(&mut self) -> io::Result<()> {
        self.nodes.clear();
        self.pm_nodes.clear();
        self.apply()
    }

    /// Enables huge pages, because Linux checks the guest's size only at boot. The other inputs are
    /// read here instead of at the start. At the start, /boot may not have been mounted, and no
    /// program has changed a setting yet.
    fn enable_huge_pages(&mut self, total_bytes: u64) -> io::Result<()> {
        let HugePages::DisabledAtBoot { has_started, by_command_line } = self.huge_pages else {
            return Ok(());
        };
        if by_command_line.is_none() && total_bytes < HUGE_PAGES_FROM_BYTES {
            return Ok(());
        }
        let word = match by_command_line {
            Some(word) => word,
            None => match self.config(total_bytes) {
                Some(config) => word_of_config(&config),
                None => return Ok(()),
            },
        };
        self.huge_pages = HugePages::Done;
        let may_enable = match has_started {
            true => selected_word(&self.read(ENABLED)) == "never",
            false => self.were_disabled_at_boot(),
        };
        let word = word.filter(|_| may_enable);
        let written = word.map_or(Ok(()), |word| {
            self.huge_pages = HugePages::DisabledAtBoot { has_started: true, by_command_line };
            self.save_record();
            self.huge_pages = HugePages::Done;
            // Makes the next call check the defrag setting again.
            self.nodes.clear();
            self.write(DEFRAG, "madvise")?;
            self.write(COLLAPSE_DEFRAG, "1")?;
            self.write(ZERO_PAGE, "1")?;
            self.write(ENABLED, word)
        });
        if has_started || word.is_some() {
            self.save_record();
        }
        written
    }

    /// Returns the kernel's build configuration, if available. /boot may be mounted later or never.
    /// A missing file is tried again when the guest's size changes, and otherwise after a number of
    /// reports that doubles with each attempt.
    fn config(&mut self, total_bytes: u64) -> Option<String> {
        let (at_bytes, times) = self.missing_config;
        let times = if total_bytes == at_bytes { times + 1 } else { 1 };
        self.missing_config = (total_bytes, times);
        if !times.is_power_of_two() {
            return None;
        }
        let path = format!("boot/config-{}", self.read("proc/sys/kernel/osrelease").trim());
        fs::read_to_string(self.root.join(path)).ok()
    }

    /// Returns true if Linux disabled huge pages because the guest was small at boot. Linux then
    /// clears all of these settings. In contrast, `transparent_hugepage=never`, or a program that
    /// disables huge pages later, changes only the first one.
    fn were_disabled_at_boot(&self) -> bool {
        selected_word(&self.read(ENABLED)) == "never"
            && selected_word(&self.read(DEFRAG)) == "never"
            && self.read(ZERO_PAGE).trim() == "0"
    }

    /// Finds nodes that have memory but no CPUs.
    fn find_pm_nodes(&mut self) -> io::Result<()> {
        self.pm_nodes.clear();
        let with_cpus = match fs::read_to_string(self.root.join("sys/devices/system/node/has_cpu"))
        {
            // A kernel without NUMA has a single node with all CPUs.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            with_cpus => with_cpus?,
        };
        let with_cpus = node_list(&with_cpus).ok_or(io::ErrorKind::InvalidData)?;
        let has_cpus = |node: &u32| with_cpus.iter().any(|range| range.contains(node));
        self.pm_nodes.extend(self.nodes.iter().filter(|node| !has_cpus(node)));
        Ok(())
    }

    /// Sets or restores all settings. Values written by other programs are kept. An error with one
    /// setting does not affect the others.
    fn apply(&mut self) -> io::Result<()> {
        let mut result = Ok(());
        for (index, setting) in SETTINGS.iter().enumerate() {
            let is_wanted =
                !self.pm_nodes.is_empty() && (self.has_free_pm || !setting.needs_free_pm);
            if self.previous[index].is_some() != is_wanted {
                result = result.and(if is_wanted {
                    self.change(index)
                } else {
                    self.restore_one(index)
                });
            }
        }
        result
    }

    fn change(&mut self, index: usize) -> io::Result<()> {
        let setting = &SETTINGS[index];
        let text = match fs::read_to_string(self.root.join(setting.path)) {
            // Kernels without the setting do not have the behavior either.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            text => text?,
        };
        if selected_word(&text) != setting.default_value {
            return Ok(());
        }
        self.previous[index] = Some(setting.default_value.to_owned());
        self.save_record();
        let written = self.write(setting.path, setting.value_with_pm);
        if written.is_err() {
            self.previous[index] = None;
            self.save_record();
        }
        written
    }

    fn restore_one(&mut self, index: usize) -> io::Result<()> {
        let setting = &SETTINGS[index];
        let text = fs::read_to_string(self.root.join(setting.path))?;
        if let Some(previous) = self.previous[index]
            .as_deref()
            .filter(|_| selected_word(&text) == setting.value_with_pm)
        {
            self.write(setting.path, previous)?;
        }
        self.previous[index] = None;
        self.save_record();
        Ok(())
    }

    fn save_record(&self) {
        record::save(NAME, &self.record, &self.text_of_record());
    }

    fn text_of_record(&self) -> String {
        let changed = SETTINGS.iter().zip(&self.previous);
        let changed =
            changed.filter_map(|(setting, previous)| Some((setting.path, previous.as_deref()?)));
        let has_started =
            matches!(self.huge_pages, HugePages::DisabledAtBoot { has_started: true, .. });
        let begun = has_started.then_some((ENABLED, "never"));
        changed.chain(begun).map(|(path, previous)| format!("{path} {previous}\n")).collect()
    }

    /// Returns the file's text, or an empty string if the file cannot be read.
    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        fs::write(self.root.join(path), value)
    }
}

/// Values that enable huge pages, for all memory or where a program asks for them.
const WORDS: [&str; 2] = ["always", "madvise"];

/// Returns the value on the command line, if there is one. The inner option is `None` if the value
/// is not one of `WORDS`.
fn word_of_command_line(command_line: &str) -> Option<Option<&'static str>> {
    let words = command_line.split_whitespace();
    let word = words.filter_map(|word| word.strip_prefix("transparent_hugepage=")).next_back()?;
    Some(WORDS.into_iter().find(|known| *known == word))
}

/// Returns the default value of a kernel with this build configuration.
fn word_of_config(config: &str) -> Option<&'static str> {
    WORDS.into_iter().find(|word| {
        let line = format!("CONFIG_TRANSPARENT_HUGEPAGE_{}=y", word.to_uppercase());
        config.lines().any(|other| other == line)
    })
}

/// Returns the word in brackets, or the whole text if it has no brackets.
fn selected_word(text: &str) -> &str {
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map_or(text.trim(), |(word, _)| word)
}

/// Parses a list of nodes in the kernel's format: `0-1,3`.
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
    use crate::args;
    use crate::tree::Tree;

    const GIB: u64 = 1 << 30;

    #[test]
    fn help_names_each_setting() {
        let settings = SETTINGS.iter().map(|setting| setting.path);
        for path in settings.chain([ENABLED, ZERO_PAGE]) {
            let (_, name) = path.rsplit_once('/').expect("has a parent");
            assert!(args::HELP.contains(name), "{path}");
        }
    }

    /// Build configuration of Debian's kernels, and a different one.
    const OF_DEBIAN: (&str, &str) =
        ("boot/config-6.12.1-cloud", "CONFIG_X=y\nCONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n");
    const ALWAYS: (&str, &str) =
        ("boot/config-6.12.1-cloud", "CONFIG_TRANSPARENT_HUGEPAGE_ALWAYS=y\n");
    const HAS_CPU: &str = "sys/devices/system/node/has_cpu";
    const DEFAULTS: [&str; 4] = ["madvise", "1", "15000", "false"];
    const VALUES_WITH_PM: [&str; 4] = ["always", "0", "0", "true"];

    /// Fake /proc and /sys of a guest, with the files that the agent uses.
    struct Guest(Tree);

    impl Guest {
        fn new(files: &[(&str, &str)]) -> Self {
            let guest = Guest(Tree::new(&[
                (HAS_CPU, "0\n"),
                (ENABLED, "[always] madvise never\n"),
                (DEFRAG, "always defer defer+madvise [madvise] never\n"),
                (ZERO_PAGE, "1\n"),
                (COLLAPSE_DEFRAG, "1\n"),
                (BOOST_FACTOR, "15000\n"),
                (DEMOTION, "false\n"),
                ("proc/sys/kernel/osrelease", "6.12.1-cloud\n"),
            ]));
            files.iter().for_each(|(path, text)| guest.put(path, text));
            guest
        }

        /// Guest that booted with less than 512 MiB.
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
            self.0.put(path, text);
        }

        fn get(&self, path: &str) -> String {
            selected_word(&self.0.get(path)).to_owned()
        }

        fn settings(&self) -> [String; 4] {
            SETTINGS.map(|setting| self.get(setting.path))
        }

        fn huge_pages(&self) -> [String; 3] {
            [ENABLED, DEFRAG, ZERO_PAGE].map(|path| self.get(path))
        }

        fn run(&self) -> PathBuf {
            self.0.at("run/agent")
        }

        fn tuning(&self) -> Tuning {
            Tuning::open(self.0.path(), &self.run())
        }
    }

    fn zones(nodes: &[u32]) -> Vec<Zone> {
        zones_with(nodes, 3200)
    }

    /// Zones of nodes with 3,200 pages each, `free_pages` of them free.
    fn zones_with(nodes: &[u32], free_pages: u64) -> Vec<Zone> {
        let zone = |node: &u32| Zone {
            node: *node,
            kind: ZoneKind::Movable,
            managed_pages: 3200,
            free_pages,
            ..Zone::default()
        };
        nodes.iter().map(zone).collect()
    }

    #[test]
    fn demotion_is_off_while_pm_is_full() {
        let guest = Guest::new(&[]);
        let mut tuning = guest.tuning();
        let demotion = |tuning: &mut Tuning, free_pages| {
            tuning.adapt(&zones_with(&[0, 1], free_pages), GIB).expect("adapts");
            assert_eq!(guest.get(DEFRAG), "always");
            guest.get(DEMOTION)
        };
        let seen =
            [199, 200, 100, 99, 199, 200].map(|free_pages| demotion(&mut tuning, free_pages));
        assert_eq!(seen, ["false", "true", "true", "false", "false", "true"]);
        tuning.restore().expect("restores");
        assert_eq!(guest.settings(), DEFAULTS);
    }

    #[test]
    fn settings_follow_memory_of_a_node_without_cpus() {
        let guest = Guest::new(&[]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), DEFAULTS);
        tuning.adapt(&zones(&[0, 0, 1]), GIB).expect("adapts");
        assert_eq!(guest.settings(), VALUES_WITH_PM);
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), DEFAULTS, "the PM node has disappeared");
        tuning.adapt(&zones(&[0, 2]), GIB).expect("adapts");
        tuning.restore().expect("restores");
        assert_eq!(guest.settings(), DEFAULTS, "the agent ends");
    }

    #[test]
    fn nodes_with_cpus_are_dram() {
        let other_cpus = Some("0-1,3\n");
        // A kernel without NUMA does not have this file.
        for (has_cpu, nodes, settings) in [
            (other_cpus, &[0, 1, 3][..], DEFAULTS),
            (other_cpus, &[0, 1, 2], VALUES_WITH_PM),
            (None, &[0], DEFAULTS),
        ] {
            let guest = Guest::new(&[]);
            guest.0.remove(HAS_CPU);
            has_cpu.iter().for_each(|text| guest.put(HAS_CPU, text));
            guest.tuning().adapt(&zones(nodes), GIB).expect("adapts");
            assert_eq!(guest.settings(), settings, "{nodes:?}");
        }
    }

    #[test]
    fn settings_of_others_are_kept() {
        let guest = Guest::new(&[(DEFRAG, "always [defer] defer+madvise madvise never\n")]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["defer", "0", "0", "true"], "before");
        guest.put(BOOST_FACTOR, "20000\n");
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.settings(), ["defer", "1", "20000", "false"], "meanwhile");
    }

    #[test]
    fn missing_setting_is_no_error() {
        let guest = Guest::new(&[]);
        guest.0.remove(BOOST_FACTOR);
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.get(DEFRAG), "always");
    }

    #[test]
    fn guest_that_was_small_at_boot_gets_huge_pages_like_a_large_one() {
        let cmdline = |text| ("proc/cmdline", text);
        let none = ["never", "never", "0"];
        for (files, nodes, total_bytes, huge_pages) in [
            (vec![OF_DEBIAN], &[0][..], HUGE_PAGES_FROM_BYTES - 1, none),
            (vec![OF_DEBIAN], &[0], HUGE_PAGES_FROM_BYTES, ["madvise", "madvise", "1"]),
            // The command line overrides the build configuration. It also applies to small guests.
            (
                vec![OF_DEBIAN, cmdline("quiet transparent_hugepage=always\n")],
                &[0, 1],
                1 << 20,
                ["always", "always", "1"],
            ),
            (vec![OF_DEBIAN, cmdline("transparent_hugepage=never\n")], &[0, 1], GIB, none),
            // Neither the command line nor /boot provides a value.
            (vec![], &[0, 1], GIB, none),
            // One of the three settings has been changed since boot.
            (vec![ALWAYS, (ENABLED, "[always] never\n")], &[0], GIB, ["always", "never", "0"]),
            (vec![ALWAYS, (DEFRAG, "[madvise] never\n")], &[0], GIB, ["never", "madvise", "0"]),
            (vec![ALWAYS, (ZERO_PAGE, "1\n")], &[0], GIB, ["never", "never", "1"]),
        ] {
            let guest = Guest::small(&files);
            guest.tuning().adapt(&zones(nodes), total_bytes).expect("adapts");
            assert_eq!(guest.huge_pages(), huge_pages, "{files:?}");
        }
    }

    #[test]
    fn huge_pages_are_enabled_once() {
        let guest = Guest::small(&[OF_DEBIAN]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0]), HUGE_PAGES_FROM_BYTES).expect("adapts");
        assert_eq!(guest.get(ENABLED), "madvise");
        guest.put(ENABLED, "always madvise [never]\n");
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.get(ENABLED), "never");
    }

    #[test]
    fn inputs_are_read_when_the_setting_is_written() {
        // /boot is mounted after the agent has started.
        let guest = Guest::small(&[]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.get(ENABLED), "never", "how the kernel was built is not known");
        guest.put(ALWAYS.0, ALWAYS.1);
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!(guest.get(ENABLED), "always");
        // tmpfiles.d sets a value before the guest grows.
        let guest = Guest::small(&[ALWAYS]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0]), 1 << 20).expect("adapts");
        guest.put(ENABLED, "always [madvise] never\n");
        tuning.adapt(&zones(&[0]), GIB).expect("adapts");
        assert_eq!([guest.get(ENABLED), guest.get(DEFRAG)], ["madvise", "never"]);
    }

    #[test]
    fn missing_boot_folder_is_read_less_and_less_and_on_a_change_of_size() {
        let given_after = |missing: u64, total_bytes| {
            let guest = Guest::small(&[]);
            let mut tuning = guest.tuning();
            (0..missing).for_each(|_| tuning.adapt(&zones(&[0]), GIB).expect("adapts"));
            guest.put(ALWAYS.0, ALWAYS.1);
            (1..=100_000).find(|_| {
                tuning.adapt(&zones(&[0]), total_bytes).expect("adapts");
                guest.get(ENABLED) == "always"
            })
        };
        for (missing, later) in
            [(0, 1), (1, 1), (2, 2), (5, 3), (100, 28), (1_000, 24), (20_000, 12_768)]
        {
            assert_eq!(given_after(missing, GIB), Some(later), "{missing} reports without");
            assert_eq!(given_after(missing, 2 * GIB), Some(1), "another size");
        }
    }

    #[test]
    fn huge_pages_are_enabled_after_a_kill_during_the_change() {
        let guest = Guest::small(&[("proc/cmdline", "transparent_hugepage=always\n")]);
        guest.put(&format!("run/agent/{NAME}"), &format!("{ENABLED} never\n"));
        guest.put(DEFRAG, "madvise\n");
        guest.tuning().adapt(&zones(&[0]), 1 << 20).expect("adapts");
        assert_eq!([guest.get(ENABLED), guest.get(ZERO_PAGE)], ["always", "1"]);
        assert!(!guest.run().join(NAME).exists());
        // If a program disables huge pages later, the agent does not override it.
        guest.put(ENABLED, "always madvise [never]\n");
        guest.tuning().adapt(&zones(&[0]), 1 << 20).expect("adapts");
        assert_eq!(guest.get(ENABLED), "never");
    }

    #[test]
    fn successor_of_a_killed_agent_distinguishes_own_and_foreign_values() {
        // Values for each setting: one from the kernel, one from another program, one from another
        // program that equals the agent's value, and none.
        let foreign = [("defer", "always"), ("7", "0"), ("20000", "0"), ("0", "true")];
        for which in 0..SETTINGS.len() {
            let (other, like_ours) = foreign[which];
            for theirs in [Some(other), Some(like_ours), None] {
                let guest = Guest::new(&[]);
                let path = SETTINGS[which].path;
                match theirs {
                    Some(theirs) => guest.put(path, theirs),
                    None => guest.0.remove(path),
                }
                let others = |want: fn(&Setting) -> &'static str| {
                    let others = SETTINGS.iter().filter(|setting| setting.path != path);
                    others.for_each(|setting| {
                        assert_eq!(guest.get(setting.path), want(setting), "{theirs:?}")
                    });
                };
                guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
                // A second agent leaves the same values behind.
                guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
                others(|setting| setting.value_with_pm);
                // Plugged memory has been unplugged in the meantime.
                guest.tuning().adapt(&zones(&[0]), GIB).expect("adapts");
                others(|setting| setting.default_value);
                assert!(
                    theirs.is_none_or(|theirs| guest.get(path) == theirs),
                    "{theirs:?} is not ours"
                );
                assert!(!guest.run().join(NAME).exists());
            }
        }
    }

    #[test]
    fn kill_between_two_settings_leaves_neither_changed_for_good() {
        for killed_after in 0..=SETTINGS.len() {
            for has_noted in [false, true] {
                let guest = Guest::new(&[]);
                let mut tuning = guest.tuning();
                (0..killed_after).for_each(|index| tuning.change(index).expect("writes"));
                if let Some(setting) = SETTINGS.get(killed_after).filter(|_| has_noted) {
                    tuning.previous[killed_after] = Some(setting.default_value.to_owned());
                    tuning.save_record();
                }
                guest.tuning().restore().expect("restores");
                assert_eq!(guest.settings(), DEFAULTS, "{killed_after}");
                assert!(!guest.run().join(NAME).exists());
            }
        }
    }

    #[test]
    fn value_set_by_the_owner_after_a_kill_is_kept() {
        let guest = Guest::new(&[]);
        guest.tuning().adapt(&zones(&[0, 1]), GIB).expect("adapts");
        guest.put(BOOST_FACTOR, "20000\n");
        let mut tuning = guest.tuning();
        // The record of the agent's change is removed immediately.
        guest.put(BOOST_FACTOR, "0\n");
        tuning.adapt(&zones(&[0, 1]), GIB).expect("adapts");
        guest.tuning().restore().expect("restores");
        assert_eq!(guest.settings(), ["madvise", "1", "0", "false"]);
    }

    #[test]
    fn invalid_record_is_ignored_and_a_missing_one_is_no_error() {
        let guest = Guest::new(&[]);
        let all_ours = || {
            SETTINGS.iter().for_each(|setting| guest.put(setting.path, setting.value_with_pm));
        };
        for text in
            ["", "\n", "junk", " 1\n", "x y\n", &format!("{DEFRAG}\n"), &format!("{DEFRAG} \n")]
        {
            all_ours();
            guest.put(&format!("run/agent/{NAME}"), text);
            guest.tuning().restore().expect("nothing to do");
            assert_eq!(guest.settings(), VALUES_WITH_PM, "{text:?}");
        }
        let guest = Guest::new(&[("run", "no directory")]);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 1]), GIB).expect("adapts");
        assert_eq!(guest.settings(), VALUES_WITH_PM);
        tuning.restore().expect("restores");
        assert_eq!(guest.settings(), DEFAULTS);
    }

    #[test]
    fn failed_setting_does_not_affect_the_others() {
        let guest = Guest::new(&[]);
        guest.0.remove(COLLAPSE_DEFRAG);
        guest.0.make(COLLAPSE_DEFRAG);
        let mut tuning = guest.tuning();
        tuning.adapt(&zones(&[0, 1]), GIB).expect_err("a directory");
        tuning.adapt(&zones(&[0, 1]), GIB).expect("a setting is written only once");
        let others = || [guest.get(DEFRAG), guest.get(BOOST_FACTOR)];
        assert_eq!(others(), ["always", "0"]);
        tuning.restore().expect("the setting whose write failed is unchanged");
        assert_eq!(others(), ["madvise", "15000"]);
    }

    #[test]
    fn sets_of_nodes_are_parsed() {
        assert_eq!(node_list("0\n"), Some(vec![0..=0]));
        assert_eq!(node_list("0-1,7\n"), Some(vec![0..=1, 7..=7]));
        assert_eq!(node_list("\n"), Some(vec![]));
        assert_eq!(node_list("0-x\n"), None);
    }
}
