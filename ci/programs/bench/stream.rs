//! Runs STREAM on raw volumes and compares it with guest memory from the same pool. Mapped volumes
//! should be as fast as memory.
//!
//! A single process accesses all places in turn during one boot. The result is the ratio of their
//! shortest times. STREAM itself also uses the shortest times, because other load on the machine
//! can only make runs longer. Guest memory from the pool (`--pm-memory`) is a fair comparison,
//! because it also uses the pool's file on tmpfs, huge pages on the host, and huge pages in the
//! guest. A second array in guest memory shows how noisy the ratios are.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::host_memory;
use guest_tests::namespace::{Kind, convert};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};

use crate::forget;
use crate::samples::{Row, Samples};
use crate::vmm::{FORESHORE, MIB};

/// Size of one array. There are three arrays in each place.
const ARRAY_MIB: u64 = 32;
/// Number of rounds of one process. Each round covers all places.
const ROUNDS: u32 = 15;
const LIMIT: Duration = Duration::from_secs(300);

const DEVDAX: &str = "/dev/dax0.0";
const FSDAX: &str = "/mnt/fsdax/arrays";
/// Places of the arrays: the peer twice, and both ways to map a volume.
const MEDIA: [&str; 4] = ["node=1", "node=1", "file=/dev/dax0.0", "file=/mnt/fsdax/arrays"];

/// Boots a guest, and runs all four kernels in all places.
pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let guest = start()?;
    make_devdax(&guest)?;
    make_fsdax(&guest)?;
    let command = format!("guest-tool stream {ARRAY_MIB} {ROUNDS} {}", MEDIA.join(" "));
    let times = best(&guest.run_within(LIMIT, &command)?)?;
    let ratio = |kernel: &str, medium: usize| -> Result<f64> {
        let of = |medium| times.get(&(kernel.to_owned(), medium)).context("A kernel has no time");
        Ok(of(medium)? / of(0)?)
    };
    for (row, kernel) in [
        (Row::StreamCopy, "copy"),
        (Row::StreamScale, "scale"),
        (Row::StreamAdd, "add"),
        (Row::StreamTriad, "triad"),
    ] {
        samples.add(row, FORESHORE, ratio(kernel, 2)?);
    }
    samples.add(Row::StreamFsdax, FORESHORE, ratio("triad", 3)?);
    samples.add(Row::StreamNoise, FORESHORE, ratio("triad", 1)?);
    Ok(())
}

/// Starts a guest with memory from the pool on node 1, and with two raw volumes.
fn start() -> Result<Guest> {
    forget(&this_tests_dir().join("pool"))?;
    let pool = Pool::create("1G")?;
    let volume = |name| format!("pool={},name={name},size=128M,create=on,format=raw", pool.name());
    let guest = Guest::builder()
        .cpus(1)
        .memory("size=512M")
        .pm_memory(&format!("pool={},size=384M", pool.name()))
        .pressure("fixed,size=384M")
        .pm_volume(&volume("devdax"))
        .pm_volume(&volume("fsdax"))
        .cmdline("memhp_default_state=online_movable foreshore.agent=off")
        .boot()?;
    guest.wait_until("the memory is plugged", LIMIT, || {
        let plugged = guest.metric("foreshore_memory_plugged_bytes", &[("zone", "pm")])?;
        Ok(plugged == (384 * MIB) as f64)
    })?;
    let online = "awk '/MemTotal/ { exit !($4 >= 370000) }' /sys/devices/system/node/node1/meminfo";
    guest.wait_until_run("the memory is online", LIMIT, online)?;
    Ok(guest)
}

fn make_devdax(guest: &Guest) -> Result<()> {
    guest.wait_until_run(
        "/dev/pmem1 is there",
        LIMIT,
        "test -b /dev/pmem0 && test -b /dev/pmem1",
    )?;
    guest.run_within(LIMIT, &convert(0, Kind::DevDax))?;
    guest.wait_until_run("the device exists", LIMIT, &format!("test -c {DEVDAX}"))
}

/// Creates a file whose extents can be mapped with huge pages.
fn make_fsdax(guest: &Guest) -> Result<()> {
    let bytes = 3 * ARRAY_MIB * MIB;
    let make = format!(
        "mkfs.ext4 -q -b 4096 -m 0 -N 64 -O ^has_journal -E nodiscard,stride=512,stripe_width=512 /dev/pmem1 &&
        mkdir -p /mnt/fsdax && mount -t ext4 -o dax=always /dev/pmem1 /mnt/fsdax &&
        fallocate -l {bytes} {FSDAX}"
    );
    guest.run_within(LIMIT, &make).map(drop)
}

/// Shortest time in microseconds, for each kernel and place. The lines of `text` name both.
fn best(text: &str) -> Result<BTreeMap<(String, usize), f64>> {
    let mut times: BTreeMap<(String, usize), f64> = BTreeMap::new();
    for line in text.lines() {
        let [kernel, medium, time_us] = line.split(' ').collect::<Vec<_>>()[..] else {
            anyhow::bail!("Not a kernel, a place and a time: {line:?}");
        };
        let best = times.entry((kernel.to_owned(), medium.parse()?)).or_insert(f64::INFINITY);
        *best = best.min(time_us.parse()?);
    }
    ensure!(!times.is_empty(), "guest-tool stream printed nothing");
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_time_is_used_for_each_kernel_and_place() {
        let times = best("copy 0 3.0\ncopy 0 1.0\ncopy 0 2.0\ncopy 1 9\n").unwrap();
        assert_eq!(times[&("copy".to_owned(), 0)], 1.0);
        assert_eq!(times[&("copy".to_owned(), 1)], 9.0);
        assert!(best("").is_err() && best("copy 0").is_err() && best("copy x 1").is_err());
    }
}
