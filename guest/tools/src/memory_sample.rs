//! Memory and swap use of a guest at one point in time. guest-tool in the guest prints it as a
//! line, and the host parses the line.

use std::fmt;

use anyhow::{Context, Result, ensure};

/// Sample of memory use. Sizes are in bytes. Counters are totals since the guest booted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemorySample {
    /// Time since the start of the watch.
    pub at_ms: u64,
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// Swap space in use.
    pub swapped_bytes: u64,
    /// Pages read from swap.
    pub swap_ins: u64,
    /// Pages written to swap.
    pub swap_outs: u64,
    /// Page faults that waited for I/O.
    pub major_faults: u64,
    pub oom_kills: u64,
    /// Total time in which at least one task waited for memory.
    pub stall_some_us: u64,
    /// Total time in which all tasks waited for memory.
    pub stall_full_us: u64,
}

impl MemorySample {
    /// Parses the texts of /proc/meminfo, /proc/vmstat and /proc/pressure/memory.
    pub fn parse(at_ms: u64, meminfo: &str, vmstat: &str, pressure: &str) -> Result<Self> {
        let kib = |key: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            let number =
                line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
            Ok::<_, anyhow::Error>(
                number.with_context(|| format!("/proc/meminfo has no {key}"))? * 1024,
            )
        };
        let counter = |key: &str| {
            let line = vmstat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
            line.and_then(|number| number.parse().ok())
                .with_context(|| format!("/proc/vmstat has no {key}"))
        };
        let stall = |kind: &str| {
            let line = pressure.lines().find(|line| line.starts_with(kind));
            let total = line.and_then(|line| line.rsplit_once("total=")?.1.parse().ok());
            total.with_context(|| format!("/proc/pressure/memory has no {kind}"))
        };
        Ok(Self {
            at_ms,
            total_bytes: kib("MemTotal")?,
            available_bytes: kib("MemAvailable")?,
            swapped_bytes: kib("SwapTotal")?.saturating_sub(kib("SwapFree")?),
            swap_ins: counter("pswpin")?,
            swap_outs: counter("pswpout")?,
            major_faults: counter("pgmajfault")?,
            oom_kills: counter("oom_kill")?,
            stall_some_us: stall("some")?,
            stall_full_us: stall("full")?,
        })
    }

    /// Parses the line that [`Display`](fmt::Display) writes.
    pub fn from_line(line: &str) -> Result<Self> {
        let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>();
        let numbers = numbers.ok().and_then(|numbers| <[u64; 10]>::try_from(numbers).ok());
        let numbers = numbers.with_context(|| format!("Not a sample: {line:?}"))?;
        let [at_ms, total, available, swapped, ins, outs, majors, kills, some, full] = numbers;
        ensure!(available <= total, "Available memory exceeds total memory: {line:?}");
        Ok(Self {
            at_ms,
            total_bytes: total,
            available_bytes: available,
            swapped_bytes: swapped,
            swap_ins: ins,
            swap_outs: outs,
            major_faults: majors,
            oom_kills: kills,
            stall_some_us: some,
            stall_full_us: full,
        })
    }

    /// Returns used memory, without swapped pages.
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes - self.available_bytes
    }
}

impl fmt::Display for MemorySample {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} {} {} {} {} {} {} {} {} {}",
            self.at_ms,
            self.total_bytes,
            self.available_bytes,
            self.swapped_bytes,
            self.swap_ins,
            self.swap_outs,
            self.major_faults,
            self.oom_kills,
            self.stall_some_us,
            self.stall_full_us
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:  400 kB\nSwapTotal: 90 kB\nSwapFree: 70 kB\n";
    const VMSTAT: &str = "pswpin 1\npswpout 2\npgmajfault 3\noom_kill 4\n";
    const PRESSURE: &str = "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=6\n";

    #[test]
    fn sample_survives_its_line() {
        let sample = MemorySample::parse(7, MEMINFO, VMSTAT, PRESSURE).unwrap();
        assert_eq!((sample.used_bytes(), sample.swapped_bytes), (600 << 10, 20 << 10));
        assert_eq!((sample.oom_kills, sample.stall_some_us, sample.stall_full_us), (4, 5, 6));
        assert_eq!(MemorySample::from_line(&sample.to_string()).unwrap(), sample);
    }

    #[test]
    fn missing_or_impossible_value_is_an_error() {
        assert!(MemorySample::parse(0, "MemTotal: 1 kB\n", VMSTAT, PRESSURE).is_err());
        assert!(MemorySample::parse(0, MEMINFO, "pswpin 1\n", PRESSURE).is_err());
        assert!(MemorySample::parse(0, MEMINFO, VMSTAT, "some total=5\n").is_err());
        for line in ["", "1 2 3", "0 1 2 0 0 0 0 0 0 0", "0 x 2 0 0 0 0 0 0 0"] {
            assert!(MemorySample::from_line(line).is_err(), "{line:?}");
        }
    }
}
