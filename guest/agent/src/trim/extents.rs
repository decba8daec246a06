//! Extents of a file on its disk.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Number of extents that are read at a time.
const BATCH: usize = 256;

/// `struct fiemap` with space for extents (Linux uapi/linux/fiemap.h).
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; BATCH],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// _IOWR('f', 11, struct fiemap). The encoded size excludes the extents.
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
const FIEMAP_FLAG_SYNC: u32 = 1;
const FIEMAP_EXTENT_LAST: u32 = 1;
const FIEMAP_EXTENT_UNWRITTEN: u32 = 0x800;
const FIEMAP_EXTENT_MERGED: u32 = 0x1000;
/// Flags of extents whose bytes are exactly those of the disk, and of this file alone.
const PLAIN: u32 = FIEMAP_EXTENT_LAST | FIEMAP_EXTENT_UNWRITTEN | FIEMAP_EXTENT_MERGED;

/// _IOW(0xf5, 13, __u32) (Linux uapi/linux/f2fs.h).
const F2FS_IOC_SET_PIN_FILE: libc::Ioctl = 0x4004_f50d_u32 as libc::Ioctl;

/// `struct fsxattr` (Linux uapi/linux/fs.h).
#[repr(C)]
struct Fsxattr {
    xflags: u32,
    others: [u32; 6],
}

/// _IOR('X', 31, struct fsxattr).
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f_u32 as libc::Ioctl;
const FS_XFLAG_REALTIME: u32 = 1;

/// Returns offset and length on the device of each extent of a file, in ascending order.
pub(super) fn of(file: &File) -> io::Result<Vec<[u64; 2]>> {
    let (mut ranges, mut start) = (Vec::new(), 0);
    loop {
        let batch = read(file, start)?;
        let Some(last) = batch.last() else { break };
        start = last.logical + last.length;
        let plain = batch.iter().filter(|extent| extent.flags & !PLAIN == 0);
        ranges.extend(plain.map(|extent| [extent.physical, extent.length]));
        if last.flags & FIEMAP_EXTENT_LAST != 0 {
            break;
        }
    }
    ranges.sort_unstable();
    Ok(ranges)
}

/// Returns the extents of a file from the offset `start`, up to a number.
#[expect(unsafe_code, reason = "rustix has no FIEMAP")]
fn read(file: &File, start: u64) -> io::Result<Vec<FiemapExtent>> {
    // SAFETY: the structure contains only numbers, for which zero is valid.
    let mut map: Box<Fiemap> = Box::new(unsafe { std::mem::zeroed() });
    (map.start, map.length, map.flags) = (start, u64::MAX - start, FIEMAP_FLAG_SYNC);
    map.extent_count = BATCH as u32;
    // SAFETY: the kernel fills the structure, which has space for `extent_count` extents.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut *map) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(map.extents[..map.mapped_extents as usize].to_vec())
}

/// Makes F2FS allocate blocks when the file gets its size, and never move them.
#[expect(unsafe_code, reason = "rustix has no requests of F2FS")]
pub(super) fn pin(file: &File) -> io::Result<()> {
    let on: u32 = 1;
    // SAFETY: the kernel reads one number.
    match unsafe { libc::ioctl(file.as_raw_fd(), F2FS_IOC_SET_PIN_FILE, &raw const on) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns true if XFS stores the data of a file on its realtime device. The file inherits this
/// from its folder (xfs_inode_inherit_flags in Linux fs/xfs).
#[expect(unsafe_code, reason = "rustix has no attributes of XFS")]
pub(super) fn is_realtime(file: &File) -> io::Result<bool> {
    let mut attributes = Fsxattr { xflags: 0, others: [0; 6] };
    // SAFETY: the kernel fills the structure.
    match unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) } {
        0.. => Ok(attributes.xflags & FS_XFLAG_REALTIME != 0),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn ordinary_file_is_not_on_a_realtime_device() {
        // The number of the request contains the size of the structure.
        assert_eq!((FS_IOC_FSGETXATTR >> 16 & 0x3fff) as usize, size_of::<Fsxattr>());
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        match is_realtime(&file) {
            Err(error) => {
                let code = error.raw_os_error();
                assert!([Some(libc::ENOTTY), Some(libc::EOPNOTSUPP)].contains(&code), "{error}");
            }
            Ok(is_realtime) => assert!(!is_realtime),
        }
    }

    #[test]
    fn extents_cover_a_file_that_has_blocks() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        assert_eq!(of(&file).unwrap(), [] as [[u64; 2]; 0]);
        file.write_all(&[7; 1 << 20]).unwrap();
        let ranges = match of(&file) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return,
            ranges => ranges.unwrap(),
        };
        assert_eq!(ranges.iter().map(|[_, bytes]| bytes).sum::<u64>(), 1 << 20, "{ranges:?}");
        assert!(ranges.is_sorted());
    }
}
