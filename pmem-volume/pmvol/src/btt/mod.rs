//! `pmvol btt`: access to the sectors of a volume.

mod args;
mod export;
mod image;
mod import;
mod media;
mod print;
mod qcow2;
mod sectors;

use pmem_volume::btt::{self, GiveUp};
use pmem_volume::pool::RepairReport;
use pmem_volume::progress::{OnProgress, Progress, Task};

pub(crate) use self::args::{BttCommand, ExportOptions, ImageFormat, ImportOptions, Location};
pub(crate) use self::export::export;
pub(crate) use self::image::is_stdio;
pub(crate) use self::import::{ImportSizes, Source, fill, import};
pub(crate) use self::media::{Media, holds_data};
use crate::args::Output;
use crate::commands::{Outcome, outcome};
use crate::meter::with_meter;
use crate::print::{RepairOutput, emit, print};

pub(crate) fn run(command: &BttCommand) -> anyhow::Result<Outcome> {
    match command {
        BttCommand::Info { location, output } => info(location, output),
        BttCommand::Check { location, output } => check(location, output),
        BttCommand::Repair { location, dry_run, give_up_sectors, output } => {
            let give_up = if *give_up_sectors { GiveUp::Sectors } else { GiveUp::Nothing };
            repair(location, *dry_run, give_up, output)
        }
        BttCommand::Read { location, sector, count, hex } => {
            sectors::read(location, *sector, *count, *hex)
        }
        BttCommand::Write { location, sector, from } => {
            sectors::write(location, *sector, from.as_deref())
        }
        BttCommand::Export { location, options } => export(location, options),
        BttCommand::Import { location, options } => import(location, options),
    }
}

fn info(location: &Location, output: &Output) -> anyhow::Result<Outcome> {
    let media = Media::open_peek(location)?;
    media.require_btt()?;
    let report = print::InfoReport::new(location, &media)?;
    print(output, &report, |out| print::info(out, &report))?;
    Ok(Outcome::Done)
}

fn check(location: &Location, output: &Output) -> anyhow::Result<Outcome> {
    let media = Media::open_read_only(location)?;
    media.require_btt()?;
    let report = with_meter(|progress| {
        with_check_progress(&media, progress, |r| btt::check_with(&media, r))
    });
    let json = print::CheckOutput::new(location, &report);
    print(output, &json, |out| print::check(out, location, &report))?;
    Ok(outcome(report.is_clean()))
}

fn repair(
    location: &Location,
    dry_run: bool,
    give_up: GiveUp,
    output: &Output,
) -> anyhow::Result<Outcome> {
    let media =
        if dry_run { Media::open_read_only(location)? } else { Media::open_read_write(location)? };
    media.require_btt()?;
    let repair = with_meter(|progress| {
        with_check_progress(&media, progress, |r| btt::plan_repair(&media, give_up, r))
    })?;
    let mut report = RepairReport::default();
    report.add_btt("", &repair);
    if !output.json {
        emit(|out| print::planned_fixes(out, &report, dry_run))?;
    }
    if !dry_run {
        with_meter(|_| repair.apply(&media))?;
    }
    let hints = print::export_hint(location, &report);
    let json = RepairOutput::new(&report, dry_run, &hints);
    print(output, &json, |out| print::remaining_damage(out, &report, dry_run, &hints))?;
    Ok(outcome(report.left.is_empty()))
}

/// Runs `work`, which reports its position in the media, and forwards the position to `progress`.
fn with_check_progress<T>(
    media: &Media,
    progress: OnProgress<'_>,
    check: impl FnOnce(&mut dyn FnMut(u64)) -> T,
) -> T {
    let total_bytes = media.len_bytes();
    let mut report = |done_bytes| progress(Progress { task: Task::Check, done_bytes, total_bytes });
    report(0);
    check(&mut |position| report(position.min(total_bytes)))
}
