//! What is in a file or on a device that is no pool, and on a device before a pool is made there.
//!
//! Not every format is known: any byte at the start or the end of the device that is not zero counts as somebody's, and
//! the well-known formats are named.

use std::ops::Range;

use crate::media::{Media, MediaError};

/// How much is looked at, at either end: the common formats have something there.
const LOOK_BYTES: u64 = 1 << 20;

/// Bytes at a fixed place by which a format is known.
struct Signature {
    offset: usize,
    bytes: &'static [u8],
    name: &'static str,
}

/// From the formats' own descriptions; those that lie inside others come first.
const SIGNATURES: &[Signature] = &[
    Signature { offset: 0, bytes: b"XFSB", name: "an XFS file system" },
    Signature { offset: 0x438, bytes: b"\x53\xef", name: "an ext2, ext3 or ext4 file system" },
    Signature { offset: 0x10040, bytes: b"_BHRfS_M", name: "a Btrfs file system" },
    Signature { offset: 0x400, bytes: b"\x10\x20\xf5\xf2", name: "an F2FS file system" },
    Signature { offset: 0xff6, bytes: b"SWAPSPACE2", name: "swap space" },
    Signature { offset: 0, bytes: b"LUKS\xba\xbe", name: "a LUKS volume" },
    Signature { offset: 0x200, bytes: b"LABELONE", name: "an LVM physical volume" },
    Signature { offset: 0x1000, bytes: b"\xfc\x4e\x2b\xa9", name: "a member of a Linux RAID" },
    Signature { offset: 0x1000, bytes: b"NVDIMM_PFN_INFO\0", name: "an fsdax namespace" },
    Signature { offset: 0x1000, bytes: b"NVDIMM_DAX_INFO\0", name: "a devdax namespace" },
    Signature { offset: 0x1000, bytes: b"BTT_ARENA_INFO\0\0", name: "a BTT" },
    Signature { offset: 0x200, bytes: b"EFI PART", name: "a GPT partition table" },
    Signature { offset: 0x1000, bytes: b"EFI PART", name: "a GPT partition table" },
    Signature { offset: 0x1fe, bytes: b"\x55\xaa", name: "a partition table or boot sector" },
];

/// What the device seems to hold; `None` if both of its ends are zero.
pub(super) fn found_on(device: &dyn Media) -> Result<Option<String>, MediaError> {
    found_in(device, 0..device.len_bytes())
}

/// The same of a part of it.
pub(super) fn found_in(device: &dyn Media, range: Range<u64>) -> Result<Option<String>, MediaError> {
    let look_bytes = LOOK_BYTES.min(range.end - range.start);
    let mut bytes = vec![0; look_bytes as usize];
    device.read(range.start, &mut bytes)?;
    if let Some(signature) = SIGNATURES.iter().find(|signature| signature.is_in(&bytes)) {
        return Ok(Some(format!("it looks like {}", signature.name)));
    }
    for start in [range.start, range.end - look_bytes] {
        device.read(start, &mut bytes)?;
        if let Some(at) = bytes.iter().position(|byte| *byte != 0) {
            return Ok(Some(format!("there is data at byte {}", start + at as u64)));
        }
    }
    Ok(None)
}

/// What a file or device seems to be, by its first bytes, which are no superblock.
pub(super) fn seems_to_be(first: &[u8], len_bytes: u64) -> String {
    if len_bytes < first.len() as u64 {
        return format!("it has {len_bytes} bytes");
    }
    match SIGNATURES.iter().find(|signature| signature.is_in(first)) {
        Some(signature) => format!("it looks like {}", signature.name),
        None if first.iter().all(|byte| *byte == 0) => "it starts with zeros".to_owned(),
        None => "it does not start like one".to_owned(),
    }
}

impl Signature {
    fn is_in(&self, bytes: &[u8]) -> bool {
        bytes.get(self.offset..self.offset + self.bytes.len()) == Some(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CHUNK_BYTES;
    use crate::media::MemoryMedia;

    fn found(offset_bytes: u64, bytes: &[u8]) -> Option<String> {
        let device = MemoryMedia::new(4 * CHUNK_BYTES);
        device.store(offset_bytes, bytes).unwrap();
        found_on(&device).unwrap()
    }

    #[test]
    fn known_formats_are_named() {
        for signature in SIGNATURES {
            let text = found(signature.offset as u64, signature.bytes).unwrap();
            assert!(text.ends_with(signature.name), "{text}");
        }
    }

    #[test]
    fn any_byte_at_either_end_counts_and_zeros_do_not() {
        assert_eq!(found(0, &[0]), None);
        assert_eq!(found(12345, &[1]).unwrap(), "there is data at byte 12345");
        let last = 4 * CHUNK_BYTES - 1;
        assert_eq!(found(last, &[1]).unwrap(), format!("there is data at byte {last}"));
        assert_eq!(found(2 * CHUNK_BYTES, &[1]), None, "the middle is not looked at");
        let device = MemoryMedia::new(4 * CHUNK_BYTES);
        device.store(CHUNK_BYTES - 1, &[1]).unwrap();
        device.store(CHUNK_BYTES + 0x438, b"\x53\xef").unwrap();
        let found = |range| found_in(&device, range).unwrap();
        assert_eq!(
            found(CHUNK_BYTES..4 * CHUNK_BYTES).unwrap(),
            "it looks like an ext2, ext3 or ext4 file system"
        );
        assert_eq!(found(2 * CHUNK_BYTES..4 * CHUNK_BYTES), None);
    }

    #[test]
    fn a_device_that_is_smaller_than_what_is_looked_at_is_no_trouble() {
        let device = MemoryMedia::new(4096);
        assert_eq!(found_on(&device).unwrap(), None);
        device.store(4095, &[1]).unwrap();
        assert!(found_on(&device).unwrap().is_some());
    }
}
