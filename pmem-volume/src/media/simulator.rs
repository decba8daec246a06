//! Simulated media that tracks durable data, and generates crash images.
//!
//! Fault model: after a crash, a word contains its last durable value or any value that was stored
//! since. Every combination of values is possible, because words are independent of each other.
//! Real hardware allows fewer images, because stores to the same cache line remain in order. A
//! protocol that passes here is therefore safe on real hardware.
//!
//! A crash point is recorded at the start of every persist and erase. Between two such points,
//! further stores only add to the data that a crash may lose.

mod pages;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use self::pages::Pages;
use super::{Durability, Media, MediaError, assert_inside};

/// Number of random images that are drawn for each one that is returned, because some repeat
/// earlier ones.
const DRAWS: usize = 4;

/// Simulated sparse media. Words that are not stored are zero.
#[derive(Clone)]
pub(crate) struct Simulator {
    /// Shared by clones, so that a pool and its test see the same length.
    len_bytes: Arc<AtomicU64>,
    state: Arc<Mutex<State>>,
}

#[derive(Clone, Default)]
struct State {
    file_bytes: u64,
    durable: Pages,
    /// Values that loads return. Each is the last stored value of its word, durable or not.
    visible: Pages,
    /// Values stored since the word was last durable, oldest first.
    pending: BTreeMap<u64, Vec<u64>>,
    points: Vec<CrashPoint>,
    recording: bool,
    /// Digest of the content of a crash image, until crash points of the image itself are recorded.
    /// Until then, `durable` and `pending` are empty.
    untracked: Option<u128>,
}

/// Digest of an image's content and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Digest {
    file_bytes: u64,
    content: u128,
}

/// State at a possible crash, from which all images are generated that the crash may leave.
#[derive(Clone)]
pub(crate) struct CrashPoint {
    file_bytes: u64,
    durable: Pages,
    pending: Vec<(u64, Vec<u64>)>,
}

/// Small random generator (xorshift64*, Vigna 2016). Its seed is enough to reproduce a failure.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

impl Simulator {
    /// Creates zeroed media.
    pub(crate) fn new(len_bytes: u64) -> Self {
        Self::with_state(State { file_bytes: len_bytes, ..State::default() })
    }

    fn with_state(state: State) -> Self {
        let len_bytes = Arc::new(AtomicU64::new(state.file_bytes));
        Self { len_bytes, state: Arc::new(Mutex::new(state)) }
    }

    /// Returns the length of the file, which may be longer than the media.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.state().file_bytes
    }

    /// Returns media for the first part of the same file.
    pub(crate) fn part(&self, len_bytes: u64) -> Self {
        let len_bytes = Arc::new(AtomicU64::new(len_bytes));
        let media = Self { len_bytes, state: Arc::clone(&self.state) };
        assert!(media.len_bytes() <= media.file_bytes());
        media
    }

    /// Changes the length of this media and its clones to a part of the file.
    pub(crate) fn set_len(&self, len_bytes: u64) {
        assert!(len_bytes <= self.file_bytes());
        self.len_bytes.store(len_bytes, Ordering::Relaxed);
    }

    /// Extends the file, durably, and the media. A crash during the call leaves the old or the new
    /// length.
    pub(crate) fn extend(&self, len_bytes: u64) -> io::Result<()> {
        let mut state = self.state();
        state.take_point();
        state.file_bytes = len_bytes;
        state.take_point();
        drop(state);
        self.set_len(len_bytes);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Starts to record crash points. On an image, it must be called before any store.
    pub(crate) fn record(&self) {
        let mut state = self.state();
        if let Some(digest) = state.untracked.take() {
            assert_eq!(digest, state.visible.digest(), "stores to an image were not tracked");
            state.durable = state.visible.clone();
        }
        state.recording = true;
    }

    /// Returns the digest of the visible content.
    pub(crate) fn digest(&self) -> Digest {
        let state = self.state();
        Digest { file_bytes: state.file_bytes, content: state.visible.digest() }
    }

    /// Ends the recording. Returns all crash points since its start, and one for the current state.
    pub(crate) fn take_points(&self) -> Vec<CrashPoint> {
        let mut state = self.state();
        state.take_point();
        state.recording = false;
        std::mem::take(&mut state.points)
    }

    /// Returns the current values of words in a range that are not durable: the content of a cache
    /// line that is written back now. Later stores are not part of it.
    pub(crate) fn written_back(&self, range: Range<u64>) -> Vec<(u64, u64)> {
        let state = self.state();
        assert!(
            state.untracked.is_none(),
            "durable words of an image are not tracked before its recording"
        );
        let pending = state.pending.range(range.start / 8 * 8..range.end);
        pending.map(|(at, values)| (*at, *values.last().expect("something was stored"))).collect()
    }

    /// Makes words durable that were written back before, like [`Media::persist`].
    pub(crate) fn persist_written_back(&self, words: &[(u64, u64)]) {
        let mut state = self.state();
        state.take_point();
        words.iter().for_each(|(at, word)| state.make_durable_as(*at, *word));
    }

    /// Returns all nonzero words by offset, and the length of the file.
    pub(crate) fn content(&self) -> (Vec<(u64, u64)>, u64) {
        let state = self.state();
        (state.visible.words(0..u64::MAX).collect(), state.file_bytes)
    }

    /// Returns the number of nonzero words in a range.
    pub(crate) fn dirty_words(&self, range: Range<u64>) -> usize {
        self.state().visible.words(range).count()
    }
}

impl State {
    fn store(&mut self, at: u64, word: u64) {
        self.visible.store(at, word);
        if self.untracked.is_none() {
            self.pending.entry(at).or_default().push(word);
        }
    }

    fn take_point(&mut self) {
        if self.recording {
            let pending = self.pending.iter().map(|(at, values)| (*at, values.clone())).collect();
            self.points.push(CrashPoint {
                file_bytes: self.file_bytes,
                durable: self.durable.clone(),
                pending,
            });
        }
    }

    fn make_durable(&mut self, range: Range<u64>) {
        let first = range.start / 8 * 8;
        let covered: Vec<u64> = self.pending.range(first..range.end).map(|(at, _)| *at).collect();
        for at in covered {
            self.pending.remove(&at);
            self.durable.store(at, self.visible.load(at));
        }
    }

    /// Makes the last store of the value `word` at an offset durable. Does nothing if a later value
    /// is already durable.
    fn make_durable_as(&mut self, at: u64, word: u64) {
        let Some(values) = self.pending.get_mut(&at) else { return };
        let Some(position) = values.iter().rposition(|value| *value == word) else { return };
        values.drain(..=position);
        if values.is_empty() {
            self.pending.remove(&at);
        }
        self.durable.store(at, word);
    }
}

impl CrashPoint {
    /// Returns at most `bound` images that a crash may leave. If more are possible, the result
    /// contains the two extremes, the images in which exactly one word is lost or kept, and
    /// distinct random samples.
    pub(crate) fn images(&self, bound: usize, random: &mut Random) -> Vec<Simulator> {
        let choices: Vec<usize> = self.pending.iter().map(|(_, values)| values.len() + 1).collect();
        let total = choices
            .iter()
            .try_fold(1usize, |product, n| product.checked_mul(*n))
            .unwrap_or(usize::MAX);
        if total <= bound {
            return (0..total).map(|number| self.image(&digits(number, &choices))).collect();
        }
        let none = vec![0; choices.len()];
        let all: Vec<usize> = choices.iter().map(|n| n - 1).collect();
        let mut picks = vec![none.clone(), all.clone()];
        let mut picked: HashSet<Vec<usize>> = picks.iter().cloned().collect();
        for _ in 0..DRAWS * bound {
            if picks.len() >= bound {
                break;
            }
            let one = random.below(choices.len() as u64) as usize;
            let mut pick = match random.below(4) {
                0 => none.clone(),
                1 => all.clone(),
                _ => choices.iter().map(|n| random.below(*n as u64) as usize).collect(),
            };
            pick[one] = random.below(choices[one] as u64) as usize;
            if picked.insert(pick.clone()) {
                picks.push(pick);
            }
        }
        picks.iter().map(|pick| self.image(pick)).collect()
    }

    /// Returns the state after a kill of the process without a power failure. All stores are
    /// visible, but unpersisted ones are not durable yet.
    pub(crate) fn killed(&self) -> Simulator {
        let mut visible = self.durable.clone();
        for (at, values) in &self.pending {
            visible.store(*at, *values.last().expect("something was stored"));
        }
        let pending = self.pending.iter().cloned().collect();
        let durable = self.durable.clone();
        let state =
            State { file_bytes: self.file_bytes, durable, visible, pending, ..State::default() };
        Simulator::with_state(state)
    }

    /// Returns the image in which word i has its value number `pick[i]`. 0 is the durable value,
    /// and n is the value of the n-th store.
    fn image(&self, pick: &[usize]) -> Simulator {
        let mut visible = self.durable.clone();
        for ((at, values), pick) in self.pending.iter().zip(pick) {
            if let Some(stored) = pick.checked_sub(1) {
                visible.store(*at, values[stored]);
            }
        }
        let untracked = Some(visible.digest());
        let state = State { file_bytes: self.file_bytes, visible, untracked, ..State::default() };
        Simulator::with_state(state)
    }
}

/// Returns the digits of a number in a mixed-radix system with the bases `choices`.
fn digits(mut number: usize, choices: &[usize]) -> Vec<usize> {
    choices
        .iter()
        .map(|base| {
            let digit = number % base;
            number /= base;
            digit
        })
        .collect()
}

impl Media for Simulator {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn durability(&self) -> Durability {
        Durability::DaxSync
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, into.len() as u64, self.len_bytes());
        self.state().visible.read(offset_bytes, into);
        Ok(())
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        assert_inside(range.start, range.end - range.start, self.len_bytes());
        let first = self.state().visible.words(range).next();
        Ok(first.map(|(at, _)| at..at + 8))
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        assert!(offset_bytes.is_multiple_of(8));
        assert_inside(offset_bytes, 8, self.len_bytes());
        Ok(self.state().visible.load(offset_bytes))
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, bytes.len() as u64, self.len_bytes());
        assert!(
            offset_bytes.is_multiple_of(8) && bytes.len().is_multiple_of(8),
            "the pool stores whole words"
        );
        let mut state = self.state();
        for (at, word) in (offset_bytes..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            let word = u64::from_le_bytes(*word);
            // A store of the same value has no effect that a crash could reveal.
            if state.visible.load(at) != word {
                state.store(at, word);
            }
        }
        Ok(())
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.store(offset_bytes, &word.to_le_bytes())
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let mut state = self.state();
        state.take_point();
        ranges.iter().for_each(|range| state.make_durable(range.clone()));
        Ok(())
    }

    fn truncate_tail(&self) -> Result<(), MediaError> {
        let mut state = self.state();
        state.take_point();
        state.file_bytes = self.len_bytes();
        state.durable.truncate(self.len_bytes());
        state.visible.truncate(self.len_bytes());
        state.pending.split_off(&self.len_bytes());
        state.take_point();
        Ok(())
    }

    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let mut state = self.state();
        for range in ranges {
            // Until the zeros are durable, a crash may restore the old value of a word.
            let dirty: Vec<u64> = state.visible.words(range.clone()).map(|(at, _)| at).collect();
            dirty.into_iter().for_each(|at| state.store(at, 0));
        }
        // A crash during the erasure may leave any part of it done.
        state.take_point();
        ranges.iter().for_each(|range| state.make_durable(range.clone()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images_after(stores: impl Fn(&Simulator)) -> Vec<(u64, u64)> {
        let media = Simulator::new(64);
        media.record();
        stores(&media);
        let point = media.take_points().pop().unwrap();
        let load = |image: &Simulator| (image.load_word(0).unwrap(), image.load_word(8).unwrap());
        let mut images: Vec<_> = point.images(100, &mut Random::new(1)).iter().map(load).collect();
        images.sort_unstable();
        images
    }

    #[test]
    fn unpersisted_words_are_lost_or_kept_in_every_combination() {
        let both = |media: &Simulator| {
            media.store_word(0, 1).unwrap();
            media.store_word(8, 2).unwrap();
        };
        assert_eq!(images_after(both), [(0, 0), (0, 2), (1, 0), (1, 2)]);
        let persisted = |media: &Simulator| {
            both(media);
            media.persist_range(0..8).unwrap();
        };
        assert_eq!(images_after(persisted), [(1, 0), (1, 2)]);
        let twice = |media: &Simulator| {
            media.store_word(0, 1).unwrap();
            media.store_word(0, 3).unwrap();
        };
        assert_eq!(images_after(twice), [(0, 0), (1, 0), (3, 0)]);
        let begun_between = |media: &Simulator| {
            media.store_word(0, 1).unwrap();
            let begun = media.written_back(0..16);
            media.store_word(0, 3).unwrap();
            media.store_word(8, 2).unwrap();
            media.persist_written_back(&begun);
        };
        assert_eq!(images_after(begun_between), [(1, 0), (1, 2), (3, 0), (3, 2)]);
    }

    #[test]
    #[should_panic(expected = "were not tracked")]
    fn recording_an_image_after_a_store_panics() {
        let media = Simulator::new(64);
        media.record();
        let image = media.take_points()[0].images(1, &mut Random::new(1)).pop().unwrap();
        image.store_word(0, 1).unwrap();
        image.record();
    }

    #[test]
    fn images_beyond_the_bound_are_sampled_with_both_extremes() {
        let media = Simulator::new(1024);
        media.record();
        (0..100).for_each(|word| media.store_word(word * 8, 1).unwrap());
        let images = media.take_points()[0].images(20, &mut Random::new(5));
        let stored_counts: Vec<_> = images.iter().map(|image| image.dirty_words(0..1024)).collect();
        assert_eq!(stored_counts.len(), 20);
        assert_eq!(stored_counts[..2], [0, 100]);
        let different: HashSet<_> = images.iter().map(Simulator::digest).collect();
        assert_eq!(different.len(), 20);
    }
}
