//! What a VMM has of its host, guest memory aside: it must not become more by what comes and goes.

use std::fs;

use anyhow::{Result, ensure};

/// Guest memory is mapped in pieces larger than anything else.
const OWN_MAPPING_MAX: u64 = 64 << 20;
/// An allocator's heaps grow by mappings of their own.
const MAPPINGS_MORE: usize = 4;
/// What a heap may have grown by.
const OWN_BYTES_MORE: u64 = 4 << 20;

/// What a process has.
#[derive(Clone, Copy, Debug)]
pub struct Holdings {
    /// Descriptors that are open.
    pub files: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings, of guest memory as well.
    pub mappings: usize,
    /// What is resident of mappings that are too small for guest memory.
    pub own_bytes: u64,
}

impl Holdings {
    /// What it has now.
    pub fn of(pid: u32) -> Result<Self> {
        let count = |what: &str| Ok::<_, anyhow::Error>(fs::read_dir(format!("/proc/{pid}/{what}"))?.count());
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        let (mut mappings, mut own_bytes, mut size) = (0, 0, 0);
        for line in smaps.lines() {
            if let Some(bytes) = bytes_of(line, "Size:") {
                (mappings, size) = (mappings + 1, bytes);
            } else if let Some(bytes) = bytes_of(line, "Rss:")
                && size < OWN_MAPPING_MAX
            {
                own_bytes += bytes;
            }
        }
        Ok(Self { files: count("fd")?, threads: count("task")?, mappings, own_bytes })
    }

    /// No more descriptors, threads and mappings than before. A thread that ends may be seen for a moment longer, and what
    /// serves nobody any more ends later than that.
    pub fn are_those_of(&self, before: &Self) -> bool {
        self.files <= before.files
            && self.threads <= before.threads
            && self.mappings <= before.mappings + MAPPINGS_MORE
    }

    /// Nor is there more memory than an allocator keeps.
    pub fn check_memory(&self, before: &Self) -> Result<()> {
        ensure!(self.own_bytes <= before.own_bytes + OWN_BYTES_MORE, "{self:?}, and before {before:?}");
        Ok(())
    }
}

fn bytes_of(line: &str, key: &str) -> Option<u64> {
    let kib: u64 = line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}
