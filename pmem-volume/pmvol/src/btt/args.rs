//! The command line of `pmvol btt`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::args::{Output, volume_name};

#[derive(Subcommand)]
pub(crate) enum BttCommand {
    /// Show the arenas of a BTT with their place, sectors and state
    ///
    /// Works while a VM uses the pool.
    #[command(after_help = "\
Examples:
  pmvol btt info /pm/pool data
  pmvol btt info /pm/pool data --json | jq .sectors
  pmvol btt info --file /dev/pmem0  a namespace without a pool")]
    Info {
        #[command(flatten)]
        location: Location,
        #[command(flatten)]
        output: Output,
    },
    /// Check without changes that the map and log of each arena reference every block exactly once
    ///
    /// Leftovers of a crash, which the next writer completes, are noted, but are not damage. No
    /// other program may have the pool or the file open for writing; a kernel or QEMU that uses a
    /// file is not detected.
    ///
    /// Exit code 0: no damage, 1: damage, 2: the BTT cannot be read, or the command line is wrong.
    #[command(after_help = "\
Examples:
  pmvol btt check /pm/pool data
  pmvol btt check /pm/pool data --json | jq .clean
  pmvol btt check --file media.img  a namespace's media in a file, as Linux writes it")]
    Check {
        #[command(flatten)]
        location: Location,
        #[command(flatten)]
        output: Output,
    },
    /// Repair a BTT from its redundant records
    ///
    /// An info block is restored from its copy. An invalid lane of the log gets an unused block. A
    /// sector that is mapped to no block gets the only unused block; several such sectors are
    /// marked as lost, and reads of them fail until they are written. The error flag, which makes
    /// an arena read-only, is cleared if no other damage is left. Each step is printed before it is
    /// taken.
    ///
    /// Readable sectors keep their content, and no block that may hold data is written. If two
    /// sectors share a block, or a sector and the log do, the repair changes neither, and the arena
    /// stays read-only. Copy the readable sectors with `pmvol btt export`, or mark these sectors as
    /// lost with --give-up-sectors.
    ///
    /// Exit code 0: no damage is left (with --dry-run: would be left), 1: damage is left, 2: the
    /// BTT cannot be read.
    #[command(after_help = "\
Examples:
  pmvol btt repair /pm/pool data --dry-run  print the repairs alone
  pmvol btt repair /pm/pool data
  pmvol btt repair --file media.img --give-up-sectors")]
    Repair {
        #[command(flatten)]
        location: Location,
        /// Print the repairs without making them
        #[arg(long)]
        dry_run: bool,
        /// Mark sectors that share a block as lost, so that the arena becomes writable
        #[arg(long)]
        give_up_sectors: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Print sectors, as bytes or in hexadecimal
    ///
    /// A terminal always gets hexadecimal. A sector that cannot be read is named, and printed as
    /// zeros. The exit code is 1 in this case, or if other damage is found in the volume.
    #[command(after_help = "\
Examples:
  pmvol btt read /pm/pool data --sector 0 --hex
  pmvol btt read /pm/pool data --sector 2048 --count 8 > sectors.bin
  pmvol btt read --file media.img --sector 7 --hex")]
    Read {
        #[command(flatten)]
        location: Location,
        /// First sector, counted from 0
        #[arg(long, value_name = "NUMBER")]
        sector: u64,
        /// Number of sectors
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        count: u64,
        /// Print hexadecimal and text
        #[arg(long)]
        hex: bool,
    },
    /// Write whole sectors from stdin or a file
    ///
    /// After a crash, each sector is the old one or the new one.
    #[command(after_help = "\
Examples:
  pmvol btt write /pm/pool data --sector 0 < boot.bin
  pmvol btt write /pm/pool data --sector 2048 --from sectors.bin")]
    Write {
        #[command(flatten)]
        location: Location,
        /// First sector, counted from 0
        #[arg(long, value_name = "NUMBER")]
        sector: u64,
        /// File to read [default: stdin]
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
    },
    /// Copy sectors to an image file, as `pmvol volume export` does, also with --file
    #[command(after_help = "Example:\n  pmvol btt export --file media.img --to sectors.img")]
    Export {
        #[command(flatten)]
        location: Location,
        #[command(flatten)]
        options: ExportOptions,
    },
    /// Fill a volume from an image file, as `pmvol volume import` does, also with --file
    #[command(after_help = "Example:\n  pmvol btt import --file media.img --from sectors.img")]
    Import {
        #[command(flatten)]
        location: Location,
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
    /// Replace existing data of the volume, also past the end of the image
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Location of a BTT.
#[derive(Args, Serialize)]
pub(crate) struct Location {
    /// Pool; omitted with --file
    #[arg(required_unless_present = "file", requires = "volume")]
    #[serde(rename = "path", skip_serializing_if = "Option::is_none")]
    pub(crate) pool: Option<PathBuf>,
    /// Name of the volume
    #[arg(value_parser = volume_name())]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) volume: Option<String>,
    /// File or device with a BTT, instead of a volume: the media of a namespace as seen by Linux
    /// (/dev/pmem0, or the file behind the NVDIMM of a guest)
    #[arg(long, value_name = "MEDIA", conflicts_with_all = ["pool", "volume"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
}

impl Location {
    pub(crate) fn volume(pool: &Path, name: &str) -> Self {
        Self { pool: Some(pool.to_owned()), volume: Some(name.to_owned()), file: None }
    }

    /// Returns the path of the file or device that contains the BTT.
    pub(crate) fn path(&self) -> &Path {
        self.pool.as_deref().or(self.file.as_deref()).expect("a command line has one of them")
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// Plain bytes
    Raw,
    /// QEMU's copy-on-write format, by `qemu-img convert`
    Qcow2,
}
