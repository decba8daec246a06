//! Unpacking of a kernel directly into guest memory.
//!
//! The image is unpacked to an address at which the first segment of a typical kernel is already in
//! place. The other segments are moved. A buffer outside guest memory would cost about 60 MiB of
//! pages, which the host must zero and the VMM must copy. Kernels with another layout also load,
//! but more slowly: see [`Outcome`].
//!
//! The image and its segments are in a range of guest memory, the window. It is borrowed as a
//! slice, so it must be in [`PrivateRanges`]. Other memory is written by volatile accesses from a
//! buffer.

use std::io::Cursor;
use std::ops::Range;

use foreshore_decompress::Packed;
use foreshore_devices::memory::PrivateRanges;
use foreshore_devices::memory::layout::{BootMemory, HIMEM_START, MIB};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::elf::{self, LoadedElf, Segment};
use super::pvh::{self, RangeKind};
use super::scratch::Scratch;
use super::unpack::{UnpackError, buffer_for};

/// Address to which an image is unpacked.
///
/// Linux is linked to run at 16 MiB (CONFIG_PHYSICAL_START). ld puts the first segment 2 MiB into
/// the file because of its alignment (arch/x86/kernel/vmlinux.lds.S). A kernel with another
/// configuration is moved completely.
const IMAGE_START: u64 = 14 * MIB;
/// Memory is returned to the host in units of huge pages, because returning less would split a huge
/// page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Result of unpacking in place.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The kernel is in place. The rest of guest memory still reads as before.
    Loaded(LoadedElf),
    /// The image was unpacked into a buffer, because its segments cannot be moved into place, or
    /// because the kernel is invalid. The usual loader then reports the reason. Guest memory reads
    /// as before.
    Unpacked(Scratch),
    /// No private range of guest memory has room for the image. Guest memory was not changed.
    NoRoom,
}

/// Unpacks a kernel into boot memory, which reads as zeros.
///
/// # Safety
/// Same as for [`boot::load`](super::load).
pub(super) unsafe fn load<M: GuestMemoryBackend>(
    memory: &M,
    packed: &Packed,
    boot_memory: BootMemory,
    private: &PrivateRanges,
) -> Result<Outcome, UnpackError> {
    let image_bytes = packed.unpacked_bytes() as u64;
    let window = window(boot_memory, image_bytes);
    let Some(window) =
        window.and_then(|window| in_one_region(memory, window, private, image_bytes))
    else {
        return Ok(Outcome::NoRoom);
    };
    let window_bytes = (window.end - window.start) as usize;
    // 1. Map the window as plain bytes.
    let Ok(slice) = memory.get_slice(GuestAddress(window.start), window_bytes) else {
        return Ok(Outcome::NoRoom);
    };
    if slice.len() != window_bytes {
        return Ok(Outcome::NoRoom);
    }
    let guard = slice.ptr_guard_mut();
    // vm-memory guarantees that the slice's bytes are mapped, readable and writable while `slice`
    // borrows `memory`, which the rest of this function does not use.
    // SAFETY: see above. The bytes are private, so no other process accesses them, and the caller
    // guarantees that no other code of this process does.
    let bytes = unsafe { std::slice::from_raw_parts_mut(guard.as_ptr(), window_bytes) };
    // 2. Unpack the image.
    let start = (IMAGE_START - window.start) as usize;
    let image = start..start + packed.unpacked_bytes();
    packed.unpack_into(&mut bytes[image.clone()])?;
    // 3. Move the segments into place.
    let verified =
        elf::verify(&mut Cursor::new(&bytes[image.clone()]), image.len() as u64, boot_memory);
    if let Ok((segments, loaded)) = verified
        && let Some(plan) = plan_for(&segments, &image, &window)
    {
        plan.carry_out(bytes);
        return Ok(Outcome::Loaded(loaded));
    }
    // 4. If that is not possible, move the image to a buffer outside guest memory.
    let mut copy = buffer_for(packed)?;
    copy.bytes_mut().copy_from_slice(&bytes[image.clone()]);
    clear(&mut bytes[image]);
    Ok(Outcome::Unpacked(copy))
}

/// Range of usable memory above the boot data that has room for an image of `image_bytes`.
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

/// Part of the window that is private and a single mapping in the VMM, if it has room for the
/// image. Zones that are adjacent in the guest are separate mappings in the VMM.
fn in_one_region<M: GuestMemoryBackend>(
    memory: &M,
    window: Range<u64>,
    private: &PrivateRanges,
    image_bytes: u64,
) -> Option<Range<u64>> {
    let window = private.start_of(window)?;
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

/// Move of bytes between two offsets in the window.
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

/// Moves that turn an unpacked image into a loaded kernel.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// Moves in order of execution.
    moves: Vec<Move>,
    /// Remaining ranges of the image, which must be cleared.
    rests: Vec<Range<usize>>,
}

impl Plan {
    /// Plans moves of the parts of `image` to their places in a window of `window_bytes`.
    ///
    /// Returns `None` if a part is outside the image or the window, or if two parts overlap. It
    /// also returns `None` if the parts are not in the same order in the image and in their places.
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
        // A move must not overwrite a part that has yet to be moved. The moves respect this rule
        // because the order of parts is the same in the image and in their places:
        //
        // 1. Parts that move down, in ascending order. Part i moves to d_i < s_i. Parts above it
        //    start after the end of s_i, and so after the end of d_i. Parts below it that have yet
        //    to be moved will move up: part j ends at s_j + n_j <= d_j + n_j <= d_i.
        // 2. Parts that move up, in descending order. Part i moves to d_i > s_i. All parts above it
        //    are already in place. Parts below it that have yet to be moved will move up, and end
        //    at s_j + n_j < d_j + n_j <= d_i.
        //
        // A part that does not move is in place already, and no two places overlap.
        let down = parts.iter().filter(|part| part.to < part.from);
        let up = parts.iter().rev().filter(|part| part.to > part.from);
        let moves = down.chain(up).copied().collect();
        Some(Self { moves, rests: gaps(image, &destinations) })
    }

    /// Extends the cleared range from the end of the image to the end of its huge page on the host.
    /// The whole page can then be returned to the host. The added bytes are already zero. The range
    /// is not extended if a part of the image moves to that page.
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

/// Parts of `range` that are outside the ranges in `covered`, which are in ascending order.
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

/// Fills `bytes` with zeros, and returns whole huge pages among them to the host.
fn clear(bytes: &mut [u8]) {
    bytes.fill(0);
    let skip = bytes.as_ptr().align_offset(HUGE_PAGE_BYTES);
    let Some(aligned) = bytes.get_mut(skip..) else { return };
    let len = aligned.len() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if len != 0 {
        // After the call, the range reads as zeros. Anonymous memory is replaced by zeroed pages,
        // and an unnamed file keeps its zeros. SAFETY: the range is part of `bytes`, which is
        // borrowed mutably. Its contents stay zero.
        unsafe { libc::madvise(aligned.as_mut_ptr().cast(), len, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
#[path = "inplace_tests.rs"]
pub(super) mod tests;
