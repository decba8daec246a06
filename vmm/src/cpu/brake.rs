//! The brake of a VM: whoever must not let the guest run on pulls it.

use std::sync::atomic::{AtomicBool, Ordering};

/// Keeps a vCPU whose exit has gone wrong from entering the guest again.
///
/// The owner of the VM is told by an event and pauses every vCPU, but it does so later and on another thread. The vCPU
/// that pulled the brake, inside its exit, would meanwhile run on as if all were well: a flush that failed would look
/// like one that did not. So:
/// 1. the brake is pulled, then the event is sent, then the exit ends: the owner cannot release it before it is pulled;
/// 2. a vCPU does not enter the guest while the brake is pulled, whatever else it has been told;
/// 3. the owner pauses every vCPU, and only then releases the brake: from there on it is the owner that decides.
#[derive(Debug, Default)]
pub struct Brake(AtomicBool);

impl Brake {
    /// From now on no vCPU enters the guest. Those that are in it stay there until they are paused.
    pub fn pull(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// The vCPUs have been told to pause.
    pub fn release(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Whether it has been pulled.
    pub fn is_pulled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
