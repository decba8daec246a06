//! Pool on media with a hook that is called before each persist and erase, and before the persist
//! of each range begins.

use std::ops::Range;

use uuid::Uuid;

use super::*;
use crate::media::simulator::{CrashPoint, Simulator};
use crate::media::{MediaError, Pending};

type Hook = dyn Fn() -> Result<(), MediaError> + Send + Sync;

/// Simulated media with a hook. Clones share the same media.
#[derive(Clone)]
pub(super) struct Hooked {
    media: Simulator,
    before: Arc<Hook>,
    stored: Arc<Mutex<Vec<u64>>>,
    /// Range whose reads fail.
    bad: Arc<Mutex<Option<Range<u64>>>>,
}

impl Hooked {
    pub(super) fn new(
        len_bytes: u64,
        before: impl Fn() -> Result<(), MediaError> + Send + Sync + 'static,
    ) -> Self {
        let media = Simulator::new(len_bytes);
        Self { media, before: Arc::new(before), stored: Arc::default(), bad: Arc::default() }
    }

    /// Returns the offsets of words that were stored since the last call.
    pub(super) fn take_stored(&self) -> Vec<u64> {
        std::mem::take(&mut *self.stored.lock().unwrap())
    }

    /// Sets the unreadable range.
    pub(super) fn set_bad(&self, bad: Option<Range<u64>>) {
        *self.bad.lock().unwrap() = bad;
    }

    /// Returns the offsets of words with this value.
    pub(super) fn find_words(&self, value: u64) -> Vec<u64> {
        let (words, _) = self.media.content();
        words.into_iter().filter(|(_, word)| *word == value).map(|(at, _)| at).collect()
    }

    fn check_access(&self, at: u64, length: u64) -> Result<(), MediaError> {
        match self
            .bad
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|bad| at < bad.end && bad.start < at + length)
        {
            true => Err(MediaError::Io {
                operation: "read",
                offset_bytes: at,
                length_bytes: length,
                source: std::io::Error::from_raw_os_error(libc::EIO),
            }),
            false => Ok(()),
        }
    }

    /// Returns the crash point of a power failure at this moment.
    pub(super) fn crash_point(&self) -> CrashPoint {
        self.media.record();
        self.media.take_points().pop().expect("one for now")
    }
}

impl Media for Hooked {
    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }
    fn durability(&self) -> Durability {
        Durability::PageCache
    }
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.check_access(offset_bytes, into.len() as u64)?;
        self.media.read(offset_bytes, into)
    }
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        self.media.next_data(range)
    }
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.check_access(offset_bytes, 8)?;
        self.media.load_word(offset_bytes)
    }
    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.store(offset_bytes, bytes)
    }
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.stored.lock().unwrap().push(offset_bytes);
        self.media.store_word(offset_bytes, word)
    }
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        (self.before)()?;
        pending.add(range);
        Ok(())
    }
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        (self.before)()?;
        self.media.persist(ranges)
    }
    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        (self.before)()?;
        self.media.erase(ranges)
    }
}

/// Opens the pool on `media`, and creates the pool if it does not exist.
pub(super) fn open(media: Hooked) -> Arc<OtherPool> {
    let mut superblock = create::plan(media.len_bytes(), 0, Uuid::from_u128(1), 1).unwrap();
    superblock.volume_slots = 4;
    if media.load_word(0).unwrap() == 0 {
        create::write_empty_pool(&media, &superblock).unwrap();
    }
    let media: Box<dyn Media> = Box::new(media);
    Pool::from_media("hooked".into(), OpenMode::ReadWrite, media, superblock, vec![]).unwrap()
}
