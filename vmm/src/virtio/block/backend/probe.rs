//! What kind of image a file is, by the bytes that its format begins with.
//!
//! A disk image in a format of its own, served as it is, would look damaged to the guest, and the first repair would
//! damage it. So these are refused by name. A guest can write such bytes to its own disk, of course: `image_type=raw`
//! says that the file is a raw image whatever it begins with.

/// Bytes of the start that are looked at.
pub const HEAD_BYTES: usize = 512;

/// Magic bytes at an offset, and whose they are.
const FORMATS: &[(usize, &[u8], &str)] = &[
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "VDI"),
];

/// A fixed VHD is a raw image with this at the beginning of its last 512 bytes.
const VHD_FOOTER: &[u8] = b"conectix";

/// The format of a file that begins with `head` and whose last 512 bytes are `tail`; `None`: a raw image, as far as one
/// can see.
pub fn foreign_format(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    let begins = |&&(at, magic, _): &&(usize, &[u8], &str)| {
        head.get(at..).is_some_and(|bytes| bytes.starts_with(magic))
    };
    let by_head = FORMATS.iter().find(begins).map(|(_, _, name)| *name);
    by_head.or_else(|| tail.starts_with(VHD_FOOTER).then_some("VHD"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_magic_bytes() {
        for (at, magic, name) in FORMATS {
            let mut head = vec![0; HEAD_BYTES];
            head[*at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(foreign_format(&head, &[0; 512]), Some(*name));
            head[*at] ^= 1;
            assert_eq!(foreign_format(&head, &[0; 512]), None, "{name}");
        }
        let mut tail = [0; 512];
        tail[..8].copy_from_slice(VHD_FOOTER);
        assert_eq!(foreign_format(&[0; 512], &tail), Some("VHD"));
        assert_eq!(foreign_format(&[], &[]), None);
    }
}
