//! What guests do, and what it costs them.

use balloon::MIB;
use balloon::controller::Controller;
use balloon::plan::{Direction, Plan};

use super::Guest;

/// Lets `ms` pass while the guest's processes want `mib_per_s` more, and returns the plans that changed something.
pub fn run(guest: &mut Guest, controller: &mut Controller, ms: u64, mib_per_s: i64) -> Vec<Plan> {
    let mut plans = Vec::new();
    for ms in 1..=ms as i64 {
        // Whole bytes that add up to the rate.
        let until = |ms: i64| mib_per_s * MIB as i64 * ms / 1000;
        guest.live(until(ms) - until(ms - 1));
        plans.extend(guest.loop_once(controller).filter(|plan| plan.direction != Direction::Hold));
    }
    plans
}

/// A kind of guest and what it does, step by step: for so many milliseconds, so many MiB/s more.
pub struct Workload {
    pub name: &'static str,
    pub guest: Guest,
    pub steps: Vec<(u64, i64)>,
}

/// What a workload has come to.
pub struct Figures {
    pub swapped_out_mib: u64,
    pub swapped_in_mib: u64,
    pub stall_ms: u64,
    pub oom_kills: u64,
    /// Memory held over need, over the whole time.
    pub over_gib_s: f64,
    /// And at the end, in thousandths of need.
    pub over_end_permille: u64,
    pub resizes: u64,
}

impl Workload {
    fn new(name: &'static str, steps: &[(u64, i64)]) -> Self {
        Workload { name, guest: Guest::new(), steps: steps.to_vec() }
    }

    fn with(mut self, set: impl FnOnce(&mut Guest)) -> Self {
        set(&mut self.guest);
        self
    }

    pub fn run(mut self, controller: &mut Controller) -> (Guest, Figures) {
        for (ms, mib_per_s) in self.steps {
            run(&mut self.guest, controller, ms, mib_per_s);
        }
        let figures = Figures::of(&self.guest);
        (self.guest, figures)
    }
}

impl Figures {
    pub fn of(guest: &Guest) -> Self {
        Figures {
            swapped_out_mib: guest.toll.swapped_out_bytes / MIB,
            swapped_in_mib: guest.toll.swapped_in_bytes / MIB,
            stall_ms: guest.toll.stall_us / 1000,
            oom_kills: guest.toll.oom_kills,
            over_gib_s: guest.over_byte_ms as f64 / (1u64 << 30) as f64 / 1000.0,
            over_end_permille: guest.over_bytes() * 1000 / guest.need_bytes(),
            resizes: guest.resizes,
        }
    }
}

/// What psi's bridge may come to in this guest: a burst of 256 MiB/s until more is there.
pub fn bridge_bytes(guest: &Guest) -> u64 {
    // The agent notices within 0.1 s, and reports 20 times a second.
    256 * MIB * (100 + guest.plugging.delay_ms + 50 + guest.report_delay_ms) / 1000
}

/// All of them.
pub fn workloads() -> Vec<Workload> {
    let teeth = |up: (u64, i64), down: (u64, i64), count: usize| {
        let tooth = [up, down];
        let mut steps = vec![(3_000, 0), (4_000, 100)];
        steps.extend(tooth.iter().cycle().take(2 * count));
        steps
    };
    vec![
        Workload::new("ramp 10 MiB/s, rest", &[(3_000, 0), (86_000, 10), (60_000, 0)]),
        Workload::new("ramp 100 MiB/s, rest", &[(3_000, 0), (8_600, 100), (60_000, 0)]),
        Workload::new("ramp 400 MiB/s, rest", &[(3_000, 0), (2_150, 400), (60_000, 0)]),
        Workload::new(
            "ramp, half freed",
            &[(3_000, 0), (8_600, 100), (10_000, 0), (1_000, -430), (60_000, 0)],
        ),
        Workload::new(
            "ramp, all freed",
            &[(3_000, 0), (8_600, 100), (10_000, 0), (1_000, -860), (60_000, 0)],
        ),
        Workload::new(
            "burst after rest",
            &[(3_000, 0), (5_600, 100), (300_000, 0), (1_000, 256), (60_000, 0)],
        ),
        Workload::new(
            "hard burst after rest",
            &[(3_000, 0), (5_600, 100), (300_000, 0), (1_000, 400), (60_000, 0)],
        ),
        Workload::new("slow plugging", &[(3_000, 0), (8_600, 100), (60_000, 0)])
            .with(|guest| (guest.plugging.delay_ms, guest.plugging.block_us) = (600, 4_000)),
        Workload::new("late reports", &[(3_000, 0), (8_600, 100), (60_000, 0)])
            .with(|guest| guest.report_delay_ms = 300),
        Workload::new("sawtooth of 5 s", &teeth((3_000, 100), (2_000, -150), 60)),
        Workload::new("sawtooth of 40 s", &teeth((20_000, 20), (20_000, -20), 15)),
        Workload::new("leak 2 MiB/s", &[(3_000, 0), (400_000, 2)]),
        Workload::new("files read once", &[(120_000, 0)])
            .with(|guest| guest.files.read_once_bytes_per_ms = MIB / 10),
        Workload::new("files read again", &[(600_000, 0)]).with(|guest| {
            (guest.files.hot_bytes, guest.files.reread_bytes_per_ms) = (600 * MIB, MIB);
        }),
        Workload::new("pinned pages", &[(3_000, 0), (8_600, 100), (10_000, 0), (1_000, -860), (300_000, 0)])
            .with(|guest| guest.plugging.pinned_bytes = [0, 256 * MIB]),
        Workload::new("swapped before", &[(120_000, 0)]).with(|guest| {
            let processes = &mut guest.processes;
            (processes.wanted_bytes, processes.resident_bytes) = (600 * MIB, 320 * MIB);
            (processes.swapped_bytes, processes.touch_bytes_per_ms) = (280 * MIB, MIB);
        }),
    ]
}
