//! `--rng src=`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{Refused, Syntax};
use super::refused;

const REFUSED: &[Refused] = &[Refused {
    key: "id",
    neutral: &["__rng"],
    why: "it is neither removed nor counted, and needs no name",
}];

pub(super) const SYNTAX: Syntax =
    Syntax { flag: "--rng", keys: &["src"], words: &[], refused: &[refused::PCI, refused::SLOT, REFUSED] };

/// `--rng src=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngConfig {
    /// Where entropy comes from.
    pub src: PathBuf,
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { src: "/dev/urandom".into() }
    }
}

impl RngConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let src = SYNTAX.parse(text)?.path("src")?;
        Ok(src.map_or_else(Self::default, |src| Self { src }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_read() {
        assert_eq!(RngConfig::parse("src=/dev/hwrng").unwrap().src, PathBuf::from("/dev/hwrng"));
        assert_eq!(RngConfig::parse("iommu=off"), Ok(RngConfig::default()));
        let error = RngConfig::parse("source=/dev/random").unwrap_err();
        assert_eq!(error.to_string(), r#"--rng: unknown key "source"; the keys are src="#);
    }
}
