//! A thin volume that shares the pool with lent memory: its writes, its discards, and the space
//! that it takes back.
//!
//! The division of the pool is that of the VMM ([`Loan`]). As in the VMM, a write without space
//! waits until memory has been moved to DRAM or unplugged.

use foreshore_types::lending::Loan;
use serde::Serialize;

use super::host::HostPool;
use super::outcome::{GIB, MS_PER_HOUR};
use super::random::Random;
use crate::params::params;
use crate::units::{BLOCK_BYTES, round_up, scale};
use crate::{MIB, StorageSpace, TimeMs};

/// Length of a step while the volume is written, or memory is moved for it.
const STEP_MS: u64 = 10;
/// Maximum number of changes that are stored from a trace. Beyond it, every second one is dropped.
const MAX_RECORDED: usize = 1 << 20;
/// Minimum pause after which moved bytes count as another transfer.
const TRANSFER_PAUSE_MS: u64 = 1_000;

params! {
    /// Parameters of a volume that grows in bursts and is trimmed at the end of each period.
    pub struct StorageParams {
        /// Size of the volume.
        size_bytes: "size", Blocks, 2 * MIB => 1 << 45, 4096 * MIB;
        /// Data after a trim, in thousandths of the size.
        low_permille: "low", Permille, 0 => 1_000, 100;
        /// Data before a trim, in thousandths of the size.
        high_permille: "high", Permille, 0 => 1_000, 900;
        /// Time from one trim to the next.
        period_ms: "period", Ms, 1_000 => 86_400_000, 86_400_000;
        /// Bursts of writes in a period, each at a random time in its part of the period.
        bursts: "bursts", Count, 1 => 10_000, 24;
        /// Rate of writes in a burst, in bytes per second.
        rate_bytes_per_s: "rate", Bytes, 4096 => 1 << 40, 500 * MIB;
        /// Promised bytes that memory may borrow, as in `--pm-memory`.
        spill_bytes: "spill", Blocks, 0 => 1 << 46, 4096 * MIB;
        /// Watermark below which memory is moved to DRAM, as in `--pm-memory`.
        min_bytes: "storage_min", Bytes, 0 => 1 << 46, 32 * MIB;
        /// Watermark below which memory is recalled, as in `--pm-memory`.
        low_bytes: "storage_low", Bytes, 0 => 1 << 46, 64 * MIB;
        /// Watermark up to which memory is recalled, as in `--pm-memory`.
        high_bytes: "storage_high", Bytes, 0 => 1 << 46, 128 * MIB;
        /// Rate at which memory is moved to DRAM, in bytes per second.
        move_bytes_per_s: "move", Bytes, 4096 => 1 << 40, 1024 * MIB;
    }
    order { "low" <= "high"; "storage_min" <= "storage_low"; "storage_low" <= "storage_high"; }
}

/// Data in the volume from a point in time until the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Writes {
    pub at: TimeMs,
    /// Data in the volume at that time. If it is less than before, the rest was trimmed.
    pub data_bytes: u64,
    /// Rate of writes to new sectors.
    pub bytes_per_s: u64,
}

/// Figures of the storage of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StorageOutcome {
    /// Lent memory beyond that of a static split in which the volume has its whole size, multiplied
    /// by time.
    pub won_gib_h: f64,
    /// Transfers of chunks between storage and memory. Chunks that are moved in the same direction
    /// within a second are one transfer.
    pub transfers: u64,
    /// Bytes of these transfers.
    pub transferred_gib: f64,
    /// Part of them that was moved to DRAM, because the guest had not unplugged enough.
    pub spilled_gib: f64,
    /// Times at which writes began to wait for space.
    pub write_stalls: u64,
    /// Time in which writes waited for space.
    pub write_stall_s: f64,
    /// Bytes that were erased: returned memory and trimmed chunks.
    pub erased_gib: f64,
    /// Erasures of each chunk of the pool, on average.
    pub erases: f64,
    /// Sizes of the pools.
    #[serde(skip)]
    pub pool_gib: f64,
}

impl StorageOutcome {
    /// Adds the figures of another host.
    pub(super) fn add(&mut self, other: &Self) {
        let (erased_gib, pool_gib) =
            (self.erased_gib + other.erased_gib, self.pool_gib + other.pool_gib);
        *self = StorageOutcome {
            won_gib_h: self.won_gib_h + other.won_gib_h,
            transfers: self.transfers + other.transfers,
            transferred_gib: self.transferred_gib + other.transferred_gib,
            spilled_gib: self.spilled_gib + other.spilled_gib,
            write_stalls: self.write_stalls + other.write_stalls,
            write_stall_s: self.write_stall_s + other.write_stall_s,
            erased_gib,
            erases: erased_gib / pool_gib.max(f64::MIN_POSITIVE),
            pool_gib,
        };
    }
}

impl StorageParams {
    /// Generates the writes of a run. A burst that would not fit into its part of the period is
    /// faster than `rate`.
    pub(super) fn writes(&self, duration_ms: u64, random: &mut Random) -> Vec<Writes> {
        let part = |permille| scale(self.size_bytes, permille, 1000);
        let (low_bytes, high_bytes) = (part(self.low_permille), part(self.high_permille));
        let slot_ms = (self.period_ms / self.bursts).max(2);
        let bytes = (high_bytes - low_bytes) / self.bursts;
        let burst_ms = scale(bytes, 1000, self.rate_bytes_per_s).clamp(1, slot_ms - 1);
        let mut writes = vec![Writes { data_bytes: low_bytes, ..Writes::default() }];
        for start_ms in (0..duration_ms).step_by(self.period_ms as usize) {
            for burst in 0..self.bursts {
                let at_ms = start_ms + burst * slot_ms + random.between(0, slot_ms - burst_ms);
                let data_bytes = low_bytes + burst * bytes;
                let bytes_per_s = scale(bytes, 1000, burst_ms);
                writes.push(Writes { at: TimeMs(at_ms), data_bytes, bytes_per_s });
                let after_bytes = data_bytes + bytes;
                let end = TimeMs(at_ms + burst_ms);
                writes.push(Writes { at: end, data_bytes: after_bytes, bytes_per_s: 0 });
            }
            let at = TimeMs(start_ms + self.period_ms);
            writes.push(Writes { at, data_bytes: low_bytes, bytes_per_s: 0 });
        }
        writes
    }

    /// Watermarks of the volume's pool.
    fn marks(&self) -> StorageSpace {
        let Self { min_bytes, low_bytes, high_bytes, .. } = *self;
        StorageSpace { min_bytes, low_bytes, high_bytes, ..StorageSpace::default() }
    }
}

/// A thin volume and the memory of the pool that it shares with the VMs.
#[derive(Clone, Debug)]
pub(super) struct ThinVolume {
    size_bytes: u64,
    spill_bytes: u64,
    marks: StorageSpace,
    move_bytes_per_s: u64,
    /// Writes of the run, by time.
    writes: Vec<Writes>,
    /// Index of the present entry of `writes`.
    present: usize,
    now: TimeMs,
    allocated_bytes: u64,
    /// Data for which the pool had no space yet.
    waiting_bytes: u64,
    lent_bytes: u64,
    /// Lent memory that was moved to DRAM and is still plugged.
    spilled_bytes: u64,
    won_byte_ms: u128,
    stall_ms: u64,
    stalls: u64,
    spilled_total_bytes: u64,
    erased_bytes: u64,
    transfers: u64,
    transferred_bytes: u64,
    last_transfer: Option<(Direction, TimeMs)>,
}

/// Direction of a transfer of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToMemory,
    ToStorage,
}

impl ThinVolume {
    /// Creates a volume with the first data, whose chunks the caller takes from the pool.
    pub(super) fn new(params: &StorageParams, writes: Vec<Writes>) -> Self {
        ThinVolume {
            size_bytes: params.size_bytes,
            spill_bytes: params.spill_bytes,
            marks: params.marks(),
            move_bytes_per_s: params.move_bytes_per_s,
            allocated_bytes: round_up(writes[0].data_bytes, BLOCK_BYTES),
            writes,
            present: 0,
            now: TimeMs(0),
            waiting_bytes: 0,
            lent_bytes: 0,
            spilled_bytes: 0,
            won_byte_ms: 0,
            stall_ms: 0,
            stalls: 0,
            spilled_total_bytes: 0,
            erased_bytes: 0,
            transfers: 0,
            transferred_bytes: 0,
            last_transfer: None,
        }
    }

    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    fn loan(&self) -> Loan {
        Loan {
            borrowable_bytes: self.spill_bytes.saturating_sub(self.spilled_bytes),
            min_free_bytes: (self.spill_bytes > 0).then_some(self.marks.min_bytes),
        }
    }

    fn unallocated_bytes(&self) -> u64 {
        self.size_bytes.saturating_sub(self.allocated_bytes)
    }

    /// Returns the free bytes of the pool that may be lent.
    pub(super) fn lendable_bytes(&self, free_bytes: u64) -> u64 {
        free_bytes - self.loan().withheld_bytes(free_bytes, 0, self.unallocated_bytes())
    }

    /// Returns the space that the governor observes. `None` if memory borrows nothing.
    pub(super) fn space(&self, free_bytes: u64) -> Option<StorageSpace> {
        (self.spill_bytes > 0).then(|| StorageSpace {
            free_bytes,
            needed_bytes: self.unallocated_bytes(),
            lent_bytes: self.lent_bytes,
            borrowable_bytes: self.loan().borrowable_bytes,
            ..self.marks
        })
    }

    /// Returns true while the free space changes without a request of a VM.
    pub(super) fn is_changing(&self, free_bytes: u64) -> bool {
        self.writes[self.present].bytes_per_s > 0
            || self.waiting_bytes > 0
            || self.short_bytes(free_bytes) > 0
    }

    /// Returns the time of the next change of the writes.
    pub(super) fn next_change(&self) -> Option<TimeMs> {
        self.writes.get(self.present + 1).map(|next| next.at)
    }

    /// Accounts for lent chunks.
    pub(super) fn lend(&mut self, bytes: u64) {
        self.lent_bytes += bytes;
        self.transfer(Direction::ToMemory, bytes);
    }

    /// Accounts for unplugged memory. Returns the bytes that the pool gets back. The VMM moves the
    /// memory at the start of a zone first, and the guest unplugs its end first.
    pub(super) fn unplug(&mut self, bytes: u64) -> u64 {
        let returned_bytes = bytes.min(self.lent_bytes);
        self.spilled_bytes -= (bytes - returned_bytes).min(self.spilled_bytes);
        self.give_back(returned_bytes);
        returned_bytes
    }

    /// Advances to `now`. `pool_bytes` is the size of the pool.
    pub(super) fn advance(&mut self, now: TimeMs, free_bytes: &mut u64, pool_bytes: u64) {
        while self.now < now {
            let next = self.next_change().filter(|next| *next > self.now);
            let step = if self.is_changing(*free_bytes) { self.now + STEP_MS } else { now };
            let to = next.map_or(step, |next| next.min(step)).min(now);
            let ms = to.since(self.now);
            let static_bytes = pool_bytes.saturating_sub(self.size_bytes);
            let won_bytes = self.lent_bytes.saturating_sub(static_bytes);
            self.won_byte_ms += u128::from(won_bytes) * u128::from(ms);
            self.stall_ms += if self.waiting_bytes > 0 { ms } else { 0 };
            self.now = to;
            while self.next_change().is_some_and(|next| next <= to) {
                self.present += 1;
            }
            self.move_memory(ms, free_bytes);
            self.write(free_bytes);
        }
    }

    /// Allocates chunks for the data, or releases those without data.
    fn write(&mut self, free_bytes: &mut u64) {
        let Writes { at, data_bytes, bytes_per_s } = self.writes[self.present];
        let data_bytes = data_bytes + scale(bytes_per_s, self.now.since(at), 1000);
        let wanted_bytes = round_up(data_bytes.min(self.size_bytes), BLOCK_BYTES);
        let trimmed_bytes = self.allocated_bytes.saturating_sub(wanted_bytes);
        self.erased_bytes += trimmed_bytes;
        let missing_bytes = wanted_bytes.saturating_sub(self.allocated_bytes);
        let new_bytes = missing_bytes.min(*free_bytes / BLOCK_BYTES * BLOCK_BYTES);
        self.allocated_bytes = self.allocated_bytes - trimmed_bytes + new_bytes;
        *free_bytes = *free_bytes + trimmed_bytes - new_bytes;
        let had_waited = self.waiting_bytes > 0;
        self.waiting_bytes = missing_bytes - new_bytes;
        self.stalls += u64::from(self.waiting_bytes > 0 && !had_waited);
    }

    /// Returns the lent bytes that the VMM moves, as its pool requests them.
    fn short_bytes(&self, free_bytes: u64) -> u64 {
        let loan = self.loan();
        let (promised_bytes, waiting_bytes) = (self.unallocated_bytes(), self.waiting_bytes);
        loan.shortage_bytes(free_bytes, promised_bytes, waiting_bytes, self.lent_bytes)
            .min(loan.borrowable_bytes)
    }

    fn move_memory(&mut self, ms: u64, free_bytes: &mut u64) {
        let most_bytes = round_up(scale(self.move_bytes_per_s, ms, 1000), BLOCK_BYTES);
        let bytes = self.short_bytes(*free_bytes).min(most_bytes);
        self.spilled_bytes += bytes;
        self.spilled_total_bytes += bytes;
        *free_bytes += bytes;
        self.give_back(bytes);
    }

    fn give_back(&mut self, bytes: u64) {
        self.lent_bytes -= bytes;
        self.erased_bytes += bytes;
        self.transfer(Direction::ToStorage, bytes);
    }

    fn transfer(&mut self, direction: Direction, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let continues = self
            .last_transfer
            .is_some_and(|(last, at)| last == direction && self.now.since(at) <= TRANSFER_PAUSE_MS);
        self.transfers += u64::from(!continues);
        self.transferred_bytes += bytes;
        self.last_transfer = Some((direction, self.now));
    }

    /// Returns the figures of the run on a pool of `pool_bytes`.
    pub(super) fn outcome(&self, pool_bytes: u64) -> StorageOutcome {
        let gib = |bytes: u64| bytes as f64 / GIB;
        let mut outcome = StorageOutcome::default();
        outcome.add(&StorageOutcome {
            won_gib_h: self.won_byte_ms as f64 / GIB / MS_PER_HOUR,
            transfers: self.transfers,
            transferred_gib: gib(self.transferred_bytes),
            spilled_gib: gib(self.spilled_total_bytes),
            write_stalls: self.stalls,
            write_stall_s: self.stall_ms as f64 / 1e3,
            erased_gib: gib(self.erased_bytes),
            erases: 0.0,
            pool_gib: gib(pool_bytes),
        });
        outcome
    }
}

/// Pool of a recorded VM: its free memory, and the space that its thin volumes still needed.
#[derive(Clone, Debug, Default)]
pub struct RecordedPool {
    /// Free memory at the start.
    pub(super) free_bytes: Option<u64>,
    /// Time of the first report.
    pub(super) started_at: TimeMs,
    first: Option<StorageSpace>,
    borrowable_bytes: u64,
    needed: Vec<(TimeMs, u64)>,
}

impl RecordedPool {
    /// Adds the space for volumes at a time.
    pub(super) fn observe(&mut self, at: TimeMs, storage: &StorageSpace) {
        self.first.get_or_insert(*storage);
        self.borrowable_bytes = self.borrowable_bytes.max(storage.borrowable_bytes);
        if self.needed.last().is_some_and(|(_, bytes)| *bytes == storage.needed_bytes) {
            return;
        }
        if self.needed.len() >= MAX_RECORDED {
            let mut index = 0;
            self.needed.retain(|_| {
                index += 1;
                index % 2 == 1
            });
        }
        self.needed.push((at, storage.needed_bytes));
    }

    /// Creates the pool of a host with `vms` VMs like the recorded one. The pool has the recorded
    /// size unless `size_bytes` is another one.
    pub fn pool(&self, size_bytes: Option<u64>, vms: u64) -> HostPool {
        let Some(first) = self.first else {
            let recorded_bytes = self.free_bytes.unwrap_or(0).saturating_mul(vms);
            return HostPool::new(size_bytes.unwrap_or(recorded_bytes));
        };
        let all = |bytes: u64| bytes.saturating_mul(vms);
        let most_bytes = self.needed.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let writes = self.needed.iter().map(|(at, bytes)| Writes {
            at: TimeMs(at.since(self.started_at)),
            data_bytes: all(most_bytes - bytes),
            bytes_per_s: 0,
        });
        let params = StorageParams {
            size_bytes: all(most_bytes),
            spill_bytes: all(self.borrowable_bytes),
            min_bytes: first.min_bytes,
            low_bytes: first.low_bytes,
            high_bytes: first.high_bytes,
            ..StorageParams::default()
        };
        let volume = ThinVolume::new(&params, writes.collect());
        let free_bytes = all(first.free_bytes.saturating_add(first.lent_bytes));
        let recorded_bytes = free_bytes.saturating_add(volume.allocated_bytes());
        HostPool::with_volume(size_bytes.unwrap_or(recorded_bytes), volume)
    }
}
