//! Parser for requests in the balloon queues (virtio 1.3, 5.5.6). It returns ranges of pages that
//! may be returned to the host.

use std::io::{self, Read};
use std::ops::Range;

use balloon::statistics::Statistics;
use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::{Address, GuestAddress, GuestMemory, Permissions};

use super::metrics::Refusal;
use super::state::PAGE_BYTES;
use crate::memory::BLOCK_BYTES;
use crate::memory::layout::GuestRange;
use crate::memory::view::MappedMemory;
use crate::memory::zone::Tier;

/// Maximum number of page numbers that the device reads from one chain. Each may need a system
/// call, during which plugs and unplugs wait. Linux sends 256 per chain and waits until the device
/// has returned the chain.
pub const MAX_PAGES: usize = 1_024;
/// Maximum number of ranges that the device reads from one chain of free pages. Linux reports 32
/// per chain.
pub const MAX_RANGES: usize = 256;

/// Error in a chain. The chain is returned to the driver unused.
#[derive(Debug, Error)]
pub enum ChainError {
    #[error("descriptor points outside of plugged memory")]
    Descriptors(#[from] virtio_queue::Error),
    #[error("cannot read the request")]
    Read(#[source] io::Error),
    /// The length is invalid for this queue, for example not a multiple of an entry's size.
    #[error("request of {bytes} bytes has an invalid length for this queue")]
    Length { bytes: usize },
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// Ranges of guest-physical addresses, in ascending order and multiples of 4 KiB. They neither
    /// overlap nor touch.
    pub ranges: Vec<Range<u64>>,
    /// The chain has more entries than the device reads, so the list is incomplete.
    pub is_cut: bool,
}

/// Reads a list of page numbers from the inflate or the deflate queue.
pub fn read_pages(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
) -> Result<Listed, ChainError> {
    let reader = chain.reader(memory)?;
    let bytes = reader.available_bytes();
    if bytes == 0 || !bytes.is_multiple_of(4) {
        return Err(ChainError::Length { bytes });
    }
    let mut list = vec![0; bytes.min(4 * MAX_PAGES)];
    memory.whole(reader).read_exact(&mut list).map_err(ChainError::Read)?;
    let pages = list.chunks_exact(4).map(|page| {
        let start =
            u64::from(u32::from_le_bytes([page[0], page[1], page[2], page[3]])) * PAGE_BYTES;
        start..start + PAGE_BYTES
    });
    Ok(Listed { ranges: join(pages.collect()), is_cut: bytes > 4 * MAX_PAGES })
}

/// Reads a chain of the reporting queue. The chain's buffers are the free memory. Partial pages at
/// their ends are dropped.
pub fn read_free(chain: DescriptorChain<&MappedMemory>) -> Result<Listed, ChainError> {
    let mut buffers = chain.writable().map(|descriptor| {
        let start = descriptor.addr().raw_value();
        let end = start.saturating_add(u64::from(descriptor.len()));
        start.checked_next_multiple_of(PAGE_BYTES).unwrap_or(end)..end - end % PAGE_BYTES
    });
    let ranges: Vec<_> =
        buffers.by_ref().take(MAX_RANGES).filter(|range| !range.is_empty()).collect();
    let is_cut = buffers.next().is_some();
    if ranges.is_empty() {
        return Err(ChainError::Length { bytes: 0 });
    }
    Ok(Listed { ranges: join(ranges), is_cut })
}

pub fn read_statistics(
    memory: &MappedMemory,
    chain: DescriptorChain<&MappedMemory>,
) -> Result<Statistics, ChainError> {
    let reader = chain.reader(memory)?;
    let bytes = reader.available_bytes();
    if bytes > Statistics::MAX_BYTES {
        return Err(ChainError::Length { bytes });
    }
    let mut buffer = vec![0; bytes];
    memory.whole(reader).read_exact(&mut buffer).map_err(ChainError::Read)?;
    Statistics::parse(&buffer).ok_or(ChainError::Length { bytes })
}

/// Sorts ranges and joins those that overlap or touch. Linux lists pages in the order of its free
/// lists, usually backwards.
fn join(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let joined = next.start <= range.end;
        if joined {
            range.end = range.end.max(next.end);
        }
        joined
    });
    ranges
}

/// Contiguous part of a zone in the guest's address space.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPart {
    pub range: GuestRange,
    pub tier: Tier,
    /// Page size on the host. Memory can be returned only in whole host pages.
    pub unit_bytes: u64,
}

impl MemoryPart {
    /// Returns the largest range of whole host pages inside `range`, which must be within this
    /// part.
    fn whole_units(&self, range: &Range<u64>) -> Range<u64> {
        let offsets = range.start - self.range.start..range.end - self.range.start;
        let start = offsets.start.next_multiple_of(self.unit_bytes);
        let end = offsets.end - offsets.end % self.unit_bytes;
        self.range.start + start..self.range.start + end
    }
}

/// A piece of a listed range that is returned as a whole or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub range: Range<u64>,
    /// Index of the part that contains the piece, or the reason to refuse the piece.
    pub verdict: Result<usize, Refusal>,
}

/// Cuts `range` at the boundaries of `parts` and of unplugged blocks. `parts` must be in
/// ascending order and must not overlap. The caller must hold the guard of `memory` until it has
/// handled all pieces.
pub fn cut(range: &Range<u64>, parts: &[MemoryPart], memory: &MappedMemory) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = range.start;
    let mut push = |end: u64, verdict| {
        if at < end {
            pieces.push(Piece { range: at..end, verdict });
            at = end;
        }
    };
    for (index, part) in parts.iter().enumerate() {
        let (start, end) = (part.range.start.max(range.start), part.range.end().min(range.end));
        if start >= end {
            continue;
        }
        push(start, Err(Refusal::NoMemory));
        if part.tier == Tier::Pm {
            push(end, Err(Refusal::Pm));
        } else if is_plugged(memory, start..end) {
            push(end, Ok(index));
        } else {
            let blocks = (start - start % BLOCK_BYTES..end).step_by(BLOCK_BYTES as usize);
            for block in blocks {
                let part = block.max(start)..(block + BLOCK_BYTES).min(end);
                let verdict = if is_plugged(memory, part.clone()) {
                    Ok(index)
                } else {
                    Err(Refusal::Unplugged)
                };
                push(part.end, verdict);
            }
        }
    }
    push(range.end, Err(Refusal::NoMemory));
    pieces.into_iter().flat_map(|piece| whole_units(piece, parts)).collect()
}

/// Splits partial huge pages off both ends of a piece, because the host cannot take them back.
fn whole_units(piece: Piece, parts: &[MemoryPart]) -> Vec<Piece> {
    let Piece { range, verdict } = piece;
    let parts = match verdict.map(|index| parts[index].whole_units(&range)) {
        Err(_) => vec![(range, verdict)],
        Ok(whole) if whole.is_empty() => vec![(range, Err(Refusal::HugePage))],
        Ok(whole) => vec![
            (range.start..whole.start, Err(Refusal::HugePage)),
            (whole.clone(), verdict),
            (whole.end..range.end, Err(Refusal::HugePage)),
        ],
    };
    let parts = parts.into_iter().filter(|(range, _)| !range.is_empty());
    parts.map(|(range, verdict)| Piece { range, verdict }).collect()
}

fn is_plugged(memory: &MappedMemory, range: Range<u64>) -> bool {
    let len = (range.end - range.start) as usize;
    memory.check_range(GuestAddress(range.start), len, Permissions::Write)
}

pub fn pages(range: &Range<u64>) -> u64 {
    (range.end - range.start) / PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

    use super::*;
    use crate::memory::view::GuestView;

    const MIB: u64 = 1 << 20;

    /// 8 MiB of boot memory, a hole of 8 MiB, 16 MiB of DRAM with blocks 2 and 3 plugged, 16 MiB of
    /// PM, and a volume.
    fn memory() -> (GuestView, Vec<MemoryPart>) {
        let at = |start: u64, len: u64| (GuestAddress(start * MIB), (len * MIB) as usize);
        let regions =
            GuestMemoryMmap::from_ranges(&[at(0, 8), at(16, 16), at(32, 16), at(64, 4)]).unwrap();
        let view = GuestView::new(regions);
        for start in [16, 32] {
            view.exclusive()
                .add_pluggable(GuestAddress(start * MIB), 16 * MIB, BLOCK_BYTES)
                .unwrap();
        }
        view.exclusive().set_plugged(GuestAddress(20 * MIB), 4 * MIB, true);
        view.exclusive().set_plugged(GuestAddress(32 * MIB), 16 * MIB, true);
        let part = |start, len, tier| {
            let range = GuestRange { start: start * MIB, len: len * MIB };
            MemoryPart { range, tier, unit_bytes: PAGE_BYTES }
        };
        let parts = vec![part(0, 8, Tier::Dram), part(16, 16, Tier::Dram), part(32, 16, Tier::Pm)];
        (view, parts)
    }

    fn verdicts(range: Range<u64>) -> Vec<(u64, u64, Result<usize, Refusal>)> {
        let (view, parts) = memory();
        let pieces = cut(&(range.start * MIB..range.end * MIB), &parts, &view.memory());
        pieces.into_iter().map(|p| (p.range.start / MIB, p.range.end / MIB, p.verdict)).collect()
    }

    #[test]
    fn only_pages_of_plugged_dram_are_returned() {
        let (unplugged, nothing) = (Err(Refusal::Unplugged), Err(Refusal::NoMemory));
        assert_eq!(verdicts(1..3), [(1, 3, Ok(0))]);
        assert_eq!(verdicts(20..24), [(20, 24, Ok(1))]);
        assert_eq!(verdicts(33..35), [(33, 35, Err(Refusal::Pm))]);
        assert_eq!(verdicts(8..16), [(8, 16, nothing)]);
        assert_eq!(verdicts(64..66), [(64, 66, nothing)], "a volume");
        assert_eq!(verdicts(7..17), [(7, 8, Ok(0)), (8, 16, nothing), (16, 17, unplugged)]);
        assert_eq!(
            verdicts(19..25),
            [(19, 20, unplugged), (20, 22, Ok(1)), (22, 24, Ok(1)), (24, 25, unplugged)]
        );
        assert_eq!(verdicts(40..90), [(40, 48, Err(Refusal::Pm)), (48, 90, nothing)]);
    }

    #[test]
    fn only_whole_huge_pages_are_returned() {
        let (view, mut parts) = memory();
        parts.iter_mut().for_each(|part| part.unit_bytes = 2 * MIB);
        let cut = |range: Range<u64>| -> Vec<_> {
            let pieces = cut(&(range.start * MIB..range.end * MIB), &parts, &view.memory());
            pieces
                .into_iter()
                .map(|p| (p.range.start / MIB, p.range.end / MIB, p.verdict))
                .collect()
        };
        let part = Err(Refusal::HugePage);
        assert_eq!(cut(1..3), [(1, 3, part)], "halves of two pages");
        assert_eq!(cut(0..8), [(0, 8, Ok(0))]);
        assert_eq!(cut(1..7), [(1, 2, part), (2, 6, Ok(0)), (6, 7, part)]);
        assert_eq!(cut(21..24), [(21, 22, part), (22, 24, Ok(1))]);
        assert_eq!(cut(33..34), [(33, 34, Err(Refusal::Pm))]);
    }

    #[test]
    fn runs_are_joined_in_any_order() {
        let page = |n: u64| n * PAGE_BYTES..(n + 1) * PAGE_BYTES;
        assert_eq!(
            join(vec![page(9), page(8), page(3), page(8), page(10)]),
            [page(3), page(8).start..page(10).end]
        );
        assert_eq!(join(vec![0..40 * MIB, MIB..2 * MIB, 40 * MIB..41 * MIB]), vec![0..41 * MIB]);
        assert_eq!(join(Vec::new()), []);
    }

    proptest! {
        /// Each page is accepted or refused according to the part of memory that contains it.
        #[test]
        fn each_page_has_the_verdict_of_its_part_of_memory(start in 0u64..20_000, len in 1u64..20_000) {
            let (view, parts) = memory();
            let range = start * PAGE_BYTES..(start + len) * PAGE_BYTES;
            let pieces = cut(&range, &parts, &view.memory());
            let mut next = range.start;
            for piece in pieces {
                prop_assert_eq!(piece.range.start, next);
                prop_assert!(piece.range.end > next);
                next = piece.range.end;
                for page in piece.range.step_by(PAGE_BYTES as usize) {
                    let expected = match page / MIB {
                        0..8 => Ok(0),
                        20..24 => Ok(1),
                        16..32 => Err(Refusal::Unplugged),
                        32..48 => Err(Refusal::Pm),
                        _ => Err(Refusal::NoMemory),
                    };
                    prop_assert_eq!(piece.verdict, expected, "{:#x}", page);
                }
            }
            prop_assert_eq!(next, range.end);
        }
    }
}
