//! COM1: the UART of vm-superio on a port range. Its output is buffered by lines.

mod device;
mod event;
mod line_writer;
mod metrics;

pub use device::{Serial, SerialError};
pub use metrics::SerialMetrics;
