//! Hosts: VMs that share a pool, and many of them on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::demand::Demand;
use super::guest::{GuestConfig, Pool};
use super::outcome::Outcome;
use super::vm::{Observer, Skip, Vm};
use crate::controller::Rules;
use crate::policy::Policy;
use crate::{HostView, ParamError};

/// A host's pool: so much is free.
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

/// A VM before it runs.
#[derive(Clone, Debug)]
pub struct VmSetup {
    /// The guest.
    pub guest: GuestConfig,
    /// Its zones, as the host has them.
    pub host: HostView,
    /// What is wanted of it.
    pub demand: Demand,
}

/// How it is governed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Governed {
    /// The policy, with its parameters.
    pub policy: Policy,
    /// The rules above it.
    pub rules: Rules,
    /// Whether reports that change nothing are left out.
    pub skip: Skip,
}

/// Runs the VMs of one host to their ends. They share a pool that begins with so much free; the
/// observer sees the first.
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
    // Who is furthest behind goes next, so that all of them see the pool as it is at their time.
    while let Some((index, _)) = vms
        .iter()
        .enumerate()
        .filter_map(|(index, vm)| Some((index, vm.now()?)))
        .min_by_key(|(_, now)| *now)
    {
        match index {
            0 => vms[0].turn(&mut pool, observer),
            _ => vms[index].turn(&mut pool, &mut ()),
        }
    }
    Ok(vms)
}

/// Runs `hosts` hosts on as many threads as there are processors, and adds up what has come of
/// them. `setup` makes the VMs of one, and says how much its pool has. What comes out depends on
/// neither the threads nor their order.
///
/// Threads of the standard library: hosts are independent and take long, so an atomic counter hands
/// them out evenly, and nothing of what rayon does better is needed.
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
    // Sums of floating-point numbers depend on their order.
    all.sort_by_key(|(host, _)| *host);
    let mut sum = Outcome::default();
    all.iter().for_each(|(_, outcome)| sum.add(outcome));
    Ok(sum)
}
