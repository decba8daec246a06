//! Runs the fuzz targets without a fuzzer, each with a few thousand seeded inputs and with all
//! inputs that a fuzzer has found.

#[path = "../fuzz/harness/mod.rs"]
mod harness;
mod seeded;

use seeded::try_all;

#[test]
fn any_bytes_are_opened_as_a_pool_or_refused() {
    try_all("pool_open", harness::pool_open, 3000);
}

#[test]
fn any_bytes_are_repaired_or_unchanged() {
    try_all("repair", harness::repair, 3000);
}

#[test]
fn any_bytes_are_checked_as_a_btt() {
    try_all("btt_check", harness::btt_check, 2000);
}

#[test]
fn any_bytes_are_served_as_a_btt_or_refused() {
    try_all("btt_engine", harness::btt_engine, 2000);
}
