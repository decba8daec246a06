//! A VM of the simulator's model whose processes do what a test says, step by step.

#[allow(dead_code, reason = "not every test runs them")]
pub(crate) mod workload;

use balloon::controller::Rules;
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::sim::{
    Demand, Guest, GuestConfig, HostPool, Observer, Segment, Skip, SwapDevice, Totals, Vm,
};
use balloon::{HostView, MIB, Tier, TimeMs, ZoneSizes};

/// What init and the agent use.
pub(crate) const IDLE_BYTES: u64 = 40 * MIB;

/// A VM, and what its processes do beside filling memory.
#[derive(Clone)]
pub(crate) struct Rig {
    pub vm: Vm,
    /// What is read and touched; sizes and rates of anonymous memory are [`Rig::run`]'s.
    pub habits: Segment,
    pool: HostPool,
}

/// The plans that change something, in order.
#[derive(Default)]
struct Plans(Vec<Plan>);

impl Observer for Plans {
    fn plan(&mut self, _: TimeMs, plan: &Plan, _: &HostView) {
        self.0.extend((plan.direction != Direction::Hold).then(|| plan.clone()));
    }
}

/// 384 MiB of DRAM at boot; a plug takes 0.2 s, and 1 GiB/s from there on.
pub(crate) fn config() -> GuestConfig {
    GuestConfig {
        boot_bytes: 384 * MIB,
        swap: SwapDevice::from_name("disk", 1 << 30).expect("listed"),
        plug_delay_ms: 200,
        plug_block_us: 2_000,
        unplug_block_us: 4_000,
        ..GuestConfig::default()
    }
}

impl Rig {
    /// 128 MiB more of DRAM to come, and 1 GiB of PM.
    pub(crate) fn new(policy: Policy, config: GuestConfig) -> Self {
        let zone = ZoneSizes::empty;
        let host = HostView {
            zones: vec![zone(0, Tier::Dram, 128 * MIB), zone(1, Tier::Pm, 1024 * MIB)],
            boot_bytes: config.boot_bytes,
            ..HostView::default()
        };
        let habits = Segment { hot_permille: 1000, ..Segment::default() };
        let idle = Segment { anon_bytes: IDLE_BYTES, ..habits };
        let demand = Demand::new(vec![idle], TimeMs(1)).expect("in order");
        // All reports are given: what a test looks at is between them.
        let vm = Vm::new(config, host, demand, policy, Rules::default(), Skip::Nothing)
            .expect("in bounds");
        Rig { vm, habits, pool: HostPool(2048 * MIB) }
    }

    pub(crate) fn of(policy: &str) -> Self {
        Self::new(Policy::from_name(policy).expect("known"), config())
    }

    /// Lets `ms` pass while processes want `mib_per_s` more, and returns the plans that changed
    /// something. What init and the agent use is never freed.
    pub(crate) fn run(&mut self, ms: u64, mib_per_s: i64) -> Vec<Plan> {
        self.run_until(ms, mib_per_s, |_| false)
    }

    /// The same, until something is the case.
    pub(crate) fn run_until(
        &mut self,
        ms: u64,
        mib_per_s: i64,
        ends: impl Fn(&Vm) -> bool,
    ) -> Vec<Plan> {
        let (mut plans, mut left_ms) = (Plans::default(), ms);
        if let Some(rate) = u64::try_from(-mib_per_s).ok().filter(|rate| *rate > 0) {
            let over_bytes = self.guest().wanted_bytes().saturating_sub(IDLE_BYTES);
            let falls_ms = (over_bytes * 1000 / (rate * MIB)).min(ms);
            self.vm.go_on(self.segment(mib_per_s), falls_ms);
            left_ms -= falls_ms;
        }
        self.vm.go_on(self.segment(mib_per_s.max(0)), left_ms);
        while self.vm.now().is_some() {
            self.vm.turn(&mut self.pool, &mut plans);
            if ends(&self.vm) {
                self.vm.stop();
            }
        }
        plans.0
    }

    fn segment(&self, mib_per_s: i64) -> Segment {
        Segment { anon_bytes_per_s: mib_per_s * MIB as i64, ..self.habits }
    }

    pub(crate) fn guest(&self) -> &Guest {
        self.vm.guest()
    }

    pub(crate) fn totals(&self) -> &Totals {
        self.guest().totals()
    }

    pub(crate) fn requested_bytes(&self) -> u64 {
        self.guest().zones().iter().map(|zone| zone.requested_bytes).sum()
    }

    pub(crate) fn resizes(&self) -> u64 {
        self.vm.decided().grows + self.vm.decided().shrinks
    }

    /// What it must have not to wait for memory.
    pub(crate) fn need_bytes(&self) -> u64 {
        self.guest().needed_bytes(&Segment {
            anon_bytes: self.guest().wanted_bytes(),
            at: self.guest().now(),
            ..self.habits
        })
    }

    /// What it holds beyond that. Memory that it booted with is not held by anybody's decision.
    pub(crate) fn over_bytes(&self) -> u64 {
        let total_bytes = self.guest().total_bytes();
        let boot_bytes = total_bytes - self.guest().plugged_bytes();
        total_bytes.saturating_sub(self.need_bytes().max(boot_bytes))
    }
}
