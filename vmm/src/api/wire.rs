//! What goes over the wire where it differs from what the VM's owner is asked and answers.

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, check_pages};
use crate::vm::request::{PoolInfo, ResizeRequest, ResizeZoneRequest, VolumeInfo, ZoneInfo};

/// The answer to `vmm.ping`.
#[derive(Debug, Serialize, Deserialize)]
pub struct PingAnswer {
    /// The version with a `v` in front.
    pub build_version: String,
    /// The version.
    pub version: String,
    /// The VMM's process.
    pub pid: u32,
    /// What was built in.
    pub features: Vec<String>,
}

impl PingAnswer {
    /// This process' answer.
    pub fn of_this_process() -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let features = vec!["kvm".to_owned()];
        Self { build_version: format!("v{version}"), version, pid: std::process::id(), features }
    }
}

/// The body of `vm.resize`. Fields that this version does not know are passed over, as Cloud Hypervisor does.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ResizeBody {
    /// vCPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u8>,
    /// DRAM in bytes, boot part included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// Balloon in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
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

/// The body of `vm.resize-zone`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ResizeZoneBody {
    /// Which zone.
    pub id: String,
    /// Its size in bytes, boot part included.
    pub desired_ram: u64,
}

impl TryFrom<ResizeZoneBody> for ResizeZoneRequest {
    type Error = ConfigError;

    fn try_from(body: ResizeZoneBody) -> Result<Self, ConfigError> {
        let ResizeZoneBody { id, desired_ram } = body;
        // A zone of PM has no boot part, and may be asked to have nothing at all.
        if desired_ram != 0 {
            check_pages("vm.resize-zone", "desired_ram", desired_ram)?;
        }
        Ok(Self { id, desired_ram })
    }
}

/// The body of `vm.remove-device`.
#[derive(Debug, Serialize, Deserialize)]
pub struct RemoveDeviceBody {
    /// Which device.
    pub id: String,
}

/// The answer to `vm.memory`.
#[derive(Debug, Serialize, Deserialize)]
pub struct MemoryAnswer {
    /// Every zone.
    pub zones: Vec<ZoneInfo>,
}

/// The answer to `vm.volumes`.
#[derive(Debug, Serialize, Deserialize)]
pub struct VolumesAnswer {
    /// Every volume, in the order of the configuration.
    pub volumes: Vec<VolumeInfo>,
}

/// The answer to `pool.info`.
#[derive(Debug, Serialize, Deserialize)]
pub struct PoolsAnswer {
    /// Every pool that the VM has open, in the order of their paths.
    pub pools: Vec<PoolInfo>,
}
