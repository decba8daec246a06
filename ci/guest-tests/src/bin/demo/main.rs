//! What Foreshore is for, shown once from beginning to end on a real KVM host: `demo METRICS METRICS_WITHOUT`.
//!
//! Runs where the VMs run; ci/demo has Prometheus scrape the two addresses meanwhile. Every claim is looked at and
//! fails the demo if it does not hold. A line that begins with `* ` is an event, which ci/demo marks on the timeline.

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
    "usage: demo ADDRESS:PORT ADDRESS:PORT (metrics of the VM, and of the one without a governor)";

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
    let [metrics, metrics_without] = arguments.as_slice() else { bail!("{USAGE}") };
    let pool = Pool::create("1280M")?;
    let vm = hybrid_guest(&pool, "demo", metrics).pressure("psi");

    let guest = boot::show(&with_volume(&vm, &pool, "nvdimm").name("governed"))?;
    let before = Spent::on(&guest, &pool)?;
    pressure::show(&guest, &without_governor(metrics_without))?;
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
fn without_governor(metrics: &str) -> impl Fn() -> Result<Guest> {
    let metrics = metrics.to_owned();
    move || {
        let dir = this_tests_dir().join("without-governor");
        fs::create_dir_all(&dir)?;
        let pool = Pool::create_in(&dir, "1280M")?;
        hybrid_guest(&pool, "without-governor", &metrics).name("without-governor").pressure("off").boot()
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
            let name = path.file_name().context("A file without a name")?;
            fs::copy(&path, out.join(name)).with_context(|| format!("Cannot keep {}", path.display()))?;
        }
    }
    Ok(())
}
