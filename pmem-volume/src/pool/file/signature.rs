//! Detection of existing content: in a file or on a device that is not a pool, and on a device
//! before a pool is created there.
//!
//! Error messages name well-known formats. Before a pool is created, any nonzero byte at the start
//! or the end of the device is treated as data, because not every format is known.

use std::ops::Range;

use super::formats::{self, FORMATS, Format, IMAGES, find_at_start};
use crate::media::{Media, MediaError};

/// Size of the ranges at the start and the end of a device that are searched. Common formats store
/// data there.
const PROBE_BYTES: u64 = 1 << 20;

/// Describes the content of a device. Returns `None` if the ranges at its start and end contain
/// only zeros.
pub(in crate::pool) fn describe_device(device: &dyn Media) -> Result<Option<String>, MediaError> {
    describe_range(device, 0..device.len_bytes())
}

/// Describes the content of a part of a device, like [`describe_device`].
pub(in crate::pool) fn describe_range(
    device: &dyn Media,
    range: Range<u64>,
) -> Result<Option<String>, MediaError> {
    let probe_bytes = PROBE_BYTES.min(range.end - range.start);
    let mut bytes = vec![0; probe_bytes as usize];
    let len_bytes = range.end - range.start;
    let read = |offset: u64, into: &mut [u8]| {
        let is_inside = offset.saturating_add(into.len() as u64) <= len_bytes;
        if is_inside {
            device.read(range.start + offset, into)?;
        }
        Ok(is_inside)
    };
    if let Some(format) = formats::find(FORMATS, Some(len_bytes), read)? {
        return Ok(Some(format!("it looks like {}", format.name())));
    }
    for start in [range.start, range.end - probe_bytes] {
        device.read(start, &mut bytes)?;
        if let Some(at) = bytes.iter().position(|byte| *byte != 0) {
            return Ok(Some(format!("it has data at byte {}", start + at as u64)));
        }
    }
    Ok(None)
}

/// Returns the format of the disk image that begins with `head`, or `None` for a raw image.
pub fn image_format(head: &[u8]) -> Option<&'static str> {
    find_at_start(IMAGES, head).map(Format::name)
}

/// Describes a file or device based on its first bytes, which are not a pool's superblock.
pub(in crate::pool) fn describe_head(first: &[u8], len_bytes: u64) -> String {
    if len_bytes < first.len() as u64 {
        return format!("it has {len_bytes} bytes");
    }
    match find_at_start(FORMATS, first) {
        Some(format) => format!("it looks like {}", format.name()),
        None if first.iter().all(|byte| *byte == 0) => "it starts with zeros".to_owned(),
        None => "it has no superblock".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CHUNK_BYTES;
    use crate::media::MemoryMedia;
    use crate::pool::file::formats::SAMPLE_BYTES;

    fn found(offset_bytes: u64, bytes: &[u8]) -> Option<String> {
        let device = MemoryMedia::new(4 * CHUNK_BYTES);
        device.store(offset_bytes, bytes).unwrap();
        describe_device(&device).unwrap()
    }

    #[test]
    fn known_formats_are_named() {
        for format in FORMATS {
            for sample in format.samples(SAMPLE_BYTES) {
                let device = MemoryMedia::new(SAMPLE_BYTES);
                for (offset, bytes) in &sample {
                    device.store(*offset, bytes).unwrap();
                }
                let text = describe_device(&device).unwrap().unwrap();
                assert_eq!(text, format!("it looks like {}", format.name()), "{sample:x?}");
            }
        }
    }

    #[test]
    fn nonzero_byte_at_either_end_is_content() {
        assert_eq!(found(0, &[0]), None);
        assert_eq!(found(12345, &[1]).unwrap(), "it has data at byte 12345");
        let last = 4 * CHUNK_BYTES - 1;
        assert_eq!(found(last, &[1]).unwrap(), format!("it has data at byte {last}"));
        assert_eq!(found(2 * CHUNK_BYTES, &[1]), None, "the middle is not looked at");
        let device = MemoryMedia::new(4 * CHUNK_BYTES);
        device.store(CHUNK_BYTES - 1, &[1]).unwrap();
        device.store(CHUNK_BYTES + 0x438, b"\x53\xef").unwrap();
        let found = |range| describe_range(&device, range).unwrap();
        assert_eq!(
            found(CHUNK_BYTES..4 * CHUNK_BYTES).unwrap(),
            "it looks like an ext2, ext3 or ext4 file system"
        );
        assert_eq!(found(2 * CHUNK_BYTES..4 * CHUNK_BYTES), None);
    }

    #[test]
    fn device_smaller_than_the_probed_range_is_accepted() {
        let device = MemoryMedia::new(4096);
        assert_eq!(describe_device(&device).unwrap(), None);
        device.store(4095, &[1]).unwrap();
        assert!(describe_device(&device).unwrap().is_some());
    }
}
