//! The worker: forwards the guest's output, and input while the guest has buffers for it.

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
use crate::log::sparsely;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

pub(super) const RECEIVE: u16 = 0;
pub(super) const TRANSMIT: u16 = 1;

const RECEIVE_KICK: u32 = 0;
const TRANSMIT_KICK: u32 = 1;
const INPUT: u32 = 2;
const OUTPUT: u32 = 3;
const RESIZED: u32 = 4;

/// Largest output that is taken from a chain and gathered for a write. Drivers send a page at a
/// time, but descriptors may claim gigabytes.
const OUTPUT_LEN_MAX: usize = 64 << 10;
/// Largest input for one chain.
const INPUT_LEN_MAX: usize = 4096;
/// Writes, or chains of input, before other devices on the event loop.
const BATCH: usize = 16;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    receive: ActiveQueue,
    transmit: ActiveQueue,
    host: Arc<Mutex<HostConsole>>,
    /// Set while the worker waits for input.
    input: Interest,
    /// Set while output waits for room.
    room: Interest,
    /// The terminal, if the driver has negotiated its size.
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
            // No guard is held during the write, because a disk may be slow, and unplugs wait for
            // guards.
            let lost = self.host.lock().output.send(&text);
            self.lose(&lost);
            // Buffers are returned even if the output was lost. A driver that waits for its buffer
            // keeps a CPU busy and delays others.
            if !self.give_back(&heads) {
                return self.watch_output(ops);
            }
            // The next output would wait for a slow file and delay other devices on the event loop.
            if self.host.lock().output.is_full() {
                break;
            }
        }
        self.transmit.come_back();
        self.watch_output(ops);
    }

    fn lose(&self, lost: &Lost) {
        if lost.len > 0 {
            debug!(err = ?lost.error, bytes = lost.len, "Output of the console lost");
            add(&self.metrics.lost_bytes, lost.len);
        }
    }

    /// Writes pending output after the reader has made room.
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

    /// Takes available output under one guard. Returns the text and the heads of its chains.
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
        let tell = given > 0 && self.transmit.queue.needs_notification(memory).unwrap_or(true);
        drop(guard);
        if tell {
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

    /// Moves input into the guest's buffers, until either is used up.
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
                // Waits for the driver's notification, because available input would resume the
                // worker at once.
                outcome = Outcome::NoBuffer;
                break;
            }
            used = true;
        }
        let tell = used && self.receive.queue.needs_notification(memory).unwrap_or(true);
        drop(guard);
        if tell {
            self.signal(RECEIVE);
        }
        outcome
    }

    /// Notifies the driver of a possible change of size, which it reads from the configuration
    /// (5.3.4).
    fn tell_size(&self) {
        let Some(window) = &self.window else { return };
        // Several changes count as one.
        let _ = window.changed().read();
        if let Err(err) = self.interrupt.signal_config() {
            sparsely!(warn, %err, "Cannot notify the driver of a new terminal size");
        }
    }

    fn signal(&self, queue: u16) {
        if let Err(err) = self.interrupt.signal_queue(queue) {
            sparsely!(warn, %err, queue, "Cannot interrupt the console driver");
        }
    }
}

/// Reason to stop moving input.
enum Outcome {
    /// No input is available, or other devices have their turn. Further input resumes the worker.
    Idle,
    /// The guest has no buffer. Its notification resumes the worker.
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
            sparsely!(warn, %err, "Input of the console ended");
            Filled::End
        }
    }
}

/// Takes chains and their text, until the text suffices for one write.
///
/// At most `chains_max`, a ring's worth, because chains without readable bytes never fill the text.
/// Another vCPU may add the same ones as fast as they are taken, while the caller's guard delays
/// unplugs.
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

/// Appends the content of `chain` to `text`. False if it is unreadable or empty.
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
        self.tell_size();
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
            RESIZED => self.tell_size(),
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
        // A limit, so that a device that never stops fails the test instead of hanging.
        const REFILLS: usize = 10_000;
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        let mut queue = activation.queues.pop().flatten().unwrap().queue;
        let guard = activation.view.memory();
        let memory: &MappedMemory = &guard;
        driver.write(BUFFERS, b"0123456789");
        // No bytes, a few bytes, and enough for a write.
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
            // The chain of the last refill remains for the next pass.
            assert!(queue.pop_descriptor_chain(memory).is_some());
        }
    }
}
