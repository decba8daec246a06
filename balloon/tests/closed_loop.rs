//! The whole loop around a model of a guest: what the policies are for.

mod guest;

use balloon::MIB;
use balloon::controller::{Controller, Rules};
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;

use crate::guest::Guest;

fn controller(policy: &str) -> Controller {
    Controller::new(Policy::from_name(policy).expect("known"), Rules::default()).expect("defaults")
}

/// Lets `ms` pass while the guest's processes want `mib_per_s` more, and returns the plans that changed something.
fn run(guest: &mut Guest, controller: &mut Controller, ms: u64, mib_per_s: i64) -> Vec<Plan> {
    let mut plans = Vec::new();
    for _ in 0..ms {
        guest.live(mib_per_s * MIB as i64 / 1000);
        plans.extend(guest.loop_once(controller).filter(|plan| plan.direction != Direction::Hold));
    }
    plans
}

#[test]
fn a_ramp_far_beyond_dram_swaps_nothing_with_psi() {
    for mib_per_s in [10, 50, 100, 200, 400] {
        let (mut guest, mut psi) = (Guest::new(), controller("psi"));
        run(&mut guest, &mut psi, 3_000, 0);
        run(&mut guest, &mut psi, 900_000 / mib_per_s as u64, mib_per_s);
        run(&mut guest, &mut psi, 5_000, 0);
        assert!(guest.wanted_bytes > 900 * MIB);
        assert_eq!(guest.swapped_out_bytes, 0, "at {mib_per_s} MiB/s");
        let pm = &guest.host.zones[1];
        assert!(pm.plugged_bytes >= 400 * MIB, "at {mib_per_s} MiB/s: {}", pm.plugged_bytes / MIB);
    }
}

#[test]
fn the_same_ramp_swaps_with_off() {
    let (mut guest, mut off) = (Guest::new(), controller("off"));
    run(&mut guest, &mut off, 3_000, 0);
    run(&mut guest, &mut off, 9_000, 100);
    assert!(guest.swapped_out_bytes > 400 * MIB);
    assert_eq!(guest.host.requested_bytes(), 0);
}

#[test]
fn slow_plugging_is_foreseen() {
    let (mut guest, mut psi) = (Guest::new(), controller("psi"));
    guest.plug_delay_ms = 600;
    guest.plug_bytes_per_ms = MIB / 2;
    run(&mut guest, &mut psi, 3_000, 0);
    run(&mut guest, &mut psi, 9_000, 100);
    assert_eq!(guest.swapped_out_bytes, 0);
}

#[test]
fn after_the_need_memory_goes_back_pm_first_and_nothing_is_swapped() {
    let (mut guest, mut psi) = (Guest::new(), controller("psi"));
    run(&mut guest, &mut psi, 3_000, 0);
    run(&mut guest, &mut psi, 9_000, 100);
    run(&mut guest, &mut psi, 10_000, 0);
    let mut pm_had_left = false;
    for _ in 0..60 {
        for plan in run(&mut guest, &mut psi, 1_000, -900) {
            assert_eq!(plan.direction, Direction::Shrink);
            let [dram, pm] = [plan.targets[0].requested_bytes, plan.targets[1].requested_bytes];
            pm_had_left |= pm == 0;
            assert!(dram == 128 * MIB || pm_had_left, "DRAM stays while PM is there");
        }
    }
    assert_eq!(guest.host.plugged_bytes(), 0, "all of it inside a minute");
    assert_eq!(guest.swapped_out_bytes, 0);
}

#[test]
fn a_guest_whose_need_is_constant_comes_to_rest() {
    for mib in [100, 250, 330, 500, 900, 1_200] {
        let (mut guest, mut psi) = (Guest::new(), controller("psi"));
        run(&mut guest, &mut psi, 3_000, 0);
        run(&mut guest, &mut psi, mib * 10, 100);
        run(&mut guest, &mut psi, 60_000, 0);
        let late = run(&mut guest, &mut psi, 120_000, 0);
        assert!(late.is_empty(), "{mib} MiB: {late:?}");
        assert_eq!(guest.swapped_out_bytes, 0, "{mib} MiB");
    }
}

#[test]
fn at_rest_it_holds_less_than_half_a_guest_over_need() {
    let (mut guest, mut psi) = (Guest::new(), controller("psi"));
    run(&mut guest, &mut psi, 3_000, 0);
    run(&mut guest, &mut psi, 9_000, 100);
    run(&mut guest, &mut psi, 120_000, 0);
    let over = guest.total_bytes() - guest.resident_bytes;
    assert!(over < guest.total_bytes() * 3 / 8, "{} MiB over {}", over / MIB, guest.total_bytes() / MIB);
}

#[test]
fn a_sawtooth_does_not_swap_and_does_not_resize_at_every_tooth() {
    let (mut guest, mut psi) = (Guest::new(), controller("psi"));
    run(&mut guest, &mut psi, 3_000, 0);
    run(&mut guest, &mut psi, 5_000, 100);
    let mut shrinks = 0;
    for _ in 0..60 {
        shrinks += run(&mut guest, &mut psi, 2_000, -150)
            .iter()
            .filter(|p| p.direction == Direction::Shrink)
            .count();
        shrinks +=
            run(&mut guest, &mut psi, 3_000, 100).iter().filter(|p| p.direction == Direction::Shrink).count();
    }
    assert_eq!(guest.swapped_out_bytes, 0);
    assert!(shrinks <= 10, "{shrinks} shrinks in 60 teeth");
}
