//! The worker of the console. The worker forwards the guest's output, and forwards input while
//! the guest provides buffers.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use parking_lot::Mutex;
use tracing::{debug, warn};
use virtio_queue::{DescriptorChain, QueueT, Reader, Writer};
use vm_memory::GuestAddressSpace;

use super::metrics::ConsoleMetrics;
use crate::event_loop::Interest;
use crate::host_console::{ConsoleInput, HostConsole, Lost, Read, Window};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

pub(super) const RECEIVE: u16 = 0;
pub(super) const TRANSMIT: u16 = 1;

const RECEIVE_KICK: u32 = 0;
const TRANSMIT_KICK: u32 = 1;
const INPUT: u32 = 2;
const OUTPUT: u32 = 3;
const RESIZED: u32 = 4;

/// Maximum number of output bytes that are taken from one chain, and that are gathered for one
/// write. Drivers send at most a page per chain, but a descriptor may claim gigabytes.
const OUTPUT_LEN_MAX: usize = 64 << 10;
/// Maximum number of input bytes for one chain.
const INPUT_LEN_MAX: usize = 4096;
/// Number of writes, or of chains filled with input, before other devices on the event loop are
/// served.
const BATCH: usize = 16;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    receive: ActiveQueue,
    transmit: ActiveQueue,
    host: Arc<Mutex<HostConsole>>,
    /// Registered while the worker waits for input.
    input: Interest,
    /// Registered while output waits until the reader frees space.
    room: Interest,
    /// The terminal. `None` if the driver has not negotiated the size feature.
    window: Option<Arc<Window>>,
    metrics: Arc<ConsoleMetrics>,
}

impl Worker {
    pub(super) fn new(
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        [receive, transmit]: [ActiveQueue; 2],
        host: Arc<Mutex<HostConsole>>,
        window: Option<Arc<Window>>,
        metrics: Arc<ConsoleMetrics>,
    ) -> Self {
        let input = Interest::new("input of the console", INPUT, EventSet::IN);
        let room = Interest::new("output of the console", OUTPUT, EventSet::OUT);
        Self { view, interrupt, receive, transmit, host, input, room, window, metrics }
    }

    fn serve_output(&mut self, ops: &mut EventOps) {
        for _ in 0..BATCH {
            let (text, heads) = self.gather();
            if heads.is_empty() {
                return self.watch_output(ops);
            }
            add(&self.metrics.output_bytes, text.len());
            // No guard of guest memory is held during the write, because a disk may be slow, and
            // unplugs wait for guards.
            let lost = self.host.lock().output.send(&text);
            self.lose(&lost);
            // Buffers are returned even if the output was lost. Otherwise the driver would wait in
            // a busy loop, which delays other threads.
            if !self.give_back(&heads) {
                return self.watch_output(ops);
            }
            // The worker stops here, because further writes to a slow file would delay other
            // devices on the event loop.
            if self.host.lock().output.is_full() {
                break;
            }
        }
        self.transmit.reschedule();
        self.watch_output(ops);
    }

    fn lose(&self, lost: &Lost) {
        if lost.len > 0 {
            debug!(err = ?lost.error, bytes = lost.len, "Output of the console lost");
            add(&self.metrics.lost_bytes, lost.len);
        }
    }

    /// Writes pending output after the reader has freed space.
    fn catch_up(&mut self, ops: &mut EventOps) {
        let lost = self.host.lock().output.flush();
        self.lose(&lost);
        self.watch_output(ops);
    }

    fn watch_output(&mut self, ops: &mut EventOps) {
        let host = self.host.lock();
        if let Some(file) = host.output.file() {
            self.room.set(host.output.is_behind(), file, ops);
        }
    }

    /// Takes available output under one guard of guest memory. Returns the text and the heads of
    /// the chains that contained it.
    fn gather(&mut self) -> (Vec<u8>, Vec<u16>) {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let (queue, interrupt) = (&mut self.transmit, &*self.interrupt);
        let chains_max = usize::from(queue.queue.size());
        let chains = std::iter::from_fn(|| queue.pop(memory, interrupt));
        gather(memory, chains, chains_max, &self.metrics)
    }

    /// Returns false if the ring cannot be written.
    fn give_back(&mut self, heads: &[u16]) -> bool {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let given =
            heads.iter().take_while(|head| self.transmit.give_back(memory, **head, 0)).count();
        let needs_interrupt =
            given > 0 && self.transmit.queue.needs_notification(memory).unwrap_or(true);
        drop(guard);
        if needs_interrupt {
            self.signal(TRANSMIT);
        }
        given == heads.len()
    }

    fn serve_input(&mut self, ops: &mut EventOps) {
        let host = Arc::clone(&self.host);
        let mut host = host.lock();
        let Some(input) = &mut host.input else { return };
        let outcome = self.fill_buffers(input);
        match outcome {
            Outcome::Idle => self.input.set(true, &*input, ops),
            Outcome::NoBuffer => self.input.set(false, &*input, ops),
            Outcome::End => {
                self.input.set(false, &*input, ops);
                host.input = None;
            }
        }
    }

    /// Copies input to the guest's buffers until the input or the buffers are used up.
    fn fill_buffers(&mut self, input: &mut ConsoleInput) -> Outcome {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let mut used = false;
        let mut outcome = Outcome::Idle;
        for _ in 0..BATCH {
            let Some(chain) = self.receive.pop(memory, &*self.interrupt) else {
                outcome = Outcome::NoBuffer;
                break;
            };
            let head = chain.head_index();
            let len = match fill(memory, chain, input) {
                Filled::Bytes(len) => len,
                Filled::BadChain => {
                    add(&self.metrics.bad_requests, 1);
                    0
                }
                Filled::Nothing => {
                    virtio_queue::QueueOwnedT::go_to_previous_position(&mut self.receive.queue);
                    break;
                }
                Filled::End => {
                    virtio_queue::QueueOwnedT::go_to_previous_position(&mut self.receive.queue);
                    outcome = Outcome::End;
                    break;
                }
            };
            add(&self.metrics.input_bytes, len);
            if !self.receive.give_back(memory, head, len as u32) {
                // The worker waits for a notification from the driver. It must not wait for input,
                // because input is already available and would resume it immediately.
                outcome = Outcome::NoBuffer;
                break;
            }
            used = true;
        }
        let needs_interrupt = used && self.receive.queue.needs_notification(memory).unwrap_or(true);
        drop(guard);
        if needs_interrupt {
            self.signal(RECEIVE);
        }
        outcome
    }

    /// Notifies the driver that the terminal's size may have changed. The driver reads the size
    /// from the configuration (5.3.4).
    fn notify_size(&self) {
        let Some(window) = &self.window else { return };
        // One notification covers several changes.
        let _ = window.changed().read();
        if let Err(err) = self.interrupt.signal_config() {
            rate_limited!(warn, %err, "Cannot notify the driver of a new terminal size");
        }
    }

    fn signal(&self, queue: u16) {
        if let Err(err) = self.interrupt.signal_queue(queue) {
            rate_limited!(warn, %err, queue, "Cannot interrupt the console driver");
        }
    }
}

/// Reason why the worker stopped copying input.
enum Outcome {
    /// No input is available, or other devices must be served. Further input resumes the worker.
    Idle,
    /// The guest provides no buffer. The driver's next notification resumes the worker.
    NoBuffer,
    /// The input has ended.
    End,
}

enum Filled {
    Bytes(usize),
    Nothing,
    End,
    BadChain,
}

/// Reads available input into `chain`.
fn fill(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
    input: &mut ConsoleInput,
) -> Filled {
    let mut writer = match Writer::new(memory, chain) {
        Ok(writer) if writer.available_bytes() > 0 => writer,
        _ => return Filled::BadChain,
    };
    let mut data = [0; INPUT_LEN_MAX];
    let room = writer.available_bytes().min(INPUT_LEN_MAX);
    match input.read(&mut data[..room]) {
        Ok(Read::Bytes(len)) => match writer.write_all(&data[..len]) {
            Ok(()) => Filled::Bytes(len),
            Err(_) => Filled::BadChain,
        },
        Ok(Read::Nothing) => Filled::Nothing,
        Ok(Read::End) => Filled::End,
        Err(err) => {
            rate_limited!(warn, %err, "Input of the console ended");
            Filled::End
        }
    }
}

/// Takes chains and gathers their text until it is long enough for one write.
///
/// Takes at most `chains_max` chains, the size of the ring. Chains without readable bytes add no
/// text, and another vCPU may add such chains as fast as they are taken. The loop would then never
/// end, and the caller's guard would delay unplugs.
fn gather<'a>(
    memory: &'a MappedMemory,
    chains: impl Iterator<Item = DescriptorChain<&'a MappedMemory>>,
    chains_max: usize,
    metrics: &ConsoleMetrics,
) -> (Vec<u8>, Vec<u16>) {
    let (mut text, mut heads) = (Vec::new(), Vec::new());
    let mut chains = chains.take(chains_max);
    while text.len() < OUTPUT_LEN_MAX
        && let Some(chain) = chains.next()
    {
        heads.push(chain.head_index());
        if !append(memory, chain, &mut text, metrics) {
            add(&metrics.bad_requests, 1);
        }
    }
    (text, heads)
}

/// Appends the content of `chain` to `text`. Returns false if the chain is unreadable or empty.
fn append(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
    text: &mut Vec<u8>,
    metrics: &ConsoleMetrics,
) -> bool {
    let Ok(mut reader) = Reader::new(memory, chain) else { return false };
    let available = reader.available_bytes();
    let taken = available.min(OUTPUT_LEN_MAX);
    let start = text.len();
    text.resize(start + taken, 0);
    if memory.whole(&mut reader).read_exact(&mut text[start..]).is_err() {
        text.truncate(start);
        return false;
    }
    add(&metrics.lost_bytes, available - taken);
    available > 0
}

fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.receive.watch(RECEIVE_KICK, ops);
        self.transmit.watch(TRANSMIT_KICK, ops);
        if let Some(window) = &self.window
            && let Err(err) = ops.add(Events::with_data(window.changed(), RESIZED, EventSet::IN))
        {
            warn!(?err, "Cannot watch the terminal size of a console");
        }
        // Linux reads even the first size only after a configuration change (virtcons_probe,
        // config_work_handler).
        self.notify_size();
        self.serve_output(ops);
        self.serve_input(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            TRANSMIT_KICK => {
                self.transmit.clear_kick();
                self.serve_output(ops);
            }
            RECEIVE_KICK => {
                self.receive.clear_kick();
                self.serve_input(ops);
            }
            OUTPUT => self.catch_up(ops),
            RESIZED => self.notify_size(),
            _ => self.serve_input(ops),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    #[test]
    fn pass_ends_although_the_driver_refills_the_ring() {
        // The limit makes the test fail instead of hang if the device never stops.
        const REFILLS: usize = 10_000;
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        let mut queue = activation.queues.pop().flatten().unwrap().queue;
        let guard = activation.view.memory();
        let memory: &MappedMemory = &guard;
        driver.write(BUFFERS, b"0123456789");
        // Chains with no bytes, with a few bytes, and with enough bytes for a write.
        for (len, chains) in [(0, 32), (10, 32), (OUTPUT_LEN_MAX as u32, 1)] {
            let head = driver.add(0, &[Buffer::Out(BUFFERS, len)]);
            let mut refills = 0;
            let chains_max = usize::from(queue.size());
            let refilled = std::iter::from_fn(|| {
                let chain = queue.pop_descriptor_chain(memory)?;
                refills += 1;
                if refills < REFILLS {
                    driver.add_again(0, head);
                }
                Some(chain)
            });
            let (text, heads) = gather(memory, refilled, chains_max, &ConsoleMetrics::default());
            assert_eq!(heads.len(), chains, "chains of {len} bytes");
            assert_eq!(text.len(), chains * len as usize);
            // The chain that the last refill added remains for the next pass.
            assert!(queue.pop_descriptor_chain(memory).is_some());
        }
    }
}
