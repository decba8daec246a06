//! Errors of pool operations. Messages include the remedy.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::findings::Finding;
use super::format::chunk::Extent;
use super::format::superblock::SuperblockError;
use super::format::volume_record::NameError;
use super::lock::Holder;
use crate::btt;
use crate::media::MediaError;
use foreshore_types::size::Size;

/// Error of a pool operation.
///
/// Only [`PoolError::Media`], and [`PoolError::Latched`] after a failure elsewhere, may leave a
/// partial change. Other errors leave the pool unchanged.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum PoolError {
    #[error("pool {path}: there is no such file or device")]
    Missing { path: PathBuf },
    #[error(
        "pool {path}: the file exists already; a pool is only made where nothing is, so choose another name or remove it first"
    )]
    AlreadyExists { path: PathBuf },
    #[error("pool {path}: there is no folder {folder}; make it first, or look for its name")]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error(
        "pool {path}: there is no such device, and no pool is made as a file in /dev; look for the name with `lsblk` or `ndctl list`"
    )]
    NoDevice { path: PathBuf },
    #[error(
        "pool {path}: it is {kind}, and a pool lies in a regular file, on a block device or on a devdax device"
    )]
    NotAFile { path: PathBuf, kind: &'static str },
    #[error(
        "pool {path}: it is a character device of the kind `{subsystem}`; of character devices, only devdax (/dev/dax0.0) can hold a pool"
    )]
    NotDax { path: PathBuf, subsystem: String },
    #[error(
        "pool {path}: it is a devdax device that maps in pages of {} only, and a pool lends pieces of 2 MiB; make its namespace anew with `ndctl create-namespace --mode devdax --align 2M`",
        Size(*align_bytes).rounded()
    )]
    DaxAlign { path: PathBuf, align_bytes: u64 },
    #[error("pool {path}: the device is in use: {by}")]
    DeviceInUse { path: PathBuf, by: String },
    #[error(
        "pool {path}: the device is read-only (`blockdev --getro`), and this would write to it"
    )]
    DeviceReadOnly { path: PathBuf },
    #[error("pool {path}: the device is not empty: {found}")]
    DeviceNotEmpty { path: PathBuf, found: String },
    #[error("pool {path}: the part of the device that it would grow into is not empty: {found}")]
    DeviceGrowthNotEmpty { path: PathBuf, found: String },
    #[error(
        "pool {path}: there is a pool on the device already, with the volumes {}; delete them first if nobody needs them",
        few(volumes)
    )]
    DeviceHasVolumes { path: PathBuf, volumes: Vec<String> },
    #[error(
        "pool {path}: there is a pool on the device already, and it may have volumes that cannot be seen ({reason}). To give it up for good, zero the first 2 MiB of the device yourself"
    )]
    DeviceUnknownVolumes { path: PathBuf, reason: String },
    #[error(
        "pool {path}: {} are needed and the device has {}; choose a smaller size, or none for all of the device",
        Size(*needed_bytes).rounded(),
        Size(*device_bytes).rounded()
    )]
    DeviceTooSmall { path: PathBuf, needed_bytes: u64, device_bytes: u64 },
    #[error("pool {path}: {what} a file needs a size; only a device has one already")]
    SizeNeeded { path: PathBuf, what: &'static str },
    #[error(
        "pool {path}: it has all of the device, and the device has not grown ({}); enlarge that first",
        Size(*device_bytes).rounded()
    )]
    DeviceNotGrown { path: PathBuf, device_bytes: u64 },
    #[error(
        "pool {path}: it is a device, and only a file can be thin: a device has all of its blocks already"
    )]
    ThinDevice { path: PathBuf },
    #[error("pool {path}: cannot {action} it")]
    File {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("pool {path}: it is not a pool: {found}; nothing was changed")]
    NotAPool { path: PathBuf, found: String },
    #[error(
        "pool {path}: it was a pool: its volume table is there, and both superblocks are gone; nothing was changed. Nothing says how large it was, so it cannot be mended: restore it from a copy, and make no new one over it as long as it matters"
    )]
    SuperblocksGone { path: PathBuf },
    #[error(
        "pool {path}: both superblocks are damaged; nothing was changed. A repair combines them if they are damaged in different places; otherwise, restore the pool from a copy"
    )]
    SuperblocksDamaged { path: PathBuf },
    #[error(
        "pool {path}: the superblock passes its checksum and makes no sense; nothing was changed. Restore the pool from a copy, or use the program that wrote it"
    )]
    SuperblockInvalid {
        path: PathBuf,
        #[source]
        source: SuperblockError,
    },
    #[error(
        "pool {path}: it has format version {version}, and this program knows version {supported}; nothing was changed. {}",
        version_advice(*version, *supported)
    )]
    Version { path: PathBuf, version: u32, supported: u32 },
    #[error(
        "pool {path}: it uses features {features:#x} that this program does not know{hint}; nothing was changed. Use a newer program"
    )]
    Features { path: PathBuf, features: u64, hint: &'static str },
    #[error(
        "pool {path}: it has {file_bytes} bytes and the pool {pool_bytes} ({}): it was cut short; nothing was changed. Restore the pool from a copy; or, to save what is left, make it {} again (a file: `truncate -s {pool_bytes} {path}`), then check it",
        Size(*pool_bytes).rounded(), Size(*pool_bytes).rounded()
    )]
    Truncated { path: PathBuf, file_bytes: u64, pool_bytes: u64 },
    #[error(
        "pool {path}: the file has {file_bytes} bytes but the pool has {pool_bytes}; nothing was changed. Cut it with `truncate -s {pool_bytes} {path}`: what lies behind the pool's end is lost then"
    )]
    Enlarged { path: PathBuf, file_bytes: u64, pool_bytes: u64 },
    #[error("pool {path}: it is in use by {holder}; end that first")]
    InUse { path: PathBuf, holder: Holder },
    #[error(
        "pool {path}: {first} ({count} finding(s) in all); nothing was changed. A check lists them, and a repair mends them where possible"
    )]
    Damaged { path: PathBuf, first: Box<Finding>, count: usize },
    #[error("{what} {value} ({}) {rule}", Size(*value).rounded())]
    Size { what: &'static str, value: u64, rule: String },
    /// A raw volume shrinks only if the caller allows it.
    #[error(
        "volume size {size_bytes} ({}) is less than the {} that the volume has: the data behind it would be erased",
        Size(*size_bytes).rounded(), Size(*has_bytes).rounded()
    )]
    ShrinkRefused { size_bytes: u64, has_bytes: u64 },
    #[error(
        "pool {path}: {} are needed and the file system has {} free; make room there, or choose a smaller size or another file system",
        Size(*needed_bytes).rounded(),
        Size(*free_bytes).rounded()
    )]
    FileSystemFull { path: PathBuf, needed_bytes: u64, free_bytes: u64 },
    /// The pool cannot be opened for writing, because its file lacks blocks and the allocation of
    /// new ones has failed.
    #[error(
        "pool {path}: its file has lost {} of its {} on the file system, as after a sparse copy or `fallocate --dig-holes`, and a \
         store there would end its user; the file system has {} free: make room there, or copy the pool to where \
         there is room",
        Size(*lacking_bytes).rounded(), Size(*size_bytes).rounded(), Size(*free_bytes).rounded()
    )]
    BlocksLost {
        path: PathBuf,
        lacking_bytes: u64,
        size_bytes: u64,
        free_bytes: u64,
        source: io::Error,
    },
    #[error(
        "pool {path}: its file has lost {} of its {} on the file system, as after a sparse copy, and the file system cannot give \
         them back; copy the pool with `cp --sparse=never --reflink=never`, and use the copy",
        Size(*lacking_bytes).rounded(), Size(*size_bytes).rounded()
    )]
    BlocksNotTaken { path: PathBuf, lacking_bytes: u64, size_bytes: u64 },
    #[error("The thread that erases what is given back cannot be started")]
    Scrubber(#[source] io::Error),
    #[error(
        "the pool is full: {}{}",
        full_text(*requested_bytes, *free_bytes),
        reserved_text(*reserved_bytes)
    )]
    PoolFull {
        /// Requested bytes; 0 means all free bytes.
        requested_bytes: u64,
        free_bytes: u64,
        /// Free bytes that are reserved for volumes (STRG) and not lent as memory.
        reserved_bytes: u64,
    },
    /// The requested name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("volume {name:?} exists already; choose another name, or delete it first")]
    VolumeExists { name: String },
    #[error("volume {name:?}: that is its name already")]
    SameName { name: String },
    #[error("there is no volume {name:?} in the pool{}", known_text(known))]
    NoSuchVolume { name: String, known: Vec<String> },
    /// Another handle in this process has the volume open.
    #[error("volume {name:?} is in use; end what uses it first")]
    VolumeInUse { name: String },
    /// The volume has unexpected holes or an unsupported format.
    #[error("volume {name:?} cannot be used: {reason}")]
    VolumeUnusable { name: String, reason: String },
    #[error("volume {name:?} is raw: it has no BTT, and no sectors")]
    NotBtt { name: String },
    #[error(
        "volume {name:?} is a part of one that was split, which did not finish; the next who opens the pool for writing finishes it"
    )]
    VolumeUnfinished { name: String },
    #[error("volume {name:?} cannot be split: {reason}")]
    Split { name: String, reason: SplitError },
    #[error("volume {name:?} lacks nothing, so it is not given up")]
    VolumeLacksNothing { name: String },
    #[error("the pool has room for {limit} volumes and has that many; delete one first")]
    NoVolumeSlot { limit: u32 },
    #[error("extent {extent} is not lent as memory")]
    NotLent { extent: Extent },
    #[error("pool {path}: it is open for reading only, and this would change it")]
    ReadOnly { path: PathBuf },
    /// An earlier store or persist failed, so it is unknown which writes are durable.
    #[error("pool {path}: read-only since a write to it failed ({cause}); open it again to go on")]
    Latched { path: PathBuf, cause: String },
    #[error("the pool's media failed; the pool is read-only until it is opened again")]
    Media(#[from] MediaError),
    #[error(
        "the pool's log has {log_bytes} bytes, and the operation needs {needed_bytes}; make a new volume instead"
    )]
    LogTooSmall { log_bytes: u64, needed_bytes: u64 },
    /// The volume's BTT cannot grow to the requested size.
    #[error(transparent)]
    BttGrowth(btt::ExtendError),
    /// A BTT cannot have the volume's size or the requested sector size.
    #[error(transparent)]
    Btt(#[from] btt::GeometryError),
}

/// Reason why a volume cannot be split.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum SplitError {
    #[error("a split needs at least 2 parts, not {count}")]
    TooFew { count: usize },
    #[error("two parts are to have the name {name:?}")]
    NameTwice { name: String },
    #[error("only one part can have the rest, and {first:?} and {second:?} are to")]
    RestTwice { first: String, second: String },
    #[error(
        "its parts have {parts_bytes} bytes ({}) together, and it has {volume_bytes} ({}); one of them may have the rest",
        Size(*parts_bytes).rounded(), Size(*volume_bytes).rounded()
    )]
    Sum { parts_bytes: u64, volume_bytes: u64 },
    #[error("nothing is left for {name:?}: the other parts have {parts_bytes} bytes ({})", Size(*parts_bytes).rounded())]
    NoRest { name: String, parts_bytes: u64 },
    #[error("part {name:?}: {reason}")]
    Size { name: String, reason: String },
    #[error("it holds data, and a BTT cannot be cut: its parts would be empty")]
    HoldsData,
}

fn version_advice(version: u32, supported: u32) -> &'static str {
    match version > supported {
        true => "Use a newer program: at least the one that made it",
        false => "Use the older program that made it, and copy its volumes to a new pool",
    }
}

fn reserved_text(reserved_bytes: u64) -> String {
    match reserved_bytes {
        0 => String::new(),
        bytes => format!(", of which {} are kept for volumes (STRG)", Size(bytes).rounded()),
    }
}

fn full_text(requested_bytes: u64, free_bytes: u64) -> String {
    match requested_bytes {
        0 => "nothing is free".to_owned(),
        bytes => {
            format!("{} asked for, {} free", Size(bytes).rounded(), Size(free_bytes).rounded())
        }
    }
}

/// Number of names that an error lists.
const FEW: usize = 8;

fn few(names: &[String]) -> String {
    let (listed, more) = names.split_at(names.len().min(FEW));
    match more.len() {
        0 => listed.join(", "),
        count => format!("{} and {count} more", listed.join(", ")),
    }
}

fn known_text(known: &[String]) -> String {
    let quoted: Vec<_> = known.iter().map(|name| format!("{name:?}")).collect();
    if known.is_empty() {
        ": it has none".to_owned()
    } else {
        format!("; its volumes: {}", few(&quoted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_lists_only_a_few_of_many_names() {
        let names: Vec<_> = (0..1000).map(|number| format!("v{number}")).collect();
        let known = names.clone();
        let text = PoolError::NoSuchVolume { name: "w".to_owned(), known }.to_string();
        let few = r#""v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7" and 992 more"#;
        assert_eq!(text, format!("there is no volume \"w\" in the pool; its volumes: {few}"));
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
            text.contains("make it 64 MiB again (a file: `truncate -s 67108864 /pm/pool`)"),
            "{text}"
        );
        let text = PoolError::Enlarged { path, file_bytes: 1 << 30, pool_bytes }.to_string();
        assert!(text.contains("`truncate -s 67108864 /pm/pool`: what lies behind"), "{text}");
    }
}
