//! Requests to a disk.
//!
//! The bytes from the fuzzer become descriptor chains. Most chains are almost valid. The result of
//! the parser should match that of a slow but simple model, which walks the same descriptors.

use foreshore_devices::disk::buffer::Buffers;
use foreshore_devices::virtio::block::job::{Job, Next};
use foreshore_devices::virtio::block::request::{Limits, Operation, Refusal, Request, Status};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::cursor::Cursor;

const MEMORY_LEN: u64 = 0x2_0000;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const INDIRECT: u64 = 0x3000;
const BUFFERS: u64 = 0x1_0000;
const QUEUE_SIZE: u16 = 16;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;

/// Descriptor as the driver has written it.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Parses the request that `bytes` describe, and panics if the result differs from the model.
pub(crate) fn blk_request(bytes: &[u8]) {
    blk_request_by(bytes, |limits| limits);
}

/// Works like [`blk_request`], but the parser uses the limits that `wrong` returns. The model uses
/// the original limits, so the checks should detect the difference.
pub(crate) fn blk_request_by(bytes: &[u8], wrong: impl FnOnce(Limits) -> Limits) {
    let mut cursor = Cursor::new(bytes);
    let memory =
        GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_LEN as usize)]).unwrap();
    let limits = Limits {
        capacity_bytes: 1 << 20,
        block_bytes: cursor.pick(&[512, 512, 4096]),
        read_only: cursor.pick(&[false, false, false, true]),
        discard: cursor.pick(&[true, true, true, false]),
        write_zeroes: cursor.pick(&[true, true, true, false]),
        max_descriptors: QUEUE_SIZE,
    };
    fill_buffers(&memory, &mut cursor);
    let is_indirect = cursor.pick(&[false, false, false, true]);
    let chain = write_chain(&memory, &mut cursor, is_indirect);
    let table_len = if is_indirect {
        let len = 16 * chain.len() as u32;
        // A table has at most 65,535 descriptors (0xffff0 bytes). 0x100000 bytes are one too many.
        let lens =
            [len, len, len, len, len + 16, len - 16, len - 1, 0, 0xf_fff0, 0x10_0000, u32::MAX];
        let len = cursor.pick(&lens);
        write_descriptor(
            &memory,
            DESCRIPTORS,
            Descriptor { address: INDIRECT, len, flags: TABLE, next: 0 },
        );
        len
    } else {
        16 * u32::from(QUEUE_SIZE)
    };
    let mut queue = queue();
    memory.write_obj(1u16, GuestAddress(AVAILABLE + 2)).unwrap();
    let mut popped = queue.pop_descriptor_chain(&memory).expect("one chain is available");
    let result = Request::parse(&memory, &mut popped, &wrong(limits));
    check_against_model(&memory, &chain, table_len, &limits, &result);
    if let Ok(request) = result {
        check_request(&memory, request, &limits);
    }
}

fn queue() -> Queue {
    let mut queue = Queue::new(QUEUE_SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    queue
}

/// Fills each slot with a header and, 16 bytes later, a range. A buffer at either offset starts
/// with one of them.
fn fill_buffers(memory: &GuestMemoryMmap<()>, cursor: &mut Cursor<'_>) {
    for slot in 0..8 {
        let kind = cursor.pick(&[0u32, 0, 1, 1, 4, 8, 11, 13, 14, 2, u32::MAX]);
        let sector = cursor.pick(&[
            0u64,
            8,
            2040,
            2047,
            2048,
            7,
            1 << 55,
            u64::MAX,
            u64::MAX / 512,
            (1 << 55) + 8,
        ]);
        let at = BUFFERS + 0x100 * slot;
        memory.write_obj(kind, GuestAddress(at)).unwrap();
        memory.write_obj(sector, GuestAddress(at + 8)).unwrap();
        // Range for discard and write zeroes.
        memory.write_obj(sector, GuestAddress(at + 16)).unwrap();
        memory
            .write_obj(cursor.pick(&[8u32, 1, 0, 2048, 2049, u32::MAX]), GuestAddress(at + 24))
            .unwrap();
        memory.write_obj(cursor.pick(&[0u32, 0, 1, 2, u32::MAX]), GuestAddress(at + 28)).unwrap();
    }
}

fn write_chain(
    memory: &GuestMemoryMmap<()>,
    cursor: &mut Cursor<'_>,
    is_indirect: bool,
) -> Vec<Descriptor> {
    let table = if is_indirect { INDIRECT } else { DESCRIPTORS };
    // Most chains have a header, one data buffer and a status byte.
    let count = cursor.pick(&[3u16, 3, 3, 4, 4, 2, 1, QUEUE_SIZE]);
    let first_written = (1 + cursor.number(1) as u16 % count).min(count - 1);
    let chain: Vec<_> = (0..count)
        .map(|index| {
            let writes = if index >= first_written { WRITE } else { 0 };
            let last = index + 1 == count;
            let odd = cursor.number(1);
            let slot = BUFFERS + 0x100 * (cursor.number(1) % 8);
            let address = match odd % 32 {
                0 => MEMORY_LEN - 1,
                1 => MEMORY_LEN,
                2 => u64::MAX - cursor.number(1),
                3 => slot + 16,
                _ => slot,
            };
            let len = match index {
                0 => cursor.pick(&[16u32, 16, 16, 16, 16, 16, 32, 15, 17, 4, 0]),
                _ if last => cursor.pick(&[1u32, 1, 1, 1, 1, 1, 513, 4097, 0, 2]),
                _ => cursor.pick(&[
                    512u32,
                    4096,
                    512,
                    4096,
                    16,
                    32,
                    20,
                    1024,
                    8192,
                    0,
                    513,
                    1 << 20,
                    u32::MAX,
                ]),
            };
            let flips = if odd > 250 { WRITE } else { 0 };
            let next = if odd == 240 { cursor.number(1) as u16 } else { index + 1 };
            // An indirect table must not contain another (2.7.5.3.1).
            let nested = if is_indirect && odd == 242 { TABLE } else { 0 };
            let flags = (writes ^ flips) | nested | if last && odd != 241 { 0 } else { NEXT };
            Descriptor { address, len, flags, next }
        })
        .collect();
    for (index, descriptor) in chain.iter().enumerate() {
        write_descriptor(memory, table + 16 * index as u64, *descriptor);
    }
    chain
}

fn write_descriptor(memory: &GuestMemoryMmap<()>, at: u64, descriptor: Descriptor) {
    let Descriptor { address, len, flags, next } = descriptor;
    memory.write_obj(address, GuestAddress(at)).unwrap();
    memory.write_obj(len, GuestAddress(at + 8)).unwrap();
    memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
    memory.write_obj(next, GuestAddress(at + 14)).unwrap();
}

/// Result of parsing a request.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    GivenBack,
    Refused(u8),
    /// Type of an accepted request, and the number of bytes it transfers.
    Done(u32, u64),
}

fn check_against_model(
    memory: &GuestMemoryMmap<()>,
    chain: &[Descriptor],
    table_len: u32,
    limits: &Limits,
    result: &Result<Request, Refusal>,
) {
    let came_to = match result {
        Err(Refusal { status: None, .. }) => Outcome::GivenBack,
        Err(Refusal { status: Some(_), error }) => Outcome::Refused(error.status().code()),
        Ok(request) => match &request.operation {
            Operation::Read(range, _) => Outcome::Done(0, range.len_bytes()),
            Operation::Write(range, _) => Outcome::Done(1, range.len_bytes()),
            Operation::Flush => Outcome::Done(4, 0),
            Operation::GetId(_) => Outcome::Done(8, 0),
            Operation::Discard(_) => Outcome::Done(11, 0),
            Operation::WriteZeroes(_) => Outcome::Done(13, 0),
        },
    };
    let expected = model(memory, chain, table_len, limits);
    assert_eq!(came_to, expected, "{chain:x?} in {table_len:#x} bytes with {limits:?}");
}

/// Implements the specification byte by byte, for a chain at the start of a table whose other
/// entries are zeros.
fn model(
    memory: &GuestMemoryMmap<()>,
    chain: &[Descriptor],
    table_len: u32,
    limits: &Limits,
) -> Outcome {
    let (error, unsupported) =
        (Outcome::Refused(Status::IoError.code()), Outcome::Refused(Status::Unsupported.code()));
    // 1. The descriptors that the device sees (2.7.5.3 of tables).
    let entries = table_len as usize / 16;
    if !table_len.is_multiple_of(16) || entries > 0xffff {
        return Outcome::GivenBack;
    }
    let seen_max = entries.min(usize::from(limits.max_descriptors));
    let (mut seen, mut total, mut at, mut ends) = (Vec::new(), 0u64, 0usize, false);
    while let Some(descriptor) = chain[..chain.len().min(entries)].get(at) {
        total += u64::from(descriptor.len);
        if seen.len() == seen_max || total > u64::from(u32::MAX) || descriptor.flags & TABLE != 0 {
            return Outcome::GivenBack;
        }
        seen.push(*descriptor);
        if descriptor.flags & NEXT == 0 {
            ends = true;
            break;
        }
        at = usize::from(descriptor.next);
    }
    // The rest of the table is zeros. A descriptor of zeros is an empty buffer and ends the chain.
    let zeros_follow = (chain.len()..entries).contains(&at) && seen.len() < seen_max;
    ends |= zeros_follow;
    let order = seen.iter().skip_while(|d| d.flags & WRITE == 0 || d.len == 0);
    let mut order = order.filter(|d| d.flags & WRITE == 0);
    let written: Vec<_> = seen.iter().filter(|d| d.flags & WRITE != 0 && d.len > 0).collect();
    if !ends || order.next().is_some() || zeros_follow && !written.is_empty() {
        return Outcome::GivenBack;
    }
    let Some(last) = written.last() else { return Outcome::GivenBack };
    if last.address.checked_add(u64::from(last.len) - 1).is_none() {
        return Outcome::GivenBack;
    }
    // 2. The header.
    let read: Vec<(u64, u32)> =
        seen.iter().filter(|d| d.flags & WRITE == 0).map(|d| (d.address, d.len)).collect();
    let readable: u64 = read.iter().map(|(_, len)| u64::from(*len)).sum();
    let writable = written.iter().map(|d| u64::from(d.len)).sum::<u64>() - 1;
    let Some(header) = gather(memory, &read, 0, 16) else { return error };
    let kind = u32::from_le_bytes(header[..4].try_into().unwrap());
    let sector = u64::from_le_bytes(header[8..].try_into().unwrap());
    let data = readable - 16;
    // 3. The operation.
    let fits = |sector: u64, len: u64| {
        let start = u128::from(sector) * 512;
        let block = u128::from(limits.block_bytes);
        start + u128::from(len) <= u128::from(limits.capacity_bytes)
            && start.is_multiple_of(block)
            && u128::from(len).is_multiple_of(block)
    };
    match kind {
        0 if data > 0 || !fits(sector, writable) => error,
        0 => Outcome::Done(0, writable),
        1 if limits.read_only || writable > 0 || !fits(sector, data) => error,
        1 => Outcome::Done(1, data),
        4 => Outcome::Done(4, 0),
        8 if data > 0 => error,
        8 => Outcome::Done(8, 0),
        11 if !limits.discard => unsupported,
        13 if !limits.write_zeroes => unsupported,
        11 | 13
            if limits.read_only
                || writable > 0
                || data == 0
                || !data.is_multiple_of(16)
                || data > 512 =>
        {
            error
        }
        11 | 13 => {
            let Some(list) = gather(memory, &read, 16, data as usize) else { return error };
            for range in list.chunks(16) {
                let sector = u64::from_le_bytes(range[..8].try_into().unwrap());
                let sectors = u32::from_le_bytes(range[8..12].try_into().unwrap());
                let flags = u32::from_le_bytes(range[12..].try_into().unwrap());
                match flags {
                    0 => {}
                    1 if kind == 13 => {}
                    _ => return unsupported,
                }
                if sectors > 1 << 22 || !fits(sector, u64::from(sectors) * 512) {
                    return error;
                }
            }
            Outcome::Done(kind, 0)
        }
        _ => unsupported,
    }
}

/// Returns `count` bytes of a list of buffers, starting at byte `skip`. Returns `None` if the
/// buffers are too short or outside memory.
fn gather(
    memory: &GuestMemoryMmap<()>,
    list: &[(u64, u32)],
    skip: usize,
    count: usize,
) -> Option<Vec<u8>> {
    let places = list
        .iter()
        .flat_map(|(at, len)| (0..u64::from(*len)).map(move |offset| at.checked_add(offset)));
    let bytes: Option<Vec<u8>> = places
        .skip(skip)
        .take(count)
        .map(|place| memory.read_obj(GuestAddress(place?)).ok())
        .collect();
    bytes.filter(|bytes| bytes.len() == count)
}

/// Checks that an accepted request completes in at most 100 steps and stays within the disk.
fn check_request(memory: &GuestMemoryMmap<()>, request: Request, limits: &Limits) {
    let within =
        |offset: u64, len: u64| assert!(offset + len <= limits.capacity_bytes, "{offset}+{len}");
    let mut job = Job::new(request);
    let mut buffers = Buffers::default();
    for _ in 0..100 {
        match job.next(memory, &mut buffers, || true) {
            Ok(Next::Step(step)) => {
                use foreshore_devices::disk::Step::{Discard, Flush, Read, Write, WriteZeroes};
                match &step {
                    Read(offset, buffer) => within(*offset, buffer.len() as u64),
                    Write(offset, buffer) => {
                        assert!(!limits.read_only);
                        within(*offset, buffer.len() as u64);
                    }
                    Discard(range) | WriteZeroes(range, _) => {
                        assert!(!limits.read_only);
                        within(range.offset_bytes(), range.len_bytes());
                    }
                    Flush => {}
                }
                if job.done(memory, &step).is_err() {
                    return;
                }
            }
            Ok(Next::Finished(_)) | Err(_) => return,
        }
    }
    panic!("request did not complete in 100 steps");
}
