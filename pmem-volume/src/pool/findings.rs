//! Findings that opening or checking a pool returns.

use std::collections::{BTreeMap, HashMap};
use std::mem::Discriminant;

use serde::Serialize;
use thiserror::Error;

use crate::pool::format::chunk::ChunkId;
use foreshore_types::size::Size;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The finding is expected after a crash. Opening the pool for writing corrects it.
    Note,
    /// The damage does not prevent the use of the pool, for example because a copy exists.
    Degraded,
    /// The damage makes the pool untrustworthy, so it opens only for reading.
    #[serde(rename = "damaged")]
    Fatal,
}

impl Severity {
    /// Name of the severity in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Degraded => "degraded",
            Severity::Fatal => "damaged",
        }
    }
}

/// Defect or unfinished change that a check has found. `copy` is 0 or 1, and `slot` is an index in
/// the volume table.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum Finding {
    #[error("superblock {copy} is damaged; the other one is used")]
    SuperblockCopy { copy: usize },
    #[error(
        "superblock {copy} is older than the other one, because of a crash between their updates"
    )]
    SuperblockStale { copy: usize },
    #[error("growth of the pool to {} did not finish; the next open truncates the file to the pool's size", Size(*to_bytes).rounded())]
    GrowthUnfinished { to_bytes: u64 },
    #[error("copy {copy} of volume record {slot} is damaged; the other one is used")]
    VolumeRecordCopy { slot: u16, copy: usize },
    #[error(
        "copy {copy} of volume record {slot} is older than the other one, because of a crash between their updates"
    )]
    VolumeRecordStale { slot: u16, copy: usize },
    #[error("both copies of volume record {slot} are damaged")]
    VolumeRecordLost { slot: u16 },
    #[error("volume record {slot} is invalid: {reason}")]
    VolumeRecordInvalid { slot: u16, reason: String },
    #[error("two volumes have the name {name:?}")]
    VolumeNameTwice { name: String },
    #[error(
        "volume {name:?} is thin, but the superblock does not require programs to support thin volumes; the next open corrects this"
    )]
    ThinFeatureMissing { name: String },
    #[error("volume {name:?} is part of an unfinished split; the next open completes it")]
    SplitUnfinished { name: String },
    #[error("the owner word of chunk {chunk} is damaged ({word:#018x})")]
    OwnerWord { chunk: ChunkId, word: u64 },
    #[error("the wear count of chunk {chunk} is damaged ({word:#018x}); it restarts at 0")]
    WearWord { chunk: ChunkId, word: u64 },
    /// Number of further findings of one severity that are not listed.
    #[error("{count} more findings of this severity are not listed")]
    Unlisted { severity: Severity, count: u64 },
    #[error("chunk {chunk} belongs to a volume in slot {slot}, but the pool has {slots} slots")]
    SlotOutside { chunk: ChunkId, slot: u16, slots: u32 },
    #[error("chunk {chunk} holds the pool's own data but is marked as {marked}")]
    MetadataTaken { chunk: ChunkId, marked: String },
    #[error("chunks {first} and {second} are both chunk {index} of volume {name:?}")]
    IndexTwice { name: String, index: u32, first: ChunkId, second: ChunkId },
    /// Chunks of a volume are missing. A crash cannot cause this, so their owner words must have
    /// been damaged. A wrong owner word such as *free* may assign a chunk of the volume to another
    /// owner.
    #[error(
        "volume {name:?} lacks {missing} of its {chunks} chunks, the first at index {first_index}"
    )]
    IndexMissing { name: String, missing: u32, chunks: u32, first_index: u32 },
    #[error(
        "free chunk {chunk} holds data of an earlier owner, which the next owner could read; a repair erases it, or puts it out of use if a thin volume may lack it"
    )]
    NotErased { chunk: ChunkId },
    /// The file has fewer blocks than its size requires. Opening the pool for writing allocates the
    /// missing blocks, or fails.
    #[error(
        "the file lacks blocks: {} of it are holes, and {} are shared with a clone, as after a sparse copy, `fallocate --dig-holes` or `cp --reflink`; the next open for writing allocates new blocks if the file system has space",
        Size(*hole_bytes).rounded(), Size(*shared_bytes).rounded()
    )]
    BlocksLost { hole_bytes: u64, shared_bytes: u64 },
    #[error(
        "the file system is {file_system}, which is copy-on-write: when it is full, a store raises SIGBUS and stops a guest's vCPU; create the pool in a folder with `chattr +C` (btrfs), or on ext4 or XFS"
    )]
    CopyOnWrite { file_system: &'static str },
    #[error("the log holds a committed transaction of {entries} word(s); the next open redoes it")]
    LogPending { entries: usize },
    #[error("the log is damaged: {reason}")]
    LogDamaged { reason: &'static str },
    #[error("{chunks} chunk(s) are still marked as lent memory; they are erased before reuse")]
    StillLent { chunks: u32 },
    #[error("{chunks} chunk(s) wait to be erased, which happens before reuse")]
    Unscrubbed { chunks: u32 },
    #[error("{chunks} chunk(s) remain from an unfinished operation; they are erased before reuse")]
    Leftover { chunks: u32 },
}

impl Finding {
    /// Returns true if the finding's count is zero.
    pub(in crate::pool) fn has_zero_count(&self) -> bool {
        matches!(
            self,
            Finding::StillLent { chunks: 0 }
                | Finding::Unscrubbed { chunks: 0 }
                | Finding::Leftover { chunks: 0 }
        )
    }

    /// Number of defects.
    pub(in crate::pool) fn count(&self) -> usize {
        match self {
            Finding::Unlisted { count, .. } => usize::try_from(*count).unwrap_or(usize::MAX),
            _ => 1,
        }
    }

    /// Severity of the finding.
    pub fn severity(&self) -> Severity {
        match self {
            Finding::Unlisted { severity, .. } => *severity,
            Finding::SuperblockStale { .. }
            | Finding::GrowthUnfinished { .. }
            | Finding::VolumeRecordStale { .. }
            | Finding::SplitUnfinished { .. }
            | Finding::CopyOnWrite { .. }
            | Finding::LogPending { .. }
            | Finding::StillLent { .. }
            | Finding::Unscrubbed { .. }
            | Finding::Leftover { .. } => Severity::Note,
            Finding::SuperblockCopy { .. }
            | Finding::VolumeRecordCopy { .. }
            | Finding::ThinFeatureMissing { .. }
            | Finding::WearWord { .. }
            | Finding::BlocksLost { .. }
            | Finding::NotErased { .. } => Severity::Degraded,
            Finding::VolumeRecordLost { .. }
            | Finding::VolumeRecordInvalid { .. }
            | Finding::VolumeNameTwice { .. }
            | Finding::OwnerWord { .. }
            | Finding::SlotOutside { .. }
            | Finding::MetadataTaken { .. }
            | Finding::IndexTwice { .. }
            | Finding::IndexMissing { .. }
            | Finding::LogDamaged { .. } => Severity::Fatal,
        }
    }
}

/// Maximum number of listed findings of one kind. Further findings are only counted.
const MAX_PER_KIND: u32 = 100;

/// Findings in the order of detection. The list is bounded, so that a damaged or crafted pool
/// cannot exhaust memory.
#[derive(Debug, Default)]
pub(in crate::pool) struct Findings {
    list: Vec<Finding>,
    count_of_kind: HashMap<Discriminant<Finding>, u32>,
    more: BTreeMap<Severity, u64>,
}

impl Findings {
    pub(in crate::pool) fn add(&mut self, finding: Finding) {
        let count_of_kind = self.count_of_kind.entry(std::mem::discriminant(&finding)).or_default();
        if *count_of_kind < MAX_PER_KIND {
            *count_of_kind += 1;
            self.list.push(finding);
        } else {
            *self.more.entry(finding.severity()).or_default() += 1;
        }
    }

    /// Returns the listed findings, followed by the counts of unlisted ones.
    pub(in crate::pool) fn into_list(self) -> Vec<Finding> {
        let more =
            self.more.into_iter().map(|(severity, count)| Finding::Unlisted { severity, count });
        self.list.into_iter().chain(more).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_beyond_the_limit_are_only_counted() {
        let mut findings = Findings::default();
        for number in 0..250 {
            let chunk = ChunkId(number);
            findings.add(Finding::OwnerWord { chunk, word: 0 });
            findings.add(Finding::WearWord { chunk, word: 0 });
            findings.add(Finding::SlotOutside { chunk, slot: 9, slots: 4 });
        }
        findings.add(Finding::LogDamaged { reason: "of a test" });
        let list = findings.into_list();
        assert_eq!(list.len(), 3 * 100 + 1 + 2);
        let count = |severity| {
            let of_severity = list.iter().filter(|finding| finding.severity() == severity);
            of_severity.map(Finding::count).sum::<usize>()
        };
        assert_eq!((count(Severity::Fatal), count(Severity::Degraded)), (501, 250));
        assert!(list.contains(&Finding::Unlisted { severity: Severity::Degraded, count: 150 }));
    }
}
