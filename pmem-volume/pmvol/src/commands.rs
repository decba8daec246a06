//! Implementation of the commands.

use std::path::Path;
use std::sync::Arc;

use pmem_volume::btt::Engine;
use pmem_volume::media::{Durability, MediaError};
use pmem_volume::pool::SplitContent;
use pmem_volume::progress::OnProgress;
use pmem_volume::{
    CreateOptions, OpenMode, Pool, PoolError, Shrink, VolumeFormat, VolumeInfo, VolumeOptions,
    VolumeSize,
};
use thiserror::Error;

use super::args::{Arguments, Command, Output, VolumeCommand};
use super::btt::{self, BttCommand, Location};
use super::meter::with_meter;
use super::print::{CompactReport, PoolReport, ScrubReport, VolumesReport, print};
use super::usage::RAW_IS_THICK;
use super::{create_from, manual, print, vm};

/// Result of a command that did not fail.
pub(crate) enum Outcome {
    Done,
    /// A check found damage.
    Damaged,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Outcome> {
    match &arguments.command {
        Command::Create { pool, size, reserve, thin, force, output } => {
            let (size_bytes, reserve_bytes, thin, force) = (*size, *reserve, *thin, *force);
            let create = |progress: OnProgress<'_>| {
                let progress = Some(progress);
                Pool::create_with(
                    pool,
                    CreateOptions { size_bytes, reserve_bytes, thin, force, progress },
                )
            };
            let made = with_meter(create).map_err(|error| add_flag_context(error.into()))?;
            let report = PoolReport { path: pool, info: &made.info() };
            print(output, &report, |out| print::pool_created(out, &report))?;
            print::warn_copy_on_write(&made);
            if thin && made.durability() == Durability::Volatile {
                print::print_stderr(format_args!(
                    "--thin changes nothing: a pool in memory (tmpfs) is always thin"
                ));
            }
            Ok(Outcome::Done)
        }
        Command::Grow { pool, size, force, api_socket, output } => {
            let grown = with_meter(|progress| grow(pool, *size, *force, progress));
            let grown = match (grown.map_err(|error| add_flag_context(error.into())), api_socket) {
                (Err(error), Some(socket)) if vm::is_in_use(&error) => {
                    vm::grow_pool(socket, pool, *size, *force)?
                }
                (grown, _) => grown.map_err(vm::name_flag)?,
            };
            let report = PoolReport { path: pool, info: &grown.info() };
            print(output, &report, |out| print::pool_grown(out, &report))?;
            print::warn_waiting(&grown);
            Ok(Outcome::Done)
        }
        Command::Info { pool, output } => info(pool, output),
        Command::Check { pool, output } => check(pool, output),
        Command::Repair { pool, dry_run, give_up_volume, output } => {
            repair(pool, *dry_run, give_up_volume.as_deref(), output)
        }
        Command::Scrub { pool, output } => scrub(pool, output),
        Command::Volume(command) => volume(command),
        Command::Btt(command) => btt::run(command),
        Command::Completion { shell } => manual::completion(*shell).map(|()| Outcome::Done),
        Command::Man { folder } => manual::pages(folder.as_deref()).map(|()| Outcome::Done),
    }
}

fn volume(command: &VolumeCommand) -> anyhow::Result<Outcome> {
    match command {
        VolumeCommand::List { pool, output } => list(pool, output)?,
        VolumeCommand::Create {
            pool,
            name,
            size,
            format,
            thick,
            reserve,
            from: None,
            output,
            ..
        } => {
            let size = size.expect("clap requires it without --from");
            let (format, thin) = (*format, !*thick && format.is_thin_by_default());
            let options = VolumeOptions { size, format, thin, reserve_bytes: *reserve };
            let (pool, volume) = change_pool(pool, |pool, progress| {
                scrub_for(pool, options, progress)?;
                pool.create_volume_with(name, options)
            })?;
            let report = VolumesReport::new(&pool, &[volume]);
            print(output, &report, |out| print::volume_created(out, &report.volumes[0]))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Create {
            pool,
            name,
            size,
            format,
            thick,
            reserve,
            from: Some(from),
            image_format,
            output,
            ..
        } => {
            let source = btt::Source::open(from, *image_format)?;
            let new = create_from::NewVolume {
                name,
                size: *size,
                format: *format,
                thin: !*thick && format.is_thin_by_default(),
                reserve_bytes: *reserve,
            };
            let (pool, volume, filled) = create_from::create(pool, &new, source)?;
            let report = VolumesReport::new(&pool, &[volume]).filled(filled);
            print(output, &report, |out| {
                print::volume_created(out, &report.volumes[0])?;
                writeln!(out, "image        {}", filled.text())
            })?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Export { pool, name, options } => {
            return btt::export(&Location::volume(pool, name), options);
        }
        VolumeCommand::Import { pool, name, options } => {
            return btt::import(&Location::volume(pool, name), options);
        }
        VolumeCommand::Resize { pool, name, reserve: Some(reserve_bytes), output, .. } => {
            let (pool, volume) =
                change_pool(pool, |pool, _| pool.set_volume_reserve(name, *reserve_bytes))?;
            let report = VolumesReport::new(&pool, &[volume]);
            print(output, &report, |out| print::volume_resized(out, &report.volumes[0]))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Resize { pool, name, size, reserve: None, shrink, api_socket, output } => {
            let size = size.expect("clap requires it without --reserve");
            let shrink = if *shrink { Shrink::Allow } else { Shrink::Refuse };
            let (pool, before, volume) =
                resize_here_or_by_vm(pool, name, size, shrink, api_socket.as_deref())?;
            // A VM only grows volumes.
            let is_larger = before.is_none_or(|before| volume.size_bytes > before.size_bytes);
            let mut report = VolumesReport::new(&pool, &[volume]);
            report.hints.extend(is_larger.then(|| print::GROWTH_HINT.to_owned()));
            print(output, &report, |out| print::volume_resized(out, &report.volumes[0]))?;
            print::print_hints(output, &report.hints);
            print::warn_waiting(&pool);
        }
        VolumeCommand::Convert { pool, name, allocation, output } => {
            let (pool, volume) =
                change_pool(pool, |pool, progress| convert(pool, name, allocation.thin, progress))?;
            let report = VolumesReport::new(&pool, &[volume]);
            print(output, &report, |out| print::volume_converted(out, &report.volumes[0]))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Compact { pool, name, output } => {
            let (pool, (released_bytes, moved_bytes)) =
                change_pool(pool, |pool, progress| compact(pool, name, progress))?;
            let report =
                CompactReport { path: pool.path(), volume: name, released_bytes, moved_bytes };
            print(output, &report, |out| print::volume_compacted(out, &report))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Rename { pool, name, new_name, output } => {
            let (pool, volume) = change_pool(pool, |pool, _| pool.rename_volume(name, new_name))?;
            let report = VolumesReport::new(&pool, &[volume]).instead_of(name);
            print(output, &report, |out| writeln!(out, "volume {name} renamed to {new_name}"))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Split { pool, name, into, force, output } => {
            let content = if *force { SplitContent::Discard } else { SplitContent::Refuse };
            let (pool, parts) = change_pool(pool, |pool, progress| {
                pool.split_volume_with(name, into, content, progress)
            })?;
            let report = VolumesReport::new(&pool, &parts).instead_of(name);
            print(output, &report, |out| print::volume_split(out, name, &report.volumes))?;
            print::warn_waiting(&pool);
        }
        VolumeCommand::Delete { pool, name, force, output } => {
            let (pool, ()) =
                change_pool(pool, |pool, progress| delete(pool, name, *force, progress))?;
            let report = VolumesReport::new(&pool, &[]).instead_of(name);
            print(output, &report, |out| writeln!(out, "volume {name} deleted"))?;
        }
    }
    Ok(Outcome::Done)
}

/// Erases the chunks that a new volume needs. A thin volume needs few, which its creation erases.
pub(crate) fn scrub_for(
    pool: &Pool,
    options: VolumeOptions,
    progress: OnProgress<'_>,
) -> Result<(), PoolError> {
    if options.thin { Ok(()) } else { pool.scrub_for(options.size, progress) }
}

fn list(path: &Path, output: &Output) -> anyhow::Result<()> {
    let pool = Pool::open(path, OpenMode::Peek)?;
    let report = VolumesReport::new(&pool, &pool.volumes());
    print(output, &report, |out| print::volumes(out, &report.volumes))?;
    print::warn_pool_damage(path, &pool);
    Ok(())
}

/// Deletes a volume and erases its content. Without the erasure, the content would remain until a
/// VMM opens the pool.
fn delete(
    pool: &Arc<Pool>,
    name: &str,
    force: bool,
    progress: OnProgress<'_>,
) -> anyhow::Result<()> {
    if !force && holds_data(pool, name, &mut *progress)? {
        return Err(HoldsData { name: name.to_owned() }.into());
    }
    pool.delete_volume(name)?;
    Ok(pool.scrub_all_with(progress)?)
}

/// Error for a volume that holds data, which its deletion would destroy.
#[derive(Debug, Error)]
#[error("volume {name:?} holds data")]
pub(crate) struct HoldsData {
    name: String,
}

/// Returns true if the volume holds data, or if its content cannot be examined.
fn holds_data(pool: &Arc<Pool>, name: &str, progress: OnProgress<'_>) -> Result<bool, PoolError> {
    match pool.open_volume(name) {
        Ok(volume) => Ok(btt::holds_data(&btt::Media::Volume(volume), progress).unwrap_or(true)),
        Err(PoolError::VolumeUnusable { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Resizes a volume and returns it as it was before and after. The part that a raw volume loses is
/// erased immediately, so that it is certainly gone when the command returns.
fn resize(
    pool: &Arc<Pool>,
    name: &str,
    size: VolumeSize,
    shrink: Shrink,
    progress: OnProgress<'_>,
) -> Result<(VolumeInfo, VolumeInfo), PoolError> {
    check_btt_clean(pool, name, &mut *progress)?;
    let before = pool.open_volume(name)?.info().clone();
    let growth = match size {
        VolumeSize::Bytes(wanted) => VolumeSize::Bytes(wanted.saturating_sub(before.size_bytes)),
        VolumeSize::Remaining => VolumeSize::Remaining,
    };
    pool.scrub_for(growth, &mut *progress)?;
    let volume = pool.resize_volume(name, size, shrink)?;
    if shrink == Shrink::Allow {
        pool.scrub_all_with(progress)?;
    }
    Ok((before, volume))
}

/// Resizes a volume of a pool that is not in use, or lets the VM of `socket` grow it.
fn resize_here_or_by_vm(
    path: &Path,
    name: &str,
    size: VolumeSize,
    shrink: Shrink,
    socket: Option<&Path>,
) -> anyhow::Result<(Arc<Pool>, Option<VolumeInfo>, VolumeInfo)> {
    match change_pool(path, |pool, progress| resize(pool, name, size, shrink, progress)) {
        Ok((pool, (before, volume))) => Ok((pool, Some(before), volume)),
        Err(error) if vm::is_in_use(&error) => match (socket, size) {
            (Some(socket), VolumeSize::Bytes(size_bytes)) => {
                let pool = vm::grow_volume(socket, path, name, size_bytes)?;
                let volume = pool.open_volume(name)?.info().clone();
                Ok((pool, None, volume))
            }
            _ => Err(vm::name_flag(error)),
        },
        Err(error) => Err(error),
    }
}

/// Converts a volume, and returns its new properties. Chunks that the volume no longer needs are
/// erased immediately, so that their space is available when the command returns.
fn convert(
    pool: &Arc<Pool>,
    name: &str,
    thin: bool,
    progress: OnProgress<'_>,
) -> anyhow::Result<VolumeInfo> {
    if thin {
        let is_raw = |volume: &VolumeInfo| volume.format == VolumeFormat::Raw;
        if pool.volumes().iter().any(|volume| volume.name == name && is_raw(volume)) {
            return Err(ThinRaw { name: name.to_owned() }.into());
        }
    }
    let volume = pool.convert_volume_with(name, thin, &mut *progress)?;
    if thin {
        pool.scrub_all_with(progress)?;
    }
    Ok(volume)
}

/// Compacts a thin volume and erases the released space. Returns the numbers of released and moved
/// bytes.
fn compact(pool: &Arc<Pool>, name: &str, progress: OnProgress<'_>) -> anyhow::Result<(u64, u64)> {
    let volume = pool.open_volume(name)?;
    if !volume.info().thin {
        return Err(CompactThick { name: name.to_owned() }.into());
    }
    let before_bytes = volume.allocated_bytes();
    let engine = Engine::open(volume)?;
    while engine.compact(&mut |_| true)? > 0 {}
    engine.quiesce()?;
    let released_bytes = before_bytes.saturating_sub(engine.space().allocated_bytes());
    pool.scrub_all_with(progress)?;
    Ok((released_bytes, engine.compacted_bytes()))
}

/// Error for a thick volume, which keeps all of its space.
#[derive(Debug, Error)]
#[error("volume {name:?} is thick, and only a thin volume releases space")]
pub(crate) struct CompactThick {
    name: String,
}

/// Error for a raw volume that would become thin.
#[derive(Debug, Error)]
#[error("volume {name:?} is raw, and {RAW_IS_THICK}")]
pub(crate) struct ThinRaw {
    name: String,
}

/// Returns true if a check or repair failed without a result. Damage that prevents a check or
/// repair counts as a result.
pub(crate) fn failed_without_result(command: &Command, error: &anyhow::Error) -> bool {
    let is_damage = matches!(
        error.downcast_ref(),
        Some(
            PoolError::SuperblocksDamaged { .. }
                | PoolError::SuperblocksLost { .. }
                | PoolError::SuperblockInvalid { .. }
                | PoolError::Truncated { .. }
                | PoolError::Enlarged { .. }
                | PoolError::Damaged { .. }
                | PoolError::VolumeUnusable { .. }
                | PoolError::Media(_)
        )
    ) || error.downcast_ref::<MediaError>().is_some();
    let is_check = matches!(
        command,
        Command::Check { .. }
            | Command::Repair { .. }
            | Command::Btt(BttCommand::Check { .. } | BttCommand::Repair { .. })
    );
    is_check && !is_damage
}

/// Refuses to resize a volume with a damaged BTT, because a repair might require undoing the
/// resize.
fn check_btt_clean(
    pool: &Arc<Pool>,
    name: &str,
    progress: OnProgress<'_>,
) -> Result<(), PoolError> {
    let Some(found) = pool.check_volume_with(name, progress)? else { return Ok(()) };
    let count: u64 = found.arenas.iter().map(|arena| arena.findings_total).sum();
    if found.is_clean() {
        return Ok(());
    }
    Err(PoolError::VolumeUnusable {
        name: name.to_owned(),
        reason: format!("its BTT is damaged ({count} finding(s))"),
    })
}

/// Opens a pool for writing and calls `change` on it.
fn change_pool<T, E: Into<anyhow::Error>>(
    path: &Path,
    change: impl FnOnce(&Arc<Pool>, OnProgress<'_>) -> Result<T, E>,
) -> anyhow::Result<(Arc<Pool>, T)> {
    with_meter(|progress| {
        let pool = Pool::open(path, OpenMode::ReadWrite)?;
        let result = change(&pool, progress).map_err(|error| add_flag_context(error.into()))?;
        Ok((pool, result))
    })
}

/// Prefixes an error about a flag's value with the flag.
pub(crate) fn add_flag_context(error: anyhow::Error) -> anyhow::Error {
    let Some(pool_error) = error.downcast_ref() else { return error };
    let flag = match pool_error {
        PoolError::Size { quantity: "reserve", .. } | PoolError::NotThin { .. } => {
            Some("--reserve")
        }
        PoolError::Size { .. }
        | PoolError::PoolFull { .. }
        | PoolError::ShrinkRefused { .. }
        | PoolError::FileSystemFull { .. }
        | PoolError::DeviceTooSmall { .. }
        | PoolError::SizeNeeded { .. }
        | PoolError::DeviceNotGrown { .. }
        | PoolError::Btt(_) => Some("--size"),
        PoolError::ThinDevice { .. } => Some("--thin"),
        PoolError::Split { .. } => Some("--into"),
        _ => None,
    };
    match flag {
        Some(flag) => error.context(flag),
        None => error,
    }
}

fn grow(
    path: &Path,
    size_bytes: Option<u64>,
    force: bool,
    progress: OnProgress<'_>,
) -> Result<Arc<Pool>, PoolError> {
    let before = Pool::open(path, OpenMode::Peek)?.info();
    let pool = Pool::grow_with(path, size_bytes, force, &mut *progress)?;
    // If nothing was waiting before, only the chunks that the chunk table has left are to be
    // erased. They are too few to be mentioned to the user.
    if before.scrubbing_bytes + before.memory_bytes == 0 {
        pool.scrub_all_with(progress)?;
    }
    Ok(pool)
}

fn info(path: &Path, output: &Output) -> anyhow::Result<Outcome> {
    let pool = Pool::open(path, OpenMode::Peek)?;
    let report = print::InfoReport::new(path, &pool);
    print(output, &report, |out| print::info(out, &report))?;
    Ok(Outcome::Done)
}

fn check(path: &Path, output: &Output) -> anyhow::Result<Outcome> {
    let report = with_meter(|progress| Pool::open(path, OpenMode::ReadOnly)?.check_with(progress))?;
    let json = print::CheckOutput::new(path, &report);
    print(output, &json, |out| print::check(out, path, &report))?;
    Ok(outcome(report.is_clean()))
}

fn repair(
    path: &Path,
    dry_run: bool,
    give_up: Option<&str>,
    output: &Output,
) -> anyhow::Result<Outcome> {
    let report = with_meter(|progress| Pool::repair_with(path, dry_run, give_up, progress))?;
    let hints = print::give_up_hints(path, &report);
    let json = print::RepairOutput::new(&report, dry_run, &hints);
    print(output, &json, |out| print::repair(out, &json))?;
    Ok(outcome(report.left.is_empty()))
}

pub(crate) fn outcome(is_clean: bool) -> Outcome {
    if is_clean { Outcome::Done } else { Outcome::Damaged }
}

fn scrub(path: &Path, output: &Output) -> anyhow::Result<Outcome> {
    let erased_bytes = with_meter(|progress| {
        let pool = Pool::open(path, OpenMode::ReadWrite)?;
        pool.scrub_all_with(progress)?;
        Ok::<_, PoolError>(pool.scrubbed_bytes())
    })?;
    let report = ScrubReport { path, erased_bytes };
    print(output, &report, |out| print::scrubbed(out, &report))?;
    Ok(Outcome::Done)
}
