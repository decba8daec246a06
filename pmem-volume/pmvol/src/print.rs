//! Output of the commands.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use foreshore_types::size::Size;
use pmem_volume::btt;
use pmem_volume::pool::{CheckReport, Finding, FreeSpace, RepairReport, Severity, VolumeCheck};
use pmem_volume::{Pool, PoolInfo, VolumeInfo};
use serde::Serialize;

use super::args::Output;
use super::btt::ImportSizes;

/// Destination of text.
pub(crate) type Out<'a> = &'a mut dyn Write;

/// Prints all of the text on stdout, or returns an error, for example if a disk is full. A closed
/// pipe (`pmvol check pool | head`) is not an error, so the exit code still reports the result of
/// the command.
pub(crate) fn emit(text: impl FnOnce(Out<'_>) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match text(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to stdout"),
    }
}

/// Prints a line on stderr. Errors are ignored, because they cannot be reported elsewhere.
pub(crate) fn print_stderr(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "pmvol: {text}");
}

/// Version of all JSON documents. The version is incremented if a field is removed or changes its
/// meaning. New fields do not change it.
const SCHEMA: u32 = 1;

/// JSON document: an object with the fields of `content`.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: u32,
    #[serde(flatten)]
    content: &'a T,
}

/// Prints a report, as JSON or as text.
pub(crate) fn print(
    output: &Output,
    report: &impl Serialize,
    text: impl FnOnce(Out<'_>) -> io::Result<()>,
) -> anyhow::Result<()> {
    if !output.json {
        return emit(text);
    }
    let json = serde_json::to_string_pretty(&Document { schema: SCHEMA, content: report })?;
    emit(|out| writeln!(out, "{json}"))
}

/// Report on a pool that was created or grown.
#[derive(Serialize)]
pub(crate) struct PoolReport<'a> {
    pub(crate) path: &'a Path,
    #[serde(flatten)]
    pub(crate) info: &'a PoolInfo,
}

#[derive(Serialize)]
pub(crate) struct ScrubReport<'a> {
    pub(crate) path: &'a Path,
    pub(crate) erased_bytes: u64,
}

#[derive(Serialize)]
pub(crate) struct CompactReport<'a> {
    pub(crate) path: &'a Path,
    pub(crate) volume: &'a str,
    pub(crate) released_bytes: u64,
    pub(crate) moved_bytes: u64,
}

/// Report on the volumes of a pool, or on those that a command created or changed.
#[derive(Serialize)]
pub(crate) struct VolumesReport<'a> {
    path: &'a Path,
    pub(crate) volumes: Vec<VolumeLine>,
    /// Name of the volume that was renamed, split or deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    instead_of: Option<&'a str>,
    /// Image from which a volume was filled.
    #[serde(flatten)]
    filled: Option<ImportSizes>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) hints: Vec<String>,
}

#[derive(Serialize)]
pub(crate) struct VolumeLine {
    #[serde(flatten)]
    info: VolumeInfo,
    /// `None` if the size is unknown.
    usable_bytes: Option<u64>,
    /// `None` if the volume is not thin, or damaged.
    live_bytes: Option<u64>,
}

impl<'a> VolumesReport<'a> {
    pub(crate) fn new(pool: &'a Arc<Pool>, volumes: &[VolumeInfo]) -> Self {
        let line = |info: &VolumeInfo| {
            let open = pool.open_volume(&info.name).ok();
            VolumeLine {
                info: info.clone(),
                usable_bytes: open.as_ref().and_then(|open| open.usable_bytes()),
                live_bytes: open.and_then(|open| open.live_bytes()),
            }
        };
        let volumes = volumes.iter().map(line).collect();
        Self { path: pool.path(), volumes, instead_of: None, filled: None, hints: vec![] }
    }

    pub(crate) fn instead_of(self, name: &'a str) -> Self {
        Self { instead_of: Some(name), ..self }
    }

    pub(crate) fn filled(self, filled: ImportSizes) -> Self {
        Self { filled: Some(filled), ..self }
    }
}

/// Hint that is printed after a volume has grown.
pub(crate) const GROWTH_HINT: &str = "a guest sees the new size when its VM starts again; then \
enlarge the partition, if there is one (growpart), and the file system (resize2fs DEVICE or \
xfs_growfs FOLDER). A size= of --pm-volume has to name the new size";

/// Prints hints on stderr, unless the JSON document has them. The command has succeeded, so hints
/// lack the prefix of errors.
pub(crate) fn print_hints(output: &Output, hints: &[String]) {
    if !output.json {
        // If stderr cannot be written, there is nothing left to do.
        hints.iter().for_each(|hint| drop(writeln!(io::stderr(), "hint: {hint}")));
    }
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
    in_use_by_pid: Option<u32>,
    /// Highest severity of the findings.
    state: &'static str,
    /// Number of damaged items. Leftovers of a crash that the format allows for are not damage.
    findings: usize,
    /// Bytes of the file that have no blocks on the disk, although the pool is not thin.
    lost_blocks_bytes: u64,
    /// Copy-on-write file system that contains the pool.
    copy_on_write: Option<&'static str>,
    /// Bytes to erase before their next use. If the pool is not in use, they include memory that an
    /// ended process had borrowed.
    waiting_bytes: u64,
}

impl<'a> InfoReport<'a> {
    pub(crate) fn new(path: &'a Path, pool: &Pool) -> Self {
        let holder = pool.holder();
        let in_use_by = holder.as_ref().map(|holder| holder.to_string());
        let in_use_by_pid = holder.as_ref().and_then(|holder| holder.pid);
        let mut info = pool.info();
        let left_bytes = if holder.is_none() { info.memory_bytes } else { 0 };
        let waiting_bytes = info.scrubbing_bytes + left_bytes;
        if holder.is_none() {
            // The next process that opens the pool erases and frees these bytes.
            let available_bytes = info.free_bytes + waiting_bytes;
            let withheld_bytes = info.withheld_of(available_bytes);
            info.lendable_bytes = available_bytes - withheld_bytes;
            info.reserved_bytes = info.volume_bytes + withheld_bytes;
        }
        let (free_space, durability_meaning) = (pool.free_space(), info.durability.meaning());
        let (state, findings) = state(pool);
        Self {
            path,
            state,
            findings,
            info,
            free_space,
            durability_meaning,
            in_use_by,
            in_use_by_pid,
            lost_blocks_bytes: lost_blocks_bytes(pool),
            copy_on_write: pool.copy_on_write(),
            waiting_bytes,
        }
    }

    fn is_damaged(&self) -> bool {
        self.state == Severity::Fatal.name()
    }
}

/// Returns the highest severity that opening the pool found, and the number of damaged items. The
/// content of volumes is not examined.
fn state(pool: &Pool) -> (&'static str, usize) {
    let severities: Vec<_> = pool.findings_at_open().iter().map(Finding::severity).collect();
    match severities.iter().max() {
        Some(worst) if *worst > Severity::Note => {
            (worst.name(), severities.iter().filter(|severity| **severity > Severity::Note).count())
        }
        _ => ("ok", 0),
    }
}

fn lost_blocks_bytes(pool: &Pool) -> u64 {
    let lost = |finding: &Finding| match finding {
        Finding::BlocksLost { hole_bytes, shared_bytes } => hole_bytes + shared_bytes,
        _ => 0,
    };
    pool.findings_at_open().iter().map(lost).sum()
}

/// Warns on stderr that a store to a pool can fail because its file system is full.
pub(crate) fn warn_copy_on_write(pool: &Pool) {
    if let Some(file_system) = pool.copy_on_write() {
        let finding = Finding::CopyOnWrite { file_system };
        print_stderr(format_args!("warning: {}: {finding}", pool.path().display()));
    }
}

pub(crate) fn info(out: Out<'_>, report: &InfoReport) -> io::Result<()> {
    let info = &report.info;
    writeln!(out, "pool         {}", report.path.display())?;
    writeln!(out, "uuid         {}", info.uuid)?;
    writeln!(out, "format       version {}", info.format_version)?;
    writeln!(out, "state        {}{}", report.state, findings_of(report))?;
    writeln!(out, "durability   {} ({})", info.durability.name(), report.durability_meaning)?;
    writeln!(
        out,
        "thin         {}",
        if info.thin { "yes: free chunks occupy no space" } else { "no" }
    )?;
    if report.lost_blocks_bytes > 0 {
        let lost = Size(report.lost_blocks_bytes).rounded();
        writeln!(
            out,
            "lost blocks  {lost} (a sparse copy or a clone; allocated again when the pool is opened for writing)"
        )?;
    }
    if let Some(file_system) = report.copy_on_write {
        writeln!(out, "file system  {file_system} (copy-on-write: stores may run out of space)")?;
    }
    writeln!(out, "in use by    {}", report.in_use_by.as_deref().unwrap_or("no process"))?;
    writeln!(out, "total        {}", Size(info.total_bytes).rounded())?;
    writeln!(
        out,
        "  free       {}, the largest piece {}",
        Size(info.free_bytes).rounded(),
        Size(report.free_space.longest_free_run_bytes).rounded()
    )?;
    writeln!(out, "  memory     {}", Size(info.memory_bytes).rounded())?;
    writeln!(out, "  volumes    {} in {}", Size(info.volume_bytes).rounded(), info.volumes)?;
    writeln!(out, "  scrubbing  {}", Size(info.scrubbing_bytes).rounded())?;
    if info.damaged_bytes > 0 {
        writeln!(
            out,
            "  damaged    {} (owner unknown; left unchanged)",
            Size(info.damaged_bytes).rounded()
        )?;
    }
    writeln!(out, "  retired    {}", Size(info.retired_bytes).rounded())?;
    writeln!(out, "  metadata   {}", Size(info.metadata_bytes).rounded())?;
    writeln!(
        out,
        "reserve      {} (set by --reserve: at least this much is kept for volumes)",
        Size(info.reserve_bytes).rounded()
    )?;
    writeln!(
        out,
        "reserved     {} (volumes, and the free part of the reserve: not available to memory)",
        Size(info.reserved_bytes).rounded()
    )?;
    writeln!(
        out,
        "promised     {} (guaranteed to volumes, or allocated; their sizes: {})",
        Size(info.promised_bytes).rounded(),
        Size(info.provisioned_bytes).rounded()
    )?;
    writeln!(out, "lendable     {}", Size(info.lendable_bytes).rounded())?;
    if report.waiting_bytes > 0 {
        writeln!(
            out,
            "to be erased {}{}",
            Size(report.waiting_bytes).rounded(),
            erasure_note(report)
        )?;
    }
    Ok(())
}

fn findings_of(report: &InfoReport) -> String {
    let (path, count) = (report.path.display(), report.findings as u64);
    let more =
        if report.is_damaged() { "; the pool is read-only until it is repaired" } else { "" };
    if count == 0 {
        String::new()
    } else {
        format!(": {}, see `pmvol check {path}`{more}", findings(count))
    }
}

pub(crate) fn findings(count: u64) -> String {
    if count == 1 { "1 finding".to_owned() } else { format!("{count} findings") }
}

fn erasure_note(report: &InfoReport) -> String {
    match &report.in_use_by {
        // In use by a VM, because a reader holds the pool only for a moment.
        Some(_) => " (in the background)".to_owned(),
        None if report.is_damaged() => " (when the pool is repaired)".to_owned(),
        None => format!(" (when it is needed, or now by `pmvol scrub {}`)", report.path.display()),
    }
}

/// Warns on stderr that a list of volumes may be incomplete because the pool is damaged.
pub(crate) fn warn_pool_damage(path: &Path, pool: &Pool) {
    if let (state, 1..) = state(pool) {
        print_stderr(format_args!(
            "the pool is {state}, so the list may be incomplete; see `pmvol check {}`",
            path.display()
        ));
    }
}

/// Reports on stderr how much memory remains to be erased after a command.
pub(crate) fn warn_waiting(pool: &Pool) {
    let waiting_bytes = pool.info().scrubbing_bytes;
    // A VM erases them itself.
    if pool.is_writable() && waiting_bytes > 0 {
        print_stderr(format_args!("{}", waiting(pool.path(), waiting_bytes)));
    }
}

fn waiting(path: &Path, waiting_bytes: u64) -> String {
    format!(
        "{} must be erased before reuse; `pmvol scrub {}` erases them now",
        Size(waiting_bytes).rounded(),
        path.display()
    )
}

pub(crate) fn scrubbed(out: Out<'_>, report: &ScrubReport<'_>) -> io::Result<()> {
    let path = report.path;
    match report.erased_bytes {
        0 => writeln!(out, "pool {}: nothing to erase", path.display()),
        bytes => writeln!(out, "pool {}: {} erased", path.display(), Size(bytes).rounded()),
    }
}

pub(crate) fn pool_created(out: Out<'_>, report: &PoolReport<'_>) -> io::Result<()> {
    let PoolReport { path, info } = report;
    writeln!(
        out,
        "pool {} created: {}, {} free, durability {}",
        path.display(),
        Size(info.total_bytes).rounded(),
        Size(info.free_bytes).rounded(),
        info.durability.name()
    )
}

pub(crate) fn pool_grown(out: Out<'_>, report: &PoolReport<'_>) -> io::Result<()> {
    let PoolReport { path, info } = report;
    writeln!(
        out,
        "pool {} grown: {}, {} free",
        path.display(),
        Size(info.total_bytes).rounded(),
        Size(info.free_bytes).rounded()
    )
}

pub(crate) fn volume_created(out: Out<'_>, volume: &VolumeLine) -> io::Result<()> {
    writeln!(out, "volume {} created: {}", volume.info.name, size_of(volume))
}

pub(crate) fn volume_resized(out: Out<'_>, volume: &VolumeLine) -> io::Result<()> {
    let (name, extents) = (&volume.info.name, volume.info.extents);
    writeln!(out, "volume {name} resized: {}, in {extents} piece(s)", size_of(volume))
}

pub(crate) fn volume_compacted(out: Out<'_>, report: &CompactReport<'_>) -> io::Result<()> {
    let [released, moved] =
        [report.released_bytes, report.moved_bytes].map(|bytes| Size(bytes).rounded());
    writeln!(out, "volume {} compacted: {released} released, {moved} moved", report.volume)
}

pub(crate) fn volume_converted(out: Out<'_>, volume: &VolumeLine) -> io::Result<()> {
    let info = &volume.info;
    let kind = if info.thin { "thin" } else { "thick" };
    writeln!(out, "volume {} is {kind}: {}", info.name, size_of(volume))
}

fn size_of(volume: &VolumeLine) -> String {
    let info = &volume.info;
    let size = Size(info.size_bytes).rounded();
    let text = format!("{size}, {}, {} usable", info.format.as_str(), usable(volume));
    match info.thin {
        true => format!(
            "{text}, thin, {} guaranteed, {} allocated",
            Size(info.reserve_bytes).rounded(),
            Size(info.allocated_bytes).rounded()
        ),
        false => text,
    }
}

fn usable(volume: &VolumeLine) -> String {
    volume.usable_bytes.map_or("-".to_owned(), |bytes| Size(bytes).rounded())
}

pub(crate) fn volume_split(out: Out<'_>, name: &str, parts: &[VolumeLine]) -> io::Result<()> {
    writeln!(out, "volume {name} split into {}:", parts.len())?;
    volumes(out, parts)
}

pub(crate) fn volumes(out: Out<'_>, volumes: &[VolumeLine]) -> io::Result<()> {
    let width = volumes.iter().map(|v| v.info.name.chars().count()).chain([4]).max().unwrap_or(4);
    writeln!(
        out,
        "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:6}  {:4}  {:>7}  UUID",
        "NAME", "SIZE", "USABLE", "RESERVE", "ALLOCATED", "FORMAT", "THIN", "EXTENTS"
    )?;
    for volume in volumes {
        let info = &volume.info;
        writeln!(
            out,
            "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:6}  {:4}  {:>7}  {}",
            info.name,
            Size(info.size_bytes).rounded(),
            usable(volume),
            Size(info.reserve_bytes).rounded(),
            Size(info.allocated_bytes).rounded(),
            info.format.as_str(),
            if info.thin { "yes" } else { "no" },
            info.extents,
            info.uuid
        )?;
    }
    Ok(())
}

/// Report of a check, with totals.
#[derive(Serialize)]
pub(crate) struct CheckOutput<'a> {
    path: &'a Path,
    clean: bool,
    waiting_bytes: u64,
    #[serde(flatten)]
    report: &'a CheckReport,
}

impl<'a> CheckOutput<'a> {
    pub(crate) fn new(path: &'a Path, report: &'a CheckReport) -> Self {
        Self { path, clean: report.is_clean(), waiting_bytes: report.waiting_bytes(), report }
    }
}

/// Report of a repair, with totals.
#[derive(Serialize)]
pub(crate) struct RepairOutput<'a> {
    dry_run: bool,
    clean: bool,
    #[serde(flatten)]
    report: &'a RepairReport,
    /// Commands that resolve the remaining damage.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    hints: &'a [String],
}

impl<'a> RepairOutput<'a> {
    pub(crate) fn new(report: &'a RepairReport, dry_run: bool, hints: &'a [String]) -> Self {
        Self { dry_run, clean: report.left.is_empty(), report, hints }
    }
}

/// Returns the commands that delete volumes with missing chunks.
pub(crate) fn give_up_hints(path: &Path, report: &RepairReport) -> Vec<String> {
    let hint = |name: &String| {
        format!(
            "`pmvol repair {} --give-up-volume {name}` deletes {name:?} with the data that is still readable",
            path.display()
        )
    };
    report.incomplete_volumes.iter().map(hint).collect()
}

pub(crate) fn check(out: Out<'_>, path: &Path, report: &CheckReport) -> io::Result<()> {
    for finding in &report.pool {
        writeln!(out, "pool: {}: {finding}", finding.severity().name())?;
    }
    for volume in &report.volumes {
        volume_check(out, volume)?;
    }
    if report.damaged_bytes > 0 {
        writeln!(
            out,
            "{} have no known owner and are left unchanged",
            Size(report.damaged_bytes).rounded()
        )?;
    }
    let waiting_bytes = report.waiting_bytes();
    if waiting_bytes > 0 {
        writeln!(out, "{}", waiting(path, waiting_bytes))?;
    }
    match report.damaged() {
        0 => writeln!(out, "clean"),
        count => writeln!(
            out,
            "not clean: {}; `pmvol repair {} --dry-run` lists the possible repairs",
            findings(count),
            path.display()
        ),
    }
}

pub(crate) fn repair(out: Out<'_>, output: &RepairOutput<'_>) -> io::Result<()> {
    let RepairOutput { report, dry_run, hints, .. } = *output;
    let prefix = if dry_run { "would repair" } else { "repaired" };
    for description in &report.mended {
        writeln!(out, "{prefix}: {description}")?;
    }
    for description in &report.left {
        writeln!(out, "left: {description}")?;
    }
    for hint in hints {
        writeln!(out, "{hint}")?;
    }
    match (report.mended.is_empty(), report.left.is_empty()) {
        (true, true) => writeln!(out, "nothing to repair"),
        (_, true) => writeln!(out, "nothing left"),
        (_, false) if dry_run => {
            writeln!(out, "not clean: the remaining damage cannot be repaired")
        }
        (_, false) => writeln!(out, "not clean: the remaining damage could not be repaired"),
    }
}

fn volume_check(out: Out<'_>, volume: &VolumeCheck) -> io::Result<()> {
    let name = &volume.name;
    if let Some(reason) = &volume.unusable {
        writeln!(out, "volume {name}: damaged: {reason}")?;
    }
    let Some(btt) = &volume.btt else {
        if volume.unusable.is_none() {
            writeln!(out, "volume {name}: raw, nothing to check inside")?;
        }
        return Ok(());
    };
    arena_findings(out, &format!("volume {name}: "), btt)?;
    if btt.is_clean() {
        writeln!(out, "volume {name}: {} sectors, each block referenced once", btt.sectors())?;
    }
    Ok(())
}

/// Prints the findings of a BTT check, arena by arena. Each line starts with `prefix`.
pub(crate) fn arena_findings(out: Out<'_>, prefix: &str, btt: &btt::Report) -> io::Result<()> {
    for (number, arena) in btt.arenas.iter().enumerate() {
        for finding in &arena.findings {
            writeln!(out, "{prefix}arena {number}: damaged: {finding}")?;
        }
        let more = arena.findings_total - arena.findings.len() as u64;
        if more > 0 {
            writeln!(out, "{prefix}arena {number}: and {more} more")?;
        }
        if arena.redo > 0 {
            writeln!(
                out,
                "{prefix}arena {number}: note: {} map entries to redo from the log",
                arena.redo
            )?;
        }
        if arena.error_sectors > 0 {
            writeln!(
                out,
                "{prefix}arena {number}: note: {} sector(s) marked as lost",
                arena.error_sectors
            )?;
        }
    }
    Ok(())
}
