//! Events of a machine's devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::events::{Event, Events};

/// Emits events of a machine's devices. Silent once the machine ends, because the machine resets
/// the devices then, not their drivers.
#[derive(Clone)]
pub struct EventEmitter {
    events: Events,
    is_silent: Arc<AtomicBool>,
}

impl EventEmitter {
    pub(super) fn new(events: Events) -> Self {
        Self { events, is_silent: Arc::default() }
    }

    /// Emits no further event.
    pub fn silence(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    pub fn emit(&self, event: Event<'_>) {
        if !self.is_silent.load(Ordering::Relaxed) {
            self.events.tell_of_guest(event);
        }
    }
}
