//! Signals that end the VMM.
//!
//! They are blocked while there are sockets to remove and no handlers are registered. A signal of
//! that time takes effect as soon as there are handlers.

use vmm_sys_util::signal::{block_signal, get_blocked_signals, unblock_signal};

const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Blocks the signals in the calling thread and in the threads that it starts. The only error is
/// that a signal is already blocked.
pub fn block() {
    for signal in SIGNALS {
        let _ = block_signal(signal);
    }
}

/// Runs `wait` with those signals unblocked that are blocked now, and then blocks them again.
pub(crate) fn unblocked<T>(wait: impl FnOnce() -> T) -> T {
    let mut blocked = get_blocked_signals().unwrap_or_default();
    blocked.retain(|signal| SIGNALS.contains(signal));
    for signal in &blocked {
        let _ = unblock_signal(*signal);
    }
    let result = wait();
    for signal in blocked {
        let _ = block_signal(signal);
    }
    result
}

/// Unblocks the signals in the calling thread, which then handles those that are pending.
pub fn unblock() {
    for signal in SIGNALS {
        let _ = unblock_signal(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_blocked_again_only_if_they_were_blocked() {
        let blocked =
            || get_blocked_signals().unwrap().iter().any(|signal| SIGNALS.contains(signal));
        assert!(!unblocked(blocked) && !blocked());
        block();
        assert!(blocked() && !unblocked(blocked) && blocked());
        unblock();
        assert!(!blocked());
    }
}
