//! Errors of pool operations. Messages include a remedy.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::findings::Finding;
use super::format::chunk::Extent;
use super::format::superblock::SuperblockError;
use super::format::volume_record::NameError;
use super::lock::Holder;
use crate::btt::BttError;
use crate::media::MediaError;
use foreshore_types::size::Size;

/// Error of a pool operation.
///
/// [`PoolError::Media`] may leave a partial change, and so may [`PoolError::Latched`] if another
/// operation failed during the change. Other errors leave the pool unchanged.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum PoolError {
    #[error("pool {path}: no such file or device")]
    Missing { path: PathBuf },
    #[error("pool {path}: the file already exists; choose another name, or remove the file first")]
    AlreadyExists { path: PathBuf },
    #[error("pool {path}: folder {folder} does not exist; create it first, or correct the path")]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error(
        "pool {path}: no such device, and a pool file cannot be in /dev; list the devices with `lsblk` or `ndctl list`"
    )]
    NoDevice { path: PathBuf },
    #[error(
        "pool {path}: {kind} cannot hold a pool; use a regular file, a block device or a devdax device"
    )]
    NotAFile { path: PathBuf, kind: &'static str },
    #[error(
        "pool {path}: a character device of subsystem `{subsystem}` cannot hold a pool; use a devdax device, such as /dev/dax0.0"
    )]
    NotDax { path: PathBuf, subsystem: String },
    #[error(
        "pool {path}: the alignment {} of the devdax device exceeds the maximum 2 MiB; create its namespace again with `ndctl create-namespace --mode devdax --align 2M`",
        Size(*align_bytes).rounded()
    )]
    DaxAlign { path: PathBuf, align_bytes: u64 },
    #[error("pool {path}: the device is in use: {by}")]
    DeviceInUse { path: PathBuf, by: String },
    #[error("pool {path}: the device is read-only (`blockdev --getro`) and cannot be changed")]
    DeviceReadOnly { path: PathBuf },
    #[error("pool {path}: the device is not empty: {found}")]
    DeviceNotEmpty { path: PathBuf, found: String },
    #[error("pool {path}: the part of the device after the pool is not empty: {found}")]
    DeviceGrowthNotEmpty { path: PathBuf, found: String },
    #[error(
        "pool {path}: the device already has a pool with the volumes {}; delete the volumes first if they are not needed",
        list_names(volumes)
    )]
    DeviceHasVolumes { path: PathBuf, volumes: Vec<String> },
    #[error(
        "pool {path}: the device already has a pool, which may have volumes that cannot be read ({reason}). To discard the pool, zero the first 2 MiB of the device"
    )]
    DeviceUnknownVolumes { path: PathBuf, reason: String },
    #[error(
        "pool {path} needs {} but the device has {}; choose a smaller size, or omit it to use all of the device",
        Size(*needed_bytes).rounded(),
        Size(*device_bytes).rounded()
    )]
    DeviceTooSmall { path: PathBuf, needed_bytes: u64, device_bytes: u64 },
    #[error("pool {path} is already growing")]
    Growing { path: PathBuf },
    #[error("pool {path}: {reason}, so a size is required")]
    SizeNeeded { path: PathBuf, reason: &'static str },
    #[error(
        "pool {path} already uses all of the device ({}); enlarge the device first",
        Size(*device_bytes).rounded()
    )]
    DeviceNotGrown { path: PathBuf, device_bytes: u64 },
    #[error(
        "pool {path}: a pool on a device cannot be thin, because a device has all of its blocks"
    )]
    ThinDevice { path: PathBuf },
    #[error("cannot {action} pool {path}")]
    File {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not a pool: {found}; nothing was changed")]
    NotAPool { path: PathBuf, found: String },
    #[error(
        "pool {path}: both superblocks are lost, although a volume table exists; nothing was changed. The pool cannot be repaired, because its size is unknown: restore it from a copy, and do not create a new pool in its place while its data matters"
    )]
    SuperblocksLost { path: PathBuf },
    #[error(
        "pool {path}: both superblocks are damaged; nothing was changed. A repair combines them if they are damaged in different places; otherwise, restore the pool from a copy"
    )]
    SuperblocksDamaged { path: PathBuf },
    #[error(
        "pool {path}: the superblock has a correct checksum but invalid content; nothing was changed. Restore the pool from a copy, or use the program that wrote it"
    )]
    SuperblockInvalid {
        path: PathBuf,
        #[source]
        source: SuperblockError,
    },
    #[error(
        "pool {path} has format version {version}, but this program supports version {supported}; nothing was changed. {}",
        version_advice(*version, *supported)
    )]
    Version { path: PathBuf, version: u32, supported: u32 },
    #[error(
        "pool {path} uses features {features:#x}, which this program does not support{hint}; nothing was changed. Use a newer program"
    )]
    Features { path: PathBuf, features: u64, hint: &'static str },
    #[error(
        "pool {path} has {file_bytes} bytes instead of {pool_bytes} ({}), so it was cut short; nothing was changed. Restore the pool from a copy; or, to save the remaining data, extend it to {} (a file: `truncate -s {pool_bytes} {path}`), then check it",
        Size(*pool_bytes).rounded(), Size(*pool_bytes).rounded()
    )]
    Truncated { path: PathBuf, file_bytes: u64, pool_bytes: u64 },
    #[error(
        "pool {path}: the file has {file_bytes} bytes but the pool has {pool_bytes}; nothing was changed. Truncate the file with `truncate -s {pool_bytes} {path}`, which discards the data after the pool's end"
    )]
    Enlarged { path: PathBuf, file_bytes: u64, pool_bytes: u64 },
    #[error("pool {path} is in use by {holder}; stop it first")]
    InUse { path: PathBuf, holder: Holder },
    #[error(
        "pool {path}: {first} ({count} finding(s) in total); nothing was changed. A check lists the findings, and a repair corrects them if possible"
    )]
    Damaged { path: PathBuf, first: Box<Finding>, count: usize },
    #[error("{quantity} {value} ({}) {rule}", Size(*value).rounded())]
    Size { quantity: &'static str, value: u64, rule: String },
    /// A raw volume shrinks only if the caller allows it.
    #[error(
        "volume size {size_bytes} ({}) is less than the current {}: a shrink erases the data after the new end",
        Size(*size_bytes).rounded(), Size(*current_bytes).rounded()
    )]
    ShrinkRefused { size_bytes: u64, current_bytes: u64 },
    #[error(
        "pool {path} needs {} but the file system has {} free; free more space there, or choose a smaller size or another file system",
        Size(*needed_bytes).rounded(),
        Size(*free_bytes).rounded()
    )]
    FileSystemFull { path: PathBuf, needed_bytes: u64, free_bytes: u64 },
    /// The pool cannot be opened for writing, because its file lacks blocks and they could not be
    /// allocated.
    #[error(
        "pool {path}: the file lacks {} of its {} on the file system, as after a sparse copy or `fallocate --dig-holes`, and a store there would kill the process; the file system has {} free: free more space there, or copy the pool to a file system with more space",
        Size(*missing_bytes).rounded(), Size(*size_bytes).rounded(), Size(*free_bytes).rounded()
    )]
    BlocksLost {
        path: PathBuf,
        missing_bytes: u64,
        size_bytes: u64,
        free_bytes: u64,
        source: io::Error,
    },
    #[error(
        "pool {path}: the file lacks {} of its {} on the file system, as after a sparse copy, and the file system cannot allocate them; copy the pool with `cp --sparse=never --reflink=never`, and use the copy",
        Size(*missing_bytes).rounded(), Size(*size_bytes).rounded()
    )]
    CannotAllocateBlocks { path: PathBuf, missing_bytes: u64, size_bytes: u64 },
    #[error("cannot start the thread that erases freed chunks")]
    Scrubber(#[source] io::Error),
    #[error(
        "the pool is full: {}{}",
        full_text(*requested_bytes, *free_bytes),
        withheld_text(*withheld_bytes)
    )]
    PoolFull {
        /// Requested size in bytes. 0 means all free bytes.
        requested_bytes: u64,
        free_bytes: u64,
        /// Free bytes that are reserved for volumes (STRG) or promised to thin ones.
        withheld_bytes: u64,
    },
    /// The requested name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("volume {name:?} already exists; choose another name, or delete it first")]
    VolumeExists { name: String },
    #[error("volume {name:?} already has that name")]
    SameName { name: String },
    #[error("no such volume: {name:?}; {}", existing_text(existing))]
    NoSuchVolume { name: String, existing: Vec<String> },
    #[error("volume {name:?} is thick, so all of it is guaranteed; a reserve needs a thin volume")]
    NotThin { name: String },
    /// Another handle in this process has the volume open.
    #[error("volume {name:?} is in use; stop its user first")]
    VolumeInUse { name: String },
    /// The volume has unexpected holes or an unsupported format.
    #[error("volume {name:?} cannot be used: {reason}")]
    VolumeUnusable { name: String, reason: String },
    #[error("volume {name:?} is raw: it has no BTT and no sectors")]
    NotBtt { name: String },
    #[error(
        "volume {name:?} is part of an unfinished split; the next open of the pool for writing completes it"
    )]
    VolumeUnfinished { name: String },
    #[error("cannot split volume {name:?}: {reason}")]
    Split { name: String, reason: SplitError },
    #[error(
        "cannot split volume {name:?}: the volume holds data, and a BTT cannot be cut: its parts would be empty"
    )]
    SplitHoldsData { name: String },
    #[error("no chunk of volume {name:?} is known to be missing, so the volume is not discarded")]
    VolumeComplete { name: String },
    #[error("the pool already has {limit} volumes, the maximum; delete one first")]
    NoVolumeSlot { limit: u32 },
    #[error("extent {extent} is not lent as memory")]
    NotLent { extent: Extent },
    #[error("pool {path} is open for reading only, so it cannot be changed")]
    ReadOnly { path: PathBuf },
    /// An earlier store or persist failed, so the durability of writes is unknown.
    #[error("pool {path} is read-only because a write failed ({cause}); open it again to continue")]
    Latched { path: PathBuf, cause: String },
    #[error("the pool's media failed; the pool is read-only until it is opened again")]
    Media(#[from] MediaError),
    #[error(
        "the pool's log has {log_bytes} bytes, but the operation needs {needed_bytes}; create a new volume instead"
    )]
    LogTooSmall { log_bytes: u64, needed_bytes: u64 },
    /// The volume's BTT cannot be created with its size, or cannot grow to the requested size.
    #[error(transparent)]
    Btt(BttError),
}

/// Reason why a volume cannot be split.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum SplitError {
    #[error("a split needs at least 2 parts, not {count}")]
    TooFew { count: usize },
    #[error("two parts have the name {name:?}")]
    NameTwice { name: String },
    #[error("only one part can have the rest, not both {first:?} and {second:?}")]
    RestTwice { first: String, second: String },
    #[error(
        "the parts have {parts_bytes} bytes ({}) in total, but the volume has {volume_bytes} ({}); one part may have the rest",
        Size(*parts_bytes).rounded(), Size(*volume_bytes).rounded()
    )]
    Sum { parts_bytes: u64, volume_bytes: u64 },
    #[error("nothing is left for {name:?}: the other parts have {parts_bytes} bytes ({})", Size(*parts_bytes).rounded())]
    NoRest { name: String, parts_bytes: u64 },
    #[error("part {name:?}: {reason}")]
    Size { name: String, reason: String },
}

fn version_advice(version: u32, supported: u32) -> &'static str {
    match version > supported {
        true => "Use a newer program, at least the one that created the pool",
        false => "Use the older program that created the pool, and copy its volumes to a new pool",
    }
}

fn withheld_text(withheld_bytes: u64) -> String {
    match withheld_bytes {
        0 => String::new(),
        bytes => format!(", of which {} are reserved for volumes", Size(bytes).rounded()),
    }
}

fn full_text(requested_bytes: u64, free_bytes: u64) -> String {
    match requested_bytes {
        0 => "nothing is free".to_owned(),
        bytes => {
            format!("{} requested, {} free", Size(bytes).rounded(), Size(free_bytes).rounded())
        }
    }
}

/// Maximum number of names in an error message.
const MAX_LISTED_NAMES: usize = 8;

fn list_names(names: &[String]) -> String {
    let (listed, more) = names.split_at(names.len().min(MAX_LISTED_NAMES));
    match more.len() {
        0 => listed.join(", "),
        count => format!("{} and {count} more", listed.join(", ")),
    }
}

fn existing_text(existing: &[String]) -> String {
    let quoted: Vec<_> = existing.iter().map(|name| format!("{name:?}")).collect();
    if existing.is_empty() {
        "the pool has no volumes".to_owned()
    } else {
        format!("existing volumes: {}", list_names(&quoted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_lists_only_a_few_of_many_names() {
        let names: Vec<_> = (0..1000).map(|number| format!("v{number}")).collect();
        let existing = names.clone();
        let text = PoolError::NoSuchVolume { name: "w".to_owned(), existing }.to_string();
        let few = r#""v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7" and 992 more"#;
        assert_eq!(text, format!("no such volume: \"w\"; existing volumes: {few}"));
        let text = PoolError::DeviceHasVolumes { path: "p".into(), volumes: names[..2].to_vec() }
            .to_string();
        assert!(text.contains("the volumes v0, v1;"), "{text}");
    }

    #[test]
    fn error_of_a_wrong_length_has_a_command_with_the_path() {
        let (path, pool_bytes) = (PathBuf::from("/pm/pool"), 64 << 20);
        let text =
            PoolError::Truncated { path: path.clone(), file_bytes: 4096, pool_bytes }.to_string();
        assert!(
            text.contains("extend it to 64 MiB (a file: `truncate -s 67108864 /pm/pool`)"),
            "{text}"
        );
        let text = PoolError::Enlarged { path, file_bytes: 1 << 30, pool_bytes }.to_string();
        assert!(text.contains("`truncate -s 67108864 /pm/pool`, which discards"), "{text}");
    }
}
