//! Wrong orders of steps, which the media simulates while a correct engine runs. Their detection
//! proves that the tests of the right order are effective.

use super::crash::{
    crash_at_random, crash_while_compacting, crash_with_holes, hand_over_at_random, kill_at_random,
    kill_with_holes,
};
use super::script::InjectedBug;

/// Expects at least one seed to detect the wrong order.
pub(super) fn must_be_detected(
    campaign: fn(u64, InjectedBug) -> Result<usize, String>,
    bug: InjectedBug,
) -> String {
    (1..40)
        .find_map(|seed| campaign(seed, bug).err())
        .unwrap_or_else(|| panic!("{bug:?} was not detected"))
}

#[test]
fn second_half_before_the_data_is_detected() {
    let error = must_be_detected(crash_at_random, InjectedBug::Data);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn second_half_before_the_first_is_detected() {
    must_be_detected(crash_at_random, InjectedBug::FirstHalf);
}

#[test]
fn write_that_returns_before_a_durable_second_half_is_detected() {
    must_be_detected(crash_at_random, InjectedBug::SecondHalf);
}

#[test]
fn data_stored_after_its_persist_has_begun_is_detected() {
    let error = must_be_detected(crash_at_random, InjectedBug::DataPersistedTooEarly);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn log_stored_after_its_persist_has_begun_is_detected() {
    must_be_detected(crash_at_random, InjectedBug::LogPersistedTooEarly);
}

#[test]
fn map_entry_before_its_flog_entry_is_detected() {
    let error = must_be_detected(crash_at_random, InjectedBug::MapBeforeFlog);
    assert!(error.contains("BlockTwice"), "{error}");
}

#[test]
fn reuse_of_a_lane_before_its_map_entry_is_durable_is_detected() {
    must_be_detected(crash_at_random, InjectedBug::LaneReused);
}

#[test]
fn rewrite_of_a_sector_before_its_map_entry_is_durable_is_detected() {
    let error = must_be_detected(crash_at_random, InjectedBug::SectorRewritten);
    assert!(error.contains("BlockTwice") || error.contains("BlocksLost"), "{error}");
}

#[test]
fn discard_that_returns_before_it_is_durable_is_detected() {
    must_be_detected(crash_at_random, InjectedBug::Discard);
}

#[test]
fn redo_before_the_flog_is_durable_is_detected() {
    must_be_detected(kill_at_random, InjectedBug::RecoveredFlog);
}

#[test]
fn space_that_is_not_durable_before_its_use_is_detected() {
    must_be_detected(crash_with_holes, InjectedBug::Space);
}

#[test]
fn space_with_another_owner_before_its_release_is_durable_is_detected() {
    let error = must_be_detected(crash_with_holes, InjectedBug::Release);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn counts_of_live_blocks_that_lack_new_blocks_are_detected() {
    let error = must_be_detected(crash_with_holes, InjectedBug::UncountedBlocks);
    assert!(error.contains("[0, 0"), "{error}");
}

#[test]
fn block_given_away_without_durable_zeros_is_detected() {
    for bug in [InjectedBug::MissingZeros, InjectedBug::LateZeros] {
        let error = must_be_detected(crash_while_compacting, bug);
        assert!(error.contains("is none of"), "{bug:?}: {error}");
    }
}

#[test]
fn wrong_orders_of_a_compaction_are_detected() {
    for bug in [InjectedBug::Data, InjectedBug::LaneReused, InjectedBug::Release] {
        must_be_detected(crash_while_compacting, bug);
    }
}

#[test]
fn wrong_orders_on_media_with_holes_are_detected() {
    for bug in [InjectedBug::Data, InjectedBug::MapBeforeFlog, InjectedBug::LaneReused] {
        must_be_detected(crash_with_holes, bug);
    }
    must_be_detected(kill_with_holes, InjectedBug::RecoveredMap);
}

#[test]
fn hand_over_to_a_driver_before_the_map_is_durable_is_detected() {
    let error = must_be_detected(hand_over_at_random, InjectedBug::NotQuiesced);
    assert!(error.contains("BlockTwice") || error.contains("is none of"), "{error}");
}

#[test]
fn recovery_that_ends_before_the_map_is_durable_is_detected() {
    must_be_detected(kill_at_random, InjectedBug::RecoveredMap);
}
