//! Frames on their way, each with its header, in one buffer that is made once.

use super::header::HEADER_LEN;

/// The longest frame: what TCP and UDP in one piece come to (virtio 1.3, 5.1.6.3.1), and the tag of
/// a VLAN.
pub const FRAME_LEN_MAX: usize = 65_550 + 4;
/// The shortest: its two addresses and its type.
pub const FRAME_LEN_MIN: usize = 14;
pub const PACKET_LEN_MAX: usize = HEADER_LEN + FRAME_LEN_MAX;
/// Frames at a time, and bytes: beyond that others have their turn.
pub const FRAMES_MAX: usize = 64;
const BYTES: usize = 4 * PACKET_LEN_MAX;

/// A queue of frames.
pub struct Frames {
    bytes: Box<[u8]>,
    /// Where each ends. The first begins at 0, the others where the one before ends.
    ends: Vec<usize>,
    /// Those that have left.
    left: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self { bytes: vec![0; BYTES].into(), ends: Vec::with_capacity(FRAMES_MAX), left: 0 }
    }
}

impl Frames {
    /// Room for the longest, if there is some.
    pub fn room(&mut self) -> Option<&mut [u8; PACKET_LEN_MAX]> {
        let start = self.end();
        if self.ends.len() == FRAMES_MAX {
            return None;
        }
        let room = self.bytes.get_mut(start..start + PACKET_LEN_MAX)?;
        Some(room.try_into().expect("a slice of that length"))
    }

    /// Adds the one that is at the front of [`Frames::room`].
    pub fn push(&mut self, len: usize) {
        assert!(len <= PACKET_LEN_MAX && self.ends.len() < FRAMES_MAX, "a frame that has room");
        self.ends.push(self.end() + len);
    }

    /// The first that has not left.
    pub fn first(&mut self) -> Option<&mut [u8]> {
        let end = *self.ends.get(self.left)?;
        let start = if self.left == 0 { 0 } else { self.ends[self.left - 1] };
        Some(&mut self.bytes[start..end])
    }

    pub fn pop(&mut self) {
        self.left += 1;
        if self.left >= self.ends.len() {
            self.clear();
        }
    }

    pub fn clear(&mut self) {
        self.ends.clear();
        self.left = 0;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len() - self.left
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn end(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_leave_as_they_came(steps in prop::collection::vec((0usize..=PACKET_LEN_MAX, 0usize..4), 1..200)) {
            let (mut frames, mut model) = (Frames::default(), VecDeque::new());
            for (nth, (len, pops)) in steps.into_iter().enumerate() {
                if let Some(room) = frames.room() {
                    room[..len].fill(nth as u8);
                    frames.push(len);
                    model.push_back((nth as u8, len));
                } else {
                    prop_assert!(!model.is_empty());
                }
                for _ in 0..pops {
                    let first = frames.first().map(|frame| (frame.to_vec(), frame.len()));
                    match model.pop_front() {
                        Some((fill, len)) => {
                            let (bytes, found) = first.unwrap();
                            prop_assert_eq!(found, len);
                            prop_assert!(bytes.iter().all(|byte| *byte == fill));
                            frames.pop();
                        }
                        None => prop_assert!(first.is_none()),
                    }
                }
                prop_assert_eq!(frames.is_empty(), model.is_empty());
            }
        }
    }
}
