//! `--numa`.

use foreshore_config::{ConfigError, Item, Refused, bounds, digits, section};

pub(super) const FLAG: &str = NumaConfig::FLAG;

const REFUSED: &[Refused] = &[
    Refused { key: "sgx_epc_sections", neutral: &[], why: "SGX is not implemented" },
    Refused { key: "pci_segments", neutral: &["0", "[0]"], why: "the VM has one PCI segment, 0" },
    Refused { key: "device_id", neutral: &[], why: "device passthrough is not supported" },
];

/// Highest node number. Nodes in the SLIT are numbered from 0 without gaps. Its size grows with the
/// square of the number of nodes.
pub const MAX_NODE: u32 = 63;
/// Distance of a node to itself, by definition. Linux treats no other distance as local (ACPI 6.5,
/// 5.2.17).
pub(super) const LOCAL_DISTANCE: u8 = 10;
/// Largest valid distance. 255 means "unreachable".
pub(super) const MAX_DISTANCE: u8 = 254;

section! {
    /// Distance from one node to another.
    #[derive(Copy)]
    pub struct NumaDistance: "--numa" {
        destination: u32 => "Other node",
        distance: u8 => "Distance as in SLIT, where 10 is the node itself",
    }
}

section! {
    /// NUMA node of the guest.
    pub struct NumaConfig: "--numa" "Nodes of the guest" {
        guest_numa_id (range (0..=MAX_NODE)): u32 => "Number of the node in the guest",
        cpus: Option<Vec<u8>> => "vCPUs of the node",
        distances: Option<Vec<NumaDistance>> => "Distances of the node to other nodes, as in the ACPI table SLIT",
        memory_zones: Option<Vec<String>> => "Zones of --memory-zone in the node",
    }
    refused &[REFUSED];
}

impl Item for NumaDistance {
    const SYNTAX: &'static str = "[N@D,N@D]";
    const EXPECTED: &'static str = "a list of nodes and distances, as 1@20:2@28";

    fn read_item(text: &str) -> Option<Vec<Self>> {
        let (destination, distance) = text.split_once('@')?;
        Some(vec![Self { destination: digits(destination)?, distance: digits(distance)? }])
    }
}

impl NumaConfig {
    /// Checks that numbers are within their bounds. [`Topology`](super::Topology) checks the nodes
    /// together.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        for NumaDistance { destination, distance } in self.distances() {
            let is_self = *destination == self.guest_numa_id;
            let (least, most) = if is_self {
                (LOCAL_DISTANCE, LOCAL_DISTANCE)
            } else {
                (LOCAL_DISTANCE + 1, MAX_DISTANCE)
            };
            if !(least..=most).contains(distance) {
                let because = if is_self { ": a node's distance to itself is 10" } else { "" };
                let reason = format!(
                    "the distance of node {} to node {destination} is {distance}, and must be {}{because}",
                    self.guest_numa_id,
                    bounds(least, most)
                );
                return Err(ConfigError::Conflict { flag: FLAG, reason });
            }
        }
        Ok(())
    }

    pub(super) fn cpus(&self) -> &[u8] {
        self.cpus.as_deref().unwrap_or_default()
    }

    pub(super) fn distances(&self) -> &[NumaDistance] {
        self.distances.as_deref().unwrap_or_default()
    }

    pub(super) fn memory_zones(&self) -> &[String] {
        self.memory_zones.as_deref().unwrap_or_default()
    }
}

/// Refuses a node number above [`MAX_NODE`].
pub(super) fn check_node(key: &'static str, node: u32) -> Result<(), ConfigError> {
    if node <= MAX_NODE {
        return Ok(());
    }
    let (value, least, most) = (u64::from(node), 0, u64::from(MAX_NODE));
    Err(ConfigError::OutOfRange { flag: FLAG, key, value, least, most })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        NumaConfig::parse(text).and_then(|numa| numa.validate()).unwrap_err().to_string()
    }

    #[test]
    fn both_list_formats_of_cloud_hypervisor_are_parsed() {
        let old = NumaConfig::parse(
            "guest_numa_id=1,cpus=1-3:7,distances=0@15:2@25,memory_zones=mem0:mem2,pci_segments=[0]",
        )
        .unwrap();
        let distance = |destination, distance| NumaDistance { destination, distance };
        let expected = NumaConfig {
            guest_numa_id: 1,
            cpus: Some(vec![1, 2, 3, 7]),
            distances: Some(vec![distance(0, 15), distance(2, 25)]),
            memory_zones: Some(vec!["mem0".to_owned(), "mem2".to_owned()]),
        };
        assert_eq!(old, expected);
        assert!(old.validate().is_ok());
        let new = "guest_numa_id=1,cpus=[1-3,7],distances=[0@15,2@25],memory_zones=[mem0,mem2]";
        assert_eq!(NumaConfig::parse(new).unwrap(), expected);
        let json = serde_json::to_string(&expected).unwrap();
        assert!(json.contains(r#"{"destination":0,"distance":15}"#), "{json}");
        assert_eq!(serde_json::from_str::<NumaConfig>(&json).unwrap(), expected);
    }

    #[test]
    fn malformed_lists_are_refused() {
        assert_eq!(error("cpus=0"), "--numa: guest_numa_id= is missing");
        for cpus in ["a", "3-1", "0-", "256", "1::2", "+1"] {
            let expected =
                format!("--numa: cpus={cpus:?} is not a list of numbers, as 0-2:5 or [0-2,5]");
            assert_eq!(error(&format!("guest_numa_id=0,cpus={cpus}")), expected);
        }
        for distances in ["1", "1@", "@20", "1@256", "1@20:"] {
            assert!(
                error(&format!("guest_numa_id=0,distances={distances}")).contains("as 1@20:2@28")
            );
        }
        assert!(error("guest_numa_id=0,memory_zones=a::b").contains("a list of ids"));
    }

    #[test]
    fn numbers_out_of_bounds_are_named() {
        assert_eq!(error("guest_numa_id=64"), "--numa: guest_numa_id is 64, and must be 0 to 63");
        for (distance, bound) in
            [(0, "11 to 254"), (9, "11 to 254"), (10, "11 to 254"), (255, "11 to 254")]
        {
            assert_eq!(
                error(&format!("guest_numa_id=0,distances=1@{distance}")),
                format!(
                    "--numa: the distance of node 0 to node 1 is {distance}, and must be {bound}"
                )
            );
        }
        let to_itself = "the distance of node 0 to node 0 is 20, and must be 10: a node's distance to itself is 10";
        assert!(error("guest_numa_id=0,distances=0@20").contains(to_itself));
        assert!(
            NumaConfig::parse("guest_numa_id=0,distances=0@10:1@11:2@254")
                .unwrap()
                .validate()
                .is_ok()
        );
    }

    #[test]
    fn unsupported_keys_are_refused_with_the_reason() {
        for option in ["sgx_epc_sections=epc0", "pci_segments=[1]", "device_id=x"] {
            let expected = format!("--numa: {option} is not supported by foreshore: ");
            assert!(error(&format!("guest_numa_id=0,{option}")).starts_with(&expected), "{option}");
        }
    }
}
