//! Tests of the harness with a VMM that is known to work. If they fail, Foreshore is not the cause.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::guest::complaints;
use guest_tests::qemu::QemuBuilder;
use guest_tests::runner::skip;
use guest_tools::wait::wait_until;

guest_tests::tests![a_guest_under_qemu_answers_and_plugs_memory (extended) x 2];

const LIMIT: Duration = Duration::from_secs(20);

fn boot(builder: &QemuBuilder) -> Result<guest_tests::qemu::QemuGuest> {
    if std::process::Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        return skip("no QEMU here (ci/nested/host --peers brings it)");
    }
    if !std::path::Path::new("/dev/vhost-vsock").exists() {
        return skip("no /dev/vhost-vsock here");
    }
    builder.boot()
}

fn a_guest_under_qemu_answers_and_plugs_memory() -> Result<()> {
    let guest = boot(&QemuBuilder::default().cpus(2).memory_mib(512, 512))?;
    ensure!(guest.run("nproc")?.trim() == "2", "Not two CPUs");
    let output = guest.try_run(LIMIT, "echo out; echo err >&2; exit 7")?;
    ensure!(output.code == 7 && output.stdout == "out\n" && output.stderr == "err\n", "{output:?}");
    let long = guest.run("seq 1 200000")?;
    ensure!(long.lines().count() == 200_000 && long.ends_with("\n200000\n"), "Long output is cut");
    // A background process that keeps the output open does not keep the connection open. Dropping a
    // script kills it.
    ensure!(guest.run("sleep 1000 & echo started")? == "started\n", "Not started");
    let mut endless = guest.start_script(LIMIT, "while :; do echo line; done")?;
    ensure!(endless.next_line().as_deref() == Some("line"), "The endless script printed no line");
    drop(endless);
    wait_until("the dropped script is gone", LIMIT, || {
        Ok(guest.try_run(LIMIT, "ps | grep -v grep | grep 'do echo line'")?.code == 1)
    })?;
    for bytes in [256 << 20, 0] {
        guest.request_hotplug_bytes(bytes)?;
        wait_until("QEMU's guest has plugged it", Duration::from_secs(60), || {
            Ok(guest.plugged_bytes()? == bytes)
        })?;
    }
    ensure!(guest.rss_bytes()? > 0, "QEMU has no RSS");
    let log = guest.console_log()?;
    ensure!(complaints(&log).is_empty(), "{:?}", complaints(&log));
    Ok(())
}
