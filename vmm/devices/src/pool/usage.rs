//! Part of a pool that volumes use, its growth, and the thresholds that it reaches.
//!
//! Only chunks of volumes count. Memory can be recalled, so lent chunks do not.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::registry::Unit;

use super::{PmPool, PoolInfo};
use crate::events::{Event, Events};
use crate::log::rate_limited;
use crate::metrics::{Expose, Exposition, Family, one};

/// Shares of the pool, in percent, whose crossing causes an event.
const THRESHOLDS_PERCENT: [u8; 3] = [80, 90, 95];

/// A threshold can be crossed again after the usage has fallen by this much below it.
const HYSTERESIS_PERCENT: u8 = 2;

/// Time constant of the smoothed growth. A volume grows by whole chunks, so short intervals show
/// either nothing or a burst.
const SMOOTHING: Duration = Duration::from_secs(30);

/// Growth that would fill the pool later than this counts as none. Without this limit, a smoothed
/// growth would never end.
const HORIZON: Duration = Duration::from_secs(365 * 86_400);

/// Crossing of a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Crossing {
    /// Highest threshold that the usage has reached.
    threshold_percent: u8,
    /// Time until the pool is full at the present growth. `None` if it does not grow.
    time_to_full: Option<Duration>,
}

/// Usage of a pool over time. It does no I/O.
#[derive(Clone, Copy, Debug, Default)]
struct UsageTracker {
    /// Number of thresholds that count as crossed.
    crossed: usize,
    /// Time and used bytes of the last step.
    last: Option<(Duration, u64)>,
    growth_bytes_per_s: f64,
}

impl UsageTracker {
    /// Records that volumes use `used_bytes` of `total_bytes`. Returns a crossing if the usage has
    /// reached a higher threshold. The first step counts as a crossing, too. `now` is the time
    /// since a fixed start, without pauses of the VM.
    fn step(&mut self, now: Duration, used_bytes: u64, total_bytes: u64) -> Option<Crossing> {
        self.record_growth(now, used_bytes);
        let count = |below_percent: u8| {
            let is_reached = |threshold: &&u8| {
                let percent = **threshold - below_percent;
                let used = u128::from(used_bytes) * 100;
                total_bytes > 0 && used >= u128::from(total_bytes) * u128::from(percent)
            };
            THRESHOLDS_PERCENT.iter().filter(is_reached).count()
        };
        let (reached, before) = (count(0), self.crossed);
        self.crossed = reached.max(before.min(count(HYSTERESIS_PERCENT)));
        (reached > before).then(|| Crossing {
            threshold_percent: THRESHOLDS_PERCENT[reached - 1],
            time_to_full: self.time_to_full(used_bytes, total_bytes),
        })
    }

    fn record_growth(&mut self, now: Duration, used_bytes: u64) {
        let (last_at, last_bytes) = *self.last.get_or_insert((now, used_bytes));
        let elapsed_s = now.saturating_sub(last_at).as_secs_f64();
        if elapsed_s > 0.0 {
            // Negative while discards release more than writes allocate.
            let growth_bytes_per_s = (used_bytes as f64 - last_bytes as f64) / elapsed_s;
            let weight = elapsed_s / (SMOOTHING.as_secs_f64() + elapsed_s);
            self.growth_bytes_per_s += weight * (growth_bytes_per_s - self.growth_bytes_per_s);
            self.last = Some((now, used_bytes));
        }
    }

    /// Returns the time until the pool is full at the present growth. `None` if it does not grow.
    fn time_to_full(&self, used_bytes: u64, total_bytes: u64) -> Option<Duration> {
        let left_bytes = total_bytes.saturating_sub(used_bytes) as f64;
        let horizon_s = HORIZON.as_secs_f64();
        let grows =
            self.growth_bytes_per_s > 0.0 && left_bytes <= self.growth_bytes_per_s * horizon_s;
        grows
            .then(|| Duration::from_secs_f64((left_bytes / self.growth_bytes_per_s).min(horizon_s)))
    }
}

/// Watches an open pool, without keeping it open. The owner calls [`Self::step`] periodically.
#[derive(Debug)]
pub struct UsageMonitor {
    /// Path of the pool, used as its name.
    pool: String,
    source: Weak<dyn PmPool>,
    events: Events,
    state: Mutex<MonitorState>,
}

#[derive(Debug, Default)]
struct MonitorState {
    tracker: UsageTracker,
    /// True if some volume had holes at a step. Otherwise, the usage cannot grow while the VM runs.
    has_had_holes: bool,
    time_to_full: Option<Duration>,
}

impl UsageMonitor {
    /// Creates a monitor of `source`, whose path is `pool`.
    pub fn new(pool: String, source: &Arc<dyn PmPool>, events: Events) -> Self {
        Self { pool, source: Arc::downgrade(source), events, state: Mutex::default() }
    }

    /// Reads the pool, and emits an event if its usage has crossed a threshold. Does not wait for
    /// the media.
    pub fn step(&self, now: Duration) {
        let Some(source) = self.source.upgrade() else { return };
        let info = source.info();
        let Some(Crossing { threshold_percent, time_to_full }) = self.state.lock().step(now, &info)
        else {
            return;
        };
        let (pool, time_to_full_s) = (&self.pool, time_to_full.map(|time| time.as_secs()));
        rate_limited!(
            warn,
            pool,
            threshold_percent,
            time_to_full_s,
            "Volumes use a large part of the pool"
        );
        self.events.emit_of_guest(Event::PoolUsage { pool, threshold_percent, time_to_full_s });
    }
}

impl MonitorState {
    fn step(&mut self, now: Duration, info: &PoolInfo) -> Option<Crossing> {
        self.has_had_holes |= info.provisioned_bytes > info.volume_bytes;
        if !self.has_had_holes {
            return None;
        }
        let (used_bytes, total_bytes) = (info.volume_bytes, info.usable_bytes());
        let crossing = self.tracker.step(now, used_bytes, total_bytes);
        self.time_to_full = self.tracker.time_to_full(used_bytes, total_bytes);
        crossing
    }
}

impl Expose for UsageMonitor {
    /// Adds no sample while the usage does not grow.
    fn expose(&self, out: &mut Exposition) {
        let time_to_full = self.state.lock().time_to_full;
        let family = Family(
            "pool_time_to_full",
            "Time until volumes use the whole pool at their present growth.",
            Some(Unit::Seconds),
        );
        let sample = time_to_full.map(|time| (one("pool", &self.pool), time.as_secs_f64()));
        out.gauges(family, sample);
    }
}

#[cfg(test)]
mod tests {
    use pmem_volume::Pool;
    use pmem_volume::btt::Engine;
    use tempfile::TempDir;

    use super::*;
    use crate::events::WatcherItem;
    use crate::metrics::Metrics;
    use crate::pool::{LocalPool, VolumeFormat, VolumeOptions};

    const MIB: u64 = 1 << 20;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Thresholds of the events while the usage takes the values of `percents`, one per second.
    fn thresholds(percents: &[u64]) -> Vec<Option<u8>> {
        let mut tracker = UsageTracker::default();
        let steps = (0..).zip(percents).map(|(second, percent)| {
            let crossing = tracker.step(seconds(second), percent * MIB, 100 * MIB);
            crossing.map(|crossing| crossing.threshold_percent)
        });
        steps.collect()
    }

    #[test]
    fn each_threshold_is_crossed_once() {
        let all = thresholds(&[10, 79, 80, 81, 89, 90, 94, 95, 100]);
        let none = None;
        assert_eq!(all, [none, none, Some(80), none, none, Some(90), none, Some(95), none]);
        assert_eq!(thresholds(&[50, 97, 98]), [none, Some(95), none], "the highest of three");
        assert_eq!(thresholds(&[91]), [Some(90)], "the first step");
    }

    #[test]
    fn usage_that_varies_around_a_threshold_is_one_crossing() {
        let none = None;
        assert_eq!(thresholds(&[80, 79, 80, 78, 80]), [Some(80), none, none, none, none]);
        assert_eq!(thresholds(&[80, 77, 79, 80]), [Some(80), none, none, Some(80)]);
        // Only the thresholds above the usage can be crossed again.
        assert_eq!(thresholds(&[96, 92, 95, 96]), [Some(95), none, Some(95), none]);
        assert_eq!(thresholds(&[96, 92, 90, 89, 91]), [Some(95), none, none, none, none]);
    }

    #[test]
    fn pool_of_any_size_has_a_usage() {
        let step = |used_bytes, total_bytes| {
            UsageTracker::default().step(seconds(0), used_bytes, total_bytes)
        };
        assert_eq!((step(0, 0), step(1, 0)), (None, None));
        assert!(step(u64::MAX, u64::MAX).is_some());
        // A crafted pool may claim more chunks than it has.
        assert!(step(u64::MAX, 1).is_some());
    }

    #[test]
    fn time_to_full_follows_the_growth() {
        let mut tracker = UsageTracker::default();
        // 1 MiB per second, in whole chunks.
        for second in 0..200 {
            tracker.step(seconds(second), second / 2 * 2 * MIB, 1000 * MIB);
        }
        let left = tracker.time_to_full(200 * MIB, 1000 * MIB).unwrap();
        assert!((seconds(700)..seconds(900)).contains(&left), "{left:?}");
        assert_eq!(tracker.time_to_full(1000 * MIB, 1000 * MIB), Some(Duration::ZERO));
        // The growth ends. Time without steps, as in a pause, is not counted.
        for second in 200..260 {
            tracker.step(seconds(second), 200 * MIB, 1000 * MIB);
        }
        let later = tracker.time_to_full(200 * MIB, 1000 * MIB).unwrap();
        assert!(later > left * 3, "{later:?}");
        for second in 260..2000 {
            tracker.step(seconds(second), 200 * MIB, 1000 * MIB);
        }
        assert_eq!(tracker.time_to_full(200 * MIB, 1000 * MIB), None);
    }

    /// Discards release as much as writes allocate, so the usage does not grow over time.
    #[test]
    fn releases_count_against_growth() {
        let mut tracker = UsageTracker::default();
        for second in 0..600 {
            let used_bytes = if second % 2 == 0 { 100 * MIB } else { 200 * MIB };
            tracker.step(seconds(second), used_bytes, 1000 * MIB);
        }
        let growth = tracker.growth_bytes_per_s / MIB as f64;
        assert!(growth.abs() < 5.0, "{growth} MiB/s of 100 that are written");
    }

    #[test]
    fn usage_that_does_not_grow_has_no_time_to_full() {
        let mut tracker = UsageTracker::default();
        for (second, used_mib) in [(0, 50), (1, 50), (2, 40), (2, 60)] {
            tracker.step(seconds(second), used_mib * MIB, 100 * MIB);
            assert_eq!(tracker.time_to_full(used_mib * MIB, 100 * MIB), None);
        }
    }

    /// Creates a pool of 64 MiB. Volumes can use 60 MiB of it.
    fn pool() -> (Arc<LocalPool>, TempDir) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(Pool::create(&path, 64 * MIB, 0).unwrap());
        (LocalPool::open(&path, None).unwrap(), folder)
    }

    fn emitted(events: &Events) -> u64 {
        let emitted = events.counters().emitted();
        emitted.get(&("foreshore", "pool-usage")).copied().unwrap_or(0)
    }

    #[test]
    fn thin_volume_that_fills_the_pool_causes_events_and_a_time() {
        let (local, _folder) = pool();
        let pool: Arc<dyn PmPool> = local.clone();
        let events = Events::start();
        let mut watcher = events.watch();
        let monitor = UsageMonitor::new("p".to_owned(), &pool, events.clone());
        let thin =
            VolumeOptions { thin: true, ..VolumeOptions::thick(56 * MIB, VolumeFormat::Btt) };
        pool.create_volume("v", thin).unwrap();
        let engine = Engine::open(local.pool().open_volume("v").unwrap()).unwrap();
        monitor.step(seconds(0));
        let text = || Metrics::new("db").encode(&monitor).unwrap();
        assert_eq!((emitted(&events), text().contains("time_to_full")), (0, false));
        for (second, sector) in (1..).zip((0..engine.sectors()).step_by(256)) {
            engine.write(sector, &[1; 4096]).unwrap();
            monitor.step(seconds(second));
        }
        assert_eq!(emitted(&events), 2, "{:?}", pool.info());
        assert!(text().contains("\nforeshore_pool_time_to_full_seconds{vm=\"db\",pool=\"p\"} "));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let Some(WatcherItem::Event(event)) = runtime.block_on(watcher.next()) else {
            panic!("no event")
        };
        let properties = event.properties.as_ref().unwrap();
        assert_eq!((&*properties["pool"], &*properties["threshold_percent"]), ("p", "80"));
        assert!(properties["time_to_full_s"].parse::<u64>().is_ok());
    }

    #[test]
    fn pool_of_thick_volumes_is_full_without_an_event() {
        let (local, _folder) = pool();
        let pool: Arc<dyn PmPool> = local;
        let events = Events::start();
        let monitor = UsageMonitor::new("p".to_owned(), &pool, events.clone());
        pool.create_volume("v", VolumeOptions::thick(60 * MIB, VolumeFormat::Btt)).unwrap();
        monitor.step(seconds(0));
        assert_eq!((pool.info().free_bytes, emitted(&events)), (0, 0));
        // The monitor does not keep the pool open.
        drop(pool);
        monitor.step(seconds(1));
    }
}
