//! Random events of a VM, and runs that consist of them.

use super::*;

/// An event of the VM.
#[derive(Clone, Debug)]
pub(super) enum VmEvent {
    /// A report with the free share of each zone in thousandths, and other values.
    Report {
        free_permille: [u64; ZONES],
        cached_permille: u64,
        stall_ms: u64,
        counted: Counted,
        swap_used_mib: u64,
        idle: Idle,
        late: bool,
    },
    /// The oldest of the late reports arrives, unless a newer report has arrived before it.
    Arrival,
    Tick,
    /// The guest carries out this share of the request to a zone.
    Follow {
        zone: usize,
        permille: u64,
    },
    /// The guest plugs the requested memory of a zone, and unplugs it again after `ms`. The
    /// controller observes both changes.
    Flap {
        zone: usize,
        ms: u64,
    },
    /// The host can provide only part of a zone's request, and the device lowers the request.
    Short {
        zone: usize,
        permille: u64,
    },
    /// Free memory in the pool.
    Pool {
        mib: u64,
    },
    /// A client resizes a zone.
    Pin {
        zone: usize,
        mib: u64,
    },
    /// A client returns a zone to the controller, or all zones and ends a pause.
    Resume {
        zone: Option<usize>,
    },
    /// The controller is paused, or its pause ends. Zones remain pinned.
    Pause {
        on: bool,
    },
    /// A dry run starts or ends.
    DryRun {
        on: bool,
    },
    /// The guest takes pages out of its balloon because of OOM, and the device lowers the balloon's
    /// target.
    Oom {
        pages: u64,
    },
    Policy {
        index: usize,
    },
    /// The policy becomes `fixed` with this size.
    Fix {
        mib: u64,
    },
    /// Floor and ceiling for the total of all zones.
    Bounds {
        floor_mib: u64,
        more_mib: u64,
    },
    /// A client resizes these zones, and the bounds are set so that the total is outside of them.
    Squeeze {
        zones: [bool; ZONES],
        above: bool,
    },
    /// The guest starts or stops onlining memory as movable.
    Online {
        movable: bool,
    },
}

/// Increase of each counter since the last report, in pages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) swapped_out: u64,
    pub(super) swapped_in: u64,
    pub(super) anon_refaults: u64,
    pub(super) file_refaults: u64,
}

/// Share of all memory that is idle in thousandths, and the time for which it was idle in ms.
/// `None` if this is unknown.
pub(super) type Idle = Option<(u64, u64)>;

/// Report of a guest that has no free memory, and whose counters have not changed.
pub(super) fn short() -> VmEvent {
    VmEvent::Report {
        free_permille: [0; ZONES],
        cached_permille: 0,
        stall_ms: 0,
        counted: Counted::default(),
        swap_used_mib: 0,
        idle: None,
        late: false,
    }
}

pub(super) fn report() -> impl Strategy<Value = VmEvent> {
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
                VmEvent::Report {
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

fn vm_event() -> impl Strategy<Value = VmEvent> {
    prop_oneof![
        8 => report(),
        2 => Just(VmEvent::Arrival),
        3 => Just(VmEvent::Tick),
        6 => (0..ZONES, prop_oneof![Just(1000u64), 0u64..=1000])
            .prop_map(|(zone, permille)| VmEvent::Follow { zone, permille }),
        1 => (0..ZONES, prop_oneof![1u64..100, 1_000u64..2_000])
            .prop_map(|(zone, ms)| VmEvent::Flap { zone, ms }),
        1 => (0..ZONES, 0u64..1000).prop_map(|(zone, permille)| VmEvent::Short { zone, permille }),
        1 => (0u64..2000).prop_map(|mib| VmEvent::Pool { mib }),
        1 => (0..ZONES, 0u64..256).prop_map(|(zone, mib)| VmEvent::Pin { zone, mib }),
        1 => prop::option::of(0..ZONES).prop_map(|zone| VmEvent::Resume { zone }),
        1 => prop::bool::weighted(0.3).prop_map(|on| VmEvent::Pause { on }),
        1 => prop::bool::weighted(0.3).prop_map(|on| VmEvent::DryRun { on }),
        1 => (any::<[bool; ZONES]>(), any::<bool>())
            .prop_map(|(zones, above)| VmEvent::Squeeze { zones, above }),
        1 => (1u64..20_000).prop_map(|pages| VmEvent::Oom { pages }),
        1 => (0..POLICIES.len()).prop_map(|index| VmEvent::Policy { index }),
        1 => (0u64..1200).prop_map(|mib| VmEvent::Fix { mib }),
        1 => (0u64..400, 0u64..1000)
            .prop_map(|(floor_mib, more_mib)| VmEvent::Bounds { floor_mib, more_mib }),
        1 => any::<bool>().prop_map(|movable| VmEvent::Online { movable }),
    ]
}

/// A run: the initial policy and rules, and events with the time before each in milliseconds.
pub(super) fn event_sequence() -> impl Strategy<Value = (usize, Rules, Vec<(VmEvent, u64)>)> {
    let ms = prop_oneof![3 => 1u64..200, 2 => 200u64..7000];
    (0..POLICIES.len(), rules::rules(), prop::collection::vec((vm_event(), ms), 1..120))
}
