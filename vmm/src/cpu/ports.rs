//! Port accesses by a vCPU.
//!
//! One exit for a string instruction, such as `rep outsb`, can transfer many elements (KVM API, 5:
//! KVM_EXIT_IO, `count`). Each element is a separate access, as on hardware.

use foreshore_devices::bus::Bus;
use kvm_bindings::kvm_run;

/// Size of one element in the port access for which KVM_RUN returned.
///
/// # Safety
/// `run` points to the shared page of a vCPU, or to a page with the same layout. The exit reason in
/// the page must be KVM_EXIT_IO. No other thread may write the page's `io` during the call.
pub(super) unsafe fn element_bytes(run: *const kvm_run) -> usize {
    // SAFETY: the caller guarantees that `io` is the valid member of the union. The transferred
    // elements are elsewhere in the mapping (KVM_EXIT_IO, data_offset).
    usize::from(unsafe { (*run).__bindgen_anon_1.io.size }).max(1)
}

/// Reads every element from `port`. Returns false if no device answers one of the reads.
pub(super) fn read(ports: &Bus, port: u16, data: &mut [u8], element_bytes: usize) -> bool {
    let elements = data.chunks_mut(element_bytes);
    elements.fold(true, |answered, element| answered & ports.read(u64::from(port), element))
}

/// Writes every element to `port`. Returns false if no device accepts one of the writes.
pub(super) fn write(ports: &Bus, port: u16, data: &[u8], element_bytes: usize) -> bool {
    let elements = data.chunks(element_bytes);
    elements.fold(true, |answered, element| answered & ports.write(u64::from(port), element))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::Arc;

    use foreshore_confinement::thread::ThreadKind;
    use foreshore_devices::bus::BusDevice;
    use foreshore_devices::event_loop::EventLoop;
    use foreshore_devices::host_console::HostConsole;
    use foreshore_devices::serial::Serial;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    const COM1: u16 = 0x3f8;
    const TEXT: &[u8] = b"A string of one instruction, whole.\n";

    /// Element size in a page for an exit with `count` elements of `size` bytes.
    fn size_in_page(size: u8, count: u32) -> usize {
        let mut run = kvm_run::default();
        run.__bindgen_anon_1.io.size = size;
        run.__bindgen_anon_1.io.count = count;
        // SAFETY: the page belongs to this test, and its exit is a port access.
        unsafe { element_bytes(&raw const run) }
    }

    #[test]
    fn string_of_one_exit_is_whole_on_the_serial_port() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (console, _keyboard, mut screen) = HostConsole::pipes();
        let irq = EventFd::new(EFD_NONBLOCK).unwrap();
        let serial = Serial::new(console, irq, &event_loop.handle()).unwrap();
        let ports = Bus::default();
        ports.insert(u64::from(COM1), 8, serial).unwrap();
        // In KVM's page, the elements follow each other.
        assert!(write(&ports, COM1, TEXT, size_in_page(1, TEXT.len() as u32)));
        let mut shown = vec![0; TEXT.len()];
        screen.read_exact(&mut shown).unwrap();
        assert_eq!(shown, TEXT);
        // One access with all bytes would exceed the port, so the device would not accept it.
        assert!(!write(&ports, COM1, TEXT, TEXT.len()));
    }

    /// Device that counts reads. The device accepts only accesses of 2 bytes.
    struct Counter(parking_lot::Mutex<u16>);

    impl BusDevice for Counter {
        fn read(&self, _: u64, data: &mut [u8]) {
            let mut count = self.0.lock();
            *count += 1;
            data.copy_from_slice(&count.to_le_bytes());
        }

        fn write(&self, _: u64, data: &[u8]) {
            *self.0.lock() += u16::from_le_bytes(data.try_into().expect("an access of 2 bytes"));
        }
    }

    #[test]
    fn each_string_element_is_a_separate_access() {
        let counter = Arc::new(Counter(0.into()));
        let ports = Bus::default();
        ports.insert(0x100, 2, Arc::clone(&counter) as Arc<dyn BusDevice>).unwrap();
        let mut data = [0; 6];
        assert!(read(&ports, 0x100, &mut data, size_in_page(2, 3)));
        assert_eq!(data, [1, 0, 2, 0, 3, 0]);
        assert!(write(&ports, 0x100, &data, size_in_page(2, 3)));
        assert_eq!(*counter.0.lock(), 9);
        // If the page contains no size, elements are single bytes.
        assert_eq!(size_in_page(0, 1), 1);
    }

    #[test]
    fn access_without_a_device_is_reported_and_reads_as_ones() {
        let mut data = [0; 4];
        assert!(!read(&Bus::default(), COM1, &mut data, 1));
        assert_eq!(data, [0xff; 4]);
        assert!(!write(&Bus::default(), COM1, &data, 1));
    }
}
