//! Requests to a virtio balloon.
//!
//! The bytes from the fuzzer become descriptor chains of the queues for pages, free pages and
//! statistics. A model handles one page at a time. The parsed pages, and the ranges that would be
//! returned to the host, should match those of the model.

use std::collections::BTreeSet;
use std::ops::Range;

use foreshore_devices::memory::BLOCK_BYTES;
use foreshore_devices::memory::layout::GuestRange;
use foreshore_devices::memory::view::{GuestView, MappedMemory};
use foreshore_devices::memory::zone::Tier;
use foreshore_devices::virtio::balloon::Refusal;
use foreshore_devices::virtio::balloon::request::{
    Listed, MAX_PAGES, MAX_RANGES, MemoryPart, cut, read_free, read_pages, read_statistics,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

use super::cursor::Cursor;

const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x1_0000;
const BUFFERS_LEN: u64 = 0x1000;
const QUEUE_SIZE: u16 = 8;

const PAGE: u64 = 4096;
const BOOT: Range<u64> = 0..0x20_0000;
const DRAM: Range<u64> = 0x40_0000..0xc0_0000;
const PM: Range<u64> = 0xc0_0000..0x100_0000;
const VOLUME: Range<u64> = 0x140_0000..0x160_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Parses the request that `bytes` describe, and panics if the result differs from the model.
pub(crate) fn balloon_request(bytes: &[u8]) {
    balloon_request_by(bytes, |parts| parts);
}

/// Works like [`balloon_request`], but the parser uses the places that `wrong` returns. The model
/// uses the original places, so the checks should detect the difference.
pub(crate) fn balloon_request_by(
    bytes: &[u8],
    wrong: impl FnOnce(Vec<MemoryPart>) -> Vec<MemoryPart>,
) {
    let mut cursor = Cursor::new(bytes);
    let region =
        |range: Range<u64>| (GuestAddress(range.start), (range.end - range.start) as usize);
    let memory =
        GuestMemoryMmap::from_ranges(&[region(BOOT), region(DRAM), region(PM), region(VOLUME)])
            .unwrap();
    let view = GuestView::new(memory.clone());
    for range in [DRAM, PM] {
        let (start, len) = (GuestAddress(range.start), range.end - range.start);
        view.exclusive().add_pluggable(start, len, BLOCK_BYTES).unwrap();
    }
    let plugged = cursor.number(1);
    for block in (0..6).filter(|block| plugged >> block & 1 == 1) {
        let at = GuestAddress(DRAM.start + block * BLOCK_BYTES);
        view.exclusive().set_plugged(at, BLOCK_BYTES, true);
    }
    let is_plugged =
        |page: u64| BOOT.contains(&page) || plugged >> ((page - DRAM.start) / BLOCK_BYTES) & 1 == 1;
    // Small or huge pages.
    let unit_bytes = if plugged >> 7 == 1 { BLOCK_BYTES } else { PAGE };
    let part = |range: Range<u64>, tier| MemoryPart {
        range: GuestRange { start: range.start, len: range.end - range.start },
        tier,
        unit_bytes,
    };
    let parts = wrong(vec![part(BOOT, Tier::Dram), part(DRAM, Tier::Dram), part(PM, Tier::Pm)]);

    let kind = cursor.number(1) % 3;
    let chain = write_chain(&memory, &mut cursor, kind == 1);
    let mut queue = Queue::new(QUEUE_SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    memory.write_obj(1u16, GuestAddress(AVAILABLE + 2)).unwrap();
    let guard = view.memory();
    let mapped: &MappedMemory = &guard;
    let popped = queue.pop_descriptor_chain(mapped).expect("one chain is available");
    let listed = match kind {
        0 => {
            let listed = read_pages(mapped, popped).ok();
            check_pages(&memory, &chain, &listed, is_plugged);
            listed
        }
        1 => {
            let listed = read_free(popped).ok();
            check_free(&chain, &listed);
            listed
        }
        _ => {
            let readable = gather(&memory, &chain, is_plugged);
            let sound = readable.filter(|bytes| {
                !bytes.is_empty() && bytes.len() <= 640 && bytes.len().is_multiple_of(10)
            });
            assert_eq!(read_statistics(mapped, popped).is_ok(), sound.is_some(), "{chain:x?}");
            None
        }
    };
    for range in listed.into_iter().flat_map(|listed| listed.ranges) {
        check_cut(&range, &parts, mapped, unit_bytes, is_plugged);
    }
}

/// Address and length of a buffer in a descriptor, and true if the device may write to it.
type Buffer = (u64, u32, bool);

/// Writes a descriptor chain, and returns its buffers in the order in which the device visits them.
fn write_chain(memory: &GuestMemoryMmap, cursor: &mut Cursor<'_>, is_free: bool) -> Vec<Buffer> {
    for slot in 0..BUFFERS_LEN / 16 {
        // Each slot has four page numbers, most of them near the border of a range. In the
        // statistics queue, the same bytes are tags and values.
        for entry in 0..4 {
            let border = cursor.pick(&[
                0u64,
                0x1ff,
                0x400,
                0x7ff,
                0xbff,
                0xfff,
                0x1400,
                0xf_ffff,
                0xffff_fffe,
            ]);
            let page = border.wrapping_add(cursor.number(1) % 4) as u32;
            memory.write_obj(page, GuestAddress(BUFFERS + 16 * slot + 4 * entry)).unwrap();
        }
    }
    let count = cursor.pick(&[1u16, 1, 1, 2, 3, QUEUE_SIZE]);
    let mut table = Vec::new();
    for index in 0..count {
        let odd = cursor.number(1);
        let (address, len) = if is_free {
            let start = cursor.pick(&[
                0x10_0000,
                BOOT.end - PAGE,
                DRAM.start,
                PM.start - PAGE,
                VOLUME.start,
            ]);
            let shift = cursor.pick(&[0, 0, 0, 1, PAGE - 1, PAGE]);
            (
                start + shift,
                cursor.pick(&[
                    PAGE as u32,
                    PAGE as u32,
                    0x20_0000,
                    1,
                    0,
                    PAGE as u32 + 1,
                    0x80_0000,
                ]),
            )
        } else {
            let address =
                cursor.pick(&[BUFFERS, BUFFERS, BUFFERS + 16, DRAM.start, VOLUME.end - 8]);
            (address, cursor.pick(&[4u32, 1024, 160, 40, 8, 10, 20, 3, 4096, 650, 0x1_0000]))
        };
        let address = if odd == 255 { u64::MAX - cursor.number(1) } else { address };
        let writes = is_free != (odd > 248);
        let next = if odd == 240 { cursor.number(1) as u16 } else { index + 1 };
        let goes_on = index + 1 < count || odd == 241;
        let flags = if goes_on { NEXT } else { 0 } | if writes { WRITE } else { 0 };
        let at = DESCRIPTORS + 16 * u64::from(index);
        memory.write_obj(address, GuestAddress(at)).unwrap();
        memory.write_obj(len, GuestAddress(at + 8)).unwrap();
        memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        memory.write_obj(next, GuestAddress(at + 14)).unwrap();
        table.push((address, len, writes, goes_on.then_some(next)));
    }
    // The rest of the table is zeros. A descriptor of zeros is an empty buffer and ends the chain.
    let (mut chain, mut at, mut total) = (Vec::new(), 0u16, 0u64);
    while chain.len() < usize::from(QUEUE_SIZE) && at < QUEUE_SIZE {
        let (address, len, writes, next) =
            table.get(usize::from(at)).copied().unwrap_or((0, 0, false, None));
        total += u64::from(len);
        if total > u64::from(u32::MAX) {
            break;
        }
        chain.push((address, len, writes));
        match next {
            Some(next) => at = next,
            None => break,
        }
    }
    chain
}

/// Returns the content of the readable buffers, or `None` if a part of them is outside plugged
/// memory.
fn gather(
    memory: &GuestMemoryMmap,
    chain: &[Buffer],
    is_plugged: impl Fn(u64) -> bool,
) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for (address, len, _) in chain.iter().filter(|(_, _, writes)| !writes) {
        let end = address.checked_add(u64::from(*len))?;
        // Checks an address in each page of the buffer.
        for at in
            (*address..end).step_by(PAGE as usize).chain(end.checked_sub(1).filter(|_| *len > 0))
        {
            let pluggable = (DRAM.start..PM.end).contains(&at);
            let reachable =
                BOOT.contains(&at) || VOLUME.contains(&at) || pluggable && is_plugged(at);
            if !reachable {
                return None;
            }
        }
        let mut part = vec![0; *len as usize];
        memory.read_slice(&mut part, GuestAddress(*address)).ok()?;
        bytes.extend(part);
    }
    Some(bytes)
}

fn check_pages(
    memory: &GuestMemoryMmap,
    chain: &[Buffer],
    listed: &Option<Listed>,
    is_plugged: impl Fn(u64) -> bool,
) {
    let sound = gather(memory, chain, is_plugged)
        .filter(|bytes| !bytes.is_empty() && bytes.len().is_multiple_of(4));
    assert_eq!(listed.is_some(), sound.is_some(), "{chain:x?}");
    let (Some(listed), Some(bytes)) = (listed, sound) else { return };
    let pages = bytes
        .chunks(4)
        .take(MAX_PAGES)
        .map(|page| u64::from(u32::from_le_bytes(page.try_into().unwrap())));
    assert_eq!(listed.is_cut, bytes.len() > 4 * MAX_PAGES);
    check_ranges(listed, &pages.collect());
}

fn check_free(chain: &[Buffer], listed: &Option<Listed>) {
    let mut pages = BTreeSet::new();
    for (address, len, _) in chain.iter().filter(|(_, _, writes)| *writes).take(MAX_RANGES) {
        let end = address.saturating_add(u64::from(*len));
        let first = address.div_ceil(PAGE);
        pages.extend(first..(end / PAGE).max(first));
    }
    assert_eq!(listed.is_some(), !pages.is_empty(), "{chain:x?}");
    listed.iter().for_each(|listed| check_ranges(listed, &pages));
}

/// Checks that the ranges consist of `pages`, are in order, and do not touch each other.
fn check_ranges(listed: &Listed, pages: &BTreeSet<u64>) {
    let mut shown = BTreeSet::new();
    for range in &listed.ranges {
        assert!(range.start < range.end && range.start % PAGE == 0 && range.end % PAGE == 0);
        assert!(
            shown.last().is_none_or(|last| (last + 1) * PAGE < range.start),
            "{:x?}",
            listed.ranges
        );
        shown.extend(range.start / PAGE..range.end / PAGE);
    }
    assert_eq!(&shown, pages);
}

fn check_cut(
    range: &Range<u64>,
    parts: &[MemoryPart],
    memory: &MappedMemory,
    unit_bytes: u64,
    is_plugged: impl Fn(u64) -> bool,
) {
    // All places start at a multiple of `unit_bytes`.
    let is_whole = |page: u64| {
        let start = page - page % unit_bytes;
        range.start <= start && start + unit_bytes <= range.end
    };
    let mut next = range.start;
    for piece in cut(range, parts, memory) {
        assert!(piece.range.start == next && piece.range.end > next, "{piece:x?}");
        next = piece.range.end;
        // A piece crosses no border, so it is sufficient to check its first and its last page.
        for page in [piece.range.start, piece.range.end - PAGE] {
            let expected = match page {
                page if DRAM.contains(&page) && !is_plugged(page) => Err(Refusal::Unplugged),
                page if PM.contains(&page) => Err(Refusal::Pm),
                page if (BOOT.contains(&page) || DRAM.contains(&page)) && !is_whole(page) => {
                    Err(Refusal::HugePage)
                }
                page if BOOT.contains(&page) => Ok(0),
                page if DRAM.contains(&page) => Ok(1),
                _ => Err(Refusal::NoMemory),
            };
            assert_eq!(piece.verdict, expected, "page {page:#x} of {range:x?}");
        }
        let borders = [BOOT.end, DRAM.start, DRAM.end, PM.end];
        let crosses =
            borders.iter().any(|border| piece.range.start < *border && *border < piece.range.end);
        assert!(!crosses, "{piece:x?}");
    }
    assert_eq!(next, range.end);
}
