//! Filter for a zone's plugged size. Plugged memory counts only after it has remained plugged for
//! some time.
//!
//! A guest without memory for page descriptors plugs a block, fails to add it, and unplugs it again
//! within about 10 ms (drivers/virtio/virtio_mem.c, virtio_mem_mb_plug_and_add). The host may
//! observe the zone at any point in between.

use crate::TimeMs;

/// Time for which memory must remain plugged before it counts.
pub const CONFIRM_MS: u64 = 1_000;
/// Upper limit of that time. No guest searches longer for the memory that a new block needs.
const MAX_CONFIRM_MS: u64 = 16_000;

/// Filter for the plugged size of one zone. The time of each size starts when that size is first
/// reached, so memory plugged earlier does not confirm memory plugged later. Memory that was
/// confirmed, was then unplugged without a request, and is plugged again is not new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlugFilter {
    /// Largest requested size that has been confirmed. Only a larger size is new. `None` before the
    /// first observation.
    confirmed_peak_bytes: Option<u64>,
    /// Part of the plugged size that has been confirmed and has not been unplugged since. It is
    /// less than `confirmed_peak_bytes` after an unplug without a request.
    confirmed_bytes: u64,
    /// Time for which memory must remain plugged to be confirmed. The time doubles whenever
    /// confirmed memory is unplugged without a request.
    confirm_ms: u64,
    /// Plugged sizes above `confirmed_bytes`, smallest and oldest first. Each one has the time
    /// since which at least this size has been plugged without a break.
    levels: Vec<Level>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    since: TimeMs,
    bytes: u64,
}

impl Default for PlugFilter {
    fn default() -> Self {
        Self {
            confirmed_peak_bytes: None,
            confirmed_bytes: 0,
            confirm_ms: CONFIRM_MS,
            levels: Vec::new(),
        }
    }
}

impl PlugFilter {
    /// Creates a filter for a zone with this plugged size.
    pub fn of(min_requested_bytes: u64, plugged_bytes: u64, now: TimeMs) -> Self {
        let mut filter = Self::default();
        filter.observe(min_requested_bytes, plugged_bytes, now);
        filter
    }

    /// Updates the filter with the plugged size. `min_requested_bytes` is the smallest request
    /// since the last observation. Returns the time at which a new size was reached, if it has now
    /// remained for long enough. The first observed size is not new.
    pub fn observe(
        &mut self,
        min_requested_bytes: u64,
        plugged_bytes: u64,
        now: TimeMs,
    ) -> Option<TimeMs> {
        // Memory that was unplugged on request is new when it is plugged again.
        let max_bytes = min_requested_bytes.max(plugged_bytes);
        let confirmed_peak_bytes =
            self.confirmed_peak_bytes.unwrap_or(plugged_bytes).min(max_bytes);
        let before_bytes =
            self.confirmed_peak_bytes.map_or(plugged_bytes, |_| self.confirmed_bytes);
        let confirmed_bytes = before_bytes.min(plugged_bytes);
        if confirmed_bytes < before_bytes.min(min_requested_bytes) {
            self.confirm_ms = self.confirm_ms.saturating_mul(2).min(MAX_CONFIRM_MS);
        }
        if let Some(first_dropped) =
            self.levels.iter().position(|level| level.bytes > plugged_bytes)
        {
            // The first level above the plugged size is still plugged in part.
            self.levels.truncate(first_dropped + 1);
            self.levels[first_dropped].bytes = plugged_bytes;
            self.levels.dedup_by_key(|level| level.bytes);
        }
        let confirmed_count =
            self.levels.partition_point(|level| now.since(level.since) >= self.confirm_ms);
        let confirmed = self.levels.drain(..confirmed_count).next_back();
        if confirmed.is_some() {
            self.confirm_ms = CONFIRM_MS;
        }
        self.confirmed_bytes =
            confirmed.map_or(confirmed_bytes, |level| level.bytes.max(confirmed_bytes));
        let new_level = confirmed.filter(|level| level.bytes > confirmed_peak_bytes);
        self.confirmed_peak_bytes =
            Some(new_level.map_or(confirmed_peak_bytes, |level| level.bytes));
        self.levels.retain(|level| level.bytes > self.confirmed_bytes);
        if plugged_bytes > self.levels.last().map_or(self.confirmed_bytes, |level| level.bytes) {
            // The list has at most one level per millisecond.
            self.levels.pop_if(|level| level.since == now);
            self.levels.push(Level { since: now, bytes: plugged_bytes });
        }
        new_level.map(|level| level.since)
    }

    /// Returns the time at which the present size was reached, if it is new and not confirmed yet.
    pub fn pending_since(&self) -> Option<TimeMs> {
        let confirmed_peak_bytes = self.confirmed_peak_bytes?;
        self.levels
            .last()
            .filter(|level| level.bytes > confirmed_peak_bytes)
            .map(|level| level.since)
    }

    /// Returns the confirmed part of the plugged size. Confirmed memory that was unplugged and has
    /// just been plugged again is not included.
    pub fn confirmed_bytes(&self, plugged_bytes: u64) -> u64 {
        self.confirmed_peak_bytes.map_or(plugged_bytes, |_| self.confirmed_bytes.min(plugged_bytes))
    }

    /// Treats the present size as confirmed, although it may not have remained for long enough.
    pub fn confirm_all(&mut self) {
        if let Some(level) = self.levels.pop() {
            self.confirmed_bytes = level.bytes;
            self.confirmed_peak_bytes = self.confirmed_peak_bytes.max(Some(level.bytes));
        }
        self.levels.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Observes a zone of requested size 256 at these times with these plugged sizes. Returns each
    /// result.
    fn confirmed_sizes(plugged: &[(u64, u64)]) -> Vec<Option<u64>> {
        let mut filter = PlugFilter::default();
        let observe =
            |&(at, bytes): &(u64, u64)| filter.observe(256, bytes, TimeMs(at)).map(|since| since.0);
        plugged.iter().map(observe).collect()
    }

    #[test]
    fn memory_counts_after_a_second() {
        assert_eq!(
            confirmed_sizes(&[(0, 0), (100, 8), (1_099, 8), (1_100, 8), (9_000, 8)]),
            [None, None, None, Some(100), None]
        );
        assert_eq!(confirmed_sizes(&[(0, 8), (5_000, 8)]), [None, None], "the initial memory");
        assert_eq!(
            confirmed_sizes(&[(0, 0), (100, 8), (110, 0), (1_200, 0)]),
            [None; 4],
            "the memory is gone"
        );
        assert_eq!(
            confirmed_sizes(&[(0, 0), (100, 8), (110, 0), (120, 8), (1_100, 8), (1_120, 8)])[4..],
            [None, Some(120)]
        );
    }

    #[test]
    fn memory_plugged_earlier_does_not_confirm_memory_plugged_later() {
        let mut filter = PlugFilter::default();
        for (at, bytes) in [(0, 0), (10, 128), (1_005, 256)] {
            assert_eq!(filter.observe(256, bytes, TimeMs(at)), None);
        }
        assert_eq!(filter.observe(256, 256, TimeMs(1_010)), Some(TimeMs(10)), "the first of them");
        assert_eq!(
            (filter.confirmed_bytes(256), filter.pending_since()),
            (128, Some(TimeMs(1_005)))
        );
        // Part of the second level is unplugged. The rest was plugged at the same time.
        assert_eq!(filter.observe(256, 200, TimeMs(1_020)), None);
        assert_eq!(filter.pending_since(), Some(TimeMs(1_005)));
        assert_eq!(filter.observe(256, 200, TimeMs(2_005)), Some(TimeMs(1_005)));
        assert_eq!((filter.confirmed_bytes(200), filter.pending_since()), (200, None));
        for (at, bytes) in [(3_000, 220), (3_100, 256), (3_110, 220)] {
            filter.observe(256, bytes, TimeMs(at));
        }
        assert_eq!(filter.pending_since(), Some(TimeMs(3_000)), "all of the second is unplugged");
    }

    #[test]
    fn memory_unplugged_without_request_and_plugged_again_is_not_new() {
        let drops = [
            (0, 0),
            (100, 2),
            (1_200, 2),
            (1_210, 0),
            (1_220, 2),
            (2_300, 2),
            (2_310, 0),
            (2_320, 4),
        ];
        let confirmed = confirmed_sizes(&drops);
        assert_eq!(confirmed[2], Some(100));
        assert_eq!(confirmed[3..], [None; 5]);
        assert_eq!(
            confirmed_sizes(&[&drops[..], &[(3_320, 4), (4_319, 4), (4_320, 4)]].concat())[8..],
            [None, None, Some(2_320)],
            "more than before, for longer than the removed memory"
        );
    }

    #[test]
    fn memory_unplugged_without_request_has_to_stay_again() {
        let mut filter = PlugFilter::default();
        // The guest writes a long message about its lack of memory to its console. Meanwhile, the
        // block remains plugged.
        for (at, bytes) in [(0, 0), (100, 128), (1_200, 128), (1_300, 0)] {
            filter.observe(256, bytes, TimeMs(at));
        }
        assert_eq!(filter.observe(256, 128, TimeMs(5_000)), None);
        assert_eq!(
            (filter.confirmed_bytes(128), filter.pending_since()),
            (0, None),
            "it is neither plugged nor new"
        );
        // The memory remains plugged as long as the first time, and is then unplugged again.
        assert_eq!(filter.observe(256, 128, TimeMs(6_100)), None);
        assert_eq!((filter.confirmed_bytes(128), filter.pending_since()), (0, None));
        assert_eq!(filter.observe(256, 128, TimeMs(7_000)), None);
        assert_eq!(
            (filter.confirmed_bytes(128), filter.pending_since()),
            (128, None),
            "twice as long"
        );
        assert_eq!(filter.confirmed_bytes(64), 64, "at most the plugged memory");
        filter.observe(256, 192, TimeMs(8_000));
        assert_eq!(
            filter.observe(256, 192, TimeMs(9_000)),
            Some(TimeMs(8_000)),
            "memory that stayed longer counts"
        );
    }

    #[test]
    fn memory_unplugged_on_request_is_new_when_plugged_again() {
        let mut filter = PlugFilter::default();
        filter.observe(256, 256, TimeMs(0));
        // A shrink by half is withdrawn after the guest has followed part of it.
        filter.observe(128, 200, TimeMs(100));
        assert_eq!((filter.observe(128, 200, TimeMs(5_000)), filter.pending_since()), (None, None));
        filter.observe(200, 256, TimeMs(5_100));
        assert_eq!(filter.observe(256, 256, TimeMs(6_100)), Some(TimeMs(5_100)));
        // The requested size is lowered after memory was unplugged without a request.
        filter.observe(256, 0, TimeMs(6_200));
        filter.observe(0, 0, TimeMs(6_300));
        filter.observe(0, 2, TimeMs(6_400));
        assert_eq!(filter.pending_since(), Some(TimeMs(6_400)));
    }

    #[test]
    fn confirmed_memory_is_not_new_later() {
        let mut filter = PlugFilter::default();
        for (at, bytes) in [(0, 0), (10, 128), (500, 256)] {
            filter.observe(256, bytes, TimeMs(at));
        }
        filter.confirm_all();
        assert_eq!((filter.confirmed_bytes(256), filter.pending_since()), (256, None));
        assert_eq!(filter.observe(256, 256, TimeMs(2_000)), None);
    }
}
