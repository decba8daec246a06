//! Descriptor chains of a network interface.
//!
//! The bytes from the fuzzer become descriptor chains. Most chains are almost valid. Each chain is
//! used twice: as a frame that the guest sends, and as a buffer for a received frame. The results
//! should match those of a model that walks the same descriptors byte by byte.

use foreshore_devices::virtio::net::frames::{FRAME_LEN_MAX, FRAME_LEN_MIN, PACKET_LEN_MAX};
use foreshore_devices::virtio::net::header::{HEADER_LEN, Offloads};
use foreshore_devices::virtio::net::request::{ChainBuffer, FitResult, Limits, read_packet};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::cursor::Cursor;

const MEMORY_LEN: u64 = 0x4_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x1_0000;
const QUEUE_SIZE: u16 = 16;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Descriptor as the driver has written it.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Handles the chain that `bytes` describe, and panics if a result differs from the model.
pub(crate) fn net_request(bytes: &[u8]) {
    net_request_by(bytes, |limits| limits);
}

/// Works like [`net_request`], but the parser uses the limits that `wrong` returns. The model uses
/// the original limits, so the checks should detect the difference.
pub(crate) fn net_request_by(bytes: &[u8], wrong: impl FnOnce(Limits) -> Limits) {
    let mut cursor = Cursor::new(bytes);
    let memory =
        GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_LEN as usize)]).unwrap();
    let some = |cursor: &mut Cursor<'_>| cursor.pick(&[true, true, false]);
    let csum = some(&mut cursor);
    let (tso4, tso6) = (csum && some(&mut cursor), csum && some(&mut cursor));
    let ecn = (tso4 || tso6) && some(&mut cursor);
    let offloads = Offloads { csum, tso4, tso6, ecn, ufo: csum && some(&mut cursor) };
    let limits = Limits { max_descriptors: cursor.pick(&[QUEUE_SIZE, QUEUE_SIZE, 4]), offloads };
    for slot in 0..8 {
        let kind = cursor.pick(&[0u8, 0, 1, 4, 3, 0x81, 0x84, 2, 0x80]);
        let size = cursor.pick(&[1448u16, 1448, 0, 1]);
        let start = cursor.pick(&[34u16, 34, 0, 14, 1000, u16::MAX]);
        let flags = cursor.pick(&[0u8, 1, 1, 2, 3, 0xff]);
        let header =
            [&[flags, kind, 7, 7][..], &size.to_le_bytes(), &start.to_le_bytes(), &[16, 0, 9, 9]]
                .concat();
        memory.write_slice(&header, GuestAddress(BUFFERS + 0x100 * slot)).unwrap();
    }
    let writes = cursor.pick(&[false, true]);
    let chain = write_chain(&memory, &mut cursor, writes);
    let seen = model_chain(&chain, &limits);
    // 1. The chain is a frame that the guest sends.
    let mut ring = queue(&memory);
    let mut popped = ring.pop_descriptor_chain(&memory).expect("one chain is available");
    let mut room = vec![0xaa; PACKET_LEN_MAX];
    let parsed_by = wrong(limits);
    let room: &mut [u8; PACKET_LEN_MAX] = room.as_mut_slice().try_into().unwrap();
    let sent =
        read_packet(&memory, &mut popped, &parsed_by, room).ok().map(|len| room[..len].to_vec());
    assert_eq!(
        sent,
        seen.as_ref().and_then(|seen| model_sent(&memory, seen, offloads)),
        "{chain:x?} with {limits:?}"
    );
    // 2. The chain is a buffer for a frame that the guest receives.
    let mut ring = queue(&memory);
    let mut popped = ring.pop_descriptor_chain(&memory).expect("one chain is available");
    let mut chain_buffer = ChainBuffer::default();
    let is_taken = chain_buffer.take(&mut popped, parsed_by.max_descriptors).is_ok();
    let room_len = seen.as_ref().and_then(|seen| model_room(seen));
    assert_eq!(is_taken, room_len.is_some(), "{chain:x?} with {limits:?}");
    let (Some(seen), Some(room_len)) = (seen, room_len) else { return };
    let packet_len = (HEADER_LEN + FRAME_LEN_MIN + cursor.number(2) as usize).min(PACKET_LEN_MAX);
    let fits = packet_len <= room_len;
    let fit = if fits { FitResult::Chains(1) } else { FitResult::Never };
    assert_eq!(
        chain_buffer.fit(packet_len, 1, cursor.pick(&[true, false])),
        fit,
        "{room_len} bytes for {packet_len}"
    );
    if fits {
        check_written(&memory, &seen, &mut chain_buffer, packet_len);
    }
}

/// Creates a queue with one available chain, which starts at descriptor 0.
fn queue(memory: &GuestMemoryMmap<()>) -> Queue {
    let mut queue = Queue::new(QUEUE_SIZE).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    memory.write_obj(1u16, GuestAddress(AVAILABLE + 2)).unwrap();
    queue
}

fn write_chain(
    memory: &GuestMemoryMmap<()>,
    cursor: &mut Cursor<'_>,
    writes: bool,
) -> Vec<Descriptor> {
    let count = cursor.pick(&[1u16, 2, 2, 3, 4, 5, QUEUE_SIZE]);
    let chain: Vec<_> = (0..count)
        .map(|index| {
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
                0 => {
                    cursor.pick(&[12u32, 12, 12, 26, 72, 1526, 11, 5, 0, 65_566, 65_567, u32::MAX])
                }
                _ => cursor.pick(&[60u32, 14, 13, 1514, 0, 1, 40_000, 65_554, 65_555, 1 << 31]),
            };
            let flips = if odd > 250 { WRITE } else { 0 };
            let next = if odd == 240 { cursor.number(1) as u16 } else { index + 1 };
            let flags = (if writes { WRITE } else { 0 } ^ flips)
                | if last && odd != 241 { 0 } else { NEXT };
            Descriptor { address, len, flags, next }
        })
        .collect();
    for (index, descriptor) in chain.iter().enumerate() {
        let Descriptor { address, len, flags, next } = *descriptor;
        let at = 16 * index as u64;
        memory.write_obj(address, GuestAddress(at)).unwrap();
        memory.write_obj(len, GuestAddress(at + 8)).unwrap();
        memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }
    chain
}

/// Returns the descriptors of the chain, or `None` if the chain is invalid or does not end.
fn model_chain(chain: &[Descriptor], limits: &Limits) -> Option<Vec<Descriptor>> {
    let (mut seen, mut total, mut at) = (Vec::new(), 0u64, 0usize);
    loop {
        // The rest of the table is zeros. A descriptor of zeros is an empty buffer and ends the
        // chain.
        let zeros = Descriptor { address: 0, len: 0, flags: 0, next: 0 };
        let descriptor = *chain.get(at).or((at < usize::from(QUEUE_SIZE)).then_some(&zeros))?;
        total += u64::from(descriptor.len);
        if seen.len() == usize::from(limits.max_descriptors) || total > u64::from(u32::MAX) {
            return None;
        }
        seen.push(descriptor);
        if descriptor.flags & NEXT == 0 {
            return Some(seen);
        }
        at = usize::from(descriptor.next);
    }
}

/// Returns the bytes that the tap interface should receive, or `None` if the frame is refused.
fn model_sent(
    memory: &GuestMemoryMmap<()>,
    seen: &[Descriptor],
    offloads: Offloads,
) -> Option<Vec<u8>> {
    let len: u64 = seen.iter().map(|descriptor| u64::from(descriptor.len)).sum();
    if seen.iter().any(|descriptor| descriptor.flags & WRITE != 0)
        || len > (HEADER_LEN + FRAME_LEN_MAX) as u64
    {
        return None;
    }
    let places = seen
        .iter()
        .flat_map(|d| (0..u64::from(d.len)).map(move |offset| d.address.checked_add(offset)));
    let mut bytes: Vec<u8> =
        places.map(|place| memory.read_obj(GuestAddress(place?)).ok()).collect::<Option<_>>()?;
    if bytes.len() < 26 {
        return None;
    }
    let frame_len = bytes.len() - 12;
    let needs_csum = bytes[0] & 1 != 0;
    let at = usize::from(bytes[6])
        + 256 * usize::from(bytes[7])
        + usize::from(bytes[8])
        + 256 * usize::from(bytes[9]);
    if needs_csum && (!offloads.csum || at + 2 > frame_len) {
        return None;
    }
    let is_allowed = match bytes[1] {
        0 => true,
        1 => offloads.tso4,
        4 => offloads.tso6,
        0x81 => offloads.tso4 && offloads.ecn,
        0x84 => offloads.tso6 && offloads.ecn,
        3 => offloads.ufo,
        _ => false,
    };
    if !is_allowed || bytes[1] != 0 && (!needs_csum || bytes[4..6] == [0, 0]) {
        return None;
    }
    bytes[0] &= 1;
    if bytes[1] == 0 {
        bytes[4..6].fill(0);
    }
    if !needs_csum {
        bytes[6..10].fill(0);
    }
    bytes[10..12].fill(0);
    Some(bytes)
}

/// Returns the length of the longest packet (header and frame) that fits into the chain, or `None`
/// if the chain cannot hold a packet.
fn model_room(seen: &[Descriptor]) -> Option<usize> {
    let len: u64 = seen.iter().map(|descriptor| u64::from(descriptor.len)).sum();
    let is_written = seen.iter().all(|descriptor| descriptor.flags & WRITE != 0);
    (is_written && len >= HEADER_LEN as u64).then_some(len.min(PACKET_LEN_MAX as u64) as usize)
}

/// Writes a packet to the chain, and checks that the rest of guest memory has not changed.
fn check_written(
    memory: &GuestMemoryMmap<()>,
    seen: &[Descriptor],
    chain_buffer: &mut ChainBuffer,
    packet_len: usize,
) {
    let mut packet: Vec<u8> = (0..packet_len).map(|nth| (nth % 251) as u8 + 1).collect();
    let mut expected = vec![0; MEMORY_LEN as usize];
    memory.read_slice(&mut expected, GuestAddress(0)).unwrap();
    let mut used = Vec::new();
    let result = chain_buffer.write(memory, &mut packet, 1, &mut used);
    assert_eq!(packet[10..12], [1, 0]);
    let places = seen
        .iter()
        .flat_map(|d| (0..u64::from(d.len)).map(move |offset| d.address.checked_add(offset)));
    let places: Vec<_> = places.take(packet_len).collect();
    let is_there = places.iter().all(|place| place.is_some_and(|place| place < MEMORY_LEN));
    assert_eq!(
        (result.is_ok(), &*used),
        (is_there, &[(0, if is_there { packet_len as u32 } else { 0 })][..])
    );
    if is_there {
        for (place, byte) in places.into_iter().zip(&packet) {
            expected[place.unwrap() as usize] = *byte;
        }
        let mut found = vec![0; MEMORY_LEN as usize];
        memory.read_slice(&mut found, GuestAddress(0)).unwrap();
        assert!(found == expected, "the guest's memory differs outside the packet");
    }
}
