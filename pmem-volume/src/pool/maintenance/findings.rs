//! What a look at the media brings up.

use std::collections::{BTreeMap, HashMap};
use std::mem::Discriminant;

use serde::Serialize;
use thiserror::Error;

use crate::pool::alloc::chunk::ChunkId;
use foreshore_types::size::Size;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// What a crash leaves behind by design; the next open puts it right.
    Note,
    /// Something is damaged, and the pool works without it or from a copy.
    Degraded,
    /// The pool cannot be trusted: it opens for reading only.
    #[serde(rename = "damaged")]
    Fatal,
}

impl Severity {
    /// The name used in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Degraded => "degraded",
            Severity::Fatal => "damaged",
        }
    }
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Finding {
    /// A superblock is damaged, the other is not.
    #[error("superblock {copy} is damaged; the other one is used")]
    SuperblockCopy {
        /// 0 or 1.
        copy: usize,
    },
    /// A superblock is older than the other.
    #[error("superblock {copy} is older than the other one: a crash came between the two")]
    SuperblockStale {
        /// 0 or 1.
        copy: usize,
    },
    /// A crash came while the pool was made larger.
    #[error("growing the pool to {} did not finish; the next open cuts the file to the pool's size", Size(*to_bytes).rounded())]
    GrowthUnfinished {
        /// How large it was to be.
        to_bytes: u64,
    },
    /// A copy of a volume record is damaged, the other is not.
    #[error("copy {copy} of volume record {slot} is damaged; the other one is used")]
    VolumeRecordCopy {
        /// Place in the volume table.
        slot: u16,
        /// 0 or 1.
        copy: usize,
    },
    /// A copy of a volume record is older than the other.
    #[error(
        "copy {copy} of volume record {slot} is older than the other one: a crash came between the two"
    )]
    VolumeRecordStale {
        /// Place in the volume table.
        slot: u16,
        /// 0 or 1.
        copy: usize,
    },
    /// Both copies of a volume record are damaged.
    #[error("both copies of volume record {slot} are damaged")]
    VolumeRecordLost {
        /// Place in the volume table.
        slot: u16,
    },
    /// A whole volume record that cannot be.
    #[error("volume record {slot} makes no sense: {reason}")]
    VolumeRecordInvalid {
        /// Place in the volume table.
        slot: u16,
        /// Why.
        reason: String,
    },
    /// Two volumes of one name.
    #[error("two volumes have the name {name:?}")]
    VolumeNameTwice {
        /// The name.
        name: String,
    },
    /// A crash came while a volume was split.
    #[error(
        "volume {name:?} is a part of one that was split, which did not finish; the next open finishes it"
    )]
    SplitUnfinished {
        /// The part.
        name: String,
    },
    /// A chunk's owner word is damaged.
    #[error("the owner word of chunk {chunk} is damaged ({word:#018x})")]
    OwnerWord {
        /// The chunk.
        chunk: ChunkId,
        /// What it reads.
        word: u64,
    },
    /// A chunk's wear word is damaged.
    #[error("the wear count of chunk {chunk} is damaged ({word:#018x}); it starts anew")]
    WearWord {
        /// The chunk.
        chunk: ChunkId,
        /// What it reads.
        word: u64,
    },
    /// Findings of one severity beyond those that are listed.
    #[error("{count} more like these are not listed")]
    More {
        /// Theirs.
        severity: Severity,
        /// How many.
        count: u64,
    },
    /// A chunk belongs to a volume for which the volume table has no place.
    #[error("chunk {chunk} belongs to a volume in slot {slot}, and the pool has {slots} slots")]
    SlotOutside {
        /// The chunk.
        chunk: ChunkId,
        /// Place in the volume table that there is not.
        slot: u16,
        /// How many there are.
        slots: u32,
    },
    /// A chunk with the pool's own data is marked as somebody else's.
    #[error("chunk {chunk} holds the pool's own data but is marked as {marked}")]
    MetadataTaken {
        /// The chunk.
        chunk: ChunkId,
        /// As what.
        marked: String,
    },
    /// Two chunks are the same part of a volume.
    #[error("chunks {first} and {second} are both chunk {index} of volume {name:?}")]
    IndexTwice {
        /// The volume.
        name: String,
        /// Logical index.
        index: u32,
        /// One chunk.
        first: ChunkId,
        /// The other.
        second: ChunkId,
    },
    /// A volume lacks chunks. No crash does that: their words were damaged, and what they say now,
    /// *free* for instance, may let somebody else have what the volume held.
    #[error(
        "volume {name:?} lacks {missing} of its {chunks} chunks, the first at index {first_index}"
    )]
    IndexMissing {
        /// The volume.
        name: String,
        /// How many are missing.
        missing: u32,
        /// How many there should be.
        chunks: u32,
        /// The first that is missing.
        first_index: u32,
    },
    /// A free chunk that does not read as zeros.
    #[error(
        "free chunk {chunk} holds what somebody has left there, and its next owner could read it; `pmvol repair` erases it unless a volume may lack it"
    )]
    NotErased {
        /// The chunk.
        chunk: ChunkId,
    },
    /// The file lacks blocks of its file system. The next open for writing allocates them or fails.
    #[error(
        "the file has lost blocks: {} of it are holes, and {} are shared with a clone, as after a sparse copy, \
         `fallocate --dig-holes` or `cp --reflink`; the next program that opens the pool for writing takes new ones if the \
         file system has room",
        Size(*hole_bytes).rounded(), Size(*shared_bytes).rounded()
    )]
    BlocksLost {
        /// Bytes in holes.
        hole_bytes: u64,
        /// Bytes in blocks that the file shares with another file.
        shared_bytes: u64,
    },
    /// The file system writes changed blocks to a new place.
    #[error(
        "the file system is {file_system}, which writes changed blocks to a new place: when it is full, a store is a SIGBUS, and \
         a guest's vCPU stops; create the pool in a folder with `chattr +C` (btrfs), or on ext4 or XFS"
    )]
    CopyOnWrite {
        /// Name of the file system.
        file_system: &'static str,
    },
    /// A committed transaction waits to be redone.
    #[error("the log holds a committed transaction of {entries} word(s); the next open redoes it")]
    LogPending {
        /// How many words.
        entries: usize,
    },
    /// The log is neither empty nor whole.
    #[error("the log is damaged: {reason}")]
    LogDamaged {
        /// Why.
        reason: &'static str,
    },
    /// Chunks are still marked as lent by a process that ended.
    #[error(
        "{chunks} chunk(s) are still marked as lent memory; they are erased before they are used again"
    )]
    StillLent {
        /// How many.
        chunks: u32,
    },
    /// Chunks wait to be erased.
    #[error("{chunks} chunk(s) wait to be erased; they are before they are used again")]
    Unscrubbed {
        /// How many.
        chunks: u32,
    },
    /// Chunks belong to a volume that was not finished or is gone.
    #[error(
        "{chunks} chunk(s) are left over from an operation that did not finish; they are erased before they are used again"
    )]
    Leftover {
        /// How many.
        chunks: u32,
    },
}

impl Finding {
    /// Does it say that there are none of something?
    pub(in crate::pool) fn is_about_nothing(&self) -> bool {
        matches!(
            self,
            Finding::StillLent { chunks: 0 }
                | Finding::Unscrubbed { chunks: 0 }
                | Finding::Leftover { chunks: 0 }
        )
    }

    /// How many things it says are not as they should be.
    pub(in crate::pool) fn count(&self) -> usize {
        match self {
            Finding::More { count, .. } => usize::try_from(*count).unwrap_or(usize::MAX),
            _ => 1,
        }
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Finding::More { severity, .. } => *severity,
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

/// Findings of one kind that are listed; the rest are counted.
const MAX_OF_A_KIND: u32 = 100;

/// Findings in the order in which they are found. However many a damaged or crafted pool gives rise
/// to, they take little memory.
#[derive(Debug, Default)]
pub(in crate::pool) struct Findings {
    list: Vec<Finding>,
    of_kind: HashMap<Discriminant<Finding>, u32>,
    more: BTreeMap<Severity, u64>,
}

impl Findings {
    pub(in crate::pool) fn add(&mut self, finding: Finding) {
        let of_kind = self.of_kind.entry(std::mem::discriminant(&finding)).or_default();
        if *of_kind < MAX_OF_A_KIND {
            *of_kind += 1;
            self.list.push(finding);
        } else {
            *self.more.entry(finding.severity()).or_default() += 1;
        }
    }

    /// Those that are listed, and behind them how many are not.
    pub(in crate::pool) fn into_list(self) -> Vec<Finding> {
        let more = self.more.into_iter().map(|(severity, count)| Finding::More { severity, count });
        self.list.into_iter().chain(more).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_kind_some_are_listed_and_all_are_counted() {
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
        assert!(list.contains(&Finding::More { severity: Severity::Degraded, count: 150 }));
    }
}
