//! A lock that is given back by a plain store.
//!
//! A write to the media ends in stores that take their time to leave the CPU. Whoever gives a mutex
//! back does so by a locked instruction, to learn whether somebody waits, and a locked instruction
//! lasts until all stores have left. Behind a plain store the next write begins at once, and looks
//! into the map meanwhile.
//!
//! Who waits says so in the lock and sleeps. That may be overlooked, by a thread that looks who
//! waits just before and gives the lock back just after; so nobody sleeps longer than [`SLEEP`]
//! without looking again. Threads rarely meet: they have lanes of their own, and a thousand lines
//! of the map.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::cpu::{self, AtomicU32, Ordering, UnsafeCell};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep until it is not.
const AWAITED: u32 = 2;

/// The longest that somebody sleeps who was overlooked.
const SLEEP: Duration = Duration::from_millis(1);

/// Something that one thread has at a time.
pub(super) struct Lock<T> {
    state: AtomicU32,
    longest_sleep: Duration,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard only, of which there is one at a time. Threads that
// share a guard have the value shared, which the guard's own bounds allow or not.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Gives the lock back when it is dropped. To others it is what an exclusive reference to the value
/// is.
#[must_use]
pub(super) struct LockGuard<'a, T>(&'a Lock<T>, PhantomData<&'a mut T>);

impl<T> Lock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { state: AtomicU32::new(FREE), longest_sleep: SLEEP, value: UnsafeCell::new(value) }
    }

    /// The same for a test of who is woken, and by whom.
    #[cfg(test)]
    pub(super) fn sleeping(self, longest_sleep: Duration) -> Self {
        Self { longest_sleep, ..self }
    }

    /// Takes the lock, if nobody has it.
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

    /// Waits until nobody has the lock, and takes it.
    #[inline]
    pub(super) fn lock(&self) -> LockGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Has somebody said that he waits, since it was taken?
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.state.load(Ordering::Relaxed) == AWAITED
    }

    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        for _ in 0..cpu::SPINS {
            // Looked at first: who has it is not to wait for the line when he gives it back.
            if self.state.load(Ordering::Relaxed) == FREE
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
            cpu::spin_loop();
        }
        // Whoever has it says when it is free, to all who sleep: so it counts as awaited until
        // nobody had to wait for it.
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
        // SAFETY: who has the guard has the value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: who has the guard has the value.
        unsafe { &mut *self.0.value.get() }
    }
}
