//! Files that an attacker opens through io_uring. Filters do not apply to its operations.

use std::fs;

use anyhow::{Context, Result};

use crate::attempts::Targets;
use crate::system_calls::{Offsets, Parameters, create_ring};
use crate::traced_thread::TracedThread;

// From linux/io_uring.h.
const OPENAT: u8 = 18;
const WAIT_FOR_COMPLETION: u64 = 1;
const SUBMISSION_RING: u64 = 0;
const COMPLETION_RING: u64 = 0x800_0000;
const ENTRIES: u64 = 0x1000_0000;
const ENTRY_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;

/// Number of entries of a new ring.
const FEW: u32 = 4;
const PAGE: u64 = 4096;
/// File that all threads may read.
const READABLE: &str = "/proc/version";

/// Ring that a process has mapped.
struct Ring {
    fd: u64,
    submissions: u64,
    completions: u64,
    entries: u64,
    offsets: [Offsets; 2],
}

/// Creates a ring, and opens a file through it.
pub(crate) fn open_through_new_ring(thread: &mut TracedThread, targets: &Targets) -> Result<i64> {
    let parameters = thread.place(&[0; size_of::<Parameters>()])?;
    let fd = thread.call(libc::SYS_io_uring_setup, &[FEW.into(), parameters])?;
    if fd < 0 {
        return Ok(fd);
    }
    let mut map = |offset| -> Result<u64> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let arguments = [0, PAGE, access as u64, flags as u64, fd as u64, offset];
        let address = thread.call(libc::SYS_mmap, &arguments)?;
        u64::try_from(address).context("cannot map the ring")
    };
    let [submissions, completions, entries] =
        [map(SUBMISSION_RING)?, map(COMPLETION_RING)?, map(ENTRIES)?];
    let offsets = offsets(FEW)?;
    Ring { fd: fd as u64, submissions, completions, entries, offsets }.open(thread, targets.secret)
}

/// Opens a file through the ring of a disk. Neither Landlock nor permissions protect the file. The
/// process must have only this ring, and the thread must be its owner.
pub fn open_through_ring_of_disk(thread: &mut TracedThread) -> Result<i64> {
    Ring::of_process(thread.pid())?.open(thread, READABLE)
}

impl Ring {
    fn of_process(pid: u32) -> Result<Self> {
        let fd = fs::read_dir(format!("/proc/{pid}/fd"))?.find_map(|entry| {
            let path = entry.ok()?.path();
            let is_ring = fs::read_link(&path).ok()?.to_str()? == "anon_inode:[io_uring]";
            is_ring.then(|| path.file_name()?.to_str()?.parse::<u64>().ok())?
        });
        let fd = fd.context("the VMM has no ring")?;
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))?;
        let mask = info.lines().find_map(|line| line.strip_prefix("SqMask:\t0x"));
        let mask = u32::from_str_radix(mask.context("no SqMask")?, 16)?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let mapped = |offset| {
            let ring = maps.lines().filter(|line| line.ends_with("anon_inode:[io_uring]"));
            let mut fields = ring.map(|line| line.split(' '));
            let start = fields.find_map(|mut fields| {
                let range = fields.next()?;
                let of = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
                (of == offset).then(|| range.split_once('-'))?
            });
            let (start, _) = start.context("the ring is not mapped")?;
            Ok::<_, anyhow::Error>(u64::from_str_radix(start, 16)?)
        };
        // The kernel maps both rings at the offset of the submission ring
        // (IORING_FEAT_SINGLE_MMAP).
        let [rings, entries] = [mapped(SUBMISSION_RING)?, mapped(ENTRIES)?];
        let offsets = offsets(mask + 1)?;
        Ok(Self { fd, submissions: rings, completions: rings, entries, offsets })
    }

    /// Submits the opening of a file, and returns its result. The ring must be idle.
    fn open(&self, thread: &mut TracedThread, path: &str) -> Result<i64> {
        let [submission_ring, completion_ring] = self.offsets;
        let word = |ring, offset: u32| ring + u64::from(offset);
        let read = |thread: &TracedThread, address| -> Result<u32> {
            Ok(u32::from_ne_bytes(thread.read(address)?))
        };
        let tail_address = word(self.submissions, submission_ring.tail);
        let tail = read(thread, tail_address)?;
        let mask = read(thread, word(self.submissions, submission_ring.mask))?;
        let index = tail & mask;
        let mut entry = [0; ENTRY_BYTES as usize];
        entry[0] = OPENAT;
        entry[4..8].copy_from_slice(&libc::AT_FDCWD.to_ne_bytes());
        entry[16..24].copy_from_slice(&thread.place_text(path)?.to_ne_bytes());
        thread.write(self.entries + u64::from(index) * ENTRY_BYTES, &entry)?;
        let slot = word(self.submissions, submission_ring.array_or_flags) + u64::from(index) * 4;
        thread.write(slot, &index.to_ne_bytes())?;
        thread.write(tail_address, &tail.wrapping_add(1).to_ne_bytes())?;
        let submitted =
            thread.call(libc::SYS_io_uring_enter, &[self.fd, 1, 1, WAIT_FOR_COMPLETION, 0, 0])?;
        if submitted < 0 {
            // The kernel has not consumed the entry. The ring's owner must not submit it later.
            thread.write(tail_address, &tail.to_ne_bytes())?;
            return Ok(submitted);
        }
        let head_address = word(self.completions, completion_ring.head);
        let head = read(thread, head_address)?;
        let mask = read(thread, word(self.completions, completion_ring.mask))?;
        let completions = word(self.completions, completion_ring.dropped_or_completions);
        let completion = completions + u64::from(head & mask) * COMPLETION_BYTES;
        let result = i32::from_ne_bytes(thread.read(completion + 8)?);
        thread.write(head_address, &head.wrapping_add(1).to_ne_bytes())?;
        Ok(result.into())
    }
}

/// Returns the offsets of a ring with `entries` entries, which depend on the kernel.
fn offsets(entries: u32) -> Result<[Offsets; 2]> {
    let parameters = create_ring(entries).context("this test cannot create a ring")?;
    Ok([parameters.submission_ring, parameters.completion_ring])
}
