//! Publishes several used ring entries together.
//!
//! The header in the first buffer of a frame contains the number of buffers (virtio 1.3, 5.1.6.4).
//! If a driver finds only the first of them in the used ring, it treats the frame as broken.
//! `Queue::add_used` cannot be used, because it publishes each chain separately.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Length of the flags and the index, which precede the elements in both rings.
const RING_HEADER_LEN: u64 = 4;
const INDEX_AT: u64 = 2;
const USED_ELEMENT_LEN: u64 = 8;
const AVAIL_ELEMENT_LEN: u64 = 2;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT` (2.7.6).
const NO_INTERRUPT: u16 = 1;

/// Returns several chains to the driver together. `chains` contains the head and used length of
/// each.
pub(super) fn give_back<M: GuestMemory>(
    queue: &mut Queue,
    memory: &M,
    chains: &[(u16, u32)],
) -> Result<(), Error> {
    let (ring, size) = (queue.used_ring(), queue.size());
    let at = |offset: u64| ring.checked_add(offset).map(GuestAddress).ok_or(Error::AddressOverflow);
    let mut next = Wrapping(queue.next_used());
    for (head, len) in chains {
        let element = [u32::from(*head).to_le(), len.to_le()];
        let offset = RING_HEADER_LEN + u64::from(next.0 % size) * USED_ELEMENT_LEN;
        memory.write_obj(element, at(offset)?).map_err(Error::GuestMemory)?;
        next += 1;
    }
    queue.set_next_used(next.0);
    memory.store(next.0.to_le(), at(INDEX_AT)?, Ordering::Release).map_err(Error::GuestMemory)
}

/// Returns true if the driver wants an interrupt for the entries that were added since the index
/// was `old` (2.7.7.2, 2.7.10).
pub(super) fn wants_interrupt<M: GuestMemory>(queue: &Queue, memory: &M, old: u16) -> bool {
    let new = queue.next_used();
    if new == old {
        return false;
    }
    // The used index must be written before the driver's event index is read. The driver accesses
    // them in the opposite order.
    fence(Ordering::SeqCst);
    let read = |offset: u64| -> Option<u16> {
        let at = GuestAddress(queue.avail_ring().checked_add(offset)?);
        memory.load::<u16>(at, Ordering::Relaxed).ok().map(u16::from_le)
    };
    if queue.event_idx_enabled() {
        let event = RING_HEADER_LEN + u64::from(queue.size()) * AVAIL_ELEMENT_LEN;
        // If the ring cannot be read, the interrupt is sent.
        read(event)
            .is_none_or(|event| new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    } else {
        read(0).is_none_or(|flags| flags & NO_INTERRUPT == 0)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const SIZE: u16 = 8;

    fn queue() -> (Queue, GuestMemoryMmap) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let mut queue = Queue::new(SIZE).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_ready(true);
        (queue, memory)
    }

    #[test]
    fn chains_are_published_at_once_and_wrap_around() {
        let (mut queue, memory) = queue();
        queue.set_next_used(u16::MAX - 1);
        give_back(&mut queue, &memory, &[(1, 10), (2, 20), (3, 30)]).unwrap();
        assert_eq!(queue.next_used(), 1);
        let index: u16 = memory.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(index, 1);
        for (slot, expected) in [(6, (1u32, 10u32)), (7, (2, 20)), (0, (3, 30))] {
            let at = USED + 4 + 8 * slot;
            let found: (u32, u32) = (
                memory.read_obj(GuestAddress(at)).unwrap(),
                memory.read_obj(GuestAddress(at + 4)).unwrap(),
            );
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn ring_outside_of_memory_is_an_error() {
        let (mut queue, memory) = queue();
        queue.try_set_used_ring_address(GuestAddress(0x8000)).unwrap();
        assert!(give_back(&mut queue, &memory, &[(1, 10)]).is_err());
        assert_eq!(queue.next_used(), 0);
    }

    #[test]
    fn driver_is_interrupted_if_it_has_requested_that() {
        let (mut queue, memory) = queue();
        let set = |at: u64, value: u16| memory.write_obj(value, GuestAddress(at)).unwrap();
        let event_at = AVAILABLE + 4 + 2 * u64::from(SIZE);
        queue.set_next_used(10);
        assert!(!wants_interrupt(&queue, &memory, 10) && wants_interrupt(&queue, &memory, 7));
        set(AVAILABLE, 1);
        assert!(!wants_interrupt(&queue, &memory, 7));
        queue.set_event_idx(true);
        // For every position of the event index, the result should be that of `vring_need_event` in
        // Linux.
        for (event, wanted) in
            [(6, false), (7, true), (8, true), (9, true), (10, false), (u16::MAX, false)]
        {
            set(event_at, event);
            assert_eq!(wants_interrupt(&queue, &memory, 7), wanted, "event {event}");
        }
        queue.set_next_used(1);
        set(event_at, u16::MAX);
        assert!(wants_interrupt(&queue, &memory, u16::MAX - 1));
    }
}
