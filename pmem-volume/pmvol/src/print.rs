//! What the commands print.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::Context;
use foreshore_types::size::Size;
use pmem_volume::btt;
use pmem_volume::pool::{CheckReport, Finding, FreeSpace, RepairReport, Severity, VolumeCheck};
use pmem_volume::{Pool, PoolInfo, VolumeInfo};
use serde::Serialize;

/// Where text goes, and what comes of it.
pub(crate) type Out<'a> = &'a mut dyn Write;

/// Prints on stdout, all of it or an error: a disk may be full. Who has closed a pipe (`pmvol check
/// pool | head`) has seen enough, and what the command found stays its exit code.
pub(crate) fn emit(text: impl FnOnce(Out<'_>) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match text(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot print it"),
    }
}

/// Says something on stderr. If that is not heard, nobody is there to be told.
pub(crate) fn remark(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "pmvol: {text}");
}

pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    emit(|out| writeln!(out, "{text}"))
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
    /// The worst of the findings.
    state: &'static str,
    /// How many things are damaged. What a crash leaves behind by design does not count.
    findings: usize,
    /// Bytes of the file without blocks of their own, although the pool is not thin.
    lost_blocks_bytes: u64,
    /// File system that writes changed blocks to a new place.
    copy_on_write: Option<&'static str>,
    /// To be erased before it is used again. If nobody has the pool, that includes what somebody
    /// had borrowed who ended.
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
            // As the next who opens it will have it.
            let available_bytes = info.free_bytes + waiting_bytes;
            let reserved_bytes =
                info.strg_bytes.saturating_sub(info.volume_bytes).min(available_bytes);
            info.lendable_bytes = available_bytes - reserved_bytes;
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

/// The worst that was found when the pool was opened, and how many things are damaged. What is in
/// volumes was not looked at.
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
pub(crate) fn note_copy_on_write(pool: &Pool) {
    if let Some(file_system) = pool.copy_on_write() {
        let finding = Finding::CopyOnWrite { file_system };
        remark(format_args!("warning: {}: {finding}", pool.path().display()));
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
        if info.thin { "yes: free chunks take no room" } else { "no" }
    )?;
    if report.lost_blocks_bytes > 0 {
        let lost = Size(report.lost_blocks_bytes).rounded();
        writeln!(
            out,
            "lost blocks  {lost} (a sparse copy or a clone; allocated again when the pool is opened for writing)"
        )?;
    }
    if let Some(file_system) = report.copy_on_write {
        writeln!(out, "file system  {file_system} (copy-on-write: a store may find it full)")?;
    }
    writeln!(out, "in use by    {}", report.in_use_by.as_deref().unwrap_or("nobody"))?;
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
            "  damaged    {} (owner unknown; kept as it is)",
            Size(info.damaged_bytes).rounded()
        )?;
    }
    writeln!(out, "  retired    {}", Size(info.retired_bytes).rounded())?;
    writeln!(out, "  metadata   {}", Size(info.metadata_bytes).rounded())?;
    writeln!(
        out,
        "STRG         {} (reserved for volumes, never lent as memory)",
        Size(info.strg_bytes).rounded()
    )?;
    writeln!(out, "lendable     {}", Size(info.lendable_bytes).rounded())?;
    if report.waiting_bytes > 0 {
        writeln!(
            out,
            "to be erased {}{}",
            Size(report.waiting_bytes).rounded(),
            who_erases(report)
        )?;
    }
    Ok(())
}

fn findings_of(report: &InfoReport) -> String {
    let (path, count) = (report.path.display(), report.findings as u64);
    let more =
        if report.is_damaged() { "; nothing can be changed before it is repaired" } else { "" };
    if count == 0 {
        String::new()
    } else {
        format!(": {}, see `pmvol check {path}`{more}", findings(count))
    }
}

pub(crate) fn findings(count: u64) -> String {
    if count == 1 { "1 finding".to_owned() } else { format!("{count} findings") }
}

fn who_erases(report: &InfoReport) -> String {
    match &report.in_use_by {
        // By a VM, that is; who only reads has it for a moment.
        Some(_) => " (in the background)".to_owned(),
        None if report.is_damaged() => " (when the pool is repaired)".to_owned(),
        None => format!(" (when it is needed, or now by `pmvol scrub {}`)", report.path.display()),
    }
}

/// Says on stderr that a list of volumes may lack some.
pub(crate) fn note_damage(path: &Path, pool: &Pool) {
    if let (state, 1..) = state(pool) {
        remark(format_args!(
            "the pool is {state}, and volumes may be missing here; see `pmvol check {}`",
            path.display()
        ));
    }
}

/// Says on stderr what a command that is done leaves to be erased.
pub(crate) fn note_waiting(pool: &Pool) {
    let waiting_bytes = pool.info().scrubbing_bytes;
    if waiting_bytes > 0 {
        remark(format_args!("{}", waiting(pool.path(), waiting_bytes)));
    }
}

fn waiting(path: &Path, waiting_bytes: u64) -> String {
    format!(
        "{} wait to be erased before they are used again; `pmvol scrub {}` does it now",
        Size(waiting_bytes).rounded(),
        path.display()
    )
}

pub(crate) fn scrubbed(out: Out<'_>, path: &Path, erased_bytes: u64) -> io::Result<()> {
    match erased_bytes {
        0 => writeln!(out, "pool {}: nothing to erase", path.display()),
        bytes => writeln!(out, "pool {}: {} erased", path.display(), Size(bytes).rounded()),
    }
}

pub(crate) fn pool_made(out: Out<'_>, path: &Path, info: &PoolInfo) -> io::Result<()> {
    writeln!(
        out,
        "pool {} made: {}, {} free, durability {}",
        path.display(),
        Size(info.total_bytes).rounded(),
        Size(info.free_bytes).rounded(),
        info.durability.name()
    )
}

pub(crate) fn pool_grown(out: Out<'_>, path: &Path, info: &PoolInfo) -> io::Result<()> {
    writeln!(
        out,
        "pool {} grown: {}, {} free",
        path.display(),
        Size(info.total_bytes).rounded(),
        Size(info.free_bytes).rounded()
    )
}

pub(crate) fn volume_made(out: Out<'_>, volume: &VolumeInfo) -> io::Result<()> {
    writeln!(
        out,
        "volume {} made: {}, {}",
        volume.name,
        Size(volume.size_bytes).rounded(),
        volume.format.as_str()
    )
}

pub(crate) fn volume_resized(out: Out<'_>, volume: &VolumeInfo) -> io::Result<()> {
    writeln!(
        out,
        "volume {} resized: {}, {}, in {} piece(s)",
        volume.name,
        Size(volume.size_bytes).rounded(),
        volume.format.as_str(),
        volume.extents
    )
}

pub(crate) fn volume_split(out: Out<'_>, name: &str, parts: &[VolumeInfo]) -> io::Result<()> {
    writeln!(out, "volume {name} split into {}:", parts.len())?;
    volumes(out, parts)
}

pub(crate) fn volumes(out: Out<'_>, volumes: &[VolumeInfo]) -> io::Result<()> {
    let width = volumes.iter().map(|v| v.name.chars().count()).chain([4]).max().unwrap_or(4);
    writeln!(out, "{:width$}  {:>10}  {:6}  {:>7}  UUID", "NAME", "SIZE", "FORMAT", "EXTENTS")?;
    for volume in volumes {
        writeln!(
            out,
            "{:width$}  {:>10}  {:6}  {:>7}  {}",
            volume.name,
            Size(volume.size_bytes).rounded(),
            volume.format.as_str(),
            volume.extents,
            volume.uuid
        )?;
    }
    Ok(())
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
            "of {} nobody can say whose they are; they stay as they are",
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
            "not clean: {}; `pmvol repair {} --dry-run` says what can be mended",
            findings(count),
            path.display()
        ),
    }
}

pub(crate) fn repair(out: Out<'_>, report: &RepairReport, dry_run: bool) -> io::Result<()> {
    let mended = if dry_run { "would mend" } else { "mended" };
    for what in &report.mended {
        writeln!(out, "{mended}: {what}")?;
    }
    for what in &report.left {
        writeln!(out, "left: {what}")?;
    }
    for name in &report.incomplete_volumes {
        writeln!(
            out,
            "`pmvol repair --give-up-volume {name}` gives up the rest of {name:?}, which cannot be read after that"
        )?;
    }
    match (report.mended.is_empty(), report.left.is_empty()) {
        (true, true) => writeln!(out, "nothing to mend"),
        (_, true) => writeln!(out, "nothing left"),
        (_, false) if dry_run => writeln!(out, "not clean: what is left cannot be mended"),
        (_, false) => writeln!(out, "not clean: what is left could not be mended"),
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
        writeln!(out, "volume {name}: {} sectors, every block named once", btt.sectors())?;
    }
    Ok(())
}

/// What a check of a BTT found, arena by arena, each line with something before it.
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
