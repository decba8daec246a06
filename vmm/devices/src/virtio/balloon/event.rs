//! The worker of the balloon device. The worker returns pages to the host and receives
//! statistics.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::GuestAddressSpace;

use super::device::MemoryParts;
use super::handle::Shared;
use super::metrics::{BalloonMetrics, Refusal};
use super::request::{ChainError, Listed, cut, pages, read_free, read_pages, read_statistics};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

/// Number of chains to serve before other devices on the event loop are served.
const BATCH: usize = 4;

const INFLATE: u32 = 0;
const DEFLATE: u32 = 1;
const STATS: u32 = 2;
const REPORTING: u32 = 3;
const STATISTICS_REQUEST: u32 = 4;

/// Index of the statistics queue.
const STATS_QUEUE: u16 = 2;

pub(super) struct Queues {
    pub(super) inflate: ActiveQueue,
    pub(super) deflate: ActiveQueue,
    pub(super) stats: Option<ActiveQueue>,
    /// The reporting queue and the index that the driver uses for it.
    pub(super) reporting: Option<(u16, ActiveQueue)>,
}

pub(super) struct Worker {
    pub(super) view: GuestView,
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) queues: Queues,
    /// Chain that the device holds and returns to the driver to request statistics (virtio 1.3,
    /// 5.5.6.4).
    pub(super) held: Option<u16>,
    /// True while the device expects statistics. The driver sends the first statistics without a
    /// request and later ones on request. All others are ignored, so that a driver cannot keep
    /// observers busy.
    pub(super) awaited: bool,
    pub(super) parts: Arc<MemoryParts>,
    pub(super) shared: Arc<Shared>,
}

impl Worker {
    fn inflate(&mut self) {
        let metrics = &self.shared.metrics;
        serve(&self.view, &*self.interrupt, 0, &mut self.queues.inflate, |memory, chain| {
            if let Some(listed) = check_chain(read_pages(memory, chain), metrics) {
                self.parts.give_back(&listed.ranges, memory, &metrics.inflated_bytes, metrics);
            }
        });
    }

    /// Only counts the deflated pages. The host allocates memory when the guest writes to them.
    fn deflate(&mut self) {
        let metrics = &self.shared.metrics;
        serve(&self.view, &*self.interrupt, 1, &mut self.queues.deflate, |memory, chain| {
            if let Some(listed) = check_chain(read_pages(memory, chain), metrics) {
                let bytes = listed.ranges.iter().map(|range| range.end - range.start).sum();
                metrics.deflated_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
        });
    }

    fn report(&mut self) {
        let Some((index, queue)) = &mut self.queues.reporting else { return };
        let metrics = &self.shared.metrics;
        serve(&self.view, &*self.interrupt, *index, queue, |memory, chain| {
            if let Some(listed) = check_chain(read_free(chain), metrics) {
                self.parts.give_back(&listed.ranges, memory, &metrics.reported_bytes, metrics);
            }
        });
    }

    /// Receives statistics and holds their chain until the device requests statistics again.
    fn receive_statistics(&mut self) {
        let Some(queue) = &mut self.queues.stats else { return };
        let mut received = None;
        let mut used = false;
        let guard = self.view.memory();
        for count in 0.. {
            if count == BATCH {
                queue.reschedule();
                break;
            }
            let Some(chain) = queue.pop(&guard, &*self.interrupt) else { break };
            let head = chain.head_index();
            if self.awaited {
                match read_statistics(&guard, chain) {
                    Ok(statistics) => {
                        received = Some(statistics);
                        self.awaited = false;
                    }
                    Err(err) => refuse(&err, &self.shared.metrics),
                }
            }
            // A correct driver sends one buffer at a time. If it sends several, the device holds
            // the last one.
            if let Some(earlier) = self.held.replace(head) {
                if !queue.give_back(&guard, earlier, 0) {
                    break;
                }
                used = true;
            }
        }
        drop(guard);
        if used {
            notify(&*self.interrupt, STATS_QUEUE);
        }
        if let Some(statistics) = received {
            self.shared.record_statistics(statistics);
        }
    }

    /// Requests statistics by returning the held chain. Does nothing while an earlier request is
    /// unanswered.
    fn request_statistics(&mut self) {
        let Some(queue) = &mut self.queues.stats else { return };
        let Some(head) = self.held.take() else { return };
        self.awaited = true;
        if queue.give_back(&self.view.memory(), head, 0) {
            notify(&*self.interrupt, STATS_QUEUE);
        }
    }
}

impl MemoryParts {
    /// Returns the pages of `ranges` to the host. Counts the pages that are refused instead.
    fn give_back(
        &self,
        ranges: &[Range<u64>],
        memory: &MappedMemory,
        given_back: &AtomicU64,
        metrics: &BalloonMetrics,
    ) {
        for piece in ranges.iter().flat_map(|range| cut(range, &self.parts, memory)) {
            let len = piece.range.end - piece.range.start;
            let index = match piece.verdict {
                Ok(index) => index,
                Err(reason) => {
                    metrics.refuse(reason, pages(&piece.range));
                    continue;
                }
            };
            let offset = piece.range.start - self.parts[index].range.start;
            match self.reservations[index].discard(offset, len) {
                Ok(()) => {
                    given_back.fetch_add(len, Ordering::Relaxed);
                }
                Err(err) => {
                    metrics.discard_failures.fetch_add(1, Ordering::Relaxed);
                    rate_limited!(warn, %err, len, "Cannot return pages of the balloon to the host");
                }
            }
        }
    }
}

fn check_chain(listed: Result<Listed, ChainError>, metrics: &BalloonMetrics) -> Option<Listed> {
    match listed {
        Ok(listed) => {
            if listed.is_cut {
                metrics.refuse(Refusal::TooLong, 1);
            }
            Some(listed)
        }
        Err(err) => {
            refuse(&err, metrics);
            None
        }
    }
}

fn refuse(err: &ChainError, metrics: &BalloonMetrics) {
    metrics.refuse(Refusal::Malformed, 1);
    rate_limited!(warn, %err, "Balloon driver sent an invalid request");
}

/// Calls `each` for every available chain, and then returns the chain to the driver.
fn serve(
    view: &GuestView,
    interrupt: &dyn VirtioInterrupt,
    index: u16,
    queue: &mut ActiveQueue,
    each: impl Fn(&MappedMemory, DescriptorChain<&MappedMemory>),
) {
    let mut used = false;
    for count in 0.. {
        if count == BATCH {
            queue.reschedule();
            break;
        }
        // The guard is held for one chain only, because plugs and unplugs wait for it. While it is
        // held, memory cannot be unplugged between the check of a range and its discard.
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let Some(chain) = queue.pop(memory, interrupt) else { break };
        let head = chain.head_index();
        each(memory, chain);
        if !queue.give_back(memory, head, 0) {
            break;
        }
        used = true;
    }
    let is_wanted = used && queue.queue.needs_notification(&*view.memory()).unwrap_or(true);
    if is_wanted {
        notify(interrupt, index);
    }
}

fn notify(interrupt: &dyn VirtioInterrupt, queue: u16) {
    if let Err(err) = interrupt.signal_queue(queue) {
        rate_limited!(warn, %err, "Cannot interrupt the balloon driver");
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        let Queues { inflate, deflate, stats, reporting } = &self.queues;
        let (stats, reporting) = (stats.as_ref(), reporting.as_ref().map(|(_, queue)| queue));
        let queues = [
            (INFLATE, Some(inflate)),
            (DEFLATE, Some(deflate)),
            (STATS, stats),
            (REPORTING, reporting),
        ];
        for (data, queue) in queues {
            let Some(queue) = queue else { continue };
            queue.watch(data, ops);
            // The driver may have sent a notification before the worker was started.
            queue.reschedule();
        }
        if let Err(err) = ops.add(Events::with_data(
            &self.shared.statistics_request,
            STATISTICS_REQUEST,
            EventSet::IN,
        )) {
            rate_limited!(error, ?err, "Cannot request statistics from the balloon driver");
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        match events.data() {
            INFLATE => {
                self.queues.inflate.clear_kick();
                self.inflate();
            }
            DEFLATE => {
                self.queues.deflate.clear_kick();
                self.deflate();
            }
            STATS => {
                self.queues.stats.as_ref().inspect(|queue| queue.clear_kick());
                self.receive_statistics();
            }
            REPORTING => {
                self.queues.reporting.as_ref().inspect(|(_, queue)| queue.clear_kick());
                self.report();
            }
            _ => {
                // The read fails only if no request is pending.
                let _ = self.shared.statistics_request.read();
                self.request_statistics();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    /// A plug must not wait for the whole queue: discarding pages takes time, and a guest may keep
    /// the queue full.
    #[test]
    fn plug_waits_for_one_chain_only() {
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        let view = activation.view.clone();
        let mut queue = activation.queues[0].take().unwrap();
        for _ in 0..BATCH {
            driver.add(0, &[Buffer::Out(BUFFERS, 4)]);
        }
        let unplugs = AtomicU32::new(0);
        let calls = RefCell::new(Vec::new());
        thread::scope(|scope| {
            serve(&view, &*activation.interrupt, 0, &mut queue, |_, _| {
                let before = unplugs.load(Ordering::Relaxed);
                scope.spawn(|| {
                    let guard = view.exclusive();
                    unplugs.fetch_add(1, Ordering::Relaxed);
                    drop(guard);
                });
                while !view.is_awaited() {
                    thread::yield_now();
                }
                calls.borrow_mut().push((before, unplugs.load(Ordering::Relaxed)));
            });
        });
        // A plug or unplug that begins while a chain is served waits for the end of that chain and
        // completes before the next one.
        assert_eq!(calls.into_inner(), [(0, 0), (1, 1), (2, 2), (3, 3)]);
    }
}
