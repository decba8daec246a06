//! The worker: buffers from the queue, bytes from the source.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use virtio_queue::{QueueOwnedT, QueueT, Writer};
use vm_memory::GuestAddressSpace;

use super::metrics::RngMetrics;
use super::source::EntropySource;
use crate::event_loop::Interest;
use crate::interrupt::VirtioInterrupt;
use crate::log::sparsely;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

/// The most that one request gets: a driver must take less than it asked for (5.4.6.1).
const REQUEST_LEN_MAX: usize = 4096;
/// Requests answered before others on the event loop have their turn.
const BATCH: usize = 64;

pub(super) const QUEUE: u16 = 0;

const KICK: u32 = 0;
const SOURCE: u32 = 1;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    queue: ActiveQueue,
    source: EntropySource,
    /// The source is waited for while the request that needs it is still in the queue.
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
        Self { view, interrupt, queue, source, waiting, metrics }
    }

    fn serve(&mut self, ops: &mut EventOps) {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let mut used = false;
        for count in 0.. {
            if count == BATCH {
                self.queue.come_back();
                break;
            }
            let Some(chain) = self.queue.queue.pop_descriptor_chain(memory) else { break };
            let head = chain.head_index();
            let filled = match Writer::new(memory, chain) {
                Ok(mut writer) => fill(&mut self.source, &mut writer, &self.metrics),
                Err(err) => Err(io::Error::new(io::ErrorKind::InvalidInput, err)),
            };
            let len = match filled {
                Ok(len) => len,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    self.queue.queue.go_to_previous_position();
                    if let EntropySource::File(file) = &self.source {
                        self.waiting.set(true, file, ops);
                    }
                    break;
                }
                Err(err) => {
                    self.metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
                    debug!(%err, "A request for entropy has no buffer");
                    0
                }
            };
            self.queue.give_back(memory, head, len);
            used = true;
        }
        let tell = used && self.queue.queue.needs_notification(memory).unwrap_or(true);
        drop(guard);
        if tell && let Err(err) = self.interrupt.signal_queue(QUEUE) {
            sparsely!(warn, %err, "The entropy device cannot interrupt");
        }
    }
}

/// Fills as much of a request as it gets. A source that fails is replaced by the kernel: a guest without entropy
/// may not even boot.
fn fill(source: &mut EntropySource, writer: &mut Writer, metrics: &RngMetrics) -> io::Result<u32> {
    let mut data = [0; REQUEST_LEN_MAX];
    let data = &mut data[..writer.available_bytes().min(REQUEST_LEN_MAX)];
    if data.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let len = match source.fill(data) {
        Err(err) if !matches!(err.kind(), io::ErrorKind::WouldBlock) => {
            sparsely!(warn, %err, ?source, "The entropy source has failed: the kernel's generator takes its place");
            metrics.source_failures.fetch_add(1, Ordering::Relaxed);
            *source = EntropySource::Kernel;
            source.fill(data)
        }
        result => result,
    }?;
    writer.write_all(&data[..len])?;
    metrics.requests.fetch_add(1, Ordering::Relaxed);
    metrics.bytes.fetch_add(len as u64, Ordering::Relaxed);
    Ok(len as u32)
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
                if self.waiting.is_on() {
                    // New requests queue up behind the one that waits.
                    return;
                }
            }
            _ => {
                if let EntropySource::File(file) = &self.source {
                    self.waiting.set(false, file, ops);
                }
            }
        }
        self.serve(ops);
    }
}
