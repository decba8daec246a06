//! Notifications from the driver to the device, through the notification structure (virtio 1.3,
//! 4.1.4.4).

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::layout::{NOTIFY_MULTIPLIER, NOTIFY_OFFSET};
use crate::bus::IoEvents;
use crate::log::rate_limited;

struct Notification {
    kick: EventFd,
    /// True if notifications are handled in the vCPU's exit. The queue must then have no ioeventfd.
    synchronous: bool,
    /// Address at which the ioeventfd is registered. `None` if it is not registered.
    registered_at: Option<u64>,
}

pub(super) struct Notifications {
    /// Name of the device, for log lines.
    device: String,
    io_events: Arc<dyn IoEvents>,
    queues: Vec<Notification>,
    bar_base: Option<u64>,
    /// True while the device is active. Only active devices have ioeventfds, because a guest sizes
    /// and moves BARs before it activates devices, and each registration waits for all vCPUs.
    running: bool,
}

impl Notifications {
    /// Creates notifications for `queues` queues of `device`. The queues in `synchronous` have no
    /// ioeventfd.
    pub(super) fn new(
        device: String,
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
        Ok(Self { device, io_events, queues, bar_base: None, running: false })
    }

    /// Returns the event that signals notifications of a queue to its worker.
    pub(super) fn kick(&self, queue: u16) -> io::Result<EventFd> {
        self.queues[usize::from(queue)].kick.try_clone()
    }

    /// Updates the ioeventfds after the BAR was moved.
    pub(super) fn set_bar_base(&mut self, base: Option<u64>) {
        self.bar_base = base;
        self.update();
    }

    /// Base of the BAR while the device is active and the guest can access the BAR.
    pub(super) fn active_bar_base(&self) -> Option<u64> {
        self.bar_base.filter(|_| self.running)
    }

    pub(super) fn start(&mut self) {
        self.running = true;
        self.update();
    }

    /// Removes the ioeventfds and discards pending notifications.
    pub(super) fn stop(&mut self) {
        self.running = false;
        self.update();
        for queue in &self.queues {
            // The read fails if no notification is pending.
            let _ = queue.kick.read();
        }
    }

    /// Handles a notification that caused a vCPU exit. Returns true if the caller must serve the
    /// queue on this thread.
    pub(super) fn notify(&self, queue: u16) -> bool {
        let Some(queue) = self.queues.get(usize::from(queue)) else { return false };
        if !queue.synchronous && queue.kick.write(1).is_err() {
            // The event's counter is full, so the worker will run anyway.
            return false;
        }
        queue.synchronous && self.running
    }

    /// Registers and unregisters ioeventfds with KVM to match the current state.
    fn update(&mut self) {
        let base = self.active_bar_base();
        for (queue, index) in self.queues.iter_mut().zip(0u64..) {
            let offset = u64::from(NOTIFY_OFFSET) + index * u64::from(NOTIFY_MULTIPLIER);
            let wanted = base.filter(|_| !queue.synchronous).map(|base| base + offset);
            if queue.registered_at == wanted {
                continue;
            }
            if let Some(address) = queue.registered_at.take()
                && let Err(err) = self.io_events.unregister(&queue.kick, address)
            {
                rate_limited!(warn, device = self.device, %err, address, "Cannot remove an ioeventfd");
            }
            if let Some(address) = wanted {
                match self.io_events.register(&queue.kick, address) {
                    Ok(()) => queue.registered_at = wanted,
                    // Without an ioeventfd, notifications of the queue cause exits, which are only
                    // slower.
                    Err(err) => {
                        rate_limited!(warn, device = self.device, %err, address, "Cannot register an ioeventfd; notifications of the queue cause exits")
                    }
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
