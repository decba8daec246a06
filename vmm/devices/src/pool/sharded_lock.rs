//! Reader-writer lock for a value that all queues of a disk read, and that hardly ever changes.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::RwLock;

/// Number of shards. A volume's disk has at most as many queues, each with a thread.
const SHARDS: usize = 16;

/// Lock in cache lines of its own.
#[repr(align(128))]
struct Shard<T>(RwLock<Option<Arc<T>>>);

/// A reader locks the shard of its thread, and a writer locks all shards, so that readers on
/// different threads do not write the same cache line.
pub(super) struct ShardedLock<T> {
    shards: [Shard<T>; SHARDS],
    is_change_wanted: AtomicBool,
}

/// Number of the shard of this thread.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SHARD: Cell<usize> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed)));
    SHARD.get() % SHARDS
}

impl<T> ShardedLock<T> {
    pub(super) fn new(value: T) -> Self {
        let value = Arc::new(value);
        Self {
            shards: std::array::from_fn(|_| Shard(RwLock::new(Some(Arc::clone(&value))))),
            is_change_wanted: AtomicBool::new(false),
        }
    }

    /// Reads the value. `read` must not lock it again.
    #[inline]
    pub(super) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        let shard = self.shards[shard()].0.read();
        read(shard.as_ref().expect("only a writer takes the value"))
    }

    /// Returns true while a change waits for readers, which should then end.
    pub(super) fn is_change_wanted(&self) -> bool {
        self.is_change_wanted.load(Ordering::Relaxed)
    }

    /// Changes the value after all readers have ended. New readers wait.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        self.is_change_wanted.store(true, Ordering::Relaxed);
        let mut shards = self.shards.each_ref().map(|shard| shard.0.write());
        self.is_change_wanted.store(false, Ordering::Relaxed);
        let [mut value, ..] = shards.each_mut().map(|shard| shard.take());
        let value = value.as_mut().expect("only a writer takes the value");
        let result = change(Arc::get_mut(value).expect("all shards are empty"));
        shards.iter_mut().for_each(|shard| **shard = Some(Arc::clone(value)));
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_excludes_readers_of_all_threads() {
        let lock = ShardedLock::new([0u64; 2]);
        let (has_ended, read) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !has_ended.load(Ordering::Relaxed) {
                        lock.read(|[first, second]| assert_eq!(first, second));
                        read.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            while read.load(Ordering::Relaxed) < 100 {
                std::thread::yield_now();
            }
            for _ in 0..1000 {
                lock.change(|[first, second]| {
                    *first += 1;
                    std::thread::yield_now();
                    *second += 1;
                });
            }
            has_ended.store(true, Ordering::Relaxed);
        });
        assert_eq!(lock.read(|value| *value), [1000; 2]);
    }
}
