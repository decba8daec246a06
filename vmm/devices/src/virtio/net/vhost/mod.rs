//! Frames that the host's kernel moves (Linux drivers/vhost/net.c): the same device, whose pairs of
//! queues are served by vhost-net. Its control queue, and what the guest sees of it, stay here.
//!
//! Why what is unplugged stays out of its reach: docs/design/decisions/0018-vhost-net.md.

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
pub(super) use worker::Worker;

const DEVICE: &str = "/dev/vhost-net";
/// Given when the module is loaded, and 0 if nothing is said since Linux 5.3.
const ZERO_COPY: &str = "/sys/module/vhost_net/parameters/experimental_zcopytx";

/// What the rings are like: the one part of what was negotiated that is vhost-net's business. The
/// header's length follows from the first of them; offloads are the tap's.
const RING_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Why vhost-net does not move a device's frames.
#[derive(Debug, Error)]
pub(super) enum VhostError {
    /// It is not there, or not ours.
    #[error("Cannot open {DEVICE}: is the module vhost_net loaded?")]
    Open(#[source] io::Error),
    #[error("{DEVICE} lacks the features {missing:#x}")]
    Features {
        /// What is missing, as bits.
        missing: u64,
    },
    /// It may send from pages that are not the guest's any more.
    #[error(
        "The module vhost_net was loaded with experimental_zcopytx={value}: it would keep pages that the guest gives back"
    )]
    ZeroCopy {
        /// What the parameter says.
        value: String,
    },
    #[error(
        "Cannot read {ZERO_COPY}, which says whether vhost_net keeps pages that the guest gives back"
    )]
    ZeroCopyUnknown(#[source] io::Error),
    #[error("{DEVICE} does not take {what}")]
    Call {
        what: &'static str,
        #[source]
        source: vhost::Error,
    },
    /// There is no memory, or it lies in too many places.
    #[error("Guest memory lies in {ranges} ranges, and must in 1 to {}", table::RANGES_MAX)]
    Ranges { ranges: usize },
    /// The kernel follows a ring from its first byte to its last by one address.
    #[error("The {part} at {address:#x}, of {len} bytes, lies in no single range of guest memory")]
    Ring {
        part: &'static str,
        /// Where the driver has it.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// No file of a tap's queue, or no event.
    #[error("The queues' files cannot be set up")]
    Io(#[from] io::Error),
}

/// How pairs of queues are handed to the kernel.
pub(super) fn connect() -> Connect {
    Arc::new(kernel::connect)
}

/// Whether this host's vhost-net can serve a device, and may.
pub(super) fn probe() -> Result<(), VhostError> {
    // Opening it loads the module, whose parameters are there from then on.
    check_features(kernel::features()?)?;
    check_zero_copy(fs::read_to_string(ZERO_COPY))
}

fn check_features(features: u64) -> Result<(), VhostError> {
    match RING_FEATURES & !features {
        0 => Ok(()),
        missing => Err(VhostError::Features { missing }),
    }
}

/// Pages that are sent from as they are would be sent from also when they are somebody else's.
fn check_zero_copy(parameter: io::Result<String>) -> Result<(), VhostError> {
    match parameter.map_err(VhostError::ZeroCopyUnknown)?.trim() {
        "0" => Ok(()),
        value => Err(VhostError::ZeroCopy { value: value.to_owned() }),
    }
}
