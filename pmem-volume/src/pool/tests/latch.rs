//! Media that fails: the first failure makes the pool read-only, and the next open finds it in order.

use std::sync::atomic::{AtomicU32, Ordering};

use super::hooked::{Hooked, open};
use super::*;
use crate::media::MediaError;

/// Media on which a persist or erase fails, with nothing of it done, after `left` of them have succeeded.
fn failing(left: Arc<AtomicU32>) -> Hooked {
    Hooked::new(40 * MIB, move || {
        let counted = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        counted.map(|_| ()).map_err(|_| MediaError::Io {
            operation: "persist",
            offset_bytes: 0,
            length_bytes: 8,
            source: std::io::Error::from_raw_os_error(libc::EIO),
        })
    })
}

/// Lends, takes back, makes, flushes and deletes, up to the first error.
fn work(pool: &Arc<Pool>) -> Result<(), PoolError> {
    let memory = pool.alloc_memory(6 * MIB)?;
    pool.create_volume("a", VolumeSize::Bytes(4 * MIB), VolumeFormat::Raw)?;
    pool.create_volume("b", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt)?;
    pool.free_memory(&memory)?;
    let volume = pool.open_volume("b")?;
    let flushed = volume.flush_guest_stores(0..18 * MIB);
    if flushed.is_err() {
        assert!(
            matches!(volume.flush_guest_stores(0..8), Err(PoolError::Latched { .. })),
            "a failed flush stays failed"
        );
    }
    flushed?;
    drop(volume);
    pool.delete_volume("a")?;
    pool.scrub_all()
}

#[test]
fn the_first_failure_makes_the_pool_read_only_until_it_is_opened_again() {
    let mut failures = 0;
    loop {
        let left = Arc::new(AtomicU32::new(u32::MAX));
        let media = failing(Arc::clone(&left));
        let pool = open(media.clone());
        left.store(failures, Ordering::SeqCst);
        let Err(error) = work(&pool) else { break };
        assert!(matches!(error, PoolError::Media(MediaError::Io { .. })), "{error}");
        left.store(u32::MAX, Ordering::SeqCst);

        assert!(!pool.is_writable());
        assert!(pool.info().latched.is_some_and(|cause| cause.contains("persist")));
        assert!(matches!(pool.alloc_memory(2 * MIB), Err(PoolError::Latched { .. })));
        assert!(matches!(
            pool.create_volume("c", VolumeSize::Remaining, VolumeFormat::Raw),
            Err(PoolError::Latched { .. })
        ));
        assert!(matches!(pool.delete_volume("a"), Err(PoolError::Latched { .. })));
        assert_states_add_up(&pool.info());
        drop(pool);

        let pool = open(media);
        assert!(pool.is_writable());
        assert_states_add_up(&pool.info());
        assert_eq!(pool.info().memory_bytes, 0);
        assert_eq!(pool.check().unwrap().pool, []);
        failures += 1;
    }
    assert!(failures >= 12, "only {failures} calls could fail");
}
