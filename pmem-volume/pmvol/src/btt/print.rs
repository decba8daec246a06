//! Output of `pmvol btt`.

use std::io;

use foreshore_types::size::Size;
use pmem_volume::btt::{self, ArenaInfo, InfoSource};
use pmem_volume::media::MediaError;
use pmem_volume::pool::RepairReport;
use serde::Serialize;

use super::args::Location;
use super::media::Media;
use crate::print::{Out, arena_findings, findings};

/// Name of the location in output, and its form on a command line.
impl Location {
    pub(crate) fn name(&self) -> String {
        match self {
            Location { pool: Some(pool), volume: Some(volume), .. } => {
                format!("volume {volume} of {}", pool.display())
            }
            Location { file: Some(file), .. } => format!("file {}", file.display()),
            _ => String::new(),
        }
    }

    fn as_arguments(&self) -> String {
        match self {
            Location { pool: Some(pool), volume: Some(volume), .. } => {
                format!("{} {volume}", pool.display())
            }
            Location { file: Some(file), .. } => format!("--file {}", file.display()),
            _ => String::new(),
        }
    }
}

#[derive(Serialize)]
pub(super) struct InfoReport {
    #[serde(skip)]
    name: String,
    size_bytes: u64,
    sector_bytes: u32,
    sectors: u64,
    arenas: Vec<ArenaLine>,
    /// Reason why an expected arena is missing.
    missing: Option<String>,
}

#[derive(Serialize)]
struct ArenaLine {
    number: usize,
    start_bytes: u64,
    end_bytes: u64,
    uuid: uuid::Uuid,
    first_sector: u64,
    sectors: u32,
    blocks: u32,
    block_bytes: u32,
    lanes: u32,
    /// State of the two info blocks.
    info_blocks: &'static str,
    /// State of the two info blocks as a sentence.
    #[serde(skip)]
    info_blocks_are: &'static str,
    error_flag: bool,
    data_at_bytes: u64,
    map_at_bytes: u64,
    log_at_bytes: u64,
}

impl InfoReport {
    pub(super) fn new(location: &Location, media: &Media) -> Result<Self, MediaError> {
        let (mut sectors, mut sector_bytes) = (0, 0);
        let (mut arenas, mut missing) = (Vec::new(), Vec::new());
        for (number, location) in btt::arenas(media).into_iter().enumerate() {
            match location {
                Ok((info, source)) => {
                    arenas.push(ArenaLine::new(number, &info, source, &mut sectors));
                    sector_bytes = info.sector_bytes;
                }
                Err(missing_arena) => {
                    let lost = missing_arena.sectors(sector_bytes);
                    let btt::MissingArena { start_bytes, reason, .. } = missing_arena;
                    let end = lost.map_or("; any arenas after it are unknown", |_| "");
                    missing.push(format!(
                        "arena {number} is missing at {start_bytes:#x}: neither info block is intact ({reason}){end}"
                    ));
                    sectors += lost.unwrap_or(0);
                }
            }
        }
        let missing = Some(missing.join("\n")).filter(|text| !text.is_empty());
        Ok(Self {
            name: location.name(),
            size_bytes: media.len_bytes(),
            sector_bytes,
            sectors,
            arenas,
            missing,
        })
    }
}

impl ArenaLine {
    fn new(number: usize, info: &ArenaInfo, source: InfoSource, sectors: &mut u64) -> Self {
        let first_sector = *sectors;
        *sectors += u64::from(info.sectors);
        let (info_blocks, info_blocks_are) = match source {
            InfoSource::Both => ("both", "both are intact"),
            InfoSource::Differ => {
                ("both, and they differ", "both are intact but differ: the first is used")
            }
            InfoSource::First => ("the first", "only the first is intact"),
            InfoSource::Second => ("the second", "only the second is intact"),
        };
        Self {
            number,
            start_bytes: info.start_bytes,
            end_bytes: info.end_bytes,
            uuid: info.uuid,
            first_sector,
            sectors: info.sectors,
            blocks: info.blocks,
            block_bytes: info.block_bytes,
            lanes: info.lanes,
            info_blocks,
            info_blocks_are,
            error_flag: info.has_error,
            data_at_bytes: info.data_at,
            map_at_bytes: info.map_at,
            log_at_bytes: info.flog_at,
        }
    }
}

pub(super) fn info(out: Out<'_>, report: &InfoReport) -> io::Result<()> {
    let bytes = report.sectors * u64::from(report.sector_bytes);
    writeln!(out, "{}: {}, BTT version 1.1", report.name, Size(report.size_bytes).rounded())?;
    writeln!(
        out,
        "sectors      {} of {} bytes ({}), in {} arena(s)",
        report.sectors,
        report.sector_bytes,
        Size(bytes).rounded(),
        report.arenas.len()
    )?;
    for arena in &report.arenas {
        writeln!(out, "arena {}", arena.number)?;
        writeln!(out, "  uuid       {}", arena.uuid)?;
        writeln!(out, "  range      {:#x} to {:#x}", arena.start_bytes, arena.end_bytes)?;
        let last_sector = arena.first_sector + u64::from(arena.sectors) - 1;
        writeln!(out, "  sectors    {} to {last_sector}", arena.first_sector)?;
        writeln!(out, "  blocks     {} of {} bytes", arena.blocks, arena.block_bytes)?;
        writeln!(out, "  lanes      {}", arena.lanes)?;
        writeln!(
            out,
            "  layout     data at {:#x}, map at {:#x}, log at {:#x}",
            arena.data_at_bytes, arena.map_at_bytes, arena.log_at_bytes
        )?;
        writeln!(out, "  info block {}", arena.info_blocks_are)?;
        writeln!(
            out,
            "  writes     {}",
            if arena.error_flag { "none: its error flag is set" } else { "yes" }
        )?;
    }
    match &report.missing {
        Some(missing) => writeln!(out, "{missing}"),
        None => Ok(()),
    }
}

#[derive(Serialize)]
pub(super) struct CheckOutput<'a> {
    name: String,
    clean: bool,
    sectors: u64,
    #[serde(flatten)]
    report: &'a btt::Report,
}

impl<'a> CheckOutput<'a> {
    pub(super) fn new(location: &Location, report: &'a btt::Report) -> Self {
        Self { name: location.name(), clean: report.is_clean(), sectors: report.sectors(), report }
    }
}

pub(super) fn check(out: Out<'_>, location: &Location, report: &btt::Report) -> io::Result<()> {
    arena_findings(out, "", report)?;
    if report.is_clean() {
        return writeln!(out, "clean: {} sectors, each block referenced once", report.sectors());
    }
    let count = report.arenas.iter().map(|arena| arena.findings_total).sum();
    writeln!(
        out,
        "not clean: {}; `pmvol btt repair {} --dry-run` lists the possible repairs",
        findings(count),
        location.as_arguments()
    )
}

/// Prints a repair before it is made.
pub(super) fn planned_fixes(out: Out<'_>, report: &RepairReport, dry_run: bool) -> io::Result<()> {
    let prefix = if dry_run { "would repair" } else { "repairs" };
    report.mended.iter().try_for_each(|description| writeln!(out, "{prefix}: {description}"))
}

/// Returns the command that copies out all readable sectors, if any damage remains.
pub(super) fn export_hint(location: &Location, report: &RepairReport) -> Vec<String> {
    let hint = format!(
        "`pmvol btt export {} --to FILE` copies all readable sectors",
        location.as_arguments()
    );
    if report.left.is_empty() { vec![] } else { vec![hint] }
}

/// Prints the remaining damage after a repair.
pub(super) fn remaining_damage(
    out: Out<'_>,
    report: &RepairReport,
    dry_run: bool,
    hints: &[String],
) -> io::Result<()> {
    report.left.iter().try_for_each(|description| writeln!(out, "left: {description}"))?;
    match (report.mended.is_empty(), report.left.is_empty()) {
        (true, true) => writeln!(out, "nothing to repair"),
        (false, true) if dry_run => writeln!(out, "no damage would remain"),
        (false, true) => writeln!(out, "repaired; no damage remains"),
        (_, false) => {
            writeln!(out, "not clean: the lost data cannot be reconstructed; {}", hints.join("; "))
        }
    }
}
