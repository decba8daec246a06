//! Tests of single reader slots. `order.rs` tests the order of their use.

use std::thread;

use super::super::readers::{Readers, SLOTS};

#[test]
fn block_is_announced_by_each_of_its_readers() {
    let readers = Readers::new(SLOTS);
    assert!(!readers.announcements_after_lock().contains(7));
    let mut first = readers.announce(7);
    let second = readers.announce(7);
    assert!(
        readers.announcements_after_lock().contains(7)
            && !readers.announcements_after_lock().contains(8)
    );
    first.move_to(8);
    assert!(
        readers.announcements_after_lock().contains(7)
            && readers.announcements_after_lock().contains(8)
    );
    drop(second);
    assert!(
        !readers.announcements_after_lock().contains(7)
            && readers.announcements_after_lock().contains(8)
    );
    drop(first);
    assert!(!readers.announcements_after_lock().contains(8));
}

#[test]
fn readers_without_a_slot_wait_for_another_to_finish() {
    let readers = Readers::new(SLOTS);
    let mut announcements: Vec<_> =
        (1..=SLOTS as u64).map(|block| readers.announce(block)).collect();
    thread::scope(|scope| {
        let late = scope.spawn(|| drop(readers.announce(1000)));
        assert!((1..=SLOTS as u64).all(|block| readers.announcements_after_lock().contains(block)));
        announcements.pop();
        late.join().unwrap();
    });
}
