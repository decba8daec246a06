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
use crate::interrupt::VirtioInterrupt;
use crate::log::sparsely;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

/// The most that one request gets: a driver must take less than it asked for (5.4.6.1).
const REQUEST_LEN_MAX: usize = 4096;
/// Requests answered before others on the event loop have their turn.
const BATCH: usize = 64;

const QUEUE: u16 = 0;

const KICK: u32 = 0;
const SOURCE: u32 = 1;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    queue: ActiveQueue,
    source: EntropySource,
    /// The source is waited for; the request that needs it is still in the queue.
    waiting: bool,
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
        Self { view, interrupt, queue, source, waiting: false, metrics }
    }

    fn serve(&mut self, ops: &mut EventOps) {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let mut used = false;
        for count in 0.. {
            if count == BATCH {
                // There may be more: come back.
                let _ = self.queue.kick.write(1);
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
                    self.waiting = watch(&self.source, true, ops);
                    break;
                }
                Err(err) => {
                    self.metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
                    debug!(%err, "A request for entropy has no buffer");
                    0
                }
            };
            if let Err(err) = self.queue.queue.add_used(memory, head, len) {
                debug!(%err, "The entropy device's used ring cannot be written");
                break;
            }
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

/// Begins or ends waiting for the source. Returns whether it is waited for.
fn watch(source: &EntropySource, watch: bool, ops: &mut EventOps) -> bool {
    let EntropySource::File(file) = source else { return false };
    let event = Events::with_data(file, SOURCE, EventSet::IN);
    let result = if watch { ops.add(event) } else { ops.remove(event) };
    if let Err(err) = &result {
        sparsely!(warn, ?err, "Cannot wait for the entropy source");
    }
    watch && result.is_ok()
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(err) = ops.add(Events::with_data(&self.queue.kick, KICK, EventSet::IN)) {
            sparsely!(warn, ?err, "Cannot wait for the entropy device's driver");
        }
        self.serve(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            KICK => {
                let _ = self.queue.kick.read();
                if self.waiting {
                    // New requests queue up behind the one that waits.
                    return;
                }
            }
            _ => self.waiting = watch(&self.source, false, ops),
        }
        self.serve(ops);
    }
}
