//! Runs many kills, sequentially and concurrently.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use guest_tools::CorruptData;

use super::victim::Victim;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub rounds: u32,
    pub checks: u32,
    /// Number of guests that the emulation broke. They do not count as rounds.
    pub broken: u32,
    pub flushes: usize,
    /// Number of sectors that a kill or a stop found after their write but before its
    /// acknowledgment.
    pub newer: usize,
    /// Number of writes that a kill or a stop interrupted between the log and the map.
    pub redo: u64,
    pub torn: usize,
    pub lost: usize,
    /// Longest time between two flushes of a thread.
    pub longest_gap: Duration,
    /// Bytes that the loads made the VMMs move or release.
    pub moved_bytes: u64,
    /// Upper bound of the longest wait of a store to a hole for its chunk.
    pub longest_fill: Duration,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.checks += other.checks;
        self.broken += other.broken;
        self.flushes += other.flushes;
        self.newer += other.newer;
        self.redo += other.redo;
        self.torn += other.torn;
        self.lost += other.lost;
        self.longest_gap = self.longest_gap.max(other.longest_gap);
        self.moved_bytes += other.moved_bytes;
        self.longest_fill = self.longest_fill.max(other.longest_fill);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rounds,
            checks,
            broken,
            flushes,
            newer,
            redo,
            torn,
            lost,
            longest_gap,
            moved_bytes,
            longest_fill,
        } = self;
        write!(
            formatter,
            "{rounds} kills, {checks} looks, {flushes} flushes acknowledged, {newer} sectors caught before their answer, {redo} before \
             their map entry; {torn} torn, {lost} lost; longest time between two flushes {} ms",
            longest_gap.as_millis()
        )?;
        if *moved_bytes > 0 {
            write!(formatter, "; {} KiB moved or released", moved_bytes / 1024)?;
        }
        if !longest_fill.is_zero() {
            write!(
                formatter,
                "; stores to holes waited for up to {} ms",
                longest_fill.as_millis()
            )?;
        }
        if *broken > 0 {
            write!(formatter, "; {broken} guests broken by the emulation")?;
        }
        Ok(())
    }
}

/// Returns the seed from FORESHORE_TEST_SEED, or a new one. Prints the seed, so that the schedule
/// can be repeated.
pub fn seed() -> Result<u64> {
    let seed = match std::env::var("FORESHORE_TEST_SEED") {
        Ok(text) => text
            .parse()
            .with_context(|| format!("FORESHORE_TEST_SEED is {text:?}, must be a number"))?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64 % 1_000_000_000,
    };
    println!("FORESHORE_TEST_SEED={seed}");
    Ok(seed)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Until all rounds are done. Any fault is an error.
    Done,
    /// Until a sector is torn. Any other fault is an error.
    Torn,
}

/// Kills the guests of all victims concurrently, at most `rounds` times in total. After each kill,
/// every sector should be whole and as new as acknowledged, `pmvol check` should find no problem,
/// and the next guest should read the same content as the test. Stops at the first fault.
pub fn run_rounds(victims: Vec<Victim>, rounds: u32, until: Until) -> Result<Tally> {
    let schedule =
        Schedule { rounds, until, started_rounds: AtomicU32::new(0), stop: AtomicBool::new(false) };
    thread::scope(|scope| {
        let lane = |(lane, mut victim): (usize, Victim)| {
            let schedule = &schedule;
            scope.spawn(move || schedule.run_lane(lane, &mut victim))
        };
        let lanes: Vec<_> = victims.into_iter().enumerate().map(lane).collect();
        lanes.into_iter().try_fold(Tally::default(), |mut sum, lane| {
            sum.add(lane.join().map_err(|_| anyhow!("A lane has panicked"))??);
            Ok(sum)
        })
    })
}

struct Schedule {
    rounds: u32,
    until: Until,
    started_rounds: AtomicU32,
    stop: AtomicBool,
}

impl Schedule {
    fn run_lane(&self, lane: usize, victim: &mut Victim) -> Result<Tally> {
        let mut sum = Tally::default();
        while !self.stop.load(Ordering::Relaxed) {
            let round = self.started_rounds.fetch_add(1, Ordering::Relaxed) + 1;
            if round > self.rounds {
                break;
            }
            let tally =
                self.one_round(lane, victim).with_context(|| format!("Round {round}, lane {lane}"));
            let end =
                tally.as_ref().map_or(true, |tally| self.until == Until::Torn && tally.torn > 0);
            self.stop.fetch_or(end, Ordering::Relaxed);
            let tally = tally?;
            // Rounds without a verdict are repeated.
            self.started_rounds.fetch_sub(tally.broken, Ordering::Relaxed);
            sum.add(tally);
        }
        Ok(sum)
    }

    fn one_round(&self, lane: usize, victim: &mut Victim) -> Result<Tally> {
        let killed_guest = victim.write_until_random_kill()?;
        let redo = victim
            .check()
            .context(CorruptData)
            .with_context(|| killed_guest.kill_time.to_string())?;
        let classification =
            victim.classify().with_context(|| killed_guest.kill_time.to_string())?;
        let tally = Tally {
            rounds: u32::from(!killed_guest.broken),
            checks: killed_guest.counts.checks,
            broken: u32::from(killed_guest.broken),
            flushes: killed_guest.counts.flushes,
            newer: killed_guest.counts.newer + classification.newer,
            redo: killed_guest.counts.redo + redo,
            torn: classification.torn(),
            lost: classification.lost(),
            longest_gap: killed_guest.counts.longest_gap,
            moved_bytes: killed_guest.counts.moved_bytes,
            longest_fill: killed_guest.counts.longest_fill,
        };
        println!("lane {lane}: {}: {tally}", killed_guest.kill_time);
        if self.until == Until::Done || classification.torn() < classification.faults.len() {
            classification.ensure_no_faults().context(CorruptData)?;
        }
        victim.check_space().with_context(|| killed_guest.kill_time.to_string())?;
        classification.faults.iter().take(1).for_each(|fault| println!("{fault}"));
        Ok(tally)
    }
}
