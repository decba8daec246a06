//! Runs guests that write until the host's power is cut, and checks their data after the next boot.
//!
//! Acknowledgments must be recorded outside of the host. Every line is written to standard output.
//! A file contains the lines of all earlier boots.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use guest_tests::torn::{Interface, Load, Setup, Victim};
use guest_tests::{Kernel, Pool};
use guest_tools::content::Bytes;
use guest_tools::torn::report::Line;

use crate::kills::Volume;

/// Medium of a pool that survives the host.
#[derive(Debug, Clone, Copy)]
struct Medium {
    /// Prefix of the lines about this pool.
    name: &'static str,
    dir: &'static str,
    /// Durability class that `pmvol info` should report.
    class: &'static str,
    /// Number of sectors between two flushes. If each flush goes to the disk, a few are enough.
    max_unflushed_sectors: u64,
}

/// ci/nested/host creates these media (`--disk`, `--nvdimm-file`).
const MEDIA: [Medium; 2] = [
    Medium { name: "disk", dir: "/disk", class: "page-cache", max_unflushed_sectors: 4 },
    Medium { name: "dax", dir: "/pm", class: "dax-sync", max_unflushed_sectors: 256 },
];

/// Pool that does not survive the host.
const VOLATILE: &str = "/dev/shm/pool";

/// Line after which the power may be cut.
const ALL_WRITE: &str = "all guests write";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Check the content after the last cut, and write until the power is cut.
    Write,
    /// Same as `Write`, but flushes of the VMMs do nothing.
    WriteUnflushed,
    Check,
    /// Check the content after flushes that did nothing. Data on the disk should have been lost.
    CheckForLosses,
}

/// Runs a task. `earlier_lines` is a file with the lines of earlier boots, and is empty before the
/// first boot.
pub(crate) fn run(
    task: Task,
    seed: u64,
    volume: Volume,
    earlier_lines: &Path,
) -> Result<Infallible> {
    let earlier_lines = fs::read_to_string(earlier_lines)
        .with_context(|| format!("Cannot read {}", earlier_lines.display()))?;
    let first = earlier_lines.is_empty();
    check_volatile_pool_is_gone(first)?;
    let mut random = Bytes::new(seed);
    let mut victims = Vec::new();
    for medium in MEDIA {
        let interface = Interface::ALL[(random.next_u64() % Interface::ALL.len() as u64) as usize];
        let kernel = [Kernel::V6_12, Kernel::V6_1][(random.next_u64() % 2) as usize];
        let setup = volume.setup(interface, kernel)?;
        // A mapped volume has no discards.
        let has_discards = setup.is_thin && interface == Interface::VirtioBlk;
        let setup = Setup {
            max_unflushed_sectors: medium.max_unflushed_sectors,
            has_noop_flushes: task == Task::WriteUnflushed,
            load: setup.load.or(has_discards.then_some(Load::Discard)),
            ..setup
        };
        let victim = victim(
            medium,
            setup,
            random.next_u64(),
            if first { None } else { Some(&earlier_lines) },
        );
        let mut victim = victim.with_context(|| format!("Pool in {}", medium.dir))?;
        if !first {
            classify(medium, &mut victim, task)?;
        }
        println!("{}: {}, {setup}", medium.name, medium.class);
        victims.push((medium, victim));
    }
    match task {
        Task::Write | Task::WriteUnflushed => write(victims),
        Task::Check | Task::CheckForLosses => std::process::exit(0),
    }
}

/// Checks that a pool in memory disappeared together with the host, and creates a new pool.
fn check_volatile_pool_is_gone(first: bool) -> Result<()> {
    let pool = Pool::by_path(Path::new(VOLATILE));
    ensure!(!pool.path().exists(), "{VOLATILE} survived the power cut");
    guest_tests::pool::pmvol(&["create", VOLATILE, "--size", "32M"])?;
    let class = pool.durability()?;
    ensure!(class == "volatile", "{VOLATILE} is {class}");
    if !first {
        println!("memory: volatile and lost, as expected");
    }
    Ok(())
}

/// Opens a pool's volume, given the acknowledgments to earlier guests. Creates the volume if no
/// guest has used it yet.
fn victim(
    medium: Medium,
    setup: Setup,
    seed: u64,
    earlier_lines: Option<&String>,
) -> Result<Victim> {
    let pool = Pool::by_path(&PathBuf::from(medium.dir).join("pool"));
    let victim = match earlier_lines {
        None => Victim::create(pool, setup, seed)?,
        Some(earlier_lines) => {
            let mut victim = Victim::resume(pool, setup, seed);
            // A last line without an end was cut off by the power cut.
            for line in
                earlier_lines.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
            {
                if let Some(line) =
                    line.strip_prefix(medium.name).and_then(|line| line.strip_prefix(' '))
                    && let Line::Flushed(flushed) = line.parse()?
                {
                    victim.acknowledge(flushed)?;
                }
            }
            victim
        }
    };
    let class = victim.pool().durability()?;
    ensure!(class == medium.class, "The pool's durability is {class} instead of {}", medium.class);
    Ok(victim)
}

fn classify(medium: Medium, victim: &mut Victim, task: Task) -> Result<()> {
    let redo = victim.check().with_context(|| format!("After the power cut, in {}", medium.dir))?;
    let classification = victim.classify()?;
    println!(
        "{}: {} sectors, {} newer than acknowledged, {redo} before their map entry; {} torn, {} lost",
        medium.name,
        classification.versions.len(),
        classification.newer,
        classification.torn(),
        classification.lost()
    );
    if task == Task::CheckForLosses && medium.class == "page-cache" {
        ensure!(classification.lost() > 0, "No sector was lost although flushes had no effect");
        return Ok(());
    }
    let checked = classification.ensure_no_faults().and_then(|()| victim.check_space());
    checked.with_context(|| format!("After the power cut, in {}", medium.dir))
}

/// Writes to all pools until the power is cut.
fn write(victims: Vec<(Medium, Victim)>) -> Result<Infallible> {
    // All guests wait here, and so does the thread that reports that all of them write.
    let all_write = Barrier::new(victims.len() + 1);
    thread::scope(|scope| {
        for (medium, mut victim) in victims {
            let all_write = &all_write;
            scope.spawn(move || {
                let mut is_first = true;
                let ended: Error = victim.write_until_it_ends(|line, all_have_flushed| {
                    if matches!(line, Line::Flushed(_)) {
                        println!("{} {line}", medium.name);
                    }
                    if all_have_flushed && std::mem::take(&mut is_first) {
                        all_write.wait();
                    }
                });
                // The whole process ends, because the other threads would wait forever for this
                // one.
                eprintln!("soak: {}: {ended:#}", medium.name);
                std::process::exit(1);
            });
        }
        all_write.wait();
        println!("{ALL_WRITE}");
    });
    Err(anyhow!("The guests ended before the power cut"))
}

pub(crate) fn task(name: &str) -> Result<Task> {
    Ok(match name {
        "write" => Task::Write,
        "write-and-lie" => Task::WriteUnflushed,
        "look" => Task::Check,
        "look-for-losses" => Task::CheckForLosses,
        _ => bail!(
            "no such task: {name:?}; existing tasks: write, write-and-lie, look, look-for-losses"
        ),
    })
}
