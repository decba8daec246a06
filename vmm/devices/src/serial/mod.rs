//! COM1: the UART of vm-superio on a port range. Its output is buffered by lines, and its input
//! comes from the host.

mod device;
mod event;
mod line_writer;
mod metrics;

pub use device::{Serial, SerialError};
pub use metrics::SerialMetrics;
