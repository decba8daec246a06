//! COM1: the UART of vm-superio on a port range, with its output gathered into lines and its input
//! from the host.

mod device;
mod event;
mod line_writer;
mod metrics;

pub use device::{Serial, SerialError};
pub use metrics::SerialMetrics;
