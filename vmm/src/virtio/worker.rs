//! What devices with a worker on an event loop have in common: its life, and how it waits for the driver.

use event_manager::{EventOps, EventSet, Events, SubscriberId};
use tracing::debug;
use virtio_queue::QueueT;

use super::{ActivateError, Activation, ActiveQueue};
use crate::event_loop::{EventLoopHandle, Subscriber};
use crate::log::sparsely;
use crate::memory::view::MappedMemory;

/// The worker of a device: on its event loop between activation and reset.
///
/// Nothing of this may be called, nor the value be dropped, on that loop's thread.
pub(super) struct WorkerSlot {
    event_loop: EventLoopHandle,
    worker: Option<SubscriberId>,
}

impl WorkerSlot {
    /// No worker as yet.
    pub(super) fn new(event_loop: EventLoopHandle) -> Self {
        Self { event_loop, worker: None }
    }

    /// Starts the worker; its `init` has run when this returns.
    pub(super) fn start(&mut self, worker: Subscriber) -> Result<(), ActivateError> {
        assert!(self.worker.is_none(), "activated twice without a reset");
        self.worker = Some(self.event_loop.add(worker)?);
        Ok(())
    }

    /// Ends the worker, if there is one: after that nothing touches its queues any more. Returns whether there was one.
    pub(super) fn stop(&mut self) -> bool {
        let Some(worker) = self.worker.take() else { return false };
        if let Err(err) = self.event_loop.remove(worker) {
            // The loop is gone, and the worker with it.
            debug!(%err, "A device's worker has ended before");
        }
        true
    }
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Activation {
    /// Takes a queue without which the device cannot work.
    pub(super) fn take_queue(&mut self, index: u16) -> Result<ActiveQueue, ActivateError> {
        let queue = self.queues.get_mut(usize::from(index)).and_then(Option::take);
        queue.ok_or(ActivateError::QueueMissing { index })
    }
}

impl ActiveQueue {
    /// Waits for notifications from now on; they come as `data`.
    pub(super) fn watch(&self, data: u32, ops: &mut EventOps) {
        if let Err(err) = ops.add(Events::with_data(&self.kick, data, EventSet::IN)) {
            sparsely!(error, ?err, "Cannot wait for a driver");
        }
    }

    /// Takes notice of notifications: several count as one.
    pub(super) fn clear_kick(&self) {
        // Fails only when there are none.
        let _ = self.kick.read();
    }

    /// Makes the worker come back to the queue when others on the event loop have had their turn.
    pub(super) fn come_back(&self) {
        // Fails only when the counter is full, and then it comes back anyway.
        let _ = self.kick.write(1);
    }

    /// Gives a chain back to the driver. False if its ring cannot be written: the pass over the queue ends, since what
    /// else is taken would be lost as well. The driver's next notification begins another one.
    #[must_use]
    pub(super) fn give_back(&mut self, memory: &MappedMemory, head: u16, len: u32) -> bool {
        let result = self.queue.add_used(memory, head, len);
        if let Err(err) = &result {
            debug!(%err, "A device's used ring cannot be written");
        }
        result.is_ok()
    }
}
