//! Tests of crash consistency: after a kill at any time, each sector has its old or its new
//! content, and flushed data is not lost.
//!
//! These tests run only a few rounds. `ci/soak` runs many.

use std::path::Path;

use anyhow::{Result, ensure};
use guest_tests::disk::HeldWriteback;
use guest_tests::runner::{print_figure, this_tests_dir};
use guest_tests::torn::{
    Format, Interface, KillTime, Load, Setup, Until, Victim, run_rounds, seed,
};
use guest_tests::user::need_root;
use guest_tests::{Disk, Kernel, Pool, torn};

use crate::volume_thin::USERFAULTS;

guest_tests::tests![
    kills_with_an_nvdimm_tear_nothing: 600 x several =>
        kills(&this_tests_dir(), Setup::new(Interface::Nvdimm)),
    kills_with_an_nvdimm_that_is_flushed_tear_nothing: 600 (long) on [V6_1] x several,
    kills_with_virtio_pmem_tear_nothing: 600 (long) =>
        kills(&this_tests_dir(), Setup::new(Interface::VirtioPmem)),
    // With virtio-blk, the BTT engine runs in the VMM, so a kill interrupts our engine.
    kills_with_virtio_blk_tear_nothing: 600 (long) x several =>
        kills(&this_tests_dir(), Setup::new(Interface::VirtioBlk)),
    kills_with_a_thin_volume_tear_nothing: 600 (long) x several =>
        kills(&this_tests_dir(), Setup { is_thin: true, ..Setup::new(Interface::VirtioBlk) }),
    kills_with_a_thin_nvdimm_tear_nothing: 600 (long) x several =>
        kills_of_a_mapped_thin_volume(Interface::Nvdimm),
    kills_with_a_thin_volume_by_virtio_pmem_tear_nothing: 600 (long) =>
        kills_of_a_mapped_thin_volume(Interface::VirtioPmem),
    kills_during_releases_lose_nothing: 600 (long) on [V6_12 & V6_1] x several,
    kills_during_compaction_lose_nothing: 600 (long) on [V6_1] x several,
    kills_during_spills_lose_nothing: 600 (long) on [V6_12 & V6_1] x several,
    kills_beside_redis_under_pressure_lose_nothing: 600 (extended) x several,
    kills_with_a_raw_device_tear_sectors: 400 (long) x several,
    power_cuts_lose_nothing_that_an_nvdimm_has_flushed: 300 (extended) x several =>
        after_power_cut(Setup::new(Interface::Nvdimm))?.ensure_no_faults(),
    power_cuts_lose_nothing_that_virtio_pmem_has_flushed: 300 (extended) =>
        after_power_cut(Setup::new(Interface::VirtioPmem))?.ensure_no_faults(),
    power_cuts_lose_data_of_ignored_flushes: 300 (extended) x several,
];

const KILLS: u32 = 6;

/// Number of concurrent guests. On two CPUs, two guests boot in the same time as one.
const LANES: u64 = 2;

fn victims(dir: &Path, setup: Setup) -> Result<Vec<Victim>> {
    let seed = seed()?;
    let victim =
        |lane| Victim::create(Pool::by_path(&dir.join(format!("pool{lane}"))), setup, seed + lane);
    (0..LANES).map(victim).collect()
}

fn kills(dir: &Path, setup: Setup) -> Result<()> {
    let tally = run_rounds(victims(dir, setup)?, KILLS, Until::Done)?;
    print_figure(format_args!("{setup}: {tally}"));
    ensure!(tally.flushes > 0, "No flush was acknowledged, so the test proves nothing");
    Ok(())
}

fn kills_of_a_mapped_thin_volume(interface: Interface) -> Result<()> {
    need_root(USERFAULTS)?;
    kills(&this_tests_dir(), Setup { is_thin: true, ..Setup::new(interface) })
}

/// The VMM moves or releases chunks of volumes while the guests write other sectors of them.
fn kills_under(loads: &[(Load, Kernel, Interface, u32)]) -> Result<()> {
    need_root(USERFAULTS)?;
    let seed = seed()?;
    for (number, (load, kernel, interface, kills)) in (0..).zip(loads) {
        let pool = Pool::by_path(&this_tests_dir().join(format!("pool{number}")));
        let setup = Setup::with_load(*load, *kernel, *interface);
        let victim = Victim::create(pool, setup, seed + number)?;
        let tally = run_rounds(vec![victim], *kills, Until::Done)?;
        print_figure(format_args!("{setup}: {tally}"));
        ensure!(tally.flushes > 0, "No flush was acknowledged, so the test proves nothing");
        ensure!(tally.moved_bytes > 0, "The VMM moved and released no chunks under the load");
    }
    Ok(())
}

fn kills_during_releases_lose_nothing() -> Result<()> {
    kills_under(&[
        (Load::Trim, Kernel::V6_12, Interface::Nvdimm, 1),
        (Load::Trim, Kernel::V6_12, Interface::VirtioPmem, 1),
        (Load::Discard, Kernel::V6_1, Interface::VirtioBlk, 1),
    ])
}

fn kills_during_compaction_lose_nothing() -> Result<()> {
    kills_under(&[(Load::Compaction, Kernel::V6_1, Interface::VirtioBlk, 2)])
}

fn kills_during_spills_lose_nothing() -> Result<()> {
    kills_under(&[
        (Load::Spill, Kernel::V6_1, Interface::Nvdimm, 1),
        (Load::Spill, Kernel::V6_12, Interface::VirtioBlk, 1),
        (Load::Spill, Kernel::V6_12, Interface::VirtioPmem, 1),
        (Load::SpillFile, Kernel::V6_12, Interface::Nvdimm, 1),
    ])
}

/// Redis uses the borrowed memory while the VMM moves it.
fn kills_beside_redis_under_pressure_lose_nothing() -> Result<()> {
    kills_under(&[
        (Load::Redis, Kernel::V6_12, Interface::VirtioBlk, 1),
        (Load::Redis, Kernel::V6_12, Interface::Nvdimm, 1),
    ])
}

/// Each flush in the guest causes a flush of the host's file system.
fn kills_with_an_nvdimm_that_is_flushed_tear_nothing() -> Result<()> {
    let disk = Disk::create(128, 256)?;
    kills(
        disk.dir(),
        Setup { max_unflushed_sectors: 4, kernel: Kernel::V6_1, ..Setup::new(Interface::Nvdimm) },
    )
}

/// Shows that the tests above can fail: the same kills should tear sectors of a raw device.
fn kills_with_a_raw_device_tear_sectors() -> Result<()> {
    let setup = Setup { format: Format::Raw, checks: 60, ..Setup::new(Interface::VirtioPmem) };
    let tally = run_rounds(victims(&this_tests_dir(), setup)?, MAX_KILLS_UNTIL_TORN, Until::Torn)?;
    ensure!(tally.torn > 0, "{setup}: {tally}");
    Ok(())
}

/// Maximum number of kills until a sector should be torn. Under emulation, about one kill in
/// fifteen hits the middle of a sector write.
const MAX_KILLS_UNTIL_TORN: u32 = 6;

/// Compares the content of the disk after a power cut with the acknowledgments. Caches are lost.
fn after_power_cut(setup: Setup) -> Result<torn::Classification> {
    let _held = HeldWriteback::hold()?;
    let disk = Disk::create(128, 512)?;
    let pool = Pool::by_path(&disk.dir().join("pool"));
    let mut victim = Victim::create(pool, Setup { max_unflushed_sectors: 4, ..setup }, seed()?)?;
    let durability = victim.pool().durability()?;
    ensure!(durability == "page-cache", "A pool on a disk is {durability}");
    // Dirty data in the page cache is not older than the guest's last boot.
    for delay_ms in [100, 250] {
        let killed_guest = victim
            .write_until_kill(KillTime::Writing(std::time::Duration::from_millis(delay_ms)))?;
        ensure!(
            killed_guest.counts.flushes > 0,
            "No flush was acknowledged, so the test proves nothing"
        );
    }
    victim.check()?;
    let pool = Pool::by_path(&disk.after_power_loss()?.join("pool"));
    torn::victim::check(&pool)?;
    victim.classify_at(pool.path())
}

/// Shows that the test above can fail: if flushes do nothing, acknowledged data should be lost.
fn power_cuts_lose_data_of_ignored_flushes() -> Result<()> {
    let classification =
        after_power_cut(Setup { has_noop_flushes: true, ..Setup::new(Interface::Nvdimm) })?;
    ensure!(classification.lost() > 0, "No sector was lost although flushes had no effect");
    Ok(())
}
