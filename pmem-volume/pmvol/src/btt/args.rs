//! The command line of `pmvol btt`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::args::{Output, volume_name};

#[derive(Subcommand)]
pub(crate) enum BttCommand {
    /// Show the arenas of a BTT: where they lie, how many sectors they have, whether they take
    /// writes
    ///
    /// Works while a VM uses the pool.
    #[command(after_help = "\
Examples:
  pmvol btt info /pm/pool data
  pmvol btt info /pm/pool data --json | jq .sectors
  pmvol btt info --file /dev/pmem0                  a namespace that no pool is on")]
    Info {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        output: Output,
    },
    /// Check that map and log of each arena name every block exactly once, without changing
    /// anything
    ///
    /// What a crash leaves for the next who opens the volume is noted, and is no damage. Nobody may
    /// have the pool or the
    /// file open for writing; that a kernel or QEMU has a file is not seen.
    ///
    /// Exit code 0: all is well, 1: something is damaged, 2: it could not be looked at, or the
    /// command line is wrong.
    #[command(after_help = "\
Examples:
  pmvol btt check /pm/pool data
  pmvol btt check /pm/pool data --json | jq .clean
  pmvol btt check --file media.img                  a namespace's media in a file, as Linux leaves it")]
    Check {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        output: Output,
    },
    /// Mend what is damaged in a BTT, as far as the BTT itself says what was there
    ///
    /// An info block comes from its copy. A lane of the log that makes no sense gets a block that
    /// nobody has. A sector that
    /// is mapped to no block gets the only one that nobody has; if there are several such sectors,
    /// they are marked as lost,
    /// and reads of them fail until they are written. The error flag, which keeps an arena from
    /// being written, is cleared
    /// when nothing else is wrong. Each step is printed before it is taken; --dry-run takes none.
    ///
    /// No sector that can be read reads otherwise afterwards, and no block that may hold a sector's
    /// data is written. Where
    /// two sectors share a block, or a sector and the log, nothing says who is right: they stay,
    /// and the arena stays
    /// read-only. Then `pmvol btt export` copies out what can be read, or --give-up-sectors marks
    /// these sectors as lost.
    ///
    /// Exit code 0: all is well now (with --dry-run: would be), 1: something is left, 2: it could
    /// not be looked at.
    #[command(after_help = "\
Examples:
  pmvol btt repair /pm/pool data --dry-run          what it would do
  pmvol btt repair /pm/pool data
  pmvol btt repair --file media.img --give-up-sectors")]
    Repair {
        #[command(flatten)]
        place: Place,
        /// Change nothing, and say what would be done
        #[arg(long)]
        dry_run: bool,
        /// Mark sectors as lost that share a block, so that the arena can be written again
        #[arg(long)]
        give_up_sectors: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Print sectors, as bytes or in hexadecimal
    ///
    /// On a terminal always in hexadecimal. A sector that cannot be read is named, and printed as
    /// zeros. Then, or if
    /// anything else in the volume is damaged, the exit code is 1.
    #[command(after_help = "\
Examples:
  pmvol btt read /pm/pool data --sector 0 --hex
  pmvol btt read /pm/pool data --sector 2048 --count 8 > sectors.bin
  pmvol btt read --file media.img --sector 7 --hex")]
    Read {
        #[command(flatten)]
        place: Place,
        /// The first sector, counted from 0
        #[arg(long, value_name = "NUMBER")]
        sector: u64,
        /// How many
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        count: u64,
        /// In hexadecimal, with the text beside it
        #[arg(long)]
        hex: bool,
    },
    /// Write sectors from stdin or a file, which has whole sectors
    ///
    /// Each sector is the old one or the new one, whatever happens meanwhile.
    #[command(after_help = "\
Examples:
  pmvol btt write /pm/pool data --sector 0 < boot.bin
  pmvol btt write /pm/pool data --sector 2048 --from sectors.bin")]
    Write {
        #[command(flatten)]
        place: Place,
        /// The first sector, counted from 0
        #[arg(long, value_name = "NUMBER")]
        sector: u64,
        /// Where the bytes come from, if not from stdin
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
    },
    /// Copy sectors to an image file, as `pmvol volume export` does, also with --file
    #[command(after_help = "Example:\n  pmvol btt export --file media.img --to sectors.img")]
    Export {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        options: ExportOptions,
    },
    /// Fill a volume from an image file, as `pmvol volume import` does, also with --file
    #[command(after_help = "Example:\n  pmvol btt import --file media.img --from sectors.img")]
    Import {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        options: ImportOptions,
    },
}

#[derive(Args)]
pub(crate) struct ExportOptions {
    /// Image file to create, or `-` for raw bytes on stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) to: PathBuf,
    /// Format of the image
    #[arg(long, value_enum, default_value_t = ImageFormat::Raw)]
    pub(crate) format: ImageFormat,
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct ImportOptions {
    /// Image no larger than the volume, or `-` for raw bytes from stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) from: PathBuf,
    /// Format of the image; raw by default, unless the image begins with the header of qcow2
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    /// Replace the data of a volume that holds some, also behind the end of the image
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Where a BTT is.
#[derive(Args, Serialize)]
pub(crate) struct Place {
    /// The pool; no pool and no volume with --file
    #[arg(required_unless_present = "file", requires = "volume")]
    #[serde(rename = "path", skip_serializing_if = "Option::is_none")]
    pub(crate) pool: Option<PathBuf>,
    /// Name of the volume
    #[arg(value_parser = volume_name())]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) volume: Option<String>,
    /// A file or device with a BTT in it, instead of a volume: a namespace's media as Linux sees it
    /// (/dev/pmem0, or the file
    /// behind a guest's NVDIMM)
    #[arg(long, value_name = "MEDIA", conflicts_with_all = ["pool", "volume"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
}

impl Place {
    pub(crate) fn volume(pool: &Path, name: &str) -> Self {
        Self { pool: Some(pool.to_owned()), volume: Some(name.to_owned()), file: None }
    }

    /// The file or device that it is in.
    pub(crate) fn path(&self) -> &Path {
        self.pool.as_deref().or(self.file.as_deref()).expect("a command line has one of them")
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// The bytes as they are
    Raw,
    /// QEMU's copy-on-write format, by `qemu-img convert`
    Qcow2,
}
