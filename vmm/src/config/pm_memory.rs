//! `--pm-memory pool=,size=,guest_numa_node=`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Syntax;
use super::size;

const SYNTAX: Syntax =
    Syntax { flag: "--pm-memory", keys: &["pool", "size", "guest_numa_node"], words: &[], refused: &[] };

/// Node 0 is DRAM's.
pub const MIN_PM_NODE: u32 = 1;
/// Nodes are counted from 0 without a gap in SLIT, whose size grows with the square of their number.
pub const MAX_PM_NODE: u32 = 63;

/// `--pm-memory pool=,size=,guest_numa_node=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmMemoryConfig {
    /// The pool.
    pub pool: PathBuf,
    /// The most that may be plugged.
    pub size: u64,
    /// Its node in the guest.
    #[serde(default = "default_node")]
    pub guest_numa_node: u32,
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
        })
    }

    /// A size within its bounds, and a node of its own.
    pub fn validate(&self) -> Result<(), ConfigError> {
        size::check(SYNTAX.flag, "size", self.size)?;
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
        assert_eq!(pm, PmMemoryConfig { pool: "/pm/pool".into(), size: 4 << 30, guest_numa_node: 1 });
        assert!(pm.validate().is_ok());
        assert_eq!(PmMemoryConfig::parse("pool=/p,size=2M,guest_numa_node=2").unwrap().guest_numa_node, 2);
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
