//! Hostile driver that takes over a virtio device from the kernel and submits invalid descriptors.

mod pci;
mod plugs;
mod queue;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::content::Bytes;

use pci::Device;
pub(crate) use plugs::plug_storm;
use queue::{Descriptor, NEXT, QUEUE_SIZE, Queue, WRITE};

// Maximum numbers of polls of the used ring. These limits are counts instead of times, so that a
// slow device cannot end the attack by the guest's clock.
/// The device may never answer garbage. After this many polls, some milliseconds, the next request
/// is sent.
const GARBAGE_POLLS: u32 = 20_000;
/// A frame may never arrive, and the device may retry a frame from invalid memory forever.
const FRAME_POLLS: u32 = 20_000;
const MAX_BUFFER_BYTES: u64 = 256 << 10;
/// A well-formed request should be answered wherever its buffers are. The limit is longer than any
/// answer takes.
const ANSWER_POLLS: u32 = 100_000_000;
/// Number of requests between checks for the file. A check takes longer than a request.
const REQUESTS_PER_CHECK: u64 = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attack {
    /// Well-formed chains with buffers anywhere in a range of guest memory.
    Range {
        first: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// Frames of a network device in that range. The first queue receives and the second one sends
    /// (virtio 1.3, 5.1.2). The place of a buffer changes while the device holds it.
    Frames {
        first: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// Chains that are invalid in many ways: loops, indexes beyond the queue, and lengths and
    /// addresses that overflow.
    Garbage,
}

pub(crate) enum Until {
    /// Until this number of requests has been sent.
    Sent(u64),
    /// Until this file exists.
    Exists(PathBuf),
}

impl Until {
    fn is_over(&self, sent: u64) -> bool {
        match self {
            Self::Sent(count) => sent >= *count,
            Self::Exists(path) => sent.is_multiple_of(REQUESTS_PER_CHECK) && path.exists(),
        }
    }
}

/// Attacks every queue of the device that has this PCI device ID.
pub(crate) fn run(device_id: u64, attack: Attack, until: &Until) -> Result<()> {
    if let Attack::Range { first, end } | Attack::Frames { first, end } = attack {
        ensure!(first < end, "the range {first:#x} to {end:#x} is empty");
    }
    queue::disable_compaction_of_locked_pages()?;
    let mut device = Device::take(u16::try_from(device_id)?)?;
    let mut random = Bytes::new(device_id);
    let mut queues = start(&mut device)?;
    let (mut sent, mut answered, mut restarts) = (0u64, 0u64, 0u64);
    'attack: loop {
        let mut is_broken = false;
        for queue in &mut queues {
            if until.is_over(sent) {
                break 'attack;
            }
            let polls = match attack {
                Attack::Range { first, end } => {
                    queue.offer(&[in_range(&mut random, first, end)], 0, 1);
                    ANSWER_POLLS
                }
                Attack::Frames { first, end } => {
                    let flags = match queue.index {
                        0 => WRITE,
                        1 => 0,
                        _ => continue,
                    };
                    // One buffer is offered at a time, because the ring would otherwise wrap around
                    // onto itself.
                    let step = u16::from(queue.are_all_buffers_returned());
                    queue.offer(&[inside(&mut random, first, end, flags)], 0, step);
                    FRAME_POLLS
                }
                Attack::Garbage => {
                    let chain: Vec<Descriptor> =
                        (0..QUEUE_SIZE).map(|_| garbage(&mut random)).collect();
                    let (head, step) =
                        (random.next_u64() as u16 % (2 * QUEUE_SIZE), random.next_u64());
                    // Most indexes advance by one. Some jump, and the device may then stop using
                    // the queue.
                    let jumps = step.is_multiple_of(8);
                    is_broken |= jumps;
                    queue.offer(&chain, head, if jumps { step as u16 } else { 1 });
                    GARBAGE_POLLS
                }
            };
            device.notify(queue.index);
            sent += 1;
            let answer = queue.wait_until_used(polls);
            answered += u64::from(answer);
            ensure!(
                answer || !matches!(attack, Attack::Range { .. }),
                "The device did not answer request {sent}; its status is {:#x}",
                device.status()
            );
        }
        if is_broken || device.needs_reset() {
            restarts += 1;
            queues = start(&mut device)?;
        }
    }
    device.reset()?;
    println!("hostile: sent {sent}, answered {answered}, restarted {restarts} times");
    Ok(())
}

/// Negotiates as a driver that lacks one of the device's features. Returns an error if the device
/// accepts this.
pub(crate) fn negotiate_without(device_id: u64, feature: u64) -> Result<()> {
    let without = u32::try_from(feature).ok().and_then(|bit| 1u32.checked_shl(bit));
    let without =
        without.with_context(|| format!("Not a device-specific feature bit: {feature}"))?;
    let mut device = Device::take(u16::try_from(device_id)?)?;
    ensure!(
        !device.try_negotiate(without)?,
        "The device accepts a driver without feature {feature}"
    );
    Ok(())
}

fn start(device: &mut Device) -> Result<Vec<Queue>> {
    device.negotiate()?;
    let mut queues = Vec::new();
    for index in 0..device.queue_count() {
        let queue = Queue::new(index)?;
        if device.enable_queue(&queue) {
            queues.push(queue);
        }
    }
    if queues.is_empty() {
        bail!("The device has no queues");
    }
    device.driver_ok();
    Ok(queues)
}

/// Returns a buffer that begins in the range and may extend beyond its end.
fn in_range(random: &mut Bytes, first: u64, end: u64) -> Descriptor {
    let address = first + random.next_u64() % (end - first);
    let len = 1 + (random.next_u64() % MAX_BUFFER_BYTES) as u32;
    Descriptor { address, len, flags: WRITE, next: 0 }
}

/// Returns a buffer that is entirely within the range. Otherwise the host's kernel would stop using
/// the ring.
fn inside(random: &mut Bytes, first: u64, end: u64, flags: u16) -> Descriptor {
    let len = 1 + random.next_u64() % MAX_BUFFER_BYTES.min(end - first);
    let address = first + random.next_u64() % (end - first - len + 1);
    Descriptor { address, len: len as u32, flags, next: 0 }
}

fn garbage(random: &mut Bytes) -> Descriptor {
    let address = match random.next_u64() % 6 {
        0 => random.next_u64(),
        1 => u64::MAX - random.next_u64() % 4096,
        // Holes, devices, tables and the kernel's own memory. All are below 5 GiB.
        2 => random.next_u64() % (5 << 30),
        3 => 0,
        // The local APIC and the other devices below 4 GiB.
        4 => 0xfee0_0000 + random.next_u64() % 4096,
        _ => random.next_u64() % (1 << 46),
    };
    let len = match random.next_u64() % 4 {
        0 => u32::MAX,
        1 => 0,
        2 => random.next_u64() as u32,
        _ => (random.next_u64() % 8192) as u32,
    };
    // The device must not write to memory that the guest itself uses, because a crash of the guest
    // would prove nothing about the VMM.
    let readable_only = address < 5 << 30;
    let flags = random.next_u64() as u16 & 7 & if readable_only { !WRITE } else { u16::MAX } | NEXT;
    Descriptor {
        address,
        len,
        flags,
        next: (random.next_u64() % (2 * u64::from(QUEUE_SIZE))) as u16,
    }
}
