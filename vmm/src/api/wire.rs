//! JSON types of the API that differ from the requests and answers of the VM task.

use foreshore_config::section;
use serde::{Deserialize, Serialize};

use crate::vm::request::{PoolInfo, VolumeInfo, ZoneInfo};

#[derive(Debug, Serialize, Deserialize)]
pub struct PingAnswer {
    /// Version with a leading `v`.
    pub build_version: String,
    pub version: String,
    pub pid: u32,
    /// Features that were compiled in.
    pub features: Vec<String>,
}

impl PingAnswer {
    pub fn of_this_process() -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let features = vec!["kvm".to_owned()];
        Self { build_version: format!("v{version}"), version, pid: std::process::id(), features }
    }
}

section! {
    /// Body of `vm.remove-device`.
    pub struct RemoveDeviceBody: "vm.remove-device" {
        id: String => "Device",
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct MemoryAnswer {
    pub zones: Vec<ZoneInfo>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct VolumesAnswer {
    /// All volumes, in the order of the configuration.
    pub volumes: Vec<VolumeInfo>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct PoolsAnswer {
    /// All pools that the VM has open, in the order of their paths.
    pub pools: Vec<PoolInfo>,
}
