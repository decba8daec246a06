//! Blocks of DRAM that the agent converts to kernel memory. The agent's own code makes the
//! decisions.

use foreshore_proto::{KernelBlockGrowth, KernelBlockPace, RawReport, short_node};

use super::guest::Guest;

/// The part of the agent that converts blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct KernelBlocks {
    growth: KernelBlockGrowth,
    pace: KernelBlockPace,
    /// Node that needs another kernel block according to the last report.
    short_node: Option<u32>,
    /// Total size of the converted blocks at the start of the present conversion.
    before_bytes: Option<u64>,
}

impl KernelBlocks {
    /// Updates the state from a report and from the result of the last conversion.
    pub(super) fn update(&mut self, report: &RawReport, guest: &Guest) {
        let now_ms = report.monotonic_ms;
        // The simulated guest has no locked or compressed pages.
        self.growth.update(report, 0, now_ms);
        if let Some(before_bytes) = self.before_bytes.take_if(|_| !guest.is_converting()) {
            match guest.kernel_block_bytes() > before_bytes {
                true => self.pace.succeeded(now_ms),
                false => self.pace.failed(now_ms),
            }
        }
        self.short_node = short_node(&report.zones, &report.blocks, &self.growth, None);
    }

    /// Starts a conversion if the kernel is short of memory.
    pub(super) fn begin(&mut self, guest: &mut Guest, block_bytes: u64, now_ms: u64) {
        let Some(node) = self.short_node.filter(|_| self.before_bytes.is_none()) else { return };
        if !self.pace.is_due(now_ms) {
            return;
        }
        match guest.begin_conversion(node, block_bytes) {
            true => self.before_bytes = Some(guest.kernel_block_bytes()),
            false => self.pace.failed(now_ms),
        }
    }

    /// Returns true if no conversion is needed or in progress.
    pub(super) fn is_at_rest(&self) -> bool {
        self.short_node.is_none() && self.before_bytes.is_none()
    }
}

#[cfg(test)]
mod tests {
    use foreshore_proto::Cause;

    use super::super::agent::Agent;
    use super::super::guest::GuestConfig;
    use super::super::{HostPool, Segment};
    use super::*;
    use crate::{MIB, Tier, TimeMs, ZoneSizes};

    /// Amount of kernel memory that leaves less than half of the usual reserve.
    const KERNEL_BYTES: u64 = 335 * MIB;

    /// Simulates one second in which programs demand `anon_mib`. Returns true if the agent then
    /// starts a conversion.
    fn starts_conversion(guest: &mut Guest, agent: &mut Agent, anon_mib: u64) -> bool {
        let segment = Segment {
            anon_bytes: anon_mib * MIB,
            kernel_bytes: KERNEL_BYTES,
            ..Segment::default()
        };
        guest.advance(guest.now() + 1_000, &segment, &mut HostPool::new(0));
        agent.report(guest, Cause::Rest);
        let was_converting = guest.is_converting();
        agent.give_kernel_block(guest);
        guest.is_converting() && !was_converting
    }

    fn short_guest() -> Guest {
        guest_with(0)
    }

    /// Guest of 384 MiB with 256 MiB of plugged DRAM, and another zone in which `other_bytes` can
    /// be plugged. Its kernel is short of memory.
    fn guest_with(other_bytes: u64) -> Guest {
        let dram = ZoneSizes {
            requested_bytes: 256 * MIB,
            plugged_bytes: 256 * MIB,
            ..ZoneSizes::empty(0, Tier::Dram, 256 * MIB)
        };
        let other = ZoneSizes::empty(1, Tier::Dram, other_bytes);
        let segment = Segment { kernel_bytes: KERNEL_BYTES, ..Segment::default() };
        Guest::new(GuestConfig::default(), &[dram, other], &segment)
    }

    #[test]
    fn conversion_without_room_for_pages_is_retried_after_a_pause() {
        let (mut guest, mut agent) = (short_guest(), Agent::new());
        assert!(starts_conversion(&mut guest, &mut agent, 0));
        // Programs fill all free memory during each conversion.
        let mut pauses_s = Vec::new();
        for second in 1..=40 {
            let is_full = guest.is_converting();
            if starts_conversion(&mut guest, &mut agent, if is_full { 220 } else { 0 }) {
                pauses_s.push(second);
            }
            assert!(is_full || !agent.is_at_rest(), "another attempt follows");
        }
        assert_eq!((guest.kernel_block_bytes(), &pauses_s[..]), (0, &[15, 35][..]));
    }

    #[test]
    fn conversion_completes_as_soon_as_pages_have_room() {
        let (mut guest, mut agent) = (short_guest(), Agent::new());
        assert!(starts_conversion(&mut guest, &mut agent, 0));
        for _ in 0..5 {
            starts_conversion(&mut guest, &mut agent, 220);
            assert!(guest.is_converting());
        }
        starts_conversion(&mut guest, &mut agent, 0);
        assert_eq!((guest.kernel_block_bytes(), guest.is_converting()), (128 * MIB, false));
    }

    #[test]
    fn no_memory_is_plugged_during_a_conversion() {
        let (mut guest, mut agent) = (guest_with(128 * MIB), Agent::new());
        guest.advance(
            TimeMs(1_000),
            &Segment { kernel_bytes: KERNEL_BYTES, ..Segment::default() },
            &mut HostPool::new(0),
        );
        guest.request([256 * MIB, 128 * MIB]);
        assert!(!guest.is_converting() && guest.plugged_bytes() == 256 * MIB);
        agent.report(&guest, Cause::Rest);
        agent.give_kernel_block(&mut guest);
        assert!(guest.is_converting());
        let segment =
            Segment { kernel_bytes: KERNEL_BYTES, anon_bytes: 220 * MIB, ..Segment::default() };
        guest.advance(TimeMs(8_000), &segment, &mut HostPool::new(0));
        assert_eq!((guest.plugged_bytes(), guest.is_converting()), (256 * MIB, true));
        guest.advance(TimeMs(20_000), &segment, &mut HostPool::new(0));
        assert_eq!((guest.plugged_bytes(), guest.is_converting()), (384 * MIB, false));
    }

    #[test]
    fn kernel_that_has_enough_after_one_block_gets_no_more() {
        let (mut guest, mut agent) = (short_guest(), Agent::new());
        let begun: Vec<bool> =
            (0..10).map(|_| starts_conversion(&mut guest, &mut agent, 0)).collect();
        assert_eq!(begun.iter().filter(|is_begun| **is_begun).count(), 1, "{begun:?}");
        assert!(agent.is_at_rest());
        assert_eq!(
            (guest.kernel_block_bytes(), guest.total_bytes()),
            (128 * MIB, (384 - 28 + 256) * MIB)
        );
    }
}
