//! Subcommands `add-*` and `remove-device`. Devices are described in the same way as on the VMM's
//! command line.

use anyhow::Result;
use clap::Args;
use foreshore::api::Client;
use foreshore::config::{DiskConfig, GivenFd, NetConfig, PmVolumeConfig, PmemConfig, VsockConfig};
use foreshore_config::ConfigError;
use serde::Serialize;
use serde_json::json;

use crate::WrongCommandLine;
use crate::output::text_of;

/// Device to add.
#[derive(Debug, Args)]
pub(crate) struct Device {
    /// Value of the device's flag, such as path=/d.raw,readonly=on
    #[arg(value_name = "CONFIG")]
    config: String,
}

impl Device {
    pub(crate) async fn add_disk(&self, vmm: &Client) -> Result<String> {
        let disk = refusing(DiskConfig::parse(&self.config))?;
        add(vmm, "vm.add-disk", &disk).await
    }

    pub(crate) async fn add_pmem(&self, vmm: &Client) -> Result<String> {
        let pmem = refusing(PmemConfig::parse(&self.config))?;
        add(vmm, "vm.add-pmem", &pmem).await
    }

    pub(crate) async fn add_pm_volume(&self, vmm: &Client) -> Result<String> {
        let volume = refusing(PmVolumeConfig::parse(&self.config))?;
        add(vmm, "vm.add-pm-volume", &volume).await
    }

    pub(crate) async fn add_vsock(&self, vmm: &Client) -> Result<String> {
        let vsock = refusing(VsockConfig::parse(&self.config))?;
        add(vmm, "vm.add-vsock", &vsock).await
    }

    /// Sends the descriptors in `fd=` with the request, because their numbers are valid only in
    /// this process.
    pub(crate) async fn add_net(&self, vmm: &Client) -> Result<String> {
        let mut net = refusing(NetConfig::parse(&self.config))?;
        let fds: Vec<_> = std::mem::take(&mut net.fds).iter().map(GivenFd::number).collect();
        let body = serde_json::to_string(&net)?;
        text_of(&vmm.put_with("vm.add-net", body, &fds).await?)
    }
}

/// Removes the dashes of the flag from an error message, because here the flag is a subcommand.
fn refusing<T>(parsed: Result<T, ConfigError>) -> Result<T> {
    parsed.map_err(|error| {
        WrongCommandLine(error.to_string().trim_start_matches("--").to_owned()).into()
    })
}

/// Adds a device. If the VM runs, the answer contains the device's PCI address.
async fn add(vmm: &Client, call: &str, device: &impl Serialize) -> Result<String> {
    text_of(&vmm.put(call, Some(serde_json::to_string(device)?)).await?)
}

pub(crate) async fn remove(vmm: &Client, id: &str) -> Result<String> {
    text_of(&vmm.put("vm.remove-device", Some(json!({ "id": id }).to_string())).await?)
}
