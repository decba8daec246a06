//! The control queue (virtio 1.3, 5.1.6.5). The driver uses it to set the number of active queue
//! pairs and the offloads for received frames.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, Events, MutEventSubscriber};
use thiserror::Error;
use tracing::debug;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, VIRTIO_NET_CTRL_MQ,
    VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_MQ, VIRTIO_NET_OK,
};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory};

use super::header::Offloads;
use super::state::Interface;
use super::used;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

pub(super) const QUEUE_SIZE: u16 = 64;
/// Length of class, command and the longest data of all supported commands.
const COMMAND_LEN_MAX: usize = 2 + 8;
/// Maximum number of commands per pass. Linux's driver waits for the answer to each command.
const COMMANDS_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    SetPairs(u16),
    SetOffloads(Offloads),
}

/// Reason to answer a command with `VIRTIO_NET_ERR`.
#[derive(Debug, Error, PartialEq, Eq)]
enum CommandError {
    #[error("request is too short for a class and a command")]
    TooShort,
    #[error("command {command} of class {class} is unknown or was not negotiated")]
    Unknown { class: u8, command: u8 },
    #[error("command {command} of class {class} has invalid data of {len} bytes")]
    Length { class: u8, command: u8, len: usize },
    #[error("requested {pairs} queue pairs exceed the maximum {most}")]
    Pairs { pairs: u16, most: u16 },
    #[error("offloads {bits:#x} were not negotiated, or depend on offloads that are off")]
    Offloads { bits: u64 },
}

/// Parses a command of a driver that has negotiated `features`. The device has `pairs_max` queue
/// pairs.
fn parse(bytes: &[u8], features: u64, pairs_max: u16) -> Result<Command, CommandError> {
    let [class, command, data @ ..] = bytes else { return Err(CommandError::TooShort) };
    let (class, command) = (*class, *command);
    let length = || CommandError::Length { class, command, len: data.len() };
    let has = |bit: u32| features & 1 << bit != 0;
    match (u32::from(class), u32::from(command)) {
        (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) if has(VIRTIO_NET_F_MQ) => {
            let pairs = u16::from_le_bytes(data.try_into().map_err(|_| length())?);
            match (1..=pairs_max).contains(&pairs) {
                true => Ok(Command::SetPairs(pairs)),
                false => Err(CommandError::Pairs { pairs, most: pairs_max }),
            }
        }
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET)
            if has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) =>
        {
            let bits = u64::from_le_bytes(data.try_into().map_err(|_| length())?);
            let known = [
                VIRTIO_NET_F_GUEST_CSUM,
                VIRTIO_NET_F_GUEST_TSO4,
                VIRTIO_NET_F_GUEST_TSO6,
                VIRTIO_NET_F_GUEST_ECN,
                VIRTIO_NET_F_GUEST_UFO,
            ];
            let agreed = known.into_iter().fold(0, |all, bit| all | 1 << bit) & features;
            // Linux does not clear ECN when it switches segmentation off, but ECN is meaningless
            // without it.
            let mut offloads = Offloads::of_device(bits);
            offloads.ecn &= offloads.tso4 || offloads.tso6;
            match bits & !agreed == 0 && offloads.is_consistent() {
                true => Ok(Command::SetOffloads(offloads)),
                false => Err(CommandError::Offloads { bits }),
            }
        }
        _ => Err(CommandError::Unknown { class, command }),
    }
}

/// Bytes of a command, and the address for its answer.
struct Request {
    bytes: [u8; COMMAND_LEN_MAX],
    /// Length of the command. If it exceeds [`COMMAND_LEN_MAX`], the command is invalid.
    len: usize,
    answer: Option<GuestAddress>,
}

fn read<M: GuestMemory>(memory: &M, chain: &mut DescriptorChain<&M>) -> Option<Request> {
    let mut request = Request { bytes: [0; COMMAND_LEN_MAX], len: 0, answer: None };
    let mut has_next = true;
    for descriptor in chain.take(usize::from(QUEUE_SIZE)) {
        has_next = descriptor.has_next();
        let len = descriptor.len() as usize;
        if descriptor.is_write_only() {
            if len > 0 {
                request.answer.get_or_insert(descriptor.addr());
            }
        } else if request.answer.is_some() {
            return None;
        } else {
            let start = request.len.min(COMMAND_LEN_MAX);
            let now = len.min(COMMAND_LEN_MAX - start);
            if now > 0 {
                memory
                    .read_slice(&mut request.bytes[start..start + now], descriptor.addr())
                    .ok()?;
            }
            request.len = request.len.saturating_add(len);
        }
    }
    (!has_next).then_some(request)
}

/// Worker of the control queue. The worker executes commands on the thread of the first queue pair.
pub(super) struct Control {
    net: Arc<Interface>,
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    index: u16,
    queue: ActiveQueue,
    features: u64,
}

impl Control {
    pub(super) fn new(
        net: Arc<Interface>,
        (view, interrupt): (GuestView, Arc<dyn VirtioInterrupt>),
        (index, queue): (u16, ActiveQueue),
        features: u64,
    ) -> Self {
        Self { net, view, interrupt, index, queue, features }
    }

    fn serve(&mut self) {
        let view = self.view.clone();
        for _ in 0..COMMANDS_MAX {
            // The guard of guest memory is dropped before the host's kernel executes the command.
            let (head, request) = {
                let guard = view.memory();
                let memory: &MappedMemory = &guard;
                let Some(mut chain) = self.queue.pop(memory, &*self.interrupt) else {
                    if self.queue.wait_for_more(memory) {
                        continue;
                    }
                    return;
                };
                (chain.head_index(), read(memory, &mut chain))
            };
            let answer = request.and_then(|request| {
                let known = &request.bytes[..request.len.min(COMMAND_LEN_MAX)];
                // A command that is too long is invalid even if its first bytes form a valid
                // command.
                let result = match request.len > COMMAND_LEN_MAX {
                    true => Err(CommandError::Unknown { class: known[0], command: known[1] }),
                    false => parse(known, self.features, self.net.shape().pairs),
                };
                let status = self.carry_out(result);
                request.answer.map(|at| (at, status))
            });
            if answer.is_none() {
                self.net.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
            }
            if !self.answer(head, answer) {
                return;
            }
        }
        self.queue.reschedule();
    }

    fn carry_out(&self, command: Result<Command, CommandError>) -> u8 {
        let net = &self.net.shape().id;
        let done = match command {
            Ok(Command::SetPairs(pairs)) => self.net.set_pairs(pairs),
            Ok(Command::SetOffloads(offloads)) => self.net.host().set_offloads(offloads),
            Err(err) => {
                debug!(net, %err, "Control command refused");
                return VIRTIO_NET_ERR as u8;
            }
        };
        match done {
            Ok(()) => VIRTIO_NET_OK as u8,
            Err(err) => {
                rate_limited!(warn, net, ?command, %err, "Host interface cannot carry out a control command of the guest");
                VIRTIO_NET_ERR as u8
            }
        }
    }

    /// Answers a command. Returns false if the used ring cannot be written.
    fn answer(&mut self, head: u16, answer: Option<(GuestAddress, u8)>) -> bool {
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let written = answer.is_some_and(|(at, status)| memory.write_obj(status, at).is_ok());
        let old = self.queue.queue.next_used();
        if let Err(err) =
            used::give_back(&mut self.queue.queue, memory, &[(head, u32::from(written))])
        {
            debug!(net = self.net.shape().id, %err, "Cannot write the used ring");
            return false;
        }
        let needs_interrupt = used::wants_interrupt(&self.queue.queue, memory, old);
        drop(guard);
        if needs_interrupt && let Err(err) = self.interrupt.signal_queue(self.index) {
            rate_limited!(warn, net = self.net.shape().id, %err, "Cannot interrupt the driver");
        }
        true
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(0, ops);
        self.serve();
    }

    fn process(&mut self, _: Events, _: &mut EventOps) {
        self.queue.clear_kick();
        self.serve();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::virtio::read_once;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    const FEATURES: u64 = 1 << VIRTIO_NET_F_MQ
        | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
        | 1 << VIRTIO_NET_F_GUEST_CSUM
        | 1 << VIRTIO_NET_F_GUEST_TSO4
        | 1 << VIRTIO_NET_F_GUEST_ECN;

    fn offloads(bits: u64) -> Result<Command, CommandError> {
        parse(&[&[5, 0][..], &bits.to_le_bytes()].concat(), FEATURES, 4)
    }

    #[test]
    fn pairs_beyond_those_of_the_device_are_refused() {
        for (bytes, result) in [
            (&[4, 0, 1, 0][..], Ok(Command::SetPairs(1))),
            (&[4, 0, 4, 0], Ok(Command::SetPairs(4))),
            (&[4, 0, 5, 0], Err(CommandError::Pairs { pairs: 5, most: 4 })),
            (&[4, 0, 0, 0], Err(CommandError::Pairs { pairs: 0, most: 4 })),
            (&[4, 0, 1], Err(CommandError::Length { class: 4, command: 0, len: 1 })),
            (&[4, 1, 1, 0], Err(CommandError::Unknown { class: 4, command: 1 })),
            (&[4], Err(CommandError::TooShort)),
            (&[0, 0, 1], Err(CommandError::Unknown { class: 0, command: 0 })),
        ] {
            assert_eq!(parse(bytes, FEATURES, 4), result, "{bytes:?}");
        }
        assert!(parse(&[4, 0, 1, 0], 0, 4).is_err(), "the command was not negotiated");
    }

    #[test]
    fn command_and_its_descriptors_are_read_once() {
        let mut driver = TestDriver::new(1);
        driver.write(BUFFERS, &[4, 0, 1, 0]);
        let parts =
            [Buffer::Out(BUFFERS, 1), Buffer::Out(BUFFERS + 1, 3), Buffer::In(BUFFERS + 4, 1)];
        let request = read_once::with_chain(&mut driver, &parts, |memory, chain| {
            super::read(memory, chain).expect("a valid chain")
        });
        assert_eq!((&request.bytes[..request.len], request.len), (&[4, 0, 1, 0][..], 4));
        assert_eq!(request.answer, Some(GuestAddress(BUFFERS + 4)));
    }

    #[test]
    fn offloads_must_be_negotiated() {
        let csum = Offloads { csum: true, ..Offloads::default() };
        assert_eq!(offloads(0), Ok(Command::SetOffloads(Offloads::default())));
        assert_eq!(offloads(1 << 1), Ok(Command::SetOffloads(csum)));
        assert_eq!(
            offloads(1 << 1 | 1 << 7),
            Ok(Command::SetOffloads(Offloads { tso4: true, ..csum }))
        );
        assert_eq!(offloads(1 << 1 | 1 << 9), Ok(Command::SetOffloads(csum)));
        for bits in [1 << 7, 1 << 1 | 1 << 8, 1 << 63, 1] {
            assert_eq!(offloads(bits), Err(CommandError::Offloads { bits }));
        }
    }

    proptest! {
        #[test]
        fn no_command_panics(bytes in prop::collection::vec(any::<u8>(), 0..12), features: u64) {
            let _ = parse(&bytes, features, 4);
        }
    }
}
