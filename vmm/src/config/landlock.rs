//! `--landlock` and `--landlock-rules`.

use std::path::PathBuf;

use clap::ValueEnum;
use foreshore_config::{section, words};

/// Condition under which VMs are limited to their files (`--landlock`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LandlockMode {
    /// The VM of the command line is limited if the kernel has Landlock.
    #[default]
    Auto,
    /// All VMs are limited. Without Landlock, no VM starts.
    On,
    /// VMs are limited only if their client requests it.
    Off,
}

words! {
    pub enum LandlockAccess {
        Read = "r" "r",
        Write = "w" "w",
        ReadWrite = "rw" ("wr") "rw" "wr",
    }
}

section! {
    /// Files for devices that are added to a running VM.
    pub struct LandlockConfig: "--landlock-rules" "Files for devices that are added later" {
        path: PathBuf => "File, or folder with all files below it",
        access: LandlockAccess => "Read (r), write (w) or both",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_is_parsed() {
        use LandlockAccess::{Read, ReadWrite, Write};
        for (text, access) in [("r", Read), ("w", Write), ("rw", ReadWrite), ("wr", ReadWrite)] {
            let rule = LandlockConfig::parse(&format!("path=/a,access={text}")).unwrap();
            assert_eq!(rule, LandlockConfig { path: "/a".into(), access });
        }
        let error = |text| LandlockConfig::parse(text).unwrap_err().to_string();
        assert_eq!(error("path=/a"), "--landlock-rules: access= is missing");
        assert_eq!(error("access=r"), "--landlock-rules: path= is missing");
        let unknown = error("path=/a,access=x");
        assert!(unknown.contains("\"x\"") && unknown.contains("rw"), "{unknown}");
    }
}
