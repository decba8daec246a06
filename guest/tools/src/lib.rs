//! What the test guests' programs have in common with each other, and with who sends them their
//! work: protocols, patterns of data, waits.

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

/// Sectors that say what they are (`guest-tool write-stamped`).
pub mod torn {
    pub mod report;
    pub mod stamp;
}

/// The context of an error that nothing excuses: what was stored is not there as it has to be. A
/// test that ends with it gets no second chance.
#[derive(Debug)]
pub struct StoredWrong;

impl StoredWrong {
    /// Exit code of a process that has ended with it: a test's, and a guest's that holds a disk
    /// against what it should be.
    pub const CODE: i32 = 78;

    pub fn code_of(error: &anyhow::Error) -> i32 {
        if error.downcast_ref::<Self>().is_some() { Self::CODE } else { 1 }
    }
}

impl fmt::Display for StoredWrong {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("What was stored is wrong, whatever the emulation did")
    }
}
