//! What can go wrong with a pool, in words that say what to do.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::alloc::chunk::Extent;
use super::file::lock::Holder;
use super::format::superblock::SuperblockError;
use super::format::volume_record::NameError;
use super::maintenance::findings::Finding;
use super::volume::split::SplitError;
use crate::btt;
use crate::media::MediaError;
use foreshore_types::size::Size;

/// An operation on a pool failed.
///
/// Unless it is [`PoolError::Media`], nothing has changed; or [`PoolError::Latched`], if something
/// else failed meanwhile.
#[derive(Debug, Error)]
pub enum PoolError {
    /// No such file.
    #[error("pool {path}: there is no such file or device; make a pool with `pmvol create`")]
    Missing {
        /// The pool.
        path: PathBuf,
    },
    /// The file is there already.
    #[error(
        "pool {path}: the file exists already; a pool is only made where nothing is, so choose another name or remove it first"
    )]
    AlreadyExists {
        /// The pool.
        path: PathBuf,
    },
    /// There is no folder for the file.
    #[error("pool {path}: there is no folder {folder}; make it first, or look for its name")]
    NoFolder {
        /// The pool.
        path: PathBuf,
        /// Where it was to be.
        folder: PathBuf,
    },
    /// A file among the devices.
    #[error(
        "pool {path}: there is no such device, and no pool is made as a file in /dev; look for the name with `lsblk` or `ndctl list`"
    )]
    NoDevice {
        /// The pool.
        path: PathBuf,
    },
    /// A directory, a pipe, or the like.
    #[error(
        "pool {path}: it is {kind}, and a pool lies in a regular file, on a block device or on a devdax device"
    )]
    NotAFile {
        /// The pool.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// A character device that cannot hold a pool.
    #[error(
        "pool {path}: it is a character device of the kind `{subsystem}`; of character devices, only devdax (/dev/dax0.0) can hold a pool"
    )]
    NotDax {
        /// The pool.
        path: PathBuf,
        /// What the kernel calls its kind.
        subsystem: String,
    },
    /// A devdax device that maps in larger pieces than chunks.
    #[error(
        "pool {path}: it is a devdax device that maps in pages of {} only, and a pool lends pieces of 2 MiB; make its namespace anew with `ndctl create-namespace --mode devdax --align 2M`",
        Size(*align_bytes).rounded()
    )]
    DaxAlign {
        /// The pool.
        path: PathBuf,
        /// Its alignment.
        align_bytes: u64,
    },
    /// The kernel does not give the device away.
    #[error("pool {path}: the device is in use: {by}")]
    DeviceInUse {
        /// The pool.
        path: PathBuf,
        /// By what.
        by: String,
    },
    /// The device takes no writes.
    #[error(
        "pool {path}: the device is read-only (`blockdev --getro`), and this would write to it; `pmvol info` and `pmvol check` can look at it"
    )]
    DeviceReadOnly {
        /// The pool.
        path: PathBuf,
    },
    /// There is something on the device.
    #[error(
        "pool {path}: the device is not empty: {found}; --force makes a pool there, and erases it all"
    )]
    DeviceNotEmpty {
        /// The pool.
        path: PathBuf,
        /// What it looks like.
        found: String,
    },
    /// There is something behind the pool.
    #[error(
        "pool {path}: what it would get of the device is not empty: {found}; --force takes it, and erases it all"
    )]
    DeviceGrowthNotEmpty {
        /// The pool.
        path: PathBuf,
        /// What it looks like.
        found: String,
    },
    /// There is a pool on the device, and it is in use by its volumes.
    #[error(
        "pool {path}: there is a pool on the device already, with the volumes {}; delete them first if nobody needs them",
        few(volumes)
    )]
    DeviceHasVolumes {
        /// The pool.
        path: PathBuf,
        /// Their names.
        volumes: Vec<String>,
    },
    /// There is a pool on the device, and nobody can say what volumes it has.
    #[error(
        "pool {path}: there is a pool on the device already, and it may have volumes that cannot be seen ({reason}); see `pmvol check` and `pmvol repair`. To give it up for good, zero the first 2 MiB of the device yourself"
    )]
    DeviceUnknownVolumes {
        /// The pool.
        path: PathBuf,
        /// Why nobody can say.
        reason: String,
    },
    /// The pool would be larger than the device.
    #[error(
        "pool {path}: {} are needed and the device has {}; choose a smaller size, or none for all of the device",
        Size(*needed_bytes).rounded(),
        Size(*device_bytes).rounded()
    )]
    DeviceTooSmall {
        /// The pool.
        path: PathBuf,
        /// Size of the pool.
        needed_bytes: u64,
        /// Size of the device.
        device_bytes: u64,
    },
    /// A file has no size of its own.
    #[error("pool {path}: {what} a file needs a size; only a device has one already")]
    SizeNeeded {
        /// The pool.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// A pool has all of its device already.
    #[error(
        "pool {path}: it has all of the device, and the device has not grown ({}); enlarge that first",
        Size(*device_bytes).rounded()
    )]
    DeviceNotGrown {
        /// The pool.
        path: PathBuf,
        /// Size of the device.
        device_bytes: u64,
    },
    /// Thin is for files.
    #[error(
        "pool {path}: it is a device, and only a file can be thin: a device has all of its blocks already"
    )]
    ThinDevice {
        /// The pool.
        path: PathBuf,
    },
    /// The kernel refused something about the file.
    #[error("pool {path}: cannot {action} it")]
    File {
        /// The pool.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// No superblock.
    #[error(
        "pool {path}: it is not a pool: {found}; nothing was changed. Pools are made with `pmvol create`"
    )]
    NotAPool {
        /// The pool.
        path: PathBuf,
        /// What it is instead.
        found: String,
    },
    /// No superblock, and a volume table.
    #[error(
        "pool {path}: it was a pool: its volume table is there, and both superblocks are gone; nothing was changed. Nothing says how large it was, so it cannot be mended: restore it from a copy, and make no new one over it as long as it matters"
    )]
    SuperblocksGone {
        /// The pool.
        path: PathBuf,
    },
    /// Superblocks, but none that is whole.
    #[error(
        "pool {path}: both superblocks are damaged; nothing was changed. `pmvol repair` puts them together if they are damaged in different places; if not, restore the pool from a copy"
    )]
    SuperblocksDamaged {
        /// The pool.
        path: PathBuf,
    },
    /// A whole superblock that cannot be.
    #[error(
        "pool {path}: the superblock passes its checksum and makes no sense; nothing was changed. Restore the pool from a copy, or use the program that wrote it"
    )]
    SuperblockInvalid {
        /// The pool.
        path: PathBuf,
        /// The field.
        #[source]
        source: SuperblockError,
    },
    /// Another format.
    #[error(
        "pool {path}: it has format version {version}, and this program knows version {supported}; nothing was changed. {}",
        version_advice(*version, *supported)
    )]
    Version {
        /// The pool.
        path: PathBuf,
        /// What the superblock says.
        version: u32,
        /// What this code knows.
        supported: u32,
    },
    /// Features of a later program.
    #[error(
        "pool {path}: it uses features {features:#x} that this program does not know{hint}; nothing was changed. Use a newer program"
    )]
    Features {
        /// The pool.
        path: PathBuf,
        /// Bits nobody here knows.
        features: u64,
        /// Whether reading would be possible.
        hint: &'static str,
    },
    /// The file is shorter than the pool.
    #[error(
        "pool {path}: it has {file_bytes} bytes and the pool {pool_bytes} ({}): it was cut short; nothing was changed. Restore the pool from a copy; or, to save what is left, make it {} again (a file: `truncate -s {pool_bytes} {path}`), then `pmvol check`",
        Size(*pool_bytes).rounded(), Size(*pool_bytes).rounded()
    )]
    Truncated {
        /// The pool.
        path: PathBuf,
        /// What is there.
        file_bytes: u64,
        /// What should be.
        pool_bytes: u64,
    },
    /// The file is longer than the pool.
    #[error(
        "pool {path}: the file has {file_bytes} bytes but the pool has {pool_bytes}; nothing was changed. Cut it with `truncate -s {pool_bytes} {path}`: what lies behind the pool's end is lost then"
    )]
    Enlarged {
        /// The pool.
        path: PathBuf,
        /// What is there.
        file_bytes: u64,
        /// What should be.
        pool_bytes: u64,
    },
    /// Somebody has it.
    #[error(
        "pool {path}: it is in use by {holder}; end that first, or only look with `pmvol info`"
    )]
    InUse {
        /// The pool.
        path: PathBuf,
        /// Who.
        holder: Holder,
    },
    /// Its own data is damaged.
    #[error(
        "pool {path}: {first} ({count} finding(s) in all); nothing was changed. `pmvol check` lists them, `pmvol repair` mends what it can"
    )]
    Damaged {
        /// The pool.
        path: PathBuf,
        /// The first thing found.
        first: Box<Finding>,
        /// How many there are.
        count: usize,
    },
    /// A size off the grid or out of bounds.
    #[error("{what} {value} ({}) {rule}", Size(*value).rounded())]
    Size {
        /// Which size.
        what: &'static str,
        /// The value.
        value: u64,
        /// The bound.
        rule: String,
    },
    /// The file system has no room for the pool.
    #[error(
        "pool {path}: {} are needed and the file system has {} free; make room there, or choose a smaller size or another file system",
        Size(*needed_bytes).rounded(),
        Size(*free_bytes).rounded()
    )]
    FileSystemFull {
        /// The pool.
        path: PathBuf,
        /// Size of the pool.
        needed_bytes: u64,
        /// What is left.
        free_bytes: u64,
    },
    /// The pool cannot be opened for writing, because its file lacks blocks and the allocation of
    /// new ones has failed.
    #[error(
        "pool {path}: its file has lost {} of its {} on the file system, as after a sparse copy or `fallocate --dig-holes`, and a \
         store there would end its user; the file system has {} free: make room there, or copy the pool to where \
         there is room",
        Size(*lacking_bytes).rounded(), Size(*size_bytes).rounded(), Size(*free_bytes).rounded()
    )]
    BlocksLost {
        /// The pool.
        path: PathBuf,
        /// Bytes without blocks of their own.
        lacking_bytes: u64,
        /// Size of the pool.
        size_bytes: u64,
        /// Free bytes of the file system.
        free_bytes: u64,
        /// Reason that the file system gives.
        source: io::Error,
    },
    /// The file system cannot allocate the missing blocks.
    #[error(
        "pool {path}: its file has lost {} of its {} on the file system, as after a sparse copy, and the file system cannot give \
         them back; copy the pool with `cp --sparse=never --reflink=never`, and use the copy",
        Size(*lacking_bytes).rounded(), Size(*size_bytes).rounded()
    )]
    BlocksNotTaken {
        /// The pool.
        path: PathBuf,
        /// Bytes without blocks of their own.
        lacking_bytes: u64,
        /// Size of the pool.
        size_bytes: u64,
    },
    /// The host has no thread left.
    #[error("The thread that erases what is given back cannot be started")]
    Scrubber(#[source] io::Error),
    /// No room.
    #[error(
        "the pool is full: {}{}; `pmvol grow` makes it larger",
        full_text(*requested_bytes, *free_bytes),
        reserved_text(*reserved_bytes)
    )]
    PoolFull {
        /// What was asked for; 0: all that is free.
        requested_bytes: u64,
        /// What is free.
        free_bytes: u64,
        /// How much of that is kept for volumes (STRG) and not lent as memory.
        reserved_bytes: u64,
    },
    /// A bad name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The name is taken.
    #[error("volume {name:?} exists already; choose another name, or delete it first")]
    VolumeExists {
        /// The name.
        name: String,
    },
    /// The name is the volume's own.
    #[error("volume {name:?}: that is its name already")]
    SameName {
        /// The name.
        name: String,
    },
    /// No such volume.
    #[error(
        "there is no volume {name:?} in the pool{}; `pmvol volume create` makes one",
        known_text(known)
    )]
    NoSuchVolume {
        /// The name.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Somebody in this process has the volume open.
    #[error("volume {name:?} is in use; end what uses it first")]
    VolumeInUse {
        /// The name.
        name: String,
    },
    /// The volume has holes that it should not have, or a kind this code does not serve.
    #[error("volume {name:?} cannot be used: {reason}; see `pmvol check`")]
    VolumeUnusable {
        /// The name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A raw volume has no sectors.
    #[error("volume {name:?} is raw: it has no BTT, and no sectors")]
    NotBtt {
        /// The name.
        name: String,
    },
    /// A crash came while the volume was made of a part of another.
    #[error(
        "volume {name:?} is a part of one that was split, which did not finish; the next who opens the pool for writing finishes it"
    )]
    VolumeUnfinished {
        /// The name.
        name: String,
    },
    /// A volume cannot be split as asked.
    #[error("volume {name:?} cannot be split: {reason}")]
    Split {
        /// The name.
        name: String,
        /// Why.
        reason: SplitError,
    },
    /// A volume that is whole was to be given up.
    #[error(
        "volume {name:?} lacks nothing, so it is not given up; `pmvol volume delete` deletes it"
    )]
    VolumeLacksNothing {
        /// The name.
        name: String,
    },
    /// The volume table is full.
    #[error("the pool has room for {limit} volumes and has that many; delete one first")]
    NoVolumeSlot {
        /// How many fit.
        limit: u32,
    },
    /// An extent was given back that is not lent.
    #[error("extent {extent} is not lent as memory")]
    NotLent {
        /// The extent.
        extent: Extent,
    },
    /// The pool was opened for reading.
    #[error("pool {path}: it is open for reading only, and this would change it")]
    ReadOnly {
        /// The pool.
        path: PathBuf,
    },
    /// A persist failed earlier, so what is durable is not known.
    #[error("pool {path}: read-only since a write to it failed ({cause}); open it again to go on")]
    Latched {
        /// The pool.
        path: PathBuf,
        /// The first failure.
        cause: String,
    },
    /// The media failed. The pool is read-only from here on.
    #[error("the pool's media failed; the pool is read-only until it is opened again")]
    Media(#[from] MediaError),
    /// The log has no room for the operation's words.
    #[error(
        "the pool's log has {log_bytes} bytes, and the operation needs {needed_bytes}; make a new volume instead"
    )]
    LogTooSmall {
        /// What the superblock says.
        log_bytes: u64,
        /// What is needed.
        needed_bytes: u64,
    },
    /// A volume's BTT cannot reach as far as asked.
    #[error(transparent)]
    BttGrowth(btt::ExtendError),
    /// The BTT format does not fit the volume.
    #[error(transparent)]
    Btt(#[from] btt::GeometryError),
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

/// How many names an error lists.
const FEW: usize = 8;

fn few(names: &[String]) -> String {
    let (listed, more) = names.split_at(names.len().min(FEW));
    match more.len() {
        0 => listed.join(", "),
        count => format!("{} and {count} more", listed.join(", ")),
    }
}

fn known_text(known: &[String]) -> String {
    if known.is_empty() { ": it has none".to_owned() } else { format!(": it has {}", few(known)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_a_few_are_listed() {
        let names: Vec<_> = (0..1000).map(|number| format!("v{number}")).collect();
        let known = names.clone();
        let text = PoolError::NoSuchVolume { name: "w".to_owned(), known }.to_string();
        assert!(text.contains("v0, v1, v2, v3, v4, v5, v6, v7 and 992 more;"), "{text}");
        let text = PoolError::DeviceHasVolumes { path: "p".into(), volumes: names[..2].to_vec() }
            .to_string();
        assert!(text.contains("the volumes v0, v1;"), "{text}");
    }

    #[test]
    fn a_file_of_the_wrong_length_is_named_in_the_command_that_mends_it() {
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
