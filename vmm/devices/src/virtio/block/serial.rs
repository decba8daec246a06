//! Serial numbers, which let a guest identify disks (`/dev/disk/by-id/virtio-…`). virtio-blk limits
//! them to 20 bytes (virtio 1.3, 5.2.6).

use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

const MAX_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;
/// Length of the suffix: `-` and a CRC-32 in hexadecimal.
const TAIL_BYTES: usize = 9;

/// Returns the serial number of a disk with this name. A name that is too long is cut, and a
/// checksum of the whole name is appended. Names with the same beginning therefore get different
/// serial numbers.
pub fn serial_number(name: &str) -> String {
    if name.len() <= MAX_BYTES {
        return name.to_owned();
    }
    let mut end = MAX_BYTES - TAIL_BYTES;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}-{:08x}", &name[..end], crc32fast::hash(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_with_the_same_beginning_differ() {
        assert_eq!(serial_number("data"), "data");
        assert_eq!(serial_number("12345678901234567890"), "12345678901234567890");
        let (a, b) =
            (serial_number("production-database-a"), serial_number("production-database-b"));
        assert_eq!((a.len(), a.as_str()), (20, "production--79cd333d"));
        assert!(b.starts_with("production--") && a != b, "{b}");
        let umlauts = serial_number(&"ä".repeat(40));
        assert!(umlauts.len() == 19 && umlauts.starts_with("äääää-"), "{umlauts}");
    }
}
