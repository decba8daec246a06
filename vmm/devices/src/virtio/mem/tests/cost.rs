//! Workloads whose instructions are counted with callgrind (docs/design/benchmarks.md).

use super::*;
use crate::virtio::testing::counted_requests;

/// Number of blocks in the zone. `ci/bench --requests` requests them one at a time, and should not
/// request more.
const BLOCKS: u16 = 3000;

fn requests() -> u64 {
    counted_requests(256)
}

/// Creates a guest from which the whole zone is requested.
fn guest() -> Guest {
    let guest = Guest::new(BLOCKS.into(), None);
    guest.handle.request_size(u64::from(BLOCKS) * BLOCK_BYTES).unwrap();
    guest
}

#[test]
fn each_block_is_plugged_by_a_request_of_its_own() {
    let mut guest = guest();
    for block in 0..requests() {
        assert_eq!(guest.plug(block, 1), ACK);
    }
    assert_eq!(guest.handle.sizes().plugged_bytes, requests() * BLOCK_BYTES);
}

#[test]
fn each_block_is_unplugged_by_a_request_of_its_own() {
    let mut guest = guest();
    assert_eq!(guest.plug(0, BLOCKS), ACK);
    for block in 0..requests() {
        assert_eq!(guest.unplug(block, 1), ACK);
    }
    let left = u64::from(BLOCKS) - requests();
    assert_eq!(guest.handle.sizes().plugged_bytes, left * BLOCK_BYTES);
}
