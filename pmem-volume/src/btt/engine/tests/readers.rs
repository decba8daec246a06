//! Tests of single reader slots. `order.rs` tests the order of their use.

use std::thread;

use super::super::readers::{Readers, SLOTS};

#[test]
fn block_is_held_by_each_of_its_readers() {
    let readers = Readers::new(SLOTS);
    assert!(!readers.look_behind_lock().holds(7));
    let mut first = readers.hold(7);
    let second = readers.hold(7);
    assert!(readers.look_behind_lock().holds(7) && !readers.look_behind_lock().holds(8));
    first.move_to(8);
    assert!(readers.look_behind_lock().holds(7) && readers.look_behind_lock().holds(8));
    drop(second);
    assert!(!readers.look_behind_lock().holds(7) && readers.look_behind_lock().holds(8));
    drop(first);
    assert!(!readers.look_behind_lock().holds(8));
}

#[test]
fn readers_without_a_slot_wait_for_another_to_finish() {
    let readers = Readers::new(SLOTS);
    let mut holds: Vec<_> = (1..=SLOTS as u64).map(|block| readers.hold(block)).collect();
    thread::scope(|scope| {
        let late = scope.spawn(|| drop(readers.hold(1000)));
        assert!((1..=SLOTS as u64).all(|block| readers.look_behind_lock().holds(block)));
        holds.pop();
        late.join().unwrap();
    });
}
