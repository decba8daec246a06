//! Compatibility tests for our BTT engine and Linux' driver, in both directions.
//!
//! Both sides run programs of random operations that a seed determines ([`guest_tools::sectors`]),
//! so each can compute the content that the other should have written. `FORESHORE_TEST_SEED=N`
//! selects other programs.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use guest_tests::btt_media::BttMedia;
use guest_tests::guest::complaints;
use guest_tests::pool::pmvol;
use guest_tests::user::need_root;
use guest_tests::{Guest, GuestBuilder, Kernel, Pool};
use guest_tools::sectors::{Flogs, Outcome, Padding, Program, Shape, Storage, run};
use pmem_volume::btt::Engine;
use pmem_volume::{OpenMode, Volume};

use crate::volume::IO_LIMIT;
use crate::volume_thin::USERFAULTS;

guest_tests::tests![
    linux_and_the_engine_use_a_disk_in_turn: 300 (long) on [V6_12 & V6_1] x several,
    linux_and_the_engine_use_a_disk_of_two_arenas_in_turn: 300 (extended) on [V6_12 & V6_1]
        x several,
    a_readonly_volume_is_recovered_before_it_is_shown: 300 x 2,
    linux_replays_a_log_in_every_state_as_the_engine: 300 (extended) on [V6_12, V6_1] x 4,
    engine_reads_writes_of_linux: 300 (extended) on [V6_12, V6_1] x 2 => linux_writes(2, "nvdimm"),
    engine_reads_writes_of_linux_through_virtio_pmem: 900 (extended) =>
        linux_writes(1, "virtio-pmem"),
    linux_reads_writes_of_the_engine: 300 (extended) on [V6_12, V6_1] x 2,
];

const OPERATIONS: u64 = 10_000;

/// Number of operations of each side near the border between two arenas. About one in sixty crosses
/// it.
const AROUND_BORDER: u64 = 600;

/// Size of a disk with two arenas of at least 16 MiB each.
const ARENAS_MIB: u64 = 36;

/// Returns the seed of a program: `test_seed`, or a seed from the environment.
pub(crate) fn seed(test_seed: u64) -> Result<u64> {
    match std::env::var("FORESHORE_TEST_SEED") {
        Ok(base) => {
            Ok(test_seed
                + base.parse::<u64>().context("FORESHORE_TEST_SEED is not a number")? * 1000)
        }
        Err(_) => Ok(test_seed),
    }
}

pub(crate) struct Disk {
    pool: PathBuf,
    pub name: String,
    /// Content of the volume while no VM uses it.
    pub media: BttMedia,
    pub shape: Shape,
    /// First sector of each arena.
    pub arenas: Vec<u64>,
    /// Index of the arena that refuses writes.
    pub damaged: Option<usize>,
}

impl Disk {
    pub(crate) fn create(
        pool: &Pool,
        name: &str,
        size_mib: u64,
        sector_bytes: u32,
    ) -> Result<Self> {
        // `BttMedia` writes to all of the volume, which must therefore have no holes.
        let size = format!("{size_mib}M");
        pmvol(&["volume", "create", &pool.name(), name, "--size", &size, "--thick"])?;
        BttMedia::open(pool, name)?.format(sector_bytes)?;
        Self::open(pool, name)
    }

    /// Creates a thin volume with sectors of 4096 bytes.
    fn create_thin(pool: &Pool, name: &str, size_mib: u64) -> Result<Self> {
        let size = format!("{size_mib}M");
        pmvol(&["volume", "create", &pool.name(), name, "--size", &size, "--thin"])?;
        Self::open(pool, name)
    }

    /// Creates a volume and then grows it, so that it has two arenas. Otherwise only volumes larger
    /// than 512 GiB have a second arena. Linux' driver accepts arenas of any size, and finds the
    /// next arena by its info block (drivers/nvdimm/btt.c, discover_arenas).
    pub(crate) fn create_with_two_arenas(
        pool: &Pool,
        name: &str,
        size_mib: u64,
        sector_bytes: u32,
    ) -> Result<Self> {
        Self::create(pool, name, size_mib / 2, sector_bytes)?;
        pmvol(&["volume", "resize", &pool.name(), name, "--size", &format!("{size_mib}M")])?;
        let disk = Self::open(pool, name)?;
        ensure!(disk.arenas.len() == 2, "{name} has the arenas {:?}", disk.arenas);
        Ok(disk)
    }

    fn open(pool: &Pool, name: &str) -> Result<Self> {
        let media = BttMedia::open(pool, name)?;
        let (shape, arenas) = (media.shape()?, media.first_sectors()?);
        Ok(Self {
            pool: pool.path().to_owned(),
            name: name.to_owned(),
            media,
            shape,
            arenas,
            damaged: None,
        })
    }

    /// Verifies the content with both of our readers, and checks the volume. No guest may be using
    /// it.
    pub(crate) fn verify(&self, history: &[impl AsRef<str>]) -> Result<()> {
        let outcome = Outcome::of_history(self.shape, history)?;
        // A thin volume has other chunks than before.
        let media = BttMedia::open(&Pool::by_path(&self.pool), &self.name)?;
        let verified = media.verify(&outcome).context("Content read by Reader");
        verified.with_context(|| format!("Volume {}", self.name))?;
        self.verify_by_engine(&outcome)
    }

    pub(crate) fn verify_by_engine(&self, outcome: &Outcome) -> Result<()> {
        let verified =
            self.with_engine(|engine| engine.verify(outcome)).context("Content read by Engine");
        verified.with_context(|| format!("Volume {}", self.name))
    }

    pub(crate) fn write(&self, program: &str) -> Result<()> {
        let program: Program = program.parse()?;
        self.with_engine(|engine| run(&program, self.shape, engine))
    }

    fn with_engine(&self, run: impl FnOnce(&OnEngine) -> Result<()>) -> Result<()> {
        let pool = pmem_volume::Pool::open(&self.pool, OpenMode::ReadWrite)?;
        let engine = Engine::open(pool.open_volume(&self.name)?)?;
        for (number, arena) in engine.arenas().into_iter().enumerate() {
            let expected = self.damaged == Some(number);
            ensure!(
                arena.read_only.is_some() == expected,
                "Arena must be read-only: {expected}; found {arena:?}"
            );
        }
        run(&OnEngine(engine))
    }
}

/// Storage for programs that run on our engine.
struct OnEngine(Engine<Volume>);

impl OnEngine {
    fn verify(&self, outcome: &Outcome) -> Result<()> {
        outcome.check(|first, into| Ok(self.0.read(first, into)?))
    }
}

impl Storage for OnEngine {
    fn write(&self, first: u64, bytes: &[u8], _buffered: bool) -> Result<()> {
        Ok(self.0.write(first, bytes)?)
    }

    fn discard(&self, sectors: Range<u64>) -> Result<()> {
        Ok(self.0.discard(sectors)?)
    }

    fn write_zeroes(&self, sectors: Range<u64>) -> Result<()> {
        Ok(self.0.write_zeroes(sectors)?)
    }

    fn flush(&self) -> Result<()> {
        Ok(self.0.flush()?)
    }
}

pub(crate) struct Linux<'a> {
    pub guest: Guest,
    disks: &'a [Disk],
    /// Device nodes of the disks, in the order of the flags.
    pub nodes: Vec<String>,
}

impl<'a> Linux<'a> {
    pub(crate) fn boot(
        pool: &Pool,
        disks: &'a [Disk],
        guest: GuestBuilder,
        interface: &str,
    ) -> Result<Self> {
        let mut builder = guest.memory("size=384M").pressure("off");
        for disk in disks {
            builder = builder.pm_volume(&format!(
                "pool={},name={},interface={interface}",
                pool.name(),
                disk.name
            ));
        }
        let guest = builder.boot()?;
        let count =
            format!("ls /sys/block | grep -cE '^(pmem.*s|vd.*)$' | grep -qx {}", disks.len());
        guest.wait_until_run("the disks exist", IO_LIMIT, &count)?;
        // The guest may find the disks in any order, so all disks of a test have different sizes.
        let sizes = guest.run("cd /sys/block && grep -s . pmem*s/size vd*/size /dev/null; true")?;
        let node = |disk: &Disk| {
            let size = disk.shape.sectors * u64::from(disk.shape.sector_bytes) / 512;
            let this = |line: &str| Some(line.strip_suffix(&format!("/size:{size}"))?.to_owned());
            let found = sizes.lines().find_map(this);
            found.with_context(|| {
                format!("No disk has the {size} sectors of {}: {sizes}", disk.name)
            })
        };
        let nodes = disks.iter().map(node).collect::<Result<_>>()?;
        Ok(Self { guest, disks, nodes })
    }

    /// Runs commands in the guest, on all disks concurrently.
    pub(crate) fn on_each(&self, command: impl Fn(usize, &str) -> String) -> Result<()> {
        let start = |(number, node): (usize, &String)| {
            let command = command(number, &format!("/dev/{node}"));
            Ok((self.guest.start_script(IO_LIMIT, &command)?, command))
        };
        let running: Vec<_> = self.nodes.iter().enumerate().map(start).collect::<Result<_>>()?;
        for (disk, (script, command)) in self.disks.iter().zip(running) {
            let output = script.finish()?.success(&command);
            output.with_context(|| format!("Volume {}", disk.name))?;
        }
        Ok(())
    }

    /// Powers the guest off. Fails if its kernel has logged a problem other than the expected one.
    pub(crate) fn end(self, expected_complaint: Option<&str>) -> Result<()> {
        let log = self.guest.run("dmesg")?;
        let mut complaints = complaints(&log);
        complaints
            .retain(|line| expected_complaint.is_none_or(|expected| !line.contains(expected)));
        ensure!(complaints.is_empty(), "The guest's kernel logged errors: {complaints:?}");
        self.guest.power_off()
    }
}

/// Command that runs a program on a disk.
pub(crate) fn write(node: &str, program: &str) -> String {
    format!("guest-tool write-sectors {node} {program}")
}

pub(crate) fn check(node: &str, history: &[impl AsRef<str>]) -> String {
    let history: Vec<&str> = history.iter().map(AsRef::as_ref).collect();
    format!("guest-tool check-sectors {node} {}", history.join(" "))
}

/// Returns two disks, one for each sector size.
fn two_disks(pool: &Pool) -> Result<[Disk; 2]> {
    Ok([Disk::create(pool, "sectors-4096", 32, 4096)?, Disk::create(pool, "sectors-512", 20, 512)?])
}

/// Each side reads the log as the other side left it. The order is: our engine, Linux with NVDIMM,
/// our engine, an older Linux with one more lane, our engine, Linux with virtio-pmem. With
/// virtio-pmem, each sector costs four exits. The engine also discards sectors, which read as
/// zeros. One volume is thin, so its chunks come and go.
fn linux_and_the_engine_use_a_disk_in_turn() -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("128M")?;
    let [large, small] = two_disks(&pool)?;
    let disks = [large, small, Disk::create_thin(&pool, "thin", 28)?];
    let mut history = Vec::new();
    for (round, (kernel, cpus, interface, engine_writes, linux_writes)) in (0..).zip([
        (Kernel::V6_12, 2, "nvdimm", OPERATIONS, OPERATIONS),
        (Kernel::V6_1, 3, "nvdimm", 2000, 1000),
        (Kernel::V6_12, 1, "virtio-pmem", 2000, 100),
    ]) {
        let engine_writes = format!("discards:{}:{engine_writes}:4", seed(10 + round)?);
        let linux_writes = format!("writes:{}:{linux_writes}:{cpus}", seed(20 + round)?);
        for disk in &disks {
            disk.write(&engine_writes)?;
        }
        history.push(engine_writes);
        let guest = Guest::builder().kernel(kernel).cpus(cpus);
        let linux = Linux::boot(&pool, &disks, guest, interface)?;
        linux.on_each(|_, node| {
            format!("{} && {}", check(node, &history), write(node, &linux_writes))
        })?;
        linux.end(None)?;
        history.push(linux_writes);
        for disk in &disks {
            disk.verify(&history)?;
        }
    }
    Ok(())
}

/// Same as above, but each disk has two arenas, and each side writes a lot near and across their
/// border. Both sides should find out which arena a sector belongs to.
fn linux_and_the_engine_use_a_disk_of_two_arenas_in_turn() -> Result<()> {
    let pool = Pool::create("96M")?;
    let disk =
        |name, sector_bytes| Disk::create_with_two_arenas(&pool, name, ARENAS_MIB, sector_bytes);
    let disks = [disk("sectors-4096", 4096)?, disk("sectors-512", 512)?];
    let mut histories = disks.each_ref().map(|_| Vec::new());
    for (round, (kernel, cpus, interface, engine_writes, linux_writes)) in (0..).zip([
        (Kernel::V6_12, 2, "nvdimm", 4000, 4000),
        (Kernel::V6_1, 1, "virtio-pmem", 1000, 100),
    ]) {
        let programs = |mix: &str, seed, operations, threads, disk: &Disk| {
            let around = Program::around(disk.arenas[1], mix, seed + 1, AROUND_BORDER, threads);
            let crossings = around.parse::<Program>()?.crossings(disk.shape, disk.arenas[1]);
            ensure!(crossings > 0, "{around} stays inside its arenas");
            Ok([format!("{mix}:{seed}:{operations}:{threads}"), around])
        };
        for (disk, history) in disks.iter().zip(&mut histories) {
            for program in programs("discards", seed(50 + 2 * round)?, engine_writes, 4, disk)? {
                disk.write(&program)?;
                history.push(program);
            }
        }
        let linux_writes_on =
            |disk| programs("writes", seed(60 + 2 * round)?, linux_writes, cpus, disk);
        let guest = Guest::builder().kernel(kernel).cpus(cpus);
        let linux = Linux::boot(&pool, &disks, guest, interface)?;
        let linux_writes: Vec<_> = disks.iter().map(linux_writes_on).collect::<Result<_>>()?;
        linux.on_each(|number, node| {
            let [everywhere, around] = &linux_writes[number];
            [check(node, &histories[number]), write(node, everywhere), write(node, around)]
                .join(" && ")
        })?;
        linux.end(None)?;
        for ((disk, history), linux_writes) in disks.iter().zip(&mut histories).zip(linux_writes) {
            history.extend(linux_writes);
            disk.verify(history)?;
        }
    }
    Ok(())
}

/// The lanes of a BTT start in different states ([`Flogs::states`]), from which the guest's CPUs
/// continue. All BTTs together cover every state.
fn linux_replays_a_log_in_every_state_as_the_engine() -> Result<()> {
    const CPUS: u32 = 4;
    let pool = Pool::create("512M")?;
    let mut disks = Vec::new();
    let mut histories = Vec::new();
    for (number, shift) in (0..Flogs::states()).step_by(CPUS as usize).enumerate() {
        let padding = if number % 2 == 0 { Padding::Current } else { Padding::Former };
        let sector_bytes = if number % 4 < 2 { 4096 } else { 512 };
        let disk =
            Disk::create(&pool, &format!("flogs-{shift}"), 18 + 2 * number as u64, sector_bytes)?;
        Flogs { padding, shift }.make(&disk.media)?;
        let made = format!("flogs:{shift}");
        disk.media.verify(&Outcome::of_history(disk.shape, &[&made])?)?;
        // Direct I/O, because the page cache would read neighboring sectors, which may be bad.
        let program = format!("direct:{}:100:{CPUS}", seed(30 + number as u64)?);
        histories.push([made, program]);
        disks.push(disk);
    }
    let linux = Linux::boot(&pool, &disks, Guest::builder(), "nvdimm")?;
    linux.on_each(|number, node| {
        let [made, program] = &histories[number];
        let steps = [check(node, &[made]), write(node, program), check(node, &[made, program])];
        steps.join(" && ")
    })?;
    // Probes for partitions and file systems read the bad sectors.
    linux.end(Some("Buffer I/O error"))?;
    for (disk, history) in disks.iter().zip(&histories) {
        disk.verify(history)?;
    }
    Ok(())
}

/// The guest's recovery cannot store anything, so the VMM must have recovered the volume first.
fn a_readonly_volume_is_recovered_before_it_is_shown() -> Result<()> {
    let pool = Pool::create("128M")?;
    let disk = Disk::create(&pool, "flogs", 24, 4096)?;
    Flogs { padding: Padding::Current, shift: 0 }.make(&disk.media)?;
    for interface in ["nvdimm,readonly=on", "virtio-blk,readonly=on"] {
        let disks = std::slice::from_ref(&disk);
        let linux = Linux::boot(&pool, disks, Guest::builder(), interface)?;
        linux.on_each(|_, node| check(node, &["flogs:0"]))?;
        linux.end(Some("I/O error"))?;
    }
    disk.verify(&["flogs:0"])
}

fn linux_writes(threads: u32, interface: &str) -> Result<()> {
    let pool = Pool::create("96M")?;
    let disks = two_disks(&pool)?;
    let program = format!("writes:{}:{OPERATIONS}:{threads}", seed(1)?);
    let linux = Linux::boot(&pool, &disks, Guest::builder(), interface)?;
    linux
        .on_each(|_, node| format!("{} && {}", write(node, &program), check(node, &[&program])))?;
    linux.end(None)?;
    disks.iter().try_for_each(|disk| disk.verify(&[&program]))
}

fn linux_reads_writes_of_the_engine() -> Result<()> {
    let pool = Pool::create("96M")?;
    let disks = two_disks(&pool)?;
    let program = format!("discards:{}:{OPERATIONS}:4", seed(2)?);
    for disk in &disks {
        disk.write(&program)?;
        disk.verify(&[&program])?;
    }
    let linux = Linux::boot(&pool, &disks, Guest::builder(), "nvdimm")?;
    linux.on_each(|_, node| check(node, &[&program]))?;
    linux.end(None)
}
