//! Phase 3: the guest needs less memory, and the rest is returned to the host.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::{Guest, Pool};

use crate::sizes::{MIB, Sizes};
use crate::{claim, event, phase, redis};

/// Time for a shrink. Shrinks are slow on purpose, and a cool-down precedes their steps.
const SHRINK_LIMIT: Duration = Duration::from_secs(240);

/// Allowed difference in the pool's own data and the volume's data.
const TOLERANCE_BYTES: u64 = 4 * MIB;

/// Host memory that is used for a guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spent {
    rss_bytes: u64,
    pool_file_bytes: u64,
    sizes: Sizes,
}

impl Spent {
    pub(crate) fn on(guest: &Guest, pool: &Pool) -> Result<Self> {
        Ok(Self {
            rss_bytes: guest.rss_bytes()?,
            pool_file_bytes: pool.occupied_bytes()?,
            sizes: Sizes::of(guest)?,
        })
    }
}

/// Flushes Redis, and follows the guest while it shrinks.
pub(crate) fn show(guest: &Guest, pool: &Pool, boot: &Spent) -> Result<()> {
    phase(3, "Redis is flushed, the guest shrinks");
    let full = Spent::on(guest, pool)?;
    event("Redis flushed");
    redis::flush(guest)?;
    let steps = follow_down(guest)?;
    pool.wait_until_clean()?;
    event("all PM is back");
    let after = Spent::on(guest, pool)?;
    print_table(&[boot, &full, &after]);
    claim(
        steps.len() >= 2,
        &format!("PM was returned in {} steps, to {} MiB", steps.len(), in_mib(&steps)),
    )?;
    claim(true, "DRAM stayed plugged until all PM was returned")?;
    claim(
        after.sizes.pool_free_bytes == boot.sizes.pool_free_bytes,
        "the pool has as many free bytes as at boot",
    )?;
    claim(
        after.pool_file_bytes <= boot.pool_file_bytes + TOLERANCE_BYTES,
        "the pool's file uses no more blocks than at boot",
    )?;
    let returned = full.rss_bytes.saturating_sub(after.rss_bytes);
    claim(
        after.sizes.pm.resident_bytes == 0
            && returned + TOLERANCE_BYTES >= full.sizes.pm.resident_bytes,
        &format!("the VMM's resident memory fell by {} MiB and contains no PM", returned / MIB),
    )?;
    guest.no_kernel_complaints()
}

/// Waits until no PM is plugged, and returns the sizes requested in the meantime.
fn follow_down(guest: &Guest) -> Result<Vec<u64>> {
    let mut last = Sizes::of(guest)?;
    let mut steps = Vec::new();
    guest.wait_until("all PM is back", SHRINK_LIMIT, || {
        let sizes = Sizes::of(guest)?;
        if sizes.pm.requested_bytes < last.pm.requested_bytes {
            steps.push(sizes.pm.requested_bytes);
        }
        if sizes.pm.plugged_bytes / (64 * MIB) < last.pm.plugged_bytes / (64 * MIB) {
            println!("  the guest has {sizes}");
        }
        ensure!(
            sizes.pm.plugged_bytes == 0 || sizes.dram.plugged_bytes == 128 * MIB,
            "DRAM was unplugged before PM: {sizes:?}"
        );
        last = sizes;
        Ok(sizes.pm.plugged_bytes == 0)
    })?;
    Ok(steps)
}

fn in_mib(sizes_bytes: &[u64]) -> String {
    sizes_bytes.iter().map(|bytes| (bytes / MIB).to_string()).collect::<Vec<_>>().join(", ")
}

fn print_table(states: &[&Spent; 3]) {
    let row = |label: &str, bytes: fn(&Spent) -> u64| {
        let [boot, full, after] = states.map(|spent| bytes(spent) / MIB);
        println!("    {label:26} {boot:>8} {full:>17} {after:>8}");
    };
    println!("    {:26} {:>8} {:>17} {:>8}", "MiB", "at boot", "before the flush", "after");
    row("VMM's resident memory", |spent| spent.rss_bytes);
    row("  in DRAM", |spent| spent.sizes.dram.resident_bytes);
    row("  in PM", |spent| spent.sizes.pm.resident_bytes);
    row("pool file's used blocks", |spent| spent.pool_file_bytes);
    row("pool: free", |spent| spent.sizes.pool_free_bytes);
    row("pool: lent as memory", |spent| spent.sizes.pool_memory_bytes);
}
