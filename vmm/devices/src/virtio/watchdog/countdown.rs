//! Countdown until a guest that has stopped pinging is restarted. It reads no clock. The caller
//! counts ticks.

use std::time::Duration;

/// Interval between ticks. While a VM is paused, no ticks are counted. After it resumes, the whole
/// pause counts as one tick.
pub(super) const TICK: Duration = Duration::from_secs(5);
/// Number of ticks without a ping after which the guest is restarted: one more than the timeout
/// requires, because the first tick may follow a ping immediately.
const TICKS: u32 = 5;
/// Minimum time without a ping after which a guest is restarted. It is the same as in Cloud
/// Hypervisor.
pub const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
pub(super) struct Countdown {
    /// Number of ticks that are left. `None` if the guest has not begun to ping or the countdown
    /// has expired.
    left: Option<u32>,
}

impl Countdown {
    /// Restarts the countdown. Returns true if it was not running.
    pub(super) fn ping(&mut self) -> bool {
        self.left.replace(TICKS).is_none()
    }

    /// Counts a tick. Returns true only for the tick at which the countdown expires.
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
