//! A simulated VM whose demand a test controls step by step.

#[allow(dead_code, reason = "not all tests use all functions")]
pub(crate) mod workload;

use balloon::controller::Rules;
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::sim::{
    Demand, Guest, GuestConfig, HostPool, Observer, Segment, Skip, SwapDevice, Totals, Vm,
};
use balloon::{HostView, MIB, Tier, TimeMs, ZoneSizes};

/// Memory that init and the agent use.
pub(crate) const IDLE_BYTES: u64 = 40 * MIB;

/// A simulated VM, and the part of its demand that does not change.
#[derive(Clone)]
pub(crate) struct Rig {
    pub vm: Vm,
    /// Files and touches. The sizes and rates of anonymous memory are set by [`Rig::run`].
    pub usage: Segment,
    pool: HostPool,
}

/// Plans that change a size, in order.
#[derive(Default)]
struct Plans(Vec<Plan>);

impl Observer for Plans {
    fn plan(&mut self, _: TimeMs, plan: &Plan, _: &HostView) {
        self.0.extend((plan.direction != Direction::Hold).then(|| plan.clone()));
    }
}

/// Guest with 384 MiB of boot memory. Plugging starts after 0.2 s, and continues at 1 GiB/s.
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
    /// Creates a VM with 128 MiB of DRAM and 1 GiB of PM that can be plugged.
    pub(crate) fn new(policy: Policy, config: GuestConfig) -> Self {
        let zone = ZoneSizes::empty;
        let host = HostView {
            zones: vec![zone(0, Tier::Dram, 128 * MIB), zone(1, Tier::Pm, 1024 * MIB)],
            boot_bytes: config.boot_bytes,
            ..HostView::default()
        };
        let usage = Segment { hot_permille: 1000, ..Segment::default() };
        let idle = Segment { anon_bytes: IDLE_BYTES, ..usage };
        let demand = Demand::new(vec![idle], TimeMs(1)).expect("in order");
        // No report is skipped, because tests examine the VM at any time.
        let vm = Vm::new(config, host, demand, policy, Rules::default(), Skip::Nothing)
            .expect("in bounds");
        Rig { vm, usage, pool: HostPool::new(2048 * MIB) }
    }

    pub(crate) fn of(policy: &str) -> Self {
        Self::new(Policy::from_name(policy).expect("known"), config())
    }

    /// Runs for `ms` while the demand of processes increases by `mib_per_s`. Returns the plans that
    /// change a size. The memory of init and the agent is never freed.
    pub(crate) fn run(&mut self, ms: u64, mib_per_s: i64) -> Vec<Plan> {
        self.run_until(ms, mib_per_s, |_| false)
    }

    /// Same as [`Self::run`], but ends early if `ends` returns true.
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
            self.vm.extend(self.segment(mib_per_s), falls_ms);
            left_ms -= falls_ms;
        }
        self.vm.extend(self.segment(mib_per_s.max(0)), left_ms);
        while self.vm.now().is_some() {
            self.vm.advance(&mut self.pool, &mut plans);
            if ends(&self.vm) {
                self.vm.stop();
            }
        }
        plans.0
    }

    fn segment(&self, mib_per_s: i64) -> Segment {
        Segment { anon_bytes_per_s: mib_per_s * MIB as i64, ..self.usage }
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
        self.vm.decision_counts().grows + self.vm.decision_counts().shrinks
    }

    /// Returns the memory that the guest needs so that no task waits.
    pub(crate) fn need_bytes(&self) -> u64 {
        self.guest().needed_bytes(&Segment {
            anon_bytes: self.guest().wanted_bytes(),
            at: self.guest().now(),
            ..self.usage
        })
    }

    /// Returns the memory that the guest has but does not need. Boot memory is not counted, because
    /// no decision affects it.
    pub(crate) fn over_bytes(&self) -> u64 {
        let total_bytes = self.guest().total_bytes();
        let boot_bytes = total_bytes - self.guest().plugged_bytes();
        total_bytes.saturating_sub(self.need_bytes().max(boot_bytes))
    }
}
