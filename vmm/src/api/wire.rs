//! Types of the API's JSON that differ from the requests and answers of the VM's owner.

use foreshore_config::size::check_pages;
use foreshore_config::{ConfigError, section};
use serde::{Deserialize, Serialize};

use crate::vm::request::{PoolInfo, ResizeRequest, ResizeZoneRequest, VolumeInfo, ZoneInfo};

#[derive(Debug, Serialize, Deserialize)]
pub struct PingAnswer {
    /// Version with a leading `v`.
    pub build_version: String,
    pub version: String,
    pub pid: u32,
    /// Compiled features.
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
    /// Body of `vm.resize`.
    pub struct ResizeBody: "vm.resize" {
        desired_vcpus: Option<u8> => "vCPUs",
        desired_ram: Option<u64> => "DRAM in bytes, boot part included",
        desired_balloon: Option<u64> => "Balloon in bytes",
    }
    defaults true;
}

impl TryFrom<ResizeBody> for ResizeRequest {
    type Error = ConfigError;

    fn try_from(body: ResizeBody) -> Result<Self, ConfigError> {
        if let Some(bytes) = body.desired_ram {
            check_pages("vm.resize", "desired_ram", bytes)?;
        }
        let ResizeBody { desired_vcpus, desired_ram, desired_balloon } = body;
        Ok(Self { desired_vcpus, desired_ram, desired_balloon })
    }
}

section! {
    /// Body of `vm.resize-zone`.
    pub struct ResizeZoneBody: "vm.resize-zone" {
        id: String => "Zone",
        desired_ram: u64 => "Size in bytes, boot part included",
    }
}

impl TryFrom<ResizeZoneBody> for ResizeZoneRequest {
    type Error = ConfigError;

    fn try_from(body: ResizeZoneBody) -> Result<Self, ConfigError> {
        let ResizeZoneBody { id, desired_ram } = body;
        // A PM zone has no boot part, and can be resized to 0.
        if desired_ram != 0 {
            check_pages("vm.resize-zone", "desired_ram", desired_ram)?;
        }
        Ok(Self { id, desired_ram })
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
    /// Every volume, in the order of the configuration.
    pub volumes: Vec<VolumeInfo>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct PoolsAnswer {
    /// Every pool that the VM has open, in the order of their paths.
    pub pools: Vec<PoolInfo>,
}
