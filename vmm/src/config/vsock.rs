//! `--vsock cid=,socket=,id=`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Syntax;
use super::refused;
use super::{name, socket};

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--vsock",
    keys: &["cid", "socket", "id"],
    words: &[],
    refused: &[refused::PCI, refused::SLOT],
};

/// The first context id that a guest may have (virtio 1.3, 5.10.4: 0, 1 and 2 are reserved).
pub const MIN_CID: u32 = 3;
/// The last one: the next is `VMADDR_CID_ANY`.
pub const MAX_CID: u32 = u32::MAX - 1;

/// `--vsock cid=,socket=,id=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context id, 3 and up.
    pub cid: u32,
    /// The unix socket of the host's side.
    pub socket: PathBuf,
    /// What the API calls it; `_vsock0` otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

impl VsockConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        Ok(Self {
            cid: options.required("cid", options.number("cid")?)?,
            socket: options.required("socket", options.path("socket")?)?,
            id: options.text("id").map(str::to_owned),
        })
    }

    /// A context id that a guest may have, and a path that fits into an address.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(MIN_CID..=MAX_CID).contains(&self.cid) {
            let (value, least, most) = (u64::from(self.cid), u64::from(MIN_CID), u64::from(MAX_CID));
            return Err(ConfigError::OutOfRange { flag: SYNTAX.flag, key: "cid", value, least, most });
        }
        self.id.as_ref().map_or(Ok(()), |id| name::check(SYNTAX.flag, "id", id))?;
        socket::check_path(SYNTAX.flag, &self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        VsockConfig::parse(text).and_then(|vsock| vsock.validate()).unwrap_err().to_string()
    }

    #[test]
    fn the_flag_is_read() {
        let vsock = VsockConfig::parse("cid=3,socket=/run/vm.vsock,id=v,iommu=off").unwrap();
        let id = Some("v".to_owned());
        assert_eq!(vsock, VsockConfig { cid: 3, socket: "/run/vm.vsock".into(), id });
        assert!(vsock.validate().is_ok());
    }

    #[test]
    fn errors_name_the_bound() {
        assert_eq!(error("cid=2,socket=/s"), "--vsock: cid is 2, and must be 3 to 4294967294");
        assert!(error("cid=4294967295,socket=/s").contains("cid is 4294967295"));
        assert_eq!(error("socket=/s"), "--vsock: cid= is missing");
        assert_eq!(error("cid=3"), "--vsock: socket= is missing");
        assert!(error(&format!("cid=3,socket=/{}", "s".repeat(107))).contains("at most 107"));
    }
}
