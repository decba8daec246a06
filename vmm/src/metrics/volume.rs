//! Volumes: what the guest does with a mapped volume is not seen by the VMM, except its flushes. One that is shown as a
//! disk is seen with all that is done to it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::disk::{Labelled, expose_bytes, expose_operations};
use super::expose::{Exposer, Family, Labels, one};
use super::latency::LatencySample;
use crate::nvdimm::FlushHintMetrics;
use crate::virtio::block::{BlockMetrics, Kind};
use crate::virtio::pmem::metrics::PmemMetrics;
use crate::volume::FirstFailure;
use crate::volume::guest_btt::GuestBtt;
use crate::volume::sectors::{BttLoss, Sectors};

/// The counters of a volume's interface.
#[derive(Clone, Debug)]
pub enum VolumeCounters {
    /// A virtio-pmem device's.
    VirtioPmem(Arc<PmemMetrics>),
    /// An NVDIMM's flush hint page's.
    Nvdimm(Arc<FlushHintMetrics>),
    /// A virtio-blk device's.
    VirtioBlk {
        /// The device's.
        disk: Arc<BlockMetrics>,
        /// What it serves, as long as that is open.
        sectors: Weak<dyn Sectors>,
    },
}

/// A volume and its counters.
#[derive(Clone, Debug)]
pub struct VolumeMetrics {
    /// The pool's name: its path.
    pub pool: String,
    /// The volume's name.
    pub volume: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether a flush of it has failed.
    pub failure: FirstFailure,
    /// Its counters.
    pub counters: VolumeCounters,
}

impl VolumeMetrics {
    fn labels(&self) -> Labels {
        let interface = match self.counters {
            VolumeCounters::VirtioPmem(_) => "virtio-pmem",
            VolumeCounters::Nvdimm(_) => "nvdimm",
            VolumeCounters::VirtioBlk { .. } => "virtio-blk",
        };
        vec![
            ("pool", self.pool.clone()),
            ("volume", self.volume.clone()),
            ("interface", interface.to_owned()),
        ]
    }

    fn flushes(&self) -> [(&'static str, u64); 2] {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (done, failed) = match &self.counters {
            VolumeCounters::VirtioPmem(counters) => (get(&counters.flushes), get(&counters.flush_failures)),
            VolumeCounters::Nvdimm(counters) => (get(&counters.flushes), get(&counters.flush_failures)),
            VolumeCounters::VirtioBlk { disk, .. } => (disk.done(Kind::Flush), disk.failed(Kind::Flush)),
        };
        [("ok", done), ("error", failed)]
    }

    fn persists(&self) -> LatencySample {
        match &self.counters {
            VolumeCounters::VirtioPmem(counters) => counters.persists.sample(),
            VolumeCounters::Nvdimm(counters) => counters.persists.sample(),
            VolumeCounters::VirtioBlk { disk, .. } => disk.flushes.sample(),
        }
    }

    /// What is counted of a disk.
    fn blocks(&self) -> Option<Labelled<'_>> {
        match &self.counters {
            VolumeCounters::VirtioBlk { disk, .. } => Some((self.labels(), disk)),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// Where the VMM translates: elsewhere the guest knows, and nobody else.
    fn read_only_arenas(&self) -> Option<usize> {
        match &self.counters {
            VolumeCounters::VirtioBlk { sectors, .. } => Some(sectors.upgrade()?.read_only_arenas()),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// 1 if `is_lost` applies to the loss of the BTT, otherwise 0. `None` if the VMM does not
    /// translate.
    fn btt_loss(&self, is_lost: impl Fn(&BttLoss) -> bool) -> Option<f64> {
        match &self.counters {
            VolumeCounters::VirtioBlk { sectors, .. } => {
                Some(f64::from(u8::from(sectors.upgrade()?.btt_loss().is_some_and(is_lost))))
            }
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    fn bad_requests(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioPmem(counters) => Some(counters.bad_requests.load(Ordering::Relaxed)),
            VolumeCounters::VirtioBlk { disk, .. } => Some(disk.bad_requests.load(Ordering::Relaxed)),
            VolumeCounters::Nvdimm(_) => None,
        }
    }
}

pub(super) fn expose(out: &mut Exposer<'_>, volumes: &[VolumeMetrics]) -> fmt::Result {
    let sizes = volumes.iter().map(|volume| (volume.labels(), volume.size_bytes));
    out.bytes("volume_size", "The volume's size as the guest sees it.", sizes)?;
    let flushes = volumes.iter().flat_map(|volume| {
        volume.flushes().map(|(result, count)| {
            let mut labels = volume.labels();
            labels.push(("result", result.to_owned()));
            (labels, count)
        })
    });
    out.counters(Family("volume_flushes", "Flushes that the guest has asked for.", None), flushes)?;
    let failed = volumes
        .iter()
        .map(|volume| (volume.labels(), f64::from(u8::from(volume.failure.reason().is_some()))));
    out.gauges(Family("volume_failed", "1 when a flush of a volume has failed.", None), failed)?;
    let read_only = volumes
        .iter()
        .filter_map(|volume| Some((volume.labels(), f64::from(volume.read_only_arenas()? as u32))));
    let help = "Arenas of the volume that take no writes, because something about them is wrong.";
    out.gauges(Family("volume_read_only_arenas", help, None), read_only)?;
    let lost = |is_lost: fn(&BttLoss) -> bool| {
        volumes.iter().filter_map(move |volume| Some((volume.labels(), volume.btt_loss(is_lost)?)))
    };
    let help = "1 when the guest has replaced the volume's BTT, and the disk is read-only.";
    let replaced = lost(|loss| matches!(loss, BttLoss::Replaced { .. }));
    out.gauges(Family("volume_btt_replaced", help, None), replaced)?;
    let help = "1 when the end of a damaged arena is unknown, and the disk is read-only.";
    let damaged = lost(|loss| matches!(loss, BttLoss::Damaged { .. }));
    out.gauges(Family("volume_btt_damaged", help, None), damaged)?;
    let persists = volumes.iter().map(|volume| (volume.labels(), volume.persists()));
    out.latencies(
        "volume_flush_duration",
        "Time to make the volume durable; waiting flushes share one.",
        persists,
    )?;
    let bad = volumes.iter().filter_map(|volume| Some((volume.labels(), volume.bad_requests()?)));
    out.counters(Family("volume_bad_requests", "Requests that the device refuses.", None), bad)?;
    let blocks: Vec<_> = volumes.iter().filter_map(VolumeMetrics::blocks).collect();
    expose_operations(out, "volume_operations", &blocks)?;
    expose_bytes(out, "volume", &blocks)
}

pub(super) fn expose_guest_btt(out: &mut Exposer<'_>, guest_btt: &GuestBtt) -> fmt::Result {
    let verdicts = guest_btt.verdicts_total().map(|(verdict, count)| (one("verdict", verdict), count));
    let help = "Hellos of agents, by what is thought of the BTT driver of the kernel that they name.";
    out.counters(Family("guest_btt_verdicts", help, None), verdicts)
}
