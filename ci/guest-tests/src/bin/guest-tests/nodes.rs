//! Tests of NUMA nodes: the guest's kernel should see the configured nodes, and plugged memory
//! should belong to the right node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, Kernel, Pool, this_tests_kernel};
use serde_json::json;

use crate::decisions::{decisions, wait_for_agent};
use crate::zones::{MIB, wait_until_plugged, zone};

guest_tests::tests![
    guest_sees_two_sockets_with_pm_each: 180 on [V6_12, V6_1 extended] x 2,
    shortage_of_a_node_is_met_with_near_pm: 240 x 2,
];

const PLUG_LIMIT: Duration = Duration::from_secs(60);

/// Zones with their sizes in MiB and their nodes.
const PLUGGED: [(&str, u64, u32); 4] =
    [("a", 128, 0), ("b", 256, 1), ("pm", 128, 2), ("pm1", 256, 3)];

/// Guest with two nodes. Each has DRAM, a vCPU and PM nearby.
fn two_sockets(pool: &Pool) -> Result<Guest> {
    let near = format!("pool={},size=256M,near=0", pool.name());
    let figures = "id=pm1,read_latency=400,write_latency=200,bandwidth=2000M";
    let far = format!("pool={},size=256M,near=1,{figures}", pool.name());
    Guest::builder()
        .memory("size=0,hotplug_method=virtio-mem")
        .argument(
            "--memory-zone",
            "id=a,size=256M,hotplug_size=256M,hotplugged_size=128M,host_numa_node=0",
        )
        .argument("--memory-zone", "id=b,size=256M,hotplug_size=256M")
        .argument("--numa", "guest_numa_id=0,cpus=0,memory_zones=a,distances=1@21")
        .argument("--numa", "guest_numa_id=1,cpus=[1],memory_zones=b")
        .pm_memory(&near)
        .pm_memory(&far)
        .pressure("off")
        .boot()
}

/// Same as [`two_sockets`], but without hotpluggable DRAM, so that the policy's first decision is
/// to plug PM. The policy considers each node.
fn two_sockets_short_of_dram(pool: &Pool) -> Result<Guest> {
    Guest::builder()
        .memory("size=0,hotplug_method=virtio-mem")
        .argument("--memory-zone", "id=a,size=512M")
        .argument("--memory-zone", "id=b,size=256M")
        .argument("--numa", "guest_numa_id=0,cpus=0,memory_zones=a,distances=1@21")
        .argument("--numa", "guest_numa_id=1,cpus=[1],memory_zones=b")
        .pm_memory(&format!("pool={},size=256M,near=0", pool.name()))
        .pm_memory(&format!("pool={},size=256M,near=1,id=pm1", pool.name()))
        .pressure("dapper,watermark-scale=4")
        .boot()
}

fn node_file(guest: &Guest, file: &str) -> Result<String> {
    let text = guest.run(&format!("cat /sys/devices/system/node/{file}"))?;
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn check(guest: &Guest, files: &[(&str, &str)]) -> Result<()> {
    for (file, expected) in files {
        let found = node_file(guest, file)?;
        ensure!(found == *expected, "{file} is {found:?} instead of {expected:?}");
    }
    Ok(())
}

fn node_mib(guest: &Guest, node: u32) -> Result<u64> {
    let meminfo = format!("/sys/devices/system/node/node{node}/meminfo");
    let text =
        guest.run(&format!("awk '$3 == \"MemTotal:\" {{ print int($4 / 1024) }}' {meminfo}"))?;
    text.trim().parse().with_context(|| format!("MemTotal of node {node}: {text:?}"))
}

fn plug_all(guest: &Guest) -> Result<()> {
    for (id, mib, _) in PLUGGED {
        let boot_mib = if id.starts_with("pm") { 0 } else { 256 };
        let body = json!({ "id": id, "desired_ram": (boot_mib + mib) * MIB });
        guest.put("vm.resize-zone", body)?;
    }
    for (id, mib, _) in PLUGGED {
        guest.wait_until(&format!("{mib} MiB of {id} are plugged"), PLUG_LIMIT, || {
            let zone = zone(guest, id)?;
            Ok(zone.plugged_bytes == mib * MIB && zone.state == "reached")
        })?;
    }
    Ok(())
}

fn tiers(guest: &Guest) -> Result<Vec<String>> {
    let script = "cd /sys/devices/virtual/memory_tiering && for tier in $(ls -d memory_tier[0-9]* | sort -V); do \
                  cat $tier/nodelist; done";
    Ok(guest.run(script)?.lines().map(str::to_owned).collect())
}

/// Returns true if demotion is enabled. The agent controls this setting.
fn is_demotion_on(guest: &Guest) -> Result<bool> {
    Ok(guest.run("cat /sys/kernel/mm/numa/demotion_enabled")?.trim() == "true")
}

/// Returns the nodes that reclaim of `node` may demote pages to, in order of preference. They are
/// taken from the last such line in the kernel log (mm/memory-tiers.c, dump_demotion_targets).
fn demotion_targets(guest: &Guest, node: u32) -> Result<String> {
    let script = format!("dmesg | sed -n 's/.*Demotion targets for Node {node}: //p' | tail -n 1");
    Ok(guest.run(&script)?.trim().to_owned())
}

fn guest_sees_two_sockets_with_pm_each() -> Result<()> {
    let near = "preferred: 2, fallback: 2-3";
    // Linux 6.1 shows the latencies and bandwidths. Its memory tiers depend only on drivers, and
    // virtio-mem does not set a tier, so demotion has no target.
    let (tiers_of_the_kernel, targets_of_the_kernel) = match this_tests_kernel() {
        Kernel::V6_1 => (&["0-3"][..], [""; 4]),
        _ => (&["0-1", "2", "3"][..], [near, near, "preferred: 3, fallback: 3", "null"]),
    };
    let pool = Pool::create("1G")?;
    let guest = two_sockets(&pool)?;
    wait_until_plugged(&guest, "a", 128 * MIB, PLUG_LIMIT)?;
    let dram = [node_mib(&guest, 0)?, node_mib(&guest, 1)?];
    check(&guest, &[("has_cpu", "0-1"), ("has_memory", "0-1"), ("possible", "0-3")])?;
    ensure!(!is_demotion_on(&guest)?, "The guest demotes pages without PM");
    plug_all(&guest)?;
    check(
        &guest,
        &[
            ("has_memory", "0-3"),
            ("node0/cpulist", "0"),
            ("node1/cpulist", "1"),
            ("node2/cpulist", ""),
            ("node0/distance", "10 21 17 28"),
            ("node1/distance", "21 10 28 17"),
            ("node2/distance", "17 28 10 28"),
            ("node3/distance", "28 17 28 10"),
        ],
    )?;
    // 1. The memory of each zone is in the zone's node and in no other node.
    for ((id, mib, node), before) in PLUGGED.into_iter().zip([dram[0] - 128, dram[1], 0, 0]) {
        let after = node_mib(&guest, node)?;
        ensure!(
            after - before == mib,
            "{id}: node {node} had {before} MiB and has {after} MiB with {mib} MiB plugged"
        );
    }
    // 2. Latencies and bandwidths in the HMAT, as seen from the near node.
    for (node, near, read_ns, write_ns, mb_per_s) in [
        (0, 0, 90, 86, 40_000),
        (1, 1, 90, 86, 40_000),
        (2, 0, 305, 90, 6600),
        (3, 1, 400, 200, 2000),
    ] {
        let dir = format!("node{node}/access0/initiators");
        for (file, expected) in [
            ("read_latency", read_ns),
            ("write_latency", write_ns),
            ("read_bandwidth", mb_per_s),
            ("write_bandwidth", mb_per_s),
        ] {
            check(&guest, &[(&format!("{dir}/{file}"), &expected.to_string())])?;
        }
        let initiators = guest.run(&format!("cd /sys/devices/system/node/{dir} && ls -d node*"))?;
        ensure!(
            initiators.trim() == format!("node{near}"),
            "Node {node} has the nearest initiators {initiators:?}"
        );
    }
    // 3. Memory tiers.
    let tiers = tiers(&guest)?;
    ensure!(
        tiers == tiers_of_the_kernel,
        "The memory tiers are {tiers:?} instead of {tiers_of_the_kernel:?}"
    );
    // 4. Reclaim may demote pages from DRAM to PM.
    guest
        .wait_until("the agent has switched demotion on", PLUG_LIMIT, || is_demotion_on(&guest))?;
    for (node, expected) in (0..).zip(targets_of_the_kernel) {
        let targets = demotion_targets(&guest, node)?;
        ensure!(targets == expected, "Node {node} demotes to {targets:?} instead of {expected:?}");
    }
    guest.no_kernel_complaints()
}

/// A load on the CPU of node 1 first allocates memory from node 1, which has half the memory of
/// node 0. Node 1 therefore runs short first, and the PM near it should be plugged first.
fn shortage_of_a_node_is_met_with_near_pm() -> Result<()> {
    /// Size that exceeds the memory of node 1, but not that of both nodes.
    const LOAD_MIB: u64 = 320;
    let pool = Pool::create("1G")?;
    let guest = two_sockets_short_of_dram(&pool)?;
    wait_for_agent(&guest, "live")?;
    ensure!(zone(&guest, "pm1")?.requested_bytes == 0, "PM is requested without a shortage");
    let _load =
        guest.start_script(PLUG_LIMIT, &format!("exec taskset 2 guest-tool hog {LOAD_MIB}"))?;
    guest.wait_until("the PM near node 1 is plugged", PLUG_LIMIT, || {
        Ok(zone(&guest, "pm1")?.plugged_bytes > 0)
    })?;
    let decisions = decisions(&guest)?;
    let grows = decisions.iter().filter(|decision| decision["direction"] == "grow");
    let first =
        grows.min_by_key(|decision| decision["seq"].as_u64()).context("No decision grew a zone")?;
    ensure!(first["near"] == 1, "The first grow is for another node: {first}");
    let requested = |id: &str| {
        let targets = first["targets"].as_array().context("The decision has no targets")?;
        let target = targets.iter().find(|target| target["zone"] == id);
        target
            .and_then(|target| target["requested_bytes"].as_u64())
            .with_context(|| format!("The decision has no target {id}: {first}"))
    };
    let (near, far) = (requested("pm1")?, requested("pm")?);
    ensure!(
        near > 0 && (far == 0 || near == 256 * MIB),
        "{near} bytes are near, {far} bytes are far"
    );
    guest.wait_until("the node near node 1 has the plugged PM", PLUG_LIMIT, || {
        Ok(node_mib(&guest, 3)? > 0)
    })?;
    guest.no_kernel_complaints()
}
