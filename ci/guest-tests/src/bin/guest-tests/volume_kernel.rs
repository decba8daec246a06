//! Tests whether the VMM classifies the guest's BTT driver correctly from the kernel that the agent
//! reports.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, Pool};
use serde_json::Value;

use crate::volume::{guest_with, with_volume};

guest_tests::tests![
    agent_reports_kernel_and_full_preemption_on_6_12: 180 =>
        check_reported_kernel("preempt=full", "full"),
    agent_reports_kernel_and_voluntary_preemption_on_6_1: 180 (long) on [V6_1] =>
        check_reported_kernel("", "voluntary"),
    affected_kernel_causes_one_warning,
];

const HELLO_LIMIT: Duration = Duration::from_secs(60);
const WARNING: &str = "BTT driver could corrupt its volumes";

fn guest_kernel(guest: &Guest) -> Result<Value> {
    Ok(guest.get("vm.info")?["guest_kernel"].clone())
}

/// Returns `guest_btt` of the only volume.
fn boot_and_classify(guest: &Guest) -> Result<Value> {
    Ok(guest.get("vm.volumes")?["volumes"][0]["guest_btt"].clone())
}

fn verdicts(guest: &Guest, verdict: &str) -> Result<f64> {
    guest.metric("foreshore_guest_btt_verdicts_total", &[("verdict", verdict)])
}

fn warnings(guest: &Guest) -> Result<usize> {
    Ok(guest.vmm_log()?.matches(WARNING).count())
}

/// The pinned Debian kernels have the fix, so they are safe with any preemption model.
fn check_reported_kernel(cmdline: &str, model: &str) -> Result<()> {
    let pool = with_volume(Pool::create("256M")?)?;
    let guest = guest_with(&pool, "interface=nvdimm").cmdline(cmdline).boot()?;
    guest.wait_until("the agent has sent its hello", HELLO_LIMIT, || {
        Ok(!guest_kernel(&guest)?.is_null())
    })?;
    let reported = guest_kernel(&guest)?;
    let expected = [guest.run("uname -r")?, guest.run("uname -v")?];
    for (field, expected) in ["release", "version"].into_iter().zip(&expected) {
        ensure!(reported[field] == expected.trim(), "{field} of {reported} is not {expected:?}");
    }
    ensure!(reported["preemption"] == model, "{cmdline:?}: {reported}");
    ensure!(
        boot_and_classify(&guest)?["verdict"] == "safe",
        "{reported}: {}",
        boot_and_classify(&guest)?
    );
    ensure!(
        verdicts(&guest, "safe")? >= 1.0 && verdicts(&guest, "unsafe")? == 0.0,
        "The metric has another verdict"
    );
    ensure!(warnings(&guest)? == 0, "The log has a warning about a safe kernel");
    guest.power_off()
}

fn say_hello(guest: &Guest, release: &str, preemption: &str) -> Result<()> {
    let hello = format!(
        r#"{{"type":"hello","version":1,"agent_version":"0.1.0","kernel_release":"{release}","preemption":"{preemption}","page_size_bytes":4096}}"#
    );
    guest.run(&format!("printf '%s\\n' '{hello}' | guest-tool vsock-send 9746")).map(drop)
}

fn affected_kernel_causes_one_warning() -> Result<()> {
    let pool = with_volume(Pool::create("256M")?)?;
    let guest = guest_with(&pool, "interface=nvdimm").cmdline("foreshore.agent=off").boot()?;
    ensure!(
        guest_kernel(&guest)?.is_null() && boot_and_classify(&guest)?.is_null(),
        "The kernel has a verdict before the hello"
    );
    for round in 1..=3 {
        say_hello(&guest, "6.12.57", "full")?;
        guest.wait_until("the kernel has a verdict", HELLO_LIMIT, || {
            Ok(verdicts(&guest, "unsafe")? >= f64::from(round))
        })?;
        ensure!(
            warnings(&guest)? == 1,
            "Round {round}: {} warnings instead of 1",
            warnings(&guest)?
        );
    }
    let reason = boot_and_classify(&guest)?["reason"].clone();
    ensure!(reason.as_str().is_some_and(|reason| reason.contains("6.12.57")), "{reason}");
    // An invalid kernel name should be refused and counted, and should not change anything.
    let refused = || -> Result<f64> {
        let metrics = guest.metrics()?;
        Ok(metrics.sum("foreshore_pressure_refused_reports_total", &[]))
    };
    let before = refused()?;
    say_hello(&guest, &"6".repeat(200), "full")?;
    say_hello(&guest, "6.12.57 with spaces", "full")?;
    guest.wait_until("both are refused", HELLO_LIMIT, || Ok(refused()? >= before + 2.0))?;
    let reported = guest_kernel(&guest)?;
    ensure!(reported["release"] == "6.12.57" && verdicts(&guest, "unsafe")? == 3.0, "{reported}");
    // A report of a kernel that is safe for the volume should not cause a warning either.
    say_hello(&guest, "6.12.57", "voluntary")?;
    guest.wait_until("the kernel has a new verdict", HELLO_LIMIT, || {
        Ok(boot_and_classify(&guest)?["verdict"] == "safe")
    })?;
    ensure!(warnings(&guest)? == 1, "{} warnings instead of 1", warnings(&guest)?);
    guest.run("true").map(drop).context("The guest runs on")
}
