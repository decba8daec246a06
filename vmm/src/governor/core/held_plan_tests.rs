//! Events about plans that a lack of room for page descriptors holds back.

use balloon::DriverState;
use balloon::params::Setting;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::fake::{Fixture, MIB, fixture, report};
use crate::governor::info::PressureChange;

/// Numbers of events of DRAM and of PM.
fn reported(f: &Fixture) -> (u32, u32) {
    (*f.dram.reported_held.lock(), *f.pm.reported_held.lock())
}

/// Sends a report of a guest that is short of memory and has no room for page descriptors.
fn report_without_room(f: &mut Fixture) {
    f.seq += 1;
    let mut line = report(f.seq, 16, [f.dram.sizes().plugged_bytes, f.pm.sizes().plugged_bytes]);
    line["zones"][0]["free_pages"] = 900.into();
    line["memory"]["free_bytes"] = (16 * MIB).into();
    f.line(&line);
}

#[test]
fn plan_held_back_by_descriptors_is_reported_once_until_it_proceeds() {
    let mut f = fixture("psi", false, true);
    f.greet();
    let patience_ms = f.core.progress_ms();
    let reports = patience_ms / 50;
    (0..reports).for_each(|_| report_without_room(&mut f));
    assert_eq!((reported(&f), f.dram.sizes().requested_bytes), ((0, 0), 0));
    (0..2 * reports).for_each(|_| report_without_room(&mut f));
    assert_eq!(reported(&f), (1, 0));
    // The guest has room for the descriptors of DRAM, and then none for those of PM.
    (0..4).for_each(|_| f.report(20));
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
    (0..=reports).for_each(|_| report_without_room(&mut f));
    assert_eq!(reported(&f), (1, 1));
}

#[test]
fn dry_run_held_back_by_descriptors_is_not_reported() {
    let mut f = fixture("psi", true, true);
    f.greet();
    (0..400).for_each(|_| report_without_room(&mut f));
    let holds = f.core.counters().plans.iter().filter(|(key, _)| key.2 == "descriptors").count();
    assert_eq!((holds, *f.dram.reported_held.lock()), (1, 0));
}

#[test]
fn fixed_size_that_descriptors_hold_back_is_reported_without_reports() {
    let mut f = fixture("psi", false, true);
    let rules = [("unreported", Setting::Number(1))];
    let change = PressureChange {
        policy: Some("fixed".to_owned()),
        size: Some(1024 * MIB),
        rules: Some(rules.into()),
        ..Default::default()
    };
    f.core.change(&change, TimeMs(0)).unwrap();
    (1..60).for_each(|second| f.core.tick(TimeMs(second * 1000)));
    assert_eq!(f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes, 384 * MIB);
    assert_eq!(reported(&f), (0, 1));
}

#[test]
fn event_names_a_zone_that_the_policy_may_grow() {
    let hold = |f: &mut Fixture| (0..400).for_each(|_| report_without_room(f));
    // A client has sized DRAM.
    let mut f = fixture("psi", false, true);
    f.greet();
    f.core.resize_zone("dram", 64 * MIB, TimeMs(0)).unwrap();
    hold(&mut f);
    assert_eq!(reported(&f), (0, 1));
    let mut f = fixture("psi", false, true);
    f.greet();
    f.dram.sizes.lock().driver = DriverState::Unsupported;
    hold(&mut f);
    assert_eq!(reported(&f), (0, 1));
}
