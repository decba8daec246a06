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
use guest_tests::Pool;
use guest_tests::torn::{Interface, Setup, Victim};
use guest_tools::content::Bytes;
use guest_tools::torn::report::Line;

/// Medium of a pool that survives the host.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Prefix of the lines about this pool.
    name: &'static str,
    dir: &'static str,
    /// Durability class that `pmvol info` should report.
    class: &'static str,
    /// Number of sectors between two flushes. If each flush goes to the disk, a few are enough.
    longest: u64,
}

/// ci/nested/host creates these media (`--disk`, `--nvdimm-file`).
const PLACES: [Place; 2] = [
    Place { name: "disk", dir: "/disk", class: "page-cache", longest: 4 },
    Place { name: "dax", dir: "/pm", class: "dax-sync", longest: 256 },
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
    WriteAndLie,
    Look,
    /// Check the content after flushes that did nothing. Data on the disk should have been lost.
    LookForLosses,
}

/// Runs a task. `heard` is a file with the lines of earlier boots, and is empty before the first
/// boot.
pub(crate) fn run(task: Task, seed: u64, heard: &Path) -> Result<Infallible> {
    let heard =
        fs::read_to_string(heard).with_context(|| format!("Cannot read {}", heard.display()))?;
    let first = heard.is_empty();
    see_that_the_volatile_is_gone(first)?;
    let mut random = Bytes::new(seed);
    let mut victims = Vec::new();
    for place in PLACES {
        let interface = Interface::ALL[(random.next_u64() % Interface::ALL.len() as u64) as usize];
        let flushes_lie = task == Task::WriteAndLie;
        let setup = Setup { longest: place.longest, flushes_lie, ..Setup::new(interface) };
        let victim =
            victim(place, setup, random.next_u64(), if first { None } else { Some(&heard) });
        let mut victim = victim.with_context(|| format!("Pool in {}", place.dir))?;
        if !first {
            judge(place, &mut victim, task)?;
        }
        println!("{}: {} by {interface}", place.name, place.class);
        victims.push((place, victim));
    }
    match task {
        Task::Write | Task::WriteAndLie => write(victims),
        Task::Look | Task::LookForLosses => std::process::exit(0),
    }
}

/// Checks that a pool in memory disappeared together with the host, and creates a new pool.
fn see_that_the_volatile_is_gone(first: bool) -> Result<()> {
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
fn victim(place: Place, setup: Setup, seed: u64, heard: Option<&String>) -> Result<Victim> {
    let pool = Pool::by_path(&PathBuf::from(place.dir).join("pool"));
    let victim = match heard {
        None => Victim::create(pool, setup, seed)?,
        Some(heard) => {
            let mut victim = Victim::resume(pool, setup, seed);
            // A last line without an end was cut off by the power cut.
            for line in heard.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
                if let Some(line) =
                    line.strip_prefix(place.name).and_then(|line| line.strip_prefix(' '))
                    && let Line::Flushed(stretch) = line.parse()?
                {
                    victim.acknowledge(stretch)?;
                }
            }
            victim
        }
    };
    let class = victim.pool().durability()?;
    ensure!(class == place.class, "The pool's durability is {class} instead of {}", place.class);
    Ok(victim)
}

fn judge(place: Place, victim: &mut Victim, task: Task) -> Result<()> {
    let redo = victim.check().with_context(|| format!("After the power cut, in {}", place.dir))?;
    let judgement = victim.judge()?;
    println!(
        "{}: {} sectors, {} newer than acknowledged, {redo} before their map entry; {} torn, {} lost",
        place.name,
        judgement.versions.len(),
        judgement.newer,
        judgement.torn(),
        judgement.lost()
    );
    if task == Task::LookForLosses && place.class == "page-cache" {
        ensure!(judgement.lost() > 0, "No sector was lost although flushes had no effect");
        return Ok(());
    }
    judgement.all_is_well().with_context(|| format!("After the power cut, in {}", place.dir))
}

/// Writes to all pools until the power is cut.
fn write(victims: Vec<(Place, Victim)>) -> Result<Infallible> {
    // All guests wait here, and so does the thread that reports that all of them write.
    let all_write = Barrier::new(victims.len() + 1);
    thread::scope(|scope| {
        for (place, mut victim) in victims {
            let all_write = &all_write;
            scope.spawn(move || {
                let mut silent = true;
                let ended: Error = victim.write_until_it_ends(|line, all_have_flushed| {
                    if matches!(line, Line::Flushed(_)) {
                        println!("{} {line}", place.name);
                    }
                    if all_have_flushed && std::mem::take(&mut silent) {
                        all_write.wait();
                    }
                });
                // The whole process ends, because the other threads would wait forever for this
                // one.
                eprintln!("soak: {}: {ended:#}", place.name);
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
        "write-and-lie" => Task::WriteAndLie,
        "look" => Task::Look,
        "look-for-losses" => Task::LookForLosses,
        _ => bail!(
            "no such task: {name:?}; existing tasks: write, write-and-lie, look, look-for-losses"
        ),
    })
}
