//! Simulates a host whose VMs share a pool, and many hosts on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::demand::Demand;
use super::guest::{GuestConfig, Pool};
use super::outcome::Outcome;
use super::random::Random;
use super::storage::{StorageOutcome, StorageParams, ThinVolume};
use super::vm::{Observer, Skip, Vm};
use crate::controller::Rules;
use crate::policy::Policy;
use crate::{HostView, ParamError, StorageSpace, TimeMs};

/// Pool of a host, with a thin volume if the host has storage.
#[derive(Clone, Debug)]
pub struct HostPool {
    size_bytes: u64,
    free_bytes: u64,
    volume: Option<ThinVolume>,
}

impl HostPool {
    /// Creates a pool with free memory only.
    pub fn new(size_bytes: u64) -> Self {
        HostPool { size_bytes, free_bytes: size_bytes, volume: None }
    }

    /// Creates a pool with a thin volume, which is written for `duration_ms`. The pool must have
    /// space for the data that the volume contains at the start.
    pub fn with_storage(
        size_bytes: u64,
        params: &StorageParams,
        duration_ms: u64,
        random: &mut Random,
    ) -> Self {
        Self::with_volume(size_bytes, ThinVolume::new(params, params.writes(duration_ms, random)))
    }

    pub(super) fn with_volume(size_bytes: u64, volume: ThinVolume) -> Self {
        let free_bytes = size_bytes.saturating_sub(volume.allocated_bytes());
        HostPool { size_bytes, free_bytes, volume: Some(volume) }
    }

    /// Returns the figures of the storage.
    pub fn outcome(&self) -> Option<StorageOutcome> {
        self.volume.as_ref().map(|volume| volume.outcome(self.size_bytes))
    }
}

impl Pool for HostPool {
    fn free_bytes(&self) -> u64 {
        let lendable = |volume: &ThinVolume| volume.lendable_bytes(self.free_bytes);
        self.volume.as_ref().map_or(self.free_bytes, lendable)
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.free_bytes());
        self.free_bytes -= taken;
        if let Some(volume) = &mut self.volume {
            volume.lend(taken);
        }
        taken
    }

    fn give(&mut self, bytes: u64) {
        self.free_bytes += match &mut self.volume {
            Some(volume) => volume.unplug(bytes),
            None => bytes,
        };
    }

    fn advance(&mut self, now: TimeMs) {
        if let Some(volume) = &mut self.volume {
            volume.advance(now, &mut self.free_bytes, self.size_bytes);
        }
    }

    fn storage(&self) -> Option<StorageSpace> {
        self.volume.as_ref()?.space(self.free_bytes)
    }

    fn steady_until(&self) -> Option<TimeMs> {
        let volume = self.volume.as_ref()?;
        match volume.is_changing(self.free_bytes) {
            true => Some(TimeMs(0)),
            false => volume.next_change(),
        }
    }
}

/// Configuration of a VM that has not started yet.
#[derive(Clone, Debug)]
pub struct VmSetup {
    /// Configuration of the guest.
    pub guest: GuestConfig,
    /// Zones of the guest, in the host's view.
    pub host: HostView,
    /// Demand of the guest.
    pub demand: Demand,
}

/// Policy and rules under which VMs run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Governed {
    /// The policy, with its parameters.
    pub policy: Policy,
    /// Rules that apply to every policy.
    pub rules: Rules,
    /// Determines which reports the governor receives.
    pub skip: Skip,
}

/// Runs all VMs of one host to the end. They share a pool. The observer receives the events of the
/// first VM.
pub fn run_host(
    setups: Vec<VmSetup>,
    pool: &mut HostPool,
    governed: &Governed,
    observer: &mut impl Observer,
) -> Result<Vec<Vm>, ParamError> {
    let start = |setup: VmSetup| {
        let (policy, rules) = (governed.policy.clone(), governed.rules.clone());
        Vm::new(setup.guest, setup.host, setup.demand, policy, rules, governed.skip)
    };
    let mut vms = setups.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    // The VM with the earliest time runs next, so that each VM sees the pool's state at its own
    // time.
    while let Some((index, _)) = vms
        .iter()
        .enumerate()
        .filter_map(|(index, vm)| Some((index, vm.now()?)))
        .min_by_key(|(_, now)| *now)
    {
        match index {
            0 => vms[0].advance(pool, observer),
            _ => vms[index].advance(pool, &mut ()),
        }
    }
    Ok(vms)
}

/// Runs `hosts` hosts on `threads` threads, and returns the sum of the outcomes. `setup` creates
/// the VMs of one host and its pool. The result does not depend on the number of threads or the
/// order in which hosts run.
///
/// Hosts are independent and take long to simulate. An atomic counter is therefore enough to divide
/// them evenly among standard threads, and rayon is not needed.
pub fn run_fleet(
    hosts: usize,
    governed: &Governed,
    threads: usize,
    setup: impl Fn(usize) -> (Vec<VmSetup>, HostPool) + Sync,
) -> Result<Outcome, ParamError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let host = next.fetch_add(1, Ordering::Relaxed);
            if host >= hosts {
                return Ok(done);
            }
            let (setups, mut pool) = setup(host);
            let vms = run_host(setups, &mut pool, governed, &mut ())?;
            let mut outcome = Outcome { storage: pool.outcome(), ..Outcome::default() };
            vms.iter().for_each(|vm| outcome.add(&Outcome::of(vm)));
            done.push((host, outcome));
        }
    };
    let parts: Vec<Result<Vec<(usize, Outcome)>, ParamError>> = std::thread::scope(|scope| {
        let handles: Vec<_> =
            (0..threads.clamp(1, hosts.max(1))).map(|_| scope.spawn(work)).collect();
        handles.into_iter().map(|handle| handle.join().expect("a model does not panic")).collect()
    });
    let mut all = Vec::with_capacity(hosts);
    for part in parts {
        all.extend(part?);
    }
    // The sum of floating-point numbers depends on their order.
    all.sort_by_key(|(host, _)| *host);
    let mut sum = Outcome::default();
    all.iter().for_each(|(_, outcome)| sum.add(outcome));
    Ok(sum)
}
