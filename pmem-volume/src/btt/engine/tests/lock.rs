//! Tests of the lock with real threads.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::super::lock::Lock;

#[test]
fn concurrent_increments_are_not_lost() {
    let lock = Lock::new(0u64);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20_000).for_each(|_| *lock.lock() += 1));
        }
    });
    assert_eq!(*lock.lock(), 160_000);
}

#[test]
fn sleeping_threads_get_the_released_lock() {
    let lock = Lock::new(0u64);
    let held = lock.lock();
    assert!(lock.try_lock().is_none());
    let (got, is_got) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..2 {
            let (lock, got) = (&lock, got.clone());
            scope.spawn(move || {
                *lock.lock() += 1;
                got.send(()).unwrap();
            });
        }
        // One of the threads sleeps, or is about to.
        while !lock.is_contended() {
            thread::yield_now();
        }
        assert!(is_got.try_recv().is_err(), "the lock is still held");
        drop(held);
        (0..2).for_each(|_| is_got.recv().unwrap());
    });
    assert_eq!(*lock.lock(), 2);
    assert!(lock.try_lock().is_some());
}

#[test]
fn sleeping_thread_is_woken_without_a_timeout() {
    // The maximum sleep exceeds the time limit of the test.
    let lock = Lock::new(0u64).with_max_sleep(Duration::from_secs(3600));
    let held = lock.lock();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| *lock.lock() += 1);
        while !lock.is_contended() {
            thread::yield_now();
        }
        drop(held);
        waiter.join().unwrap();
    });
    assert_eq!(*lock.lock(), 1);
}
