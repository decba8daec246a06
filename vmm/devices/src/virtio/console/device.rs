//! The console device. It has two queues, and its configuration contains the size of the terminal.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::event::{RECEIVE, TRANSMIT, Worker};
use super::metrics::ConsoleMetrics;
use crate::event_loop::EventLoopHandle;
use crate::host_console::{HostConsole, Window};
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

/// Device type (virtio 1.3, 5).
const TYPE_CONSOLE: u16 = 3;
/// `cols` and `rows` of the configuration are valid (5.3.3).
const F_SIZE: u64 = 1 << 0;
/// The queues are receiveq and transmitq (5.3.2).
const QUEUE_SIZES: [u16; 2] = [64, 64];

pub struct Console {
    /// Input and output of the host. The current worker uses them, and they remain here for the
    /// next worker.
    host: Arc<Mutex<HostConsole>>,
    window: Option<Arc<Window>>,
    metrics: Arc<ConsoleMetrics>,
    worker: WorkerSlot,
}

impl Console {
    /// Creates a console that is connected to `host`.
    pub fn new(host: HostConsole, event_loop: EventLoopHandle) -> Self {
        let worker = WorkerSlot::new(event_loop);
        let window = host.window.clone();
        Self { host: Arc::new(Mutex::new(host)), window, metrics: Arc::default(), worker }
    }

    pub fn metrics(&self) -> Arc<ConsoleMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u16 {
        TYPE_CONSOLE
    }

    fn name(&self) -> &str {
        "__console"
    }

    /// Offers F_SIZE if the console has a terminal. A terminal of unknown size reports 0 by 0. A
    /// Linux guest then behaves as if the feature were not offered.
    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | self.window.as_ref().map_or(0, |_| F_SIZE)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// Returns `cols` and `rows` (5.3.4). Later fields belong to features that the device does not
    /// offer.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let size = self.window.as_ref().map(|window| window.size()).unwrap_or_default();
        let [columns, rows] = [size.columns, size.rows].map(u16::to_le_bytes);
        read_config_bytes([columns, rows].as_flattened(), offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let queues = [activation.take_queue(RECEIVE)?, activation.take_queue(TRANSMIT)?];
        let worker = Worker::new(
            activation.view,
            activation.interrupt,
            queues,
            Arc::clone(&self.host),
            self.window.clone().filter(|_| activation.features & F_SIZE != 0),
            Arc::clone(&self.metrics),
        );
        self.worker.start(Box::new(worker))
    }

    fn reset(&mut self) {
        self.worker.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{self, PipeReader, PipeWriter, Read, Write};
    use std::sync::atomic::Ordering;

    use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
    use foreshore_confinement::thread::ThreadKind;
    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::event_loop::EventLoop;
    use crate::host_console::{ConsoleOutput, resize};
    use crate::memory::lost_memory::LossFlag;
    use crate::virtio::testing::{BUFFERS, Buffer, MEMORY_LEN, TestDriver};

    const RECEIVE: usize = super::RECEIVE as usize;
    const TRANSMIT: usize = super::TRANSMIT as usize;

    struct Rig {
        _event_loop: EventLoop,
        console: Console,
        driver: TestDriver,
        keyboard: PipeWriter,
        screen: PipeReader,
        loss: LossFlag,
    }

    impl Rig {
        fn new() -> Self {
            let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
            let (host, keyboard, screen) = HostConsole::pipes();
            let mut console = Console::new(host, event_loop.handle());
            let mut driver = TestDriver::new(2);
            let activation = driver.activation(console.features());
            let loss = activation.view.loss();
            console.activate(activation).unwrap();
            Self { _event_loop: event_loop, console, driver, keyboard, screen, loss }
        }

        fn send(&mut self, text: &[u8]) {
            self.driver.write(BUFFERS, text);
            self.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, text.len() as u32)]);
            self.driver.kick(TRANSMIT);
        }

        fn screen(&mut self, len: usize) -> Vec<u8> {
            let mut text = vec![0; len];
            self.screen.read_exact(&mut text).unwrap();
            text
        }
    }

    #[test]
    fn output_copied_from_lost_memory_is_dropped() {
        let mut rig = Rig::new();
        rig.send(b"there");
        rig.driver.wait_used(TRANSMIT);
        // A page of guest memory is lost, so the copy may contain zeros.
        rig.loss.raise();
        rig.send(b"gone");
        rig.driver.wait_used(TRANSMIT);
        assert_eq!(rig.screen(5), b"there");
        let metrics = rig.console.metrics();
        assert_eq!(metrics.bad_requests.load(Ordering::Relaxed), 1);
        assert_eq!(metrics.output_bytes.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn output_is_written_in_order() {
        let mut rig = Rig::new();
        rig.driver.write(BUFFERS + 0x1000, b"world");
        rig.driver.write(BUFFERS, b"hello ");
        let chain = [Buffer::Out(BUFFERS, 6), Buffer::Out(BUFFERS + 0x1000, 5)];
        let head = rig.driver.add(TRANSMIT, &chain);
        rig.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS + 0x1000, 2)]);
        rig.driver.kick(TRANSMIT);
        assert_eq!(rig.driver.wait_used(TRANSMIT), (head, 0));
        assert_eq!(rig.screen(13), b"hello worldwo");
        rig.driver.wait_used(TRANSMIT);
        assert_eq!(rig.console.metrics().output_bytes.load(Ordering::Relaxed), 13);
    }

    #[test]
    fn input_waits_for_buffers_and_fills_them_one_after_the_other() {
        let mut rig = Rig::new();
        rig.keyboard.write_all(b"early birds").unwrap();
        let first = rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 2), Buffer::In(BUFFERS + 2, 4)]);
        rig.driver.kick(RECEIVE);
        assert_eq!(rig.driver.wait_used(RECEIVE), (first, 6));
        assert_eq!(rig.driver.read(BUFFERS, 6), b"early ");
        let second = rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 64)]);
        let third = rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS + 64, 64)]);
        rig.driver.kick(RECEIVE);
        assert_eq!(rig.driver.wait_used(RECEIVE), (second, 5));
        assert_eq!(rig.driver.read(BUFFERS, 5), b"birds");
        rig.keyboard.write_all(b"!").unwrap();
        assert_eq!(rig.driver.wait_used(RECEIVE), (third, 1));
        assert_eq!(rig.console.metrics().input_bytes.load(Ordering::Relaxed), 12);
    }

    #[test]
    fn buffers_outside_memory_or_of_the_wrong_kind_are_returned() {
        let mut rig = Rig::new();
        rig.driver.add(TRANSMIT, &[Buffer::Out(MEMORY_LEN - 4, 8)]);
        rig.driver.add(TRANSMIT, &[Buffer::In(BUFFERS, 8)]);
        rig.driver.kick(TRANSMIT);
        rig.driver.wait_used(TRANSMIT);
        rig.driver.wait_used(TRANSMIT);
        rig.keyboard.write_all(b"x").unwrap();
        rig.driver.add(RECEIVE, &[Buffer::Out(BUFFERS, 8)]);
        rig.driver.add(RECEIVE, &[Buffer::In(u64::MAX, 8)]);
        rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 8)]);
        rig.driver.kick(RECEIVE);
        assert_eq!([0; 3].map(|_| rig.driver.wait_used(RECEIVE).1), [0, 0, 1]);
        assert_eq!(rig.driver.read(BUFFERS, 1), b"x");
        assert_eq!(rig.console.metrics().bad_requests.load(Ordering::Relaxed), 4);
        rig.send(b"alive");
        assert_eq!(rig.screen(5), b"alive");
    }

    #[test]
    fn the_end_of_input_is_not_the_end_of_output() {
        let mut rig = Rig::new();
        rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS + 0x1000, 8)]);
        rig.driver.kick(RECEIVE);
        let (_reader, other) = io::pipe().unwrap();
        drop(std::mem::replace(&mut rig.keyboard, other));
        rig.send(b"alive");
        assert_eq!(rig.screen(5), b"alive");
    }

    #[test]
    fn output_without_a_reader_is_lost_and_counted() {
        let mut rig = Rig::new();
        let (other, _writer) = io::pipe().unwrap();
        drop(std::mem::replace(&mut rig.screen, other));
        rig.send(b"gone");
        rig.driver.wait_used(TRANSMIT);
        assert_eq!(rig.console.metrics().lost_bytes.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn output_without_a_reader_does_not_block_and_is_partly_delivered_later() {
        let mut rig = Rig::new();
        let text = vec![b'x'; 64 << 10];
        let metrics = rig.console.metrics();
        let lost = || metrics.lost_bytes.load(Ordering::Relaxed);
        while lost() == 0 {
            rig.send(&text);
            rig.driver.wait_used(TRANSMIT);
        }
        // The event loop still runs, and the device works after its next activation.
        rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 8)]);
        rig.driver.kick(RECEIVE);
        rig.keyboard.write_all(b"key").unwrap();
        assert_eq!(rig.driver.wait_used(RECEIVE).1, 3);
        rig.console.reset();
        let activation = rig.driver.activation(rig.console.features());
        rig.console.activate(activation).unwrap();
        let delivered = metrics.output_bytes.load(Ordering::Relaxed) - lost();
        assert!(rig.screen(delivered as usize).iter().all(|byte| *byte == b'x'));
        rig.send(b"again");
        assert_eq!(rig.screen(5), b"again");
    }

    /// Another device on the event loop that always has work. Each time it runs, it records how
    /// much output the console has taken.
    struct Neighbor {
        ready: EventFd,
        console: Arc<ConsoleMetrics>,
        seen: Arc<Mutex<BTreeSet<u64>>>,
    }

    impl MutEventSubscriber for Neighbor {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&self.ready, EventSet::IN)).unwrap();
        }

        fn process(&mut self, _: Events, _: &mut EventOps) {
            self.seen.lock().insert(self.console.output_bytes.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn other_devices_have_their_turn_after_each_write_to_a_slow_file() {
        const WRITES: u64 = 10;
        const WRITE_LEN: u32 = 64 << 10;
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (hold, output) = ConsoleOutput::stalled();
        let mut console =
            Console::new(HostConsole::without_terminal(output, None), event_loop.handle());
        let seen = Arc::default();
        let ready = EventFd::new(0).unwrap();
        ready.write(1).unwrap();
        let neighbor = Neighbor { ready, console: console.metrics(), seen: Arc::clone(&seen) };
        event_loop.handle().add(Box::new(neighbor)).unwrap();
        let mut driver = TestDriver::new(2);
        let activation = driver.activation(console.features());
        for _ in 0..WRITES {
            driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, WRITE_LEN)]);
        }
        console.activate(activation).unwrap();
        for _ in 0..WRITES {
            driver.wait_used(TRANSMIT);
        }
        // The other device may not have run since the last write.
        let turns = (1..WRITES).map(|nth| nth * u64::from(WRITE_LEN)).collect();
        assert!(seen.lock().is_superset(&turns), "{seen:?}");
        drop(hold);
    }

    #[test]
    fn next_activation_continues_with_the_same_host_side() {
        let mut rig = Rig::new();
        rig.console.reset();
        rig.send(b"never");
        assert_eq!(rig.driver.used(TRANSMIT), None);
        let activation = rig.driver.activation(rig.console.features());
        rig.console.activate(activation).unwrap();
        rig.send(b"again");
        assert_eq!(rig.screen(5), b"again");
        rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 8)]);
        rig.driver.kick(RECEIVE);
        rig.keyboard.write_all(b"key").unwrap();
        assert_eq!(rig.driver.wait_used(RECEIVE).1, 3);
    }

    #[test]
    fn used_rings_that_cannot_be_written_cost_one_pass() {
        let mut rig = Rig::new();
        rig.console.reset();
        let mut activation = rig.driver.activation(rig.console.features());
        for queue in activation.queues.iter_mut().flatten() {
            queue.queue.try_set_used_ring_address(GuestAddress(MEMORY_LEN)).unwrap();
        }
        rig.keyboard.write_all(b"early birds").unwrap();
        for _ in 0..2 {
            rig.driver.add(RECEIVE, &[Buffer::In(BUFFERS, 4)]);
            // Largest amount of output that one pass can take.
            rig.driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, 64 << 10)]);
        }
        rig.console.activate(activation).unwrap();
        let metrics = rig.console.metrics();
        assert_eq!(metrics.input_bytes.load(Ordering::Relaxed), 4);
        assert_eq!(metrics.output_bytes.load(Ordering::Relaxed), 64 << 10);
        assert!(!rig.driver.interrupted(RECEIVE) && !rig.driver.interrupted(TRANSMIT));
    }

    fn size(console: &Console) -> [u16; 2] {
        let mut config = [0xff; 12];
        console.read_config(0, &mut config);
        assert_eq!(config[4..], [0; 8]);
        [0, 2].map(|at| u16::from_le_bytes([config[at], config[at + 1]]))
    }

    #[test]
    fn driver_is_notified_of_the_first_size_and_of_each_change() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (window, terminal) = Window::of_test();
        let host = HostConsole { window: Some(Arc::new(window)), ..HostConsole::pipes().0 };
        let mut console = Console::new(host, event_loop.handle());
        assert_ne!(console.features() & F_SIZE, 0);
        assert_eq!(size(&console), [0, 0]);
        resize(&terminal, 132, 43);
        let mut driver = TestDriver::new(2);
        for _ in 0..2 {
            console.activate(driver.activation(console.features())).unwrap();
            driver.wait_config();
            assert_eq!(size(&console), [132, 43]);
            console.reset();
        }
        console.activate(driver.activation(console.features())).unwrap();
        driver.wait_config();
        resize(&terminal, 80, 24);
        console.window.as_ref().unwrap().changed().write(1).unwrap();
        driver.wait_config();
        assert_eq!(size(&console), [80, 24]);
    }

    #[test]
    fn size_changes_without_the_feature_cause_no_interrupt() {
        let (window, _terminal) = Window::of_test();
        for window in [Some(Arc::new(window)), None] {
            let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
            let is_terminal = window.is_some();
            let host = HostConsole { window: window.clone(), ..HostConsole::pipes().0 };
            let mut console = Console::new(host, event_loop.handle());
            assert_eq!(console.features() & F_SIZE != 0, is_terminal);
            let mut driver = TestDriver::new(2);
            console.activate(driver.activation(console.features() & !F_SIZE)).unwrap();
            if let Some(window) = window {
                window.changed().write(1).unwrap();
            }
            // The device answers this request only after it has handled the resize.
            driver.add(TRANSMIT, &[Buffer::Out(BUFFERS, 1)]);
            driver.kick(TRANSMIT);
            driver.wait_used(TRANSMIT);
            assert!(!driver.config_changed());
        }
    }

    #[test]
    fn activation_without_its_queues_fails() {
        for missing in [0, 1] {
            let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
            let host = HostConsole::without_terminal(ConsoleOutput::null(), None);
            let mut console = Console::new(host, event_loop.handle());
            let mut activation = TestDriver::new(2).activation(console.features());
            activation.queues[usize::from(missing)] = None;
            let error = console.activate(activation).unwrap_err();
            assert!(matches!(error, ActivateError::QueueMissing { index } if index == missing));
        }
    }
}
