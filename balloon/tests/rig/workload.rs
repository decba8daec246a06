//! Workloads of guests, and the results of running them.

use balloon::MIB;
use balloon::policy::Policy;
use balloon::sim::{Channel, GuestConfig, Segment};

use super::{Rig, config};

/// A guest and the steps of its demand. Each step has a duration in ms and a growth in MiB/s.
pub(crate) struct Workload {
    pub name: &'static str,
    config: GuestConfig,
    usage: Segment,
    channel: Channel,
    /// First steps, in which no policy is used and the guest swaps.
    ungoverned: Vec<(u64, i64)>,
    steps: Vec<(u64, i64)>,
}

/// Results of running a workload.
#[derive(Clone, Copy)]
pub(crate) struct Figures {
    pub swapped_out_mib: u64,
    pub swapped_in_mib: u64,
    pub stall_ms: u64,
    pub oom_kills: u64,
    /// Memory above the need, summed over the whole time.
    pub over_gib_s: f64,
    /// Memory above the need at the end, in thousandths of the need.
    pub over_end_permille: u64,
    pub resizes: u64,
}

impl Workload {
    fn new(name: &'static str, steps: &[(u64, i64)]) -> Self {
        let usage = Segment { hot_permille: 1000, ..Segment::default() };
        let (channel, ungoverned) = (Channel::default(), Vec::new());
        Workload { name, config: config(), usage, channel, ungoverned, steps: steps.to_vec() }
    }

    fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    pub(crate) fn run(self, policy: Policy) -> (Rig, Figures) {
        let mut rig = Rig::new(Policy::Off, self.config);
        for (ms, mib_per_s) in self.ungoverned {
            rig.run(ms, mib_per_s);
        }
        let before = Figures::of(&rig);
        rig.vm.set_policy(policy).expect("in range");
        rig.vm.set_channel(self.channel);
        rig.usage = self.usage;
        for (ms, mib_per_s) in self.steps {
            rig.run(ms, mib_per_s);
        }
        let figures = Figures::of(&rig).since(before);
        (rig, figures)
    }
}

impl Figures {
    pub(crate) fn of(rig: &Rig) -> Self {
        let totals = rig.totals();
        Figures {
            swapped_out_mib: totals.swapped_out_bytes / MIB,
            swapped_in_mib: totals.swapped_in_bytes / MIB,
            stall_ms: totals.stall_us / 1000,
            oom_kills: totals.oom_kills,
            over_gib_s: totals.over_byte_ms as f64 / (1u64 << 30) as f64 / 1000.0,
            over_end_permille: rig.over_bytes() * 1000 / rig.need_bytes(),
            resizes: rig.resizes(),
        }
    }

    fn since(self, before: Self) -> Self {
        Figures {
            swapped_out_mib: self.swapped_out_mib - before.swapped_out_mib,
            swapped_in_mib: self.swapped_in_mib - before.swapped_in_mib,
            stall_ms: self.stall_ms - before.stall_ms,
            ..self
        }
    }
}

/// Headroom of `psi` in this guest. The headroom is the memory that a burst of 256 MiB/s needs
/// until more memory is online.
pub(crate) fn headroom_bytes(rig: &Rig, report_delay_ms: u64) -> u64 {
    // The agent notices a burst within 0.1 s, and reports 20 times per second.
    256 * MIB * (100 + rig.guest().config().plug_delay_ms + 50 + report_delay_ms) / 1000
}

pub(crate) const LATE_REPORTS_MS: u64 = 300;

/// Steps in which a guest without a policy grows to 600 MiB. Part of this memory is then in swap,
/// and a little memory is free.
pub(crate) const TO_SWAP: [(u64, i64); 4] = [(3_000, 0), (6_400, 100), (1_000, -80), (10_000, 0)];

pub(crate) fn workloads() -> Vec<Workload> {
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
        Workload::new("slow plugging", &[(3_000, 0), (8_600, 100), (60_000, 0)]).with(|workload| {
            (workload.config.plug_delay_ms, workload.config.plug_block_us) = (600, 4_000);
        }),
        Workload::new("late reports", &[(3_000, 0), (8_600, 100), (60_000, 0)])
            .with(|workload| workload.channel.delay_ms = LATE_REPORTS_MS),
        Workload::new("sawtooth of 5 s", &teeth((3_000, 100), (2_000, -150), 60)),
        Workload::new("sawtooth of 40 s", &teeth((20_000, 20), (20_000, -20), 15)),
        Workload::new("leak 2 MiB/s", &[(3_000, 0), (400_000, 2)]),
        Workload::new("files read once", &[(120_000, 0)])
            .with(|workload| workload.usage.stream_bytes_per_s = 100 * MIB),
        Workload::new("files read again", &[(600_000, 0)]).with(|workload| {
            (workload.usage.file_bytes, workload.usage.touches_per_s) = (600 * MIB, 250_000);
        }),
        Workload::new(
            "pinned pages",
            &[(3_000, 0), (8_600, 100), (10_000, 0), (1_000, -860), (300_000, 0)],
        )
        .with(|workload| workload.config.refused_permille = 400),
        Workload::new("swapped before", &[(120_000, 0)]).with(|workload| {
            workload.ungoverned = TO_SWAP.to_vec();
            workload.usage.touches_per_s = 250_000;
        }),
    ]
}
