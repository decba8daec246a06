//! A volume, and guests that write to it until they are killed.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use guest_tools::CorruptData;
use guest_tools::content::Bytes;
use guest_tools::torn::report::{Area, FlushedRange, Line};
use guest_tools::torn::stamp::SECTOR_BYTES;
use pmem_volume::btt::{self, Reader, Sector};
use pmem_volume::media::Media;
use pmem_volume::{OpenMode, Volume};
use serde_json::Value;

use super::load::Load;
use super::oracle::{Classification, Oracle};
use super::space::check_and_prepare;
use crate::guest::{Script, complaints};
use crate::pool::pmvol;
use crate::runner::emulation_broke;
use crate::{Guest, GuestBuilder, Kernel, Pool};

/// Time limit for a guest's work on its volume, under emulation and while other guests run.
const IO_LIMIT: Duration = Duration::from_secs(180);

/// Sectors that the guest writes. The first MiB is left out, because kernels look for partitions
/// there.
const AREA: Area = Area { first: 256, per_thread: 256, threads: 4 };

/// Sizes of the volume and of its pool.
const VOLUME_SIZE: &str = "20M";
const POOL_SIZE: &str = "32M";

/// Drivers that the guest does not need and that would only delay each start.
const SKIPPED_MODULES: &str =
    "virtio_console,virtio_mem,virtio_balloon,virtio_rng,dax_pmem,lzo-rle,zram,button,evdev";

/// Estimated duration of a start on an idle machine. The estimated duration is used until a start
/// has been measured.
const FIRST_START: Duration = Duration::from_secs(3);

/// Maximum time in microseconds until a writing guest is killed.
const MAX_KILL_DELAY_US: u64 = 300_000;

/// Maximum time in microseconds between two stops of a writing guest.
const MAX_CHECK_DELAY_US: u64 = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    Nvdimm,
    VirtioPmem,
    /// virtio-blk: the BTT engine runs in the VMM, so a kill interrupts our engine.
    VirtioBlk,
}

impl Interface {
    pub const ALL: [Self; 3] = [Self::Nvdimm, Self::VirtioPmem, Self::VirtioBlk];

    /// Returns the maximum number of vCPUs. With virtio-pmem, the guest's BTT driver requires a
    /// single vCPU (docs/reference/volumes.md).
    fn max_cpus(self, format: Format) -> u32 {
        match (self, format) {
            (Self::VirtioPmem, Format::Btt) => 1,
            (Self::Nvdimm | Self::VirtioPmem | Self::VirtioBlk, _) => 2,
        }
    }

    fn device(self, format: Format) -> &'static str {
        match (self, format) {
            (Self::Nvdimm | Self::VirtioPmem, Format::Btt) => "/dev/pmem0s",
            (Self::Nvdimm | Self::VirtioPmem, Format::Raw) => "/dev/pmem0",
            (Self::VirtioBlk, _) => "/dev/vda",
        }
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Nvdimm => "nvdimm",
            Self::VirtioPmem => "virtio-pmem",
            Self::VirtioBlk => "virtio-blk",
        })
    }
}

impl FromStr for Interface {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|interface| interface.to_string() == text);
        found.with_context(|| {
            format!(
                "No such interface: {text:?}; existing interfaces: {}",
                Self::ALL.map(|i| i.to_string()).join(", ")
            )
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Btt,
    /// Sectors are not atomic. Used to show that the tests can detect torn sectors.
    Raw,
}

#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub interface: Interface,
    pub kernel: Kernel,
    pub format: Format,
    pub is_thin: bool,
    /// Load beside the writer, on a thin volume.
    pub load: Option<Load>,
    /// Maximum number of sectors that a thread writes before it flushes. If each flush goes to a
    /// disk, a few are enough.
    pub max_unflushed_sectors: u64,
    /// How often a writing guest is stopped and checked before it is killed.
    pub checks: u32,
    /// Makes the VMM's flushes succeed without effect ([`crate::flush_noop`]).
    pub has_noop_flushes: bool,
}

impl Setup {
    /// Volume with atomic sectors and a guest with the 6.12 kernel.
    pub fn new(interface: Interface) -> Self {
        Self {
            interface,
            kernel: Kernel::V6_12,
            format: Format::Btt,
            is_thin: false,
            load: None,
            max_unflushed_sectors: 256,
            checks: 8,
            has_noop_flushes: false,
        }
    }

    /// Thin volume under a load. The guest is not stopped, so that long gaps between flushes are
    /// stalls.
    pub fn with_load(load: Load, kernel: Kernel, interface: Interface) -> Self {
        let load = Some(load);
        Self { is_thin: true, load, kernel, checks: 0, ..Self::new(interface) }
    }

    /// Sizes of the pool and of the volume. Each thin volume has space for discards.
    fn sizes(&self) -> [&'static str; 2] {
        match self.load {
            Some(load) => load.sizes(),
            None if self.is_thin => Load::Discard.sizes(),
            None => [POOL_SIZE, VOLUME_SIZE],
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = if self.format == Format::Raw { ", raw" } else { "" };
        let thin = if self.is_thin { ", thin" } else { "" };
        write!(formatter, "{} on {}{raw}{thin}", self.interface, self.kernel)?;
        self.load.map_or(Ok(()), |load| write!(formatter, ", {load}"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillTime {
    /// Delay after all threads have written and flushed.
    Writing(Duration),
    /// Delay after the start of the VMM, in thousandths of the previous start's duration. At that
    /// time the kernel boots, or a driver repairs damage from the last kill.
    Starting(u32),
}

impl KillTime {
    /// One guest in six is killed while it starts. The latest time is just before it writes.
    fn choose(random: &mut Bytes) -> Self {
        let (kind, number) = (random.next_u64(), random.next_u64());
        if kind.is_multiple_of(6) {
            Self::Starting((number % 1000) as u32)
        } else {
            Self::Writing(Duration::from_micros(number % MAX_KILL_DELAY_US))
        }
    }

    fn delay(random: &mut Bytes) -> Duration {
        Duration::from_micros(random.next_u64() % MAX_KILL_DELAY_US)
    }
}

impl fmt::Display for KillTime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Writing(delay) => {
                write!(formatter, "killed {} us after all had flushed", delay.as_micros())
            }
            Self::Starting(thousandths) => {
                write!(formatter, "killed {thousandths}/1000 into its start")
            }
        }
    }
}

#[derive(Debug)]
pub struct KilledGuest {
    pub kill_time: KillTime,
    pub counts: WriterCounts,
    /// Set if the emulation broke the guest's kernel (docs/design/testing.md). The guest then has
    /// an additional crash at an uncontrolled time.
    pub broken: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriterCounts {
    pub flushes: usize,
    pub checks: u32,
    /// Number of sectors that were newer than acknowledged, added up over all stops.
    pub newer: usize,
    /// Number of writes between the log and the map, added up over all stops.
    pub redo: u64,
    /// Longest time between two flushes of a thread.
    pub longest_gap: Duration,
    /// Bytes that the load made the VMM move or release.
    pub moved_bytes: u64,
    /// Upper bound of the longest wait of a store to a hole for its chunk. The vCPU waits in
    /// `KVM_RUN`.
    pub longest_fill: Duration,
}

impl WriterCounts {
    /// Reads the metrics of the VMM, which are lost when it is killed.
    fn take_metrics(&mut self, guest: &Guest, load: Option<Load>) -> Result<()> {
        // Without a load, the VMM may be stopped for a look at the volume.
        let Some(load) = load else { return Ok(()) };
        self.moved_bytes = load.moved_bytes(guest)?;
        // Only mapped thin volumes have such stores.
        let fill_s = guest.metrics()?.quantile("foreshore_volume_hole_fill_duration_seconds", 1.0);
        let bound = |fill_s| Duration::try_from_secs_f64(fill_s).unwrap_or(Duration::MAX);
        self.longest_fill = fill_s.map_or(Duration::ZERO, bound);
        Ok(())
    }
}

#[derive(Debug)]
pub struct Victim {
    setup: Setup,
    pool: Pool,
    oracle: Oracle,
    random: Bytes,
    /// Result after the last kill. The next guest should read the same content.
    last: Option<Classification>,
    /// Duration of the last start until all threads had flushed.
    start_took: Duration,
}

impl Victim {
    pub fn create(pool: Pool, setup: Setup, seed: u64) -> Result<Self> {
        let [pool_size, volume_size] = setup.sizes();
        pmvol(&["create", &pool.name(), "--size", pool_size])?;
        let format = if setup.format == Format::Raw { "raw" } else { "btt" };
        let name = pool.name();
        let mut create =
            vec!["volume", "create", &name, "data", "--size", volume_size, "--format", format];
        create.push(if setup.is_thin { "--thin" } else { "--thick" });
        pmvol(&create)?;
        if let Some(load) = setup.load {
            check_and_prepare(&pool, load, true)?;
        }
        Ok(Self::resume(pool, setup, seed))
    }

    /// Uses an existing volume. The caller must record the acknowledgments to its earlier guests
    /// ([`Victim::acknowledge`]).
    pub fn resume(pool: Pool, setup: Setup, seed: u64) -> Self {
        let (oracle, random) = (Oracle::new(AREA), Bytes::new(seed));
        Self { setup, pool, oracle, random, last: None, start_took: FIRST_START }
    }

    /// Records a flush that was acknowledged to an earlier guest.
    pub fn acknowledge(&mut self, flushed: FlushedRange) -> Result<()> {
        self.oracle.acknowledge(flushed)
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Boots a guest that writes, and kills its VMM at a random time.
    pub fn write_until_random_kill(&mut self) -> Result<KilledGuest> {
        let kill_time = match self.setup.load {
            None => KillTime::choose(&mut self.random),
            Some(load) => KillTime::Writing(load.delay(KillTime::delay(&mut self.random))),
        };
        self.write_until_kill(kill_time)
    }

    /// Boots a guest that writes, and kills its VMM at the given time.
    pub fn write_until_kill(&mut self, kill_time: KillTime) -> Result<KilledGuest> {
        let seed = self.random.next_u64();
        let guest = self.builder().start()?;
        let (counts, broken) = match kill_time {
            // Sleeps, because any time is suitable and there is no condition to wait for.
            KillTime::Starting(thousandths) => {
                thread::sleep(self.start_took * thousandths / 1000);
                guest.still_running()?;
                guest.kill9().map(|()| (WriterCounts::default(), false))?
            }
            KillTime::Writing(delay) => match self.write_and_kill(&guest, seed, delay) {
                Ok(counts) => (counts, self.end(guest)?),
                Err(error) => {
                    let console = guest.console_log()?;
                    guest.kill9()?;
                    if !emulation_broke(&console) {
                        return Err(error);
                    }
                    (WriterCounts::default(), true)
                }
            },
        };
        Ok(KilledGuest { kill_time, counts, broken })
    }

    fn builder(&mut self) -> GuestBuilder {
        let Setup { interface, kernel, format, has_noop_flushes, .. } = self.setup;
        // A driver has one lane per CPU. It should continue from the state left by a driver with
        // more or fewer CPUs.
        let cpus = 1 + self.random.next_u64() % u64::from(interface.max_cpus(format));
        // A raw volume must be requested explicitly.
        let raw = if format == Format::Raw { ",format=raw" } else { "" };
        let volume = format!("pool={},name=data,interface={interface}{raw}", self.pool.name());
        let load = self.setup.load;
        let is_skipped = |name: &&str| !load.is_some_and(|load| load.needs(name));
        let skipped = SKIPPED_MODULES.split(',').filter(is_skipped);
        let skipped = skipped.collect::<Vec<_>>().join(",");
        let agent = if load.is_some_and(Load::has_agent) { "on" } else { "off" };
        let builder = Guest::builder()
            .kernel(kernel)
            .cpus(cpus as u32)
            .memory("size=256M")
            .pressure("off")
            .cmdline(&format!("foreshore.agent={agent} foreshore.skip={skipped}"))
            .pm_volume(&volume);
        let builder = match load {
            Some(load) => load.configure(builder, &self.pool),
            None => builder,
        };
        if has_noop_flushes { builder.with_noop_flushes() } else { builder }
    }

    /// Kills the VMM, and checks the messages of the guest's kernel. Returns true if the emulation
    /// caused them.
    fn end(&self, guest: Guest) -> Result<bool> {
        let console = guest.console_log()?;
        guest.kill9()?;
        let found = complaints(&console);
        let broken = emulation_broke(&console);
        ensure!(
            found.is_empty() || broken,
            "The guest's kernel logged errors:\n{}",
            found.join("\n")
        );
        Ok(broken)
    }

    fn write_and_kill(
        &mut self,
        guest: &Guest,
        seed: u64,
        delay: Duration,
    ) -> Result<WriterCounts> {
        let started = Instant::now();
        let load = self.start_load(guest)?;
        let writer = self.start_writer(guest, seed)?;
        let (sender, lines) = mpsc::channel();
        let mut counts = WriterCounts::default();
        let waited = thread::scope(|scope| {
            let reader = scope.spawn(move || read_lines(writer, &sender));
            let waited = self.wait_for_kill_time(guest, &lines, started, delay, &mut counts);
            // A guest that ended by itself must not count as killed. The reader of its lines cannot
            // tell these cases apart.
            let is_running = guest.still_running();
            if is_running.is_ok() {
                let taken = counts.take_metrics(guest, self.setup.load);
                guest.kill_now()?;
                taken?;
            }
            let read = reader
                .join()
                .map_err(|_| anyhow!("The reader of the writer's lines has panicked"))?;
            is_running.and(read).and(waited)
        });
        // The kill breaks the connection.
        if let Some(Ok(output)) = load.map(Script::finish) {
            bail!("The load ended with {}:\n{}", output.code, output.stderr);
        }
        waited?;
        self.take_lines(&lines, &mut counts)?;
        Ok(counts)
    }

    fn start_load(&self, guest: &Guest) -> Result<Option<Script>> {
        let Some(load) = self.setup.load else { return Ok(None) };
        guest.wait_for_shell(IO_LIMIT)?;
        let device = self.setup.interface.device(self.setup.format);
        load.prepare_guest(guest, device, AREA, self.last.is_none(), IO_LIMIT)?;
        guest.start_script(IO_LIMIT, &load.script(device)).map(Some)
    }

    fn start_writer(&self, guest: &Guest, seed: u64) -> Result<Script> {
        guest.wait_for_shell(IO_LIMIT)?;
        let device = self.setup.interface.device(self.setup.format);
        let Area { first, per_thread, threads } = AREA;
        // The driver may be ready slightly later than the shell is.
        guest.start_script(
            IO_LIMIT,
            &format!(
                "until [ -b {device} ]; do sleep 0.02; done; \
                 exec guest-tool write-stamped {device} {first} {per_thread} {threads} {} {seed}",
                self.setup.max_unflushed_sectors
            ),
        )
    }

    /// Boots a guest that writes until something else ends it, and returns the reason why it ended.
    /// Calls `hear` with each line, and with true once all threads have flushed.
    pub fn write_until_it_ends(&mut self, on_line: impl FnMut(&Line, bool)) -> Error {
        self.write_on(on_line).err().unwrap_or_else(|| anyhow!("The writer has ended"))
    }

    fn write_on(&mut self, mut on_line: impl FnMut(&Line, bool)) -> Result<()> {
        let seed = self.random.next_u64();
        let guest = self.builder().start()?;
        let _load = self.start_load(&guest)?;
        // Otherwise, the end might precede all moves and releases.
        self.setup.load.map_or(Ok(()), |load| load.start_moving(&guest, IO_LIMIT))?;
        let mut writer = self.start_writer(&guest, seed)?;
        let mut unflushed = UnflushedThreads::all();
        while let Some(text) = writer.next_line() {
            let line = text.parse()?;
            if let Line::Found { thread, versions } = &line {
                self.compare_found(*thread, versions)?;
            }
            unflushed.record(&line);
            on_line(&line, unflushed.none());
        }
        let output = writer.finish()?;
        bail!("The writer ended with {}:\n{}", output.code, output.stderr)
    }

    /// Waits until the guest should be killed, soon after the last stop. If a stop finds a fault,
    /// returns immediately, so that the fault is preserved.
    fn wait_for_kill_time(
        &mut self,
        guest: &Guest,
        lines: &Receiver<Timed>,
        started: Instant,
        delay: Duration,
        counts: &mut WriterCounts,
    ) -> Result<()> {
        let mut unflushed = UnflushedThreads::all();
        while !unflushed.none() {
            let timed = match lines.recv_timeout(IO_LIMIT) {
                Ok(timed) => timed,
                // The writer has ended first. Its reader reports the reason.
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("A thread flushed nothing within {IO_LIMIT:?}")
                }
            };
            unflushed.record(&timed.line);
            self.take(&timed, counts)?;
        }
        self.start_took = started.elapsed();
        for _ in 0..self.setup.checks {
            thread::sleep(Duration::from_micros(self.random.next_u64() % MAX_CHECK_DELAY_US));
            guest.stop()?;
            self.take_lines(lines, counts)?;
            if !self.check_stopped(counts)? {
                return Ok(());
            }
            guest.resume()?;
        }
        if let Some(load) = self.setup.load {
            load.start_moving(guest, IO_LIMIT)?;
        }
        thread::sleep(delay);
        Ok(())
    }

    /// Checks the content while the VMM is stopped, which is the same as after a kill. Returns
    /// false if there is a fault.
    fn check_stopped(&self, counts: &mut WriterCounts) -> Result<bool> {
        let pool = pmem_volume::Pool::open(self.pool.path(), OpenMode::Peek)?;
        let volume = pool.open_volume("data")?;
        let report = volume.check_btt();
        if !report.as_ref().is_none_or(btt::Report::is_clean) {
            return Ok(false);
        }
        let classification = self.classify_volume(&volume)?;
        counts.checks += 1;
        counts.newer += classification.newer;
        counts.redo += report
            .iter()
            .flat_map(|report| &report.arenas)
            .map(|arena| u64::from(arena.redo))
            .sum::<u64>();
        Ok(classification.faults.is_empty())
    }

    /// Handles all lines that the writer has printed so far.
    fn take_lines(&mut self, lines: &Receiver<Timed>, counts: &mut WriterCounts) -> Result<()> {
        lines.try_iter().try_for_each(|timed| self.take(&timed, counts))
    }

    fn take(&mut self, timed: &Timed, counts: &mut WriterCounts) -> Result<()> {
        match &timed.line {
            Line::Found { thread, versions } => self.compare_found(*thread, versions),
            Line::Flushed(flushed) => {
                counts.flushes += 1;
                counts.longest_gap = counts.longest_gap.max(timed.gap);
                self.oracle.acknowledge(*flushed)
            }
        }
    }

    /// Checks that the guest's driver and our reader read the same content after the last kill.
    fn compare_found(&self, thread: usize, versions: &[u64]) -> Result<()> {
        let Some(last) = &self.last else { return Ok(()) };
        let per_thread = AREA.per_thread as usize;
        let engine_versions = last
            .versions
            .chunks(per_thread)
            .nth(thread)
            .context("Number of a thread that was not started")?;
        let driver_versions: Vec<Option<u64>> = versions.iter().copied().map(Some).collect();
        let compare = || {
            ensure!(
                engine_versions == driver_versions,
                "The guest's driver and our reader find different sectors:\nours:   {engine_versions:?}\ntheirs: {driver_versions:?}"
            );
            Ok(())
        };
        compare().context(CorruptData)
    }

    /// Checks the content after the last kill, without changing the volume.
    pub fn classify(&mut self) -> Result<Classification> {
        let classification = self.classify_at(self.pool.path())?;
        self.last = Some(classification.clone());
        Ok(classification)
    }

    /// Checks that the volume has no chunk without data, and that no memory is lent. Does nothing
    /// unless the setup has a load.
    pub fn check_space(&self) -> Result<()> {
        self.setup.load.map_or(Ok(()), |load| check_and_prepare(&self.pool, load, false))
    }

    pub fn classify_at(&self, path: &Path) -> Result<Classification> {
        let pool = pmem_volume::Pool::open(path, OpenMode::ReadOnly)?;
        self.classify_volume(&pool.open_volume("data")?)
    }

    fn classify_volume(&self, volume: &Volume) -> Result<Classification> {
        match self.setup.format {
            Format::Raw => self
                .oracle
                .classify(|sector, bytes| Ok(volume.read(sector * SECTOR_BYTES as u64, bytes)?)),
            Format::Btt => self.classify_btt(volume),
        }
    }

    fn classify_btt(&self, volume: &Volume) -> Result<Classification> {
        let reader =
            Reader::open(volume).map_err(|finding| anyhow!("The BTT cannot be read: {finding}"))?;
        self.oracle.classify(|sector, bytes| match reader.read(sector, bytes)? {
            Sector::Data | Sector::Zeros => Ok(()),
            Sector::Error => bail!("Its map entry marks the sector as bad"),
        })
    }

    /// Fails if `pmvol check` finds a problem. Returns the number of writes that the crash
    /// interrupted between the log and the map. The next driver completes them.
    pub fn check(&self) -> Result<u64> {
        check(&self.pool)
    }
}

/// Runs `pmvol check`, and returns the number of writes to be completed from the BTTs' logs.
pub fn check(pool: &Pool) -> Result<u64> {
    let report: Value = serde_json::from_str(&pmvol(&["check", &pool.name(), "--json"])?)?;
    let volumes = report["volumes"].as_array().context("pmvol check --json has no volumes")?;
    let arenas = volumes.iter().filter_map(|volume| volume["btt"]["arenas"].as_array()).flatten();
    arenas
        .map(|arena| arena["redo"].as_u64().context("pmvol check --json has an arena without redo"))
        .sum()
}

/// Set of threads that have not flushed yet.
struct UnflushedThreads(Vec<bool>);

impl UnflushedThreads {
    fn all() -> Self {
        Self(vec![true; AREA.threads as usize])
    }

    fn record(&mut self, line: &Line) {
        if let Line::Flushed(flushed) = line
            && let Some(index) = AREA.index(flushed.first)
        {
            self.0[AREA.thread(index)] = false;
        }
    }

    fn none(&self) -> bool {
        !self.0.contains(&true)
    }
}

/// Line of the writer, with the time since its thread's last flush. It is zero for other lines.
struct Timed {
    line: Line,
    gap: Duration,
}

fn read_lines(mut writer: Script, sender: &Sender<Timed>) -> Result<()> {
    let mut last_flushes = [None; AREA.threads as usize];
    while let Some(text) = writer.next_line() {
        let line = text.parse()?;
        let thread = match &line {
            Line::Flushed(flushed) => AREA.index(flushed.first).map(|index| AREA.thread(index)),
            Line::Found { .. } => None,
        };
        let now = Instant::now();
        let last = thread.and_then(|thread| last_flushes[thread].replace(now));
        let gap = last.map_or(Duration::ZERO, |last| now - last);
        // An error is ignored, because the receiver is dropped before the kill.
        let _ = sender.send(Timed { line, gap });
    }
    // The kill breaks the connection. A writer that ended by itself has an exit code.
    match writer.finish() {
        Err(_killed) => Ok(()),
        Ok(output) => bail!("The writer ended with {}:\n{}", output.code, output.stderr),
    }
}
