//! Scaling the time limits affects the whole process, so this test runs in its own process.

use std::time::{Duration, Instant};

use guest_tools::wait::{scale_limits, wait_until};

#[test]
fn wait_takes_its_scaled_limit_and_names_it() {
    scale_limits(3.0);
    let started = Instant::now();
    let error = wait_until("pigs fly", Duration::from_millis(100), || Ok(false)).unwrap_err();
    assert!(started.elapsed() >= Duration::from_millis(300), "{:?}", started.elapsed());
    assert_eq!(error.to_string(), "Timed out after 0.3 s of waiting until pigs fly");
}
