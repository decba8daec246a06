//! Helpers that start and stop workers on an event loop and access their queues.

use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, SubscriberId};
use tracing::debug;
use virtio_queue::{DescriptorChain, Error, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::{ActivateError, Activation, ActiveQueue};
use crate::event_loop::{EventLoopHandle, Subscriber};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::MappedMemory;

/// Worker that is registered with its event loop from activation to reset.
///
/// The thread of the event loop must neither call these methods nor drop the value.
pub(super) struct WorkerSlot {
    event_loop: EventLoopHandle,
    worker: Option<SubscriberId>,
}

impl WorkerSlot {
    pub(super) fn new(event_loop: EventLoopHandle) -> Self {
        Self { event_loop, worker: None }
    }

    /// Starts the worker. Returns after the worker's `init` has run.
    pub(super) fn start(&mut self, worker: Subscriber) -> Result<(), ActivateError> {
        assert!(self.worker.is_none(), "device activated twice without a reset");
        self.worker = Some(self.event_loop.add(worker)?);
        Ok(())
    }

    /// Stops the worker. When this returns, the queues are no longer accessed. Returns false if no
    /// worker was running.
    pub(super) fn stop(&mut self) -> bool {
        let Some(worker) = self.worker.take() else { return false };
        if let Err(err) = self.event_loop.remove_and_drop(worker) {
            // The event loop has ended, so its workers no longer exist.
            debug!(%err, "Device worker had already ended");
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
    /// Takes the queue out of the activation. Fails if the driver did not enable it.
    pub(super) fn take_queue(&mut self, index: u16) -> Result<ActiveQueue, ActivateError> {
        let queue = self.queues.get_mut(usize::from(index)).and_then(Option::take);
        queue.ok_or(ActivateError::QueueMissing { index })
    }
}

/// Returns the next available chain, or `Err` if the available ring is invalid.
///
/// A ring is invalid if its index is more than the ring's size ahead or its entries are in
/// unplugged memory. `pop_descriptor_chain` then returns no chain and `AvailIter` ends, although
/// `enable_notification` reports more chains. A loop that calls both would never end without an
/// error.
pub(super) fn next_chain<'m>(
    queue: &mut Queue,
    memory: &'m MappedMemory,
) -> Result<Option<DescriptorChain<&'m MappedMemory>>, Error> {
    if queue.avail_idx(memory, Ordering::Acquire)?.0 == queue.next_avail() {
        return Ok(None);
    }
    queue.iter(memory)?.next().map(Some).ok_or(Error::InvalidAvailRingIndex)
}

impl ActiveQueue {
    pub fn new(device: &str, queue: Queue, kick: EventFd) -> Self {
        Self { device: device.into(), queue, kick, is_broken: false }
    }

    /// Takes the next available chain. If the ring is invalid, sets DEVICE_NEEDS_RESET (virtio 1.3,
    /// 2.1.2) and returns no more chains until the reset.
    pub(super) fn pop<'m>(
        &mut self,
        memory: &'m MappedMemory,
        interrupt: &dyn VirtioInterrupt,
    ) -> Option<DescriptorChain<&'m MappedMemory>> {
        if self.is_broken {
            return None;
        }
        next_chain(&mut self.queue, memory).unwrap_or_else(|err| {
            self.is_broken = true;
            rate_limited!(warn, device = &*self.device, %err, "Cannot read the driver's ring; the device needs a reset");
            if let Err(err) = interrupt.needs_reset() {
                rate_limited!(warn, device = &*self.device, %err, "Cannot notify the driver that its device needs a reset");
            }
            None
        })
    }

    /// Serves at most `batch` available chains, so that other devices on the event loop are served
    /// as well. `serve` returns the number of bytes that it wrote to the chain. If it returns
    /// `None`, the chain remains in the ring and the pass ends. Returns true if the driver wants an
    /// interrupt.
    pub(super) fn serve<'m>(
        &mut self,
        memory: &'m MappedMemory,
        interrupt: &dyn VirtioInterrupt,
        batch: usize,
        mut serve: impl FnMut(DescriptorChain<&'m MappedMemory>) -> Option<u32>,
    ) -> bool {
        let mut used = false;
        for count in 0.. {
            if count == batch {
                self.reschedule();
                break;
            }
            let Some(chain) = self.pop(memory, interrupt) else { break };
            let head = chain.head_index();
            let Some(len) = serve(chain) else {
                self.queue.go_to_previous_position();
                break;
            };
            if !self.give_back(memory, head, len) {
                break;
            }
            used = true;
        }
        used && self.queue.needs_notification(memory).unwrap_or(true)
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Enables notifications. Returns true if the driver has already added chains, for which it
    /// sends no notification.
    pub(super) fn wait_for_more(&mut self, memory: &MappedMemory) -> bool {
        !self.is_broken && self.queue.enable_notification(memory).unwrap_or(false)
    }

    /// Registers the queue's notifications with the event loop. `data` identifies them.
    pub(super) fn watch(&self, data: u32, ops: &mut EventOps) {
        if let Err(err) = ops.add(Events::with_data(&self.kick, data, EventSet::IN)) {
            rate_limited!(
                error,
                device = &*self.device,
                ?err,
                "Cannot watch for notifications of the driver"
            );
        }
    }

    pub(super) fn clear_kick(&self) {
        // The read fails only if no notification is pending.
        let _ = self.kick.read();
    }

    /// Schedules another pass over the queue, after other devices on the event loop.
    pub(super) fn reschedule(&self) {
        // The write fails only if the event's counter is full. In that case the pass is already
        // scheduled.
        let _ = self.kick.write(1);
    }

    /// Returns a chain to the driver. Returns false if the used ring cannot be written. The caller
    /// must then end its pass over the queue, because further chains would be lost as well. The
    /// driver's next notification starts another pass.
    #[must_use]
    pub(super) fn give_back(&mut self, memory: &MappedMemory, head: u16, len: u32) -> bool {
        let result = self.queue.add_used(memory, head, len);
        if let Err(err) = &result {
            debug!(device = &*self.device, %err, "Cannot write the used ring");
        }
        result.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::memory::view::GuestView;
    use crate::virtio::testing::TestDriver;

    const PAGE: u64 = 0x1000;
    /// Places the ring's index at the end of one page and its entries at the start of the next.
    const AVAILABLE: u64 = 4 * PAGE - 4;

    fn queue(memory: &GuestMemoryMmap, index: u16) -> ActiveQueue {
        let mut queue = Queue::new(16).unwrap();
        queue.try_set_desc_table_address(GuestAddress(PAGE)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(2 * PAGE)).unwrap();
        queue.set_ready(true);
        memory.write_obj(index, GuestAddress(AVAILABLE + 2)).unwrap();
        ActiveQueue::new("test", queue, EventFd::new(EFD_NONBLOCK).unwrap())
    }

    #[test]
    fn invalid_ring_is_read_once() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let view = GuestView::new(memory.clone());
        for (index, unplugged, breaks) in [
            (0, false, false),
            (16, false, false),
            (17, false, true),
            (u16::MAX, false, true),
            (1, true, true),
        ] {
            let driver = TestDriver::new(1);
            let mut queue = queue(&memory, index);
            if unplugged {
                view.exclusive().add_pluggable(GuestAddress(4 * PAGE), PAGE, PAGE).unwrap();
            }
            let guard = view.memory();
            let interrupt = driver.interrupt();
            let popped =
                std::iter::from_fn(|| queue.pop(&guard, &*interrupt).map(|_| ())).take(100).count();
            assert_eq!(popped, if breaks { 0 } else { usize::from(index) }, "index {index}");
            assert_eq!((queue.is_broken(), driver.resets_needed()), (breaks, usize::from(breaks)));
            assert!(
                !queue.wait_for_more(&guard),
                "index {index}: the worker was rescheduled without work"
            );
        }
    }
}
