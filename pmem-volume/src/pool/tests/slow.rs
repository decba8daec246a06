//! Tests with slow media. Queries of the pool's levels should not wait for the media.

use std::sync::{Condvar, mpsc};
use std::thread;
use std::time::Duration;

use super::hooked::{Hooked, open};
use super::*;

/// Time after which a wait is considered to be a hang.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    /// The next call closes the gate and waits.
    Armed,
    /// A call waits until the gate opens.
    Shut,
}

/// Blocks one persist or erase until the test opens the gate.
pub(super) struct Barrier {
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Barrier {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { gate: Mutex::new(Gate::Open), changed: Condvar::new() })
    }

    pub(super) fn pass(&self) {
        let mut gate = self.gate.lock().unwrap();
        if *gate == Gate::Armed {
            *gate = Gate::Shut;
            self.changed.notify_all();
            drop(self.changed.wait_while(gate, |gate| *gate == Gate::Shut).unwrap());
        }
    }

    pub(super) fn set(&self, to: Gate) {
        *self.gate.lock().unwrap() = to;
        self.changed.notify_all();
    }

    /// Waits until a call is blocked at the armed gate.
    pub(super) fn wait_until_shut(&self) {
        let gate = self.gate.lock().unwrap();
        let waiting = self.changed.wait_timeout_while(gate, TIMEOUT, |gate| *gate != Gate::Shut);
        assert!(!waiting.unwrap().1.timed_out(), "the media is idle");
    }

    /// Returns the levels of the pool while `change` waits for the media, and the result of the
    /// change.
    fn info_during<T: Send>(
        &self,
        pool: &OtherPool,
        change: impl FnOnce() -> T + Send,
    ) -> (PoolInfo, T) {
        self.set(Gate::Armed);
        thread::scope(|scope| {
            let change = scope.spawn(change);
            self.wait_until_shut();
            let (answer, answered) = mpsc::channel();
            scope.spawn(move || answer.send(pool.info()).unwrap());
            let info = answered.recv_timeout(TIMEOUT);
            // Opens the gate in any case, so that a failing test can end.
            self.set(Gate::Open);
            let outcome = change.join().unwrap();
            (info.expect("info() waits for the media"), outcome)
        })
    }
}

/// Returns the sizes of memory, volumes, free space and waiting chunks, in MiB.
pub(super) fn state_bytes(info: &PoolInfo) -> [u64; 4] {
    assert_states_add_up(info);
    [info.memory_bytes, info.volume_bytes, info.free_bytes, info.scrubbing_bytes]
        .map(|bytes| bytes / MIB)
}

#[test]
fn bytes_by_state_are_readable_while_a_change_waits_for_the_media() {
    let slow = Barrier::new();
    let media = Hooked::new(40 * MIB, {
        let slow = Arc::clone(&slow);
        move || {
            slow.pass();
            Ok(())
        }
    });
    let pool = open(media);
    assert_eq!(state_bytes(&pool.info()), [0, 0, 36, 0]);

    let (during, memory) = slow.info_during(&pool, || pool.alloc_memory(6 * MIB).unwrap());
    assert_eq!(state_bytes(&during), [0, 0, 36, 0]);
    assert_eq!(state_bytes(&pool.info()), [6, 0, 30, 0]);

    let size = VolumeSize::Bytes(4 * MIB);
    let make = || pool.create_volume("a", size, VolumeFormat::Raw).unwrap();
    let (during, _) = slow.info_during(&pool, make);
    assert_eq!(state_bytes(&during), [6, 0, 30, 0]);
    assert_eq!(state_bytes(&pool.info()), [6, 4, 26, 0]);

    pool.free_memory(&memory).unwrap();
    assert_eq!(state_bytes(&pool.info()), [0, 4, 26, 6]);
    let (during, _) = slow.info_during(&pool, || pool.scrub_all().unwrap());
    assert_eq!(state_bytes(&during), [0, 4, 26, 6]);
    assert_eq!(state_bytes(&pool.info()), [0, 4, 32, 0]);

    let (during, _) = slow.info_during(&pool, || pool.delete_volume("a").unwrap());
    assert_eq!(state_bytes(&during), [0, 4, 32, 0]);
    assert_eq!(state_bytes(&pool.info()), [0, 0, 32, 4]);
}
