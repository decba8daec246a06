//! Data and holes of a sparse file.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Returns the first part of a range that contains data, or `None` if the range is a hole. Blocks
/// that were allocated but never written are holes if the file system reports them as such.
pub(super) fn next_data(file: &File, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let Some(start) = find(file, SeekFrom::Data(range.start))?.filter(|start| *start < range.end)
    else {
        return Ok(None);
    };
    // The file ends with an implicit hole.
    let end = find(file, SeekFrom::Hole(start))?.unwrap_or(range.end).min(range.end);
    // The data may have been removed in the meantime. In that case, a single byte is reported.
    Ok(Some(start..end.max(start + 1)))
}

/// Returns the offset of the next data or hole, or `None` if the rest of the file has none. The
/// call moves the file's position, which this crate does not use.
fn find(file: &File, from: SeekFrom) -> io::Result<Option<u64>> {
    match seek(file, from) {
        Ok(offset) => Ok(Some(offset)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_is_found_between_holes() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 30).unwrap();
        assert_eq!(next_data(&file, 0..1 << 30).unwrap(), None);
        file.write_all_at(&[1; 8192], 1 << 20).unwrap();
        let data = next_data(&file, 0..1 << 30).unwrap().unwrap();
        assert!(
            data.start <= 1 << 20 && data.end >= (1 << 20) + 8192 && data.end <= 4 << 20,
            "{data:?}"
        );
        assert_eq!(
            next_data(&file, (1 << 20) + 5..(1 << 20) + 9).unwrap(),
            Some((1 << 20) + 5..(1 << 20) + 9)
        );
        assert_eq!(next_data(&file, 4 << 20..1 << 30).unwrap(), None);
        assert_eq!(next_data(&file, 0..4096).unwrap(), None);
        assert_eq!(next_data(&file, 2 << 30..3 << 30).unwrap(), None, "behind the end");
    }
}
