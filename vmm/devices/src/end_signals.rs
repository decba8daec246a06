//! Signals that end the VMM.
//!
//! They are blocked while there are sockets to remove and no handlers are registered. A signal of
//! that time takes effect as soon as there are handlers.

use vmm_sys_util::signal::{block_signal, unblock_signal};

const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Blocks the signals in the calling thread and in the threads that it starts. The only error is
/// that a signal is already blocked.
pub fn block() {
    for signal in SIGNALS {
        let _ = block_signal(signal);
    }
}

/// Unblocks the signals in the calling thread, which then handles those that are pending.
pub fn unblock() {
    for signal in SIGNALS {
        let _ = unblock_signal(signal);
    }
}
