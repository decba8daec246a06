//! `--cpus boot=,max=`.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, ON, Refused, Syntax};

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--cpus",
    keys: &["boot", "max"],
    words: &[],
    refused: &[
        Refused { key: "topology", neutral: &[], why: "every vCPU is a core of one package" },
        Refused { key: "kvm_hyperv", neutral: OFF, why: "guests are Linux" },
        Refused {
            key: "max_phys_bits",
            neutral: &[],
            why: "the guest has the host's physical address width",
        },
        Refused { key: "affinity", neutral: &[], why: "use taskset on the vcpuN threads" },
        Refused { key: "features", neutral: &[], why: "the guest has the host's CPU features" },
        Refused { key: "nested", neutral: ON, why: "the guest has the host's CPU features" },
        Refused { key: "core_scheduling", neutral: OFF, why: "it is not implemented" },
    ],
};

/// The most vCPUs that APIC ids of 8 bits can name: 255 is broadcast.
pub const MAX_VCPUS: u8 = 254;

/// `--cpus boot=,max=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusConfig {
    /// vCPUs at boot.
    pub boot_vcpus: u8,
    /// vCPUs that may ever be.
    pub max_vcpus: u8,
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self { boot_vcpus: 1, max_vcpus: 1 }
    }
}

impl CpusConfig {
    /// Reads the flag's value; `max` is `boot` when it is not given.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let boot_vcpus = options.number("boot")?.unwrap_or(1);
        Ok(Self { boot_vcpus, max_vcpus: options.number("max")?.unwrap_or(boot_vcpus) })
    }

    /// At least one, and not more at boot than ever.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let range = |key, value: u8, least: u8| {
            if (least..=MAX_VCPUS).contains(&value) {
                return Ok(());
            }
            let (value, least, most) = (u64::from(value), u64::from(least), u64::from(MAX_VCPUS));
            Err(ConfigError::OutOfRange { flag: SYNTAX.flag, key, value, least, most })
        };
        range("boot", self.boot_vcpus, 1)?;
        range("max", self.max_vcpus, self.boot_vcpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        CpusConfig::parse(text).and_then(|cpus| cpus.validate()).unwrap_err().to_string()
    }

    #[test]
    fn max_is_boot_unless_given() {
        assert_eq!(CpusConfig::parse("boot=2"), Ok(CpusConfig { boot_vcpus: 2, max_vcpus: 2 }));
        assert_eq!(CpusConfig::parse("boot=2,max=4"), Ok(CpusConfig { boot_vcpus: 2, max_vcpus: 4 }));
        assert_eq!(CpusConfig::parse("max=4"), Ok(CpusConfig { boot_vcpus: 1, max_vcpus: 4 }));
        assert_eq!(CpusConfig::parse("boot=1,core_scheduling=off"), Ok(CpusConfig::default()));
    }

    #[test]
    fn counts_out_of_range_are_named() {
        assert_eq!(error("boot=0"), "--cpus: boot is 0, and must be 1 to 254");
        assert_eq!(error("boot=255"), "--cpus: boot is 255, and must be 1 to 254");
        assert_eq!(error("boot=4,max=2"), "--cpus: max is 2, and must be 4 to 254");
        assert!(error("boot=300").contains(r#"boot="300""#));
        assert!(error("boot=2,topology=1:2:1:1").contains("every vCPU is a core"));
    }
}
