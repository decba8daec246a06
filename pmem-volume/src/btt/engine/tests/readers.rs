//! Single slots of readers. `order.rs` tests the order of their use.

use std::thread;

use super::super::readers::{Readers, SLOTS};

#[test]
fn a_block_is_held_by_as_many_as_read_it() {
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
fn more_readers_than_slots_wait_for_one_that_is_done() {
    let readers = Readers::new(SLOTS);
    let mut holds: Vec<_> = (1..=SLOTS as u64).map(|block| readers.hold(block)).collect();
    thread::scope(|scope| {
        let late = scope.spawn(|| drop(readers.hold(1000)));
        assert!((1..=SLOTS as u64).all(|block| readers.look_behind_lock().holds(block)));
        holds.pop();
        late.join().unwrap();
    });
}
