use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::fake::{Call, io_error};
use super::*;
use crate::virtio::block::Kind;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn read_returns_written_data() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    let data = pattern(8192, 1);
    assert_eq!(rig.write(16, &data), OK);
    assert_eq!(fake.bytes.lock()[8192..16384], data);
    assert_eq!(rig.read(16, 8192), Ok(data));
    assert_eq!(rig.read(2047, 512), Ok(vec![0; 512]));
    let metrics = rig.metrics();
    assert_eq!((metrics.done(Kind::Read), metrics.done(Kind::Write)), (2, 1));
    assert_eq!(metrics.read_bytes.load(Ordering::Relaxed), 8704);
    assert_eq!(metrics.written_bytes.load(Ordering::Relaxed), 8192);
}

#[test]
fn request_may_be_divided_at_any_byte() {
    let (mut rig, _) = Rig::fake(1 << 20);
    let data = pattern(1024, 2);
    rig.driver.write(DATA, &data);
    // The header is split into three descriptors, and the last one also contains data. One
    // descriptor is empty.
    rig.write_header(VIRTIO_BLK_T_OUT, 3);
    rig.driver.write(DATA - 4, &rig.driver.read(HEADER + 12, 4));
    let chain = [
        Buffer::Out(HEADER, 4),
        Buffer::Out(HEADER + 4, 8),
        Buffer::Out(DATA - 4, 4 + 100),
        Buffer::Out(DATA, 0),
        Buffer::Out(DATA + 100, 924),
        Buffer::In(STATUS, 1),
    ];
    rig.driver.add(0, &chain);
    rig.driver.kick(0);
    rig.driver.wait_used(0);
    assert_eq!(rig.status(), OK);
    // The status byte follows the data in the same descriptor.
    rig.write_header(VIRTIO_BLK_T_IN, 3);
    rig.driver.write(DATA, &[0; 1025]);
    rig.driver.add(0, &[Buffer::Out(HEADER, 16), Buffer::In(DATA, 3), Buffer::In(DATA + 3, 1022)]);
    rig.driver.kick(0);
    assert_eq!(rig.driver.wait_used(0).1, 1025);
    assert_eq!(rig.driver.read(DATA, 1024), data);
    assert_eq!(rig.driver.read(DATA + 1024, 1), [OK]);
}

#[test]
fn waiting_requests_are_all_answered() {
    let (mut rig, _) = Rig::fake(1 << 20);
    rig.write_header(VIRTIO_BLK_T_IN, 0);
    let heads: Vec<_> = (0..10)
        .map(|nth| {
            let data = DATA + 0x1000 * nth;
            rig.driver.add(
                0,
                &[Buffer::Out(HEADER, 16), Buffer::In(data, 512), Buffer::In(STATUS + nth, 1)],
            )
        })
        .collect();
    rig.driver.kick(0);
    let mut used: Vec<_> = heads.iter().map(|_| rig.driver.wait_used(0)).collect();
    used.sort_unstable();
    assert_eq!(used, heads.iter().map(|head| (*head, 513)).collect::<Vec<_>>());
    assert_eq!(rig.driver.read(STATUS, 10), [OK; 10]);
}

#[test]
fn every_queue_works() {
    let shape = DiskShape { queues: 3, ..shape() };
    let device = Block::new(shape, Arc::new(Fake::new(1 << 20))).unwrap();
    assert_ne!(device.features() & 1 << VIRTIO_BLK_F_MQ, 0);
    let features = device.features();
    let mut rig = Rig::with(device, features);
    rig.write_header(VIRTIO_BLK_T_IN, 0);
    for queue in 0..3 {
        rig.driver
            .add(queue, &[Buffer::Out(HEADER, 16), Buffer::In(DATA, 512), Buffer::In(STATUS, 1)]);
        rig.driver.kick(queue);
        assert_eq!(rig.driver.wait_used(queue).1, 513);
    }
}

#[test]
fn serial_number_is_padded_and_cut() {
    let (mut rig, _) = Rig::fake(1 << 20);
    rig.driver.write(DATA, &[0xaa; 64]);
    let (status, len) = rig.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer::In(DATA, 64)]);
    assert_eq!((status, len), (OK, 21));
    assert_eq!(rig.driver.read(DATA, 20), *b"serial\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(rig.driver.read(DATA + 20, 44), [0xaa; 44]);
    let (status, len) = rig.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer::In(DATA, 3)]);
    assert_eq!((status, len), (OK, 4));
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &pattern(8192, 3)), OK);
    let list = [range(0, 2, 0), range(8, 1, 0)].concat();
    rig.driver.write(DATA, &list);
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 32)]), (OK, 1));
    rig.driver.write(DATA, &range(10, 4, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP));
    assert_eq!(rig.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    let bytes = fake.bytes.lock();
    let mut expected = pattern(8192, 3);
    expected[..1024].fill(0xdd);
    expected[4096..4608].fill(0xdd);
    expected[5120..7168].fill(0);
    assert_eq!(bytes[..8192], expected);
}

#[test]
fn flush_makes_writes_durable_and_is_timed() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[1; 512]), OK);
    assert!(fake.is_dirty(), "no flush was requested");
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert!(!fake.is_dirty());
    assert_eq!(rig.metrics().flushes.count(), 1);
}

#[test]
fn writes_are_durable_after_the_cache_is_switched_off() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[1; 512]), OK);
    rig.device.write_config(32, &[0]);
    assert!(!fake.is_dirty(), "an earlier write is still in the cache");
    assert_eq!(rig.write(0, &[2; 512]), OK);
    assert!(!fake.is_dirty());
    rig.device.write_config(32, &[1]);
    assert_eq!(rig.write(0, &[3; 512]), OK);
    assert!(fake.is_dirty());
    for (offset, data) in [(32, &[2][..]), (32, &[0, 0]), (31, &[0]), (0, &[0; 8])] {
        rig.device.write_config(offset, data);
    }
    let mut mode = [0];
    rig.device.read_config(32, &mut mode);
    assert_eq!(mode, [1]);
}

#[test]
fn driver_that_cannot_flush_begins_without_a_cache() {
    let version = 1 << VIRTIO_F_VERSION_1;
    let (flush, choose) = (1 << VIRTIO_BLK_F_FLUSH, 1 << VIRTIO_BLK_F_CONFIG_WCE);
    // Columns: negotiated features, mode written before DRIVER_OK, and expected mode in the
    // configuration.
    for (features, written, expected) in [
        (version, None, 0),
        (version | choose, None, 0),
        (version | choose, Some(1), 1),
        (version | choose | flush, None, 1),
        (version | choose | flush, Some(0), 0),
    ] {
        let fake = Arc::new(Fake::new(1 << 20));
        let mut device = Block::new(shape(), fake.clone()).unwrap();
        // An earlier driver has set the opposite mode.
        device.write_config(32, &[1 - expected]);
        assert!(device.accepts_features(features));
        if let Some(written) = written {
            device.write_config(32, &[written]);
        }
        let mut mode = [9];
        device.read_config(32, &mut mode);
        assert_eq!(mode, [expected]);
        let mut driver = TestDriver::new(1);
        let activation = driver.activation(features);
        let view = activation.view.clone();
        device.activate(activation).unwrap();
        let mut rig = Rig { device, driver, view };
        assert_eq!(rig.write(0, &[1; 512]), OK);
        assert_eq!(fake.is_dirty(), expected == 1, "{features:#x} {written:?}");
    }
}

#[test]
fn failed_flush_is_reported_and_stops_writes() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    fake.set_hook(|call| if call == Call::Flush { io_error() } else { Ok(()) });
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (IOERR, 1));
    fake.set_hook(|_| Ok(()));
    assert_eq!(rig.write(0, &[1; 512]), IOERR);
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, IOERR);
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    let metrics = rig.metrics();
    assert!(metrics.read_only.load(Ordering::Relaxed));
    assert_eq!((metrics.failed(Kind::Flush), metrics.failed(Kind::Write)), (2, 1));
}

#[test]
fn failed_transfers_are_errors_and_the_disk_continues() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    fake.set_hook(|_| io_error());
    assert_eq!(rig.write(0, &[1; 512]), IOERR);
    assert_eq!(rig.read(0, 512), Err(IOERR));
    assert_eq!(rig.driver.read(DATA, 512), [0xaa; 512], "data was read");
    fake.set_hook(|_| Ok(()));
    assert_eq!(rig.write(0, &[1; 512]), OK);
}

#[test]
fn memory_can_be_plugged_while_the_disk_works() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    let view = rig.view.clone();
    // The test deadlocks if the device holds a guard of guest memory during a step.
    fake.set_hook(move |_| {
        drop(view.exclusive());
        Ok(())
    });
    assert_eq!(rig.write(0, &[1; 512]), OK);
    assert_eq!(rig.read(0, 512), Ok(vec![1; 512]));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn buffers_in_unplugged_memory_are_errors() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[7; 4096]), OK);
    rig.view.exclusive().add_pluggable(address(0xc_0000), 0x2_0000, 0x1_0000).unwrap();
    for (kind, buffer) in [
        (VIRTIO_BLK_T_IN, Buffer::In(0xc_0000, 4096)),
        (VIRTIO_BLK_T_OUT, Buffer::Out(0xc_0000, 4096)),
    ] {
        assert_eq!(rig.request(kind, 0, &[buffer]), (IOERR, 1));
    }
    assert_eq!(fake.bytes.lock()[..4096], [7; 4096]);
    rig.view.exclusive().set_plugged(address(0xc_0000), 0x1_0000, true);
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer::In(0xc_0000, 4096)]).0, OK);
    // One buffer ends at the last plugged byte, and the other extends beyond it.
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer::In(0xc_f000, 4096)]).0, OK);
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer::In(0xc_f200, 4096)]).0, IOERR);
}

#[test]
fn data_copied_from_lost_memory_is_neither_written_nor_returned() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[7; 4096]), OK);
    // A page of the buffers is lost during the copy. The signal handler replaces it with zeros.
    rig.view.loss().raise();
    assert_eq!(rig.write(0, &[0; 4096]), IOERR);
    assert_eq!(fake.bytes.lock()[..4096], [7; 4096]);
    // A read should also fail, so that the guest receives no data that may be wrong.
    assert_eq!(rig.read(0, 512), Err(IOERR));
    assert_eq!((rig.metrics().failed(Kind::Read), rig.metrics().failed(Kind::Write)), (1, 1));
}

#[test]
fn configuration_contains_the_shape() {
    let fake = Arc::new(Fake::new(1 << 20));
    let device = Block::new(DiskShape { queues: 2, queue_size: 64, ..shape() }, fake).unwrap();
    let mut config = [0xff; 64];
    device.read_config(0, &mut config);
    let field = |at: usize, len: usize| {
        config[at..at + len].iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
    };
    assert_eq!((field(0, 8), field(12, 4)), (2048, 62), "capacity, seg_max");
    assert_eq!(
        (field(20, 4), field(24, 1), field(26, 2)),
        (512, 3, 8),
        "block size, physical, least I/O"
    );
    assert_eq!((field(32, 1), field(34, 2)), (1, 2), "write-back, queues");
    assert_eq!((field(36, 4), field(40, 4), field(44, 4)), (1 << 22, 32, 8), "discard");
    assert_eq!((field(48, 4), field(52, 4), field(56, 1)), (1 << 22, 32, 1), "write zeroes");
    assert_eq!(field(60, 4), 0);
}

#[test]
fn resize_applies_to_the_next_request() {
    let (mut rig, _) = Rig::fake(1 << 20);
    assert_eq!(rig.read(2048, 512), Err(IOERR));
    rig.handle().resize(2 << 20).unwrap();
    assert_eq!(rig.read(2048, 512), Ok(vec![0; 512]));
    let mut capacity = [0; 8];
    rig.device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 4096);
}

#[test]
fn device_works_after_a_reset() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[5; 512]), OK);
    rig.device.write_config(32, &[0]);
    rig.device.reset();
    let activation = rig.driver.activation(rig.device.features());
    rig.device.activate(activation).unwrap();
    assert_eq!(rig.read(0, 512), Ok(vec![5; 512]));
    let flushes = fake.flushes.load(Ordering::Relaxed);
    assert_eq!(rig.write(0, &[6; 512]), OK);
    assert_eq!(fake.flushes.load(Ordering::Relaxed), flushes, "the cache is not on again");
}
