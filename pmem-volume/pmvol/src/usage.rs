//! Checks of a command line before any pool, volume or image is opened.
//!
//! A command line is wrong if no pool, volume or image could make it right: a value that is invalid
//! by itself, or flags that contradict each other. The exit code is then 2. If the pool, the volume
//! or the image refuses a valid command line, the exit code is 1.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use pmem_volume::pool::{
    PoolError, SplitError, check_parts, check_pool_sizes, check_volume_reserve, check_volume_size,
};
use pmem_volume::{VolumeFormat, VolumeSize};
use thiserror::Error;

use super::args::{Arguments, Command, VolumeCommand};
use super::btt::{BttCommand, ExportOptions, ImageFormat, ImportOptions, is_stdio};

/// Reason for refusing a thin raw volume.
pub(crate) const RAW_IS_THICK: &str =
    "a raw volume cannot be thin, because no interface could serve it";

/// Error in a command line.
#[derive(Debug, Error)]
pub(crate) enum UsageError {
    #[error("{flag}: {source}")]
    Size { flag: &'static str, source: PoolError },
    #[error("--into: {0}")]
    Parts(SplitError),
    #[error("{name:?} is both the old and the new name; choose another new name")]
    SameName { name: String },
    #[error("{flag}: {RAW_IS_THICK}; leave --format raw out")]
    ThinRaw { flag: &'static str },
    #[error("--size: the size of stdin is unknown; set the size of the volume")]
    StdinSize,
    #[error(
        "{flag} -: qcow2 cannot be streamed, because its reader and its writer seek; use a file, or leave {format_flag} out"
    )]
    Qcow2Stream { flag: &'static str, format_flag: &'static str },
    #[error("--to -: --json prints on stdout, which receives the image; leave one of them out")]
    JsonWithImage,
}

/// Parses and checks the command line.
pub(crate) fn parse() -> Result<Arguments, clap::Error> {
    let mut program = Arguments::command();
    let matches = program.try_get_matches_from_mut(std::env::args_os())?;
    let arguments =
        Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut program))?;
    match check(&arguments.command) {
        Ok(()) => Ok(arguments),
        Err(error) => {
            Err(used_command(&mut program, &matches).error(ErrorKind::ValueValidation, error))
        }
    }
}

/// Returns the innermost command of the command line, whose usage an error shows.
fn used_command<'a>(command: &'a mut clap::Command, matches: &ArgMatches) -> &'a mut clap::Command {
    match matches.subcommand() {
        Some((name, matches)) => {
            let command = command.find_subcommand_mut(name).expect("clap has matched it");
            used_command(command, matches)
        }
        None => command,
    }
}

fn check(command: &Command) -> Result<(), UsageError> {
    match command {
        Command::Create { size, reserve, .. } => {
            check_pool_sizes(*size, *reserve).map_err(|source| match source {
                PoolError::Size { quantity: "reserve", .. } => {
                    UsageError::Size { flag: "--reserve", source }
                }
                source => size_error(source),
            })
        }
        Command::Grow { size: Some(size), .. } => {
            check_pool_sizes(Some(*size), 0).map_err(size_error)
        }
        Command::Volume(command) => check_volume(command),
        Command::Btt(BttCommand::Export { options, .. }) => check_export(options),
        Command::Btt(BttCommand::Import { options, .. }) => check_import(options),
        _ => Ok(()),
    }
}

fn check_volume(command: &VolumeCommand) -> Result<(), UsageError> {
    match command {
        VolumeCommand::Create { thin: true, format: VolumeFormat::Raw, .. } => {
            Err(UsageError::ThinRaw { flag: "--thin" })
        }
        VolumeCommand::Create { reserve: Some(_), format: VolumeFormat::Raw, .. } => {
            Err(UsageError::ThinRaw { flag: "--reserve" })
        }
        VolumeCommand::Create { size, format, reserve, from, image_format, .. } => {
            check_size(*size, Some(*format))?;
            check_reserve(*reserve, *size)?;
            let Some(from) = from else { return Ok(()) };
            check_image_source(from, *image_format, "--image-format")?;
            match size {
                None if is_stdio(from) => Err(UsageError::StdinSize),
                _ => Ok(()),
            }
        }
        VolumeCommand::Resize { size, reserve, .. } => {
            check_size(*size, None)?;
            check_reserve(*reserve, None)
        }
        VolumeCommand::Rename { name, new_name, .. } if name == new_name => {
            Err(UsageError::SameName { name: name.clone() })
        }
        VolumeCommand::Split { into, .. } => check_parts(into).map_err(UsageError::Parts),
        VolumeCommand::Export { options, .. } => check_export(options),
        VolumeCommand::Import { options, .. } => check_import(options),
        _ => Ok(()),
    }
}

fn check_size(size: Option<VolumeSize>, format: Option<VolumeFormat>) -> Result<(), UsageError> {
    match size {
        Some(VolumeSize::Bytes(bytes)) => check_volume_size(bytes, format).map_err(size_error),
        _ => Ok(()),
    }
}

/// Checks the guaranteed part of a volume. The size may depend on the pool or an image.
fn check_reserve(reserve: Option<u64>, size: Option<VolumeSize>) -> Result<(), UsageError> {
    let size_bytes = match size {
        Some(VolumeSize::Bytes(bytes)) => bytes,
        _ => u64::MAX,
    };
    let check = |bytes| check_volume_reserve(bytes, size_bytes);
    reserve.map_or(Ok(()), check).map_err(|source| UsageError::Size { flag: "--reserve", source })
}

fn size_error(source: PoolError) -> UsageError {
    UsageError::Size { flag: "--size", source }
}

fn check_export(options: &ExportOptions) -> Result<(), UsageError> {
    match is_stdio(&options.to) {
        true if options.format == ImageFormat::Qcow2 => {
            Err(UsageError::Qcow2Stream { flag: "--to", format_flag: "--format" })
        }
        true if options.output.json => Err(UsageError::JsonWithImage),
        _ => Ok(()),
    }
}

fn check_import(options: &ImportOptions) -> Result<(), UsageError> {
    check_image_source(&options.from, options.format, "--format")
}

fn check_image_source(
    from: &Path,
    format: Option<ImageFormat>,
    format_flag: &'static str,
) -> Result<(), UsageError> {
    match format {
        Some(ImageFormat::Qcow2) if is_stdio(from) => {
            Err(UsageError::Qcow2Stream { flag: "--from", format_flag })
        }
        _ => Ok(()),
    }
}
