//! What is dear to find out, kept for a while: pure, the time is given.

use std::time::{Duration, Instant};

/// A value that is read again only when it has become too old.
#[derive(Debug)]
pub struct Cached<T> {
    max_age: Duration,
    last: Option<(Instant, T)>,
}

impl<T> Cached<T> {
    /// Nothing has been read yet; what will be is good for `max_age`.
    pub fn new(max_age: Duration) -> Self {
        Self { max_age, last: None }
    }

    /// The value, which `read` reads if there is none that is young enough.
    pub fn get(&mut self, now: Instant, read: impl FnOnce() -> T) -> &T {
        let last = self.last.take().filter(|(at, _)| now.saturating_duration_since(*at) < self.max_age);
        &self.last.insert(last.unwrap_or_else(|| (now, read()))).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_once_for_each_span_however_often_it_is_asked_for() {
        let start = Instant::now();
        let mut cached = Cached::new(Duration::from_millis(1000));
        let mut reads = 0;
        let mut seen = Vec::new();
        for at_ms in [0, 1, 500, 999, 1000, 1001, 1999, 5000, 5001] {
            let value = *cached.get(start + Duration::from_millis(at_ms), || {
                reads += 1;
                at_ms
            });
            seen.push(value);
        }
        assert_eq!(seen, [0, 0, 0, 0, 1000, 1000, 1000, 5000, 5000]);
        assert_eq!(reads, 3);
    }
}
