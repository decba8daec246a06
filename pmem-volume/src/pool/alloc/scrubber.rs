//! Background thread that erases waiting chunks. The background thread belongs to a long-lived
//! process.

use std::num::NonZeroU64;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::pacer::Pacer;
use crate::media::{Durability, FileMedia, Media};
use crate::pool::{Pool, PoolError, locked};

/// Default limit of erased bytes per second. It is less than half of the write bandwidth of a
/// persistent memory module (about 2 GiB/s), so most of the bandwidth is left for guests. Even so,
/// erasing 100 GiB takes less than 2 minutes.
pub const DEFAULT_SCRUB_BYTES_PER_S: NonZeroU64 = NonZeroU64::new(1 << 30).expect("not zero");

/// Number of bytes per batch. Small batches cause short waits, and spread the rate evenly.
const BATCH_BYTES: u64 = 16 << 20;

/// Number of bytes per batch on a disk. Each batch ends with a disk barrier, for which flushes of
/// guests must wait. At the default limit, there are 16 barriers per second.
const DISK_BATCH_BYTES: u64 = 64 << 20;

/// Erases the waiting chunks of a pool in the background. Dropping it ends the thread after its
/// current batch, and the next user of the pool erases the remaining chunks. If erasing punches
/// holes, the remaining chunks are erased before the drop returns. Punching holes is cheap and
/// returns memory to the host.
pub struct Scrubber<M: Media = FileMedia> {
    pool: Weak<Pool<M>>,
    wake: Arc<ScrubWake>,
    thread: Option<JoinHandle<()>>,
}

impl<M: Media + 'static> Scrubber<M> {
    /// Starts the scrubber of a pool that is open for writing. A pool has at most one.
    /// `bytes_per_s` limits erasures that use bandwidth, and `None` means unlimited. `confine` is
    /// the first call of the scrubber's thread.
    ///
    /// # Panics
    /// Panics if the pool already has a scrubber.
    pub fn start(
        pool: &Arc<Pool<M>>,
        bytes_per_s: Option<NonZeroU64>,
        confine: fn(),
    ) -> Result<Self, PoolError> {
        let wake = Arc::clone(&pool.scrub_wake);
        let had_scrubber =
            wake.change(|signals| std::mem::replace(&mut signals.has_scrubber, true));
        assert!(!had_scrubber, "a pool has one scrubber");
        // Chunks may have been waiting since the pool was opened.
        wake.change(|signals| {
            *signals = Signals { has_scrubber: true, has_work: true, ended: false, bytes_per_s };
        });
        // Earlier erasures are not subject to the limit.
        pool.take_on_demand_bytes();
        let (weak, thread_wake) = (Arc::downgrade(pool), Arc::clone(&wake));
        let started =
            std::thread::Builder::new().name("pool-scrubber".to_owned()).spawn(move || {
                confine();
                Worker { pool: weak, wake: thread_wake, epoch: Instant::now() }.run();
            });
        // If the thread could not be started, dropping this value allows another scrubber.
        let mut scrubber = Self { pool: Arc::downgrade(pool), wake, thread: None };
        scrubber.thread = Some(started.map_err(PoolError::Scrubber)?);
        Ok(scrubber)
    }

    /// Changes the limit, starting with the next batch.
    pub fn set_bytes_per_s(&self, bytes_per_s: Option<NonZeroU64>) {
        self.wake.change(|signals| signals.bytes_per_s = bytes_per_s);
    }
}

impl<M: Media> Drop for Scrubber<M> {
    fn drop(&mut self) {
        self.wake.change(|signals| signals.ended = true);
        let joined = self.thread.take().map(JoinHandle::join);
        if let Some(Err(panic)) = joined
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
        if let Some(pool) = self.pool.upgrade()
            && !pool.scrubbing_costs_bandwidth()
        {
            // A failure latches the pool, so the pool reports the error.
            let _ = pool.scrub_all();
        }
        self.wake.change(|signals| signals.has_scrubber = false);
    }
}

/// Signals between a pool and its scrubber. They are not part of the pool, because the waiting
/// thread would then keep the pool open.
#[derive(Debug, Default)]
pub(in crate::pool) struct ScrubWake {
    signals: Mutex<Signals>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Signals {
    has_scrubber: bool,
    /// True if chunks were queued since the thread last checked.
    has_work: bool,
    /// True if the thread must end.
    ended: bool,
    bytes_per_s: Option<NonZeroU64>,
}

impl ScrubWake {
    /// Signals that chunks are queued. Only the first signal makes a system call, because the
    /// thread checks the flag before it waits.
    pub(in crate::pool) fn notify_queued(&self) {
        let was_signaled = std::mem::replace(&mut locked(&self.signals).has_work, true);
        if !was_signaled {
            self.changed.notify_all();
        }
    }

    /// Signals that the pool is gone.
    pub(in crate::pool) fn end(&self) {
        self.change(|signals| signals.ended = true);
    }

    fn change<T>(&self, change: impl FnOnce(&mut Signals) -> T) -> T {
        let result = change(&mut locked(&self.signals));
        self.changed.notify_all();
        result
    }

    /// Waits until chunks are queued. Returns `None` if the thread must end.
    fn wait_for_work(&self) -> Option<Signals> {
        let signals = locked(&self.signals);
        let idle = |signals: &mut Signals| !signals.has_work && !signals.ended;
        let mut signals =
            self.changed.wait_while(signals, idle).expect("no code panics while holding the lock");
        signals.has_work = false;
        (!signals.ended).then_some(*signals)
    }

    /// Waits for `pause`, or until the limit changes. Returns `None` if the thread must end.
    fn pause(&self, pause: Duration, bytes_per_s: Option<NonZeroU64>) -> Option<Signals> {
        let signals = locked(&self.signals);
        let idle = |signals: &mut Signals| !signals.ended && signals.bytes_per_s == bytes_per_s;
        let waited = self.changed.wait_timeout_while(signals, pause, idle);
        let (signals, _) = waited.expect("no code panics while holding the lock");
        (!signals.ended).then_some(*signals)
    }
}

fn batch_bytes(durability: Durability) -> u64 {
    match durability {
        Durability::PageCache => DISK_BATCH_BYTES,
        Durability::DaxSync | Durability::Volatile => BATCH_BYTES,
    }
}

struct Worker<M: Media> {
    pool: Weak<Pool<M>>,
    wake: Arc<ScrubWake>,
    epoch: Instant,
}

impl<M: Media> Worker<M> {
    fn run(self) {
        let mut pacer = Pacer::new(None);
        while let Some(mut signals) = self.wake.wait_for_work() {
            loop {
                let Some(pool) = self.pool.upgrade() else { return };
                let wait = next_wait(&pool, &mut pacer, signals.bytes_per_s, self.epoch.elapsed());
                drop(pool);
                match self.wake.pause(wait, signals.bytes_per_s) {
                    Some(now) => signals = now,
                    None => return,
                }
                if wait > Duration::ZERO {
                    // Other threads may have erased the chunks in the meantime.
                    continue;
                }
                let Some(pool) = self.pool.upgrade() else { return };
                let began = self.epoch.elapsed();
                match pool.scrub_some(pacer.batch_bytes(batch_bytes(pool.durability()))) {
                    Ok(0) => break,
                    Ok(bytes) => pacer.spend(bytes, began),
                    // The pool is now read-only and reports the reason. The next user of the pool
                    // erases the remaining chunks.
                    Err(_) => return,
                }
            }
        }
    }
}

/// Returns the time until the next batch may begin. Erasures on demand never wait, but are subject
/// to the limit. Therefore, the background thread waits longer after them.
pub(in crate::pool) fn next_wait(
    pool: &Pool<impl Media>,
    pacer: &mut Pacer,
    bytes_per_s: Option<NonZeroU64>,
    now: Duration,
) -> Duration {
    pacer.set(bytes_per_s.filter(|_| pool.scrubbing_costs_bandwidth()));
    pacer.owe(pool.take_on_demand_bytes(), now);
    pacer.wait(now)
}

#[cfg(test)]
mod tests {
    use super::super::pacer::Pacer;
    use super::*;

    #[test]
    fn disk_gets_at_most_sixteen_barriers_per_second() {
        let default = DEFAULT_SCRUB_BYTES_PER_S;
        for rate in [1 << 20, 64 << 20, default.get()] {
            let pacer = Pacer::new(NonZeroU64::new(rate));
            assert!(rate / pacer.batch_bytes(batch_bytes(Durability::PageCache)) <= 16, "{rate}");
        }
        // Other media need no barrier, so smaller batches are used.
        let pacer = Pacer::new(Some(default));
        assert_eq!(pacer.batch_bytes(batch_bytes(Durability::DaxSync)), BATCH_BYTES);
    }
}
