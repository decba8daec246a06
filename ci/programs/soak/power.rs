//! Guests that write until the power of the host is cut, and what the next boot finds.
//!
//! What was acknowledged is known outside of the host alone: every line goes to the standard
//! output, and the lines of all boots before come back in a file.

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

/// A pool that outlives the host.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// What its lines begin with.
    name: &'static str,
    dir: &'static str,
    /// What `pmvol info` must say that a flush survives there.
    class: &'static str,
    /// Where a flush is one of the disk, few sectors between two of them are enough.
    longest: u64,
}

/// ci/nested/host makes both (`--disk`, `--nvdimm-file`).
const PLACES: [Place; 2] = [
    Place { name: "disk", dir: "/disk", class: "page-cache", longest: 4 },
    Place { name: "dax", dir: "/pm", class: "dax-sync", longest: 256 },
];

/// A pool that does not.
const VOLATILE: &str = "/dev/shm/pool";

/// After this line the power may be cut.
const ALL_WRITE: &str = "all guests write";

/// What is asked of a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// To look at what the last one has left, and to write until the power is cut.
    Write,
    /// The same, by VMMs whose flushes do nothing.
    WriteAndLie,
    Look,
    /// To look at what lies have left: something must be lost on the disk.
    LookForLosses,
}

/// Does it. `heard` has what the boots before have said; it is empty before the first one.
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
        let mut victim = victim.with_context(|| format!("The pool in {}", place.dir))?;
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

/// A pool in memory is gone with the host; a new one takes its place.
fn see_that_the_volatile_is_gone(first: bool) -> Result<()> {
    let pool = Pool::by_path(Path::new(VOLATILE));
    ensure!(!pool.path().exists(), "{VOLATILE} has survived");
    guest_tests::pool::pmvol(&["create", VOLATILE, "--size", "32M"])?;
    let class = pool.durability()?;
    ensure!(class == "volatile", "{VOLATILE} is {class}");
    if !first {
        println!("memory: volatile, and gone");
    }
    Ok(())
}

/// The pool's volume, and what its guests were told before. Without that it is made.
fn victim(place: Place, setup: Setup, seed: u64, heard: Option<&String>) -> Result<Victim> {
    let pool = Pool::by_path(&PathBuf::from(place.dir).join("pool"));
    let victim = match heard {
        None => Victim::create(pool, setup, seed)?,
        Some(heard) => {
            let mut victim = Victim::resume(pool, setup, seed);
            // The power cut has cut off the last line, if it had no end.
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
    ensure!(class == place.class, "Its class is {class} and not {}", place.class);
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
        ensure!(
            judgement.lost() > 0,
            "Flushes did nothing, and nothing was lost: this proves nothing"
        );
        return Ok(());
    }
    judgement.all_is_well().with_context(|| format!("After the power cut, in {}", place.dir))
}

/// Writes to all of them until the power is cut.
fn write(victims: Vec<(Place, Victim)>) -> Result<Infallible> {
    // Of all guests, and of whoever says that all write.
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
                // All of it ends: the others would wait for this one for ever.
                eprintln!("soak: {}: {ended:#}", place.name);
                std::process::exit(1);
            });
        }
        all_write.wait();
        println!("{ALL_WRITE}");
    });
    Err(anyhow!("The guests have ended, and the power was not cut"))
}

pub(crate) fn task(name: &str) -> Result<Task> {
    Ok(match name {
        "write" => Task::Write,
        "write-and-lie" => Task::WriteAndLie,
        "look" => Task::Look,
        "look-for-losses" => Task::LookForLosses,
        _ => bail!("{name:?} is none of write, write-and-lie, look, look-for-losses"),
    })
}
