//! Tests of requests that are larger than one piece.

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES};
use vm_memory::{Bytes, GuestMemoryMmap};

use super::*;
use crate::disk::Step;
use crate::disk::buffer::Buffers;
use crate::disk::range::{DiskRange, Unmap};
use crate::virtio::block::job::{Job, Next, PIECE_BYTES_MAX, RANGE_PIECE_BYTES_MAX};
use crate::virtio::block::request::{Limits, Operation, Request, disk_range};
use crate::virtio::block::segments::{Segment, Segments};
use crate::virtio::read_once;

const LEN: u64 = 2 * PIECE_BYTES_MAX + 1536;

const LIMITS: Limits = Limits {
    capacity_bytes: 1 << 30,
    block_bytes: 512,
    read_only: false,
    discard: true,
    write_zeroes: true,
    max_descriptors: 32,
};

fn request(operation: impl FnOnce(DiskRange, Segments) -> Operation) -> Request {
    let range = disk_range(100, LEN, &LIMITS).unwrap();
    let mut segments = Segments::default();
    // The driver's buffers end at other offsets than the pieces.
    segments.push(Segment { address: address(0x1000), len: 0x12_3456 });
    segments.push(Segment { address: address(0x40_0000), len: (LEN - 0x12_3456) as u32 });
    Request { head: 0, status: address(0), operation: operation(range, segments) }
}

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(address(0), 8 << 20)]).unwrap()
}

/// Returns the next step. If it is a transfer, it is first undone once, as if it had to wait.
fn next_again(job: &mut Job, memory: &GuestMemoryMmap, writes_through: bool) -> Next {
    let next =
        |job: &mut Job| job.next(memory, &mut Buffers::default(), || writes_through).unwrap();
    match next(job) {
        Next::Step(step) if !matches!(step, Step::Flush) => {
            job.undo(&step);
            next(job)
        }
        other => other,
    }
}

#[test]
fn large_write_in_pieces_has_one_flush() {
    let memory = memory();
    let data = pattern(LEN as usize, 4);
    memory.write_slice(&data[..0x12_3456], address(0x1000)).unwrap();
    memory.write_slice(&data[0x12_3456..], address(0x40_0000)).unwrap();
    let mut job = Job::new(request(Operation::Write));
    let (mut written, mut flushes) = (Vec::new(), 0);
    loop {
        match next_again(&mut job, &memory, true) {
            Next::Step(Step::Write(offset, buffer)) => {
                assert_eq!(offset, 100 * 512 + written.len() as u64);
                assert!(buffer.len() as u64 <= PIECE_BYTES_MAX && flushes == 0);
                written.extend_from_slice(buffer.bytes());
            }
            Next::Step(Step::Flush) => flushes += 1,
            Next::Step(_) => panic!("another step"),
            Next::Finished(len) => break assert_eq!(len, 0),
        }
    }
    assert!(written == data);
    assert_eq!(flushes, 1);
}

/// Parses a request of type `kind` with `data`, and returns its first step. The header and the data
/// are divided into three buffers.
fn first_step_of(kind: u32, data: &[u8]) -> Step {
    let mut driver = TestDriver::new(1);
    let bytes = [&kind.to_le_bytes()[..], &[0; 4], &3u64.to_le_bytes(), data].concat();
    driver.write(BUFFERS, &bytes);
    // The header ends in the middle of the second buffer.
    let mut chain = vec![Buffer::Out(BUFFERS, 7), Buffer::Out(BUFFERS + 7, 14)];
    chain.push(Buffer::Out(BUFFERS + 21, bytes.len() as u32 - 21));
    chain.push(Buffer::In(BUFFERS + 0x1000, 1));
    read_once::with_chain(&mut driver, &chain, |memory, chain| {
        let request = Request::parse(memory, chain, &LIMITS).unwrap();
        match Job::new(request).next(memory, &mut Buffers::default(), || false).unwrap() {
            Next::Step(step) => step,
            Next::Finished(_) => panic!("no step"),
        }
    })
}

#[test]
fn request_its_data_and_its_descriptors_are_read_once() {
    let Step::Write(offset, data) = first_step_of(VIRTIO_BLK_T_OUT, &pattern(512, 6)) else {
        panic!("another step")
    };
    assert_eq!((offset, data.bytes()), (3 * 512, &pattern(512, 6)[..]));
    let range = [&9u64.to_le_bytes()[..], &2u32.to_le_bytes(), &[0; 4]].concat();
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        let (Step::Discard(piece) | Step::WriteZeroes(piece, _)) = first_step_of(kind, &range)
        else {
            panic!("another step")
        };
        assert_eq!((piece.offset_bytes(), piece.len_bytes()), (9 * 512, 2 * 512));
    }
}

#[test]
fn large_read_fills_the_buffers_in_pieces() {
    let memory = memory();
    let data = pattern(LEN as usize, 5);
    let mut job = Job::new(request(Operation::Read));
    let mut buffers = Buffers::default();
    loop {
        match job.next(&memory, &mut buffers, || true).unwrap() {
            Next::Step(Step::Read(offset, mut buffer)) => {
                let at = (offset - 100 * 512) as usize;
                let len = buffer.len();
                buffer.bytes_mut().copy_from_slice(&data[at..at + len]);
                job.done(&memory, &Step::Read(offset, buffer)).unwrap();
            }
            Next::Step(_) => panic!("another step"),
            Next::Finished(len) => break assert_eq!(len, LEN),
        }
    }
    let mut read = vec![0; LEN as usize];
    memory.read_slice(&mut read[..0x12_3456], address(0x1000)).unwrap();
    memory.read_slice(&mut read[0x12_3456..], address(0x40_0000)).unwrap();
    assert!(read == data);
}

#[test]
fn pieces_of_ranges_end_at_blocks() {
    let sectors = RANGE_PIECE_BYTES_MAX / 512;
    let lists: [&[(u64, u64)]; 4] = [
        &[(1, 3 * sectors)],
        &[(0, 0), (5, 0), (sectors, sectors), (3 * sectors, 2 * sectors + 1), (7, 0)],
        &[(sectors - 1, 2), (0, 1)],
        &[(5, 0)],
    ];
    let memory = memory();
    for list in lists {
        let ranges: Vec<_> =
            list.iter().map(|(at, len)| disk_range(*at, len * 512, &LIMITS).unwrap()).collect();
        let zeroes = ranges.iter().map(|range| (*range, Unmap::Allowed)).collect();
        for operation in [Operation::Discard(ranges), Operation::WriteZeroes(zeroes)] {
            let mut job = Job::new(Request { head: 0, status: address(0), operation });
            let mut pieces = Vec::new();
            while let Next::Step(step) = next_again(&mut job, &memory, false) {
                let (Step::Discard(piece) | Step::WriteZeroes(piece, Unmap::Allowed)) = step else {
                    panic!("another step")
                };
                pieces.push((piece.offset_bytes(), piece.len_bytes()));
            }
            let covered: Vec<_> =
                pieces.iter().flat_map(|(at, len)| (*at..at + len).step_by(512)).collect();
            let asked = list.iter().flat_map(|(at, len)| (at * 512..(at + len) * 512).step_by(512));
            assert_eq!(covered, asked.collect::<Vec<_>>());
            for (at, len) in pieces {
                assert!(
                    len > 0 && at / RANGE_PIECE_BYTES_MAX == (at + len - 1) / RANGE_PIECE_BYTES_MAX
                );
            }
        }
    }
}
