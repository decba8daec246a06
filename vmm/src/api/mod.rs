//! REST API on a unix socket: supported calls of Cloud Hypervisor, and calls of Foreshore.
//!
//! [`Socket`] is bound before a VM is built, so that a socket in use is detected first. [`router`]
//! translates calls into requests to the VM task. [`Server`] serves a router on a socket.
//! docs/reference/api.md lists the calls.

mod body;
mod client;
mod connection_slot;
mod error;
mod fd_stream;
mod metrics;
mod refusal_log;
mod routes;
mod server;
mod socket;
#[cfg(test)]
mod tests;
mod wire;
mod write_timeout;

pub use self::client::{Client, ClientError};
pub use self::connection_slot::ConnectionCounters;
pub use self::error::ApiError;
pub use self::metrics::{CallMetrics, ServerMetrics};
pub use self::routes::{call_names, router};
pub use self::server::{Limits, Server};
pub use self::socket::{Socket, SocketError};
pub use self::wire::{MemoryAnswer, PingAnswer, PoolsAnswer, VolumesAnswer};
