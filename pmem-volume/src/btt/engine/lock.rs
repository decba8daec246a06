//! Lock that is released by a plain store.
//!
//! A write ends in stores that take time to leave the CPU. A mutex is released by a locked
//! instruction, which detects waiting threads, and which lasts until all earlier stores have left.
//! After a plain store, the next write begins at once and reads the map meanwhile.
//!
//! A waiting thread marks the lock and sleeps. The mark may be missed, if the holder reads it just
//! before and releases the lock just after. A waiting thread therefore sleeps at most for [`SLEEP`]
//! before it checks again. Threads rarely meet, because they have different lanes and the map has a
//! thousand line locks.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::cpu::{self, AtomicU32, Ordering, UnsafeCell};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and a thread may be sleeping until it is released.
const AWAITED: u32 = 2;

/// Longest sleep of a thread whose mark was missed.
const SLEEP: Duration = Duration::from_millis(1);

/// Value that one thread holds at a time.
pub(super) struct Lock<T> {
    state: AtomicU32,
    longest_sleep: Duration,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only through a guard, of which there is one at a time. If threads
// share a guard, its own bounds decide if they may share the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Releases the lock when dropped. It is like an exclusive reference to the value.
#[must_use]
pub(super) struct LockGuard<'a, T>(&'a Lock<T>, PhantomData<&'a mut T>);

impl<T> Lock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { state: AtomicU32::new(FREE), longest_sleep: SLEEP, value: UnsafeCell::new(value) }
    }

    /// Changes the longest sleep, for tests of waking.
    #[cfg(test)]
    pub(super) fn sleeping(self, longest_sleep: Duration) -> Self {
        Self { longest_sleep, ..self }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        let taken = self.state.compare_exchange(
            FREE,
            HELD,
            cpu::taking(Ordering::Acquire),
            Ordering::Relaxed,
        );
        taken.is_ok().then(|| LockGuard(self, PhantomData))
    }

    /// Waits for the lock and takes it.
    #[inline]
    pub(super) fn lock(&self) -> LockGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Returns true if a thread has marked the lock as awaited.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.state.load(Ordering::Relaxed) == AWAITED
    }

    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        for _ in 0..cpu::SPINS {
            // Read before the attempt, so that the holder need not wait for the cache line when it
            // releases the lock.
            if self.state.load(Ordering::Relaxed) == FREE
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
            cpu::spin_loop();
        }
        // The releasing thread wakes all sleeping threads. The lock therefore counts as awaited
        // until it is taken without waiting.
        while self.state.swap(AWAITED, cpu::taking(Ordering::Acquire)) != FREE {
            cpu::sleep_while(&self.state, AWAITED, self.longest_sleep);
        }
        LockGuard(self, PhantomData)
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let is_awaited = self.0.state.load(Ordering::Relaxed) == AWAITED;
        cpu::give_back(&self.0.state, FREE, Ordering::Release);
        if is_awaited {
            cpu::wake_all(&self.0.state);
        }
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard has exclusive access to the value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard has exclusive access to the value.
        unsafe { &mut *self.0.value.get() }
    }
}
