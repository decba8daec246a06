//! Wrong orders of steps, which the media imposes on the engine. Their detection proves that the
//! tests of the right order are effective.

use super::crash::{crash_at_random, hand_over_at_random, kill_at_random};
use super::script::Wrong;

/// Expects at least one seed to detect the wrong order.
pub(super) fn must_be_found_out(
    campaign: fn(u64, Wrong) -> Result<usize, String>,
    wrong: Wrong,
) -> String {
    (1..40)
        .find_map(|seed| campaign(seed, wrong).err())
        .unwrap_or_else(|| panic!("{wrong:?} was not detected"))
}

#[test]
fn second_half_before_the_data_is_detected() {
    let error = must_be_found_out(crash_at_random, Wrong::Data);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn second_half_before_the_first_is_detected() {
    must_be_found_out(crash_at_random, Wrong::FirstHalf);
}

#[test]
fn write_that_returns_before_a_durable_second_half_is_detected() {
    must_be_found_out(crash_at_random, Wrong::SecondHalf);
}

#[test]
fn data_stored_after_its_persist_has_begun_is_detected() {
    let error = must_be_found_out(crash_at_random, Wrong::DataBegunTooEarly);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn log_stored_after_its_persist_has_begun_is_detected() {
    must_be_found_out(crash_at_random, Wrong::LogBegunTooEarly);
}

#[test]
fn map_entry_before_its_flog_entry_is_detected() {
    let error = must_be_found_out(crash_at_random, Wrong::MapBeforeFlog);
    assert!(error.contains("BlockTwice"), "{error}");
}

#[test]
fn reuse_of_a_lane_before_its_map_entry_is_durable_is_detected() {
    must_be_found_out(crash_at_random, Wrong::LaneReused);
}

#[test]
fn rewrite_of_a_sector_before_its_map_entry_is_durable_is_detected() {
    let error = must_be_found_out(crash_at_random, Wrong::SectorRewritten);
    assert!(error.contains("BlockTwice") || error.contains("BlocksLost"), "{error}");
}

#[test]
fn discard_that_returns_before_it_is_durable_is_detected() {
    must_be_found_out(crash_at_random, Wrong::Discard);
}

#[test]
fn redo_before_the_flog_is_durable_is_detected() {
    must_be_found_out(kill_at_random, Wrong::RecoveredFlog);
}

#[test]
fn hand_over_to_a_driver_before_the_map_is_durable_is_detected() {
    let error = must_be_found_out(hand_over_at_random, Wrong::NotSettled);
    assert!(error.contains("BlockTwice") || error.contains("is none of"), "{error}");
}

#[test]
fn recovery_that_ends_before_the_map_is_durable_is_detected() {
    must_be_found_out(kill_at_random, Wrong::RecoveredMap);
}
