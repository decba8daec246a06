//! How fast guests are lived through: a day of one VM under `psi`, and each report of it.
//!
//! 10,000 VMs for a day, on all processors: `foreshore-sim --workload diurnal --duration 24h --hosts 1000 --vms 10 --policy psi`.

use balloon::controller::Rules;
use balloon::policy::Policy;
use balloon::sim::{Governed, GuestConfig, Random, Skip, VmSetup, Workload, run_host};
use balloon::{BLOCK_BYTES, HostView, MIB, Tier, ZoneId, ZoneSizes};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const DAY_MS: u64 = 86_400_000;

fn setup() -> VmSetup {
    let dram_bytes = 1024 * MIB;
    let zone = |id, tier, max_bytes| ZoneSizes {
        id: ZoneId(id),
        tier,
        guest_numa_node: id,
        block_bytes: BLOCK_BYTES,
        floor_bytes: 0,
        max_bytes,
        requested_bytes: 0,
        plugged_bytes: 0,
    };
    let mut host = HostView { boot_bytes: dram_bytes, ..HostView::default() };
    host.zones = vec![zone(0, Tier::Dram, 256 * MIB), zone(1, Tier::Pm, 4096 * MIB)];
    let workload = Workload::Diurnal;
    let demand = workload.demand(&workload.defaults(), dram_bytes, DAY_MS, &mut Random::new(1, 0));
    VmSetup { guest: GuestConfig { boot_bytes: dram_bytes, ..GuestConfig::default() }, host, demand }
}

fn days(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a day of one VM");
    group.sample_size(20);
    for (name, skip) in [("at rest skipped", Skip::AtRest), ("every report", Skip::Nothing)] {
        let governed = Governed { policy: Policy::default(), rules: Rules::default(), skip };
        let run = || run_host(vec![setup()], 4096 * MIB, &governed, &mut ()).expect("in range");
        group.throughput(Throughput::Elements(run()[0].decided().steps));
        group.bench_function(name, |bencher| bencher.iter(run));
    }
    group.finish();
}

criterion_group!(benches, days);
criterion_main!(benches);
