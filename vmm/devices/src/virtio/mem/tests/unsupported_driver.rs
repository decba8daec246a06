//! Tests of drivers without VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE, such as those in Linux 5.8 to
//! 5.15.

use super::*;
use crate::virtio::mem::UNSUPPORTED_DRIVER;

impl Guest {
    /// Replaces the driver with one from a Linux before 5.16.
    fn load_old_driver(&mut self) {
        self.device.reset();
        self.negotiate_as_old_driver();
    }

    fn negotiate_as_old_driver(&self) {
        assert!(!self.device.accepts_features(self.device.features() & !(1 << 1)));
    }
}

fn unsupported() -> RequestSizeError {
    RequestSizeError::UnsupportedDriver { zone: "dram".to_owned() }
}

#[test]
fn driver_without_unplugged_inaccessible_is_refused() {
    let mut guest = Guest::new(64, None);
    guest.load_old_driver();
    assert_eq!(guest.handle.sizes().driver, DriverState::Unsupported);
    // A guest without ACPI does not use the NUMA node, so its driver need not accept that feature.
    assert!(guest.device.accepts_features(guest.device.features() & !1));
}

#[test]
fn refused_driver_withdraws_the_waiting_request() {
    let mut guest = Guest::new(64, None);
    guest.device.reset();
    guest.handle.request_step(8 * BLOCK_BYTES, 16 * BLOCK_BYTES).unwrap();
    guest.drain_events();
    guest.negotiate_as_old_driver();
    assert_eq!(
        guest.drain_events(),
        [MemEvent::DriverUnsupported, MemEvent::Withdrawn { requested_bytes: 0 }]
    );
    let sizes = guest.handle.sizes();
    assert_eq!((sizes.requested_bytes, sizes.held_bytes, sizes.is_withdrawn), (0, 0, true));
    assert_eq!(guest.config_field(48), 0);
}

#[test]
fn request_from_a_refused_driver_is_an_error() {
    let mut guest = Guest::new(64, None);
    guest.load_old_driver();
    assert_eq!(guest.handle.request_size(BLOCK_BYTES), Err(unsupported()));
    assert_eq!(guest.handle.request_step(0, BLOCK_BYTES), Err(unsupported()));
    assert_eq!(guest.handle.sizes().requested_bytes, 0);
    assert!(!guest.handle.sizes().is_withdrawn);
    // Requesting the size that is already plugged needs no driver.
    guest.handle.request_size(0).unwrap();
    let text = unsupported().to_string();
    assert!(text.contains("\"dram\"") && text.contains("5.16"), "{text}");
}

#[test]
fn memory_stays_plugged_when_a_later_driver_is_refused() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.write(7, 0x77);
    guest.handle.request_size(2 * BLOCK_BYTES).unwrap();
    guest.load_old_driver();
    let sizes = guest.handle.sizes();
    assert_eq!((sizes.requested_bytes, sizes.plugged_bytes), (8 * BLOCK_BYTES, 8 * BLOCK_BYTES));
    assert!(sizes.is_withdrawn);
    assert!(guest.handle.request_size(0).is_err());
    assert_eq!(guest.read(7), 0x77);
}

#[test]
fn newer_driver_after_a_refused_one_is_accepted() {
    let mut guest = Guest::new(64, None);
    guest.device.reset();
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    guest.negotiate_as_old_driver();
    guest.load_driver();
    let sizes = guest.handle.sizes();
    assert_eq!((sizes.driver, sizes.is_withdrawn), (DriverState::Ready, false));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.device.reset();
    assert_eq!(guest.handle.sizes().driver, DriverState::Absent);
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().write(text)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn refused_driver_is_logged_once_per_boot_and_reported_once_per_driver() {
    let mut guest = Guest::new(64, None);
    guest.drain_events();
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let mut reported = 0;
    crate::log::with_subscriber(subscriber, || {
        for _ in 0..3 {
            guest.load_old_driver();
            (0..100).for_each(|_| guest.negotiate_as_old_driver());
            let events = guest.drain_events().into_iter();
            reported += events.filter(|event| *event == MemEvent::DriverUnsupported).count();
            guest.load_driver();
        }
    });
    assert_eq!(reported, 3);
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    let warnings: Vec<_> = text.lines().filter(|line| line.contains(" WARN ")).collect();
    let [warning] = warnings[..] else { panic!("{text}") };
    assert!(warning.contains(UNSUPPORTED_DRIVER) && warning.contains("zone=dram"), "{warning}");
    assert!(warning.contains("5.16"), "{warning}");
}
