//! Tests of the zones and nodes derived from flags.

use std::num::NonZeroU64;

use super::*;
use crate::config::{BalloonConfig, CpusConfig, MemoryConfig, test_config};

const GIB: u64 = 1 << 30;

/// Configuration for `flags`, pairs of flag and value as on a command line.
fn config(flags: &[&str]) -> VmConfig {
    let mut config = test_config();
    config.payload.kernel = Some("/vmlinuz".into());
    for flag in flags {
        let (name, value) = flag.split_once(' ').unwrap();
        match name {
            "--cpus" => config.cpus = CpusConfig::parse(value).unwrap(),
            "--memory" => {
                let zones = std::mem::take(&mut config.memory.zones);
                config.memory = MemoryConfig { zones, ..MemoryConfig::parse(value).unwrap() };
            }
            "--memory-zone" => {
                config.memory.size = 0;
                config.memory.zones.push(MemoryZoneConfig::parse(value).unwrap());
            }
            "--numa" => config.numa.push(NumaConfig::parse(value).unwrap()),
            "--pm-memory" => {
                config
                    .pm_memory
                    .push(PmMemoryConfig::parse(&format!("pool=/p,size=1G{value}")).unwrap());
            }
            _ => panic!("{name}"),
        }
    }
    config
}

fn topology(flags: &[&str]) -> Topology {
    let config = config(flags);
    config.validate().unwrap();
    Topology::of(&config).unwrap()
}

fn error(flags: &[&str]) -> String {
    Topology::of(&config(flags)).unwrap_err().to_string()
}

fn matrix(topology: &Topology) -> Vec<Vec<u8>> {
    let nodes = 0..topology.nodes().len() as u32;
    nodes
        .clone()
        .map(|from| nodes.clone().map(|to| topology.distance(from, to)).collect())
        .collect()
}

const TWO_NODES: [&str; 5] = [
    "--cpus boot=4",
    "--memory-zone id=a,size=1G",
    "--memory-zone id=b,size=1G",
    "--numa guest_numa_id=0,cpus=0-1,memory_zones=a",
    "--numa guest_numa_id=1,cpus=2-3,memory_zones=b",
];

fn two_nodes<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TWO_NODES, more].concat()
}

#[test]
fn single_zone_is_one_node_with_all_vcpus() {
    let topology = topology(&["--cpus boot=2,max=4"]);
    assert_eq!(topology.nodes(), [Node { cpus: vec![0, 1, 2, 3], near: 0 }]);
    assert_eq!(topology.zones().len(), 1);
    let zone = &topology.zones()[0];
    assert_eq!((zone.id.as_str(), zone.guest_node, zone.boot_bytes), ("dram", 0, 512 << 20));
    assert_eq!(matrix(&topology), [[10]]);
}

#[test]
fn pm_has_its_own_node_without_vcpus() {
    let topology = topology(&["--cpus boot=2", "--pm-memory "]);
    assert_eq!(
        topology.nodes(),
        [Node { cpus: vec![0, 1], near: 0 }, Node { cpus: vec![], near: 0 }]
    );
    let pm = &topology.zones()[1];
    assert_eq!(
        (pm.id.as_str(), pm.tier, pm.guest_node, pm.hotplug_bytes),
        ("pm", Tier::Pm, 1, GIB)
    );
    assert_eq!(matrix(&topology), [[10, 17], [17, 10]]);
}

#[test]
fn default_distances_equal_those_of_servers_with_two_sockets() {
    let topology = topology(&two_nodes(&[
        "--pm-memory ,near=0",
        "--pm-memory ,near=1",
        "--numa guest_numa_id=2,distances=0@17",
    ]));
    let zones: Vec<_> =
        topology.zones().iter().map(|zone| (zone.id.as_str(), zone.guest_node)).collect();
    assert_eq!(zones, [("a", 0), ("b", 1), ("pm", 2), ("pm1", 3)]);
    let near: Vec<_> = topology.nodes().iter().map(|node| node.near).collect();
    assert_eq!(near, [0, 1, 0, 1]);
    assert_eq!(
        matrix(&topology),
        [[10, 20, 17, 27], [20, 10, 27, 17], [17, 27, 10, 27], [27, 17, 27, 10]]
    );
}

#[test]
fn configured_distances_select_the_near_node_of_pm() {
    let topology = topology(&two_nodes(&[
        "--pm-memory ,guest_numa_node=3",
        "--pm-memory ,guest_numa_node=2",
        "--numa guest_numa_id=2,distances=0@30:1@40:3@50",
        "--numa guest_numa_id=3,distances=0@40:1@30:2@50",
    ]));
    assert_eq!(topology.nodes()[2].near, 0);
    assert_eq!(topology.nodes()[3].near, 1);
    assert_eq!(
        matrix(&topology),
        [[10, 20, 30, 40], [20, 10, 40, 30], [30, 40, 10, 50], [40, 30, 50, 10]]
    );
}

#[test]
fn memory_without_vcpus_is_near_the_nearest_node_with_vcpus() {
    let topology = topology(&[
        "--cpus boot=2",
        "--memory-zone id=a,size=1G",
        "--memory-zone id=b,size=1G",
        "--memory-zone id=c,size=1G",
        "--numa guest_numa_id=0,cpus=0,memory_zones=a",
        "--numa guest_numa_id=1,cpus=1",
        "--numa guest_numa_id=2,memory_zones=[b,c],distances=[0@30,1@21]",
    ]);
    let nodes: Vec<_> = topology.zones().iter().map(|zone| zone.guest_node).collect();
    assert_eq!(nodes, [0, 2, 2]);
    assert_eq!(topology.nodes()[2], Node { cpus: vec![], near: 1 });
}

#[test]
fn unplaced_later_vcpus_are_in_the_first_node() {
    let topology = topology(&[
        "--cpus boot=2,max=4",
        "--memory-zone id=a,size=1G",
        "--numa guest_numa_id=0,cpus=0,memory_zones=a",
        "--numa guest_numa_id=1,cpus=1:3",
    ]);
    assert_eq!(topology.nodes()[0].cpus, [0, 2]);
    assert_eq!(topology.nodes()[1].cpus, [1, 3]);
}

#[test]
fn zone_keys_are_in_the_zone_specification() {
    let topology = topology(&[
        "--memory size=0,hotplug_method=virtio-mem",
        "--memory-zone id=a,size=1G,host_numa_node=1,hotplug_size=2G,hotplugged_size=512M",
    ]);
    let expected = ZoneSpec {
        id: "a".to_owned(),
        host_node: Some(1),
        boot_bytes: GIB,
        hotplug_bytes: 2 * GIB,
        hotplugged_bytes: GIB / 2,
        plug_bytes_per_s: NonZeroU64::new(GIB),
        ..ZoneSpec::default()
    };
    assert_eq!(topology.zones(), [expected]);
}

#[test]
fn zones_without_valid_node_are_refused() {
    for (more, expected) in [
        (
            "--memory-zone id=c,size=2M",
            "--numa: zone c is in no node: memory_zones= of one must name it",
        ),
        ("--memory-zone id=a,size=2M", "--memory-zone: two zones have the id a"),
        ("--pm-memory ,id=a", "--pm-memory: two zones have the id a"),
        (
            "--numa guest_numa_id=2,memory_zones=c",
            "--numa: memory_zones of node 2: no such DRAM zone: \"c\"; existing DRAM zones: a, b",
        ),
        ("--numa guest_numa_id=2,memory_zones=b", "--numa: zone b is in node 1 and in node 2"),
        ("--numa guest_numa_id=1", "--numa: node 1 is given twice"),
        ("--numa guest_numa_id=2", "--numa: node 2 has neither vCPUs nor memory"),
    ] {
        assert_eq!(error(&two_nodes(&[more])), expected);
    }
    let mut with_balloon = config(&["--memory-zone id=balloon,size=64M"]);
    assert!(Topology::of(&with_balloon).is_ok());
    with_balloon.balloon = Some(BalloonConfig::parse("floor=32M").unwrap());
    let error_of = |config: &VmConfig| Topology::of(config).unwrap_err().to_string();
    assert_eq!(error_of(&with_balloon), "--memory-zone: two zones have the id balloon");
    assert_eq!(
        error(&two_nodes(&["--pm-memory ", "--numa guest_numa_id=2,memory_zones=pm"])),
        "--numa: memory_zones of node 2: no such DRAM zone: \"pm\"; existing DRAM zones: a, b; set the node of a \
         PM zone with its key guest_numa_node"
    );
}

#[test]
fn vcpus_without_valid_node_are_refused() {
    let of = |cpus: &str, first: &str, second: &str| {
        let first = format!("--numa guest_numa_id=0,memory_zones=a,cpus={first}");
        let second = format!("--numa guest_numa_id=1,cpus={second}");
        error(&[cpus, "--memory-zone id=a,size=1G", &first, &second])
    };
    assert_eq!(of("--cpus boot=4", "0-1", "1-3"), "--numa: vCPU 1 is in node 0 and in node 1");
    assert_eq!(of("--cpus boot=4", "0:1:1", "2-3"), "--numa: vCPU 1 is in node 0 twice");
    assert_eq!(
        of("--cpus boot=4", "0", "2-3"),
        "--numa: vCPU 1 is in no node: cpus= of one must name it"
    );
    assert_eq!(of("--cpus boot=2,max=4", "0", "1:4"), "--numa: cpus is 4, and must be 0 to 3");
}

#[test]
fn packages_beyond_apic_ids_are_refused() {
    let nodes: Vec<String> = (0u8..3)
        .map(|node| format!("--numa guest_numa_id={node},cpus={}-{}", node * 80, node * 80 + 79))
        .collect();
    let flags: Vec<&str> =
        ["--cpus boot=240"].into_iter().chain(nodes.iter().map(String::as_str)).collect();
    assert_eq!(
        error(&flags),
        "--numa: 3 nodes with up to 80 vCPUs: each is a package, and they exceed the maximum of 255 APIC IDs"
    );
    let ids: Vec<u8> = topology(&TWO_NODES).places().iter().map(|place| place.apic_id).collect();
    assert_eq!(ids, [0, 1, 8, 9]);
}

#[test]
fn nodes_are_numbered_as_in_linux() {
    assert_eq!(
        error(&["--pm-memory ,guest_numa_node=2"]),
        "--numa: node 2 exists, but not node 1: Linux numbers nodes from 0 without gaps"
    );
    assert_eq!(
        error(&[
            "--cpus boot=1",
            "--memory-zone id=a,size=1G",
            "--numa guest_numa_id=0,memory_zones=a",
            "--numa guest_numa_id=1,cpus=0"
        ]),
        "--numa: node 0 has no vCPUs, but node 1 has some: nodes with vCPUs must have the lowest numbers"
    );
    assert!(
        error(&two_nodes(&["--pm-memory ,guest_numa_node=1"]))
            .contains("is 1, which has vCPUs or another zone")
    );
    assert!(
        error(&two_nodes(&["--pm-memory ,guest_numa_node=2", "--pm-memory ,guest_numa_node=2"]))
            .contains("guest_numa_node of zone pm1 is 2")
    );
}

#[test]
fn invalid_distances_are_refused() {
    for (more, expected) in [
        (
            &["--pm-memory ", "--numa guest_numa_id=2,distances=3@20"][..],
            "--numa: distances of node 2: no such node: 3; the last node is 2",
        ),
        (
            &["--pm-memory ", "--numa guest_numa_id=2,distances=0@20:0@20"],
            "--numa: the distance from node 2 to node 0 is given twice",
        ),
        (
            &[
                "--pm-memory ",
                "--pm-memory ",
                "--numa guest_numa_id=2,distances=3@20",
                "--numa guest_numa_id=3,distances=2@21",
            ],
            "--numa: the distance of node 2 to node 3 is 20, and back it is 21: it must be the same both ways",
        ),
        (&["--pm-memory ,near=2"], "--pm-memory: near=2 of node 2: node 2 has no vCPUs"),
        (&["--pm-memory ,near=9"], "--pm-memory: near=9 of node 2: node 9 has no vCPUs"),
        (
            &["--pm-memory ,near=1", "--numa guest_numa_id=2,distances=0@17:1@28"],
            "--pm-memory: near=1 of node 2: node 0 is nearer, at a distance of 17 instead of 28",
        ),
    ] {
        assert_eq!(error(&two_nodes(more)), expected);
    }
}
