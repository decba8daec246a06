//! Outcome of a run.

use serde::Serialize;

use super::guest::{Guest, PAGE_BYTES};
use super::storage::StorageOutcome;
use super::vm::Vm;
use crate::model::{energy, wear};

pub(super) const GIB: f64 = (1u64 << 30) as f64;
/// Bytes that one touch accesses, which is one cache line.
const LINE_BYTES: f64 = 64.0;
pub(super) const MS_PER_HOUR: f64 = 3_600_000.0;

/// Outcome of a run of one or several VMs. Times are summed over the VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Number of VMs.
    pub vms: u64,
    /// Simulated time.
    pub run_s: f64,
    /// Time for which tasks waited for memory.
    pub stall_s: f64,
    /// Additional time of accesses to PM compared with DRAM.
    pub pm_slower_s: f64,
    /// Memory swapped in.
    pub swap_in_gib: f64,
    /// Memory swapped out.
    pub swap_out_gib: f64,
    /// File pages that were evicted and then read again.
    pub refault_gib: f64,
    /// Hotplugged memory multiplied by time.
    pub held_gib_h: f64,
    /// Part of `held_gib_h` that was not needed.
    pub over_gib_h: f64,
    /// Missing memory multiplied by time.
    pub short_gib_h: f64,
    /// Number of plans that grew a guest.
    pub grows: u64,
    /// Number of plans that shrank a guest.
    pub shrinks: u64,
    /// Number of OOM kills.
    pub oom_kills: u64,
    /// Energy to retain, read and write memory (PRAM paper, Table 2).
    pub energy_kj: f64,
    /// Energy computed from the states of memory (AMF paper).
    pub amf_energy_kj: f64,
    /// Bytes written to PM, both as memory and as swap.
    pub pm_written_gib: f64,
    /// Mean share of memory that is on PM (h in the Memorage paper).
    pub lent_share: f64,
    /// Factor by which the lifetime of the guest's memory changes, if it wears like PM and writes
    /// are spread evenly over memory and PM (equation 1 of Memorage). For several VMs, the mean.
    pub pooled_lifetime: f64,
    /// Factor by which the memory's lifetime changes because of the share on PM (equation 2, left).
    pub memory_lifetime: f64,
    /// Factor by which PM wears faster because of lent memory (equation 2, right). For several VMs,
    /// the mean.
    pub storage_wear: f64,
    /// Number of plans that the governor made.
    pub steps: u64,
    /// Number of reports that were skipped because they could not change anything.
    pub skipped: u64,
    /// Figures of the hosts' storage, if they have any.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageOutcome>,
}

impl Outcome {
    /// Returns the outcome of one VM.
    pub fn of(vm: &Vm) -> Self {
        let guest = vm.guest();
        let (totals, decided, config) = (guest.totals(), vm.decision_counts(), guest.config());
        let gib = |bytes: u64| bytes as f64 / GIB;
        let gib_h = |byte_ms: u128| byte_ms as f64 / GIB / MS_PER_HOUR;
        let run_ms = guest.now().0;
        // Touches per second times milliseconds times thousandths are millionths of touches.
        let touches = totals.touches_ms.map(|sum| sum as f64 / 1e6);
        let mut outcome = Outcome {
            vms: 1,
            run_s: run_ms as f64 / 1e3,
            stall_s: totals.stall_us as f64 / 1e6,
            pm_slower_s: touches[1] * config.pm_slower_ns as f64 / 1e9,
            swap_in_gib: gib(totals.swapped_in_bytes),
            swap_out_gib: gib(totals.swapped_out_bytes),
            refault_gib: gib(totals.refaulted_bytes),
            held_gib_h: gib_h(totals.plugged_byte_ms[0] + totals.plugged_byte_ms[1]),
            over_gib_h: gib_h(totals.over_byte_ms),
            short_gib_h: gib_h(totals.short_byte_ms),
            grows: decided.grows,
            shrinks: decided.shrinks,
            oom_kills: totals.oom_kills,
            steps: decided.steps,
            skipped: decided.skipped,
            ..Outcome::default()
        };
        outcome.account_energy(guest, touches);
        outcome.account_wear(guest, touches);
        outcome
    }

    fn account_energy(&mut self, guest: &Guest, touches: [f64; 2]) {
        let (totals, config) = (guest.totals(), guest.config());
        let write = config.write_permille as f64 / 1e3;
        let boot_byte_s = config.boot_bytes as f64 * self.run_s;
        let [dram_byte_s, pm_byte_s] = totals.plugged_byte_ms.map(|sum| sum as f64 / 1e3);
        let mut joules = 0.0;
        for (technology, byte_s, touches) in [
            (energy::DRAM, boot_byte_s + dram_byte_s, touches[0]),
            (energy::PRAM, pm_byte_s, touches[1]),
        ] {
            let bytes = touches * LINE_BYTES;
            joules += technology.idle_joules(byte_s);
            joules += technology.access_joules(bytes * (1.0 - write), bytes * write);
        }
        if config.swap.is_pm {
            joules += energy::PRAM
                .access_joules(totals.swapped_in_bytes as f64, totals.swapped_out_bytes as f64);
        }
        self.energy_kj = joules / 1e3;
        // PM that is not plugged is powered and idle.
        let all_pm: u64 = guest
            .zones()
            .iter()
            .filter(|zone| zone.tier == crate::Tier::Pm)
            .map(|zone| zone.max_bytes)
            .sum();
        let idle_byte_s = (all_pm as f64 * self.run_s - pm_byte_s).max(0.0);
        let activated: u64 = totals.plugged_in_bytes.iter().sum();
        let active_byte_s = boot_byte_s + dram_byte_s + pm_byte_s;
        self.amf_energy_kj = energy::AMF.joules(active_byte_s, idle_byte_s, activated as f64) / 1e3;
    }

    fn account_wear(&mut self, guest: &Guest, touches: [f64; 2]) {
        let (totals, config) = (guest.totals(), guest.config());
        let mut written = touches[1] * LINE_BYTES * config.write_permille as f64 / 1e3;
        // All plugged memory is written once, when it is zeroed or filled.
        written += totals.plugged_in_bytes[1] as f64;
        if config.swap.is_pm {
            written += (totals.swapped_out_bytes / PAGE_BYTES * PAGE_BYTES) as f64;
        }
        self.pm_written_gib = written / GIB;
        let [dram, pm] = totals.plugged_byte_ms.map(|sum| sum as f64);
        let all = config.boot_bytes as f64 * self.run_s * 1e3 + dram + pm;
        self.lent_share = if all > 0.0 { pm / all } else { 0.0 };
        self.memory_lifetime = memory_lifetime(self.lent_share);
        self.account_equations(guest, touches);
    }

    /// Computes equations 1 and 2 of Memorage from the run's writes to memory, and the writes to PM
    /// by volumes and as swap.
    fn account_equations(&mut self, guest: &Guest, touches: [f64; 2]) {
        let (totals, config) = (guest.totals(), guest.config());
        let days = self.run_s / 86_400.0;
        let filled: u64 = totals.plugged_in_bytes.iter().sum();
        let touched = touches.iter().sum::<f64>() * LINE_BYTES * config.write_permille as f64 / 1e3;
        let swapped = if config.swap.is_pm { totals.swapped_out_bytes as f64 } else { 0.0 };
        let storage_bytes = (config.storage_bytes_per_day as f64 * days + swapped).max(1.0);
        let bandwidth = (touched + filled as f64) / storage_bytes;
        let most = |tier| {
            let zones = guest.zones().iter().filter(move |zone| zone.tier == tier);
            zones.map(|zone| zone.max_bytes as f64).sum::<f64>()
        };
        let capacity = most(crate::Tier::Pm) / (config.boot_bytes as f64 + most(crate::Tier::Dram));
        let endurance = config.endurance.max(1) as f64;
        self.pooled_lifetime = wear::Ratios { capacity, bandwidth, endurance }.pooled_lifetime();
        // Mean plugged PM during the run.
        let pm_bytes = totals.plugged_byte_ms[1] as f64 / (self.run_s * 1e3).max(1.0);
        let lending = wear::Lending {
            share: self.lent_share,
            bandwidth,
            memory_bytes: if self.lent_share > 0.0 { pm_bytes / self.lent_share } else { 0.0 },
            storage_bytes_per_day: storage_bytes / days.max(f64::MIN_POSITIVE),
            // Mean time after which lent memory was replaced by newly lent memory.
            exchange_days: pm_bytes * days / (totals.plugged_in_bytes[1] as f64).max(1.0),
        };
        self.storage_wear = if self.lent_share > 0.0 { lending.storage_wear() } else { 1.0 };
    }

    /// Adds the outcomes of other VMs.
    pub fn add(&mut self, other: &Outcome) {
        let vms = self.vms + other.vms;
        let mean =
            |a: f64, b: f64| (a * self.vms as f64 + b * other.vms as f64) / vms.max(1) as f64;
        let lent_share = mean(self.lent_share, other.lent_share);
        let mut storage = self.storage;
        if let Some(other) = &other.storage {
            storage.get_or_insert_default().add(other);
        }
        *self = Outcome {
            vms,
            run_s: self.run_s + other.run_s,
            stall_s: self.stall_s + other.stall_s,
            pm_slower_s: self.pm_slower_s + other.pm_slower_s,
            swap_in_gib: self.swap_in_gib + other.swap_in_gib,
            swap_out_gib: self.swap_out_gib + other.swap_out_gib,
            refault_gib: self.refault_gib + other.refault_gib,
            held_gib_h: self.held_gib_h + other.held_gib_h,
            over_gib_h: self.over_gib_h + other.over_gib_h,
            short_gib_h: self.short_gib_h + other.short_gib_h,
            grows: self.grows + other.grows,
            shrinks: self.shrinks + other.shrinks,
            oom_kills: self.oom_kills + other.oom_kills,
            energy_kj: self.energy_kj + other.energy_kj,
            amf_energy_kj: self.amf_energy_kj + other.amf_energy_kj,
            pm_written_gib: self.pm_written_gib + other.pm_written_gib,
            lent_share,
            pooled_lifetime: mean(self.pooled_lifetime, other.pooled_lifetime),
            memory_lifetime: memory_lifetime(lent_share),
            storage_wear: mean(self.storage_wear, other.storage_wear),
            steps: self.steps + other.steps,
            skipped: self.skipped + other.skipped,
            storage,
        };
    }
}

fn memory_lifetime(share: f64) -> f64 {
    let lending = wear::Lending {
        share: share.min(0.999),
        bandwidth: 0.0,
        memory_bytes: 0.0,
        storage_bytes_per_day: 1.0,
        exchange_days: 1.0,
    };
    lending.memory_lifetime()
}
