//! Tests of the device with a simulated driver: valid and invalid requests, and failing media.

mod bounded;
mod cache_mode;
mod cost;
mod device;
mod fake;
mod full_pool;
mod hostile;
mod image;
mod job;
mod overlap;
mod ring;
mod unaligned;
mod volume;

use std::sync::Arc;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use vm_memory::GuestAddress;

use self::fake::Fake;
use super::request::Status;
use super::{Block, BlockHandle, BlockMetrics, DiskShape};
use crate::disk::BlockDevice;
use crate::memory::view::GuestView;
use crate::virtio::VirtioDevice;
use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

const HEADER: u64 = BUFFERS;
const STATUS: u64 = BUFFERS + 0x100;
const DATA: u64 = BUFFERS + 0x1000;
/// Initial value of status bytes. The initial value shows that the device has not written one.
const UNTOUCHED: u8 = 0xee;

fn shape() -> DiskShape {
    DiskShape {
        id: "disk".to_owned(),
        serial: "serial".to_owned(),
        queues: 1,
        queue_size: 32,
        read_only: false,
    }
}

struct Rig {
    device: Block,
    driver: TestDriver,
    view: GuestView,
}

impl Rig {
    fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self::shaped(shape(), device)
    }

    fn shaped(shape: DiskShape, device: Arc<dyn BlockDevice>) -> Self {
        let device = Block::new(shape, device).unwrap();
        let features = device.features();
        Self::with(device, features)
    }

    fn with(mut device: Block, features: u64) -> Self {
        assert!(device.accepts_features(features));
        let mut driver = TestDriver::new(device.queue_sizes().len());
        let activation = driver.activation(features);
        let view = activation.view.clone();
        device.activate(activation).unwrap();
        Self { device, driver, view }
    }

    fn fake(len: usize) -> (Self, Arc<Fake>) {
        let fake = Arc::new(Fake::new(len));
        (Self::new(fake.clone()), fake)
    }

    fn handle(&self) -> BlockHandle {
        self.device.handle()
    }

    fn metrics(&self) -> Arc<BlockMetrics> {
        self.handle().metrics()
    }

    fn write_header(&self, kind: u32, sector: u64) {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.driver.write(HEADER, &header);
        self.driver.write(STATUS, &[UNTOUCHED]);
    }

    fn status(&self) -> u8 {
        self.driver.read(STATUS, 1)[0]
    }

    /// Sends a request and returns the head of its chain. Requests that are in progress
    /// concurrently need different slots. A read or write transfers the sector at [`data_of`] in
    /// guest memory.
    fn send(&mut self, queue: usize, slot: u64, kind: u32, sector: u64) -> u16 {
        let (header, status) = (HEADER + 0x200 + 0x10 * slot, status_at(slot));
        let bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.driver.write(header, &bytes);
        self.driver.write(status, &[UNTOUCHED]);
        let mut chain = vec![Buffer::Out(header, 16)];
        match kind {
            VIRTIO_BLK_T_OUT => chain.push(Buffer::Out(data_of(slot), 512)),
            VIRTIO_BLK_T_IN => chain.push(Buffer::In(data_of(slot), 512)),
            VIRTIO_BLK_T_GET_ID => chain.push(Buffer::In(data_of(slot), 20)),
            _ => (),
        }
        chain.push(Buffer::In(status, 1));
        let head = self.driver.add(queue, &chain);
        self.driver.kick(queue);
        head
    }

    fn status_of(&self, slot: u64) -> u8 {
        self.driver.read(status_at(slot), 1)[0]
    }

    /// Sends a chain that consists of the header, `buffers` and the status byte. Returns the status
    /// and the number of bytes written.
    fn request(&mut self, kind: u32, sector: u64, buffers: &[Buffer]) -> (u8, u32) {
        self.write_header(kind, sector);
        let chain = [&[Buffer::Out(HEADER, 16)], buffers, &[Buffer::In(STATUS, 1)]].concat();
        let head = self.driver.add(0, &chain);
        self.driver.kick(0);
        let (used, len) = self.driver.wait_used(0);
        assert_eq!(used, head);
        (self.status(), len)
    }

    fn write(&mut self, sector: u64, data: &[u8]) -> u8 {
        self.driver.write(DATA, data);
        self.request(VIRTIO_BLK_T_OUT, sector, &[Buffer::Out(DATA, data.len() as u32)]).0
    }

    fn read(&mut self, sector: u64, len: u32) -> Result<Vec<u8>, u8> {
        self.driver.write(DATA, &vec![0xaa; len as usize]);
        match self.request(VIRTIO_BLK_T_IN, sector, &[Buffer::In(DATA, len)]) {
            (status, used) if status == Status::Ok.code() => {
                assert_eq!(used, len + 1);
                Ok(self.driver.read(DATA, len))
            }
            (status, used) => {
                assert_eq!(used, 1);
                Err(status)
            }
        }
    }
}

/// Returns bytes whose pattern differs between sectors.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 9) as u8 ^ seed).collect()
}

fn status_at(slot: u64) -> u64 {
    STATUS + 1 + slot
}

fn data_of(slot: u64) -> u64 {
    DATA + 0x1000 * slot
}

fn address(at: u64) -> GuestAddress {
    GuestAddress(at)
}
