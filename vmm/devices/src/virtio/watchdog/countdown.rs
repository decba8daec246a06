//! When a guest has been silent for too long. No clock is here: ticks are told.

use std::time::Duration;

/// How often it ticks. A VM that is paused does not tick, and what has passed when it goes on is
/// one tick.
pub(super) const TICK: Duration = Duration::from_secs(5);
/// Ticks without a ping. The first of them may come right after a ping, so that it is one more than
/// the timeout has.
const TICKS: u32 = 5;
/// A guest that has pinged has at least so long until it must have done so again, as in Cloud
/// Hypervisor.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// What is left until the guest is restarted.
#[derive(Debug, Default)]
pub(super) struct Countdown {
    /// `None`: nobody has begun to ping, or it is over.
    left: Option<u32>,
}

impl Countdown {
    /// The guest lives. True if that is the first one knows of it.
    pub(super) fn ping(&mut self) -> bool {
        self.left.replace(TICKS).is_none()
    }

    /// Time has passed. True, once, when it was too much.
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

    /// Whether ticks are wanted.
    pub(super) fn is_on(&self) -> bool {
        self.left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks until it is over, which must be.
    fn ticks(countdown: &mut Countdown) -> u32 {
        (1..100).find(|_| countdown.tick()).expect("an end")
    }

    #[test]
    fn it_begins_with_the_first_ping_and_anew_with_each() {
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
    fn it_is_over_once_until_the_next_ping() {
        let mut countdown = Countdown::default();
        countdown.ping();
        ticks(&mut countdown);
        assert!((0..100).all(|_| !countdown.tick()) && !countdown.is_on());
        assert!(countdown.ping());
        assert_eq!(ticks(&mut countdown), TICKS);
    }

    #[test]
    fn a_guest_has_the_time_that_it_is_promised_whenever_it_pings() {
        assert!(TICK * (TICKS - 1) >= TIMEOUT);
    }
}
