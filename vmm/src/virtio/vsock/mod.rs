//! A virtio socket device (virtio 1.3, 5.10) whose far ends are unix sockets of the host.
//!
//! The scheme is that of Firecracker and Cloud Hypervisor, so that their clients work:
//!
//! - Host to guest: a client connects to the device's socket, writes `CONNECT <port>\n`, reads `OK <host port>\n`,
//!   and from there on talks to whoever listens on that port in the guest. A refused connection is closed.
//! - Guest to host: a connection to port P of the host ends at whoever listens on the unix socket
//!   `<device's socket>_P`.
//! - Ports of our own: a connection to a port registered with [`VsockPorts::listen_in_process`] ends inside this
//!   process, as one half of a pair of unix sockets. That is how the governor hears the guest's agent.
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
pub mod metrics;
mod muxer;
mod packet;

pub use device::VsockDevice;
pub use host::{GuestPorts, IN_PROCESS_BACKLOG, VsockError, VsockPorts};
pub use metrics::VsockMetrics;

/// Queue indexes (virtio 1.3, 5.10.2).
const RX_QUEUE: u16 = 0;
const TX_QUEUE: u16 = 1;
const EVENT_QUEUE: u16 = 2;

#[cfg(test)]
mod test_driver;
