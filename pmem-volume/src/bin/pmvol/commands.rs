//! What each command does.

use std::path::Path;

use pmem_volume::{CreateOptions, OpenMode, Pool, PoolError, Shrink};

use super::args::{Arguments, Command, Output, VolumeCommand};
use super::{manual, print};

/// How a command ended that did not fail.
pub(crate) enum Outcome {
    /// Well.
    Done,
    /// A check found damage.
    Unclean,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Outcome> {
    match &arguments.command {
        Command::Create { pool, size, strg, thin, force } => {
            let (size_bytes, strg_bytes) = (*size, *strg);
            create(pool, CreateOptions { size_bytes, strg_bytes, thin: *thin, force: *force, progress: None })
        }
        Command::Grow { pool, size } => {
            let grown = Pool::grow_with(pool, *size, &mut |_| {}).map_err(with_flag)?;
            print::pool_grown(pool, &grown.info());
            Ok(Outcome::Done)
        }
        Command::Info { pool, output } => info(pool, output),
        Command::Check { pool, output } => check(pool, output),
        Command::Repair { pool, dry_run, output } => {
            let report = Pool::repair(pool, *dry_run)?;
            if output.json {
                print::json(&report)?
            } else {
                print::repair(&report, *dry_run)
            }
            Ok(if report.left.is_empty() { Outcome::Done } else { Outcome::Unclean })
        }
        Command::Completion { shell } => manual::completion(*shell).map(|()| Outcome::Done),
        Command::Man { folder } => manual::pages(folder.as_deref()).map(|()| Outcome::Done),
        Command::Volume(VolumeCommand::Create { pool, name, size, format }) => {
            let volume = open(pool, OpenMode::ReadWrite)?
                .create_volume(name, *size, (*format).into())
                .map_err(with_flag)?;
            print::volume_made(&volume);
            Ok(Outcome::Done)
        }
        Command::Volume(VolumeCommand::List { pool, output }) => {
            let volumes = open(pool, OpenMode::Peek)?.volumes();
            if output.json {
                print::json(&volumes)?
            } else {
                print::volumes(&volumes)
            }
            Ok(Outcome::Done)
        }
        Command::Volume(VolumeCommand::Resize { pool, name, size, shrink }) => {
            let shrink = if *shrink { Shrink::Allow } else { Shrink::Refuse };
            let pool = open(pool, OpenMode::ReadWrite)?;
            let volume = pool.resize_volume(name, *size, shrink).map_err(with_flag)?;
            if shrink == Shrink::Allow {
                pool.scrub_all()?;
            }
            print::volume_resized(&volume);
            Ok(Outcome::Done)
        }
        Command::Volume(VolumeCommand::Rename { pool, name, new_name }) => {
            let volume = open(pool, OpenMode::ReadWrite)?.rename_volume(name, new_name)?;
            println!("volume {name} renamed to {}", volume.name);
            Ok(Outcome::Done)
        }
        Command::Volume(VolumeCommand::Delete { pool, name }) => {
            let pool = open(pool, OpenMode::ReadWrite)?;
            pool.delete_volume(name)?;
            // Nobody else would do it before the pool is opened by a VMM, and who deletes a volume may want to be sure.
            pool.scrub_all()?;
            println!("volume {name} deleted");
            Ok(Outcome::Done)
        }
    }
}

fn open(path: &Path, mode: OpenMode) -> anyhow::Result<std::sync::Arc<Pool>> {
    Ok(Pool::open(path, mode)?)
}

/// Puts the flag before an error about its value.
fn with_flag(error: PoolError) -> anyhow::Error {
    let flag = match &error {
        PoolError::Size { what: "STRG size", .. } => Some("--strg"),
        PoolError::Size { .. }
        | PoolError::PoolFull { .. }
        | PoolError::FileSystemFull { .. }
        | PoolError::DeviceTooSmall { .. }
        | PoolError::SizeNeeded { .. }
        | PoolError::BttGrowth(_)
        | PoolError::Btt(_) => Some("--size"),
        PoolError::ThinDevice { .. } => Some("--thin"),
        _ => None,
    };
    match flag {
        Some(flag) => anyhow::Error::new(error).context(flag),
        None => error.into(),
    }
}

fn create(path: &Path, options: CreateOptions<'_>) -> anyhow::Result<Outcome> {
    let pool = Pool::create_with(path, options).map_err(with_flag)?;
    print::pool_made(path, &pool.info());
    Ok(Outcome::Done)
}

fn info(path: &Path, output: &Output) -> anyhow::Result<Outcome> {
    let pool = open(path, OpenMode::Peek)?;
    let report = print::InfoReport::new(path, &pool);
    if output.json {
        print::json(&report)?
    } else {
        print::info(&report)
    }
    Ok(Outcome::Done)
}

fn check(path: &Path, output: &Output) -> anyhow::Result<Outcome> {
    let report = open(path, OpenMode::ReadOnly)?.check()?;
    if output.json {
        print::json(&report)?
    } else {
        print::check(&report)
    }
    Ok(if report.is_clean() { Outcome::Done } else { Outcome::Unclean })
}
