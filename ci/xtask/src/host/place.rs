//! The choice between this machine and an emulated host.

use std::env;
use std::fmt::{self, Display};
use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::messages::refuse;

/// Variable that overrides the choice. The command gets it with the place where it runs.
pub(super) const PLACE: &str = "FORESHORE_HOST";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Direct,
    /// On an emulated host.
    Nested,
}

impl Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Direct => "direct",
            Self::Nested => "nested",
        })
    }
}

/// The place for commands, and the reason for it.
pub(super) fn choose() -> Result<(Place, String)> {
    let wanted = env::var_os(PLACE).unwrap_or_default();
    let place = match wanted.to_str() {
        Some("direct") => Place::Direct,
        Some("nested") => Place::Nested,
        Some("") => {
            return Ok(match why_emulated() {
                Some(reason) => (Place::Nested, reason.to_owned()),
                None => (Place::Direct, "hardware virtualization is here".to_owned()),
            });
        }
        _ => refuse!("{PLACE} is '{}': nested or direct", wanted.display()),
    };
    Ok((place, format!("{PLACE}={place}")))
}

/// The reason why commands cannot run here, if there is one. The device alone proves nothing: a
/// para-virtual KVM has it too, and does not run stock guests.
fn why_emulated() -> Option<&'static str> {
    let device = Path::new("/dev/kvm");
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !cpus.split_whitespace().any(|flag| flag == "svm" || flag == "vmx") {
        Some("no hardware virtualization here (no svm or vmx in /proc/cpuinfo)")
    } else if !device.exists() {
        Some("no /dev/kvm here (is the module kvm_amd or kvm_intel loaded?)")
    } else if fs::File::options().read(true).write(true).open(device).is_err() {
        Some("this user may not use /dev/kvm (the group kvm may)")
    } else {
        None
    }
}
