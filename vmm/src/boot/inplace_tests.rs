//! Tests of unpacking in place. The reference result comes from unpacking outside guest memory and
//! then loading.

use std::iter;

use foreshore_decompress::Compression;
use foreshore_devices::memory::layout::GIB;
use proptest::prelude::*;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::super::elf::ElfError;
use super::super::elf::tests::{Part, build_parts, linux_note, pvh_note_to};
use super::super::payloads::{gzip_payload, lz4_payload, xz_payload, zstd_payload};
use super::super::unpack::unpack;
use super::*;

/// All memory of a test is private.
pub(crate) fn all_private() -> PrivateRanges {
    PrivateRanges::of_test(iter::once(0..u64::MAX))
}

/// Loads into memory of the test.
fn load(
    memory: &GuestMemoryMmap,
    packed: &Packed,
    boot_memory_bytes: u64,
) -> Result<Outcome, UnpackError> {
    // SAFETY: the memory is anonymous and belongs to the test.
    unsafe {
        super::load(memory, packed, BootMemory::of_small_pages(boot_memory_bytes), &all_private())
    }
}

const MEMORY_BYTES: u64 = 20 * MIB;
const KIB: usize = 1 << 10;

fn memory(bytes: u64) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes as usize)]).unwrap()
}

/// All bytes of a guest memory with one region.
pub(crate) fn contents(memory: &GuestMemoryMmap) -> Vec<u8> {
    let mut bytes = vec![0; memory.last_addr().raw_value() as usize + 1];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

fn part(offset: usize, address: u64, len: usize, fill: u8) -> Part {
    Part { offset, address, len, fill, bss: 0 }
}

/// Kernel whose entry point is the start of its first segment.
fn kernel(parts: &[Part], tail: usize) -> Vec<u8> {
    build_parts(parts, &[linux_note(), pvh_note_to(parts[0].address)].concat(), tail)
}

fn unpack_beside(
    memory: &GuestMemoryMmap,
    payload: &[u8],
    compression: Compression,
    memory_bytes: u64,
) -> Result<LoadedElf, ElfError> {
    let image = unpack(&Packed::new(payload, compression).unwrap()).unwrap();
    elf::load(
        memory,
        &mut Cursor::new(image.bytes()),
        image.bytes().len() as u64,
        BootMemory::of_small_pages(memory_bytes),
    )
}

/// Loads in place, and checks that the result equals the reference result.
fn loads_in_place(payload: &[u8], compression: Compression) {
    let (here, there) = (memory(MEMORY_BYTES), memory(MEMORY_BYTES));
    let packed = Packed::new(payload, compression).unwrap();
    let Outcome::Loaded(loaded) = load(&here, &packed, MEMORY_BYTES).unwrap() else {
        panic!("not in place")
    };
    assert_eq!(loaded, unpack_beside(&there, payload, compression, MEMORY_BYTES).unwrap());
    assert!(contents(&here) == contents(&there), "memory differs");
}

fn loads_in_place_from_zstd(parts: &[Part], tail: usize) {
    loads_in_place(&zstd_payload(&kernel(parts, tail)), Compression::Zstd);
}

/// Segments like Linux's: the first is unpacked in place, and the others are closer together than
/// in the file.
fn linux_parts() -> [Part; 4] {
    [
        part(2048 * KIB, 0x100_0000, 300 * KIB, 1),
        part(2560 * KIB, 0x108_0000, 100 * KIB, 2),
        part(2816 * KIB, 0x109_9000, 9 * KIB, 3),
        Part { bss: 200 << 10, ..part(3072 * KIB, 0x109_c000, 150 * KIB, 4) },
    ]
}

#[test]
fn every_compression_loads_in_place_like_the_reference() {
    let image = kernel(&linux_parts(), 70_000);
    loads_in_place(&zstd_payload(&image), Compression::Zstd);
    loads_in_place(&lz4_payload(&image, 1 << 20), Compression::Lz4);
    loads_in_place(&gzip_payload(&image), Compression::Gzip);
    loads_in_place(&xz_payload(&image), Compression::Xz);
}

#[test]
fn segments_move_down_up_and_both() {
    let start = IMAGE_START;
    // Each part overlaps its own new place and the places of its neighbors.
    let down = [part(0x1000, start - 0x800, 0x2000, 1), part(0x3000, start + 0x1800, 0x2000, 2)];
    loads_in_place_from_zstd(&down, 0);
    let up = [part(0x1000, start + 0x1800, 0x2000, 1), part(0x3000, start + 0x3800, 0x2000, 2)];
    loads_in_place_from_zstd(&up, 0);
    let apart = [
        part(0x1000, start + 0x800, 0x2000, 1),
        part(0x3000, start + 0x3000, 0x1000, 2),
        part(0x4000, start + 0x4800, 0x2000, 3),
        part(0x6000, start + 0x6800, 0x2000, 4),
    ];
    loads_in_place_from_zstd(&apart, 0x3000);
    // All segments are at other addresses, as with another CONFIG_PHYSICAL_START.
    let elsewhere = [part(0x1000, 2 * MIB, 0x2000, 1), part(0x3000, 3 * MIB, 0x2000, 2)];
    loads_in_place_from_zstd(&elsewhere, 0x1000);
}

#[test]
fn uninitialized_data_over_the_image_reads_as_zeros() {
    let start = IMAGE_START;
    let parts = [
        Part { bss: 0x10_0000, ..part(0x1000, start + 0x1000, 0x1800, 1) },
        // The segment has no file bytes, so its position in the file does not matter.
        Part { bss: 0x4000, ..part(0x1000, start + 0x10_4000, 0, 2) },
    ];
    // The image is larger than a huge page, so that huge pages are returned.
    loads_in_place_from_zstd(&parts, 5 << 20);
}

/// Checks that the image is unpacked unchanged, and that memory reads as zeros.
fn is_left_to_the_loader(image: &[u8], memory_bytes: u64, memory: &GuestMemoryMmap) {
    let payload = zstd_payload(image);
    let packed = Packed::new(&payload, Compression::Zstd).unwrap();
    let Outcome::Unpacked(unpacked) = load(memory, &packed, memory_bytes).unwrap() else {
        panic!("not left to the loader")
    };
    assert!(unpacked.bytes() == image, "the image differs");
    let mut low = vec![0; MEMORY_BYTES as usize];
    memory.read_slice(&mut low, GuestAddress(0)).unwrap();
    assert!(low.iter().all(|&byte| byte == 0), "memory is not as new");
}

#[test]
fn immovable_or_invalid_kernels_are_left_to_the_loader() {
    let start = IMAGE_START;
    let (a, b) = (part(0x1000, start + 0x4000, 0x1000, 1), part(0x3000, start, 0x1000, 2));
    let left = |image: &[u8]| is_left_to_the_loader(image, MEMORY_BYTES, &memory(MEMORY_BYTES));
    left(&kernel(&[a.clone(), b], 0));
    left(&kernel(&[a.clone(), part(0x1800, start + 0x8000, 0x1000, 2)], 0));
    left(&kernel(&[a.clone(), part(0x2000, start + 0x4800, 0x1000, 2)], 0));
    // These images are refused: one without an entry point, one with a segment outside memory, a
    // file that is not ELF, and an empty file.
    left(&build_parts(std::slice::from_ref(&a), &linux_note(), 0));
    left(&kernel(&[part(0x1000, MEMORY_BYTES, 0x1000, 1)], 0));
    left(&[0xab; 100]);
    left(&[]);
    // The segment is above the device hole.
    let ranges = [(GuestAddress(0), 3 * GIB as usize), (GuestAddress(4 * GIB), MIB as usize)];
    let large = GuestMemoryMmap::from_ranges(&ranges).unwrap();
    is_left_to_the_loader(
        &kernel(&[a, part(0x3000, 4 * GIB, 0x1000, 2)], 0),
        3 * GIB + MIB,
        &large,
    );
}

#[test]
fn without_room_memory_stays_unchanged() {
    let image = kernel(&[part(0x1000, 2 * MIB, 0x1000, 1)], 0);
    let payload = zstd_payload(&image);
    let packed = Packed::new(&payload, Compression::Zstd).unwrap();
    let needed = IMAGE_START + image.len() as u64;
    for bytes in [4096, MIB, IMAGE_START, needed - 1] {
        let memory = memory(bytes);
        assert!(matches!(load(&memory, &packed, bytes).unwrap(), Outcome::NoRoom), "{bytes:#x}");
        assert!(contents(&memory).iter().all(|&byte| byte == 0));
    }
    assert!(matches!(load(&memory(needed), &packed, needed).unwrap(), Outcome::Loaded(_)));
    // There is enough memory, but it is split into two regions.
    let split = split_memory(IMAGE_START + 0x1000);
    assert!(matches!(load(&split, &packed, MEMORY_BYTES).unwrap(), Outcome::NoRoom));
}

#[test]
fn image_is_unpacked_only_into_private_memory() {
    let load = |memory: &GuestMemoryMmap, image: &[u8], private: Range<u64>| {
        let payload = zstd_payload(image);
        let packed = Packed::new(&payload, Compression::Zstd).unwrap();
        let private = PrivateRanges::of_test(iter::once(private));
        let boot_memory = BootMemory::of_small_pages(MEMORY_BYTES);
        // SAFETY: the memory is anonymous and belongs to the test.
        unsafe { super::load(memory, &packed, boot_memory, &private) }.unwrap()
    };
    let image = kernel(&linux_parts(), 0);
    let needed = IMAGE_START + image.len() as u64;
    for too_little in [0..0, 0..needed - 1, MIB + 1..MEMORY_BYTES] {
        let memory = memory(MEMORY_BYTES);
        let outcome = load(&memory, &image, too_little.clone());
        assert!(matches!(outcome, Outcome::NoRoom), "{too_little:?}: {outcome:?}");
        assert!(contents(&memory).iter().all(|&byte| byte == 0), "{too_little:?}");
    }
    let outcome = load(&memory(MEMORY_BYTES), &image, 0..MEMORY_BYTES);
    assert!(matches!(outcome, Outcome::Loaded(_)), "{outcome:?}");
    // The last segment ends above the private range, so it cannot be moved there.
    let far = kernel(&[part(0x1000, IMAGE_START, 0x1000, 1), part(0x3000, 19 * MIB, 0x1000, 2)], 0);
    let outcome = load(&memory(MEMORY_BYTES), &far, 0..18 * MIB);
    assert!(matches!(outcome, Outcome::Unpacked(_)), "{outcome:?}");
}

/// Memory of the same size, split into two regions.
fn split_memory(at: u64) -> GuestMemoryMmap {
    let ranges = [(GuestAddress(0), at as usize), (GuestAddress(at), (MEMORY_BYTES - at) as usize)];
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

#[test]
fn kernel_loads_in_place_within_the_first_of_adjacent_zones() {
    let payload = zstd_payload(&kernel(&linux_parts(), 0));
    let packed = Packed::new(&payload, Compression::Zstd).unwrap();
    let (here, there) = (split_memory(18 * MIB), memory(MEMORY_BYTES));
    assert!(matches!(load(&here, &packed, MEMORY_BYTES).unwrap(), Outcome::Loaded(_)));
    unpack_beside(&there, &payload, Compression::Zstd, MEMORY_BYTES).unwrap();
    assert!(contents(&here) == contents(&there), "memory differs");
    // A segment that belongs in the other region cannot be moved there.
    let far = kernel(&[part(0x1000, IMAGE_START, 0x1000, 1), part(0x3000, 19 * MIB, 0x1000, 2)], 0);
    is_left_to_the_loader(&far, MEMORY_BYTES, &split_memory(18 * MIB));
}

#[test]
fn damaged_stream_has_the_same_error_as_the_reference() {
    let image = kernel(&[part(0x1000, IMAGE_START, 0x1000, 1)], 0);
    for (payload, compression) in [
        (zstd_payload(&image), Compression::Zstd),
        (lz4_payload(&image, 4096), Compression::Lz4),
        (gzip_payload(&image), Compression::Gzip),
        (xz_payload(&image), Compression::Xz),
    ] {
        let mut short = payload.clone();
        short.drain(payload.len() / 2..payload.len() - 4);
        let packed = Packed::new(&short, compression).unwrap();
        let here = load(&memory(MEMORY_BYTES), &packed, MEMORY_BYTES).unwrap_err();
        assert_eq!(here.to_string(), unpack(&packed).err().unwrap().to_string());
    }
}

fn moves(moves: &[(usize, usize, usize)]) -> Vec<Move> {
    moves.iter().map(|&(from, to, len)| Move { from, to, len }).collect()
}

#[test]
fn most_of_a_distributions_kernel_is_not_moved() {
    // Debian's kernel 6.12, with the addresses in its program headers and a window that starts at 1
    // MiB.
    let at = |address: usize| address - (1 << 20);
    let image = at(0xe0_0000)..at(0xe0_0000) + 57_575_404;
    let segments = [
        (0x20_0000, 0x100_0000, 0x1aa_7960),
        (0x1e0_0000, 0x2c0_0000, 0x6d_d000),
        (0x260_0000, 0x32d_d000, 0x3_9000),
        (0x271_6000, 0x331_6000, 0xee_a000),
    ];
    let parts = segments.map(|(offset, address, len)| (image.start + offset, at(address), len));
    let mut plan = Plan::new(&image, 512 << 20, moves(&parts)).unwrap();
    assert_eq!(plan.moves, moves(&parts[2..]));
    let rests =
        [at(0xe0_0000)..at(0x100_0000), at(0x2aa_7960)..at(0x2c0_0000), at(0x420_0000)..image.end];
    assert_eq!(plan.rests, rests);
    plan.round_up(&image, &(MIB..512 * MIB));
    assert_eq!(plan.rests[2], at(0x420_0000)..at(0x460_0000));
}

#[test]
fn last_huge_page_is_cleared_unless_a_part_moves_there() {
    const HUGE: usize = HUGE_PAGE_BYTES;
    let last = |parts: &[(usize, usize, usize)], window: Range<u64>| {
        let image = 0..HUGE + 100;
        let mut plan = Plan::new(&image, 4 * HUGE, moves(parts)).unwrap();
        plan.round_up(&image, &window);
        plan.rests.last().cloned()
    };
    let window = 0..4 * HUGE as u64;
    assert_eq!(last(&[], window.clone()), Some(0..2 * HUGE));
    assert_eq!(last(&[], HUGE as u64 / 2..4 * HUGE as u64), Some(0..HUGE + HUGE / 2));
    assert_eq!(last(&[], 0..HUGE as u64 + 200), Some(0..HUGE + 200));
    assert_eq!(last(&[(0, 2 * HUGE, 100)], window.clone()), Some(0..2 * HUGE));
    assert_eq!(last(&[(0, 2 * HUGE - 1, 100)], window.clone()), Some(0..HUGE + 100));
    assert_eq!(last(&[(0, HUGE + 100, 1)], window.clone()), Some(0..HUGE + 100));
    assert_eq!(last(&[(0, HUGE + 50, 100)], window), Some(0..HUGE + 50));
}

#[test]
fn whole_huge_pages_are_returned() {
    const PAGE_BYTES: usize = 4096;
    let mut scratch = Scratch::new(3 * HUGE_PAGE_BYTES).unwrap();
    scratch.bytes_mut().fill(1);
    // The range contains at least two whole huge pages, wherever the mapping starts.
    let start = scratch.bytes().as_ptr().align_offset(HUGE_PAGE_BYTES);
    let whole = start..start + 2 * HUGE_PAGE_BYTES;
    let resident_pages = |scratch: &mut Scratch| {
        let mut pages = vec![0u8; whole.len() / PAGE_BYTES];
        let bytes = &mut scratch.bytes_mut()[whole.clone()];
        // SAFETY: `pages` has a byte for each page of the range, which is mapped.
        let result =
            unsafe { libc::mincore(bytes.as_mut_ptr().cast(), bytes.len(), pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|&&page| page & 1 != 0).count()
    };
    assert_eq!(resident_pages(&mut scratch), whole.len() / PAGE_BYTES);
    clear(&mut scratch.bytes_mut()[whole.start..whole.end]);
    assert_eq!(resident_pages(&mut scratch), 0);
    // A range smaller than a huge page stays allocated, and is zeroed.
    scratch.bytes_mut().fill(1);
    clear(&mut scratch.bytes_mut()[whole.start + 1..whole.end - 1]);
    assert_eq!(resident_pages(&mut scratch), whole.len() / PAGE_BYTES);
    let bytes = &scratch.bytes()[whole];
    assert_eq!(bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 2);
    assert_eq!((bytes.first(), bytes.last()), (Some(&1), Some(&1)));
}

#[test]
fn moves_down_ascend_and_then_moves_up_descend() {
    let parts = [(10, 0, 10), (20, 10, 10), (30, 30, 10), (40, 45, 10), (50, 60, 10)];
    let plan = Plan::new(&(5..60), 100, moves(&parts)).unwrap();
    assert_eq!(plan.moves, moves(&[parts[0], parts[1], parts[4], parts[3]]));
    assert_eq!(plan.rests, [20..30, 40..45, 55..60]);
}

#[test]
fn parts_outside_or_out_of_order_have_no_plan() {
    let none =
        |parts: &[(usize, usize, usize)]| assert_eq!(Plan::new(&(10..50), 100, moves(parts)), None);
    none(&[(9, 20, 10)]);
    none(&[(45, 20, 10)]);
    none(&[(10, 91, 10)]);
    none(&[(10, usize::MAX, 10)]);
    none(&[(10, 20, usize::MAX)]);
    none(&[(10, 20, 10), (19, 40, 10)]);
    none(&[(10, 20, 10), (20, 29, 10)]);
    none(&[(10, 40, 10), (20, 20, 10)]);
    assert!(Plan::new(&(10..50), 100, moves(&[(40, 90, 10), (10, 80, 10)])).is_some());
}

/// Reference for a plan: removes all parts, clears the image, and inserts the parts.
fn naively(window: &mut [u8], image: &Range<usize>, parts: &[Move]) {
    let taken: Vec<_> = parts.iter().map(|part| window[part.source().unwrap()].to_vec()).collect();
    window[image.clone()].fill(0);
    for (part, bytes) in parts.iter().zip(taken) {
        window[part.destination().unwrap()].copy_from_slice(&bytes);
    }
}

const WINDOW: usize = 600;

/// An image and its parts. The parts do not overlap, and have the same order in the image as in
/// their places.
fn orderly() -> impl Strategy<Value = (Range<usize>, Vec<Move>)> {
    let parts = prop::collection::vec((0..20usize, 0..40usize, 1..30usize), 0..6);
    (0..60usize, 0..60usize, parts, 0..40usize).prop_map(|(start, mut to, sizes, tail)| {
        let mut from = start;
        let mut parts = Vec::new();
        for (gap, gap_there, len) in sizes {
            from += gap;
            to += gap_there;
            parts.push(Move { from, to, len });
            from += len;
            to += len;
        }
        (start..from + tail, parts)
    })
}

fn disorderly() -> impl Strategy<Value = (Range<usize>, Vec<Move>)> {
    let part =
        (0..120usize, 0..650usize, 1..40usize).prop_map(|(from, to, len)| Move { from, to, len });
    (0..60usize, 0..200usize, prop::collection::vec(part, 0..4))
        .prop_map(|(start, len, parts)| (start..start + len, parts))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn plan_equals_copying_all_parts((image, parts) in prop_oneof![4 => orderly(), 1 => disorderly()]) {
        let disjoint = |a: Range<usize>, b: Range<usize>| a.end <= b.start || b.end <= a.start;
        let possible = parts.iter().enumerate().all(|(index, a)| {
            let (from, to) = (a.source().unwrap(), a.destination().unwrap());
            image.start <= from.start && from.end <= image.end && to.end <= WINDOW
                && parts[..index].iter().all(|b| {
                    disjoint(from.clone(), b.source().unwrap())
                        && disjoint(to.clone(), b.destination().unwrap())
                        && (a.from < b.from) == (a.to < b.to)
                })
        });
        let plan = Plan::new(&image, WINDOW, parts.clone());
        prop_assert_eq!(plan.is_some(), possible);
        if let Some(plan) = plan {
            let mut window = vec![0; WINDOW];
            for at in image.clone() {
                window[at] = (at % 251) as u8 + 1;
            }
            let mut expected = window.clone();
            plan.carry_out(&mut window);
            naively(&mut expected, &image, &parts);
            prop_assert_eq!(window, expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// With any headers, loading in place produces the same result as the reference.
    #[test]
    fn damaged_headers_have_the_same_result_as_the_reference(damages in prop::collection::vec((0..64 + 3 * 56usize, any::<u8>()), 1..3)) {
        let parts = [
            part(0x1000, IMAGE_START + 0x1000, 0x1000, 1),
            Part { bss: 0x1000, ..part(0x3000, IMAGE_START + 0x2800, 0x1000, 2) },
        ];
        let mut image = kernel(&parts, 0);
        for (at, value) in damages {
            image[at] = value;
        }
        let payload = zstd_payload(&image);
        let (here, there) = (memory(MEMORY_BYTES), memory(MEMORY_BYTES));
        let beside = unpack_beside(&there, &payload, Compression::Zstd, MEMORY_BYTES);
        let packed = Packed::new(&payload, Compression::Zstd).unwrap();
        match load(&here, &packed, MEMORY_BYTES).unwrap() {
            Outcome::Loaded(loaded) => {
                prop_assert_eq!(loaded, beside.unwrap());
                prop_assert!(contents(&here) == contents(&there), "memory differs");
            }
            Outcome::Unpacked(unpacked) => prop_assert!(unpacked.bytes() == image),
            Outcome::NoRoom => prop_assert!(false, "there is room"),
        }
    }
}
