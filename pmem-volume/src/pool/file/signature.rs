//! Detection of existing content: in a file or on a device that is not a pool, and on a device
//! before a pool is created there.
//!
//! Errors name well-known formats. Before a pool is created, any nonzero byte at the start or the
//! end of the device counts as data, because not every format is known.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::formats::{self, FORMATS, Format, IMAGES, find_at_start};
use super::mark::Mark;
use crate::media::{Media, MediaError};
use crate::pool::ownership::{PoolContent, pool_content};

/// Size of the parts at the start and at the end of a device that are searched. Common formats have
/// data there.
const LOOK_BYTES: u64 = 1 << 20;

/// Describes the content of a device. `None` if the parts at its start and end are zeros.
pub(in crate::pool) fn found_on(device: &dyn Media) -> Result<Option<String>, MediaError> {
    found_in(device, 0..device.len_bytes())
}

/// Describes the content of a part of a device, like [`found_on`].
pub(in crate::pool) fn found_in(
    device: &dyn Media,
    range: Range<u64>,
) -> Result<Option<String>, MediaError> {
    let look_bytes = LOOK_BYTES.min(range.end - range.start);
    let mut bytes = vec![0; look_bytes as usize];
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
    for start in [range.start, range.end - look_bytes] {
        device.read(start, &mut bytes)?;
        if let Some(at) = bytes.iter().position(|byte| *byte != 0) {
            return Ok(Some(format!("there is data at byte {}", start + at as u64)));
        }
    }
    Ok(None)
}

/// Format of the disk image that begins with `head`. `None` for a raw image.
pub fn image_format(head: &[u8]) -> Option<&'static str> {
    find_at_start(IMAGES, head).map(Format::name)
}

/// Describes the content that would be destroyed if the host used a file as `mark`. `None` for a
/// file that already has this mark, whatever a guest has written to it. The mark of a disk or a
/// pool counts as content, because not every format has a signature here.
pub fn content_lost_to(mark: Mark, file: &File, path: &Path) -> io::Result<Option<&'static str>> {
    let found = Mark::of(file)?;
    if found == Some(mark) {
        return Ok(None);
    }
    if let Some(content) = known_content(file, path)? {
        return Ok(Some(content));
    }
    let is_empty = file.metadata()?.len() == 0;
    Ok(match found {
        Some(Mark::Disk) if !is_empty => Some("the data of a guest's disk"),
        Some(Mark::Pool) if !is_empty => Some("the data of a pool"),
        Some(Mark::Unknown) => Some("data that another release of Foreshore has marked"),
        _ => None,
    })
}

/// Known content of a file: a pool, a file system, a partition table, a BTT or a disk image.
fn known_content(file: &File, path: &Path) -> io::Result<Option<&'static str>> {
    // Opens the file again through /proc, because the path may name another file by now, and `file`
    // may be open for writing only.
    let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let open = if open.exists() { &open } else { path };
    // Bytes that cannot be read may be a pool's.
    if pool_content(file, path) != PoolContent::NoPool {
        return Ok(Some("a pool"));
    }
    let content = File::open(open)?;
    let read = |offset: u64, into: &mut [u8]| match content.read_exact_at(into, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        result => result.map(|()| true),
    };
    let known = formats::find(formats::known(), Some(content.metadata()?.len()), read)?;
    Ok(known.map(Format::name))
}

/// Describes a file or device by its first bytes, which are not the superblock of a pool.
pub(in crate::pool) fn seems_to_be(first: &[u8], len_bytes: u64) -> String {
    if len_bytes < first.len() as u64 {
        return format!("it has {len_bytes} bytes");
    }
    match find_at_start(FORMATS, first) {
        Some(format) => format!("it looks like {}", format.name()),
        None if first.iter().all(|byte| *byte == 0) => "it starts with zeros".to_owned(),
        None => "it does not start like one".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::mark::set_unknown;
    use super::*;
    use crate::CHUNK_BYTES;
    use crate::media::MemoryMedia;

    fn found(offset_bytes: u64, bytes: &[u8]) -> Option<String> {
        let device = MemoryMedia::new(4 * CHUNK_BYTES);
        device.store(offset_bytes, bytes).unwrap();
        found_on(&device).unwrap()
    }

    /// Length of test content. All places of all formats lie in it.
    const SAMPLE_BYTES: u64 = 4 * CHUNK_BYTES;

    #[test]
    fn known_formats_are_named() {
        for format in FORMATS {
            for sample in format.samples(SAMPLE_BYTES) {
                let device = MemoryMedia::new(SAMPLE_BYTES);
                for (offset, bytes) in &sample {
                    device.store(*offset, bytes).unwrap();
                }
                let text = found_on(&device).unwrap().unwrap();
                assert_eq!(text, format!("it looks like {}", format.name()), "{sample:x?}");
            }
        }
    }

    #[test]
    fn known_content_of_files_is_named() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("file");
        let content = |len: u64, parts: &[(u64, &[u8])]| {
            let file = File::create(&path).unwrap();
            file.set_len(len).unwrap();
            for (offset, bytes) in parts {
                file.write_all_at(bytes, *offset).unwrap();
            }
            known_content(&file, &path).unwrap()
        };
        for format in formats::known() {
            // The second length is not a multiple of the sector size.
            for len in [SAMPLE_BYTES, SAMPLE_BYTES + 100] {
                for sample in format.samples(len) {
                    assert_eq!(content(len, &sample), Some(format.name()), "{sample:x?}");
                    if sample.len() > 1 {
                        let text = [(0, &[b'a'; 4096][..]), sample[0]];
                        assert_eq!(content(len, &text), None, "text is taken for {sample:x?}");
                    }
                }
            }
        }
        for text in [&b""[..], b"[    0.000000] Linux version 6.12\n", &[7; 100_000]] {
            assert_eq!(content(0, &[(0, text)]), None);
        }
        assert_eq!(image_format(b"QFI\xfb\0\0\0\x03"), Some("a qcow2 image"));
        assert_eq!(image_format(b"QFI"), None);
        std::fs::remove_file(&path).unwrap();
        drop(crate::Pool::create(&path, 16 << 20, 0).unwrap());
        let file = File::options().append(true).open(&path).unwrap();
        assert_eq!(known_content(&file, &path).unwrap(), Some("a pool"));
        // The start of this device can be read, and nothing more is known of it.
        let null = File::open("/dev/null").unwrap();
        assert_eq!(known_content(&null, Path::new("/dev/null")).unwrap(), Some("a pool"));
    }

    #[test]
    fn marked_files_lose_content_without_a_signature() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("file");
        let lost = |mark: Option<Mark>, bytes: &[u8]| {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, bytes).unwrap();
            let file = File::options().append(true).open(&path).unwrap();
            mark.map_or(Ok(()), |mark| mark.set(&file)).unwrap();
            content_lost_to(Mark::Output, &file, &path).unwrap()
        };
        for mark in [None, Some(Mark::Output), Some(Mark::Memory)] {
            assert_eq!(lost(mark, &[7; 4096]), None);
        }
        assert_eq!(lost(Some(Mark::Output), b"XFSB"), None);
        assert_eq!(lost(Some(Mark::Memory), b"XFSB"), Some("an XFS file system"));
        assert_eq!(lost(Some(Mark::Disk), b"XFSB"), Some("an XFS file system"));
        assert_eq!(lost(Some(Mark::Disk), &[0; 4096]), Some("the data of a guest's disk"));
        assert_eq!(lost(Some(Mark::Pool), &[7; 4096]), Some("the data of a pool"));
        for mark in [Mark::Disk, Mark::Pool] {
            assert_eq!(lost(Some(mark), b""), None, "an emptied file");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        set_unknown(file.as_file(), b"volume");
        for mark in [Mark::Output, Mark::Memory] {
            let lost = content_lost_to(mark, file.as_file(), file.path()).unwrap();
            assert_eq!(lost, Some("data that another release of Foreshore has marked"));
        }
    }

    #[test]
    fn file_with_an_unreadable_mark_is_not_lost() {
        // The kernel reads no attributes of descriptors of O_PATH. The content is read by the path.
        use std::os::unix::fs::OpenOptionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 4096]).unwrap();
        Mark::Disk.set(file.as_file()).unwrap();
        let path = file.path();
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
        assert_eq!(known_content(&file, path).unwrap(), None);
        let error = content_lost_to(Mark::Output, &file, path).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
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
    fn device_smaller_than_the_probed_range_is_accepted() {
        let device = MemoryMedia::new(4096);
        assert_eq!(found_on(&device).unwrap(), None);
        device.store(4095, &[1]).unwrap();
        assert!(found_on(&device).unwrap().is_some());
    }
}
