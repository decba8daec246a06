//! A request in progress, divided into steps. Large requests are executed in pieces, which limits
//! the memory for copies.

use std::io;
use std::time::Instant;

use vm_memory::GuestMemory;

use super::metrics::Kind;
use super::request::{Operation, Request};
use crate::disk::Step;
use crate::disk::buffer::Buffers;
use crate::disk::range::DiskRange;

/// Maximum size of one copy and its transfer.
pub const PIECE_BYTES_MAX: u64 = 1 << 20;
/// Largest range that one step zeroes or discards. A request may cover 64 GiB, but a reset of the
/// device must wait for the step in progress.
pub const RANGE_PIECE_BYTES_MAX: u64 = 4 << 20;

pub enum Next {
    Step(Step),
    /// The job is finished. Contains the number of bytes written to the guest's buffers.
    Finished(u64),
}

pub struct Job {
    request: Request,
    /// Index of the current range, if the request has several.
    range: usize,
    /// Bytes of this range for which steps were already returned.
    begun_bytes: u64,
    /// True if the flush at the end of a durable write was already returned.
    flushed: bool,
    /// Time at which the request was taken.
    taken: Instant,
    /// Time at which the job returned its flush step, if it has one.
    since: Instant,
}

impl Job {
    pub fn new(request: Request) -> Self {
        let taken = Instant::now();
        Self { request, range: 0, begun_bytes: 0, flushed: false, taken, since: taken }
    }

    pub fn taken_at(&self) -> Instant {
        self.taken
    }

    pub fn request(&self) -> &Request {
        &self.request
    }

    pub fn since(&self) -> Instant {
        self.since
    }

    /// Returns the next step. A write step contains a copy of the data. Fails if the guest's
    /// buffers are not in memory.
    ///
    /// `writes_through` returns true if a write must be durable before it is answered. It is called
    /// after the last transfer, because the driver may switch the cache off during the write.
    /// Virtio does not define whether such a write must be durable (virtio 1.3, 5.2.6.2). However,
    /// the flush in [`Disk::write_config`] does not cover data that is transferred later, and Linux
    /// sends no flushes after the switch.
    ///
    /// [`Disk::write_config`]: super::state::Disk::write_config
    pub fn next<M: GuestMemory>(
        &mut self,
        memory: &M,
        buffers: &mut Buffers,
        writes_through: impl FnOnce() -> bool,
    ) -> io::Result<Next> {
        if let Some(step) = self.next_transfer(memory, buffers)? {
            return Ok(Next::Step(step));
        }
        let writes = !matches!(Kind::from(&self.request.operation), Kind::Read | Kind::GetId);
        let wants_flush =
            || writes && (self.request.operation == Operation::Flush || writes_through());
        if !self.flushed && wants_flush() {
            (self.flushed, self.since) = (true, Instant::now());
            return Ok(Next::Step(Step::Flush));
        }
        Ok(Next::Finished(match &self.request.operation {
            Operation::Read(range, _) => range.len_bytes(),
            _ => 0,
        }))
    }

    fn next_transfer<M: GuestMemory>(
        &mut self,
        memory: &M,
        buffers: &mut Buffers,
    ) -> io::Result<Option<Step>> {
        let begun_bytes = self.begun_bytes;
        Ok(match &self.request.operation {
            Operation::Read(range, _) | Operation::Write(range, _)
                if begun_bytes < range.len_bytes() =>
            {
                let len = (range.len_bytes() - begun_bytes).min(PIECE_BYTES_MAX);
                let offset = range.offset_bytes() + begun_bytes;
                let mut buffer = buffers.take(len as usize);
                self.begun_bytes += len;
                if let Operation::Write(_, segments) = &self.request.operation {
                    segments
                        .read(memory, begun_bytes, buffer.bytes_mut())
                        .map_err(io::Error::other)?;
                    Some(Step::Write(offset, buffer))
                } else {
                    Some(Step::Read(offset, buffer))
                }
            }
            Operation::Discard(ranges) => {
                let cut =
                    next_piece(ranges.iter().copied(), &mut self.range, &mut self.begun_bytes);
                cut.map(Step::Discard)
            }
            Operation::WriteZeroes(ranges) => {
                let only = ranges.iter().map(|(range, _)| *range);
                let cut = next_piece(only, &mut self.range, &mut self.begun_bytes);
                cut.map(|piece| Step::WriteZeroes(piece, ranges[self.range].1))
            }
            Operation::Read(..) | Operation::Write(..) | Operation::Flush | Operation::GetId(_) => {
                None
            }
        })
    }

    /// Restores the state before the latest step, which was the transfer `step`.
    pub fn undo(&mut self, step: &Step) {
        self.begun_bytes -= match step {
            Step::Read(_, buffer) | Step::Write(_, buffer) => buffer.len() as u64,
            Step::Discard(range) | Step::WriteZeroes(range, _) => range.len_bytes(),
            Step::Flush => 0,
        };
    }

    /// Completes a step. After a read, copies the data to the guest.
    pub fn done<M: GuestMemory>(&self, memory: &M, step: &Step) -> io::Result<()> {
        let (Step::Read(offset, buffer), Operation::Read(range, segments)) =
            (step, &self.request.operation)
        else {
            return Ok(());
        };
        segments
            .write(memory, offset - range.offset_bytes(), buffer.bytes())
            .map_err(io::Error::other)
    }
}

/// Returns the next piece of range `nth` after its first `begun_bytes` bytes. If nothing of this
/// range is left, returns the first piece of a later range.
fn next_piece(
    ranges: impl Iterator<Item = DiskRange>,
    nth: &mut usize,
    begun_bytes: &mut u64,
) -> Option<DiskRange> {
    for range in ranges.skip(*nth) {
        let piece = range.piece(*begun_bytes, RANGE_PIECE_BYTES_MAX);
        if piece.len_bytes() > 0 {
            *begun_bytes += piece.len_bytes();
            return Some(piece);
        }
        (*nth, *begun_bytes) = (*nth + 1, 0);
    }
    None
}
