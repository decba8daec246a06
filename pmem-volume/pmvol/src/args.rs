//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use foreshore_types::similar::suggestion;
use foreshore_types::size::{self, SizeError};
use pmem_volume::pool::VolumeName;
use pmem_volume::{VolumeFormat, VolumeSize};

use super::btt::{BttCommand, ExportOptions, ImageFormat, ImportOptions};

const EXAMPLES: &str = "\
Examples:
  pmvol create /pm/pool --size 16G --reserve 4G    a pool of 16 GiB, of which 4 GiB are for volumes
  pmvol create /dev/dax0.0                         a pool on all of a device
  pmvol volume create /pm/pool data --size 8G      a volume with atomic sectors (BTT)
  pmvol grow /pm/pool --size 32G                   to 32 GiB, without moving data
  pmvol volume resize /pm/pool data --size 16G
  pmvol volume create /pm/pool rest --size remaining
  pmvol volume list /pm/pool
  pmvol btt check /pm/pool data                    check map and log
  pmvol volume export /pm/pool data --to data.img  copy its sectors to an image
  pmvol volume import /pm/pool data --from data.img
  pmvol volume rename /pm/pool data data-2026
  pmvol volume delete /pm/pool data-2026 --force   erase it with its data
  pmvol volume split /pm/pool rest --into logs=8G --into home=rest
  pmvol info /pm/pool                              works while a VM uses the pool
  pmvol check /pm/pool                             exit code 1 for a damaged pool
  pmvol repair /pm/pool --dry-run
  pmvol scrub /pm/pool                             erase the memory that a killed VM has left
";

const BOUNDS: &str = "\
Sizes of pools and volumes are multiples of 2 MiB. A pool has at least 8 MiB, a volume with BTT
18 MiB, one without 2 MiB.";

/// Version, and commit and date of the build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\n", env!("FORESHORE_BUILD"));

/// Exit status for the manual pages.
pub(crate) const EXIT_STATUS: &str = "\
0: success; of check and repair: no damage. 1: failure, with the reason on standard error; of check and repair: damage; \
of btt read and export: unreadable sectors. 2: wrong command line; of check and repair: the pool cannot be read, for \
example because it is in use.";

/// Manage pools of persistent memory and their volumes
#[derive(Parser)]
#[command(name = "pmvol", version, long_version = VERSION, after_help = format!("{EXAMPLES}\n{}\n{BOUNDS}", size::HELP))]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Create a pool in a new file, on a block device or on a devdax device
    ///
    /// On a disk file system, all blocks of the file are allocated; tmpfs allocates memory on use.
    /// The part of a device that the pool gets is erased first, which takes time; an interruption
    /// leaves no pool. A device that is mounted or otherwise in use is refused.
    #[command(after_help = "\
Examples:
  pmvol create /pm/pool --size 16G --reserve 4G
  pmvol create /srv/pool --size 1T --thin  a file that allocates blocks on use
  pmvol create /dev/nvme1n1                all of a block device
  pmvol create /dev/dax0.0 --reserve 64G   all of a devdax device")]
    Create {
        /// File to create, or device
        pool: PathBuf,
        /// Size of the pool, a multiple of 2M and at least 8M; required for a file [default: all of
        /// a device]
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<u64>,
        /// Part that is reserved for volumes and never lent as memory; cannot be changed
        #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
        reserve: u64,
        /// Allocate the blocks of a file on disk on first use
        ///
        /// The file system must not become full: a guest that needs a block of it for its memory or
        /// its volume would stop. A file on tmpfs is always thin.
        #[arg(long)]
        thin: bool,
        /// Erase data on the device
        ///
        /// Even with this flag, a device in use and a pool that may have volumes are refused.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Enlarge a pool
    ///
    /// Volumes keep their content. If a VM uses the pool, --api-socket is required. After a crash,
    /// the pool has its old size or the new one. The added part of a device is erased first.
    #[command(after_help = "\
Examples:
  pmvol grow /pm/pool --size 32G
  pmvol grow /pm/pool --size 32G --api-socket /run/vm.sock  while a VM uses it
  pmvol grow /dev/vg0/pool  to all of the device, after it has grown")]
    Grow {
        /// Pool
        pool: PathBuf,
        /// New size, a multiple of 2M; required for a file [default: all of a device]
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<u64>,
        /// Erase data in the added part of a device
        #[arg(long)]
        force: bool,
        /// API socket of a VM, which grows the pool if it is in use
        #[arg(long, value_name = "PATH")]
        api_socket: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Show a pool and its use of space
    ///
    /// Works while a VM uses the pool.
    #[command(after_help = "\
Examples:
  pmvol info /pm/pool
  pmvol info /pm/pool --json | jq .free_bytes")]
    Info {
        /// Pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Check a pool and its volumes, without changes
    ///
    /// The pool must not be in use. Leftovers of a crash are noted, but are not damage. Free space
    /// is read to check that it is empty, except for holes of a sparse file.
    ///
    /// Exit code 0: no damage, 1: damage, 2: the pool cannot be read, or the command line is wrong.
    #[command(after_help = "\
Examples:
  pmvol check /pm/pool
  pmvol check /pm/pool --json | jq .clean")]
    Check {
        /// Pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Repair a pool from its redundant records
    ///
    /// A record is restored from its copy, by a single bit that corrects its checksum, or from the
    /// other records. Other damage is listed and remains. Run it on a copy of the pool if there is
    /// space for one.
    ///
    /// Exit code 0: no damage is left (with --dry-run: would be left), 1: damage is left, 2: the
    /// pool cannot be read.
    #[command(after_help = "\
Examples:
  pmvol repair /pm/pool --dry-run  print the repairs alone
  pmvol repair /pm/pool
  pmvol repair /pm/pool --give-up-volume data")]
    Repair {
        /// Pool
        pool: PathBuf,
        /// Print the repairs without making them
        #[arg(long)]
        dry_run: bool,
        /// Delete this volume, whose missing chunks cannot be found, and erase all free space,
        /// because it may contain those chunks. Copy the pool first if the rest of the volume
        /// matters
        #[arg(long, value_name = "NAME", value_parser = volume_name())]
        give_up_volume: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Erase the memory that earlier VMs have left
    ///
    /// A VM that was killed leaves the content of its memory in the pool. It is erased before
    /// anything uses it, at the latest while the next VM runs, so this command is optional. It
    /// erases the content at once, and returns memory to the host on tmpfs and in thin files.
    #[command(after_help = "Example:\n  pmvol scrub /pm/pool")]
    Scrub {
        /// Pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Create, list, resize, convert, compact, split, rename, export, import and delete volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Check and repair BTTs, read and write single sectors
    #[command(subcommand)]
    Btt(BttCommand),
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  pmvol completion bash > /usr/share/bash-completion/completions/pmvol
  pmvol completion zsh > /usr/share/zsh/site-functions/_pmvol
  source <(pmvol completion bash)      for this shell alone")]
    Completion {
        /// Shell
        #[arg(value_enum)]
        shell: foreshore_cli::Shell,
    },
    /// Print the manual page, or write the pages of all commands
    #[command(after_help = "\
Examples:
  pmvol man | man -l -
  pmvol man /usr/share/man/man1")]
    Man {
        /// Folder for the pages, created if it is missing
        folder: Option<PathBuf>,
    },
}

/// Allocation of a volume's chunks.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Allocation {
    /// Allocate chunks when they are first written
    #[arg(long)]
    pub(crate) thin: bool,
    /// Allocate all chunks
    #[arg(long)]
    pub(crate) thick: bool,
}

#[derive(Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume, empty or from an image
    ///
    /// A pool has space for 1024 volumes. A BTT volume needs at least 18 MiB, 4 KiB in front and an
    /// arena of 16 MiB, in multiples of 2 MiB; a raw one needs 2 MiB.
    ///
    /// With --from, the volume gets its name when the import is complete. A failed import deletes
    /// it. A killed import leaves a volume NAME.importing, which has to be deleted with --force.
    #[command(after_help = "\
Examples:
  pmvol volume create /pm/pool data --size 8G
  pmvol volume create /pm/pool dax --size 2G --format raw
  pmvol volume create /pm/pool rest --size remaining
  pmvol volume create /pm/pool logs --size 64G --reserve 8G   only 8G are guaranteed
  pmvol volume create /pm/pool fast --size 8G --thick         all of its space is allocated
  pmvol volume create /pm/pool root --from debian.img
  pmvol volume create /pm/pool root --from debian.qcow2 --image-format qcow2 --size 8G")]
    Create {
        /// Pool
        pool: PathBuf,
        /// Name of the volume: up to 64 bytes of letters and digits (of any script), `.`, `_` and
        /// `-`; the first is neither `.` nor `-`
        #[arg(value_parser = volume_name())]
        name: String,
        /// Size of the volume, a multiple of 2M, or `remaining` for all free space. `remaining`
        /// leaves no space for --pm-memory of a VM; create=on,size=remaining of --pm-volume leaves
        /// as much as the VM may need. With --from FILE, the default is the smallest size that
        /// holds the image
        #[arg(
            long,
            value_name = "SIZE",
            value_parser = parse_volume_size,
            required_unless_present = "from"
        )]
        size: Option<VolumeSize>,
        /// Format of the volume
        #[arg(long, value_parser = volume_format(), default_value_t = VolumeFormat::Btt)]
        format: VolumeFormat,
        /// Create a thin volume: chunks are allocated when they are first written (default for btt)
        ///
        /// The rest of its size stays promised to the volume in the pool, unless --reserve limits
        /// the promise.
        #[arg(long)]
        thin: bool,
        /// Allocate all chunks when the volume is created (default for raw)
        #[arg(long, conflicts_with = "thin")]
        thick: bool,
        /// Guarantee only this part of a thin volume, a multiple of 2M from 0 to its size
        ///
        /// Beyond this part, a write needs free space that no volume was promised.
        #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "thick")]
        reserve: Option<u64>,
        /// Fill the volume from this image, or from stdin if it is `-`
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// Format of the image; raw by default, unless the image begins with the header of qcow2
        #[arg(long, value_enum, value_name = "FORMAT", requires = "from")]
        image_format: Option<ImageFormat>,
        #[command(flatten)]
        output: Output,
    },
    /// List the volumes of a pool
    ///
    /// USABLE is the size that a guest sees: the sectors of a BTT, or all of a raw volume. It is
    /// `-` if the BTT is damaged, or if a guest has replaced it. Works while a VM uses the pool.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  pmvol volume list /pm/pool
  pmvol volume list /pm/pool --json | jq -r .volumes[].name"
    )]
    List {
        /// Pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Move the data of a thin volume together and release the rest of its space
    ///
    /// The content does not change. At most half a byte is moved for each released byte, so some
    /// space may remain.
    #[command(after_help = "Example:\n  pmvol volume compact /pm/pool data")]
    Compact {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        #[command(flatten)]
        output: Output,
    },
    /// Make a volume thin or thick
    ///
    /// The content does not change. --thin frees chunks that contain only zeros. --thick allocates
    /// all chunks.
    #[command(after_help = "\
Examples:
  pmvol volume convert /pm/pool data --thin
  pmvol volume convert /pm/pool data --thick")]
    Convert {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        #[command(flatten)]
        allocation: Allocation,
        #[command(flatten)]
        output: Output,
    },
    /// Rename a volume
    ///
    /// VMs find volumes by name, so change their --pm-volume too. Refused while the pool is in use.
    #[command(after_help = "Example:\n  pmvol volume rename /pm/pool data data-2026")]
    Rename {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_name = "OLD", value_parser = volume_name())]
        name: String,
        /// New name, unused by other volumes
        #[arg(value_name = "NEW", value_parser = volume_name())]
        new_name: String,
        #[command(flatten)]
        output: Output,
    },
    /// Resize a volume
    ///
    /// The volume keeps its content. A BTT volume grows by further arenas, each of at least 16 MiB
    /// and with 256 blocks in reserve, so enlarge it in few large steps. Enlarge the file system in
    /// the guest afterwards (resize2fs, xfs_growfs).
    #[command(after_help = "\
Examples:
  pmvol volume resize /pm/pool data --size 16G
  pmvol volume resize /pm/pool data --size remaining
  pmvol volume resize /pm/pool dax --size 2G --shrink  a raw volume; data beyond 2G is erased
  pmvol volume resize /pm/pool logs --reserve 16G      guarantee more or less of a thin volume")]
    Resize {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        /// New size of the volume, a multiple of 2M, or `remaining` to add all free space.
        /// `remaining` leaves no space for --pm-memory of a VM; size=remaining of --pm-volume
        /// leaves as much as the VM may need
        #[arg(
            long,
            value_name = "SIZE",
            value_parser = parse_volume_size,
            required_unless_present = "reserve"
        )]
        size: Option<VolumeSize>,
        /// New guaranteed part of a thin volume, a multiple of 2M from 0 to its size
        #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with_all = ["size", "shrink"])]
        reserve: Option<u64>,
        /// Let the volume shrink; a raw volume loses the data past its new end, and a BTT volume
        /// loses only arenas without data
        #[arg(long)]
        shrink: bool,
        /// API socket of a VM, which grows a virtio-blk volume if the pool is in use
        #[arg(long, value_name = "PATH", conflicts_with_all = ["reserve", "shrink"])]
        api_socket: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Split a volume into several
    ///
    /// The parts get the chunks of the volume in the order of --into, and one of them may keep its
    /// name. After a crash, either the volume or all parts exist. Parts of a raw volume keep their
    /// bytes. A BTT cannot be cut: its content is erased, and each part gets an empty BTT, so a BTT
    /// volume that holds data requires --force.
    ///
    /// For partitions in one volume that a guest sees as one disk, use the tools of the guest:
    /// every interface supports them.
    #[command(after_help = "\
Examples:
  pmvol volume split /pm/pool data --into system=8G --into home=rest
  pmvol volume split /pm/pool dax --into dax=2G --into dax2=rest
  pmvol volume split /pm/pool data --into a=18M --into b=rest --force")]
    Split {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        /// Name and size of a part; the size is a multiple of 2M, or `rest` for the remaining space
        #[arg(long, value_name = "NAME=SIZE", required = true, value_parser = parse_part)]
        into: Vec<(String, VolumeSize)>,
        /// Split the volume even if its data is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Copy a volume to an image file, or to stdout with `--to -`
    ///
    /// A raw image file is sparse: unwritten sectors and zeros take no space. The file appears,
    /// and replaces another one, when it is complete and durable. An interrupted export leaves no
    /// file. qemu-img makes qcow2 images and must be installed; it cannot write to a pipe.
    ///
    /// Works with a damaged pool, which it does not change: sectors that cannot be read are named
    /// and are zeros in the image. The exit code is 1 if a sector cannot be read, if anything else
    /// in the volume is damaged, or if the reader of stdout closes it early.
    #[command(after_help = "\
Examples:
  pmvol volume export /pm/pool data --to data.img
  pmvol volume export /pm/pool data --to data.qcow2 --format qcow2
  pmvol volume export /pm/pool data --to - | zstd > data.img.zst")]
    Export {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        #[command(flatten)]
        options: ExportOptions,
    },
    /// Fill a volume from an image file, or from stdin with `--from -`
    ///
    /// Holes and zeros of the image take no space in the volume. In a BTT, each sector is the old
    /// one or the new one after a crash; sectors of a raw volume may be torn. Repeat an
    /// interrupted import with --force. All data is durable when the command returns.
    ///
    /// The format is never guessed: a guest can write a qcow2 header to its disk, and such a
    /// header can name files of this host. qemu-img unpacks qcow2 to a file beside the image, and
    /// must be installed. An image with a backing file or a data file is refused.
    #[command(after_help = "\
Examples:
  pmvol volume import /pm/pool data --from data.img
  pmvol volume import /pm/pool data --from debian.qcow2 --format qcow2
  zstd -dc data.img.zst | pmvol volume import /pm/pool data --from - --force")]
    Import {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        #[command(flatten)]
        options: ImportOptions,
    },
    /// Delete a volume and erase its content
    ///
    /// A volume that holds data is deleted only with --force. A BTT volume that was never written,
    /// or whose sectors were all discarded, and a raw volume of zeros hold no data. The content is
    /// erased before the command returns. A volume in use cannot be deleted, because its pool is
    /// locked.
    #[command(after_help = "\
Examples:
  pmvol volume delete /pm/pool scratch
  pmvol volume delete /pm/pool data --force  erases its data")]
    Delete {
        /// Pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        /// Delete the volume even if it holds data
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Args)]
pub(crate) struct Output {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn volume_format() -> impl TypedValueParser<Value = VolumeFormat> {
    let value = |format: VolumeFormat| {
        PossibleValue::new(format.as_str()).help(match format {
            VolumeFormat::Btt => "Block Translation Table: sectors that do not tear",
            VolumeFormat::Raw => "No format: for applications that map it (DAX)",
        })
    };
    PossibleValuesParser::new(VolumeFormat::ALL.map(value)).map(|name| {
        let mut formats = VolumeFormat::ALL.into_iter();
        formats.find(|format| format.as_str() == name).expect("the parser has refused other names")
    })
}

/// Accepts valid names of volumes. If the name is not UTF-8, the error shows its bytes, which the
/// error of clap does not.
pub(crate) fn volume_name() -> impl TypedValueParser<Value = String> {
    let text = |name: std::ffi::OsString| match name.into_string() {
        Ok(name) => check_name(name),
        Err(name) => {
            Err(format!("the volume name {name:?} is not UTF-8; use letters, digits and . _ -"))
        }
    };
    clap::builder::OsStringValueParser::new().try_map(text)
}

fn check_name(name: String) -> Result<String, String> {
    match name.parse::<VolumeName>() {
        Ok(_) => Ok(name),
        Err(error) => Err(error.to_string()),
    }
}

/// Size of a volume that takes all free space.
const REMAINING: &str = "remaining";
/// Size of the part that gets the space that the other parts leave.
const REST: &str = "rest";

fn parse_volume_size(text: &str) -> Result<VolumeSize, String> {
    parse_size_or(REMAINING, text)
}

/// Parses a size or `word`, which stands for the remaining space.
fn parse_size_or(word: &str, text: &str) -> Result<VolumeSize, String> {
    if text == word {
        return Ok(VolumeSize::Remaining);
    }
    size::parse(text).map(VolumeSize::Bytes).map_err(|error| match error {
        SizeError::Malformed { .. } => format!("{error}, or {word}{}", suggestion(text, [word])),
        other => other.to_string(),
    })
}

fn parse_part(text: &str) -> Result<(String, VolumeSize), String> {
    let (name, size) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=SIZE or NAME=rest"))?;
    let size = parse_size_or(REST, size)?;
    Ok((check_name(name.to_owned())?, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_about_a_misspelled_word_suggests_the_right_one() {
        use clap::CommandFactory;

        assert!(foreshore_cli::misspelled::check_suggestions(&Arguments::command()) > 0);
        let error = parse_volume_size("remaning").unwrap_err();
        assert_eq!(
            error,
            r#""remaning" is not a size: bytes, or a number with K, M, G or T, or remaining (did you mean 'remaining'?)"#
        );
        assert!(parse_part("data=rst").unwrap_err().ends_with("or rest (did you mean 'rest'?)"));
        assert_eq!(
            parse_volume_size("1.3").unwrap_err(),
            r#""1.3" is not a whole number of bytes"#
        );
    }

    #[test]
    fn commands_in_the_book_are_valid() {
        let commands = foreshore_cli::book::commands("pmvol");
        assert!(commands.len() > 10, "{commands:?}");
        for command in commands {
            let words =
                std::iter::once("pmvol").chain(command.arguments.iter().map(String::as_str));
            if let Err(error) = Arguments::try_parse_from(words) {
                panic!("{command:?}: {error}");
            }
        }
    }
}
