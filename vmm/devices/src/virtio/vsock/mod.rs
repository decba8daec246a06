//! virtio-vsock (virtio 1.3, 5.10): sockets that connect the guest to unix sockets on the host.
//!
//! The scheme is the same as in Firecracker and Cloud Hypervisor, so their clients can be used:
//!
//! - Host to guest: a client connects to the device's socket, writes `CONNECT <port>\n`, and reads
//!   `OK <host port>\n`. The stream is then connected to the listener on that port in the guest. If
//!   the guest refuses the connection, the socket is closed.
//! - Guest to host: if the guest connects to port P of the host, the device connects it to the
//!   listener on the unix socket `<device's socket>_P`.
//! - Ports in this process: if the port was registered with [`VsockPorts::listen_in_process`], the
//!   connection ends in this process. The listener receives one half of a pair of unix sockets. The
//!   guest's agent connects to the governor in this way.
//!
//! ```text
//! device     configuration, activation, reset
//! event      worker on an event loop: queues, epoll, the timer
//! muxer      sockets of connections, and their turns to send
//! connection protocol of one connection; does no I/O
//! host       the listening socket, ports, outgoing connections, the greeting
//! packet     headers, parsed once
//! ```

pub mod config;
mod connection;
mod device;
mod event;
mod host;
mod metrics;
mod muxer;
mod packet;

use self::config::VsockConfig;
pub use device::VsockDevice;
pub use host::{GuestPorts, IN_PROCESS_BACKLOG, VsockError, VsockPorts};
pub use metrics::VsockMetrics;

use super::new_device_with_id;
use crate::device::{DeviceContext, SetupResult};

/// Queue indexes (virtio 1.3, 5.10.2).
const RX_QUEUE: u16 = 0;
const TX_QUEUE: u16 = 1;
const EVENT_QUEUE: u16 = 2;

/// Builds the `--vsock` device. The configuration must have an id. Connections from the guest to
/// `ports` end in this process.
pub fn build(config: &VsockConfig, ports: VsockPorts, context: &DeviceContext) -> SetupResult {
    let device = VsockDevice::new(config.cid, &config.socket, ports)?;
    let metrics = device.metrics();
    let id = config.id.as_deref().expect("a VM's devices have ids");
    let new = new_device_with_id(id, device, context)?.removable(VsockConfig::KIND);
    Ok(new.exposing(metrics).attach(context)?)
}

#[cfg(test)]
mod test_driver;
