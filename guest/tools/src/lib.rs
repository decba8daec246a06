//! Protocols, data patterns and waits. The guest programs share them with the tests that run these
//! programs.

use std::fmt;

pub mod aligned;
pub mod content;
pub mod memory_sample;
pub mod oom;
pub mod process;
pub mod sectors;
pub mod shell_protocol;
pub mod timed_net;
pub mod vsock;
pub mod wait;

/// Sectors that contain their own number and version (`guest-tool write-stamped`).
pub mod torn {
    pub mod report;
    pub mod stamp;
}

/// Error context for stored data that is missing or wrong. A test that fails with it is not
/// repeated, because no temporary fault of the host can be the cause.
#[derive(Debug)]
pub struct CorruptData;

impl CorruptData {
    /// Exit code of a test, or of a guest program that verifies a disk, that fails with this error.
    pub const CODE: i32 = 78;

    pub fn code_of(error: &anyhow::Error) -> i32 {
        if error.downcast_ref::<Self>().is_some() { Self::CODE } else { 1 }
    }
}

impl fmt::Display for CorruptData {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Stored data are wrong, which no fault of the emulation explains")
    }
}
