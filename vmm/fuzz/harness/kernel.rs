//! Kernel and initramfs from an untrusted guest owner.
//!
//! The bytes from the fuzzer become a kernel, the payload of a bzImage, or an ELF file in either
//! form. The loader may accept or refuse it, but must not write outside boot memory. The memory
//! that is mapped for the test is larger.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use foreshore::boot::{self, Payload};
use foreshore_devices::memory::PrivateRanges;
use foreshore_devices::memory::layout::BootMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::cursor::Cursor;

const MIB: u64 = 1 << 20;
const GUARD_BYTES: u64 = MIB;
const INITRAMFS: u8 = 0xab;
const ZSTD_HEADER: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0, 0x50];
/// Start addresses of segments. Some are where a kernel is unpacked in place, or near the end of
/// memory.
const ADDRESSES: [u64; 6] = [MIB, 2 * MIB, 3 * MIB + 0xf000, 14 * MIB, 16 * MIB, 20 * MIB - 0x1000];

/// Loads the files that `bytes` describe, and panics if the result is outside boot memory.
pub(crate) fn kernel_payload(bytes: &[u8]) {
    kernel_payload_by(bytes, |memory_bytes| memory_bytes);
}

/// Works like [`kernel_payload`], but the loader uses the size of boot memory that `wrong` returns.
/// The checks use the original size, so they should detect the difference.
pub(crate) fn kernel_payload_by(bytes: &[u8], wrong: impl FnOnce(u64) -> u64) {
    let mut cursor = Cursor::new(bytes);
    let memory_bytes = cursor.pick(&[4 * MIB, 20 * MIB]);
    let initramfs_bytes = cursor.pick(&[0, 1, 4096, 70_000]);
    let kernel = kernel(&mut cursor, bytes);
    let mapped_bytes = memory_bytes + GUARD_BYTES;
    let memory: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), mapped_bytes as usize)]).unwrap();
    let kernel = TemporaryFile::new("kernel", &kernel);
    let initramfs = TemporaryFile::new("initramfs", &vec![INITRAMFS; initramfs_bytes]);
    let private = PrivateRanges::of_test(std::iter::once(0..memory_bytes));
    // SAFETY: the memory is anonymous and belongs to this function.
    let loaded = unsafe {
        boot::load_payload(
            &memory,
            &kernel.0,
            (initramfs_bytes > 0).then_some(&*initramfs.0),
            BootMemory::of_small_pages(wrong(memory_bytes)),
            &private,
        )
    };
    let mut guard = vec![1; GUARD_BYTES as usize];
    memory.read_slice(&mut guard, GuestAddress(memory_bytes)).unwrap();
    assert!(guard.iter().all(|byte| *byte == 0), "the loader writes above {memory_bytes:#x}");
    match loaded {
        Ok(payload) => check(&payload, &memory, memory_bytes, initramfs_bytes as u64),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn check(payload: &Payload, memory: &GuestMemoryMmap, memory_bytes: u64, initramfs_bytes: u64) {
    let Payload { entry, kernel_end, ref initramfs } = *payload;
    assert!(entry < kernel_end && kernel_end <= memory_bytes, "{payload:x?}");
    let Some(Range { start, end }) = *initramfs else { return assert_eq!(initramfs_bytes, 0) };
    assert!(start >= kernel_end && end <= memory_bytes, "{payload:x?}");
    assert_eq!(end - start, initramfs_bytes);
    let mut content = vec![0; initramfs_bytes as usize];
    memory.read_slice(&mut content, GuestAddress(start)).unwrap();
    assert!(content.iter().all(|byte| *byte == INITRAMFS), "{payload:x?}");
}

/// File for the loader. It is removed when this value is dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(name: &str, content: &[u8]) -> Self {
        let thread = std::thread::current().id();
        let name = format!("foreshore-fuzz-{}-{thread:?}-{name}", std::process::id());
        let path = std::env::temp_dir().join(Path::new(&name));
        fs::write(&path, content).unwrap();
        Self(path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn kernel(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Vec<u8> {
    let form = cursor.number(1) % 8;
    match form {
        0 => bytes.get(3..).unwrap_or_default().to_vec(),
        1 => bzimage(bytes.get(3..).unwrap_or_default()),
        2 | 3 => elf(cursor),
        _ => bzimage(&zstd(&elf(cursor))),
    }
}

/// Payload of raw blocks.
fn zstd(data: &[u8]) -> Vec<u8> {
    let header = 1 | (data.len() as u32) << 3;
    let trailer = (data.len() as u32).to_le_bytes();
    [&ZSTD_HEADER[..], &header.to_le_bytes()[..3], data, &trailer].concat()
}

fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 3 * 512];
    image[0x1f1] = 2;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.extend_from_slice(payload);
    image
}

/// Kernel with up to three segments and a PVH note. Some bytes are changed.
fn elf(cursor: &mut Cursor<'_>) -> Vec<u8> {
    const NOTES: usize = 64 + 4 * 56;
    const CODE: usize = NOTES + 32;
    let odd = |cursor: &mut Cursor<'_>, sane: u64| match cursor.number(1) {
        0..240 => sane,
        other => cursor.pick(&[0, 1, u64::MAX, u64::MAX - 0xfff, 1 << 32, other]),
    };
    let mut image = vec![0x90; CODE + 0x3000];
    image[..64].fill(0);
    image[..6].copy_from_slice(b"\x7fELF\x02\x01");
    image[16] = 2;
    image[18] = 62;
    image[32] = 64;
    image[54] = 56;
    let segment_count = 1 + cursor.number(1) as usize % 3;
    image[56] = segment_count as u8 + 1;
    let mut first = None;
    for nth in 0..segment_count {
        let address = cursor.pick(&ADDRESSES) + 0x1000 * (cursor.number(1) % 4);
        first.get_or_insert(address);
        let len = cursor.pick(&[0, 1, 0x800, 0x1000]);
        let offset = odd(cursor, (CODE + 0x1000 * nth) as u64);
        let (address, len) = (odd(cursor, address), odd(cursor, len));
        let more = cursor.pick(&[0, 0, 0x1000, 0x10_0000]);
        let memory_len = odd(cursor, len.wrapping_add(more));
        header(&mut image, nth, [1, offset, 0, address, len, memory_len, 0]);
    }
    let [offset, len] = [NOTES as u64, 20].map(|sane| odd(cursor, sane));
    header(&mut image, segment_count, [4, offset, 0, 0, len, len, 4]);
    let entry = odd(cursor, first.unwrap_or_default()) as u32;
    for (nth, word) in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), entry].into_iter().enumerate() {
        image[NOTES + 4 * nth..][..4].copy_from_slice(&word.to_le_bytes());
    }
    while !cursor.is_done() {
        let at = cursor.number(2) as usize % image.len();
        image[at] = cursor.number(1) as u8;
    }
    image
}

/// Writes the fields of a program header. The first one contains the type.
fn header(image: &mut [u8], nth: usize, fields: [u64; 7]) {
    for (field, value) in fields.into_iter().enumerate() {
        image[64 + 56 * nth + 8 * field..][..8].copy_from_slice(&value.to_le_bytes());
    }
}
