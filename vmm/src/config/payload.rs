//! `--firmware` or `--kernel`, `--initramfs`, `--cmdline`.

use std::path::PathBuf;

use foreshore_config::{ConfigError, OFF, Refused, section};

/// JSON fields of the section that are refused. On the command line they would be separate flags.
const REFUSED: &[Refused] = &[
    Refused { key: "fw_cfg_config", neutral: &[], why: "fw_cfg is not implemented" },
    Refused { key: "igvm", neutral: &[], why: "confidential guests are not supported" },
    Refused { key: "host_data", neutral: &[], why: "confidential guests are not supported" },
    Refused { key: "svsm", neutral: OFF, why: "confidential guests are not supported" },
];

/// Longest command line that Linux accepts on x86 (COMMAND_LINE_SIZE), including the terminating
/// zero.
pub const MAX_CMDLINE_BYTES: usize = 2048;

section! {
    /// Software that the guest boots. On the command line, each key is a flag of its own.
    pub struct PayloadConfig: "payload" {
        firmware: Option<PathBuf> => "ELF file with a PVH note that boots from a disk",
        kernel: Option<PathBuf> => "ELF kernel with a PVH note, or a bzImage",
        initramfs: Option<PathBuf> => "Initial RAM file system",
        cmdline: Option<String> => "Kernel command line",
    }
    refused &[REFUSED];
    defaults true;
}

impl PayloadConfig {
    /// Checks that there is either a kernel or firmware, and that the command line is not too long.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match (&self.kernel, &self.firmware) {
            (None, None) => {
                return Err(ConfigError::MissingFlag {
                    flag: "--kernel",
                    why: "the VM needs a kernel, or a --firmware that boots from a disk",
                });
            }
            (Some(_), Some(_)) => {
                let reason = "cannot be combined with --kernel".to_owned();
                return Err(ConfigError::Conflict { flag: "--firmware", reason });
            }
            _ => {}
        }
        let cmdline = self.cmdline.as_deref().unwrap_or_default();
        if cmdline.len() >= MAX_CMDLINE_BYTES {
            return Err(ConfigError::Conflict {
                flag: "--cmdline",
                reason: format!(
                    "the command line has {} bytes, and must have at most {}",
                    cmdline.len(),
                    MAX_CMDLINE_BYTES - 1
                ),
            });
        }
        if cmdline.contains('\0') {
            return Err(ConfigError::Conflict {
                flag: "--cmdline",
                reason: "the command line contains a NUL byte, which would end it".to_owned(),
            });
        }
        Ok(())
    }

    /// Warns about keys that have no effect with firmware.
    pub fn warnings(&self) -> Vec<String> {
        let unused =
            [("--initramfs", self.initramfs.is_some()), ("--cmdline", self.cmdline.is_some())];
        let unused =
            unused.into_iter().filter(|(_, is_there)| self.firmware.is_some() && *is_there);
        unused
            .map(|(flag, _)| {
                format!("{flag}: ignored without --kernel; a --firmware finds its own on the disk")
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_cmdline(cmdline: &str) -> PayloadConfig {
        PayloadConfig {
            kernel: Some("/k".into()),
            cmdline: Some(cmdline.to_owned()),
            ..PayloadConfig::default()
        }
    }

    #[test]
    fn payload_without_kernel_is_refused() {
        let error = PayloadConfig::default().validate().unwrap_err();
        assert!(error.to_string().starts_with("--kernel is missing"), "{error}");
    }

    #[test]
    fn firmware_replaces_kernel_initramfs_and_cmdline() {
        let mut payload = PayloadConfig { firmware: Some("/f".into()), ..PayloadConfig::default() };
        assert!(payload.validate().is_ok() && payload.warnings().is_empty());
        payload.cmdline = Some("quiet".to_owned());
        payload.initramfs = Some("/i".into());
        assert!(payload.validate().is_ok());
        let warnings = payload.warnings();
        assert!(warnings[0].starts_with("--initramfs: ") && warnings[1].starts_with("--cmdline: "));
        payload.kernel = Some("/k".into());
        let error = payload.validate().unwrap_err().to_string();
        assert!(error.starts_with("--firmware: ") && error.contains("--kernel"), "{error}");
        payload.firmware = None;
        assert!(payload.warnings().is_empty());
    }

    #[test]
    fn too_long_command_line_is_refused() {
        assert!(with_cmdline(&"x".repeat(2047)).validate().is_ok());
        let error = with_cmdline(&"x".repeat(2048)).validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "--cmdline: the command line has 2048 bytes, and must have at most 2047"
        );
        assert!(with_cmdline("a\0b").validate().is_err());
    }
}
