//! Host resources of a VMM, except guest memory. They should not grow when devices or memory are
//! added and removed.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use anyhow::{Result, ensure};

use crate::user::need_proc;

/// Maximum size of the VMM's own mappings. Mappings of guest memory are larger.
const MAX_OWN_MAPPING_BYTES: u64 = 64 << 20;
/// Allowed increase in the number of mappings. An allocator may map new heaps.
const MAX_ADDED_MAPPINGS: usize = 4;
/// Allowed increase in the size of a heap.
const MAX_ADDED_OWN_BYTES: u64 = 4 << 20;

#[derive(Clone)]
pub struct ResourceCounts {
    /// Numbers of open descriptors, by kind or path.
    pub files: BTreeMap<String, usize>,
    pub threads: usize,
    /// Number of mappings, including guest memory.
    pub mappings: usize,
    /// Resident size of all mappings that are too small to be guest memory.
    pub own_bytes: u64,
}

impl ResourceCounts {
    pub fn of(pid: u32) -> Result<Self> {
        let count = |folder: &str| {
            Ok::<_, anyhow::Error>(fs::read_dir(format!("/proc/{pid}/{folder}"))?.count())
        };
        let smaps = fs::read_to_string(need_proc(pid, "smaps")?)?;
        let (mut mappings, mut own_bytes, mut size) = (0, 0, 0);
        for line in smaps.lines() {
            if let Some(bytes) = bytes_of(line, "Size:") {
                (mappings, size) = (mappings + 1, bytes);
            } else if let Some(bytes) = bytes_of(line, "Rss:")
                && size < MAX_OWN_MAPPING_BYTES
            {
                own_bytes += bytes;
            }
        }
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(need_proc(pid, "fd")?)? {
            // A descriptor that has been closed in the meantime is not counted.
            if let Ok(target) = fs::read_link(entry?.path()) {
                *files.entry(kind_of(&target.to_string_lossy())).or_default() += 1;
            }
        }
        Ok(Self { files, threads: count("task")?, mappings, own_bytes })
    }

    fn file_count(&self) -> usize {
        self.files.values().sum()
    }

    /// Checks that there are no more descriptors, threads and mappings than before. Callers repeat
    /// this check, because an ended thread remains visible for a moment, and connections take even
    /// longer to end.
    pub fn has_no_more_than(&self, before: &Self) -> bool {
        self.file_count() <= before.file_count()
            && self.threads <= before.threads
            && self.mappings <= before.mappings + MAX_ADDED_MAPPINGS
    }

    /// Checks that memory has grown at most by the amount that an allocator may keep.
    pub fn check_memory(&self, before: &Self) -> Result<()> {
        ensure!(
            self.own_bytes <= before.own_bytes + MAX_ADDED_OWN_BYTES,
            "{self:?}, before: {before:?}"
        );
        Ok(())
    }
}

/// Formats as `48 files, 9 threads, 60 mappings, 7220 KiB of its own: 12 anon_inode:[eventfd],
/// ...`.
impl fmt::Debug for ResourceCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (files, own_kib) = (self.file_count(), self.own_bytes >> 10);
        let (threads, mappings) = (self.threads, self.mappings);
        let kinds: Vec<_> =
            self.files.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        write!(
            f,
            "{files} files, {threads} threads, {mappings} mappings, {own_kib} KiB of its own: {}",
            kinds.join(", ")
        )
    }
}

/// Returns the kind of a descriptor, for example socket for `socket:[4711]`.
fn kind_of(target: &str) -> String {
    target
        .split_once(":[")
        .filter(|(kind, _)| !kind.contains('/') && *kind != "anon_inode")
        .map_or(target, |(kind, _)| kind)
        .to_owned()
}

fn bytes_of(line: &str, key: &str) -> Option<u64> {
    let kib: u64 = line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}
