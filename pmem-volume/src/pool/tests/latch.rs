//! Media that fails: the first failure makes the pool read-only, and the next open finds it in order.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use uuid::Uuid;

use super::*;
use crate::media::MediaError;
use crate::media::simulator::Simulator;

/// Media on which the n-th persist or erase from now fails, with nothing of it done.
#[derive(Clone)]
struct Failing {
    media: Simulator,
    /// Calls that still succeed.
    left: Arc<AtomicU32>,
}

impl Failing {
    fn count_down(&self) -> Result<(), MediaError> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        left.map(|_| ()).map_err(|_| MediaError::Io {
            operation: "persist",
            offset_bytes: 0,
            length_bytes: 8,
            source: std::io::Error::from_raw_os_error(libc::EIO),
        })
    }
}

impl Media for Failing {
    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }
    fn durability(&self) -> Durability {
        Durability::PageCache
    }
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.media.read(offset_bytes, into)
    }
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.media.load_word(offset_bytes)
    }
    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.store(offset_bytes, bytes)
    }
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.media.store_word(offset_bytes, word)
    }
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.count_down()?;
        self.media.persist(ranges)
    }
    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.count_down()?;
        self.media.erase(ranges)
    }
}

fn open(media: Failing) -> Arc<Pool> {
    let mut superblock = create::plan(media.len_bytes(), 0, Uuid::from_u128(1), 1).unwrap();
    superblock.volume_slots = 4;
    if media.load_word(0).unwrap() == 0 {
        create::write_empty_pool(&media, &superblock).unwrap();
    }
    Pool::from_media(
        "failing".into(),
        OpenMode::ReadWrite,
        Backing::Other(Box::new(media)),
        superblock,
        vec![],
    )
    .unwrap()
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
    pool.delete_volume("a")
}

#[test]
fn the_first_failure_makes_the_pool_read_only_until_it_is_opened_again() {
    let mut failures = 0;
    loop {
        let media = Failing { media: Simulator::new(40 * MIB), left: Arc::new(AtomicU32::new(u32::MAX)) };
        let pool = open(media.clone());
        media.left.store(failures, Ordering::SeqCst);
        let Err(error) = work(&pool) else { break };
        assert!(matches!(error, PoolError::Media(MediaError::Io { .. })), "{error}");
        media.left.store(u32::MAX, Ordering::SeqCst);

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
