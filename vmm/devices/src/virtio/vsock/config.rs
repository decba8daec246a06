//! `--vsock`.

use std::path::PathBuf;

use foreshore_config::refused_keys as refused;
use foreshore_config::{ConfigError, name, section};

use crate::unix_socket::check_path;

/// First context id that a guest may have. 0, 1 and 2 are reserved (virtio 1.3, 5.10.4).
pub const MIN_CID: u32 = 3;
/// Last context id that a guest may have. The next one is `VMADDR_CID_ANY`.
pub const MAX_CID: u32 = u32::MAX - 1;

section! {
    /// Sockets between guest and host.
    pub struct VsockConfig: "--vsock" "Sockets between guest and host, required by the agent" {
        cid (range (MIN_CID..=MAX_CID)): u32 => "Context id of the guest",
        socket: PathBuf => "Unix socket on the host",
        id: Option<String> => "Name in the API, instead of _vsock0",
    }
    refused &[refused::PCI, refused::SLOT];
}

impl VsockConfig {
    /// Kind of the device in ids and metrics.
    pub const KIND: &'static str = "vsock";

    /// Checks the context id, the device id and the length of the socket's path.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        self.id.as_ref().map_or(Ok(()), |id| name::check(Self::FLAG, "id", id))?;
        check_path(Self::FLAG, &self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        VsockConfig::parse(text).and_then(|vsock| vsock.validate()).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
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
