//! Debian's Redis in the guest, filled and emptied by its own tools.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use guest_tests::Guest;

/// For Redis to say nothing: a guest that swaps is slow.
const SILENCE_LIMIT: Duration = Duration::from_secs(180);

const SOCKET: &str = "/run/redis.sock";

/// With the string's header just under 16 KiB, a size class of jemalloc, which would waste a quarter above it.
/// redis-benchmark's values are random characters: no compressed swap makes room by them.
const VALUE_BYTES: u64 = 16_360;

/// The fill is cut into rounds, each a run of redis-benchmark, to see how far it has come.
const ROUNDS: u64 = 20;
const VALUES_PER_ROUND: u64 = 2500;

/// What a fill puts into Redis: 780 MiB, 1.5 times the guest's DRAM.
pub const FILL_BYTES: u64 = VALUE_BYTES * ROUNDS * VALUES_PER_ROUND;

/// How a fill ended.
#[derive(Debug, Clone)]
pub struct Fill {
    /// All of it is in Redis.
    pub completed: bool,
    /// The most that Redis said it held.
    pub keys: u64,
    pub took: Duration,
    /// Redis still answers.
    pub alive: bool,
}

/// Starts Redis as a cache: nothing on disk, and overcommit as Redis itself asks for in its log.
pub fn start(guest: &Guest) -> Result<()> {
    guest.run("echo 1 >/proc/sys/vm/overcommit_memory")?;
    guest.run(&format!(
        "redis-server --daemonize yes --unixsocket {SOCKET} --port 0 --save '' --appendonly no \
         --logfile /run/redis.log"
    ))?;
    guest.wait_until_run(
        "Redis answers",
        SILENCE_LIMIT,
        &format!("redis-cli -s {SOCKET} ping | grep -q PONG"),
    )
}

/// Fills it; `seen` is told of every round.
pub fn fill(guest: &Guest, mut seen: impl FnMut(u64) -> Result<()>) -> Result<Fill> {
    let started = Instant::now();
    let mut script = guest.start_script(
        SILENCE_LIMIT,
        &format!(
            "for round in $(seq {ROUNDS}); do
                redis-benchmark -s {SOCKET} -q -c 1 -P 32 -t set -d {VALUE_BYTES} -r 1000000000 -n {VALUES_PER_ROUND} \
                    >/run/benchmark.log 2>&1 || exit 1
                redis-cli -s {SOCKET} dbsize || exit 1
            done"
        ),
    )?;
    let mut keys = 0;
    while let Some(line) = script.next_line() {
        keys = line.trim().parse().with_context(|| format!("redis-cli dbsize says {line:?}"))?;
        seen(keys)?;
    }
    let completed = script.finish().is_ok_and(|output| output.code == 0);
    let took = started.elapsed();
    let ping = guest.try_run(SILENCE_LIMIT, &format!("redis-cli -s {SOCKET} ping"))?;
    Ok(Fill { completed, keys, took, alive: ping.stdout.contains("PONG") })
}

/// Bytes of values and keys that Redis holds.
pub fn dataset_bytes(guest: &Guest) -> Result<u64> {
    let text = guest.run(&format!("redis-cli -s {SOCKET} info memory"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("used_memory_dataset:"));
    line.and_then(|bytes| bytes.trim().parse().ok()).with_context(|| format!("info memory says {text:?}"))
}

/// Forgets everything and gives the allocator's pages back.
pub fn flush(guest: &Guest) -> Result<()> {
    let flush = format!("redis-cli -s {SOCKET} flushall sync && redis-cli -s {SOCKET} memory purge");
    guest.run_within(SILENCE_LIMIT, &flush).map(drop)
}
