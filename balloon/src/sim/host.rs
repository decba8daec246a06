//! Simulates a host whose VMs share a pool, and many hosts on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::demand::Demand;
use super::guest::{GuestConfig, Pool};
use super::outcome::Outcome;
use super::vm::{Observer, Skip, Vm};
use crate::controller::Rules;
use crate::policy::Policy;
use crate::{HostView, ParamError};

/// Pool of a host. The value is its free bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPool(pub u64);

impl Pool for HostPool {
    fn free_bytes(&self) -> u64 {
        self.0
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.0);
        self.0 -= taken;
        taken
    }

    fn give(&mut self, bytes: u64) {
        self.0 += bytes;
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

/// Runs all VMs of one host to the end. They share a pool with `pool_bytes` of free memory at the
/// start. The observer receives the events of the first VM.
pub fn run_host(
    setups: Vec<VmSetup>,
    pool_bytes: u64,
    governed: &Governed,
    observer: &mut impl Observer,
) -> Result<Vec<Vm>, ParamError> {
    let mut pool = HostPool(pool_bytes);
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
            0 => vms[0].advance(&mut pool, observer),
            _ => vms[index].advance(&mut pool, &mut ()),
        }
    }
    Ok(vms)
}

/// Runs `hosts` hosts on `threads` threads, and returns the sum of the outcomes. `setup` creates
/// the VMs of one host, and returns the free size of its pool. The result does not depend on the
/// number of threads or the order in which hosts run.
///
/// Hosts are independent and take long to simulate. An atomic counter is therefore enough to divide
/// them evenly among standard threads, and rayon is not needed.
pub fn run_fleet(
    hosts: usize,
    governed: &Governed,
    threads: usize,
    setup: impl Fn(usize) -> (Vec<VmSetup>, u64) + Sync,
) -> Result<Outcome, ParamError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let host = next.fetch_add(1, Ordering::Relaxed);
            if host >= hosts {
                return Ok(done);
            }
            let (setups, pool_bytes) = setup(host);
            let vms = run_host(setups, pool_bytes, governed, &mut ())?;
            let mut outcome = Outcome::default();
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
