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

pub(crate) use self::args::{BttCommand, ExportOptions, ImageFormat, ImportOptions, Place};
pub(crate) use self::export::export;
pub(crate) use self::import::{Filled, Source, fill, import};
pub(crate) use self::media::{Media, holds_data};
use crate::args::Output;
use crate::commands::{Outcome, outcome};
use crate::meter::watched;
use crate::print::{RepairOutput, emit, print};

pub(crate) fn run(command: &BttCommand) -> anyhow::Result<Outcome> {
    match command {
        BttCommand::Info { place, output } => info(place, output),
        BttCommand::Check { place, output } => check(place, output),
        BttCommand::Repair { place, dry_run, give_up_sectors, output } => {
            let give_up = if *give_up_sectors { GiveUp::Sectors } else { GiveUp::Nothing };
            repair(place, *dry_run, give_up, output)
        }
        BttCommand::Read { place, sector, count, hex } => {
            sectors::read(place, *sector, *count, *hex)
        }
        BttCommand::Write { place, sector, from } => {
            sectors::write(place, *sector, from.as_deref())
        }
        BttCommand::Export { place, options } => export(place, options),
        BttCommand::Import { place, options } => import(place, options),
    }
}

fn info(place: &Place, output: &Output) -> anyhow::Result<Outcome> {
    let media = Media::peek(place)?;
    media.require_btt()?;
    let report = print::InfoReport::new(place, &media)?;
    print(output, &report, |out| print::info(out, &report))?;
    Ok(Outcome::Done)
}

fn check(place: &Place, output: &Output) -> anyhow::Result<Outcome> {
    let media = Media::look(place)?;
    media.require_btt()?;
    let report =
        watched(|progress| looked_through(&media, progress, |r| btt::check_with(&media, r)));
    let json = print::CheckOutput::new(place, &report);
    print(output, &json, |out| print::check(out, place, &report))?;
    Ok(outcome(report.is_clean()))
}

fn repair(
    place: &Place,
    dry_run: bool,
    give_up: GiveUp,
    output: &Output,
) -> anyhow::Result<Outcome> {
    let media = if dry_run { Media::look(place)? } else { Media::change(place)? };
    media.require_btt()?;
    let repair = watched(|progress| {
        looked_through(&media, progress, |r| btt::plan_repair(&media, give_up, r))
    })?;
    let mut report = RepairReport::default();
    report.add_btt("", &repair);
    if !output.json {
        emit(|out| print::to_mend(out, &report, dry_run))?;
    }
    if !dry_run {
        watched(|_| repair.carry_out(&media))?;
    }
    let hints = print::export_hint(place, &report);
    let json = RepairOutput::new(&report, dry_run, &hints);
    print(output, &json, |out| print::left(out, &report, dry_run, &hints))?;
    Ok(outcome(report.left.is_empty()))
}

/// Runs `work`, which reports its position in the media, and forwards the position to `progress`.
fn looked_through<T>(
    media: &Media,
    progress: OnProgress<'_>,
    look: impl FnOnce(&mut dyn FnMut(u64)) -> T,
) -> T {
    let total_bytes = media.len_bytes();
    let mut say = |done_bytes| progress(Progress { task: Task::Check, done_bytes, total_bytes });
    say(0);
    look(&mut |reached| say(reached.min(total_bytes)))
}
