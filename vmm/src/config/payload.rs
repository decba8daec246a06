//! `--kernel`, `--initramfs`, `--cmdline`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, Refused, Syntax};

/// What the API's section may have beside the fields below; on the command line each is a flag of its own.
pub(super) const SYNTAX: Syntax = Syntax {
    flag: "payload",
    keys: &["kernel", "initramfs", "cmdline"],
    words: &[],
    refused: &[
        Refused { key: "firmware", neutral: &[], why: "guests are booted by kernel" },
        Refused { key: "fw_cfg_config", neutral: &[], why: "there is no firmware configuration device" },
        Refused { key: "igvm", neutral: &[], why: "confidential guests are not supported" },
        Refused { key: "host_data", neutral: &[], why: "confidential guests are not supported" },
        Refused { key: "svsm", neutral: OFF, why: "confidential guests are not supported" },
    ],
};

/// The longest command line that Linux takes on x86 (COMMAND_LINE_SIZE), its end mark included.
pub const MAX_CMDLINE_BYTES: usize = 2048;

/// `--kernel`, `--initramfs`, `--cmdline`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadConfig {
    /// An ELF kernel with a PVH note, or a bzImage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line, as the user wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
}

impl PayloadConfig {
    /// There is a kernel, and the command line fits into what it can take.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.kernel.is_none() {
            return Err(ConfigError::MissingFlag {
                flag: "--kernel",
                why: "there is no firmware to boot from a disk with",
            });
        }
        let cmdline = self.cmdline.as_deref().unwrap_or_default();
        if cmdline.len() >= MAX_CMDLINE_BYTES {
            return Err(ConfigError::Conflict {
                flag: "--cmdline",
                reason: format!(
                    "the command line is {} bytes long, and Linux takes at most {}",
                    cmdline.len(),
                    MAX_CMDLINE_BYTES - 1
                ),
            });
        }
        if cmdline.contains('\0') {
            return Err(ConfigError::Conflict {
                flag: "--cmdline",
                reason: "the command line has a zero byte in it, where it would end".to_owned(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_cmdline(cmdline: &str) -> PayloadConfig {
        PayloadConfig { kernel: Some("/k".into()), initramfs: None, cmdline: Some(cmdline.to_owned()) }
    }

    #[test]
    fn a_kernel_is_needed() {
        let error = PayloadConfig::default().validate().unwrap_err();
        assert!(error.to_string().starts_with("--kernel is missing"), "{error}");
    }

    #[test]
    fn the_command_line_fits_or_is_refused() {
        assert!(with_cmdline(&"x".repeat(2047)).validate().is_ok());
        let error = with_cmdline(&"x".repeat(2048)).validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "--cmdline: the command line is 2048 bytes long, and Linux takes at most 2047"
        );
        assert!(with_cmdline("a\0b").validate().is_err());
    }
}
