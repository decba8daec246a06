//! Access of the guest to chunks of a mapped volume, which is taken while they may be released.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

use foreshore_types::PAGE_BYTES;
use parking_lot::Mutex;
use pmem_volume::media::MediaError;
use rustix::event::{EventfdFlags, eventfd};

use super::Server;
use crate::pool::CHUNK_BYTES;

/// Maximum number of chunks in an order. The thread carries out an order before it serves stores.
const ORDER_CHUNKS: usize = 64;

/// Request to the thread that fills holes.
#[derive(Clone, Copy)]
enum Change {
    Withdraw,
    GiveBack,
}

struct Order {
    change: Change,
    indexes: Vec<u32>,
    reply: mpsc::Sender<io::Result<()>>,
}

/// Orders that the thread has not carried out yet.
pub(super) struct Orders {
    /// `None` after the end of the thread.
    queue: Mutex<Option<Vec<Order>>>,
    arrived: OwnedFd,
}

impl Orders {
    pub(super) fn new() -> io::Result<Self> {
        let arrived = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { queue: Mutex::new(Some(Vec::new())), arrived })
    }

    /// Adds an order, or drops it after the end of the thread.
    fn add(&self, order: Order) {
        if let Some(queue) = &mut *self.queue.lock() {
            queue.push(order);
            rustix::io::write(&self.arrived, &1u64.to_ne_bytes()).expect("an open eventfd");
        }
    }

    fn take(&self) -> Vec<Order> {
        // The descriptor is read before the orders are taken, so that a later order makes it
        // readable again. It is not readable without an order.
        let _ = rustix::io::read(&self.arrived, &mut [0; 8]);
        self.queue.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Drops all orders, because the thread ends.
    pub(super) fn close(&self) {
        *self.queue.lock() = None;
    }
}

impl AsFd for Orders {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

/// Takes access to chunks of a volume from the guest, and gives it back.
#[derive(Clone)]
pub struct ChunkAccess(pub(super) Arc<Orders>);

impl ChunkAccess {
    fn order(&self, change: Change, units: &[Range<u64>]) -> Result<(), MediaError> {
        let index = |unit: &Range<u64>| (unit.start / CHUNK_BYTES) as u32;
        // All units are ordered, and the first error is returned.
        let mut result = Ok(());
        for units in units.chunks(ORDER_CHUNKS) {
            let (reply, replied) = mpsc::channel();
            let indexes = units.iter().map(index).collect();
            self.0.add(Order { change, indexes, reply });
            // The sender is dropped without a reply at the end of the thread.
            let ended = Err(io::Error::other("the volume is being removed"));
            let changed = replied.recv().unwrap_or(ended).map_err(|source| MediaError::Io {
                operation: "change of the mapping",
                offset_bytes: units[0].start,
                length_bytes: units.len() as u64 * CHUNK_BYTES,
                source,
            });
            result = result.and(changed);
        }
        result
    }

    pub fn withdraw(&self, units: &[Range<u64>]) -> Result<(), MediaError> {
        self.order(Change::Withdraw, units)
    }

    pub fn give_back(&self, units: &[Range<u64>]) -> Result<(), MediaError> {
        self.order(Change::GiveBack, units)
    }
}

/// Chunks to which the guest has no access. Stores there wait. The value consists of the addresses
/// of pages that a store may have reached before the zeros in place of the chunk were protected.
/// `None` if these pages are unknown.
pub(super) type Withdrawn = BTreeMap<u32, Option<Vec<u64>>>;

impl Server {
    /// Carries out the orders that have arrived.
    pub(super) fn obey(&mut self) {
        for Order { change, indexes, reply } in self.orders.take() {
            // No chunk remains withdrawn after an error.
            let mut result = Ok(());
            for index in indexes {
                let changed = match change {
                    Change::Withdraw => self.withdraw(index),
                    Change::GiveBack => self.give_back(index),
                };
                result = result.and(changed);
            }
            // The receiver waits for the reply, so this cannot fail.
            let _ = reply.send(result);
        }
    }

    fn withdraw(&mut self, index: u32) -> io::Result<()> {
        if self.withdrawn.contains_key(&index) {
            return Ok(());
        }
        let was_mapped = std::mem::replace(&mut self.is_mapped[index as usize], true);
        // After an error below, the zeros may lack protection.
        self.withdrawn.insert(index, (!was_mapped).then(Vec::new));
        // Otherwise, the stock could release the chunk after it is given back.
        self.stocked.forget(index);
        if was_mapped {
            let (zeros, offset) = (&self.reservation, u64::from(index) * CHUNK_BYTES);
            self.userfaults.map_zeros(zeros, offset, CHUNK_BYTES)?;
            let accessed = self.userfaults.accessed_pages(zeros, offset, CHUNK_BYTES)?;
            self.withdrawn.insert(index, Some(accessed));
        }
        Ok(())
    }

    /// Maps a chunk again, unless it was released.
    fn give_back(&mut self, index: u32) -> io::Result<()> {
        let Some(accessed) = self.withdrawn.remove(&index) else { return Ok(()) };
        let file_offset = self.source.volume.chunk_offset(index);
        self.is_mapped[index as usize] = file_offset.is_some();
        let result = match file_offset {
            Some(file_offset) => self.map_again(index, file_offset, accessed.as_deref()),
            None => Ok(()),
        };
        // The guest would find other content than it has stored.
        result.inspect_err(|err| self.fail(err.to_string()))
    }

    /// Maps a chunk that was not released. Fails if a store may have reached the zeros in its place
    /// and is lost.
    fn map_again(&self, index: u32, file_offset: u64, accessed: Option<&[u64]>) -> io::Result<()> {
        match map_unless_stored(accessed, is_zero, || self.map(index, file_offset))? {
            true => Ok(()),
            false => Err(io::Error::other("the guest used a chunk that it reported as free")),
        }
    }
}

/// Maps a chunk in place of zeros. Returns false if a store may have reached the zeros.
///
/// A page that still has only zeros was probably loaded. If the chunk has zeros there as well, even
/// a store of zeros has lost nothing.
fn map_unless_stored(
    accessed: Option<&[u64]>,
    is_zero: impl Fn(u64) -> bool,
    map: impl FnOnce() -> io::Result<()>,
) -> io::Result<bool> {
    let has_zeros = || accessed.is_some_and(|pages| pages.iter().all(|page| is_zero(*page)));
    if !has_zeros() {
        return Ok(false);
    }
    map()?;
    Ok(has_zeros())
}

/// Returns true if a page of a reservation has only zeros.
pub(super) fn is_zero(page: u64) -> bool {
    let words = (page..page + PAGE_BYTES).step_by(8);
    // SAFETY: the reservation maps the page, whose address is a multiple of 8, and no reference
    // points there.
    words.map(|at| unsafe { (at as *const u64).read_volatile() }).all(|word| word == 0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn accessed_page_is_lost_unless_it_has_zeros_before_and_after() {
        for (accessed, are_zeros, chunk_has_zeros, expected) in [
            (Some(&[][..]), true, false, [true, true]),
            (Some(&[1]), true, true, [true, true]),
            // A store of zeros is lost, or a load has seen zeros in place of data.
            (Some(&[1]), true, false, [true, false]),
            (Some(&[1]), false, true, [false, false]),
            (None, true, true, [false, false]),
        ] {
            let is_mapped = Cell::new(false);
            let is_zero = |_| if is_mapped.get() { chunk_has_zeros } else { are_zeros };
            let map = || {
                is_mapped.set(true);
                Ok(())
            };
            let is_kept = map_unless_stored(accessed, is_zero, map).unwrap();
            let case = format!("{accessed:?}, {are_zeros}, {chunk_has_zeros}");
            assert_eq!([is_mapped.get(), is_kept], expected, "{case}");
        }
    }
}
