//! What the commands print.

use std::path::Path;

use pmem_volume::pool::{CheckReport, FreeSpace, RepairReport, Severity, VolumeCheck};
use pmem_volume::size::display;
use pmem_volume::{Pool, PoolInfo, VolumeFormat, VolumeInfo};
use serde::Serialize;

pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

#[derive(Serialize)]
pub(crate) struct InfoReport<'a> {
    path: &'a Path,
    #[serde(flatten)]
    info: PoolInfo,
    #[serde(flatten)]
    free_space: FreeSpace,
    durability_meaning: &'static str,
    in_use_by: Option<String>,
    /// To be erased before it is used again. If nobody has the pool, that includes what somebody had borrowed who ended.
    waiting_bytes: u64,
}

impl<'a> InfoReport<'a> {
    pub(crate) fn new(path: &'a Path, pool: &Pool) -> Self {
        let in_use_by = pool.holder().map(|holder| holder.to_string());
        let info = pool.info();
        let left_bytes = if in_use_by.is_none() { info.memory_bytes } else { 0 };
        let waiting_bytes = info.scrubbing_bytes + left_bytes;
        let (free_space, durability_meaning) = (pool.free_space(), info.durability.meaning());
        Self { path, info, free_space, durability_meaning, in_use_by, waiting_bytes }
    }
}

pub(crate) fn info(report: &InfoReport) {
    let info = &report.info;
    println!("pool         {}", report.path.display());
    println!("uuid         {}", info.uuid);
    println!("format       version {}", info.format_version);
    println!("durability   {} ({})", info.durability.name(), report.durability_meaning);
    println!("thin         {}", if info.thin { "yes: free chunks take no room" } else { "no" });
    println!("in use by    {}", report.in_use_by.as_deref().unwrap_or("nobody"));
    println!("total        {}", display(info.total_bytes));
    println!(
        "  free       {}, the largest piece {}",
        display(info.free_bytes),
        display(report.free_space.longest_free_run_bytes)
    );
    println!("  memory     {}", display(info.memory_bytes));
    println!("  volumes    {} in {}", display(info.volume_bytes), info.volumes);
    println!("  scrubbing  {}", display(info.scrubbing_bytes));
    println!("  retired    {}", display(info.retired_bytes));
    println!("  metadata   {}", display(info.metadata_bytes));
    println!("STRG         {} (reserved for volumes, never lent as memory)", display(info.strg_bytes));
    println!("lendable     {}", display(info.lendable_bytes));
    if report.waiting_bytes > 0 {
        println!("to be erased {}{}", display(report.waiting_bytes), who_erases(report));
    }
}

fn who_erases(report: &InfoReport) -> String {
    match &report.in_use_by {
        // By a VM, that is; who only reads has it for a moment.
        Some(_) => " (in the background)".to_owned(),
        None => format!(" (when it is needed, or now by `pmvol scrub {}`)", report.path.display()),
    }
}

/// Says on stderr what a command that is done leaves to be erased.
pub(crate) fn note_waiting(pool: &Pool) {
    let waiting_bytes = pool.info().scrubbing_bytes;
    if waiting_bytes > 0 {
        eprintln!("pmvol: {}", waiting(pool.path(), waiting_bytes));
    }
}

fn waiting(path: &Path, waiting_bytes: u64) -> String {
    format!(
        "{} wait to be erased before they are used again; `pmvol scrub {}` does it now",
        display(waiting_bytes),
        path.display()
    )
}

pub(crate) fn scrubbed(path: &Path, erased_bytes: u64) {
    match erased_bytes {
        0 => println!("pool {}: nothing to erase", path.display()),
        bytes => println!("pool {}: {} erased", path.display(), display(bytes)),
    }
}

pub(crate) fn pool_made(path: &Path, info: &PoolInfo) {
    println!(
        "pool {} made: {}, {} free, durability {}",
        path.display(),
        display(info.total_bytes),
        display(info.free_bytes),
        info.durability.name()
    );
}

pub(crate) fn pool_grown(path: &Path, info: &PoolInfo) {
    println!(
        "pool {} grown: {}, {} free",
        path.display(),
        display(info.total_bytes),
        display(info.free_bytes)
    );
}

pub(crate) fn volume_made(volume: &VolumeInfo) {
    println!("volume {} made: {}, {}", volume.name, display(volume.size_bytes), format_name(volume.format));
}

pub(crate) fn volume_resized(volume: &VolumeInfo) {
    println!(
        "volume {} resized: {}, {}, in {} piece(s)",
        volume.name,
        display(volume.size_bytes),
        format_name(volume.format),
        volume.extents
    );
}

pub(crate) fn volumes(volumes: &[VolumeInfo]) {
    let width = volumes.iter().map(|v| v.name.chars().count()).chain([4]).max().unwrap_or(4);
    println!("{:width$}  {:>10}  {:6}  {:>7}  UUID", "NAME", "SIZE", "FORMAT", "EXTENTS");
    for volume in volumes {
        println!(
            "{:width$}  {:>10}  {:6}  {:>7}  {}",
            volume.name,
            display(volume.size_bytes),
            format_name(volume.format),
            volume.extents,
            volume.uuid
        );
    }
}

fn format_name(format: VolumeFormat) -> &'static str {
    match format {
        VolumeFormat::Btt => "btt",
        VolumeFormat::Raw => "raw",
    }
}

/// The report, and what can be said of all of it.
#[derive(Serialize)]
pub(crate) struct CheckOutput<'a> {
    clean: bool,
    waiting_bytes: u64,
    #[serde(flatten)]
    report: &'a CheckReport,
}

impl<'a> CheckOutput<'a> {
    pub(crate) fn new(report: &'a CheckReport) -> Self {
        Self { clean: report.is_clean(), waiting_bytes: report.waiting_bytes(), report }
    }
}

/// The report, and what can be said of all of it.
#[derive(Serialize)]
pub(crate) struct RepairOutput<'a> {
    dry_run: bool,
    clean: bool,
    #[serde(flatten)]
    report: &'a RepairReport,
}

impl<'a> RepairOutput<'a> {
    pub(crate) fn new(report: &'a RepairReport, dry_run: bool) -> Self {
        Self { dry_run, clean: report.left.is_empty(), report }
    }
}

pub(crate) fn check(path: &Path, report: &CheckReport) {
    for finding in &report.pool {
        let severity = match finding.severity() {
            Severity::Note => "note",
            Severity::Degraded => "degraded",
            Severity::Fatal => "damaged",
        };
        println!("pool: {severity}: {finding}");
    }
    report.volumes.iter().for_each(volume_check);
    let waiting_bytes = report.waiting_bytes();
    if waiting_bytes > 0 {
        println!("{}", waiting(path, waiting_bytes));
    }
    println!("{}", if report.is_clean() { "clean" } else { "not clean" });
}

pub(crate) fn repair(report: &RepairReport, dry_run: bool) {
    let mended = if dry_run { "would mend" } else { "mended" };
    report.mended.iter().for_each(|what| println!("{mended}: {what}"));
    report.left.iter().for_each(|what| println!("left: {what}"));
    match (report.mended.is_empty(), report.left.is_empty()) {
        (true, true) => println!("nothing to mend"),
        (_, true) => println!("nothing left"),
        (_, false) => println!("not clean"),
    }
}

fn volume_check(volume: &VolumeCheck) {
    let name = &volume.name;
    if let Some(reason) = &volume.unusable {
        println!("volume {name}: damaged: {reason}");
    }
    let Some(btt) = &volume.btt else {
        if volume.unusable.is_none() {
            println!("volume {name}: raw, nothing to check inside");
        }
        return;
    };
    for (number, arena) in btt.arenas.iter().enumerate() {
        for finding in &arena.findings {
            println!("volume {name}: arena {number}: damaged: {finding}");
        }
        let more = arena.findings_total - arena.findings.len() as u64;
        if more > 0 {
            println!("volume {name}: arena {number}: and {more} more");
        }
        if arena.redo > 0 {
            println!("volume {name}: arena {number}: note: {} map entries to redo from the log", arena.redo);
        }
        if arena.error_sectors > 0 {
            println!("volume {name}: arena {number}: note: {} sector(s) marked as lost", arena.error_sectors);
        }
    }
    if btt.is_clean() {
        println!("volume {name}: {} sectors, every block named once", btt.sectors());
    }
}
