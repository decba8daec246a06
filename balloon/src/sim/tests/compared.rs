//! Compares `psi` with every other policy under each generated workload.

use super::*;
use crate::policy::psi;

const HOUR_MS: u64 = 3_600_000;

/// Runs a guest with four times as much PM as DRAM for one hour, or for one day under `diurnal`.
/// `fixed` has the largest possible size, as in foreshore-sim.
fn run(workload: Workload, dram_bytes: u64, policy: Policy) -> Outcome {
    let host = view(dram_bytes, 4 * dram_bytes);
    let policy = match policy {
        Policy::Fixed(_) => Policy::Fixed(fixed::Params {
            size_bytes: host.zones.iter().map(|zone| zone.max_bytes).sum(),
        }),
        policy => policy,
    };
    let params = workload.defaults();
    let duration_ms = if workload == Workload::Diurnal { params.period_ms } else { HOUR_MS };
    let setup = VmSetup {
        guest: GuestConfig { boot_bytes: dram_bytes, ..GuestConfig::default() },
        host,
        demand: workload.demand(&params, dram_bytes, duration_ms, &mut Random::new(1, 0)),
    };
    let governed = Governed { policy, rules: Rules::default(), skip: Skip::AtRest };
    let vms = run_host(vec![setup], &mut HostPool::new(4 * dram_bytes), &governed, &mut ())
        .expect("in range");
    Outcome::of(&vms[0])
}

/// Time that tasks may wait under `psi` in addition to the shortest wait under any policy.
fn may_stall_s(workload: Workload, run_s: f64) -> f64 {
    match workload {
        // If the need rises slowly, the page cache uses up available memory, and files that are
        // read repeatedly are also evicted. Their pages are read again too slowly for rule 6 of
        // `psi`, until rule 1 detects the rise itself. Policies that use free pages grow the guest
        // earlier.
        Workload::Leak | Workload::Diurnal => run_s / 500.0,
        // `psi` detects that files are needed when their pages are read again. A policy that grows
        // the guest for all files does not have to detect it.
        Workload::CacheHeavy => 0.1,
        // The kernel's reserve does not count as available (docs/design/decisions/0022).
        Workload::Burst => 0.05,
        Workload::Steady | Workload::Ramp | Workload::Sawtooth => 0.0,
    }
}

/// Returns the results in which another policy is better than `psi`.
fn lost_by(psi: &Policy, workload: Workload, dram_bytes: u64) -> Vec<String> {
    let ours = run(workload, dram_bytes, psi.clone());
    let mut lost = Vec::new();
    for name in Policy::NAMES.into_iter().filter(|name| *name != "psi") {
        let theirs = run(workload, dram_bytes, Policy::from_name(name).expect("listed"));
        let over = [ours.over_gib_h, theirs.over_gib_h];
        let resizes = [&ours, &theirs].map(|outcome| outcome.grows + outcome.shrinks);
        let waits_longer = ours.stall_s > theirs.stall_s + may_stall_s(workload, ours.run_s);
        let swaps_more =
            ours.swap_in_gib + ours.swap_out_gib > theirs.swap_in_gib + theirs.swap_out_gib;
        let holds_more = match name {
            // The other policy holds less memory only because tasks wait longer.
            _ if theirs.stall_s > ours.stall_s => false,
            // With its units of 4 MiB, `pmb` follows each tooth up and down. `psi` keeps memory for
            // the next tooth (rule 8). `pmb` therefore holds less memory, but resizes the guest
            // more than ten times as often.
            "pmb" if workload == Workload::Sawtooth => {
                over[0] > 2.0 * over[1] || resizes[1] < 10 * resizes[0]
            }
            // Policies that request all memory immediately never have to wait.
            "amf" | "dapper" | "fixed" => 8.0 * over[0] > over[1],
            _ => over[0] >= over[1],
        };
        let said = [
            (waits_longer, "waits longer"),
            (swaps_more, "swaps more"),
            (holds_more, "holds more"),
        ];
        let said = said.into_iter().filter(|(is_so, _)| *is_so);
        lost.extend(said.map(|(_, what)| {
            format!(
                "{}, {} MiB: psi {what} than {name}: {ours:?} and {theirs:?}",
                workload.name(),
                dram_bytes / MIB
            )
        }));
    }
    lost
}

#[test]
fn psi_is_at_least_as_good_as_other_policies() {
    let lost = |workload| {
        let sizes = [512, 1024, 4096].into_iter();
        sizes.flat_map(|mib| lost_by(&Policy::default(), workload, mib * MIB)).collect::<Vec<_>>()
    };
    let lost: Vec<_> = std::thread::scope(|scope| {
        let runs = Workload::ALL.map(|workload| scope.spawn(move || lost(workload)));
        runs.into_iter().flat_map(|run| run.join().expect("a comparison")).collect()
    });
    assert!(lost.is_empty(), "{lost:#?}");
}

/// Broken variants: the headroom is too small for a burst, the guest does not grow for files, the
/// margin is wide, or memory is not returned.
#[test]
fn worse_psi_is_detected() {
    let psi = psi::Params::default();
    for (what, workload, params) in [
        (
            "waits longer than fixed",
            Workload::Burst,
            psi::Params {
                headroom_permille: 10,
                min_headroom_bytes: 2 * MIB,
                margin_permille: 5,
                min_step_bytes: 2 * MIB,

                ..psi
            },
        ),
        (
            "waits longer than pmb",
            Workload::CacheHeavy,
            psi::Params { refault_bytes_per_s: 1 << 40, ..psi },
        ),
        ("holds more than pmb", Workload::Steady, psi::Params { margin_permille: 300, ..psi }),
        (
            "holds more than memorage",
            Workload::Ramp,
            psi::Params { idle_ms: 3_600_000, max_idle_ms: 3_600_000, ..psi },
        ),
    ] {
        let lost = lost_by(&Policy::Psi(params), workload, 512 * MIB);
        assert!(
            lost.iter().any(|lost| lost.contains(what)),
            "{} {what}: {lost:#?}",
            workload.name()
        );
    }
}
