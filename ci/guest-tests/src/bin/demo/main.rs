//! What Foreshore is for, shown once from beginning to end on a real KVM host: `demo METRICS METRICS_OFF`.
//!
//! Runs where the VMs run; ci/demo has Prometheus scrape the two addresses meanwhile. Every claim is looked at and
//! fails the demo if it does not hold. A line that begins with `* ` is an event, which ci/demo marks on the timeline.
//!
//! Two VMs: `governed` (policy=psi), which is killed and restarted in phase 4, and `policy-off`, for phase 2 alone.

mod boot;
mod pressure;
mod redis;
mod shrink;
mod sizes;
mod volume;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use guest_tests::guest::GuestBuilder;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Image, Pool};

use crate::shrink::Spent;

const USAGE: &str =
    "usage: demo ADDRESS:PORT ADDRESS:PORT (metrics of the VM governed, and of the VM policy-off)";

/// What Prometheus and the logs call them.
const GOVERNED: &str = "governed";
const POLICY_OFF: &str = "policy-off";

fn main() -> ExitCode {
    let shown = demo();
    let kept = keep_logs();
    match shown.and(kept) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("  NOT SEEN: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [metrics, metrics_off] = arguments.as_slice() else { bail!("{USAGE}") };
    let pool = Pool::create("1280M")?;
    let vm = hybrid_guest(&pool, GOVERNED, metrics).pressure("psi");

    let guest = boot::show(&with_volume(&vm, &pool, "nvdimm").name(GOVERNED))?;
    let before = Spent::on(&guest, &pool)?;
    pressure::show(&guest, &policy_off(metrics_off))?;
    shrink::show(&guest, &pool, &before)?;
    volume::show(guest, &vm, &pool)
}

/// 512 MiB of DRAM, 384 of them at boot, 1 GiB of PM to grow into, and a swap to avoid.
fn hybrid_guest(pool: &Pool, vm_name: &str, metrics: &str) -> GuestBuilder {
    Guest::builder()
        .image(Image::Redis)
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size=1G", pool.name()))
        .cmdline("foreshore.zram=256M")
        .metrics(&format!("{metrics},vm={vm_name}"))
}

/// A disk out of the pool that also lends the guest its memory.
fn with_volume(vm: &GuestBuilder, pool: &Pool, interface: &str) -> GuestBuilder {
    let volume = format!("pool={},name=data,size=96M,interface={interface},create=on", pool.name());
    vm.clone().pm_volume(&volume)
}

/// The same guest in every way that bears on memory; its pool is its own, for a pool has one owner.
fn policy_off(metrics: &str) -> impl Fn() -> Result<Guest> {
    let metrics = metrics.to_owned();
    move || {
        let dir = this_tests_dir().join(POLICY_OFF);
        fs::create_dir_all(&dir)?;
        let pool = Pool::create_in(&dir, "1280M")?;
        hybrid_guest(&pool, POLICY_OFF, &metrics).name(POLICY_OFF).pressure("off").boot()
    }
}

/// Says that a claim holds, or ends the demo.
fn claim(holds: bool, what: &str) -> Result<()> {
    if !holds {
        bail!("{what}");
    }
    println!("  ok: {what}");
    Ok(())
}

/// Says that something happens now.
fn event(what: &str) {
    println!("* {what}");
}

fn phase(number: u32, what: &str) {
    println!("== {number}/5 {what}");
}

/// Consoles, the VMMs' logs and the list of acknowledged files, to where ci/nested/host brings them back from.
fn keep_logs() -> Result<()> {
    let Some(out) = std::env::var_os("OUT").map(PathBuf::from) else { return Ok(()) };
    for entry in fs::read_dir(this_tests_dir())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let name = path.file_name().and_then(|name| name.to_str()).context("A file without a name")?;
            fs::copy(&path, out.join(plain_name(name)))
                .with_context(|| format!("Cannot keep {}", path.display()))?;
        }
    }
    Ok(())
}

/// `governed.console.log` for `governed0.console.log`: a VM's files have the number of its start in their name, and
/// the names of this demo's VMs are unique without.
fn plain_name(file: &str) -> String {
    let (vm, rest) = file.split_once('.').unwrap_or((file, ""));
    format!("{}.{rest}", vm.trim_end_matches(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_called_after_their_vm() {
        assert_eq!(plain_name("governed0.console.log"), "governed.console.log");
        assert_eq!(plain_name("restarted-nvdimm12.vmm.log"), "restarted-nvdimm.vmm.log");
        assert_eq!(plain_name("acknowledged.log"), "acknowledged.log");
    }
}
