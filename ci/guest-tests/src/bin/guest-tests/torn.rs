//! A sector is the old one or the new one, whatever is killed, whenever; and what was flushed is
//! there.
//!
//! Few rounds here: `ci/soak` has the many.

use std::path::Path;

use anyhow::{Result, ensure};
use guest_tests::disk::HeldWriteback;
use guest_tests::runner::this_tests_dir;
use guest_tests::torn::{Format, Interface, Moment, Setup, Until, Victim, run_rounds, seed};
use guest_tests::{Disk, Kernel, Pool, torn};

guest_tests::tests![
    kills_with_an_nvdimm_tear_nothing: 600 =>
        kills(&this_tests_dir(), Setup::new(Interface::Nvdimm)),
    kills_with_an_nvdimm_that_is_flushed_tear_nothing: 600 (long),
    kills_with_virtio_pmem_tear_nothing: 600 (long) =>
        kills(&this_tests_dir(), Setup::new(Interface::VirtioPmem)),
    // Here the BTT is ours, and so is what a kill interrupts.
    kills_with_virtio_blk_tear_nothing: 600 (long) =>
        kills(&this_tests_dir(), Setup::new(Interface::VirtioBlk)),
    kills_with_a_raw_device_tear_sectors: 400 (long),
    power_cuts_lose_nothing_that_an_nvdimm_has_flushed: 300 (extended) =>
        after_power_cut(Setup::new(Interface::Nvdimm))?.all_is_well(),
    power_cuts_lose_nothing_that_virtio_pmem_has_flushed: 300 (extended) =>
        after_power_cut(Setup::new(Interface::VirtioPmem))?.all_is_well(),
    power_cuts_lose_what_a_lie_has_flushed: 300 (extended),
];

const KILLS: u32 = 6;

/// Guests at once: two CPUs boot two of them in the time of one.
const LANES: u64 = 2;

fn victims(dir: &Path, setup: Setup) -> Result<Vec<Victim>> {
    let seed = seed()?;
    let victim =
        |lane| Victim::create(Pool::by_path(&dir.join(format!("pool{lane}"))), setup, seed + lane);
    (0..LANES).map(victim).collect()
}

fn kills(dir: &Path, setup: Setup) -> Result<()> {
    let tally = run_rounds(victims(dir, setup)?, KILLS, Until::Done)?;
    println!("{setup}: {tally}");
    ensure!(tally.flushes > 0, "No flush was acknowledged: nothing was tried");
    Ok(())
}

/// Each flush of the guest is one of the host's file system.
fn kills_with_an_nvdimm_that_is_flushed_tear_nothing() -> Result<()> {
    let disk = Disk::create(128, 256)?;
    kills(disk.dir(), Setup { longest: 4, kernel: Kernel::V6_1, ..Setup::new(Interface::Nvdimm) })
}

/// The same guests and the same kills. Were nothing torn here, the tests above would prove nothing.
fn kills_with_a_raw_device_tear_sectors() -> Result<()> {
    let setup = Setup { format: Format::Raw, looks: 60, ..Setup::new(Interface::VirtioPmem) };
    let tally = run_rounds(victims(&this_tests_dir(), setup)?, MOST_KILLS_UNTIL_TORN, Until::Torn)?;
    ensure!(tally.torn > 0, "{setup}: {tally}");
    Ok(())
}

/// Emulated, one moment in some fifteen is in the middle of a sector.
const MOST_KILLS_UNTIL_TORN: u32 = 6;

/// What the disk has when the power goes, and nothing of any cache.
fn after_power_cut(setup: Setup) -> Result<torn::Judgement> {
    let _held = HeldWriteback::hold()?;
    let disk = Disk::create(128, 512)?;
    let pool = Pool::by_path(&disk.dir().join("pool"));
    let mut victim = Victim::create(pool, Setup { longest: 4, ..setup }, seed()?)?;
    let durability = victim.pool().durability()?;
    ensure!(durability == "page-cache", "A pool on a disk is {durability}");
    // What only a cache has is no older than the last life of the volume.
    for delay_ms in [100, 250] {
        let life =
            victim.live_until(Moment::Writing(std::time::Duration::from_millis(delay_ms)))?;
        ensure!(life.seen.flushes > 0, "No flush was acknowledged: nothing was tried");
    }
    victim.check()?;
    let pool = Pool::by_path(&disk.after_power_loss()?.join("pool"));
    torn::victim::check(&pool)?;
    victim.judge_at(pool.path())
}

/// Flushes that do nothing lose what they have called durable; otherwise the tests above prove
/// nothing.
fn power_cuts_lose_what_a_lie_has_flushed() -> Result<()> {
    let judgement = after_power_cut(Setup { flushes_lie: true, ..Setup::new(Interface::Nvdimm) })?;
    ensure!(judgement.lost() > 0, "Flushes did nothing, and nothing was lost");
    Ok(())
}
