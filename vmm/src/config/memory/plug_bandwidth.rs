//! `plug_bandwidth=` in `--memory`, `--memory-zone` and `--pm-memory`.

use std::num::NonZeroU64;

use foreshore_config::ConfigError;
use foreshore_types::size::Size;

/// Default plug rate in bytes per second. It equals the default of `scrub_bandwidth`, because
/// memory must be erased before it is plugged again.
pub(super) const DEFAULT_PLUG_BANDWIDTH: u64 = 1 << 30;

/// Lowest plug rate in bytes per second. Linux plugs up to 2 GiB in one request, and reports a task
/// as hung after 120 s.
pub(super) const MIN_PLUG_BANDWIDTH: u64 = 64 << 20;

/// Plug rate of a zone; `None` if the configured value is 0 (unlimited).
pub(in crate::config) fn bytes_per_s(configured: Option<u64>) -> Option<NonZeroU64> {
    NonZeroU64::new(configured.unwrap_or(DEFAULT_PLUG_BANDWIDTH))
}

pub(super) fn check(flag: &'static str, configured: Option<u64>) -> Result<(), ConfigError> {
    match configured {
        Some(value @ 1..MIN_PLUG_BANDWIDTH) => Err(ConfigError::BadValue {
            flag,
            key: "plug_bandwidth".to_owned(),
            value: value.to_string(),
            expected: format!(
                "0, for no bound, or at least {} per second",
                Size(MIN_PLUG_BANDWIDTH)
            ),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plug_bandwidth_has_a_default_a_minimum_and_zero_for_no_limit() {
        assert_eq!(bytes_per_s(None), NonZeroU64::new(1 << 30));
        assert_eq!((bytes_per_s(Some(0)), check("--memory", Some(0))), (None, Ok(())));
        assert_eq!(bytes_per_s(Some(64 << 20)), NonZeroU64::new(64 << 20));
        for good in [None, Some(64 << 20), Some(u64::MAX)] {
            assert_eq!(check("--memory", good), Ok(()));
        }
        for bad in [1, (64 << 20) - 1] {
            assert_eq!(
                check("--memory", Some(bad)).unwrap_err().to_string(),
                format!(
                    "--memory: plug_bandwidth=\"{bad}\" is not 0, for no bound, or at least 64 MiB per second"
                )
            );
        }
    }
}
