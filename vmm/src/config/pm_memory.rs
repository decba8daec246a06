//! `--pm-memory pool=,size=,guest_numa_node=,scrub_bandwidth=`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use pmem_volume::pool::DEFAULT_SCRUB_BYTES_PER_S;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Syntax;
use super::size::{self, Size};

const SYNTAX: Syntax = Syntax {
    flag: "--pm-memory",
    keys: &["pool", "size", "guest_numa_node", "scrub_bandwidth"],
    words: &[],
    refused: &[],
};

/// Node 0 is DRAM's.
pub const MIN_PM_NODE: u32 = 1;
/// Nodes are counted from 0 without a gap in SLIT, whose size grows with the square of their number.
pub const MAX_PM_NODE: u32 = 63;

/// The lowest bound of erasing: a chunk per second.
const MIN_SCRUB_BANDWIDTH: u64 = size::UNIT_BYTES;

/// `--pm-memory pool=,size=,guest_numa_node=,scrub_bandwidth=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmMemoryConfig {
    /// The pool.
    pub pool: PathBuf,
    /// The most that may be plugged.
    pub size: u64,
    /// Its node in the guest.
    #[serde(default = "default_node")]
    pub guest_numa_node: u32,
    /// Bytes per second that erasing what is given back to the pool takes of the media's bandwidth at most. 0: no bound.
    #[serde(default = "default_scrub_bandwidth")]
    pub scrub_bandwidth: u64,
}

fn default_scrub_bandwidth() -> u64 {
    DEFAULT_SCRUB_BYTES_PER_S.get()
}

fn default_node() -> u32 {
    MIN_PM_NODE
}

impl PmMemoryConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        Ok(Self {
            pool: options.required("pool", options.path("pool")?)?,
            size: options.required("size", options.size("size")?)?,
            guest_numa_node: options.number("guest_numa_node")?.unwrap_or_else(default_node),
            scrub_bandwidth: options.size("scrub_bandwidth")?.unwrap_or_else(default_scrub_bandwidth),
        })
    }

    /// The bound of erasing, if there is one.
    pub fn scrub_bytes_per_s(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.scrub_bandwidth)
    }

    /// A size within its bounds, a node of its own, and a bound that lets chunks through.
    pub fn validate(&self) -> Result<(), ConfigError> {
        size::check(SYNTAX.flag, "size", self.size)?;
        if (1..MIN_SCRUB_BANDWIDTH).contains(&self.scrub_bandwidth) {
            return Err(ConfigError::BadValue {
                flag: SYNTAX.flag,
                key: "scrub_bandwidth".to_owned(),
                value: self.scrub_bandwidth.to_string(),
                expected: format!("0, for no bound, or at least {} per second", Size(MIN_SCRUB_BANDWIDTH)),
            });
        }
        if (MIN_PM_NODE..=MAX_PM_NODE).contains(&self.guest_numa_node) {
            return Ok(());
        }
        Err(ConfigError::OutOfRange {
            flag: SYNTAX.flag,
            key: "guest_numa_node",
            value: u64::from(self.guest_numa_node),
            least: u64::from(MIN_PM_NODE),
            most: u64::from(MAX_PM_NODE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        PmMemoryConfig::parse(text).and_then(|pm| pm.validate()).unwrap_err().to_string()
    }

    #[test]
    fn the_flag_is_read() {
        let pm = PmMemoryConfig::parse("pool=/pm/pool,size=4G").unwrap();
        let expected = PmMemoryConfig {
            pool: "/pm/pool".into(),
            size: 4 << 30,
            guest_numa_node: 1,
            scrub_bandwidth: 1 << 30,
        };
        assert_eq!(pm, expected);
        assert!(pm.validate().is_ok());
        assert_eq!(PmMemoryConfig::parse("pool=/p,size=2M,guest_numa_node=2").unwrap().guest_numa_node, 2);
    }

    #[test]
    fn erasing_is_bounded_unless_it_is_said_otherwise() {
        let bound = |text: &str| {
            let pm = PmMemoryConfig::parse(&format!("pool=/p,size=2M{text}")).unwrap();
            pm.validate().unwrap();
            pm.scrub_bytes_per_s().map(NonZeroU64::get)
        };
        assert_eq!(bound(""), Some(1 << 30));
        assert_eq!(bound(",scrub_bandwidth=100M"), Some(100 << 20));
        assert_eq!(bound(",scrub_bandwidth=2M"), Some(2 << 20));
        assert_eq!(bound(",scrub_bandwidth=0"), None);
        let expected =
            "--pm-memory: scrub_bandwidth=\"1048576\" is not 0, for no bound, or at least 2 MiB per second";
        assert_eq!(error("pool=/p,size=2M,scrub_bandwidth=1M"), expected);
        assert!(error("pool=/p,size=2M,scrub_bandwidth=fast").contains("is not a size"));
        // In JSON it may be missing, as in what older clients send.
        let pm: PmMemoryConfig = serde_json::from_str(r#"{"pool": "/p", "size": 2097152}"#).unwrap();
        assert_eq!(pm.scrub_bandwidth, 1 << 30);
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("size=4G"), "--pm-memory: pool= is missing");
        assert_eq!(error("pool=/p"), "--pm-memory: size= is missing");
        assert_eq!(error("pool=/p,size=0"), "--pm-memory: size is 0, and must be at least 2 MiB");
        assert_eq!(
            error("pool=/p,size=2M,guest_numa_node=0"),
            "--pm-memory: guest_numa_node is 0, and must be 1 to 63"
        );
        assert!(error("pool=/p,size=2M,guest_numa_node=64").contains("is 64"));
        assert!(error("pool=/p,size=3G,hugepages=on").contains("unknown key"));
    }
}
