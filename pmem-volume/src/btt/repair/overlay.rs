//! View of a space that includes planned stores.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Fix;
use crate::media::{Durability, Media, MediaError};

/// Unit of stores in a repair, which stores only whole words.
const UNIT_BYTES: u64 = 8;

/// Space whose reads include planned stores. The underlying space does not change.
pub(super) struct Overlay<'a, S> {
    space: &'a S,
    stored: BTreeMap<u64, [u8; UNIT_BYTES as usize]>,
}

impl<'a, S: Media> Overlay<'a, S> {
    pub(super) fn new(space: &'a S) -> Self {
        Self { space, stored: BTreeMap::new() }
    }

    /// Applies all phases of a repair to the overlay.
    pub(super) fn apply(&mut self, fix: &Fix) {
        for (at, bytes) in fix.phases.iter().flatten() {
            let (units, rest) = bytes.as_chunks();
            assert!(at.is_multiple_of(UNIT_BYTES) && rest.is_empty());
            self.stored.extend((*at..).step_by(UNIT_BYTES as usize).zip(units.iter().copied()));
        }
    }
}

impl<S: Media> Media for Overlay<'_, S> {
    fn len_bytes(&self) -> u64 {
        self.space.len_bytes()
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        let units = self.stored.range(range.start.saturating_sub(UNIT_BYTES - 1)..range.end);
        let planned = units.map(|(at, _)| range.start.max(*at)..range.end.min(at + UNIT_BYTES));
        let found = planned.into_iter().next();
        let data = self.space.next_data(range)?;
        Ok(found.into_iter().chain(data).min_by_key(|part| part.start))
    }

    fn durability(&self) -> Durability {
        self.space.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        let end = offset_bytes + into.len() as u64;
        if let Err(error) = self.space.read(offset_bytes, into) {
            // A range that is unreadable in the underlying space can be read if planned stores
            // cover all of it.
            let units = self.stored.range(offset_bytes..end).count() as u64;
            if !offset_bytes.is_multiple_of(UNIT_BYTES) || units * UNIT_BYTES < end - offset_bytes {
                return Err(error);
            }
        }
        for (at, unit) in self.stored.range(offset_bytes.saturating_sub(UNIT_BYTES - 1)..end) {
            for (byte_at, byte) in (*at..).zip(unit) {
                if (offset_bytes..end).contains(&byte_at) {
                    into[(byte_at - offset_bytes) as usize] = *byte;
                }
            }
        }
        Ok(())
    }
}
