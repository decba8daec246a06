//! Unpacking a kernel straight into guest memory.
//!
//! The image is unpacked so that the first segment of a usual kernel comes out where it belongs;
//! what does not is moved. A buffer beside guest memory would cost its pages, some 60 MiB that the
//! host has to zero first, and a copy of them all. Whatever is unusual here still loads, only
//! slower: see [`Outcome`].

use std::io::Cursor;
use std::ops::Range;

use foreshore_devices::memory::layout::{BootMemory, HIMEM_START, MIB};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::DecompressError;
use super::decompress::Packed;
use super::elf::{self, LoadedElf, Segment};
use super::pvh::{self, RangeKind};
use super::scratch::Scratch;

/// Where an image is unpacked to. Linux is linked to run at 16 MiB (CONFIG_PHYSICAL_START), and ld
/// puts the first segment 2 MiB into the file, for it is aligned to that
/// (arch/x86/kernel/vmlinux.lds.S). A kernel that was configured otherwise is moved as a whole.
const IMAGE_START: u64 = 14 * MIB;
/// Memory is given back in units of a huge page: less would break one up.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// How far it came.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The kernel is where it belongs. All other memory reads as before.
    Loaded(LoadedElf),
    /// The image is unpacked, but its segments cannot be brought to their places, or it is not to
    /// be loaded at all: the usual loader knows why. Memory reads as before.
    Unpacked(Scratch),
    /// There is no room for the image, and nothing was done.
    NoRoom,
}

/// Unpacks a kernel into boot memory, which reads as zeros.
///
/// # Safety
/// As that of [`boot::load`](super::load).
pub(super) unsafe fn load<M: GuestMemoryBackend>(
    memory: &M,
    packed: &Packed,
    boot_memory: BootMemory,
) -> Result<Outcome, DecompressError> {
    let image_bytes = packed.unpacked_bytes() as u64;
    let window = window(boot_memory, image_bytes);
    let Some(window) = window.and_then(|window| in_one_region(memory, window, image_bytes)) else {
        return Ok(Outcome::NoRoom);
    };
    let window_bytes = (window.end - window.start) as usize;
    // 1. The window as plain bytes.
    let Ok(slice) = memory.get_slice(GuestAddress(window.start), window_bytes) else {
        return Ok(Outcome::NoRoom);
    };
    if slice.len() != window_bytes {
        return Ok(Outcome::NoRoom);
    }
    let guard = slice.ptr_guard_mut();
    // SAFETY: vm-memory upholds that the slice's bytes are mapped, readable and writable as long as
    // `slice` borrows `memory`. Nobody else reads or writes them meanwhile: the caller promises
    // it, and nothing in this function goes through `memory` again.
    let bytes = unsafe { std::slice::from_raw_parts_mut(guard.as_ptr(), window_bytes) };
    // 2. The image.
    let start = (IMAGE_START - window.start) as usize;
    let image = start..start + packed.unpacked_bytes();
    packed.unpack_into(&mut bytes[image.clone()])?;
    // 3. Its segments.
    let verified =
        elf::verify(&mut Cursor::new(&bytes[image.clone()]), image.len() as u64, boot_memory);
    if let Ok((segments, loaded)) = verified
        && let Some(plan) = plan_for(&segments, &image, &window)
    {
        plan.carry_out(bytes);
        return Ok(Outcome::Loaded(loaded));
    }
    // 4. Out of the way again.
    let mut copy = Scratch::new(image.len()).map_err(|source| packed.no_memory(source))?;
    copy.bytes_mut().copy_from_slice(&bytes[image.clone()]);
    clear(&mut bytes[image]);
    Ok(Outcome::Unpacked(copy))
}

/// The range of usable memory, above the boot data, that an image of `image_bytes` fits into.
fn window(boot_memory: BootMemory, image_bytes: u64) -> Option<Range<u64>> {
    let end = IMAGE_START.checked_add(image_bytes)?;
    pvh::memory_map(boot_memory)
        .iter()
        .find(|range| {
            range.kind == RangeKind::Usable
                && range.start >= HIMEM_START.raw_value()
                && range.start <= IMAGE_START
                && end <= range.end()
        })
        .map(|range| range.start..range.end())
}

/// As much of the window as is one stretch of the VMM's memory, if the image fits into that: zones
/// lie side by side in the guest, and not here.
fn in_one_region<M: GuestMemoryBackend>(
    memory: &M,
    window: Range<u64>,
    image_bytes: u64,
) -> Option<Range<u64>> {
    let region = memory.find_region(GuestAddress(window.start))?;
    let end = window.end.min(region.last_addr().raw_value() + 1);
    (IMAGE_START + image_bytes <= end).then_some(window.start..end)
}

fn plan_for(segments: &[Segment], image: &Range<usize>, window: &Range<u64>) -> Option<Plan> {
    let parts = segments.iter().filter(|segment| segment.file_bytes != 0);
    let moves = parts.map(|segment| {
        Some(Move {
            from: image.start.checked_add(usize::try_from(segment.offset).ok()?)?,
            to: usize::try_from(segment.address.checked_sub(window.start)?).ok()?,
            len: usize::try_from(segment.file_bytes).ok()?,
        })
    });
    let mut plan =
        Plan::new(image, (window.end - window.start) as usize, moves.collect::<Option<_>>()?)?;
    plan.round_up(image, window);
    Some(plan)
}

/// Bytes that are to be moved, as offsets into the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Move {
    from: usize,
    to: usize,
    len: usize,
}

impl Move {
    fn source(&self) -> Option<Range<usize>> {
        Some(self.from..self.from.checked_add(self.len)?)
    }

    fn destination(&self) -> Option<Range<usize>> {
        Some(self.to..self.to.checked_add(self.len)?)
    }
}

/// How an image becomes a kernel.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// To be done one after the other.
    moves: Vec<Move>,
    /// What then is left of the image, to be cleared.
    rests: Vec<Range<usize>>,
}

impl Plan {
    /// Plans to bring the parts of `image` to their places in a window of `window_bytes`. There is
    /// no plan if a part lies outside of the image or of the window, or if the parts are not in
    /// the same order, or overlap, in the image and in their places.
    fn new(image: &Range<usize>, window_bytes: usize, mut parts: Vec<Move>) -> Option<Self> {
        parts.sort_by_key(|part| part.from);
        let sources: Vec<_> = parts.iter().map(Move::source).collect::<Option<_>>()?;
        let destinations: Vec<_> = parts.iter().map(Move::destination).collect::<Option<_>>()?;
        let ascending = |ranges: &[Range<usize>], within: &Range<usize>| {
            ranges.is_sorted_by(|a, b| a.end <= b.start)
                && ranges.first().is_none_or(|first| first.start >= within.start)
                && ranges.last().is_none_or(|last| last.end <= within.end)
        };
        if !ascending(&sources, image) || !ascending(&destinations, &(0..window_bytes)) {
            return None;
        }
        // No move may overwrite a part that has not been moved yet. With both orders the same:
        //
        // 1. Down, ascending. Part i goes to d_i < s_i. The parts above it start behind s_i's end,
        //    so behind d_i's. Those below that still are to go are to go up: part j ends at s_j +
        //    n_j <= d_j + n_j <= d_i.
        // 2. Up, descending. Part i goes to d_i > s_i. All above it are where they belong. Those
        //    below that still are to go are to go up: again they end at s_j + n_j < d_j + n_j <=
        //    d_i.
        //
        // A part that is not moved is where it belongs, and no two places overlap.
        let down = parts.iter().filter(|part| part.to < part.from);
        let up = parts.iter().rev().filter(|part| part.to > part.from);
        let moves = down.chain(up).copied().collect();
        Some(Self { moves, rests: gaps(image, &destinations) })
    }

    /// Has the image's end cleared up to the end of the host's huge page, so that it can be given
    /// back. Nothing but zeros is there, unless a part goes there: then the page is in use
    /// anyway.
    fn round_up(&mut self, image: &Range<usize>, window: &Range<u64>) {
        let end = (window.start + image.end as u64)
            .next_multiple_of(HUGE_PAGE_BYTES as u64)
            .min(window.end);
        let end = (end - window.start) as usize;
        let is_free =
            self.moves.iter().all(|part| part.to + part.len <= image.end || part.to >= end);
        if let Some(last) = self.rests.last_mut().filter(|last| is_free && last.end == image.end) {
            last.end = end;
        }
    }

    fn carry_out(&self, window: &mut [u8]) {
        for part in &self.moves {
            window.copy_within(part.from..part.from + part.len, part.to);
        }
        for rest in &self.rests {
            clear(&mut window[rest.clone()]);
        }
    }
}

/// What of `range` is in none of `covered`, which ascend.
fn gaps(range: &Range<usize>, covered: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut gaps = Vec::new();
    let mut at = range.start;
    for part in covered {
        gaps.push(at..part.start.min(range.end));
        at = at.max(part.end);
    }
    gaps.push(at..range.end);
    gaps.retain(|gap| gap.start < gap.end);
    gaps
}

/// Makes `bytes` read as zeros, and gives whole huge pages of them back to the host.
fn clear(bytes: &mut [u8]) {
    bytes.fill(0);
    let skip = bytes.as_ptr().align_offset(HUGE_PAGE_BYTES);
    let Some(aligned) = bytes.get_mut(skip..) else { return };
    let len = aligned.len() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if len != 0 {
        // All mappings that `load` accepts read as zeros afterwards: anonymous memory is new, a
        // shared mapping keeps the zeros, and a private one is of a file without data.
        // SAFETY: the range is part of `bytes`, which is borrowed mutably. Its contents stay zero.
        unsafe { libc::madvise(aligned.as_mut_ptr().cast(), len, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
#[path = "inplace_tests.rs"]
pub(super) mod tests;
