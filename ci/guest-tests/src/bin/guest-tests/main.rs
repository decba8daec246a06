//! All guest tests in one program. They run on any KVM host. On an emulated host, they run during a
//! single boot.

mod agent;
mod api;
mod balloon;
mod blocks;
mod book;
mod boot;
mod btt_cross;
mod clients;
mod confinement;
mod console;
mod cpus;
mod dax;
mod decisions;
mod dimms;
mod disk;
mod escaped;
mod esp;
mod file_systems;
mod firmware;
mod governor;
mod harness;
mod host_pages;
mod hostile;
mod hostile_rates;
mod hotplug;
mod hotplug_loop;
mod interfaces;
mod invalid_bodies;
mod invalid_input;
mod kernel_memory;
mod kernel_memory_agentless;
mod lost_memory;
mod memory;
mod net;
mod nodes;
mod nvdimms;
mod pmem;
mod policies;
mod pool_media;
mod pressure;
mod pressure_reliability;
mod pvpanic;
mod raw_volume;
mod signature;
mod too_small;
mod torn;
mod vhost_net;
mod volume;
mod volume_damaged;
mod volume_disk;
mod volume_flush;
mod volume_flush_scope;
mod volume_grow;
mod volume_hotplug;
mod volume_kernel;
mod volume_overcommit;
mod volume_remaining;
mod volume_spill;
mod volume_thin;
mod volume_tool;
mod volume_trim;
mod zones;

use guest_tests::runner;
use guest_tests::table::Row;

fn main() {
    let rows: Vec<Row> = [
        harness::TESTS,
        book::TESTS,
        boot::TESTS,
        agent::TESTS,
        api::TESTS,
        clients::TESTS,
        hotplug::TESTS,
        hotplug_loop::TESTS,
        cpus::TESTS,
        invalid_bodies::TESTS,
        invalid_input::TESTS,
        confinement::TESTS,
        console::TESTS,
        signature::TESTS,
        firmware::TESTS,
        balloon::TESTS,
        memory::TESTS,
        dimms::TESTS,
        host_pages::TESTS,
        net::TESTS,
        vhost_net::TESTS,
        nodes::TESTS,
        nvdimms::TESTS,
        pressure::TESTS,
        pressure_reliability::TESTS,
        governor::TESTS,
        policies::TESTS,
        too_small::TESTS,
        disk::TESTS,
        escaped::TESTS,
        volume::TESTS,
        volume_disk::TESTS,
        volume_damaged::TESTS,
        volume_flush::TESTS,
        volume_flush_scope::TESTS,
        volume_grow::TESTS,
        volume_hotplug::TESTS,
        volume_kernel::TESTS,
        volume_overcommit::TESTS,
        volume_remaining::TESTS,
        volume_spill::TESTS,
        volume_thin::TESTS,
        volume_tool::TESTS,
        volume_trim::TESTS,
        pool_media::TESTS,
        pvpanic::TESTS,
        raw_volume::TESTS,
        interfaces::TESTS,
        btt_cross::TESTS,
        dax::TESTS,
        pmem::TESTS,
        kernel_memory::TESTS,
        kernel_memory_agentless::TESTS,
        lost_memory::TESTS,
        torn::TESTS,
        file_systems::TESTS,
        hostile::TESTS,
        hostile_rates::TESTS,
    ]
    .concat();
    match runner::main(&rows) {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            eprintln!("guest-tests: {error:#}");
            std::process::exit(2);
        }
    }
}
