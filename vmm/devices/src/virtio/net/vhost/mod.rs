//! Transfer of frames by the host's kernel (Linux drivers/vhost/net.c). vhost-net serves the
//! device's queue pairs. This process still handles the control queue and the configuration.
//!
//! docs/design/decisions/0018-vhost-net.md explains why vhost-net cannot access unplugged memory.

mod engine;
mod kernel;
mod table;
#[cfg(test)]
mod tests;
mod worker;

use std::fs;
use std::io;
use std::sync::Arc;

use thiserror::Error;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub(super) use engine::Connect;
pub use kernel::VhostFiles;
pub(super) use worker::Worker;

const DEVICE: &str = "/dev/vhost-net";
/// Parameter that is set when the module is loaded. Its default is 0 since Linux 5.3.
const ZERO_COPY: &str = "/sys/module/vhost_net/parameters/experimental_zcopytx";

/// Negotiated features that affect vhost-net. They concern only the format of rings and headers,
/// and the first two determine the length of the header. Offloads are handled by the tap.
const RING_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Reason why vhost-net cannot transfer a device's frames.
#[derive(Debug, Error)]
pub enum VhostError {
    /// The device does not exist or is not accessible.
    #[error("cannot open {DEVICE}; is the module vhost_net loaded?")]
    Open(#[source] io::Error),
    /// The files are opened with the device. A file that the kernel fails to reset is closed.
    #[error("the kernel refused to reset a file of {DEVICE}; reboot the VM to open another")]
    NoFile,
    #[error("{DEVICE} lacks the features {missing:#x}")]
    Features {
        /// Missing features as a bit mask.
        missing: u64,
    },
    /// vhost-net might send data from pages that the guest has already returned.
    #[error(
        "module vhost_net was loaded with experimental_zcopytx={value}, so it could use pages that the guest returned; reload it with experimental_zcopytx=0"
    )]
    ZeroCopy {
        /// Value of the module parameter.
        value: String,
    },
    #[error(
        "cannot read {ZERO_COPY}, which shows if vhost_net could use pages that the guest returned"
    )]
    ZeroCopyUnknown(#[source] io::Error),
    #[error("{DEVICE} rejected {operation}")]
    Call {
        operation: &'static str,
        #[source]
        source: vhost::Error,
    },
    /// Guest memory has no range or too many ranges.
    #[error("guest memory has {ranges} ranges; vhost-net supports 1 to {}", table::RANGES_MAX)]
    Ranges { ranges: usize },
    /// A part of a ring is not contiguous in this process, but the kernel accesses each part by a
    /// single address.
    #[error("{part} at {address:#x} of {len} bytes is not in one range of guest memory")]
    Ring {
        part: &'static str,
        /// Guest-physical address of the part.
        address: u64,
        /// Length of the part.
        len: u64,
    },
    /// The file of a tap's queue cannot be duplicated or an event cannot be created.
    #[error("cannot set up the files of the queues")]
    Io(#[from] io::Error),
}

/// Returns the function that passes the `pairs` queue pairs of a device to the kernel. The device
/// takes its files from `unused`, and opens those that are missing.
pub(super) fn connect(pairs: u16, unused: &VhostFiles) -> Result<Connect, VhostError> {
    let idle = kernel::IdleFiles::take(pairs, unused)?;
    Ok(Arc::new(move |setup| kernel::connect(&idle, setup)))
}

/// Checks that vhost-net on this host has all required features and can be used safely. If `unused`
/// has files, the check was made when they were opened.
pub(super) fn probe(unused: &VhostFiles) -> Result<(), VhostError> {
    if !unused.is_empty() {
        return Ok(());
    }
    // Opening the device loads the module. The module's parameters can be read only after that.
    check_features(kernel::features()?)?;
    check_zero_copy(fs::read_to_string(ZERO_COPY))
}

fn check_features(features: u64) -> Result<(), VhostError> {
    match RING_FEATURES & !features {
        0 => Ok(()),
        missing => Err(VhostError::Features { missing }),
    }
}

/// Checks that zero copy is off. With zero copy, the kernel could send data from pages that already
/// have another owner.
fn check_zero_copy(parameter: io::Result<String>) -> Result<(), VhostError> {
    match parameter.map_err(VhostError::ZeroCopyUnknown)?.trim() {
        "0" => Ok(()),
        value => Err(VhostError::ZeroCopy { value: value.to_owned() }),
    }
}
