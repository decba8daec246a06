//! Runs Debian's Redis in the guest, and fills and empties it with Redis' own tools.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use guest_tests::{Guest, Output};

use crate::sizes::MIB;

/// Maximum time without output from Redis. A guest that swaps is slow.
const SILENCE_LIMIT: Duration = Duration::from_secs(180);

const SOCKET: &str = "/run/redis.sock";

/// Size of a value. Together with the string's header, it is just under 16 KiB, a size class of
/// jemalloc. With a larger value, jemalloc would waste a quarter of the memory. Values are random
/// characters, so that compressed swap saves no space. Each round uses different key names, because
/// redis-benchmark's random numbers may be the same in each run.
const VALUE_BYTES: u64 = 16_360;

/// Number of redis-benchmark runs per fill. A fill is split into runs to show its progress.
const ROUNDS: u64 = 20;
/// Number of values per round. redis-benchmark would round it up to a multiple of the pipeline's
/// length, so it is such a multiple.
const VALUES_PER_ROUND: u64 = 2496;
/// Number of commands in flight. With one at a time, an emulated host would mainly measure its own
/// task switches.
const PIPELINE: u64 = 32;

/// Total size of the values in a fill, rounded: 779 MiB, 1.5 times the guest's DRAM.
pub(crate) const FILL_MIB: u64 = (VALUE_BYTES * ROUNDS * VALUES_PER_ROUND + MIB / 2) / MIB;

#[derive(Debug, Clone)]
pub(crate) struct Fill {
    /// True if Redis contains all data.
    pub completed: bool,
    /// Diagnostics from the guest if the fill did not complete.
    pub last_words: String,
    /// Highest number of keys that Redis reported.
    pub keys: u64,
    pub took: Duration,
    pub alive: bool,
}

/// Starts Redis as a cache without files. Enables overcommit, as Redis recommends in its log.
pub(crate) fn start(guest: &Guest) -> Result<()> {
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

/// Fills Redis. Calls `on_progress` after every round.
pub(crate) fn fill(guest: &Guest, mut on_progress: impl FnMut(u64) -> Result<()>) -> Result<Fill> {
    let started = Instant::now();
    let mut script = guest.start_script(SILENCE_LIMIT, &fill_script())?;
    let mut keys = 0;
    while let Some(line) = script.next_line() {
        keys = line
            .trim()
            .parse()
            .with_context(|| format!("Unexpected output of redis-cli dbsize: {line:?}"))?;
        on_progress(keys)?;
    }
    let ended = script.finish();
    let took = started.elapsed();
    let completed = ended.as_ref().is_ok_and(|output| output.code == 0);
    let last_words = if completed { String::new() } else { last_words(guest, &ended)? };
    let ping = guest.try_run(SILENCE_LIMIT, &format!("redis-cli -s {SOCKET} ping"))?;
    Ok(Fill { completed, last_words, keys, took, alive: ping.stdout.contains("PONG") })
}

/// Returns a script that prints the number of keys after every round. redis-benchmark would wait
/// forever for a killed Redis. Therefore, the script checks that the executable of the Redis
/// process still exists. For a zombie, it does not.
fn fill_script() -> String {
    let random_bytes = VALUE_BYTES / 4 * 3;
    format!(
        "head -c {random_bytes} /dev/urandom | base64 -w 0 >/run/value
        redis=/proc/$(pidof redis-server)/exe
        for round in $(seq {ROUNDS}); do
            redis-benchmark -s {SOCKET} -q -c 1 -P {PIPELINE} -r 1000000000 -n {VALUES_PER_ROUND} \
                -x set round$round:__rand_int__ </run/value 2>/run/benchmark.log >/dev/null &
            load=$!
            while [ -e /proc/$load/exe ]; do
                [ -e $redis ] || {{ kill -9 $load; exit 1; }}
                sleep 0.1
            done
            wait $load || exit 1
            redis-cli -s {SOCKET} dbsize || exit 1
        done"
    )
}

/// Returns diagnostics from the guest about a fill that was cut off.
fn last_words(guest: &Guest, ended: &Result<Output>) -> Result<String> {
    let ping = guest.try_run(
        SILENCE_LIMIT,
        "tr '\\r' '\\n' </run/benchmark.log | tail -n 3; tail -n 3 /run/redis.log; dmesg | tail -n 5",
    )?;
    Ok(format!("{ended:?}\n{}", ping.stdout))
}

/// Returns the size of the values and keys in Redis.
pub(crate) fn dataset_bytes(guest: &Guest) -> Result<u64> {
    let text = guest.run(&format!("redis-cli -s {SOCKET} info memory"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("used_memory_dataset:"));
    line.and_then(|bytes| bytes.trim().parse().ok())
        .with_context(|| format!("redis-cli info memory has no used_memory_dataset: {text:?}"))
}

/// Deletes all data, and makes the allocator return its pages.
pub(crate) fn flush(guest: &Guest) -> Result<()> {
    let flush =
        format!("redis-cli -s {SOCKET} flushall sync && redis-cli -s {SOCKET} memory purge");
    guest.run_within(SILENCE_LIMIT, &flush).map(drop)
}
