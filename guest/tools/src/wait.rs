//! Waits for conditions.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Interval between checks of a condition. The interval is short compared with all waits, and long
/// enough not to slow down the awaited operation.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

static LIMIT_FACTOR: OnceLock<f64> = OnceLock::new();

/// Multiplies all later time limits of this process by `factor`: limits of waits, of scripts in the
/// guest, and of responses.
///
/// Panics if it is called twice, or if the factor is below 1.
pub fn scale_limits(factor: f64) {
    assert!(factor >= 1.0, "limits scaled by {factor}, below 1");
    assert!(LIMIT_FACTOR.set(factor).is_ok(), "limits scaled twice");
}

pub fn scaled_limit(limit: Duration) -> Duration {
    LIMIT_FACTOR.get().map_or(limit, |factor| limit.mul_f64(*factor))
}

/// Waits until `condition` returns true. If `condition` returns an error, returns that error
/// immediately.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait_for(what, limit, || Ok(condition()?.then_some(())))
}

/// Waits until `poll` returns a value, and returns that value. If `poll` returns an error, returns
/// that error immediately.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut poll: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let (started, limit) = (Instant::now(), scaled_limit(limit));
    loop {
        if let Some(found) = poll()? {
            return Ok(found);
        }
        if started.elapsed() >= limit {
            bail!("Timed out after {:.1} s of waiting until {what}", limit.as_secs_f64());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_when_the_condition_is_true() {
        let mut polls = 0;
        let found = wait_for("the third poll", Duration::from_secs(10), || {
            polls += 1;
            Ok((polls == 3).then_some("here"))
        });
        assert_eq!(found.unwrap(), "here");
    }

    #[test]
    fn unmet_condition_is_named() {
        let error = wait_until("pigs fly", Duration::from_millis(1), || Ok(false)).unwrap_err();
        assert!(error.to_string().contains("pigs fly"), "{error}");
    }

    #[test]
    fn an_error_ends_the_wait() {
        let error =
            wait_until("never", Duration::from_secs(3600), || bail!("the VMM died")).unwrap_err();
        assert_eq!(error.to_string(), "the VMM died");
    }
}
