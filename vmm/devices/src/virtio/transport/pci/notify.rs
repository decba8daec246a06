//! From driver to device: the notification structure (virtio 1.3, 4.1.4.4).

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::layout::{NOTIFY_MULTIPLIER, NOTIFY_OFFSET};
use crate::bus::IoEvents;
use crate::log::sparsely;

struct Notification {
    kick: EventFd,
    /// Handled inside the vCPU's exit, so it must cause one.
    synchronous: bool,
    /// Where KVM raises it.
    registered_at: Option<u64>,
}

/// The notifications of one device's queues.
pub(super) struct Notifications {
    io_events: Arc<dyn IoEvents>,
    queues: Vec<Notification>,
    /// Where the BAR is.
    bar_base: Option<u64>,
    /// Whether the device runs. KVM knows only notifications of running devices: a guest sizes and
    /// moves BARs before that, and each registration is a wait for all vCPUs.
    running: bool,
}

impl Notifications {
    /// For `queues` queues, of which those in `synchronous` get no ioeventfd.
    pub(super) fn new(
        io_events: Arc<dyn IoEvents>,
        queues: u16,
        synchronous: &[u16],
    ) -> io::Result<Self> {
        let notification = |queue| {
            let kick = EventFd::new(EFD_NONBLOCK)?;
            Ok(Notification {
                kick,
                synchronous: synchronous.contains(&queue),
                registered_at: None,
            })
        };
        let queues = (0..queues).map(notification).collect::<io::Result<_>>()?;
        Ok(Self { io_events, queues, bar_base: None, running: false })
    }

    /// The event of a queue, for its worker.
    pub(super) fn kick(&self, queue: u16) -> io::Result<EventFd> {
        self.queues[usize::from(queue)].kick.try_clone()
    }

    /// The BAR has moved.
    pub(super) fn set_bar_base(&mut self, base: Option<u64>) {
        self.bar_base = base;
        self.update();
    }

    pub(super) fn start(&mut self) {
        self.running = true;
        self.update();
    }

    /// The device has stopped: what it was notified of is forgotten.
    pub(super) fn stop(&mut self) {
        self.running = false;
        self.update();
        for queue in &self.queues {
            // Fails when there is nothing to forget.
            let _ = queue.kick.read();
        }
    }

    /// A notification that came as an exit: true if the caller must handle it now, on this thread.
    pub(super) fn notify(&self, queue: u16) -> bool {
        let Some(queue) = self.queues.get(usize::from(queue)) else { return false };
        if !queue.synchronous && queue.kick.write(1).is_err() {
            // The counter is full, so the worker is about to look anyway.
            return false;
        }
        queue.synchronous && self.running
    }

    /// Makes KVM agree with us.
    fn update(&mut self) {
        for (queue, index) in self.queues.iter_mut().zip(0u64..) {
            let offset = u64::from(NOTIFY_OFFSET) + index * u64::from(NOTIFY_MULTIPLIER);
            let usable = self.bar_base.filter(|_| self.running && !queue.synchronous);
            let wanted = usable.map(|base| base + offset);
            if queue.registered_at == wanted {
                continue;
            }
            if let Some(address) = queue.registered_at.take()
                && let Err(err) = self.io_events.unregister(&queue.kick, address)
            {
                sparsely!(warn, %err, address, "Cannot take an ioeventfd away");
            }
            if let Some(address) = wanted {
                match self.io_events.register(&queue.kick, address) {
                    Ok(()) => queue.registered_at = wanted,
                    // Then it comes as an exit, and works as well.
                    Err(err) => sparsely!(warn, %err, address, "A queue goes without ioeventfd"),
                }
            }
        }
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        self.stop();
    }
}
