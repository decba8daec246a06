//! Generates the demand of a guest.

use super::demand::{Demand, Segment};
use super::random::Random;
use crate::params::params;
use crate::units::scale;
use crate::{MIB, TimeMs};

const MINUTE_MS: u64 = 60_000;

params! {
    /// Parameters of a workload. Each workload has its own defaults. This table has the defaults of
    /// `steady`.
    pub struct Params {
        /// Lowest anonymous memory, in thousandths of DRAM.
        low_permille: "low", Permille, 10 => 100_000, 500;
        /// Highest anonymous memory, in thousandths of DRAM.
        high_permille: "high", Permille, 10 => 100_000, 1_500;
        /// Growth of anonymous memory while it rises, in bytes per second.
        rate_bytes_per_s: "rate", Bytes, 4096 => 1 << 40, 100 * MIB;
        /// Time from one rise of anonymous memory to the next.
        period_ms: "period", Ms, 1_000 => 86_400_000, 10 * MINUTE_MS;
        /// Pages touched per second.
        touches_per_s: "touches", Count, 0 => 100_000_000, 100_000;
        /// Part of anonymous memory that is touched, in thousandths.
        hot_permille: "hot", Permille, 0 => 1000, 800;
        /// Size of the files that are read repeatedly, in thousandths of DRAM.
        files_permille: "files", Permille, 0 => 100_000, 50;
        /// Rate of reading files that are read only once, in bytes per second.
        stream_bytes_per_s: "stream", Bytes, 0 => 1 << 40, 0;
        /// Kernel memory, in thousandths of the present anonymous memory.
        kernel_permille: "kernel", Permille, 0 => 10_000, 0;
    }
    order { "low" <= "high"; }
}

/// Kind of a generated demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The demand rises to `high` once and does not change after that.
    Steady,
    /// The demand rises at `rate`, remains at `high` for `period`, and ends.
    Ramp,
    /// The demand is at `low`. The demand rises once in each period at a random time, for a
    /// tenth of the period.
    Burst,
    /// The demand repeatedly rises at `rate` and drops immediately.
    Sawtooth,
    /// The demand rises slowly during the whole run.
    Leak,
    /// The demand varies over the day from `low` at night to `high` at noon, in uneven steps of
    /// five minutes.
    Diurnal,
    /// The demand for anonymous memory is small. Many files are read, some repeatedly and more of
    /// them once.
    CacheHeavy,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Workload; 7] = [
        Workload::Steady,
        Workload::Ramp,
        Workload::Burst,
        Workload::Sawtooth,
        Workload::Leak,
        Workload::Diurnal,
        Workload::CacheHeavy,
    ];

    /// Returns the name that `--workload` accepts.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Steady => "steady",
            Workload::Ramp => "ramp",
            Workload::Burst => "burst",
            Workload::Sawtooth => "sawtooth",
            Workload::Leak => "leak",
            Workload::Diurnal => "diurnal",
            Workload::CacheHeavy => "cache-heavy",
        }
    }

    /// Returns the workload called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|workload| workload.name() == name)
    }

    /// Returns the default parameters.
    pub fn defaults(self) -> Params {
        let default = Params::default();
        match self {
            Workload::Steady | Workload::Ramp | Workload::Leak => default,
            Workload::Burst => Params { rate_bytes_per_s: 1 << 30, ..default },
            Workload::Sawtooth => Params { period_ms: MINUTE_MS, ..default },
            Workload::Diurnal => {
                Params { period_ms: 24 * 60 * MINUTE_MS, low_permille: 400, ..default }
            }
            Workload::CacheHeavy => Params {
                low_permille: 400,
                high_permille: 500,
                files_permille: 600,
                stream_bytes_per_s: 50 * MIB,
                ..default
            },
        }
    }

    /// Returns the names of the parameters that do not affect this workload.
    pub fn ignores(self) -> &'static [&'static str] {
        match self {
            Workload::Steady | Workload::CacheHeavy => &["period"],
            Workload::Leak => &["rate", "period"],
            Workload::Ramp | Workload::Burst | Workload::Sawtooth | Workload::Diurnal => &[],
        }
    }

    /// Generates the demand of a guest with `dram_bytes` for `duration_ms`. `random` provides the
    /// irregular values.
    pub fn demand(
        self,
        params: &Params,
        dram_bytes: u64,
        duration_ms: u64,
        random: &mut Random,
    ) -> Demand {
        let mut builder = DemandBuilder::new(params, dram_bytes, duration_ms);
        let (low, high) = (builder.part(params.low_permille), builder.part(params.high_permille));
        let period_ms = params.period_ms;
        match self {
            Workload::Steady => {
                builder.hold(random.between(1_000, 10_000));
                builder.ramp_to(high);
            }
            Workload::Ramp => {
                builder.hold(random.between(3_000, 10_000));
                builder.ramp_to(high);
                builder.hold(period_ms);
                builder.drop_to(low);
            }
            Workload::Burst => {
                while builder.has_time_left() {
                    let before_ms = random.between(0, period_ms * 8 / 10);
                    builder.hold(before_ms);
                    builder.ramp_to(high - random.between(0, (high - low) / 4 + 1));
                    builder.hold(period_ms / 10);
                    builder.drop_to(low);
                    builder.hold(period_ms * 9 / 10 - before_ms);
                }
            }
            Workload::Sawtooth => {
                while builder.has_time_left() {
                    let start = builder.now_ms;
                    builder.ramp_to(high);
                    builder.hold((start + period_ms).saturating_sub(builder.now_ms + 1).max(100));
                    builder.drop_to(low);
                    builder.hold(100);
                }
            }
            Workload::Leak => {
                let bytes_per_s = scale(high - low, 1000, duration_ms.max(1));
                builder.push(i64::try_from(bytes_per_s).unwrap_or(i64::MAX), duration_ms);
            }
            Workload::Diurnal => {
                builder.now_bytes = day(low, high, 0, period_ms);
                let step_ms = (period_ms / 288).max(100);
                while builder.has_time_left() {
                    let next = day(low, high, builder.now_ms % period_ms, period_ms);
                    let variation = next / 20;
                    let start = builder.now_ms;
                    builder.ramp_to(next - variation / 2 + random.between(0, variation + 1));
                    builder.hold((start + step_ms).saturating_sub(builder.now_ms).max(100));
                }
            }
            Workload::CacheHeavy => {
                builder.hold(random.between(1_000, 10_000));
                builder.ramp_to(high);
            }
        }
        builder.end()
    }
}

/// Mean demand at a time of day. The mean demand consists of one parabola for the day and one for
/// the night. It needs no floating point, and differs from a cosine by less than 6 %.
fn day(low: u64, high: u64, at_ms: u64, period_ms: u64) -> u64 {
    let half = (period_ms / 2).max(1);
    // The first and last quarter of the period are night, so the time is shifted by a quarter.
    let at = (at_ms + period_ms - period_ms / 4) % period_ms;
    let x = u128::from(at % half) * 2000 / u128::from(half);
    // The value is 0 at both ends of the half, and 1000 in its middle.
    let arch = x * (2000 - x) / 1000;
    let permille = if at < half { 500 + arch / 2 } else { 500 - arch / 2 };
    low + (u128::from(high - low) * permille / 1000) as u64
}

/// Segments that are being generated.
struct DemandBuilder<'a> {
    params: &'a Params,
    dram_bytes: u64,
    duration_ms: u64,
    segments: Vec<Segment>,
    now_ms: u64,
    now_bytes: u64,
}

impl<'a> DemandBuilder<'a> {
    fn new(params: &'a Params, dram_bytes: u64, duration_ms: u64) -> Self {
        let now_bytes = scale(dram_bytes, params.low_permille, 1000);
        DemandBuilder {
            params,
            dram_bytes,
            duration_ms,
            segments: Vec::new(),
            now_ms: 0,
            now_bytes,
        }
    }

    fn part(&self, permille: u64) -> u64 {
        scale(self.dram_bytes, permille, 1000)
    }

    fn has_time_left(&self) -> bool {
        self.now_ms < self.duration_ms
    }

    /// Adds a segment of `ms` in which anonymous memory changes by `anon_bytes_per_s`.
    fn push(&mut self, anon_bytes_per_s: i64, ms: u64) {
        if ms == 0 {
            return;
        }
        let kernel_permille = self.params.kernel_permille;
        let kernel_rate = scale(anon_bytes_per_s.unsigned_abs(), kernel_permille, 1000);
        let kernel_rate = i64::try_from(kernel_rate).unwrap_or(i64::MAX);
        let segment = Segment {
            at: TimeMs(self.now_ms),
            anon_bytes: self.now_bytes,
            anon_bytes_per_s,
            kernel_bytes: scale(self.now_bytes, kernel_permille, 1000),
            kernel_bytes_per_s: anon_bytes_per_s.signum().saturating_mul(kernel_rate),
            file_bytes: self.part(self.params.files_permille),
            stream_bytes_per_s: self.params.stream_bytes_per_s,
            touches_per_s: self.params.touches_per_s,
            hot_permille: self.params.hot_permille,
        };
        self.segments.push(segment);
        self.now_ms += ms;
        self.now_bytes = segment.anon_bytes_at(TimeMs(self.now_ms));
    }

    fn hold(&mut self, ms: u64) {
        self.push(0, ms);
    }

    /// Rises or falls to `bytes` at the configured rate.
    fn ramp_to(&mut self, bytes: u64) {
        let rate = self.params.rate_bytes_per_s;
        let ms = (self.now_bytes.abs_diff(bytes)).saturating_mul(1000) / rate;
        let signed = i64::try_from(rate).unwrap_or(i64::MAX);
        self.push(if bytes < self.now_bytes { -signed } else { signed }, ms);
        self.now_bytes = bytes;
    }

    /// Falls to `bytes` immediately, because processes end faster than they fill memory.
    fn drop_to(&mut self, bytes: u64) {
        self.now_bytes = bytes;
    }

    fn end(mut self) -> Demand {
        if self.has_time_left() {
            self.hold(self.duration_ms - self.now_ms);
        }
        Demand::new(self.segments, TimeMs(self.duration_ms)).expect("generated in order")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Parameters;

    const DAY_MS: u64 = 86_400_000;
    const DRAM: u64 = 1 << 30;

    fn demand(workload: Workload, duration_ms: u64, seed: u64) -> Demand {
        workload.demand(&workload.defaults(), DRAM, duration_ms, &mut Random::new(seed, 0))
    }

    #[test]
    fn each_workload_has_a_name_and_stays_between_low_and_high() {
        for workload in Workload::ALL {
            assert_eq!(Workload::from_name(workload.name()), Some(workload));
            let params = workload.defaults();
            params.validate().expect("defaults are inside their bounds");
            let demand = demand(workload, DAY_MS, 1);
            let (low, high) =
                (scale(DRAM, params.low_permille, 1000), scale(DRAM, params.high_permille, 1000));
            for (index, segment) in demand.segments().iter().enumerate() {
                let end = demand.segments().get(index + 1).map_or(demand.end(), |next| next.at);
                for bytes in [segment.anon_bytes, segment.anon_bytes_at(end)] {
                    let tolerance = high / 20;
                    let span = low - low / 20..=high + tolerance;
                    assert!(
                        span.contains(&bytes),
                        "{} at {}: {}",
                        workload.name(),
                        segment.at,
                        bytes / MIB
                    );
                }
            }
        }
    }

    #[test]
    fn seed_determines_demand() {
        for workload in [Workload::Burst, Workload::Diurnal] {
            assert_eq!(demand(workload, DAY_MS, 5), demand(workload, DAY_MS, 5));
            assert_ne!(demand(workload, DAY_MS, 5), demand(workload, DAY_MS, 6));
        }
    }

    #[test]
    fn day_has_a_night_and_a_noon() {
        let demand = demand(Workload::Diurnal, DAY_MS, 3);
        let at = |hour: u64| {
            let now = TimeMs(hour * 3_600_000 + 200_000);
            let segment =
                demand.segments().iter().rev().find(|segment| segment.at <= now).expect("begun");
            segment.anon_bytes_at(now) / MIB
        };
        assert!((390..=450).contains(&at(0)), "{}", at(0));
        assert!((1_450..=1_600).contains(&at(12)), "{}", at(12));
        assert!((900..=1_100).contains(&at(6)), "{}", at(6));
        assert!(demand.segments().len() > 288);
    }

    #[test]
    fn leak_ends_at_high() {
        let demand = demand(Workload::Leak, DAY_MS, 1);
        assert_eq!(demand.segments().len(), 1);
        let short = demand.peak_bytes().abs_diff(DRAM * 3 / 2 + DRAM / 20);
        assert!(short < MIB, "{short}");
    }

    #[test]
    fn each_parameter_changes_demand_unless_it_is_ignored() {
        for workload in Workload::ALL {
            for (index, param) in Params::TABLE.iter().enumerate() {
                let mut params = workload.defaults();
                *params.slot(index) = params.value(index) * 9 / 10 + 1;
                let changed = workload.demand(&params, DRAM, DAY_MS, &mut Random::new(1, 0));
                let same = changed == demand(workload, DAY_MS, 1);
                assert_eq!(
                    same,
                    workload.ignores().contains(&param.name),
                    "{} of {}",
                    param.name,
                    workload.name()
                );
            }
        }
    }
}
