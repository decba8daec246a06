//! Worker of the serial port on the event loop. The worker writes unfinished lines, and passes
//! input to the guest as fast as the guest reads it.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::warn;
use vmm_sys_util::eventfd::EventFd;

use super::device::SharedUart;
use crate::event_loop::Interest;
use crate::host_console::{ConsoleInput, Read};

const TIMER: u32 = 0;
const DRAINED: u32 = 1;
const INPUT: u32 = 2;

pub(super) struct Worker {
    uart: SharedUart,
    /// Timer of the UART's line writer.
    timer: RawFd,
    drained: EventFd,
    input: Option<ConsoleInput>,
    /// Interest in input. Disabled while the guest's buffer is full.
    waiting: Interest,
}

impl Worker {
    pub(super) fn new(
        uart: SharedUart,
        timer: RawFd,
        drained: EventFd,
        input: Option<ConsoleInput>,
    ) -> Self {
        let waiting = Interest::new("input of the serial port", INPUT, EventSet::IN);
        Self { uart, timer, drained, input, waiting }
    }

    /// Passes as much input to the guest as the UART's buffer accepts.
    fn pump(&mut self, ops: &mut EventOps) {
        let Some(input) = &mut self.input else { return };
        let mut uart = self.uart.lock();
        let mut data = [0; 64];
        loop {
            let room = uart.fifo_capacity().min(data.len());
            if room == 0 {
                uart.events().waiting.store(true, Ordering::Release);
                drop(uart);
                return self.waiting.set(false, &*input, ops);
            }
            match input.read(&mut data[..room]) {
                Ok(Read::Bytes(len)) => {
                    // The buffer has room. While the driver tests the port in loopback mode, input
                    // is lost, as on real hardware.
                    if let Err(err) = uart.enqueue_raw_bytes(&data[..len]) {
                        warn!(%err, "Cannot interrupt the guest for serial input");
                    }
                }
                Ok(Read::Nothing) => {
                    drop(uart);
                    return self.waiting.set(true, &*input, ops);
                }
                end => {
                    if let Err(err) = end {
                        warn!(%err, "Input of the serial port ended");
                    }
                    drop(uart);
                    self.waiting.set(false, &*input, ops);
                    self.input = None;
                    return;
                }
            }
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        let timer = Events::with_data_raw(self.timer, TIMER, EventSet::IN);
        let drained = Events::with_data(&self.drained, DRAINED, EventSet::IN);
        for event in [timer, drained] {
            if let Err(err) = ops.add(event) {
                warn!(?err, "Cannot watch the input of the serial port");
            }
        }
        self.pump(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            TIMER => {
                // A failed read only means that the timer has not expired.
                let _ = self.uart.lock().writer_mut().timer_rang();
            }
            DRAINED => {
                // One read clears all pending notifications.
                let _ = self.drained.read();
                self.pump(ops);
            }
            _ => self.pump(ops),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, PipeReader, PipeWriter, Read as _, Write};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use foreshore_confinement::thread::ThreadKind;
    use vmm_sys_util::eventfd::EventFd;

    use super::super::Serial;
    use crate::bus::BusDevice;
    use crate::event_loop::EventLoop;
    use crate::host_console::HostConsole;

    const DATA: u64 = 0;
    const IER: u64 = 1;
    const LSR: u64 = 5;

    struct Rig {
        _event_loop: EventLoop,
        serial: Arc<Serial>,
        irq: EventFd,
        keyboard: PipeWriter,
        screen: PipeReader,
    }

    impl Rig {
        fn new() -> Self {
            let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
            let (console, keyboard, screen) = HostConsole::pipes();
            // The eventfd is blocking, so that the test can wait for the interrupt.
            let irq = EventFd::new(0).unwrap();
            let serial =
                Serial::new(console, irq.try_clone().unwrap(), &event_loop.handle()).unwrap();
            Self { _event_loop: event_loop, serial, irq, keyboard, screen }
        }
        fn read(&self, register: u64) -> u8 {
            let mut data = [0];
            self.serial.read(register, &mut data);
            data[0]
        }
        fn write(&self, register: u64, value: u8) {
            self.serial.write(register, &[value]);
        }
    }

    #[test]
    fn prompt_appears_without_a_newline() {
        let mut rig = Rig::new();
        b"login: ".iter().for_each(|byte| rig.write(DATA, *byte));
        let mut prompt = [0; 7];
        rig.screen.read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"login: ");
    }

    #[test]
    fn input_beyond_the_guests_buffer_arrives_completely() {
        let mut rig = Rig::new();
        rig.write(IER, 1);
        let text: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
        rig.keyboard.write_all(&text).unwrap();
        let mut got = Vec::new();
        while got.len() < text.len() {
            rig.irq.read().unwrap();
            while rig.read(LSR) & 1 == 1 {
                got.push(rig.read(DATA));
            }
        }
        assert_eq!(got, text);
    }

    #[test]
    fn output_continues_after_the_end_of_input() {
        let mut rig = Rig::new();
        let (unused, keyboard) = io::pipe().unwrap();
        drop(std::mem::replace(&mut rig.keyboard, keyboard));
        drop(unused);
        b"still here\n".iter().for_each(|byte| rig.write(DATA, *byte));
        let mut line = [0; 11];
        rig.screen.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"still here\n");
    }

    #[test]
    fn unread_output_blocks_neither_guest_nor_drop() {
        let mut rig = Rig::new();
        let lost = || rig.serial.metrics().lost_bytes.load(Ordering::Relaxed);
        while lost() == 0 {
            [b'x'; 99].iter().chain(b"\n").for_each(|byte| rig.write(DATA, *byte));
        }
        // The worker still processes input, and can still be removed.
        rig.keyboard.write_all(b"k").unwrap();
        while rig.read(LSR) & 1 == 0 {
            std::thread::yield_now();
        }
        assert_eq!(rig.read(DATA), b'k');
        drop(rig.serial);
    }

    #[test]
    fn wide_accesses_read_ones() {
        let rig = Rig::new();
        let mut data = [0; 2];
        rig.serial.read(DATA, &mut data);
        assert_eq!(data, [0xff; 2]);
        rig.serial.write(DATA, &[1, 2]);
        assert_eq!(rig.serial.metrics().output_bytes.load(Ordering::Relaxed), 0);
    }
}
