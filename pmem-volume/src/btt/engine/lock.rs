//! Lock that is released by a plain store.
//!
//! A write ends with stores that take time to leave the CPU. A mutex is released by a locked
//! instruction, which detects waiting threads but blocks until all earlier stores have left the
//! CPU. After a plain store, the next write can begin immediately, and can read the map in the
//! meantime.
//!
//! A waiting thread marks the lock and sleeps. The holder may read the mark just before it is set,
//! and so miss it. Therefore, a waiting thread sleeps for at most [`MAX_SLEEP`] before it checks
//! again. Contention is rare, because threads use different lanes, and the map has a thousand line
//! locks.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::cpu::{self, AtomicU32, Ordering, UnsafeCell};

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
/// The lock is held, and a thread may be sleeping until it is released.
const CONTENDED: u32 = 2;

/// Maximum sleep of a thread whose mark was missed.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(1);

/// Value that only one thread at a time can access.
pub(super) struct Lock<T> {
    state: AtomicU32,
    max_sleep: Duration,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only through a guard, and only one guard exists at a time. If
// threads share the guard, the bounds of the guard determine if they may share the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Guard that acts like an exclusive reference to the value, and releases the lock when it is
/// dropped.
#[must_use]
pub(super) struct LockGuard<'a, T>(&'a Lock<T>, PhantomData<&'a mut T>);

impl<T> Lock<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            state: AtomicU32::new(UNLOCKED),
            max_sleep: MAX_SLEEP,
            value: UnsafeCell::new(value),
        }
    }

    /// Changes the maximum sleep, for tests of the wake-up.
    #[cfg(test)]
    pub(super) fn with_max_sleep(self, max_sleep: Duration) -> Self {
        Self { max_sleep, ..self }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        let taken = self.state.compare_exchange(
            UNLOCKED,
            LOCKED,
            cpu::acquire_ordering(Ordering::Acquire),
            Ordering::Relaxed,
        );
        taken.is_ok().then(|| LockGuard(self, PhantomData))
    }

    /// Waits for the lock, and takes it.
    #[inline]
    pub(super) fn lock(&self) -> LockGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Returns true if a thread has marked the lock and waits for it.
    #[cfg(test)]
    pub(super) fn is_contended(&self) -> bool {
        self.state.load(Ordering::Relaxed) == CONTENDED
    }

    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        for _ in 0..cpu::SPINS {
            // The lock is read before the attempt to take it. Otherwise, the holder would have to
            // wait for the cache line to release the lock.
            if self.state.load(Ordering::Relaxed) == UNLOCKED
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
            cpu::spin_loop();
        }
        // The releasing thread wakes all sleeping threads. Therefore, the lock remains marked until
        // a thread takes it without waiting.
        while self.state.swap(CONTENDED, cpu::acquire_ordering(Ordering::Acquire)) != UNLOCKED {
            cpu::sleep_while(&self.state, CONTENDED, self.max_sleep);
        }
        LockGuard(self, PhantomData)
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let is_contended = self.0.state.load(Ordering::Relaxed) == CONTENDED;
        cpu::release(&self.0.state, UNLOCKED, Ordering::Release);
        if is_contended {
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
