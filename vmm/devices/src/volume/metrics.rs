//! Metrics of volumes.
//!
//! The guest accesses a mapped volume directly, so the VMM can count only its flushes. All requests
//! to a volume with interface virtio-blk go through the VMM.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use prometheus_client::registry::Unit;

use super::build::Sizes;
use crate::disk::BlockDevice;
use crate::memory::holes::HoleMetrics;
use crate::metrics::{Expose, Exposition, Family, Labels, LatencySample, and, get};
use crate::nvdimm::FlushHintMetrics;
use crate::persist::FirstFailure;
use crate::pool::CHUNK_BYTES;
use crate::pool::btt_loss::BttLoss;
use crate::virtio::block::{BlockMetrics, Kind};
use crate::virtio::pmem::metrics::PmemMetrics;

/// Counters of a volume's interface.
#[derive(Clone, Debug)]
pub enum VolumeCounters {
    /// virtio-pmem device.
    VirtioPmem(Arc<PmemMetrics>),
    /// Flush hint page of an NVDIMM.
    Nvdimm(Arc<FlushHintMetrics>),
    /// virtio-blk device.
    VirtioBlk {
        /// Counters of the device.
        disk: Arc<BlockMetrics>,
        /// Content of the disk. Does not keep the volume open.
        device: Weak<dyn BlockDevice>,
        /// Reason for serving the volume's raw bytes instead of its BTT.
        btt_loss: Option<BttLoss>,
    },
}

/// Volume with its counters.
#[derive(Clone, Debug)]
pub struct VolumeMetrics {
    /// Path of the pool, used as its name.
    pub pool: String,
    /// Name of the volume.
    pub volume: String,
    pub sizes: Sizes,
    /// Reason of the first failed flush, if any.
    pub failure: FirstFailure,
    pub counters: VolumeCounters,
    /// Counters of a thin volume that is mapped for writing.
    pub holes: Option<Arc<HoleMetrics>>,
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
        let (done, failed) = match &self.counters {
            VolumeCounters::VirtioPmem(counters) => {
                (get(&counters.flushes), get(&counters.flush_failures))
            }
            VolumeCounters::Nvdimm(counters) => {
                (get(&counters.flushes), get(&counters.flush_failures))
            }
            VolumeCounters::VirtioBlk { disk, .. } => {
                (disk.done(Kind::Flush), disk.failed(Kind::Flush))
            }
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

    /// Returns the number of read-only BTT arenas. `None` if the VMM does not translate sectors.
    fn read_only_arenas(&self) -> Option<usize> {
        match &self.counters {
            VolumeCounters::VirtioBlk { device, .. } => Some(device.upgrade()?.read_only_arenas()),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// Returns true if the BTT is lost and `is_lost` returns true for the loss. `None` if the VMM
    /// does not translate sectors.
    fn btt_loss(&self, is_lost: impl Fn(&BttLoss) -> bool) -> Option<bool> {
        match &self.counters {
            VolumeCounters::VirtioBlk { device, btt_loss, .. } => {
                (device.strong_count() > 0).then(|| btt_loss.as_ref().is_some_and(is_lost))
            }
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// Returns the bytes that were written and not discarded since. `None` if they are not counted.
    fn live_bytes(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioBlk { device, .. } => device.upgrade()?.live_bytes(),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// Returns the bytes that discards, compactions and trim commands have released. `None` if the
    /// volume is not thin.
    fn released_bytes(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioBlk { device, .. } => device.upgrade()?.released_bytes(),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => {
                self.holes.as_ref().map(|holes| get(&holes.released_bytes))
            }
        }
    }

    /// Returns the bytes that compactions have moved. `None` if the VMM does not translate sectors.
    fn compacted_bytes(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioBlk { device, .. } => device.upgrade()?.compacted_bytes(),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => None,
        }
    }

    /// Returns how often a write, or a store into a hole, has found no space. `None` for a mapped
    /// volume without holes that stores of the guest fill.
    fn full_writes(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioBlk { disk, .. } => Some(get(&disk.full_writes)),
            VolumeCounters::VirtioPmem(_) | VolumeCounters::Nvdimm(_) => {
                self.holes.as_ref().map(|holes| get(&holes.full_writes))
            }
        }
    }

    fn bad_requests(&self) -> Option<u64> {
        match &self.counters {
            VolumeCounters::VirtioPmem(counters) => {
                Some(counters.bad_requests.load(Ordering::Relaxed))
            }
            VolumeCounters::VirtioBlk { disk, .. } => {
                Some(disk.bad_requests.load(Ordering::Relaxed))
            }
            VolumeCounters::Nvdimm(_) => None,
        }
    }
}

impl Expose for VolumeMetrics {
    fn expose(&self, out: &mut Exposition) {
        let labels = self.labels();
        let help = "Size of the volume as the guest sees it.";
        let size = self.sizes.size_bytes().map(|bytes| (labels.clone(), bytes));
        out.bytes("volume_size", help, size);
        let help = "Guaranteed bytes of the volume, which a thin volume may exceed.";
        let reserve = self.sizes.reserve_bytes().map(|bytes| (labels.clone(), bytes));
        out.bytes("volume_reserve", help, reserve);
        let help = "Bytes of the pool that the volume occupies; writes and discards change it in a thin volume.";
        let allocated = self.sizes.allocated_bytes().map(|bytes| (labels.clone(), bytes));
        out.bytes("volume_allocated", help, allocated);
        let help = "Bytes of a thin volume that were written and not discarded since.";
        let live = self.live_bytes().map(|bytes| (labels.clone(), bytes));
        out.bytes("volume_live", help, live);
        let help = "Bytes of a thin volume that discards, compaction and trims released.";
        let released = Family("volume_released", help, Some(Unit::Bytes));
        out.counters(released, self.released_bytes().map(|bytes| (labels.clone(), bytes)));
        let help = "Bytes of a thin volume that were moved to release space.";
        let compacted = Family("volume_compacted", help, Some(Unit::Bytes));
        out.counters(compacted, self.compacted_bytes().map(|bytes| (labels.clone(), bytes)));
        let flushes = self.flushes().map(|(result, count)| (and(&labels, "result", result), count));
        out.counters(Family("volume_flushes", "Flushes requested by the guest.", None), flushes);
        let failed = Family("volume_failed", "1 when a flush of the volume has failed.", None);
        out.flags(failed, [(labels.clone(), self.failure.reason().is_some())]);
        out.latencies(
            "volume_flush_duration",
            "Time to make the volume durable; waiting flushes share one call.",
            [(labels.clone(), self.persists())],
        );
        let bad = Family("volume_bad_requests", "Requests refused by the device.", None);
        out.counters(bad, self.bad_requests().map(|count| (labels.clone(), count)));
        let help = "Attempts to write that found no space in the pool.";
        let full = Family("volume_full_writes", help, None);
        out.counters(full, self.full_writes().map(|count| (labels.clone(), count)));
        self.expose_holes(out, &labels);
        self.expose_translation(out, &labels);
        if let VolumeCounters::VirtioBlk { disk, .. } = &self.counters {
            disk.expose_operations(out, "volume_operations", "volume_operation", &labels);
            disk.expose_bytes(out, "volume", &labels);
        }
    }
}

impl VolumeMetrics {
    /// Exposes the work for stores to holes of a mapped volume.
    fn expose_holes(&self, out: &mut Exposition, labels: &Labels) {
        let holes = self.holes.iter();
        let help = "Time for which stores to a hole of a mapped volume waited for a chunk.";
        let fills = holes.clone().map(|holes| (labels.clone(), holes.fills.sample()));
        out.latencies("volume_hole_fill_duration", help, fills);
        let help = "Stores to a hole of a mapped volume for which no chunk was allocated ahead.";
        let unstocked = holes.clone().map(|holes| (labels.clone(), get(&holes.unstocked)));
        out.counters(Family("volume_unstocked_holes", help, None), unstocked);
        let help = "Bytes of a mapped volume that are allocated ahead of stores.";
        let stocked = holes.map(|holes| (labels.clone(), get(&holes.stocked) * CHUNK_BYTES));
        out.bytes("volume_stocked", help, stocked);
    }

    /// Exposes the state of the BTT if the VMM translates sectors.
    fn expose_translation(&self, out: &mut Exposition, labels: &Labels) {
        let with = |value| (labels.clone(), value);
        let help =
            "Arenas of the volume that refuse writes, or writes and reads, because of an error.";
        let read_only = self.read_only_arenas().map(|arenas| with(arenas as f64));
        out.gauges(Family("volume_read_only_arenas", help, None), read_only);
        let with = |is_lost| (labels.clone(), is_lost);
        let help = "1 when the guest has replaced the volume's BTT, and the disk is read-only.";
        let replaced = self.btt_loss(|loss| matches!(loss, BttLoss::Replaced { .. }));
        out.flags(Family("volume_btt_replaced", help, None), replaced.map(with));
        let help = "1 when the end of a damaged arena is unknown, and the disk is read-only.";
        let damaged = self.btt_loss(|loss| matches!(loss, BttLoss::Damaged { .. }));
        out.flags(Family("volume_btt_damaged", help, None), damaged.map(with));
    }
}
