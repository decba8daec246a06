//! Tests of requests that a correct driver never sends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::fake::geometry;
use super::*;
use crate::disk::Geometry;
use crate::virtio::testing::MEMORY_LEN;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

#[test]
fn access_outside_of_the_disk_is_an_error() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    let read =
        |rig: &mut Rig, sector, len| rig.request(VIRTIO_BLK_T_IN, sector, &[Buffer::In(DATA, len)]);
    for (sector, len) in [
        (2048, 512),
        (2047, 1024),
        // The product with 512 overflows to a small number.
        (1 << 55, 512),
        ((1 << 55) + 1, 512),
        (u64::MAX, 512),
        (u64::MAX / 512, 1024),
        (0, 511),
        (0, 513),
        (0, 1),
    ] {
        assert_eq!(read(&mut rig, sector, len), (IOERR, 1), "{sector}+{len}");
        let write = rig.request(VIRTIO_BLK_T_OUT, sector, &[Buffer::Out(DATA, len)]);
        assert_eq!(write, (IOERR, 1), "{sector}+{len}");
    }
    assert!(fake.bytes.lock().iter().all(|byte| *byte == 0));
    assert_eq!(rig.metrics().bad_requests.load(Ordering::Relaxed), 18);
}

#[test]
fn parts_of_blocks_are_refused() {
    let geometry = Geometry { block_bytes: 4096, ..geometry() };
    let mut rig = Rig::new(Arc::new(Fake::with(1 << 20, geometry)));
    assert_eq!(rig.read(8, 4096), Ok(vec![0; 4096]));
    assert_eq!(rig.read(8, 512), Err(IOERR));
    assert_eq!(rig.read(4, 4096), Err(IOERR));
    assert_eq!(rig.write(9, &[1; 4096]), IOERR);
}

#[test]
fn unknown_types_are_unsupported() {
    let (mut rig, _) = Rig::fake(1 << 20);
    for kind in [2, 3, 5, 9, 10, 12, VIRTIO_BLK_T_SECURE_ERASE, 15, 1 << 31, u32::MAX] {
        assert_eq!(rig.request(kind, 0, &[]), (UNSUPP, 1), "{kind}");
    }
}

#[test]
fn types_that_were_not_negotiated_are_unsupported() {
    let device = Block::new(shape(), Arc::new(Fake::new(1 << 20))).unwrap();
    let features =
        device.features() & !(1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES);
    let mut rig = Rig::with(device, features);
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(rig.request(kind, 0, &[Buffer::Out(DATA, 16)]), (UNSUPP, 1));
    }
}

#[test]
fn writes_to_a_read_only_disk_are_refused() {
    let geometry = Geometry { read_only: true, discard: false, unmap: false, ..geometry() };
    let fake = Arc::new(Fake::with(1 << 20, geometry));
    let device = Block::new(shape(), fake.clone()).unwrap();
    assert_ne!(device.features() & 1 << VIRTIO_BLK_F_RO, 0);
    // The driver accepts features that were never offered.
    let features = device.features() | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
    let mut rig = Rig::with(device, features);
    assert_eq!(rig.write(0, &[1; 512]), IOERR);
    rig.driver.write(DATA, &[&[0; 8][..], &1u32.to_le_bytes(), &[0; 4]].concat());
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(rig.request(kind, 0, &[Buffer::Out(DATA, 16)]), (IOERR, 1));
    }
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn one_invalid_range_fails_the_request() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    assert_eq!(rig.write(0, &[9; 512]), OK);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let good = range(0, 1, 0);
    for (list, status) in [
        (vec![], IOERR),
        (vec![0; 15], IOERR),
        (vec![0; 17], IOERR),
        (vec![0; 33 * 16], IOERR),
        (range(0, 2049, 0), IOERR),
        (range(2048, 1, 0), IOERR),
        (range(u64::MAX, 1, 0), IOERR),
        (range(1 << 55, 1, 0), IOERR),
        (range(0, u32::MAX, 0), IOERR),
        (range(0, 1, 2), UNSUPP),
        // Flag 1 (unmap) is not valid in a discard.
        (range(0, 1, 1), UNSUPP),
        // One invalid range makes the whole request fail.
        ([good.clone(), range(2048, 1, 0)].concat(), IOERR),
    ] {
        rig.driver.write(DATA, &list);
        let buffers = [Buffer::Out(DATA, list.len() as u32)];
        assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &buffers), (status, 1), "{list:x?}");
    }
    assert_eq!(fake.bytes.lock()[..512], [9; 512]);
}

#[test]
fn buffers_of_the_wrong_direction_are_errors() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    rig.driver.write(DATA, &[1; 512]);
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer::Out(DATA, 512)]), (IOERR, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, &[Buffer::In(DATA, 512)]), (IOERR, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer::Out(DATA, 20)]), (IOERR, 1));
    assert!(fake.bytes.lock().iter().all(|byte| *byte == 0));
}

#[test]
fn chains_without_a_place_for_the_status_are_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    rig.write_header(VIRTIO_BLK_T_IN, 0);
    let out = Buffer::Out(HEADER, 16);
    let chains: [&[Buffer]; 6] = [
        // No status byte.
        &[out],
        &[out, Buffer::In(STATUS, 0)],
        // Status byte outside of memory.
        &[out, Buffer::In(DATA, 512), Buffer::In(MEMORY_LEN, 1)],
        &[out, Buffer::In(u64::MAX, 2)],
        // Readable descriptor after a writable one.
        &[Buffer::In(DATA, 512), out, Buffer::In(STATUS, 1)],
        &[Buffer::In(STATUS, 1), out],
    ];
    for (nth, chain) in chains.into_iter().enumerate() {
        let head = rig.driver.add(0, chain);
        rig.driver.kick(0);
        assert_eq!(rig.driver.wait_used(0), (head, 0), "{nth}");
    }
    assert_eq!(rig.status(), UNTOUCHED);
    assert_eq!(rig.metrics().bad_requests.load(Ordering::Relaxed), 6);
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn unreadable_headers_are_errors() {
    let (mut rig, _) = Rig::fake(1 << 20);
    for out in [Buffer::Out(HEADER, 15), Buffer::Out(MEMORY_LEN, 16), Buffer::Out(u64::MAX - 3, 16)]
    {
        rig.driver.write(STATUS, &[UNTOUCHED]);
        rig.driver.add(0, &[out, Buffer::In(STATUS, 1)]);
        rig.driver.kick(0);
        assert_eq!(rig.driver.wait_used(0).1, 1);
        assert_eq!(rig.status(), IOERR);
    }
    rig.driver.write(STATUS, &[UNTOUCHED]);
    rig.driver.add(0, &[Buffer::In(STATUS, 1)]);
    rig.driver.kick(0);
    assert_eq!((rig.driver.wait_used(0).1, rig.status()), (1, IOERR));
}

#[test]
fn data_outside_of_memory_is_an_error() {
    let (mut rig, fake) = Rig::fake(1 << 20);
    for at in [MEMORY_LEN, MEMORY_LEN - 256, u64::MAX - 511, u64::MAX - 100] {
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer::In(at, 512)]), (IOERR, 1));
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, &[Buffer::Out(at, 512)]), (IOERR, 1));
    }
    assert!(fake.bytes.lock().iter().all(|byte| *byte == 0));
}

const TABLE: u64 = BUFFERS + 0x800;
const NEXT: u32 = VRING_DESC_F_NEXT;
const WRITE: u32 = VRING_DESC_F_WRITE;
const INDIRECT: u32 = VRING_DESC_F_INDIRECT;

/// Returns a valid read of one sector. If `next` is set, the last descriptor, which contains the
/// status byte, continues at `next`.
fn good_chain(next: Option<u16>) -> [(u64, u32, u32, u16); 3] {
    let more = next.map_or(0, |_| NEXT);
    [
        (HEADER, 16, NEXT, 1),
        (DATA, 512, NEXT | WRITE, 2),
        (STATUS, 1, WRITE | more, next.unwrap_or_default()),
    ]
}

/// Makes the chain at descriptor 0 available. Returns true if the device returned it without a
/// status.
fn is_given_back(rig: &mut Rig) -> bool {
    rig.write_header(VIRTIO_BLK_T_IN, 0);
    let before = rig.metrics().bad_requests.load(Ordering::Relaxed);
    rig.driver.add_again(0, 0);
    rig.driver.kick(0);
    let (head, len) = rig.driver.wait_used(0);
    assert_eq!(head, 0);
    let refused = rig.metrics().bad_requests.load(Ordering::Relaxed) - before;
    assert_eq!(
        (rig.status(), len, refused),
        if len == 0 { (UNTOUCHED, 0, 1) } else { (OK, 513, 0) }
    );
    len == 0
}

/// Same as [`is_given_back`], but the chain is in an indirect table of `table_len` bytes.
fn is_given_back_from_table(rig: &mut Rig, chain: &[(u64, u32, u32, u16)], table_len: u32) -> bool {
    (0..)
        .zip(chain)
        .for_each(|(index, descriptor)| rig.driver.write_descriptor(TABLE, index, *descriptor));
    rig.driver.set_descriptor(0, 0, (TABLE, table_len, INDIRECT, 0));
    is_given_back(rig)
}

#[test]
fn loops_of_descriptors_are_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    for (next, bad) in [(None, false), (Some(0), true), (Some(1), true), (Some(2), true)] {
        let chain = good_chain(next);
        (0..)
            .zip(chain)
            .for_each(|(index, descriptor)| rig.driver.set_descriptor(0, index, descriptor));
        assert_eq!(is_given_back(&mut rig), bad, "{next:?}");
    }
}

#[test]
fn descriptors_outside_the_table_are_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    for next in [32, 33, u16::MAX] {
        let chain = good_chain(Some(next));
        (0..)
            .zip(chain)
            .for_each(|(index, descriptor)| rig.driver.set_descriptor(0, index, descriptor));
        assert!(is_given_back(&mut rig), "{next}");
        assert!(is_given_back_from_table(&mut rig, &chain, 48), "{next}");
    }
}

#[test]
fn loops_in_an_indirect_table_are_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    assert!(!is_given_back_from_table(&mut rig, &good_chain(None), 48));
    for next in 0..3 {
        assert!(is_given_back_from_table(&mut rig, &good_chain(Some(next)), 48), "{next}");
        // The table has 65,535 descriptors, so following a loop in it would take long.
        assert!(is_given_back_from_table(&mut rig, &good_chain(Some(next)), 0xf_fff0), "{next}");
    }
}

#[test]
fn nested_indirect_table_is_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    let [header, data, status] = good_chain(None);
    let nested = (TABLE, 48, INDIRECT, 0);
    assert!(is_given_back_from_table(&mut rig, &[nested], 16));
    assert!(is_given_back_from_table(
        &mut rig,
        &[header, data, (TABLE, 48, INDIRECT | WRITE, 0)],
        48
    ));
    assert!(is_given_back_from_table(
        &mut rig,
        &[header, (TABLE, 48, INDIRECT | NEXT, 2), status],
        48
    ));
}

#[test]
fn indirect_tables_of_invalid_length_are_returned() {
    let (mut rig, _) = Rig::fake(1 << 20);
    for (len, bad) in
        [(0, true), (15, true), (16, true), (32, true), (47, true), (48, false), (49, true)]
    {
        assert_eq!(is_given_back_from_table(&mut rig, &good_chain(None), len), bad, "{len}");
    }
    // Lengths that exceed the maximum of a table, and lengths that exceed memory.
    for len in [0x10_0000, u32::MAX, u32::MAX - 15] {
        assert!(is_given_back_from_table(&mut rig, &good_chain(None), len), "{len:#x}");
    }
    for at in [MEMORY_LEN, MEMORY_LEN - 16, u64::MAX - 15] {
        rig.driver.set_descriptor(0, 0, (at, 48, INDIRECT, 0));
        assert!(is_given_back(&mut rig), "{at:#x}");
    }
}
