//! Tests of the papers' policies with an unpatched guest. The policies and the agent watch free
//! memory. Page cache uses up free memory while available memory remains the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use balloon::proto::{Cause, kernel_reserve_bytes};
use balloon::trace::{Entry, Trace};
use guest_tests::disk::sparse_file;
use guest_tests::guest::Script;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::decisions::{decisions_since, decisions_total, pressure, wait_for_agent};
use crate::zones::{MIB, vmstat, wait_until_plugged, zone};

guest_tests::tests![tables_are_followed_while_page_cache_fills_free_memory: 400 (extended) x 2];

const LIMIT: Duration = Duration::from_secs(120);
/// Time for a shrink, including cool-downs.
const SHRINK_LIMIT: Duration = Duration::from_secs(240);
const PM_MIB: u64 = 640;
/// Size of a load that exceeds the free DRAM, but not the PM that a row of the table requests.
const LOAD_MIB: u64 = 250;
/// Number of reports below the agent's watermark that are sufficient to show the policy's behavior.
const MIN_CHECKS: u64 = 6;

/// Input of the tables: the guest's watermarks, added up over the zones of its DRAM.
#[derive(Debug)]
struct Marks {
    min: u64,
    low: u64,
    high: u64,
    dram: u64,
    /// Memory that Linux keeps free of user pages (`protection` in /proc/zoneinfo). The tables do
    /// not include it.
    reserve: u64,
}

impl Marks {
    fn read(guest: &Guest) -> Result<Self> {
        const SUMS: &str = "awk '$1 == \"Node\" { node = $2 } \
            $1 == \"Node\" { kind = $4 } \
            node == \"0,\" && $1 ~ /^(min|low|high|managed)$/ { sum[$1] += $2 } \
            node == \"0,\" && $1 == \"managed\" { managed = $2 } \
            node == \"0,\" && /protection:/ && kind ~ /^(DMA32|Normal)$/ { \
                gsub(/[(),]/, \"\"); kept += $5 < managed ? $5 : managed } \
            END { print sum[\"min\"], sum[\"low\"], sum[\"high\"], sum[\"managed\"], kept + 0 }' /proc/zoneinfo";
        let text = guest.run(SUMS)?;
        let pages = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
        match pages.with_context(|| format!("Unexpected pages of /proc/zoneinfo: {text:?}"))?[..] {
            [min, low, high, dram, kept] => Ok(Self {
                min: min * 4096,
                low: low * 4096,
                high: high * 4096,
                dram: dram * 4096,
                reserve: kept * 4096,
            }),
            _ => bail!("Unexpected pages of /proc/zoneinfo: {text:?}"),
        }
    }

    /// Reads the zones after the agent has set the reserve for all hotpluggable PM.
    fn with_reserve(guest: &Guest) -> Result<Self> {
        let mut marks = Self::read(guest)?;
        guest.wait_until("the agent has set the reserve", LIMIT, || {
            marks = Self::read(guest)?;
            Ok(marks.reserve >= kernel_reserve_bytes(marks.dram, PM_MIB * MIB))
        })?;
        Ok(marks)
    }
}

struct Row {
    above: u64,
    up_to: u64,
    times: u64,
}

impl Row {
    fn middle(&self) -> u64 {
        self.above.midpoint(self.up_to)
    }
}

struct Paper {
    policy: &'static str,
    params: Value,
    /// Returns the rows of the policy's table, from the highest free memory to the lowest.
    rows: fn(&Marks) -> Vec<Row>,
    gives_back: &'static str,
}

fn border(rows: &[Row]) -> u64 {
    rows[0].up_to
}

fn decisions(guest: &Guest, since: u64, direction: &str) -> Result<Vec<Value>> {
    let mut decisions = decisions_since(guest, since)?;
    decisions.retain(|decision| decision["direction"] == direction);
    Ok(decisions)
}

/// Returns the free memory on which a decision was based.
fn free_bytes(decision: &Value) -> Result<u64> {
    let bytes = decision["input"]["report"]["free_bytes"].as_u64();
    bytes.with_context(|| format!("The decision has no input: {decision}"))
}

/// Reads a file in the guest until only `free_bytes` of memory are free. The file is a hole, so
/// reading is fast.
struct Cache(Script);

impl Cache {
    /// Opens the file. Each read continues where the previous one ended.
    fn open(guest: &Guest) -> Result<Self> {
        guest.run(
            "grep -q /mnt /proc/mounts || { mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt; }",
        )?;
        guest.run("truncate -s 4G /mnt/hole; rm -f /run/until; mkfifo /run/until")?;
        const SCRIPT: &str = "exec 3</mnt/hole 4<>/run/until
            free() { awk '/^MemFree/ { print $2 }' /proc/meminfo; }
            echo open
            while read until <&4; do
                while [ $(free) -gt $((until + 16384)) ]; do dd bs=1M count=8 <&3 of=/dev/null 2>/dev/null; done
                while [ $(free) -gt $until ]; do dd bs=256K count=2 <&3 of=/dev/null 2>/dev/null; done
                echo read
            done";
        let mut script = guest.start_script(LIMIT, SCRIPT)?;
        ensure!(script.next_line().as_deref() == Some("open"), "The reader did not start");
        Ok(Self(script))
    }

    fn read_until(&mut self, guest: &Guest, free_bytes: u64) -> Result<()> {
        guest.run(&format!("echo {} >/run/until", free_bytes / 1024))?;
        ensure!(
            self.0.next_line().as_deref() == Some("read"),
            "Reading a file did not reduce free memory"
        );
        Ok(())
    }
}

fn tables_are_followed_while_page_cache_fills_free_memory() -> Result<()> {
    let pool = Pool::create("768M")?;
    let (disk, trace) = (sparse_file("disk", 64 * MIB)?, this_tests_dir().join("trace"));
    let guest = Guest::builder()
        .memory("size=256M")
        .pm_memory(&format!("pool={},size={PM_MIB}M", pool.name()))
        .argument("--disk", &format!("path={}", disk.display()))
        // Huge pages would change the watermarks. The agent enables them in a guest that has grown.
        .cmdline("transparent_hugepage=never foreshore.zram=64M")
        .pressure(&format!("off,dry_run=on,record={}", trace.display()))
        .boot()?;
    guest.wait_until_run("the disk exists", LIMIT, "test -b /dev/vda")?;
    wait_for_agent(&guest, "live")?;
    // First rows of tables 2 and 3 (docs/reference/policies.md).
    let amf = Paper {
        policy: "amf",
        // Two free sections are sufficient.
        params: json!({ "watermark-scale": 20, "reclaim": 15 }),
        rows: |marks| {
            vec![
                Row { above: marks.low * 20, up_to: marks.high * 20, times: 1 },
                Row { above: marks.min * 20, up_to: marks.low * 20, times: 2 },
            ]
        },
        gives_back: "descriptor_space",
    };
    let dapper = Paper {
        policy: "dapper",
        params: json!({ "watermark-scale": 16 }),
        rows: |marks| {
            vec![
                Row { above: marks.high * 16, up_to: marks.high * 32, times: 1 },
                Row { above: marks.low * 16, up_to: marks.high * 16, times: 2 },
            ]
        },
        gives_back: "free_share",
    };
    let followed = follows(&guest, &amf)
        .context("amf")
        .and_then(|()| follows(&guest, &dapper).context("dapper"));
    if followed.is_err() {
        // Diagnostics for the log of a failed test.
        println!("{}", guest.get("vm.memory")?);
        println!("{}", pressure(&guest)?);
        println!("{}", guest.run("cat /proc/meminfo; dmesg | tail -n 20; cat /run/agent.log")?);
    }
    followed?;
    for counter in ["oom_kill", "pswpout"] {
        ensure!(vmstat(&guest, counter)? == 0, "{counter} is {}", vmstat(&guest, counter)?);
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    was_reported_at_once(&trace)
}

fn follows(guest: &Guest, paper: &Paper) -> Result<()> {
    let marks = Marks::with_reserve(guest)?;
    let rows = (paper.rows)(&marks);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    println!("{}: {marks:?}, integrates up to {:.1} MiB free", paper.policy, mib(border(&rows)));
    let set = |change: Value| guest.put("vm.pressure", change);
    let decide = || set(json!({ "policy": paper.policy, "params": paper.params, "dry_run": true }));
    let (off, before) = (json!({ "policy": "off" }), decisions_total(guest)?);
    // 1. Above the first threshold, no PM is plugged.
    decide()?;
    guest.wait_until("the guest has enough memory", LIMIT, || {
        Ok(decisions(guest, before, "hold")?.iter().any(|decision| decision["reason"] == "enough"))
    })?;
    let early = decisions(guest, before, "grow")?;
    ensure!(early.is_empty(), "The governor grew the guest without a shortage: {early:?}");
    // 2. In each row, the decision is the one in the table. The dry run has no effect on memory, so
    //    free memory remains in the row.
    let mut cache = Cache::open(guest)?;
    for row in &rows {
        // Reports received in the meantime may contain a mix of two states.
        set(off.clone())?;
        cache.read_until(guest, row.middle() + marks.reserve)?;
        let before = decisions_total(guest)?;
        decide()?;
        guest.wait_until("the governor has decided on the row", LIMIT, || {
            let times = |decision: &Value| decision["times"].as_u64() >= Some(MIN_CHECKS);
            Ok(decisions(guest, before, "grow")?.iter().any(times))
        })?;
        for decision in decisions(guest, before, "grow")? {
            let free = free_bytes(&decision)?.saturating_sub(marks.reserve);
            let expected =
                decision["wanted_bytes"].as_u64().context("The decision has no wanted_bytes")?;
            println!(
                "{:.1} MiB free beside the reserve: {:.1} MiB wanted",
                mib(free),
                mib(expected)
            );
            ensure!(
                free > row.above && free < row.up_to,
                "The decision is not in the row up to {:.1}: {decision}",
                mib(row.up_to)
            );
            ensure!(
                expected.abs_diff(row.times * marks.dram) <= 2 * MIB
                    && decision["reason"] == "low_free",
                "The decision does not request {} times {} bytes: {decision}",
                row.times,
                marks.dram
            );
        }
    }
    let details = &pressure(guest)?["details"];
    ensure!(
        details["watermark_of"] == "free",
        "The agent's watermark refers to {}",
        details["watermark_of"]
    );
    ensure!(zone(guest, "pm")?.requested_bytes == 0, "A dry run requested PM");
    // 3. Without a dry run, the amount of the last row is plugged.
    let before = decisions_total(guest)?;
    set(json!({ "dry_run": false }))?;
    guest.wait_until("PM is plugged", LIMIT, || {
        let grown = |decision: &Value| {
            decision["reason"] == "low_free" && decision["outcome"]["state"] == "reached"
        };
        Ok(decisions(guest, before, "grow")?.iter().any(grown))
    })?;
    let top = zone(guest, "pm")?.plugged_bytes;
    // 4. The PM is used, freed, and then unplugged.
    let hog = guest.hog(LOAD_MIB, LIMIT)?;
    let used = zone(guest, "pm")?.resident_bytes;
    println!("{} MiB of PM are plugged and {} used", top / MIB, used / MIB);
    ensure!(used >= LOAD_MIB / 2 * MIB, "A load of {LOAD_MIB} MiB uses only {used} bytes of PM");
    drop((hog, cache));
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    guest.wait_until("PM is unplugged", SHRINK_LIMIT, || {
        let shrunk = |decision: &Value| decision["outcome"]["state"] == "reached";
        Ok(decisions(guest, before, "shrink")?.iter().any(shrunk))
    })?;
    let shrinks = decisions(guest, before, "shrink")?;
    ensure!(
        shrinks.iter().all(|decision| decision["reason"] == paper.gives_back),
        "The governor shrank the guest for another reason: {shrinks:?}"
    );
    set(json!({ "policy": "fixed", "size": 0 }))?;
    wait_until_plugged(guest, "pm", 0, SHRINK_LIMIT)
}

/// Checks that every report below the watermark of free memory was sent for that reason, whatever
/// the amount of available memory.
fn was_reported_at_once(trace: &std::path::Path) -> Result<()> {
    let trace = Trace::read(BufReader::new(File::open(trace)?))?;
    let mut causes: BTreeMap<String, u32> = BTreeMap::new();
    for entry in &trace.entries {
        let Entry::Report { report, .. } = entry else { continue };
        let memory = report.memory();
        if memory.free_bytes < memory.total_bytes / 3
            && memory.available_bytes > memory.total_bytes / 2
        {
            *causes.entry(format!("{:?}", report.cause())).or_default() += 1;
        }
    }
    println!("{causes:?}");
    let fast = causes.get(&format!("{:?}", Cause::Watermark)).copied().unwrap_or(0);
    ensure!(
        fast >= 5,
        "Too few fast reports with little free and much available memory: {causes:?}"
    );
    Ok(())
}
