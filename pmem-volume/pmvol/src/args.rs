//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use foreshore_types::size::{self, SizeError};
use pmem_volume::{VolumeFormat, VolumeSize};

use super::btt::{BttCommand, ExportOptions, ImageFormat, ImportOptions};

const EXAMPLES: &str = "\
Examples:
  pmvol create /pm/pool --size 16G --strg 4G      a pool of 16 GiB, 4 of them kept for volumes
  pmvol create /dev/dax0.0                        a pool on all of a device
  pmvol volume create /pm/pool data --size 8G     a volume with atomic sectors (BTT)
  pmvol grow /pm/pool --size 32G                  to 32 GiB, nothing moves
  pmvol volume resize /pm/pool data --size 16G
  pmvol volume create /pm/pool rest --size remaining
  pmvol volume list /pm/pool
  pmvol btt check /pm/pool data                   its map and its log
  pmvol volume export /pm/pool data --to data.img  its sectors, in an image file
  pmvol volume import /pm/pool data --from data.img
  pmvol volume rename /pm/pool data data-2026
  pmvol volume delete /pm/pool data-2026 --force  erases it with its data
  pmvol volume split /pm/pool rest --into logs=8G --into home=rest
  pmvol info /pm/pool                             also while a VM uses the pool
  pmvol check /pm/pool                            exit code 1 if anything is damaged
  pmvol repair /pm/pool --dry-run
  pmvol scrub /pm/pool                            erases what a VM that was killed has left
";

const BOUNDS: &str = "\
Sizes of pools and volumes are multiples of 2 MiB. A pool has at least 8 MiB, a volume with BTT
18 MiB, one without 2 MiB.";

/// Version, and commit and date of the build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\n", env!("FORESHORE_BUILD"));

/// What manual pages say of how a command ends.
pub(crate) const EXIT_STATUS: &str = "\
0: done; of check and repair: all is well. 1: it failed, and stderr says why; of check and repair: something is damaged; \
of btt read and export: not everything could be read. 2: the command line is wrong; of check and repair: the pool could \
not be looked at, because it is in use for instance.";

/// Pools of persistent memory and the volumes in them.
#[derive(Parser)]
#[command(name = "pmvol", version, long_version = VERSION, after_help = format!("{EXAMPLES}\n{}\n{BOUNDS}", size::HELP))]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make a pool in a new file, on a block device or on a devdax device
    ///
    /// On a disk file system all of the file is allocated; on tmpfs memory is taken when it is
    /// used. Of a device, all that
    /// the pool gets is erased first, which takes its time; if that is interrupted there is no
    /// pool. A device that is
    /// mounted, or otherwise in use, is refused.
    #[command(after_help = "\
Examples:
  pmvol create /pm/pool --size 16G --strg 4G
  pmvol create /srv/pool --size 1T --thin      a file that takes blocks when they are used
  pmvol create /dev/nvme1n1                    all of a block device
  pmvol create /dev/dax0.0 --strg 64G          all of a devdax device")]
    Create {
        /// The file to make, or the device
        pool: PathBuf,
        /// Size of the pool, a multiple of 2M and at least 8M; of a device, all of it if nothing is
        /// said
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<u64>,
        /// How much of it is kept for volumes and never lent as memory. Fixed from then on
        #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
        strg: u64,
        /// Let a file on a disk take blocks only for what is used
        ///
        /// Then the file system must not become full: a guest that needs a block for its memory or
        /// its volume, and gets
        /// none, stands still there. A file on tmpfs is always thin.
        #[arg(long)]
        thin: bool,
        /// Make the pool on a device even if there is something on it, which is erased
        ///
        /// Not if that is a pool with volumes, or one that may have some, and not if the device is
        /// in use.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Make a pool larger
    ///
    /// Volumes and their content stay. The pool must not be in use; a crash leaves it at its old
    /// size or the new one. What
    /// it gets of a device is erased first.
    #[command(after_help = "\
Examples:
  pmvol grow /pm/pool --size 32G
  pmvol grow /dev/vg0/pool                  to all of the device, after that has grown")]
    Grow {
        /// The pool
        pool: PathBuf,
        /// Size that it gets, a multiple of 2M; of a device, all of it if nothing is said
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<u64>,
        /// Take more of a device even if there is something on it, which is erased
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Show what a pool is and how its bytes are used
    ///
    /// Works while a VM uses the pool.
    #[command(after_help = "\
Examples:
  pmvol info /pm/pool
  pmvol info /pm/pool --json | jq .free_bytes")]
    Info {
        /// The pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Check a pool and every volume in it, without changing anything
    ///
    /// The pool must not be in use. What a crash leaves behind by design is noted, and is no
    /// damage. Free space is read, to
    /// see that it holds nothing; holes of a sparse file are not.
    ///
    /// Exit code 0: all is well, 1: something is damaged, 2: the pool could not be looked at, or
    /// the command line is wrong.
    #[command(after_help = "\
Examples:
  pmvol check /pm/pool
  pmvol check /pm/pool --json | jq .clean")]
    Check {
        /// The pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Mend what is damaged in a pool, as far as the pool itself says what was there
    ///
    /// From the other copy of a record, by turning back a single bit that a checksum finds, or
    /// because everything else
    /// is accounted for. What none of these explains is listed and not touched. Run it on a copy if
    /// you have room for one.
    ///
    /// Exit code 0: all is well now (with --dry-run: would be), 1: something is left, 2: the pool
    /// could not be looked at.
    #[command(after_help = "\
Examples:
  pmvol repair /pm/pool --dry-run      what it would do
  pmvol repair /pm/pool
  pmvol repair /pm/pool --give-up-volume data")]
    Repair {
        /// The pool
        pool: PathBuf,
        /// Change nothing, and say what would be done
        #[arg(long)]
        dry_run: bool,
        /// Delete this volume, which lacks chunks that nothing explains, and erase again whatever
        /// is free: any of that may
        /// be one of them. Keep a copy of the pool first if what is left of the volume matters
        #[arg(long, value_name = "NAME")]
        give_up_volume: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Erase now what waits to be erased
    ///
    /// A VM that was killed leaves the memory that it had, with its content. Nobody gets any of it
    /// before it is erased, and
    /// the next VM does that while it runs, so this is never needed: it is for who wants the
    /// content gone, the host's
    /// memory back (on tmpfs and in thin files), or the next VM to find everything clean.
    #[command(after_help = "Example:\n  pmvol scrub /pm/pool")]
    Scrub {
        /// The pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Make, list, resize, split, rename, export, import and delete volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Check and repair BTTs, read and write single sectors
    #[command(subcommand)]
    Btt(BttCommand),
    /// Print a script that lets a shell complete our commands and flags
    #[command(after_help = "\
Examples:
  pmvol completion bash > /usr/share/bash-completion/completions/pmvol
  pmvol completion zsh > /usr/share/zsh/site-functions/_pmvol
  source <(pmvol completion bash)      for this shell alone")]
    Completion {
        /// The shell
        #[arg(value_enum)]
        shell: foreshore_cli::Shell,
    },
    /// Print the manual page, or write the pages of all commands
    #[command(after_help = "\
Examples:
  pmvol man | man -l -
  pmvol man /usr/share/man/man1")]
    Man {
        /// Folder for a page of each command; it is made if it is not there
        folder: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume and format it, or fill it from an image with --from
    ///
    /// A pool has room for 1024 volumes. One with BTT needs at least 18 MiB, 4 KiB in front and an
    /// arena of 16 MiB, in
    /// multiples of 2 MiB; a raw one 2 MiB.
    ///
    /// With --from, the volume gets its name when the import is complete. A failed import deletes
    /// it. A killed one leaves a volume NAME.importing, which has to be deleted with --force.
    #[command(after_help = "\
Examples:
  pmvol volume create /pm/pool data --size 8G
  pmvol volume create /pm/pool dax --size 2G --format raw
  pmvol volume create /pm/pool rest --size remaining
  pmvol volume create /pm/pool root --from debian.img
  pmvol volume create /pm/pool root --from debian.qcow2 --image-format qcow2 --size 8G")]
    Create {
        /// The pool
        pool: PathBuf,
        /// Name of the volume: up to 64 bytes of letters and digits (of any script) and . _ -, the
        /// first of them no . or -
        #[arg(value_parser = volume_name())]
        name: String,
        /// Size of the volume, a multiple of 2M, or `remaining` for all free space. `remaining`
        /// leaves nothing for
        /// --pm-memory of a VM; create=on,size=remaining of --pm-volume leaves as much as the VM
        /// may need. With --from FILE, the smallest size that holds the image by default
        #[arg(
            long,
            value_name = "SIZE",
            value_parser = parse_volume_size,
            required_unless_present = "from"
        )]
        size: Option<VolumeSize>,
        /// How its bytes are used
        #[arg(long, value_parser = volume_format(), default_value_t = VolumeFormat::Btt)]
        format: VolumeFormat,
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
        /// The pool
        pool: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Give a volume another name
    ///
    /// VMs find volumes by name, so change their --pm-volume too. Refused while the pool is in use.
    #[command(after_help = "Example:\n  pmvol volume rename /pm/pool data data-2026")]
    Rename {
        /// The pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_name = "OLD", value_parser = volume_name())]
        name: String,
        /// Name that it gets, which no other volume has
        #[arg(value_name = "NEW", value_parser = volume_name())]
        new_name: String,
        #[command(flatten)]
        output: Output,
    },
    /// Make a volume larger, or, if it is raw, smaller
    ///
    /// What is in the volume stays. A BTT volume grows by further arenas, each of at least 16 MiB
    /// and with 256 blocks in
    /// reserve, so grow it in few large steps; it cannot shrink. The file system in it stays as it
    /// is: enlarge that in the
    /// guest afterwards (resize2fs, xfs_growfs).
    #[command(after_help = "\
Examples:
  pmvol volume resize /pm/pool data --size 16G
  pmvol volume resize /pm/pool data --size remaining
  pmvol volume resize /pm/pool dax --size 2G --shrink      a raw volume; what lies behind 2G is erased")]
    Resize {
        /// The pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        /// New size of the volume, a multiple of 2M, or `remaining` to add all free space.
        /// `remaining` leaves nothing
        /// for --pm-memory of a VM; size=remaining of --pm-volume leaves as much as the VM may need
        #[arg(long, value_name = "SIZE", value_parser = parse_volume_size)]
        size: VolumeSize,
        /// Let a raw volume become smaller: what lies behind its new end is erased
        #[arg(long)]
        shrink: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Split a volume into several, each with its own name
    ///
    /// Its chunks become the parts', in the order in which they are named; after a crash the volume
    /// is as it was, or all
    /// parts are there. One of them may have its name. A raw volume's parts keep their bytes. A BTT
    /// cannot be cut: its
    /// content is erased, and its parts are empty volumes, each with a BTT of its own; so a volume
    /// that holds data is only
    /// split with --force.
    ///
    /// For partitions in one volume that a guest sees as one disk, use the guest's own tools: every
    /// interface takes them.
    #[command(after_help = "\
Examples:
  pmvol volume split /pm/pool data --into system=8G --into home=rest
  pmvol volume split /pm/pool dax --into dax=2G --into dax2=rest
  pmvol volume split /pm/pool data --into a=18M --into b=rest --force")]
    Split {
        /// The pool
        pool: PathBuf,
        /// Name of the volume
        #[arg(value_parser = volume_name())]
        name: String,
        /// A part: its name, and its size, a multiple of 2M, or `rest` for what the others leave
        #[arg(long, value_name = "NAME=SIZE", required = true, value_parser = parse_part)]
        into: Vec<(String, VolumeSize)>,
        /// Also if it holds data that its parts will not have
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
    /// and are zeros in the image. The exit code is 1 if there are any, if anything else in the
    /// volume is damaged, or if the reader of stdout closes it early.
    #[command(after_help = "\
Examples:
  pmvol volume export /pm/pool data --to data.img
  pmvol volume export /pm/pool data --to data.qcow2 --format qcow2
  pmvol volume export /pm/pool data --to - | zstd > data.img.zst")]
    Export {
        /// The pool
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
        /// The pool
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
    /// or whose sectors were all discarded, and a raw volume of zeros hold none. The content is
    /// erased before the command returns. A volume in use cannot be deleted, because its pool is
    /// locked.
    #[command(after_help = "\
Examples:
  pmvol volume delete /pm/pool scratch
  pmvol volume delete /pm/pool data --force       erases its data")]
    Delete {
        /// The pool
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

/// Any text, and bytes that are none are named: clap alone says only that some argument has them.
pub(crate) fn volume_name() -> impl TypedValueParser<Value = String> {
    let text = |name: std::ffi::OsString| {
        name.into_string().map_err(|name| {
            format!("the volume name {name:?} is not UTF-8; use letters, digits and . _ -")
        })
    };
    clap::builder::OsStringValueParser::new().try_map(text)
}

fn parse_volume_size(text: &str) -> Result<VolumeSize, SizeError> {
    if text == "remaining" {
        Ok(VolumeSize::Remaining)
    } else {
        size::parse(text).map(VolumeSize::Bytes)
    }
}

fn parse_part(text: &str) -> Result<(String, VolumeSize), String> {
    let (name, size) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=SIZE or NAME=rest"))?;
    let size = match size {
        "rest" => VolumeSize::Remaining,
        size => VolumeSize::Bytes(size::parse(size).map_err(|error| error.to_string())?),
    };
    Ok((name.to_owned(), size))
}
