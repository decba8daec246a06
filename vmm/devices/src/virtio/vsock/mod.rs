//! A virtio socket device (virtio 1.3, 5.10) whose far ends are unix sockets of the host.
//!
//! The scheme is that of Firecracker and Cloud Hypervisor, so that their clients work:
//!
//! - Host to guest: a client connects to the device's socket, writes `CONNECT <port>\n`, reads `OK
//!   <host port>\n`, and from there on talks to whoever listens on that port in the guest. A
//!   refused connection is closed.
//! - Guest to host: a connection to port P of the host ends at whoever listens on the unix socket
//!   `<device's socket>_P`.
//! - Ports of our own: a connection to a port registered with [`VsockPorts::listen_in_process`]
//!   ends inside this process, as one half of a pair of unix sockets. That is how the governor
//!   hears the guest's agent.
//!
//! ```text
//! device     front: configuration, activation, reset
//! event      worker on an event loop: queues, epoll, the timer
//! muxer      which socket belongs to which connection, who may send next
//! connection one connection's protocol, without any I/O
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

/// Builds the device of `--vsock`, which has an id. Connections of the guest to `ports` end in this
/// process.
pub fn build(config: &VsockConfig, ports: VsockPorts, context: &DeviceContext) -> SetupResult {
    let event_loop = context.machine.event_loop.clone();
    let device = VsockDevice::new(config.cid, &config.socket, ports, event_loop)?;
    let metrics = device.metrics();
    let id = config.id.as_deref().expect("a VM's devices have ids");
    let new = new_device_with_id(id, device, context)?.removable(VsockConfig::KIND);
    Ok(new.exposing(metrics).attach(context)?)
}

#[cfg(test)]
mod test_driver;
