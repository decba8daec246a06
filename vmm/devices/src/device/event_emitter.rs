//! Reporting of events by a machine's devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::events::{Event, Events};

/// Emits events of a machine's devices. It emits nothing after the machine has begun to end,
/// because from then on the VMM resets the devices, not their drivers.
#[derive(Clone)]
pub struct EventEmitter {
    events: Events,
    is_silent: Arc<AtomicBool>,
}

impl EventEmitter {
    pub(super) fn new(events: Events) -> Self {
        Self { events, is_silent: Arc::default() }
    }

    /// Stops emitting events.
    pub fn silence(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    pub fn emit(&self, event: Event<'_>) {
        if !self.is_silent.load(Ordering::Relaxed) {
            self.events.emit_of_guest(event);
        }
    }
}
