//! The REST API on a unix socket: Cloud Hypervisor's calls and ours.
//!
//! [`Socket`] binds before anything is built, so that a socket in use is found out before a VM is;
//! [`router`] maps calls to requests to the VM's owner; [`Server`] runs any router on any socket.
//! docs/reference/api.md lists the calls.

mod body;
mod client;
mod error;
mod fd_stream;
mod metrics;
mod routes;
mod seat;
mod server;
mod socket;
#[cfg(test)]
mod tests;
mod wire;
mod write_timeout;

pub use self::client::{Client, ClientError};
pub use self::error::ApiError;
pub use self::metrics::ServerMetrics;
pub use self::routes::{call_names, router};
pub use self::seat::ConnectionCounters;
pub use self::server::{Limits, Server};
pub use self::socket::{Socket, SocketError};
pub use self::wire::{
    MemoryAnswer, PingAnswer, PoolsAnswer, ResizeBody, ResizeZoneBody, VolumesAnswer,
};
