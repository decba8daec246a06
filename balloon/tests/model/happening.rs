//! What may happen to a VM, and lives that are made of it.

use super::*;

/// What happens to a VM.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    /// The guest says how much of each zone is free, in thousandths, and what else there is to say.
    Report {
        free_permille: [u64; ZONES],
        cached_permille: u64,
        stall_ms: u64,
        counted: Counted,
        swap_used_mib: u64,
        idle: Idle,
        late: bool,
    },
    /// The first of the late reports arrives, if none that is newer has come before it.
    Arrival,
    Tick,
    /// The guest follows a zone's request, by this share.
    Follow {
        zone: usize,
        permille: u64,
    },
    /// It plugs what is asked of a zone, and unplugs it again so much later, of which the loop sees
    /// each.
    Flap {
        zone: usize,
        ms: u64,
    },
    /// The host has only a part of what a zone is to have, and the device lowers the request.
    Short {
        zone: usize,
        permille: u64,
    },
    /// The pool's free space changes.
    Pool {
        mib: u64,
    },
    /// Somebody resizes a zone.
    Pin {
        zone: usize,
        mib: u64,
    },
    /// And lets the loop have it again, or all of them, and the loop go on.
    Resume {
        zone: Option<usize>,
    },
    /// The loop is stopped, or goes on with every zone as it is pinned.
    Pause {
        on: bool,
    },
    /// Nothing is carried out, or everything again.
    DryRun {
        on: bool,
    },
    /// The guest takes so much out of its balloon because it has nothing else left, and the device
    /// lowers its target.
    Oom {
        pages: u64,
    },
    Policy {
        index: usize,
    },
    /// `fixed` with another size.
    Fix {
        mib: u64,
    },
    /// Another floor and ceiling of all zones together.
    Bounds {
        floor_mib: u64,
        more_mib: u64,
    },
    /// Somebody sizes these zones so that all together leave their bounds, which are set to that
    /// end as well.
    Squeeze {
        zones: [bool; ZONES],
        above: bool,
    },
    /// The guest's onlining is right or wrong.
    Online {
        movable: bool,
    },
}

/// So many pages more than at the last report.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) swapped_out: u64,
    pub(super) swapped_in: u64,
    pub(super) anon_refaults: u64,
    pub(super) file_refaults: u64,
}

/// What of all memory is idle, in thousandths, for so long, if it is known at all.
pub(super) type Idle = Option<(u64, u64)>;

/// A guest without any memory left, of which nothing has been counted.
pub(super) fn short() -> Happening {
    Happening::Report {
        free_permille: [0; ZONES],
        cached_permille: 0,
        stall_ms: 0,
        counted: Counted::default(),
        swap_used_mib: 0,
        idle: None,
        late: false,
    }
}

pub(super) fn report() -> impl Strategy<Value = Happening> {
    let pages = || prop_oneof![3 => Just(0u64), 1 => 0u64..5000];
    let counted = (pages(), pages(), pages(), pages()).prop_map(
        |(swapped_out, swapped_in, anon_refaults, file_refaults)| Counted {
            swapped_out,
            swapped_in,
            anon_refaults,
            file_refaults,
        },
    );
    let swap_used_mib = prop_oneof![2 => Just(0u64), 1 => 0u64..4096];
    let idle = prop::option::of((0u64..=1000, 1u64..20_000));
    let free = prop::array::uniform4(prop_oneof![1 => Just(0u64), 1 => 0u64..60, 2 => 0u64..=1000]);
    (free, 0u64..=1000, 0u64..400, counted, swap_used_mib, idle, prop::bool::weighted(0.2))
        .prop_map(
            |(free_permille, cached_permille, stall_ms, counted, swap_used_mib, idle, late)| {
                Happening::Report {
                    free_permille,
                    cached_permille,
                    stall_ms: if stall_ms > 300 { stall_ms } else { 0 },
                    counted,
                    swap_used_mib,
                    idle,
                    late,
                }
            },
        )
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => report(),
        2 => Just(Happening::Arrival),
        3 => Just(Happening::Tick),
        6 => (0..ZONES, prop_oneof![Just(1000u64), 0u64..=1000])
            .prop_map(|(zone, permille)| Happening::Follow { zone, permille }),
        1 => (0..ZONES, prop_oneof![1u64..100, 1_000u64..2_000])
            .prop_map(|(zone, ms)| Happening::Flap { zone, ms }),
        1 => (0..ZONES, 0u64..1000).prop_map(|(zone, permille)| Happening::Short { zone, permille }),
        1 => (0u64..2000).prop_map(|mib| Happening::Pool { mib }),
        1 => (0..ZONES, 0u64..256).prop_map(|(zone, mib)| Happening::Pin { zone, mib }),
        1 => prop::option::of(0..ZONES).prop_map(|zone| Happening::Resume { zone }),
        1 => prop::bool::weighted(0.3).prop_map(|on| Happening::Pause { on }),
        1 => prop::bool::weighted(0.3).prop_map(|on| Happening::DryRun { on }),
        1 => (any::<[bool; ZONES]>(), any::<bool>())
            .prop_map(|(zones, above)| Happening::Squeeze { zones, above }),
        1 => (1u64..20_000).prop_map(|pages| Happening::Oom { pages }),
        1 => (0..POLICIES.len()).prop_map(|index| Happening::Policy { index }),
        1 => (0u64..1200).prop_map(|mib| Happening::Fix { mib }),
        1 => (0u64..400, 0u64..1000)
            .prop_map(|(floor_mib, more_mib)| Happening::Bounds { floor_mib, more_mib }),
        1 => any::<bool>().prop_map(|movable| Happening::Online { movable }),
    ]
}

/// A life: the policy and the rules that it begins with, and what happens after how many
/// milliseconds.
pub(super) fn life() -> impl Strategy<Value = (usize, Rules, Vec<(Happening, u64)>)> {
    let ms = prop_oneof![3 => 1u64..200, 2 => 200u64..7000];
    (0..POLICIES.len(), rules::rules(), prop::collection::vec((happening(), ms), 1..120))
}
