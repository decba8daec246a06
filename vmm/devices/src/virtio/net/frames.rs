//! A queue of frames and their headers. All of them are in one buffer, which is allocated only
//! once.

use super::header::HEADER_LEN;

/// Maximum length of a frame: a TCP or UDP packet with segmentation offload (virtio 1.3, 5.1.6.3.1)
/// plus a VLAN tag.
pub const FRAME_LEN_MAX: usize = 65_550 + 4;
/// Minimum length of a frame: two addresses and a type.
pub const FRAME_LEN_MIN: usize = 14;
pub const PACKET_LEN_MAX: usize = HEADER_LEN + FRAME_LEN_MAX;
/// Maximum number of frames that the queue holds. Their total length is limited as well.
pub const FRAMES_MAX: usize = 64;
const BYTES: usize = 4 * PACKET_LEN_MAX;

pub struct Frames {
    bytes: Box<[u8]>,
    /// End offset of each frame. The first frame begins at 0, and each other frame begins at the
    /// end of the previous one.
    ends: Vec<usize>,
    /// Number of frames that were popped.
    left: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self { bytes: vec![0; BYTES].into(), ends: Vec::with_capacity(FRAMES_MAX), left: 0 }
    }
}

impl Frames {
    /// Returns free space for a frame of maximum length. Returns `None` if there is not enough.
    pub fn room(&mut self) -> Option<&mut [u8; PACKET_LEN_MAX]> {
        let start = self.end();
        if self.ends.len() == FRAMES_MAX {
            return None;
        }
        let room = self.bytes.get_mut(start..start + PACKET_LEN_MAX)?;
        Some(room.try_into().expect("a slice of that length"))
    }

    /// Appends the frame whose `len` bytes were written to the start of [`Frames::room`].
    pub fn push(&mut self, len: usize) {
        assert!(len <= PACKET_LEN_MAX && self.ends.len() < FRAMES_MAX, "a frame that has room");
        self.ends.push(self.end() + len);
    }

    /// Returns the first frame that was not popped.
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

    pub fn len(&self) -> usize {
        self.ends.len() - self.left
    }

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
        fn frames_are_popped_in_order_and_unchanged(steps in prop::collection::vec((0usize..=PACKET_LEN_MAX, 0usize..4), 1..200)) {
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
