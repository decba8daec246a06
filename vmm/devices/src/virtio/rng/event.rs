//! The worker of the entropy device. The worker fills the driver's buffers with bytes from the
//! source.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT, Writer};
use vm_memory::GuestAddressSpace;

use super::metrics::RngMetrics;
use super::source::EntropySource;
use crate::event_loop::Interest;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

/// Maximum number of bytes for one request. Drivers must accept less than they requested (5.4.6.1).
const REQUEST_LEN_MAX: usize = 4096;
/// Number of requests to answer before other devices on the event loop are served.
const BATCH: usize = 64;

pub(super) const QUEUE: u16 = 0;

const KICK: u32 = 0;
const SOURCE: u32 = 1;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    queue: ActiveQueue,
    supply: Supply,
}

/// The entropy source. If it fails, the kernel's generator replaces it, because a guest without
/// entropy may not even boot.
struct Supply {
    source: EntropySource,
    /// Registered while a request in the queue waits for the source.
    waiting: Interest,
    metrics: Arc<RngMetrics>,
}

impl Worker {
    pub(super) fn new(
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        queue: ActiveQueue,
        source: EntropySource,
        metrics: Arc<RngMetrics>,
    ) -> Self {
        let waiting = Interest::new("the entropy source", SOURCE, EventSet::IN);
        Self { view, interrupt, queue, supply: Supply { source, waiting, metrics } }
    }

    /// Answers requests. No guard of guest memory is held while the source is read, because reading
    /// a file may block, and unplugs wait for guards.
    fn serve(&mut self, ops: &mut EventOps) {
        let mut used = false;
        for count in 0.. {
            if count == BATCH {
                self.queue.reschedule();
                break;
            }
            let Some(wanted) = self.wanted() else { break };
            let mut data = [0; REQUEST_LEN_MAX];
            let got = match self.supply.fill(&mut data[..wanted], ops) {
                Ok(len) => len,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) => {
                    rate_limited!(warn, %err, "Cannot read entropy for the guest");
                    0
                }
            };
            if !self.answer(&data[..got]) {
                break;
            }
            used = true;
        }
        let needs_interrupt =
            used && self.queue.queue.needs_notification(&*self.view.memory()).unwrap_or(true);
        if needs_interrupt && let Err(err) = self.interrupt.signal_queue(QUEUE) {
            rate_limited!(warn, %err, "Cannot interrupt the driver of the entropy device");
        }
    }

    /// Returns the length of the next request, or `None` if the queue is empty. The request remains
    /// in the queue until entropy for it is available.
    fn wanted(&mut self) -> Option<usize> {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let chain = self.queue.pop(memory, &*self.interrupt)?;
        let len = Writer::new(memory, chain).map_or(0, |writer| writer.available_bytes());
        self.queue.queue.go_to_previous_position();
        Some(len.min(REQUEST_LEN_MAX))
    }

    /// Answers the next request with as much of `data` as fits. The request is read again, because
    /// the driver may have changed its descriptors. Returns false if the pass must end.
    fn answer(&mut self, data: &[u8]) -> bool {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let Some(chain) = self.queue.pop(memory, &*self.interrupt) else { return false };
        let head = chain.head_index();
        let metrics = &self.supply.metrics;
        let written = match write(memory, chain, data) {
            Ok(len) => {
                metrics.requests.fetch_add(1, Ordering::Relaxed);
                metrics.bytes.fetch_add(len.into(), Ordering::Relaxed);
                len
            }
            Err(err) => {
                metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
                debug!(%err, "Request for entropy has no usable buffer");
                0
            }
        };
        self.queue.give_back(memory, head, written)
    }
}

fn write(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
    data: &[u8],
) -> io::Result<u32> {
    let invalid = |err| io::Error::new(io::ErrorKind::InvalidInput, err);
    let mut writer = Writer::new(memory, chain).map_err(invalid)?;
    let data = &data[..data.len().min(writer.available_bytes())];
    if data.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    writer.write_all(data)?;
    Ok(data.len() as u32)
}

impl Supply {
    /// Fills `data` at least partly. If it fails with `WouldBlock`, the source is empty and the
    /// event loop is waiting for it.
    fn fill(&mut self, data: &mut [u8], ops: &mut EventOps) -> io::Result<usize> {
        // An empty buffer must not reach the source: reading zero bytes would look like the end of
        // the file.
        if data.is_empty() { Ok(0) } else { self.read(data, ops) }
    }

    fn read(&mut self, data: &mut [u8], ops: &mut EventOps) -> io::Result<usize> {
        match self.source.fill(data) {
            Err(err) => {
                if err.kind() == io::ErrorKind::WouldBlock {
                    self.wait(true, ops);
                    if self.waiting.is_on() {
                        return Err(err);
                    }
                    // The source cannot be watched, so the fallback is used. A driver that sends
                    // one request at a time, such as Linux's, would not notify the device again,
                    // and this request would never be answered.
                }
                self.fall_back(&err, ops);
                self.source.fill(data)
            }
            result => result,
        }
    }

    /// Starts or stops waiting for the source.
    fn wait(&mut self, on: bool, ops: &mut EventOps) {
        if let EntropySource::File(file) = &self.source {
            self.waiting.set(on, file, ops);
        }
    }

    fn fall_back(&mut self, err: &io::Error, ops: &mut EventOps) {
        let source = &self.source;
        rate_limited!(warn, %err, ?source, "Entropy source failed; the device reads from the kernel's generator instead");
        self.metrics.source_failures.fetch_add(1, Ordering::Relaxed);
        // The file must be removed from epoll before it is closed. The device has another
        // descriptor of it, so epoll would otherwise continue to report it.
        self.wait(false, ops);
        self.source = EntropySource::Kernel;
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        self.serve(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            KICK => {
                self.queue.clear_kick();
                if self.supply.waiting.is_on() {
                    // If a request is already waiting for the source, new requests wait behind it.
                    return;
                }
            }
            _ => self.supply.wait(false, ops),
        }
        self.serve(ops);
    }
}
