//! Output of a frame, which is also its window.

use super::ZstdError;

/// Bytes that short copies copy at once. Bytes after the end of such a copy are overwritten later.
const STEP: usize = 16;

pub(super) struct Output<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl<'a> Output<'a> {
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, len: 0 }
    }

    /// Number of bytes that have been written.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn written(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Reserves the next `len` bytes.
    fn next(&mut self, len: usize) -> Result<&mut [u8], ZstdError> {
        let capacity = self.bytes.len();
        let next = self.bytes[self.len..].get_mut(..len);
        let next = next.ok_or(ZstdError::OutputFull { bytes: capacity })?;
        self.len += len;
        Ok(next)
    }

    pub(super) fn push(&mut self, data: &[u8]) -> Result<(), ZstdError> {
        self.next(data.len())?.copy_from_slice(data);
        Ok(())
    }

    pub(super) fn fill(&mut self, byte: u8, len: usize) -> Result<(), ZstdError> {
        self.next(len)?.fill(byte);
        Ok(())
    }

    /// Appends `len` bytes of `data` from `start`, and may read more of them.
    #[inline(always)]
    pub(super) fn push_with_slack(
        &mut self,
        data: &[u8],
        start: usize,
        len: usize,
    ) -> Result<(), ZstdError> {
        if len <= STEP
            && let Some(to) = self.bytes[self.len..].first_chunk_mut::<STEP>()
            && let Some(from) = data.get(start..).and_then(|data| data.first_chunk::<STEP>())
        {
            *to = *from;
            self.len += len;
            return Ok(());
        }
        self.push(&data[start..start + len])
    }

    /// Appends `len` bytes that begin `distance` bytes before the end. If `len` exceeds `distance`,
    /// they repeat.
    #[inline(always)]
    pub(super) fn repeat(&mut self, distance: usize, len: usize) -> Result<(), ZstdError> {
        let (from, to, end) = (self.len.wrapping_sub(distance), self.len, self.len + len);
        if distance == 0 || distance > to {
            return Err(ZstdError::Distance { distance, output_bytes: to });
        }
        if distance >= STEP && len <= 2 * STEP && to + 2 * STEP <= self.bytes.len() {
            self.bytes.copy_within(from..from + STEP, to);
            if len > STEP {
                self.bytes.copy_within(from + STEP..from + 2 * STEP, to + STEP);
            }
            self.len = end;
            return Ok(());
        }
        self.repeat_any(distance, len)
    }

    #[inline(never)]
    fn repeat_any(&mut self, distance: usize, len: usize) -> Result<(), ZstdError> {
        let (from, to) = (self.len - distance, self.len);
        self.next(len)?;
        // Each copy doubles the bytes that can be copied at once.
        let mut copied = 0;
        while copied < len {
            let count = (distance + copied).min(len - copied);
            self.bytes.copy_within(from..from + count, to + copied);
            copied += count;
        }
        Ok(())
    }
}
