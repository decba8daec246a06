//! Phase 2: Redis needs more than the DRAM, with and without the governor.

use anyhow::{Result, ensure};
use guest_tests::Guest;

use crate::redis::{self, FILL_MIB, Fill};
use crate::sizes::{MIB, Sizes, vmstat};
use crate::{claim, event, phase};

const DRAM_BYTES: u64 = 512 * MIB;
const MIN_PM_BYTES: u64 = 400 * MIB;

/// Result of a fill, with counters of the guest's kernel.
struct Run {
    fill: Fill,
    swapped_out_pages: u64,
    killed: u64,
}

/// Fills both guests with the same data. The first guest is left full.
pub(crate) fn show(guest: &Guest, boot_policy_off: &impl Fn() -> Result<Guest>) -> Result<()> {
    phase(2, &format!("Redis is filled with {FILL_MIB} MiB of values, 1.5 times the DRAM"));
    redis::start(guest)?;
    event("Redis fill begins");
    let governed = run(guest, Some(Watch::new(guest)))?;
    event("Redis is full");
    let dataset_bytes = redis::dataset_bytes(guest)?;
    check_governed(guest, &governed, dataset_bytes)?;
    print_latency(guest)?;

    println!("  the same fill in VM policy-off: the same guest, but --pressure policy=off");
    let other = boot_policy_off()?;
    redis::start(&other)?;
    event("VM policy-off: same fill begins");
    let ungoverned = run(&other, None)?;
    event("VM policy-off: fill over");
    let sizes = Sizes::of(&other)?;
    print_side_by_side(&governed, &ungoverned);
    claim(sizes.pm.plugged_bytes == 0, "without the governor, no PM was plugged")?;
    claim(
        ungoverned.swapped_out_pages > 0 || ungoverned.killed > 0,
        "without the governor, the same fill causes swapping or Linux kills Redis",
    )
}

fn check_governed(guest: &Guest, run: &Run, dataset_bytes: u64) -> Result<()> {
    ensure!(run.fill.completed, "The fill failed: {}", run.fill.last_words);
    claim(
        run.fill.alive && dataset_bytes >= DRAM_BYTES * 3 / 2,
        &format!(
            "Redis holds {} keys: {} MiB of values, keys and their overhead",
            run.fill.keys,
            dataset_bytes / MIB
        ),
    )?;
    let sizes = Sizes::of(guest)?;
    claim(sizes.pm.plugged_bytes >= MIN_PM_BYTES, &format!("the guest has grown to {sizes}"))?;
    claim(sizes.dram.plugged_bytes == 128 * MIB, "all hotpluggable DRAM is plugged")?;
    claim(run.swapped_out_pages == 0, "no page was swapped out")?;
    claim(run.killed == 0, "no process was killed")?;
    guest.no_kernel_complaints()?;
    claim(true, "the guest's kernel logged no error")
}

fn run(guest: &Guest, watch: Option<Watch<'_>>) -> Result<Run> {
    let mut watch = watch;
    let fill = redis::fill(guest, |keys| match &mut watch {
        Some(watch) => watch.check(keys),
        None => Ok(()),
    })?;
    Ok(Run {
        fill,
        swapped_out_pages: vmstat(guest, "pswpout")?,
        killed: vmstat(guest, "oom_kill")?,
    })
}

/// Checks the zones while they grow. DRAM should be plugged before PM.
struct Watch<'a> {
    guest: &'a Guest,
    is_pm_requested: bool,
}

impl<'a> Watch<'a> {
    fn new(guest: &'a Guest) -> Self {
        Self { guest, is_pm_requested: false }
    }

    fn check(&mut self, keys: u64) -> Result<()> {
        let sizes = Sizes::of(self.guest)?;
        println!("  {keys:6} keys, the guest has {sizes}");
        if sizes.pm.requested_bytes > 0 && !self.is_pm_requested {
            self.is_pm_requested = true;
            claim(sizes.dram.requested_bytes == 128 * MIB, "PM is requested only after all DRAM")?;
        }
        Ok(())
    }
}

/// Prints how long the guest waited for memory.
fn print_latency(guest: &Guest) -> Result<()> {
    let metrics = guest.metrics()?;
    let total = |suffix: &str| {
        metrics.value(&format!("foreshore_pressure_report_to_online_seconds_{suffix}"), &[])
    };
    let (count, seconds) = (total("count")?, total("sum")?);
    claim(
        count > 0.0,
        &format!(
            "memory was online {:.0} ms after the first report of a shortage (mean of {count} shortages)",
            seconds / count * 1000.0
        ),
    )
}

fn print_side_by_side(governed: &Run, ungoverned: &Run) {
    let row = |label: &str, value: &dyn Fn(&Run) -> String| {
        println!("    {label:26} {:>14} {:>14}", value(governed), value(ungoverned));
    };
    println!(
        "    {:26} {:>14} {:>14}",
        format!("fill with {FILL_MIB} MiB"),
        "policy=psi",
        "policy=off"
    );
    row("pages swapped out", &|run| run.swapped_out_pages.to_string());
    row("processes killed (OOM)", &|run| run.killed.to_string());
    row("fill", &|run| {
        if run.fill.completed { "complete".to_owned() } else { "failed".to_owned() }
    });
    row("duration of the fill (s)", &|run| format!("{:.1}", run.fill.took.as_secs_f64()));
    row("keys stored", &|run| run.fill.keys.to_string());
    row("Redis afterwards", &|run| {
        if run.fill.alive { "answers".to_owned() } else { "dead".to_owned() }
    });
}
