//! Power cuts: several boots write until the power is cut, and a last boot verifies the data.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::Result;

use super::boots::{Boots, flushes, output_in};
use super::kills::HOST_MIB;
use super::{FOLDER, Soak};
use crate::checkout::{create_folder, list, read, remove_file, remove_folder, rename, write};
use crate::jobs;
use crate::messages::{attempt, report};
use crate::programs;
use crate::random;

/// Line that the `soak` program prints before the power is cut.
const CUT_LINE: &str = "all guests write";
/// The power is cut at a random time after [`CUT_LINE`], at most this much later.
const MAX_CUT_MS: u32 = 1500;
const TIMEOUT_S: &str = "600";
/// Names of the host's disk and NVDIMM.
const DISKS: [&str; 2] = ["disk", "nvdimm"];
/// File with the lines about all flushes that were acknowledged so far.
const ACKNOWLEDGED: &str = "heard";

/// Tasks of the `soak` program: one for boots that are cut, and one for the last boot.
pub(super) struct Tasks {
    name: &'static str,
    write: &'static str,
    check: &'static str,
}

pub(super) const POWER: Tasks = Tasks { name: "power", write: "write", check: "look" };
pub(super) const NOOP_FLUSHES: Tasks =
    Tasks { name: "lies", write: "write-and-lie", check: "look-for-losses" };

impl Soak<'_> {
    /// Cuts the power `cuts` times and adds one row to the table.
    pub(super) fn cut_power(&mut self, tasks: &Tasks, cuts: u32) -> Result<()> {
        let folder = self.checkout.path(FOLDER).join(tasks.name);
        remove_folder(&folder)?;
        create_folder(&folder)?;
        write(&folder.join(ACKNOWLEDGED), "")?;
        let seed = self.seed.to_string();
        for cut in 1..=cuts {
            let delay = Some(random::of_seed(self.seed, cut, MAX_CUT_MS));
            if !self.boot_and_cut(&folder, tasks.write, cut, delay) {
                return self.table.add_failure(tasks.name, &seed, &[folder]);
            }
        }
        if !self.boot_and_cut(&folder, tasks.check, cuts + 1, None) {
            return self.table.add_failure(tasks.name, &seed, &[folder]);
        }
        let acknowledged = read(&folder.join(ACKNOWLEDGED))?.lines().count();
        let Some((torn, lost)) = losses(&outputs(&folder.join("boots"))?, cuts) else {
            report!("{}: some boots did not print their torn and lost sectors", tasks.name);
            return self.table.add_failure(tasks.name, &seed, &[folder]);
        };
        let result = format!(
            "{cuts} power cuts, {acknowledged} flushes acknowledged; {torn} torn, {lost} lost"
        );
        self.table.add(tasks.name, &seed, &result)?;
        DISKS.iter().try_for_each(|disk| remove_file(&folder.join(disk)))
    }

    /// Boots with the disks left by the previous boot, until the power is cut. Returns false on
    /// failure.
    fn boot_and_cut(&self, folder: &Path, task: &str, boot: u32, delay_ms: Option<u32>) -> bool {
        let seed = self.seed.wrapping_add(boot).to_string();
        let boots = Boots {
            checkout: self.checkout,
            folder: folder.join("boots").join(&seed),
            memory_mib: HOST_MIB,
            prefix: String::new(),
        };
        let run = || {
            let volume = &self.arguments.volume;
            let arguments = arguments(folder, task, &seed, volume, delay_ms);
            let end = boots.run(|| boot_on_copies(&boots, folder, &arguments))?;
            if end.code == 0 {
                let mut acknowledged =
                    File::options().append(true).open(folder.join(ACKNOWLEDGED))?;
                acknowledged.write_all(flushes(&boots.output()?).as_bytes())?;
            }
            Ok(end.code == 0)
        };
        attempt(run).unwrap_or(false)
    }
}

fn now(folder: &Path, disk: &str) -> String {
    folder.join(format!("{disk}.now")).display().to_string()
}

fn arguments(
    folder: &Path,
    task: &str,
    seed: &str,
    volume: &str,
    delay_ms: Option<u32>,
) -> Vec<String> {
    let (disk, nvdimm) = (now(folder, DISKS[0]), now(folder, DISKS[1]));
    let acknowledged = folder.join(ACKNOWLEDGED).display().to_string();
    let host =
        ["--disk", &disk, "--nvdimm-file", &nvdimm, "--timeout", TIMEOUT_S, "--put", &acknowledged];
    let cut = delay_ms.map(|delay| ["--power-cut".to_owned(), format!("{CUT_LINE}:{delay}")]);
    let soak = ["--", "env", "FORESHORE_TEST_DIR=/out/soak", "soak", "power", task, seed, volume];
    let soak = soak.into_iter().chain([ACKNOWLEDGED]).map(str::to_owned);
    let host = host.map(str::to_owned);
    host.into_iter().chain(cut.into_iter().flatten()).chain(soak).collect()
}

/// Boots with copies of the disks. After a success, the copies replace the disks. If the emulation
/// broke the boot, the disks are left unchanged, because flushes in that boot do not count.
fn boot_on_copies(boots: &Boots<'_>, folder: &Path, arguments: &[String]) -> Result<u8> {
    for disk in DISKS {
        remove_file(now(folder, disk).as_ref())?;
        let original = folder.join(disk);
        if original.exists() {
            let mut copy = programs::system("cp");
            jobs::run(copy.arg("--sparse=always").arg(original).arg(now(folder, disk)))?;
        }
    }
    let code = boots.boot(arguments)?;
    if code == 0 {
        DISKS.iter().try_for_each(|disk| rename(now(folder, disk).as_ref(), &folder.join(disk)))?;
    }
    Ok(code)
}

fn outputs(folder: &Path) -> Result<String> {
    let mut outputs = String::new();
    for boot in list(folder)? {
        outputs.push_str(&output_in(&boot)?);
        // A power cut may have cut off the last line.
        outputs.push('\n');
    }
    Ok(outputs)
}

/// Adds up the lines `disk: ... 0 torn, 0 lost`. Returns `None` unless both disks have one such
/// line after each cut.
fn losses(output: &str, cuts: u32) -> Option<(u64, u64)> {
    let losses_in = |medium: &str| {
        let counts = |line: &str| {
            let words: Vec<_> = line.strip_prefix(medium)?.split_whitespace().collect();
            let [.., torn, "torn,", lost, "lost"] = words[..] else { return None };
            Some((torn.parse::<u64>().ok()?, lost.parse::<u64>().ok()?))
        };
        let losses: Vec<_> = output.lines().filter_map(counts).collect();
        (u32::try_from(losses.len()) == Ok(cuts)).then_some(losses)
    };
    let losses = [losses_in("disk: ")?, losses_in("dax: ")?].concat();
    Some(losses.iter().fold((0, 0), |sums, counts| (sums.0 + counts.0, sums.1 + counts.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
disk: page-cache by nvdimm
disk: 64 sectors, 2 newer than acknowledged, 1 before their map entry; 0 torn, 3 lost
dax: 64 sectors, 0 newer than acknowledged, 0 before their map entry; 2 torn, 1 lost
";

    #[test]
    fn losses_of_all_places_are_added() {
        assert_eq!(losses(OUTPUT, 1), Some((2, 4)));
        assert_eq!(losses(&OUTPUT.repeat(2), 2), Some((4, 8)));
    }

    #[test]
    fn losses_of_each_cut_must_be_readable() {
        assert_eq!(losses("", 1), None);
        assert_eq!(losses(OUTPUT, 2), None);
        let cut_off = OUTPUT.replace("3 lost", "3 lo");
        assert_eq!(losses(&cut_off, 1), None);
    }

    #[test]
    fn power_is_cut_after_the_line_unless_the_boot_only_looks() {
        let line = |delay| arguments(Path::new("/s"), "write", "8", "thin", delay).join("|");
        let disks = "--disk|/s/disk.now|--nvdimm-file|/s/nvdimm.now|--timeout|600|--put|/s/heard|";
        let soak = "--|env|FORESHORE_TEST_DIR=/out/soak|soak|power|write|8|thin|heard";
        assert_eq!(line(Some(70)), format!("{disks}--power-cut|all guests write:70|{soak}"));
        assert_eq!(line(None), format!("{disks}{soak}"));
    }
}
