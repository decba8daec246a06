//! A guest that runs short: how long until the governor has decided, and until the memory is there.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Metrics, Pool};

use crate::forget;
use crate::samples::{Row, Samples};
use crate::vmm::FORESHORE;

const FILL_MIB: u64 = 640;
const FILL_LIMIT: Duration = Duration::from_secs(120);

/// Fills a guest of 384 MiB that may have 128 MiB of DRAM and 512 MiB of PM more. The samples are the means of
/// what the VMM's histograms have seen meanwhile.
pub fn measure(samples: &mut Samples) -> Result<()> {
    forget(&this_tests_dir().join("pool"))?;
    let pool = Pool::create("1G")?;
    let guest = Guest::builder()
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("psi")
        .boot()?;
    let mut hog = guest.start_script(FILL_LIMIT, &format!("exec guest-tool hog {FILL_MIB}"))?;
    let goal = format!("held {FILL_MIB}");
    while hog.next_line().context("The load was killed")? != goal {}
    let online = "foreshore_pressure_report_to_online_seconds";
    guest.wait_until("memory has come online", FILL_LIMIT, || {
        Ok(guest.metrics()?.value(&format!("{online}_count"), &[])? > 0.0)
    })?;
    let metrics = guest.metrics()?;
    samples.add(Row::ReportToPlan, FORESHORE, mean(&metrics, "foreshore_pressure_report_to_plan_seconds")?);
    samples.add(Row::ReportToOnline, FORESHORE, mean(&metrics, online)?);
    Ok(())
}

fn mean(metrics: &Metrics, histogram: &str) -> Result<f64> {
    let count = metrics.value(&format!("{histogram}_count"), &[])?;
    ensure!(count > 0.0, "{histogram} has seen nothing");
    Ok(metrics.value(&format!("{histogram}_sum"), &[])? / count)
}
