//! State of a virtio-mem device. This module does no I/O.

use balloon::{DriverState, Shortfall};
use vm_memory::GuestAddress;

use super::metrics::FailureReason;
use super::request::{BlockRun, BlockState};

/// Length of the configuration (virtio 1.3, 5.15.4).
pub(super) const CONFIG_BYTES: usize = 56;

/// Number of Linux memory blocks by which the usable region exceeds the requested size. One block
/// lets the driver skip blocks that it cannot use. The other is needed because the driver rounds
/// the region's end down to a whole block, but the requested size may end within a block. Without
/// it, the driver would plug nothing for a request smaller than a block, and would not retry (Linux
/// drivers/virtio/virtio_mem.c, `virtio_mem_refresh_config`, `virtio_mem_sbm_prepare_next_mb`).
const USABLE_SLACK_BLOCKS: u64 = 2;

/// Reason to refuse a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request is invalid. The request is answered with ERROR.
    Error,
    /// The request would exceed the requested size. It is answered with NACK.
    Nack,
}

/// State of a virtio-mem device and its memory region.
#[derive(Clone, Debug)]
pub(super) struct MemState {
    addr: u64,
    region_bytes: u64,
    /// Largest size that may be requested. The region may be larger.
    max_bytes: u64,
    block_bytes: u64,
    /// Number of bytes by which the usable region exceeds the requested size.
    slack_bytes: u64,
    node_id: u16,
    usable_bytes: u64,
    plugged_bytes: u64,
    requested_bytes: u64,
    /// Size that the governor requests in several steps. At least `requested_bytes`.
    goal_bytes: u64,
    /// Reason why less is requested than the governor wanted.
    shortfall: Option<Shortfall>,
    driver: DriverState,
    /// True if a request was withdrawn because the driver was refused. Cleared by the next request
    /// or the next driver.
    is_withdrawn: bool,
    /// Bitmap with one bit per block, set if the block is plugged.
    plugged: Vec<u64>,
}

impl MemState {
    /// Creates a region without plugged or requested blocks. At most `max_bytes` may be requested.
    /// The guest adds memory in blocks of `linux_block_bytes`.
    pub(super) fn new(
        addr: u64,
        region_bytes: u64,
        max_bytes: u64,
        block_bytes: u64,
        linux_block_bytes: u64,
        node_id: u16,
    ) -> Self {
        assert!(block_bytes.is_power_of_two() && max_bytes <= region_bytes);
        assert!(addr.is_multiple_of(block_bytes) && region_bytes.is_multiple_of(block_bytes));
        let words = (region_bytes / block_bytes).div_ceil(64) as usize;
        Self {
            addr,
            region_bytes,
            max_bytes,
            block_bytes,
            slack_bytes: USABLE_SLACK_BLOCKS * linux_block_bytes,
            node_id,
            usable_bytes: 0,
            plugged_bytes: 0,
            requested_bytes: 0,
            goal_bytes: 0,
            shortfall: None,
            driver: DriverState::Absent,
            is_withdrawn: false,
            plugged: vec![0; words],
        }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(super) fn plugged_bytes(&self) -> u64 {
        self.plugged_bytes
    }

    pub(super) fn requested_bytes(&self) -> u64 {
        self.requested_bytes
    }

    /// Part of the goal that is not requested yet.
    pub(super) fn held_bytes(&self) -> u64 {
        self.goal_bytes - self.requested_bytes
    }

    pub(super) fn shortfall(&self) -> Option<Shortfall> {
        self.shortfall
    }

    pub(super) fn driver(&self) -> DriverState {
        self.driver
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        self.is_withdrawn
    }

    /// Returns true if the goal is plugged. Returns false if only a step toward it is plugged, or
    /// if the size was lowered or withdrawn.
    pub(super) fn is_reached(&self) -> bool {
        self.plugged_bytes == self.goal_bytes && self.shortfall.is_none() && !self.is_withdrawn
    }

    /// Returns the guest-physical address of an offset in the region.
    pub(super) fn address(&self, offset: u64) -> GuestAddress {
        GuestAddress(self.addr + offset)
    }

    /// Returns the configuration in the format that the driver reads.
    pub(super) fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[0..8].copy_from_slice(&self.block_bytes.to_le_bytes());
        config[8..10].copy_from_slice(&self.node_id.to_le_bytes());
        let fields = [
            self.addr,
            self.region_bytes,
            self.usable_bytes,
            self.plugged_bytes,
            self.requested_bytes,
        ];
        for (field, value) in config[16..].chunks_exact_mut(8).zip(fields) {
            field.copy_from_slice(&value.to_le_bytes());
        }
        config
    }

    /// Requests `bytes` as a step toward `goal_bytes`. The caller must have checked both against
    /// the maximum and the block size.
    pub(super) fn set_requested(&mut self, bytes: u64, goal_bytes: u64) {
        assert!(bytes <= goal_bytes && goal_bytes <= self.max_bytes);
        assert!(
            bytes.is_multiple_of(self.block_bytes) && goal_bytes.is_multiple_of(self.block_bytes)
        );
        (self.requested_bytes, self.goal_bytes) = (bytes, goal_bytes);
        (self.shortfall, self.is_withdrawn) = (None, false);
        // The usable region MUST NOT shrink here (virtio 1.3, 5.15.4.2), because the driver may
        // have plugged blocks at its end.
        self.usable_bytes = self.usable_bytes.max(self.usable_for(bytes));
    }

    /// Lowers the requested size to `bytes`, the size that the host can provide, and records
    /// `reason`. Returns false if the requested size is not larger than `bytes`.
    pub(super) fn lower_requested(&mut self, bytes: u64, reason: FailureReason) -> bool {
        let lower = bytes < self.requested_bytes;
        if lower {
            // If the size is lowered several times, the wanted size is that of the original
            // request.
            let wanted_bytes = self.shortfall.map_or(self.goal_bytes, |before| before.wanted_bytes);
            self.shortfall = Some(Shortfall { reason: reason.as_str(), wanted_bytes });
            self.requested_bytes = bytes - bytes % self.block_bytes;
            self.goal_bytes = self.requested_bytes;
        }
        lower
    }

    /// Records that a driver is active.
    pub(super) fn driver_came(&mut self) {
        (self.driver, self.is_withdrawn) = (DriverState::Ready, false);
    }

    /// Records that the driver has reset the device.
    pub(super) fn driver_left(&mut self) {
        self.driver = DriverState::Absent;
    }

    /// Records that the device has refused the driver, and withdraws the current request. Returns
    /// false if a refused driver was already recorded.
    pub(super) fn refuse_driver(&mut self) -> bool {
        if self.driver == DriverState::Unsupported {
            return false;
        }
        self.driver = DriverState::Unsupported;
        self.is_withdrawn = self.goal_bytes != self.plugged_bytes || self.shortfall.is_some();
        (self.requested_bytes, self.goal_bytes) = (self.plugged_bytes, self.plugged_bytes);
        self.shortfall = None;
        true
    }

    /// Checks a plug request (virtio 1.3, 5.15.6.1.2). Returns its offset and length in the region.
    pub(super) fn check_plug(&self, run: BlockRun) -> Result<(u64, u64), Refusal> {
        let (offset, len) = self.resolve(run)?;
        // All blocks are checked before any is plugged, because the last block of a request may be
        // the only invalid one.
        if self.count_plugged(offset, len) != 0 {
            return Err(Refusal::Error);
        }
        if self.plugged_bytes + len > self.requested_bytes {
            return Err(Refusal::Nack);
        }
        Ok((offset, len))
    }

    /// Checks an unplug request (virtio 1.3, 5.15.6.2.2). Returns its offset and length in the
    /// region.
    pub(super) fn check_unplug(&self, run: BlockRun) -> Result<(u64, u64), Refusal> {
        let (offset, len) = self.resolve(run)?;
        if !self.is_all_plugged(offset, len) {
            return Err(Refusal::Error);
        }
        Ok((offset, len))
    }

    /// Returns true if all blocks in `offset..offset + len` are plugged. The range must be in the
    /// region.
    pub(super) fn is_all_plugged(&self, offset: u64, len: u64) -> bool {
        self.count_plugged(offset, len) * self.block_bytes == len
    }

    /// Returns the common state of a run of blocks (virtio 1.3, 5.15.6.4.2).
    pub(super) fn block_state(&self, run: BlockRun) -> Result<BlockState, Refusal> {
        let (offset, len) = self.resolve(run)?;
        Ok(match self.count_plugged(offset, len) {
            0 => BlockState::Unplugged,
            count if count * self.block_bytes == len => BlockState::Plugged,
            _ => BlockState::Mixed,
        })
    }

    /// Records an executed plug or unplug.
    pub(super) fn commit(&mut self, offset: u64, len: u64, plugged: bool) {
        let already = self.count_plugged(offset, len) * self.block_bytes;
        assert_eq!(
            already,
            if plugged { 0 } else { len },
            "a run of blocks that was validated before"
        );
        for block in self.blocks(offset, len) {
            let (word, mask) = ((block / 64) as usize, 1 << (block % 64));
            self.plugged[word] =
                if plugged { self.plugged[word] | mask } else { self.plugged[word] & !mask };
        }
        self.plugged_bytes =
            if plugged { self.plugged_bytes + len } else { self.plugged_bytes - len };
    }

    /// Shrinks the usable region to the requested size at the end of UNPLUG ALL, when no block is
    /// plugged.
    pub(super) fn shrink_usable(&mut self) {
        assert_eq!(self.plugged_bytes, 0);
        self.usable_bytes = self.usable_for(self.requested_bytes);
    }

    /// Returns runs of plugged blocks as pairs of offset and length.
    pub(super) fn plugged_runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for block in self.blocks(0, self.region_bytes).filter(|&block| self.is_plugged(block)) {
            let offset = block * self.block_bytes;
            match runs.last_mut() {
                Some((start, len)) if *start + *len == offset => *len += self.block_bytes,
                _ => runs.push((offset, self.block_bytes)),
            }
        }
        runs
    }

    fn resolve(&self, run: BlockRun) -> Result<(u64, u64), Refusal> {
        let len = u64::from(run.count) * self.block_bytes;
        let offset = run.addr.checked_sub(self.addr).ok_or(Refusal::Error)?;
        let end = offset.checked_add(len).ok_or(Refusal::Error)?;
        if len == 0 || !offset.is_multiple_of(self.block_bytes) || end > self.usable_bytes {
            return Err(Refusal::Error);
        }
        Ok((offset, len))
    }

    fn usable_for(&self, requested_bytes: u64) -> u64 {
        if requested_bytes == 0 {
            return 0;
        }
        requested_bytes.saturating_add(self.slack_bytes).min(self.region_bytes)
    }

    fn blocks(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        offset / self.block_bytes..(offset + len) / self.block_bytes
    }

    fn is_plugged(&self, block: u64) -> bool {
        self.plugged[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    fn count_plugged(&self, offset: u64, len: u64) -> u64 {
        self.blocks(offset, len).filter(|&block| self.is_plugged(block)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::layout::linux_block_bytes;

    const BLOCK: u64 = 2 << 20;
    const ADDR: u64 = 4 << 30;
    const BLOCKS: u64 = 300;
    const LINUX_BLOCK: u64 = 64 * BLOCK;

    fn run(block: u64, count: u16) -> BlockRun {
        BlockRun { addr: ADDR + block * BLOCK, count }
    }

    #[test]
    fn configuration_has_the_layout_of_the_specification() {
        let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 3);
        state.set_requested(8 * BLOCK, 8 * BLOCK);
        state.commit(0, BLOCK, true);
        let config = state.config();
        let field = |at: usize| u64::from_le_bytes(config[at..at + 8].try_into().unwrap());
        assert_eq!(field(0), BLOCK);
        assert_eq!(field(8), 3);
        assert_eq!(field(16), ADDR);
        assert_eq!(field(24), BLOCKS * BLOCK);
        assert_eq!(field(32), (8 + 128) * BLOCK);
        assert_eq!(field(40), BLOCK);
        assert_eq!(field(48), 8 * BLOCK);
    }

    #[test]
    fn requests_outside_of_the_region_are_errors() {
        let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 0);
        assert_eq!(state.check_plug(run(0, 1)), Err(Refusal::Error));
        state.set_requested(BLOCKS * BLOCK, BLOCKS * BLOCK);
        for wrong in [
            run(0, 0),
            run(BLOCKS, 1),
            run(BLOCKS - 1, 2),
            BlockRun { addr: ADDR + 1, count: 1 },
            BlockRun { addr: ADDR - BLOCK, count: 2 },
            BlockRun { addr: u64::MAX - BLOCK + 1, count: u16::MAX },
        ] {
            assert_eq!(state.check_plug(wrong), Err(Refusal::Error), "{wrong:?}");
            assert_eq!(state.check_unplug(wrong), Err(Refusal::Error), "{wrong:?}");
            assert_eq!(state.block_state(wrong), Err(Refusal::Error), "{wrong:?}");
        }
        assert_eq!(state.check_plug(run(BLOCKS - 1, 1)), Ok(((BLOCKS - 1) * BLOCK, BLOCK)));
    }

    #[test]
    fn usable_region_shrinks_only_when_all_is_unplugged() {
        let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 0);
        state.set_requested(BLOCKS * BLOCK, BLOCKS * BLOCK);
        state.set_requested(0, 0);
        assert_eq!(state.usable_bytes, BLOCKS * BLOCK);
        state.shrink_usable();
        assert_eq!(state.usable_bytes, 0);
    }

    #[test]
    fn usable_region_has_a_spare_block_for_small_requests() {
        const GIB: u64 = 1 << 30;
        for boot_end in [GIB, 63 * GIB, 64 * GIB, 65 * GIB, 127 * GIB] {
            let block = linux_block_bytes(boot_end);
            let (addr, len) = (boot_end.next_multiple_of(block), 16 * GIB);
            for requested in [BLOCK, LINUX_BLOCK, 768 << 20, GIB, 2 * GIB + BLOCK] {
                let mut state = MemState::new(addr, len, len, BLOCK, block, 0);
                state.set_requested(requested, requested);
                // The driver uses only memory blocks that are completely in the usable region.
                let whole_blocks = (addr + state.usable_bytes) / block - addr / block;
                assert!(whole_blocks > requested.div_ceil(block), "{boot_end:#x}, {requested:#x}");
            }
            // The usable region cannot exceed the region, which ends at a block boundary.
            let mut state = MemState::new(addr, len, len - BLOCK, BLOCK, block, 0);
            state.set_requested(len - BLOCK, len - BLOCK);
            assert_eq!(state.usable_bytes, len);
        }
    }

    #[test]
    fn lowered_request_is_whole_blocks_and_never_raised() {
        let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 0);
        state.set_requested(8 * BLOCK, 8 * BLOCK);
        assert!(!state.lower_requested(8 * BLOCK, FailureReason::Map));
        assert_eq!(state.shortfall(), None);
        assert!(state.lower_requested(5 * BLOCK + 1, FailureReason::Map));
        assert_eq!(state.requested_bytes(), 5 * BLOCK);
    }

    #[test]
    fn lowered_request_is_not_reached_and_records_the_wanted_size() {
        let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 0);
        state.set_requested(8 * BLOCK, 8 * BLOCK);
        state.lower_requested(5 * BLOCK, FailureReason::PoolFull);
        state.lower_requested(2 * BLOCK, FailureReason::Slot);
        let shortfall = Shortfall { reason: "slot", wanted_bytes: 8 * BLOCK };
        assert_eq!(state.shortfall(), Some(shortfall));
        state.commit(0, 2 * BLOCK, true);
        assert!(!state.is_reached());
        state.set_requested(2 * BLOCK, 2 * BLOCK);
        assert_eq!(state.shortfall(), None);
        assert!(state.is_reached());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Request(u64),
        Plug(u64, u16),
        Unplug(u64, u16),
        UnplugAll,
        Query(u64, u16),
    }

    fn op() -> impl Strategy<Value = Op> {
        let run = || (0..BLOCKS + 2, 0..140u16);
        prop_oneof![
            (0..=BLOCKS).prop_map(Op::Request),
            run().prop_map(|(at, count)| Op::Plug(at, count)),
            run().prop_map(|(at, count)| Op::Plug(at, count.min(8))),
            run().prop_map(|(at, count)| Op::Unplug(at, count.min(4))),
            run().prop_map(|(at, count)| Op::Query(at, count)),
            Just(Op::UnplugAll),
        ]
    }

    /// Reference implementation of the specification's rules, with a set of block numbers.
    #[derive(Default)]
    struct Oracle {
        plugged: BTreeSet<u64>,
        requested: u64,
        usable: u64,
    }

    impl Oracle {
        fn valid(&self, at: u64, count: u16) -> bool {
            count > 0 && at + u64::from(count) <= self.usable
        }

        fn how_many(&self, at: u64, count: u16) -> u64 {
            self.plugged.range(at..at + u64::from(count)).count() as u64
        }
    }

    proptest! {
        #[test]
        fn state_equals_a_set_of_blocks(ops in prop::collection::vec(op(), 1..60)) {
            let mut state = MemState::new(ADDR, BLOCKS * BLOCK, BLOCKS * BLOCK, BLOCK, LINUX_BLOCK, 0);
            let mut oracle = Oracle::default();
            for op in ops {
                match op {
                    Op::Request(blocks) => {
                        state.set_requested(blocks * BLOCK, blocks * BLOCK);
                        oracle.requested = blocks;
                        let usable = if blocks == 0 { 0 } else { (blocks + 128).min(BLOCKS) };
                        oracle.usable = oracle.usable.max(usable);
                    }
                    Op::Plug(at, count) => {
                        let expected = if !oracle.valid(at, count) || oracle.how_many(at, count) > 0 {
                            Err(Refusal::Error)
                        } else if oracle.plugged.len() as u64 + u64::from(count) > oracle.requested {
                            Err(Refusal::Nack)
                        } else {
                            oracle.plugged.extend(at..at + u64::from(count));
                            Ok((at * BLOCK, u64::from(count) * BLOCK))
                        };
                        let result = state.check_plug(run(at, count));
                        prop_assert_eq!(result, expected);
                        if let Ok((offset, len)) = result {
                            state.commit(offset, len, true);
                        }
                    }
                    Op::Unplug(at, count) => {
                        let all = oracle.how_many(at, count) == u64::from(count);
                        let result = state.check_unplug(run(at, count));
                        prop_assert_eq!(result.is_ok(), oracle.valid(at, count) && all);
                        if let Ok((offset, len)) = result {
                            oracle.plugged.retain(|block| !(at..at + u64::from(count)).contains(block));
                            state.commit(offset, len, false);
                        }
                    }
                    Op::UnplugAll => {
                        for (offset, len) in state.plugged_runs() {
                            state.commit(offset, len, false);
                        }
                        state.shrink_usable();
                        oracle.plugged.clear();
                        oracle.usable =
                            if oracle.requested == 0 { 0 } else { (oracle.requested + 128).min(BLOCKS) };
                    }
                    Op::Query(at, count) => {
                        let expected = match oracle.how_many(at, count) {
                            _ if !oracle.valid(at, count) => Err(Refusal::Error),
                            0 => Ok(BlockState::Unplugged),
                            n if n == u64::from(count) => Ok(BlockState::Plugged),
                            _ => Ok(BlockState::Mixed),
                        };
                        prop_assert_eq!(state.block_state(run(at, count)), expected);
                    }
                }
                prop_assert_eq!(state.plugged_bytes(), oracle.plugged.len() as u64 * BLOCK);
                prop_assert_eq!(state.usable_bytes, oracle.usable * BLOCK);
                let runs = state.plugged_runs();
                let blocks: BTreeSet<u64> = runs
                    .iter()
                    .flat_map(|(offset, len)| offset / BLOCK..(offset + len) / BLOCK)
                    .collect();
                prop_assert_eq!(&blocks, &oracle.plugged);
            }
        }
    }
}
