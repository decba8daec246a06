//! REST API on a unix socket: calls of Cloud Hypervisor and of Foreshore.
//!
//! [`Socket`] is bound first, so that a socket in use is detected before a VM is built. [`router`]
//! translates calls into requests to the VM's owner. [`Server`] serves a router on a socket.
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
pub use self::wire::{MemoryAnswer, PingAnswer, PoolsAnswer, VolumesAnswer};
