//! Creates the VMs, runs them under each policy, and prints the results.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::Context;
use balloon::controller::Rules;
use balloon::params::Unit;
use balloon::policy::{Policy, amf, dapper};
use balloon::sim::{
    Governed, GuestConfig, HostPool, Outcome, Random, Series, Skip, SwapDevice, VmSetup,
    WorkloadParams, replay, run_fleet, run_host,
};
use balloon::trace::Reader;
use balloon::{BLOCK_BYTES, HostView, Tier, ZoneSizes};

use foreshore_types::size::Size;

use super::args::{Format, NamedPolicy, NamedWorkload, Scenario};
use super::plot::{self, Panel, Plot};
use super::table;

/// Results of one policy.
pub(crate) struct Row {
    pub(crate) label: String,
    pub(crate) outcome: Outcome,
}

pub(crate) fn run(scenario: &Scenario) -> anyhow::Result<Vec<u8>> {
    let recorded = scenario.trace.as_deref().map(|path| read_trace(scenario, path)).transpose()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let all_bytes = match &recorded {
        Some((setup, _)) => setup.host.max_bytes(),
        None => hotplug_and_pm(scenario).iter().sum(),
    };
    let policies = policies(scenario, all_bytes);
    let mut rows = Vec::new();
    let mut drawing = None;
    for NamedPolicy { label, policy, rules } in policies {
        let skip = if scenario.every_report { Skip::Nothing } else { Skip::AtRest };
        let governed = Governed { policy, rules, skip };
        let setup = |host| match &recorded {
            Some((setup, pool)) => (vec![setup.clone(); scenario.vms as usize], pool.clone()),
            None => generated(scenario, host),
        };
        let outcome = run_fleet(scenario.hosts as usize, &governed, threads, setup)
            .with_context(|| format!("policy {label}"))?;
        if scenario.plot.is_some() {
            let (setups, mut pool) = setup(0);
            let plot = drawing.get_or_insert_with(|| empty_plot(scenario, &setups[0]));
            let mut series = Series::new(plot.duration_ms, plot::INTERVALS);
            run_host(setups, &mut pool, &governed, &mut series)?;
            let points = series.points().to_vec();
            let interval_ms = series.interval_ms();
            plot.panels.push(Panel { policy: label.clone(), interval_ms, points });
        }
        rows.push(Row { label, outcome });
    }
    if let (Some(file), Some(plot)) = (&scenario.plot, &drawing) {
        file.write(plot)?;
    }
    match scenario.format {
        Format::Table => Ok(table::text(&rows).into_bytes()),
        Format::Json => table::json(&rows),
        Format::Csv => table::csv(&rows),
    }
}

/// Plot of the first VM without any panels.
fn empty_plot(scenario: &Scenario, setup: &VmSetup) -> Plot {
    let run = match scenario.trace.as_deref().and_then(Path::file_name) {
        // A file name may contain characters that an image cannot contain.
        Some(name) => format!("Trace {}", name.to_string_lossy().replace(char::is_control, "?")),
        None => format!("Workload {}", scenario.workload.label),
    };
    let duration_ms = setup.demand.end().0;
    let size = |tier| {
        let zones = setup.host.zones.iter().filter(|zone| zone.tier == tier);
        Size(zones.map(|zone| zone.max_bytes).sum())
    };
    let mut subtitle = format!(
        "guest with {} of DRAM, up to {} more and {} of PM, swap: {}",
        Size(setup.guest.boot_bytes),
        size(Tier::Dram),
        size(Tier::Pm),
        scenario.swap
    );
    let vms = scenario.hosts * scenario.vms;
    if vms > 1 {
        subtitle += &format!("; first of {vms} VMs");
    }
    let duration = match duration_ms.is_multiple_of(1000) {
        true => Unit::Ms.show(duration_ms),
        false => format!("{:.1}s", duration_ms as f64 / 1e3),
    };
    let title = format!("{run} for {duration}");
    Plot { title, subtitle, duration_ms, panels: Vec::new() }
}

/// Scaled high watermark of `amf` and `dapper` in the default comparison, in thousandths of DRAM.
/// On the machine in the AMF paper, it was 24 GiB (24 MiB x 1024) of 64 GiB. With their default
/// factor, both policies request all PM immediately on current kernels.
const WATERMARK_SHARE: u64 = 375;

/// Policies from the command line, or all policies by default. In the latter case, `fixed` keeps
/// the largest size that the guest can have, so its row shows a guest with all memory for the whole
/// run.
fn policies(scenario: &Scenario, all_bytes: u64) -> Vec<NamedPolicy> {
    if !scenario.policy.is_empty() {
        return scenario.policy.clone();
    }
    let named = Policy::NAMES.into_iter().filter_map(|name| {
        let mut policy = Policy::from_name(name)?;
        let mut label = name.to_owned();
        match &mut policy {
            Policy::Fixed(params) => params.size_bytes = all_bytes,
            Policy::Amf(amf::Params { watermark_share_permille: share, .. })
            | Policy::Dapper(dapper::Params { watermark_share_permille: share, .. }) => {
                *share = WATERMARK_SHARE;
                label.push_str(&format!(",watermark-share={WATERMARK_SHARE}"));
            }
            Policy::Psi(_) | Policy::Pmb(_) | Policy::Memorage(_) | Policy::Off => {}
        }
        Some(NamedPolicy { label, policy, rules: Rules::default() })
    });
    named.collect()
}

fn hotplug_and_pm(scenario: &Scenario) -> [u64; 2] {
    let hotplug_bytes = scenario.hotplug.unwrap_or(scenario.dram / 4 / BLOCK_BYTES * BLOCK_BYTES);
    [hotplug_bytes, scenario.pm.unwrap_or(scenario.dram * 4)]
}

fn guest(scenario: &Scenario) -> GuestConfig {
    let size_bytes = scenario.swap_size.unwrap_or(scenario.dram.saturating_mul(4));
    GuestConfig {
        boot_bytes: scenario.dram,
        swap: SwapDevice::from_name(&scenario.swap, size_bytes).expect("one of the names"),
        plug_delay_ms: scenario.plug_delay,
        plug_block_us: scenario.plug_block_us,
        unplug_block_us: scenario.unplug_block_us,
        refused_permille: scenario.refused,
        demotes: !scenario.no_demotion,
        storage_bytes_per_day: scenario.storage_writes,
        endurance: scenario.endurance,
        ..GuestConfig::default()
    }
}

/// Creates the VMs of a host, and returns them with the host's pool.
fn generated(scenario: &Scenario, host: usize) -> (Vec<VmSetup>, HostPool) {
    let tiers = [Tier::Dram, Tier::Pm].into_iter().zip(hotplug_and_pm(scenario)).zip(0..);
    let zone = |((tier, max_bytes), id)| ZoneSizes::empty(id, tier, max_bytes);
    let mut view = HostView { boot_bytes: scenario.dram, ..HostView::default() };
    view.zones = tiers.map(zone).filter(|zone| zone.max_bytes > 0).collect();
    let NamedWorkload { workload, params, .. } = &scenario.workload;
    let setup = |vm| {
        let mut random = Random::new(scenario.seed, host as u64 * scenario.vms + vm);
        let demand = workload.demand(params, scenario.dram, scenario.duration, &mut random);
        VmSetup { guest: guest(scenario), host: view.clone(), demand }
    };
    let pool_bytes = pool_bytes(scenario);
    let pool = match &scenario.storage {
        Some(params) => {
            // The VMs of all hosts use the streams from 0.
            let mut random = Random::new(scenario.seed, u64::MAX - host as u64);
            HostPool::with_storage(pool_bytes, params, scenario.duration, &mut random)
        }
        None => HostPool::new(pool_bytes),
    };
    ((0..scenario.vms).map(setup).collect(), pool)
}

/// Size of the pool of a host with generated demand.
pub(crate) fn pool_bytes(scenario: &Scenario) -> u64 {
    let [_, pm_bytes] = hotplug_and_pm(scenario);
    scenario.pool.unwrap_or(pm_bytes.saturating_mul(scenario.vms))
}

fn read_trace(scenario: &Scenario, path: &Path) -> anyhow::Result<(VmSetup, HostPool)> {
    let failed = || format!("cannot replay {}", path.display());
    let file = File::open(path).with_context(failed)?;
    let mut trace = Reader::new(BufReader::new(file)).with_context(failed)?;
    // A trace does not show which memory is touched, so the default touches of a workload are used.
    let touched = WorkloadParams::default();
    let replayed =
        replay(&mut trace, &guest(scenario), touched.touches_per_s, touched.hot_permille);
    if trace.is_cut_off() {
        eprintln!("foreshore-sim: the incomplete last line of {} is ignored", path.display());
    }
    let (setup, recorded) = replayed.with_context(failed)?;
    Ok((setup, recorded.pool(scenario.pool, scenario.vms)))
}
