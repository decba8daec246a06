//! Kills writing guests, in batches. Each host has one CPU, and as many hosts run concurrently as
//! fit on this machine.

use anyhow::{Context, Result, bail};

use super::boots::{Boots, in_lanes};
use super::{FOLDER, Soak};
use crate::checkout::remove_folder;
use crate::host::host_kind;

/// Number of kills during one boot of the host. If the host dies, only these kills are repeated.
const BATCH: u32 = 25;
/// Number of guests in a batch that run concurrently. Each guest has its own seed.
const SEEDS_OF_BATCH: u32 = 2;
pub(super) const HOST_MIB: u32 = 3072;
/// Time limit for a kill on an emulated host. A kill usually takes 7 to 12 s. With 15 processes on
/// 2 CPUs it took 37 s.
const KILL_S: u32 = 90;
const BOOT_S: u32 = 120;
/// Maximum number of kills until a sector should be torn.
const RAW_ROUNDS: u32 = 6;

#[derive(Debug, PartialEq, Eq)]
struct Batch {
    seed: u32,
    rounds: u32,
}

fn batches(first_seed: u32, rounds: u32) -> Vec<Batch> {
    let batch = |index| Batch {
        seed: first_seed.wrapping_add(index * SEEDS_OF_BATCH),
        rounds: BATCH.min(rounds - index * BATCH),
    };
    (0..rounds.div_ceil(BATCH)).map(batch).collect()
}

impl Soak<'_> {
    /// Kills guests that use volumes. No sector may be torn or lost.
    pub(super) fn kill(&mut self, interface: &str, kernel: &str) -> Result<()> {
        let arguments = self.arguments;
        self.kill_guests(interface, kernel, arguments.rounds(200), &arguments.volume)
    }

    /// Kills guests that use a raw volume. At least one sector should be torn.
    pub(super) fn kill_raw(&mut self, kernel: &str) -> Result<()> {
        self.kill_guests("virtio-pmem", kernel, RAW_ROUNDS, "raw")
    }

    fn kill_guests(
        &mut self,
        interface: &str,
        kernel: &str,
        rounds: u32,
        volume: &str,
    ) -> Result<()> {
        let name = format!("{interface} on {kernel}, {volume}");
        let folder = self.checkout.path(FOLDER).join(format!("{interface}-{kernel}-{volume}"));
        remove_folder(&folder)?;
        let hosts = host_kind::hosts_at_once(HOST_MIB.into())?;
        let run = |batch: &Batch| {
            let boots = Boots {
                checkout: self.checkout,
                folder: folder.join(batch.seed.to_string()),
                memory_mib: HOST_MIB,
                prefix: format!("{interface} {kernel} {}| ", batch.seed),
            };
            let end = boots.run(|| boots.boot(&arguments(interface, kernel, batch, volume)))?;
            if end.code != 0 {
                bail!("{name}, seed {}: exit code {}", batch.seed, end.code);
            }
            let tally = read_tally(&boots.output()?);
            tally.with_context(|| format!("{name}, seed {}: no tally", batch.seed))
        };
        // After a failure, running batches finish and no other batch starts.
        let results = in_lanes(hosts, batches(self.seed, rounds), run, |result| result.is_none());
        let seed = self.seed.to_string();
        let folder_of = |batch: &Batch| folder.join(batch.seed.to_string());
        let failed = results.iter().filter(|(_, result)| result.is_none());
        let failed: Vec<_> = failed.map(|(batch, _)| folder_of(batch)).collect();
        if !failed.is_empty() {
            return self.table.add_failure(&name, &seed, &failed);
        }
        self.table.add(&name, &seed, &sum_up(results.into_iter().filter_map(|(_, tally)| tally)))
    }
}

/// Returns the arguments that `host` needs to run a batch.
fn arguments(interface: &str, kernel: &str, batch: &Batch, volume: &str) -> Vec<String> {
    let Batch { seed, rounds } = batch;
    let timeout = rounds * KILL_S + BOOT_S;
    let line = format!(
        "--cpus 1 --timeout {timeout} -- env FORESHORE_TEST_DIR=/out/soak soak kills {interface} \
         {kernel} {rounds} {seed} {volume}"
    );
    line.split(' ').map(str::to_owned).collect()
}

/// Figures and their texts.
type Tally = Vec<(String, Figure)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Count(u64),
    /// Longest of several times.
    LongestMs(u64),
}

impl Figure {
    fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::LongestMs(ms), Self::LongestMs(other_ms)) => Self::LongestMs(ms.max(other_ms)),
            (Self::Count(count), Self::Count(other_count)) => Self::Count(count + other_count),
            (figure, _) => figure,
        }
    }
}

/// Reads the tally that `soak` prints at the end of a boot: `SETUP, seed N: 25 kills, 200 looks;
/// longest time between two flushes 12 ms`. Returns `None` if the tally is missing or cut off.
fn read_tally(output: &str) -> Option<Tally> {
    let tally = |line: &str| {
        let (setup, tally) = line.split_once(": ")?;
        setup.rsplit_once(", seed ")?.1.parse::<u64>().ok()?;
        tally.split([',', ';']).map(|part| read_figure(part.trim_start())).collect()
    };
    output.lines().find_map(tally)
}

fn read_figure(part: &str) -> Option<(String, Figure)> {
    if let Some((text, ms)) = part.strip_suffix(" ms").and_then(|part| part.rsplit_once(' ')) {
        return Some((text.to_owned(), Figure::LongestMs(ms.parse().ok()?)));
    }
    let (count, text) = part.split_once(' ')?;
    Some((text.to_owned(), Figure::Count(count.parse().ok()?)))
}

fn sum_up(tallies: impl Iterator<Item = Tally>) -> String {
    let mut sums = Tally::new();
    for (text, figure) in tallies.flatten() {
        match sums.iter_mut().find(|(of_sum, _)| *of_sum == text) {
            Some((_, sum)) => *sum = sum.with(figure),
            None => sums.push((text, figure)),
        }
    }
    let part = |(text, figure): &(String, Figure)| match figure {
        Figure::Count(count) => format!("{count} {text}"),
        Figure::LongestMs(ms) => format!("{text} {ms} ms"),
    };
    sums.iter().map(part).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_seeds_of_their_own() {
        let batch = |seed, rounds| Batch { seed, rounds };
        assert_eq!(batches(7, 60), [batch(7, 25), batch(9, 25), batch(11, 10)]);
        assert_eq!(batches(7, 25), [batch(7, 25)]);
    }

    #[test]
    fn batch_is_a_command_on_a_host_with_one_cpu() {
        let line = arguments("nvdimm", "6.1", &Batch { seed: 7, rounds: 2 }, "raw").join(" ");
        let expected = "--cpus 1 --timeout 300 -- env FORESHORE_TEST_DIR=/out/soak soak kills nvdimm 6.1 2 7 raw";
        assert_eq!(line, expected);
        crate::host::tests::parse(&line).unwrap();
    }

    #[test]
    fn counts_are_added_and_the_longest_time_is_kept() {
        let outputs = [
            "lane 0: killed\nnvdimm on 6.1, thin, redis, seed 7: 25 kills, 2 looks; 0 torn; longest gap 9 ms",
            "nvdimm on 6.1, thin, redis, seed 9: 3 kills, 1 looks; 0 torn; longest gap 12 ms; 8 KiB moved",
        ];
        let sum = sum_up(outputs.into_iter().map(|output| read_tally(output).unwrap()));
        assert_eq!(sum, "28 kills, 3 looks, 0 torn, longest gap 12 ms, 8 KiB moved");
    }

    #[test]
    fn tally_that_is_missing_or_cut_off_is_none() {
        for output in
            ["", "kill 3: 5 looks\n", "nvdimm on 6.1, seed 7: 25 kills, 2", "a, seed x: 1 kills\n"]
        {
            assert_eq!(read_tally(output), None, "{output}");
        }
    }
}
