//! A driver that means harm: takes a virtio device from the kernel and gives it descriptors that no
//! driver would.

mod pci;
mod plugs;
mod queue;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::content::Bytes;

use pci::Device;
pub(crate) use plugs::plug_storm;
use queue::{Descriptor, NEXT, QUEUE_SIZE, Queue, WRITE};

// How often the device is looked at. Counted, like everything here: what the device is made to do
// must not stop the attack by way of the guest's clock.
/// Garbage need not be answered: after some milliseconds the next comes anyway.
const GARBAGE_LOOKS: u32 = 20_000;
/// A frame need not come, and one that is sent from nowhere may be tried again for ever.
const FRAME_LOOKS: u32 = 20_000;
const LONGEST_BYTES: u64 = 256 << 10;
/// What is well-formed must be, wherever its buffers lie; this is longer than any answer takes.
const ANSWER_LOOKS: u32 = 100_000_000;
/// Looking for a file takes longer than a request.
const REQUESTS_PER_LOOK: u64 = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malice {
    /// Well-formed chains whose buffers lie anywhere in a range of guest memory.
    Range {
        /// The range's first byte.
        first: u64,
        /// The byte after its last.
        end: u64,
    },
    /// Frames of a network device there: its first queue's buffers are for what comes, its second
    /// one's for what is sent (virtio 1.3, 5.1.2). A buffer that the device does not give back
    /// changes its place meanwhile.
    Frames {
        /// The range's first byte.
        first: u64,
        /// The byte after its last.
        end: u64,
    },
    /// Chains that are wrong in every way: loops, indexes beyond the queue, lengths and addresses
    /// that overflow.
    Garbage,
}

/// When it is enough.
pub(crate) enum Until {
    /// So many requests have been sent.
    Sent(u64),
    /// There is a file.
    Exists(PathBuf),
}

impl Until {
    fn is_over(&self, sent: u64) -> bool {
        match self {
            Self::Sent(count) => sent >= *count,
            Self::Exists(path) => sent.is_multiple_of(REQUESTS_PER_LOOK) && path.exists(),
        }
    }
}

/// Attacks every queue of the device with that PCI device id.
pub(crate) fn attack(device_id: u64, malice: Malice, until: &Until) -> Result<()> {
    if let Malice::Range { first, end } | Malice::Frames { first, end } = malice {
        ensure!(first < end, "the range {first:#x} to {end:#x} is empty");
    }
    queue::keep_locked_pages_in_place()?;
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
            let looks = match malice {
                Malice::Range { first, end } => {
                    queue.offer(&[in_range(&mut random, first, end)], 0, 1);
                    ANSWER_LOOKS
                }
                Malice::Frames { first, end } => {
                    let flags = match queue.index {
                        0 => WRITE,
                        1 => 0,
                        _ => continue,
                    };
                    // One at a time, or the ring would overtake itself.
                    let step = u16::from(queue.has_all_back());
                    queue.offer(&[inside(&mut random, first, end, flags)], 0, step);
                    FRAME_LOOKS
                }
                Malice::Garbage => {
                    let chain: Vec<Descriptor> =
                        (0..QUEUE_SIZE).map(|_| garbage(&mut random)).collect();
                    let (head, step) =
                        (random.next_u64() as u16 % (2 * QUEUE_SIZE), random.next_u64());
                    // Most indexes go one further; some jump, after which the device may give the
                    // queue up.
                    let jumps = step.is_multiple_of(8);
                    is_broken |= jumps;
                    queue.offer(&chain, head, if jumps { step as u16 } else { 1 });
                    GARBAGE_LOOKS
                }
            };
            device.notify(queue.index);
            sent += 1;
            let answer = queue.wait_until_used(looks);
            answered += u64::from(answer);
            ensure!(
                answer || !matches!(malice, Malice::Range { .. }),
                "Request {sent} has no answer; the device's status is {:#x}",
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

/// Negotiates with the device as a driver that lacks one of its features. A device that accepts
/// this is an error.
pub(crate) fn negotiate_without(device_id: u64, feature: u64) -> Result<()> {
    let without = u32::try_from(feature).ok().and_then(|bit| 1u32.checked_shl(bit));
    let without =
        without.with_context(|| format!("No feature of a device's own: bit {feature}"))?;
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

/// It begins in the range, and may go beyond.
fn in_range(random: &mut Bytes, first: u64, end: u64) -> Descriptor {
    let address = first + random.next_u64() % (end - first);
    let len = 1 + (random.next_u64() % LONGEST_BYTES) as u32;
    Descriptor { address, len, flags: WRITE, next: 0 }
}

/// No byte of it lies elsewhere: the host's kernel gives a ring up for that.
fn inside(random: &mut Bytes, first: u64, end: u64, flags: u16) -> Descriptor {
    let len = 1 + random.next_u64() % LONGEST_BYTES.min(end - first);
    let address = first + random.next_u64() % (end - first - len + 1);
    Descriptor { address, len: len as u32, flags, next: 0 }
}

fn garbage(random: &mut Bytes) -> Descriptor {
    let address = match random.next_u64() % 6 {
        0 => random.next_u64(),
        1 => u64::MAX - random.next_u64() % 4096,
        // Holes, devices, tables, the kernel's own memory: all below 5 GiB.
        2 => random.next_u64() % (5 << 30),
        3 => 0,
        // The local APIC and what else lies below 4 GiB.
        4 => 0xfee0_0000 + random.next_u64() % 4096,
        _ => random.next_u64() % (1 << 46),
    };
    let len = match random.next_u64() % 4 {
        0 => u32::MAX,
        1 => 0,
        2 => random.next_u64() as u32,
        _ => (random.next_u64() % 8192) as u32,
    };
    // The device must not write where it could hurt the guest itself: that would show nothing about
    // the VMM.
    let readable_only = address < 5 << 30;
    let flags = random.next_u64() as u16 & 7 & if readable_only { !WRITE } else { u16::MAX } | NEXT;
    Descriptor {
        address,
        len,
        flags,
        next: (random.next_u64() % (2 * u64::from(QUEUE_SIZE))) as u16,
    }
}
