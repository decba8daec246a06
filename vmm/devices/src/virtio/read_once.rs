//! Guest memory that allows only one read of each byte. Another thread of the guest may change a
//! byte after the VMM has checked it, so a second read may return another value.

use std::collections::HashSet;

use parking_lot::Mutex;
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::guest_memory::{
    Error as AccessError, GuestMemoryBackendSliceIterator, GuestMemorySliceIterator,
};
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions};

use super::testing::{Buffer, TestDriver};

/// Memory that panics if a byte is read again.
pub(super) struct ReadOnceMemory {
    regions: GuestMemoryMmap,
    /// Addresses of the bytes that were read.
    read: Mutex<HashSet<u64>>,
}

impl GuestMemory for ReadOnceMemory {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, _access: Permissions) -> bool {
        GuestMemoryBackend::check_range(&self.regions, addr, count)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>, AccessError> {
        if access != Permissions::Write {
            let mut read = self.read.lock();
            for byte in addr.0..addr.0 + count as u64 {
                assert!(read.insert(byte), "the byte at {byte:#x} is read again");
            }
        }
        let slices: GuestMemoryBackendSliceIterator<'a, GuestMemoryMmap> =
            GuestMemoryBackend::get_slices(&self.regions, addr, count);
        Ok(slices)
    }
}

/// Calls `parse` with a chain of `buffers`, which must not overlap. Panics if a descriptor or a
/// buffer is read again.
pub(super) fn with_chain<R>(
    driver: &mut TestDriver,
    buffers: &[Buffer],
    parse: impl FnOnce(&ReadOnceMemory, &mut DescriptorChain<&ReadOnceMemory>) -> R,
) -> R {
    let mut activation = driver.activation(0);
    let mut queue = activation.queues.remove(0).unwrap().queue;
    driver.add(0, buffers);
    let memory = ReadOnceMemory { regions: driver.memory.clone(), read: Mutex::default() };
    let mut chain = queue.pop_descriptor_chain(&memory).unwrap();
    parse(&memory, &mut chain)
}

#[test]
#[should_panic(expected = "the byte at 0x80001 is read again")]
fn second_read_of_a_byte_is_detected() {
    use vm_memory::Bytes;
    let mut driver = TestDriver::new(1);
    let at = super::testing::BUFFERS;
    with_chain(&mut driver, &[Buffer::Out(at, 3)], |memory, chain| {
        let address = chain.next().unwrap().addr();
        memory.read_slice(&mut [0; 2], address).unwrap();
        memory.write_slice(&[1; 3], address).unwrap();
        let _ = memory.read_slice(&mut [0; 2], GuestAddress(address.0 + 1));
    });
}
