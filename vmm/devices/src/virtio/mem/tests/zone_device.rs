//! Tests of the interface that the governor uses.

use balloon::ZoneSizes;

use super::*;

#[test]
fn sizes_show_the_request_and_the_part_of_it_that_is_held() {
    let mut guest = Guest::new(64, Some(64));
    ZoneDevice::request_step(&guest.handle, 8 * BLOCK_BYTES, 24 * BLOCK_BYTES);
    assert_eq!(guest.plug(0, 4), ACK);
    let ZoneSpec { tier, guest_node, .. } = *guest.handle.zone();
    let expected = ZoneSizes {
        guest_numa_node: guest_node,
        requested_bytes: 8 * BLOCK_BYTES,
        plugged_bytes: 4 * BLOCK_BYTES,
        held_bytes: 16 * BLOCK_BYTES,
        ..ZoneSizes::empty(0, tier, 64 * BLOCK_BYTES)
    };
    assert_eq!(guest.handle.sizes(), expected);
}

#[test]
fn request_of_the_governor_has_one_step() {
    let guest = Guest::new(64, None);
    ZoneDevice::request_step(&guest.handle, 8 * BLOCK_BYTES, 24 * BLOCK_BYTES);
    guest.handle.request(4 * BLOCK_BYTES);
    let sizes = guest.handle.sizes();
    assert_eq!((sizes.requested_bytes, sizes.held_bytes), (4 * BLOCK_BYTES, 0));
}

#[test]
fn invalid_request_of_the_governor_changes_nothing() {
    let guest = Guest::new(64, None);
    guest.handle.request(4 * BLOCK_BYTES);
    for bytes in [4 * BLOCK_BYTES + 1, 65 * BLOCK_BYTES] {
        guest.handle.request(bytes);
        assert_eq!(guest.handle.sizes().requested_bytes, 4 * BLOCK_BYTES);
    }
}

#[test]
fn reminder_signals_the_driver_and_a_held_goal_is_reported() {
    let guest = Guest::new(64, None);
    guest.handle.request(4 * BLOCK_BYTES);
    guest.drain_events();
    while guest.signals.try_recv().is_ok() {}
    guest.handle.remind();
    assert_eq!(guest.signals.try_recv(), Ok(Signal::Config));
    guest.handle.report_held();
    let requested_bytes = 4 * BLOCK_BYTES;
    assert_eq!(guest.drain_events(), [MemEvent::Held { requested_bytes }]);
}
