//! Measures the speed of the simulator for one day of a VM under `psi`, with and without skipped
//! reports. Also measures one day of each workload under each policy, and one day of 10,000 VMs.

use std::time::{Duration, Instant};

use balloon::controller::Rules;
use balloon::policy::{Policy, fixed};
use balloon::sim::{
    Governed, GuestConfig, HostPool, Random, Skip, VmSetup, Workload, run_fleet, run_host,
};
use balloon::{HostView, MIB, Tier, ZoneSizes};
use criterion::{Criterion, Throughput, criterion_group};

const DAY_MS: u64 = 86_400_000;
const HOSTS: usize = 1_000;
const VMS_PER_HOST: usize = 10;

fn setup(vm: usize) -> VmSetup {
    setup_of(Workload::Diurnal, vm)
}

fn setup_of(workload: Workload, vm: usize) -> VmSetup {
    let dram_bytes = 1024 * MIB;
    let zone = ZoneSizes::empty;
    let mut host = HostView { boot_bytes: dram_bytes, ..HostView::default() };
    host.zones = vec![zone(0, Tier::Dram, 256 * MIB), zone(1, Tier::Pm, 4096 * MIB)];
    let demand =
        workload.demand(&workload.defaults(), dram_bytes, DAY_MS, &mut Random::new(1, vm as u64));
    VmSetup {
        guest: GuestConfig { boot_bytes: dram_bytes, ..GuestConfig::default() },
        host,
        demand,
    }
}

fn governed(skip: Skip) -> Governed {
    Governed { policy: Policy::default(), rules: Rules::default(), skip }
}

fn days(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a day of one VM");
    group.sample_size(20);
    for (name, skip) in [("at rest skipped", Skip::AtRest), ("every report", Skip::Nothing)] {
        let governed = governed(skip);
        let run = || {
            run_host(vec![setup(0)], &mut HostPool::new(4096 * MIB), &governed, &mut ())
                .expect("in range")
        };
        group.throughput(Throughput::Elements(run()[0].decision_counts().steps));
        group.bench_function(name, |bencher| bencher.iter(run));
    }
    group.finish();
}

/// Prints the time in milliseconds that one day of each workload takes under each policy. The
/// fastest of three runs is used, because other load on the machine only adds time. Criterion would
/// need minutes for that many values, and times below a second do not need its precision.
fn table() {
    print!("{:12}", "ms for a day");
    Policy::NAMES.iter().for_each(|name| print!("{name:>10}"));
    println!();
    for workload in Workload::ALL {
        print!("{:12}", workload.name());
        for name in Policy::NAMES {
            let policy = match Policy::from_name(name).expect("listed") {
                Policy::Fixed(_) => Policy::Fixed(fixed::Params { size_bytes: (256 + 4096) * MIB }),
                policy => policy,
            };
            let governed = Governed { policy, ..governed(Skip::AtRest) };
            let run = || {
                let begun = Instant::now();
                run_host(
                    vec![setup_of(workload, 0)],
                    &mut HostPool::new(4096 * MIB),
                    &governed,
                    &mut (),
                )
                .expect("in range");
                begun.elapsed()
            };
            let least = (0..3).map(|_| run()).min().expect("three");
            print!("{:>10.1}", least.as_secs_f64() * 1e3);
        }
        println!();
    }
}

/// Runs `foreshore-sim --workload diurnal --duration 24h --hosts 1000 --vms 10 --policy psi` on all
/// processors. It runs only once, because Criterion would run it at least ten times.
fn fleet() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let host = |host| {
        let vms = (0..VMS_PER_HOST).map(|vm| setup(host * VMS_PER_HOST + vm)).collect();
        (vms, HostPool::new(4096 * MIB * VMS_PER_HOST as u64))
    };
    let (begun, cpu_before) = (Instant::now(), cpu_time());
    let outcome = run_fleet(HOSTS, &governed(Skip::AtRest), threads, host).expect("in range");
    let (wall, cpu) = (begun.elapsed(), cpu_time().saturating_sub(cpu_before));
    println!(
        "a day of {} VMs, {threads} threads: {:.1} s, {:.1} s of processors' time, {} steps",
        outcome.vms,
        wall.as_secs_f64(),
        cpu.as_secs_f64(),
        outcome.steps
    );
}

/// CPU time of this process, from fields 14 and 15 of /proc/self/stat in Linux's ticks of 10 ms
/// (proc(5)).
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let after_name = stat.rsplit_once(')').expect("a name in parentheses").1;
    let ticks = after_name.split_ascii_whitespace().skip(11).take(2);
    ticks.map(|ticks| Duration::from_millis(10) * ticks.parse::<u32>().expect("a number")).sum()
}

criterion_group!(benches, days);

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    // `cargo bench` passes `--bench`. Without this argument, Criterion only checks that its
    // benchmarks run.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has_filter = arguments.iter().any(|argument| !argument.starts_with('-'));
    if arguments.iter().any(|argument| argument == "--bench") && !has_filter {
        table();
        fleet();
    }
}
