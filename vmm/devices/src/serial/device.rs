//! COM1 as a device on the port bus. The device owns the UART and its worker.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_manager::SubscriberId;
use parking_lot::Mutex;
use thiserror::Error;
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial as Uart, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::event::Worker;
use super::line_writer::LineWriter;
use super::metrics::SerialMetrics;
use crate::bus::BusDevice;
use crate::event_loop::{EventLoopError, EventLoopHandle};
use crate::host_console::HostConsole;

#[derive(Debug, Error)]
pub enum SerialError {
    #[error("cannot set up the serial port")]
    Io(#[from] io::Error),
    #[error("cannot start the worker of the serial port")]
    Worker(#[from] EventLoopError),
}

/// Irqfd that raises the UART's interrupt.
pub(super) struct Irq(EventFd);

impl Trigger for Irq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Notifications from the UART. The UART is locked during the calls.
pub(super) struct Reports {
    metrics: Arc<SerialMetrics>,
    /// Set if the worker waits until the guest has read all input.
    pub(super) waiting: AtomicBool,
    pub(super) drained: EventFd,
}

impl SerialEvents for Reports {
    fn buffer_read(&self) {
        self.metrics.input_bytes.fetch_add(1, Ordering::Relaxed);
    }

    fn out_byte(&self) {
        self.metrics.output_bytes.fetch_add(1, Ordering::Relaxed);
    }

    fn tx_lost_byte(&self) {
        self.metrics.lost_bytes.fetch_add(1, Ordering::Relaxed);
    }

    fn in_buffer_empty(&self) {
        if self.waiting.swap(false, Ordering::AcqRel) {
            // The write fails only if the counter is full, and the worker is then already notified.
            let _ = self.drained.write(1);
        }
    }
}

/// UART, which vCPUs and the worker share.
pub(super) type SharedUart = Arc<Mutex<Uart<Irq, Reports, LineWriter>>>;

/// COM1, to be inserted into the port bus.
pub struct Serial {
    uart: SharedUart,
    metrics: Arc<SerialMetrics>,
    event_loop: EventLoopHandle,
    worker: SubscriberId,
}

impl Serial {
    /// Creates a serial port that raises `irq`. The caller must have connected `irq` to an
    /// interrupt. `console` is the other end of the line.
    pub fn new(
        console: HostConsole,
        irq: EventFd,
        event_loop: &EventLoopHandle,
    ) -> Result<Arc<Self>, SerialError> {
        let metrics = Arc::new(SerialMetrics::default());
        let reports = Reports {
            metrics: Arc::clone(&metrics),
            waiting: AtomicBool::new(false),
            drained: EventFd::new(EFD_NONBLOCK)?,
        };
        let drained = reports.drained.try_clone()?;
        let writer = LineWriter::new(console.output, Arc::clone(&metrics))?;
        let timer = writer.timer();
        let uart = Arc::new(Mutex::new(Uart::with_events(Irq(irq), reports, writer)));
        let worker = Worker::new(Arc::clone(&uart), timer, drained, console.input);
        let worker = event_loop.add(Box::new(worker))?;
        Ok(Arc::new(Self { uart, metrics, event_loop: event_loop.clone(), worker }))
    }

    pub fn metrics(&self) -> Arc<SerialMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // Each register has one byte. Wider accesses read ones, as on an ISA bus without a device.
        match data {
            [byte] => *byte = self.uart.lock().read(offset as u8),
            _ => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let [byte] = data {
            // The writer never fails. A failure to raise the interrupt cannot be reported to the
            // guest.
            let _ = self.uart.lock().write(offset as u8, *byte);
        }
    }
}

impl Drop for Serial {
    fn drop(&mut self) {
        // Restores the terminal. If the loop has already ended, it has dropped the worker.
        let _ = self.event_loop.remove(self.worker);
    }
}
