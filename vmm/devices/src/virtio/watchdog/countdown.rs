//! Countdown until a guest that has stopped pinging is restarted, without a clock: the caller
//! passes the ticks.

use std::time::Duration;

/// Interval of ticks. A paused VM has no ticks, and the time of a pause counts as one tick when the
/// VM resumes.
pub(super) const TICK: Duration = Duration::from_secs(5);
/// Ticks without a ping. The first may follow a ping immediately, so this is one more than the
/// timeout requires.
const TICKS: u32 = 5;
/// Time that a guest has at least between two pings, as in Cloud Hypervisor.
pub const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
pub(super) struct Countdown {
    /// `None` if the guest has not begun to ping or the countdown has expired.
    left: Option<u32>,
}

impl Countdown {
    /// Restarts the countdown. True if it was not running.
    pub(super) fn ping(&mut self) -> bool {
        self.left.replace(TICKS).is_none()
    }

    /// Counts a tick. True once, when the countdown expires.
    pub(super) fn tick(&mut self) -> bool {
        self.left = match self.left {
            Some(1) => {
                self.left = None;
                return true;
            }
            left => left.map(|left| left - 1),
        };
        false
    }

    pub(super) fn is_on(&self) -> bool {
        self.left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the ticks until the countdown expires.
    fn ticks(countdown: &mut Countdown) -> u32 {
        (1..100).find(|_| countdown.tick()).expect("an end")
    }

    #[test]
    fn countdown_starts_with_the_first_ping_and_restarts_with_each() {
        let mut countdown = Countdown::default();
        assert!((0..100).all(|_| !countdown.tick()) && !countdown.is_on());
        assert!(countdown.ping() && !countdown.ping());
        for _ in 0..100 {
            assert!((1..TICKS).all(|_| !countdown.tick()));
            assert!(!countdown.ping());
        }
        assert_eq!(ticks(&mut countdown), TICKS);
    }

    #[test]
    fn countdown_expires_once_until_the_next_ping() {
        let mut countdown = Countdown::default();
        countdown.ping();
        ticks(&mut countdown);
        assert!((0..100).all(|_| !countdown.tick()) && !countdown.is_on());
        assert!(countdown.ping());
        assert_eq!(ticks(&mut countdown), TICKS);
    }

    #[test]
    fn ticks_cover_the_timeout() {
        assert!(TICK * (TICKS - 1) >= TIMEOUT);
    }
}
