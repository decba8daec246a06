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
    in_use_by: Option<String>,
}

impl<'a> InfoReport<'a> {
    pub(crate) fn new(path: &'a Path, pool: &Pool) -> Self {
        let in_use_by = pool.holder().map(|holder| holder.to_string());
        Self { path, info: pool.info(), free_space: pool.free_space(), in_use_by }
    }
}

pub(crate) fn info(report: &InfoReport) {
    let info = &report.info;
    println!("pool         {}", report.path.display());
    println!("uuid         {}", info.uuid);
    println!("format       version {}", info.format_version);
    println!("durability   {} ({})", info.durability.name(), info.durability.meaning());
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
    let waiting = match info.scrubbing_bytes {
        0 => String::new(),
        bytes => format!(", {} waiting to be erased", display(bytes)),
    };
    println!(
        "pool {} grown: {}, {} free{waiting}",
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

pub(crate) fn check(report: &CheckReport) {
    for finding in &report.pool {
        let severity = match finding.severity() {
            Severity::Note => "note",
            Severity::Degraded => "degraded",
            Severity::Fatal => "damaged",
        };
        println!("pool: {severity}: {finding}");
    }
    report.volumes.iter().for_each(volume_check);
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
