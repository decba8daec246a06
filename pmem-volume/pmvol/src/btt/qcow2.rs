//! Header of a qcow2 image (QEMU docs/interop/qcow2.txt), and the checks before `qemu-img` opens
//! the image.
//!
//! A guest can write anything to sector 0 of its disk, including a qcow2 header. Therefore, the
//! format is never guessed, and an image that names other files is refused. Otherwise, qemu-img
//! would read these files with the rights of the user and pass their content to the guest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

/// First bytes of an image.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Size of a version 2 header, and size of the part of a longer header that is read here.
const V2_BYTES: usize = 72;
const READ_BYTES: usize = 80;
/// Incompatible feature: the data is in a separate file.
const EXTERNAL_DATA: u64 = 1 << 2;

/// Reason why an image is not unpacked.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Qcow2Error {
    #[error("not a qcow2 image: its first bytes differ from the magic")]
    NoMagic,
    #[error("not a qcow2 image: it has {length_bytes} bytes, fewer than a header")]
    Short { length_bytes: usize },
    #[error("qcow2 version {0} is not supported; supported versions are 2 and 3")]
    Version(u32),
    #[error("the image has a backing file, {OTHER_FILES_REFUSED}")]
    BackingFile,
    #[error("the image has an external data file, {OTHER_FILES_REFUSED}")]
    ExternalData,
}

const OTHER_FILES_REFUSED: &str = "which is not read, because the creator of the image may have named any file of this host. If you trust it, \
                       make one image of both (`qemu-img convert -f qcow2 -O raw IMAGE NEW`) and import that";

/// Returns true if the file begins with the magic bytes of qcow2.
pub(super) fn is_qcow2(file: &File) -> io::Result<bool> {
    Ok(read_header(file)?.starts_with(&MAGIC))
}

/// Checks that the image refers to no other file. Returns its unpacked size.
pub(super) fn check(file: &File) -> anyhow::Result<u64> {
    Ok(parse(&read_header(file)?)?)
}

fn read_header(file: &File) -> io::Result<Vec<u8>> {
    let mut header = vec![0; READ_BYTES];
    let mut length = 0;
    while length < READ_BYTES {
        match file.read_at(&mut header[length..], length as u64) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    header.truncate(length);
    Ok(header)
}

fn parse(header: &[u8]) -> Result<u64, Qcow2Error> {
    if !header.starts_with(&MAGIC) {
        return Err(Qcow2Error::NoMagic);
    }
    let short = Qcow2Error::Short { length_bytes: header.len() };
    if header.len() < V2_BYTES {
        return Err(short);
    }
    let number =
        |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    // Version 2 has no features.
    let features = match u32::from_be_bytes(header[4..8].try_into().expect("four bytes")) {
        2 => 0,
        3 if header.len() < READ_BYTES => return Err(short),
        3 => number(72),
        version => return Err(Qcow2Error::Version(version)),
    };
    if number(8) != 0 {
        return Err(Qcow2Error::BackingFile);
    }
    if features & EXTERNAL_DATA != 0 {
        return Err(Qcow2Error::ExternalData);
    }
    Ok(number(24))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the header of a 5 MiB image in a single file.
    fn header(version: u8) -> Vec<u8> {
        let mut header = vec![0; READ_BYTES];
        header[..4].copy_from_slice(&MAGIC);
        header[7] = version;
        header[24..32].copy_from_slice(&(5u64 << 20).to_be_bytes());
        header
    }

    #[test]
    fn image_in_a_single_file_is_accepted_with_its_size() {
        assert_eq!(parse(&header(2)[..V2_BYTES]), Ok(5 << 20));
        let mut image = header(3);
        // Sets the dirty, corrupt, compression type and extended L2 bits, which qemu-img checks
        // itself.
        image[79] = 0b1_1011;
        assert_eq!(parse(&image), Ok(5 << 20));
    }

    #[test]
    fn image_that_refers_to_another_file_is_refused() {
        for at in 8..16 {
            for version in [2, 3] {
                let mut image = header(version);
                image[at] = 1;
                assert_eq!(parse(&image), Err(Qcow2Error::BackingFile), "byte {at}");
            }
        }
        let mut image = header(3);
        image[79] = 0b100;
        assert_eq!(parse(&image), Err(Qcow2Error::ExternalData));
        // In version 2, these bytes are not part of the header.
        image[7] = 2;
        assert_eq!(parse(&image), Ok(5 << 20));
    }

    #[test]
    fn invalid_headers_are_reported() {
        assert_eq!(parse(b""), Err(Qcow2Error::NoMagic));
        assert_eq!(parse(&header(3)[1..]), Err(Qcow2Error::NoMagic));
        for (version, length) in [(2, 4), (2, 71), (3, 79)] {
            let image = &header(version)[..length];
            assert_eq!(parse(image), Err(Qcow2Error::Short { length_bytes: length }));
        }
        for version in [0, 1, 4, 255] {
            assert_eq!(parse(&header(version)), Err(Qcow2Error::Version(u32::from(version))));
        }
    }
}
