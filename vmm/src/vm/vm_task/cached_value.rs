//! Cache for a value that is expensive to read. The caller passes the current time.

use std::time::{Duration, Instant};

/// Cached value, which is read again when it is too old or when its key changes.
#[derive(Debug)]
pub(crate) struct CachedValue<K, T> {
    max_age: Duration,
    last: Option<(K, Instant, T)>,
}

impl<K: PartialEq, T> CachedValue<K, T> {
    /// Creates an empty cache. A value is valid for `max_age`.
    pub(crate) fn new(max_age: Duration) -> Self {
        Self { max_age, last: None }
    }

    /// Returns the value for `key`. Calls `read` if no valid value is cached.
    pub(crate) fn get(&mut self, key: K, now: Instant, read: impl FnOnce() -> T) -> &T {
        let is_good = |(of, at, _): &(K, Instant, T)| {
            *of == key && now.saturating_duration_since(*at) < self.max_age
        };
        let last = self.last.take().filter(is_good);
        &self.last.insert(last.unwrap_or_else(|| (key, now, read()))).2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_read_once_per_max_age() {
        let start = Instant::now();
        let mut cached = CachedValue::new(Duration::from_millis(1000));
        let mut reads = 0;
        let mut seen = Vec::new();
        for at_ms in [0, 1, 500, 999, 1000, 1001, 1999, 5000, 5001] {
            let value = *cached.get((), start + Duration::from_millis(at_ms), || {
                reads += 1;
                at_ms
            });
            seen.push(value);
        }
        assert_eq!(seen, [0, 0, 0, 0, 1000, 1000, 1000, 5000, 5000]);
        assert_eq!(reads, 3);
    }

    #[test]
    fn value_is_read_again_when_its_key_changes() {
        let now = Instant::now();
        let mut cached = CachedValue::new(Duration::from_secs(1));
        assert_eq!(*cached.get(7, now, || "with seven plugged"), "with seven plugged");
        assert_eq!(*cached.get(0, now, || "with nothing plugged"), "with nothing plugged");
        assert_eq!(*cached.get(0, now, || "never read"), "with nothing plugged");
    }
}
