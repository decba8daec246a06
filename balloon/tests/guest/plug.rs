//! How the guest's driver follows requests.

use balloon::{BLOCK_BYTES, MIB, TimeMs, ZoneSizes};

use super::Guest;

/// Linux adds memory in sections of 128 MiB, whole, and describes each with 2 MiB.
const SECTION_BYTES: u64 = 128 * MIB;
const SECTION_DESCRIPTOR_BYTES: u64 = 2 * MIB;

/// How fast memory comes and goes, and what does not go.
#[derive(Clone)]
pub struct Plugging {
    /// From the request to the first block.
    pub delay_ms: u64,
    /// What a block takes from there on.
    pub block_us: u64,
    pub unplug_block_us: u64,
    /// So much of each zone, once plugged, has pages that cannot be moved.
    pub pinned_bytes: [u64; 2],
    asked: [(u64, TimeMs); 2],
    /// Time that was not enough for a block.
    credit_us: [u64; 2],
}

impl Plugging {
    pub(super) fn new() -> Self {
        Plugging {
            delay_ms: 200,
            block_us: 2_000,
            unplug_block_us: 4_000,
            pinned_bytes: [0; 2],
            asked: [(0, TimeMs(0)); 2],
            credit_us: [0; 2],
        }
    }
}

impl Guest {
    pub(super) fn descriptor_bytes(&self) -> u64 {
        self.host
            .zones
            .iter()
            .map(|zone| zone.plugged_bytes.div_ceil(SECTION_BYTES) * SECTION_DESCRIPTOR_BYTES)
            .sum()
    }

    /// What is isolated to be given back and still in the total.
    pub(super) fn leaving_bytes(&self) -> u64 {
        let pinned = self.plugging.pinned_bytes;
        let leaving = |(zone, pinned): (&ZoneSizes, u64)| {
            zone.outstanding_shrink_bytes().min(zone.plugged_bytes.saturating_sub(pinned))
        };
        self.host.zones.iter().zip(pinned).map(leaving).sum::<u64>().min(128 * MIB)
    }

    /// A millisecond of the driver's work, both zones side by side.
    pub(super) fn plug(&mut self) {
        for index in 0..self.host.zones.len() {
            let zone = &self.host.zones[index];
            let plugging = &mut self.plugging;
            let (before, at) = plugging.asked[index];
            if zone.requested_bytes != before {
                // A driver that is still at work takes the new size up; one that rests has to begin.
                let is_at_work = (before > zone.plugged_bytes && zone.outstanding_grow_bytes() > 0)
                    || (before < zone.plugged_bytes && zone.outstanding_shrink_bytes() > 0);
                plugging.asked[index] = (zone.requested_bytes, if is_at_work { at } else { self.now });
                plugging.credit_us[index] = 0;
            }
            if self.now.since(plugging.asked[index].1) < plugging.delay_ms {
                continue;
            }
            plugging.credit_us[index] += 1_000;
            if zone.outstanding_grow_bytes() > 0 {
                let blocks = plugging.credit_us[index] / plugging.block_us;
                plugging.credit_us[index] -= blocks * plugging.block_us;
                self.plug_blocks(index, blocks);
            } else {
                let blocks = plugging.credit_us[index] / plugging.unplug_block_us;
                plugging.credit_us[index] -= blocks * plugging.unplug_block_us;
                self.unplug_blocks(index, blocks);
            }
        }
    }

    fn plug_blocks(&mut self, index: usize, blocks: u64) {
        for _ in 0..blocks {
            let zone = &self.host.zones[index];
            // A new section's descriptors come out of what is free now; without them nothing is plugged.
            let new_section = zone.plugged_bytes.is_multiple_of(SECTION_BYTES);
            let lacks_room = new_section && self.free_bytes() < SECTION_DESCRIPTOR_BYTES;
            if zone.outstanding_grow_bytes() == 0 || lacks_room {
                return;
            }
            self.host.zones[index].plugged_bytes += BLOCK_BYTES;
        }
    }

    fn unplug_blocks(&mut self, index: usize, blocks: u64) {
        for _ in 0..blocks {
            let zone = &self.host.zones[index];
            let is_pinned = zone.plugged_bytes <= self.plugging.pinned_bytes[index];
            if zone.outstanding_shrink_bytes() == 0 || is_pinned {
                return;
            }
            // What is in use moves to free memory, for which page cache makes room.
            if self.free_bytes() < BLOCK_BYTES && self.files.drop_cache(BLOCK_BYTES) < BLOCK_BYTES {
                return;
            }
            self.host.zones[index].plugged_bytes -= BLOCK_BYTES;
        }
    }
}
