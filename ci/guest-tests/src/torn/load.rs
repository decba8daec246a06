//! Loads that make the VMM move or release chunks of a thin volume while the guest writes sectors.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use guest_tools::CorruptData;
use guest_tools::torn::report::Area;
use guest_tools::torn::stamp::{self, Content, SECTOR_BYTES, Stamp};
use pmem_volume::Volume;
use pmem_volume::btt::Engine;
use serde_json::json;

use super::Interface;
use crate::{Guest, GuestBuilder, Image, Pool};

const MIB: u64 = 1 << 20;
const SECTORS_PER_MIB: u64 = MIB / SECTOR_BYTES as u64;

/// Parts of the volume that the loads use. The sectors of the writer precede them.
const FIRST_MIB: Range<u64> = 8..40;
const SPILLED_MIB: Range<u64> = 8..56;
/// Writes to this part leave the chunks of the first part sparse, whichever blocks it has.
const SECOND_MIB: Range<u64> = 40..44;
/// Distance between the sectors of the first part that a compaction moves.
const SCATTERED: u64 = 4;
const SCATTERED_VERSION: u64 = 1;

/// Names of the files that are deleted.
const FILES: &str = "1 2 3 4";

/// The pool of a compaction has 172 MiB besides its metadata. The volume uses 40 to 60 MiB of them.
const COMPACTION_ZONE_MIB: u64 = 96;
/// The pool of a spill has 140 MiB besides its metadata, and has promised 64 MiB to the volume.
/// The less remains, the less a slow guest has to write before the VMM moves memory.
const SPILL_ZONE_MIB: u64 = 120;
/// With Redis, the pool has 124 MiB besides its metadata, and has promised 64 MiB to the volume.
const REDIS_ZONE_MIB: u64 = 112;
/// Plugged memory that includes promised space: only 60 MiB are not promised.
const REDIS_BORROWS_MIB: u64 = 72;
/// Memory that Redis fills: the guest's DRAM of 256 MiB and a part of the zone.
const REDIS_MIB: u64 = 280;
/// Output of the load with Redis, if it has ended.
const REDIS_END: &str = "/tmp/redis-end";
/// The pool has more free space than the lower watermarks when the memory is plugged.
const MARKS: &str = "storage_min=4M,storage_low=6M";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Discards release chunks. Their data is written before the writer starts, because the writer
    /// would otherwise use blocks of the same chunks.
    Discard,
    /// `foreshore-agent trim` releases the chunks of deleted files from a mapped volume. They are
    /// written before, for the same reason.
    Trim,
    /// Each chunk contains a few sectors. Memory makes the free space scarce, and the VMM moves
    /// these sectors together.
    Compaction,
    /// Memory has borrowed the space of the volume. Writes make the VMM move it.
    Spill,
    /// As `Spill`, but the VMM moves memory to a file in the folder of the pool.
    SpillFile,
    /// As `Spill`, but the guest gets the memory because Redis needs more than its DRAM. Redis uses
    /// the memory while the VMM moves it.
    Redis,
}

impl fmt::Display for Load {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Discard => "discard",
            Self::Trim => "trim",
            Self::Compaction => "compaction",
            Self::Spill => "spill",
            Self::SpillFile => "spill-file",
            Self::Redis => "redis",
        })
    }
}

impl FromStr for Load {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|load| load.to_string() == text);
        found.with_context(|| {
            let names = Self::ALL.map(|load| load.to_string()).join(", ");
            format!("No such load: {text:?}; existing loads: {names}")
        })
    }
}

impl Load {
    const ALL: [Self; 6] =
        [Self::Discard, Self::Trim, Self::Compaction, Self::Spill, Self::SpillFile, Self::Redis];

    /// Returns true if the VMM can move or release chunks of a volume with this interface.
    pub fn works_with(self, interface: Interface) -> bool {
        match self {
            Self::Discard | Self::Compaction => interface == Interface::VirtioBlk,
            Self::Trim => interface != Interface::VirtioBlk,
            Self::Spill | Self::SpillFile | Self::Redis => true,
        }
    }

    /// Sizes of the pool and of the volume.
    pub(super) fn sizes(self) -> [&'static str; 2] {
        match self {
            Self::Discard => ["144M", "48M"],
            Self::Spill | Self::SpillFile => ["144M", "64M"],
            Self::Trim => ["144M", "96M"],
            Self::Compaction => ["176M", "60M"],
            Self::Redis => ["128M", "64M"],
        }
    }

    /// Size of the zone of PM, or 0 without one.
    fn zone_mib(self) -> u64 {
        match self {
            Self::Discard | Self::Trim => 0,
            Self::Compaction => COMPACTION_ZONE_MIB,
            Self::Spill | Self::SpillFile => SPILL_ZONE_MIB,
            Self::Redis => REDIS_ZONE_MIB,
        }
    }

    pub(super) fn configure(self, builder: GuestBuilder, pool: &Pool) -> GuestBuilder {
        let zone = |options: &str| {
            format!("pool={},size={}M,{MARKS},{options}", pool.name(), self.zone_mib())
        };
        match self {
            Self::Discard | Self::Trim => builder,
            // More than the pool has free when the memory is plugged, and less than it has before.
            Self::Compaction => builder.memory("size=384M").pm_memory(&zone("storage_high=96M")),
            Self::Spill => {
                builder.memory("size=384M").pm_memory(&zone("storage_high=8M,spill=120M"))
            }
            Self::SpillFile => {
                let folder = pool.path().parent().expect("an absolute path").display();
                let options = format!("storage_high=8M,spill=120M,spill_file={folder}");
                builder.memory("size=384M").pm_memory(&zone(&options))
            }
            Self::Redis => builder
                .image(Image::Workloads)
                .cmdline("foreshore.zram=64M")
                .pressure("psi")
                .pm_memory(&zone("storage_high=8M,spill=112M")),
        }
    }

    /// Returns true if the guest needs `module`.
    pub(super) fn needs(self, module: &str) -> bool {
        match self {
            Self::Discard | Self::Trim => false,
            Self::Compaction | Self::Spill | Self::SpillFile => module == "virtio_mem",
            Self::Redis => ["virtio_mem", "zram", "lzo-rle"].contains(&module),
        }
    }

    /// Returns true if the guest's agent reports pressure.
    pub(super) fn has_agent(self) -> bool {
        self == Self::Redis
    }

    /// Delay of a kill after the first move or release, from a delay of up to 300 ms. A trim takes
    /// about a second.
    pub(super) fn delay(self, delay: Duration) -> Duration {
        match self {
            Self::Trim => delay * 10,
            Self::Discard | Self::Compaction => delay,
            Self::Spill | Self::SpillFile | Self::Redis => delay,
        }
    }

    /// Empties the part of the volume that the load uses, and writes the data to be moved or
    /// discarded.
    pub(super) fn prepare_volume(self, engine: &Engine<Volume>) -> Result<()> {
        let used = match self {
            Self::Trim => return Ok(()),
            Self::Spill | Self::SpillFile | Self::Redis => SPILLED_MIB,
            Self::Discard => FIRST_MIB,
            Self::Compaction => FIRST_MIB.start..SECOND_MIB.end,
        };
        engine.discard(sectors(&used))?;
        // Sectors of the writer are in chunks that the load has allocated.
        while engine.compact(&mut |_| true)? > 0 {}
        if matches!(self, Self::Spill | Self::SpillFile | Self::Redis) {
            return Ok(());
        }
        let mut bytes = vec![0; SECTOR_BYTES];
        for sector in sectors(&FIRST_MIB) {
            Stamp::new(sector, &mut bytes).set_version(SCATTERED_VERSION, &mut bytes);
            engine.write(sector, &bytes)?;
        }
        if self == Self::Compaction {
            for sector in sectors(&FIRST_MIB).step_by(SCATTERED as usize) {
                engine.discard(sector + 1..sector + SCATTERED)?;
            }
        }
        Ok(())
    }

    /// Checks the data that [`Load::prepare_volume`] has written.
    pub(super) fn check_volume(self, engine: &Engine<Volume>) -> Result<()> {
        if self != Self::Compaction {
            return Ok(());
        }
        let mut bytes = vec![0; SECTOR_BYTES];
        for sector in sectors(&FIRST_MIB) {
            engine.read(sector, &mut bytes)?;
            let kept = sector.is_multiple_of(SCATTERED);
            let is_right = match kept {
                true => stamp::read(sector, &bytes) == Content::Whole(SCATTERED_VERSION),
                false => bytes.iter().all(|byte| *byte == 0),
            };
            let compare = || {
                ensure!(is_right, "Sector {sector} has changed although nothing wrote to it");
                Ok(())
            };
            compare().context(CorruptData)?;
        }
        Ok(())
    }

    /// Command that prepares the load. The sectors of `area` are bad blocks of the file system, so
    /// that it does not use them.
    fn preparation(self, device: &str, area: Area, is_first: bool) -> String {
        if self != Self::Trim {
            return "true".to_owned();
        }
        let end = area.first + area.sectors() - 1;
        let mount = format!("mkdir -p /mnt/t && mount -t ext4 {device} /mnt/t && cd /mnt/t");
        let mount = match is_first {
            true => format!(
                "seq {} {end} > /tmp/bad && \
                 mkfs.ext4 -q -b 4096 -O ^resize_inode -E nodiscard -l /tmp/bad {device} && \
                 {mount} && dd if=/dev/urandom of=kept bs=1M count=2 && sha256sum kept > sum",
                area.first
            ),
            // The check replays the journal, and its exit code is 1 if it has changed something.
            false => {
                format!("{{ e2fsck -fp {device} || [ $? = 1 ]; }} && {mount} && sha256sum -c sum")
            }
        };
        let x = "dd if=/dev/zero bs=1M count=8 | tr '\\0' x";
        // A file has its size only after its data, so other bytes were lost by a release.
        let check =
            "for f in f*; do [ ! -e $f ] || [ $(tr -d x < $f | wc -c) = 0 ] || exit 1; done";
        format!(
            "{mount} && {check} && rm -f f* && for n in {FILES}; do {x} > f$n || exit 1; done && sync"
        )
    }

    /// Prepares the guest. A spill begins with memory that borrows the space of the volume.
    pub(super) fn prepare_guest(
        self,
        guest: &Guest,
        device: &str,
        area: Area,
        is_first: bool,
        limit: Duration,
    ) -> Result<()> {
        guest.wait_until_run("the disk exists", limit, &format!("test -b {device}"))?;
        guest.run_within(limit, &self.preparation(device, area, is_first))?;
        match self {
            Self::Spill | Self::SpillFile => self.plug_memory(guest, limit),
            Self::Redis => start_redis(guest, limit),
            Self::Discard | Self::Trim | Self::Compaction => Ok(()),
        }
    }

    /// Command that loads the device until the guest is killed.
    pub(super) fn script(self, device: &str) -> String {
        let write = |mib: &Range<u64>| {
            let count = mib.end - mib.start;
            format!(
                "dd if=/dev/zero bs=1M count={count} 2>/dev/null | tr '\\0' x | \
                 dd of={device} bs=1M seek={} iflag=fullblock oflag=direct 2>/dev/null",
                mib.start
            )
        };
        match self {
            Self::Discard => {
                let Range { start, end } = FIRST_MIB;
                let discard = format!(
                    "for at in $(seq {start} {}); do \
                         blkdiscard -o $((at * {MIB})) -l {MIB} {device} || exit 1; \
                     done",
                    end - 1
                );
                format!("while {discard}; do {} || exit 1; done", write(&FIRST_MIB))
            }
            // Without files, the command releases nothing. A command on a slow host may confirm too
            // late.
            Self::Trim => format!(
                "cd /mnt/t && for n in {FILES}; do \
                     rm f$n && sync || exit 1; \
                     until foreshore-agent trim . >/dev/null 2>/tmp/error; do \
                         grep -q 'did not confirm' /tmp/error || exit 1; \
                     done; \
                 done; sleep 1000"
            ),
            Self::Compaction => format!("while {}; do :; done", write(&SECOND_MIB)),
            Self::Spill | Self::SpillFile => format!("while {}; do :; done", write(&SPILLED_MIB)),
            Self::Redis => {
                let write = write(&SPILLED_MIB);
                format!("while [ ! -e {REDIS_END} ] && {write}; do :; done; cat {REDIS_END} >&2")
            }
        }
    }

    /// Waits until the VMM moves or releases something. Only now is memory lent for a compaction,
    /// which would otherwise end before the guest writes.
    pub(super) fn start_moving(self, guest: &Guest, limit: Duration) -> Result<()> {
        if self == Self::Compaction {
            self.plug_memory(guest, limit)?;
        }
        guest.wait_until(&format!("the VMM moves or releases chunks ({self})"), limit, || {
            Ok(self.moved_bytes(guest)? > 0)
        })
    }

    /// Plugs all memory of the zone.
    fn plug_memory(self, guest: &Guest, limit: Duration) -> Result<()> {
        let zone_mib = self.zone_mib();
        guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": zone_mib * MIB }))?;
        wait_until_plugged(guest, zone_mib, limit)
    }

    /// Bytes that the VMM has moved or released.
    pub(super) fn moved_bytes(self, guest: &Guest) -> Result<u64> {
        let (metric, label) = match self {
            Self::Discard | Self::Trim => {
                ("foreshore_volume_released_bytes_total", ("volume", "data"))
            }
            Self::Compaction => ("foreshore_volume_compacted_bytes_total", ("volume", "data")),
            Self::Spill | Self::Redis => ("foreshore_memory_spilled_bytes", ("zone", "pm")),
            Self::SpillFile => ("foreshore_memory_spilled_file_bytes", ("zone", "pm")),
        };
        Ok(guest.metric(metric, &[label])? as u64)
    }
}

fn sectors(mib: &Range<u64>) -> Range<u64> {
    mib.start * SECTORS_PER_MIB..mib.end * SECTORS_PER_MIB
}

/// Starts Redis, and waits until it needs so much memory that the pool has to lend space of the
/// volume.
fn start_redis(guest: &Guest, limit: Duration) -> Result<()> {
    let load = format!("while guest-tool load redis {REDIS_MIB}; do :; done >/tmp/redis 2>&1");
    guest.run(&format!("({load}; mv /tmp/redis {REDIS_END}) >/dev/null 2>&1 &"))?;
    wait_until_plugged(guest, REDIS_BORROWS_MIB, limit)
}

fn wait_until_plugged(guest: &Guest, least_mib: u64, limit: Duration) -> Result<()> {
    guest.wait_until(&format!("{least_mib} MiB are plugged"), limit, || {
        let memory = guest.get("vm.memory")?;
        let zones = memory["zones"].as_array().context("vm.memory has no zones")?;
        let is_plugged = |zone: &serde_json::Value| {
            zone["id"] == "pm" && zone["plugged_bytes"].as_u64() >= Some(least_mib * MIB)
        };
        Ok(zones.iter().any(is_plugged))
    })
}
