//! virtio-mem driver that plugs and unplugs the same blocks in a loop (virtio 1.3, 5.15).

use anyhow::{Result, ensure};

use super::pci::Device;
use super::queue::{self, Descriptor, NEXT, Queue, WRITE};
use super::{ANSWER_POLLS, Until, start};

const MEM: u16 = 0x1058;

// Offsets in the device configuration (5.15.4).
const BLOCK_SIZE: usize = 0;
const ADDR: usize = 16;
const REQUESTED_SIZE: usize = 48;

// Types of requests, and of their responses (5.15.6).
const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const ACK: u16 = 0;
const REQUEST_BYTES: usize = 24;
const ANSWER_AT: usize = 32;
const ANSWER_BYTES: usize = 10;

/// Plugs and unplugs the first `blocks` blocks of the guest's only virtio-mem device. The host
/// should have requested these blocks.
pub(crate) fn plug_storm(blocks: u16, until: &Until) -> Result<()> {
    queue::disable_compaction_of_locked_pages()?;
    let mut device = Device::take(MEM)?;
    let mut queues = start(&mut device)?;
    let [queue] = &mut queues[..] else { anyhow::bail!("virtio-mem has {} queues", queues.len()) };
    let (block_size, requested) = (device.own_u64(BLOCK_SIZE)?, device.own_u64(REQUESTED_SIZE)?);
    ensure!(
        requested >= u64::from(blocks) * block_size,
        "The host requests {requested} bytes, fewer than {blocks} blocks of {block_size}"
    );
    let address = device.own_u64(ADDR)?;
    println!("storm: begins");
    let mut sent = 0;
    while !until.is_over(sent) {
        // Each round ends with an unplug, so no memory is plugged at the end.
        for code in [PLUG, UNPLUG] {
            send(&mut device, queue, code, address, blocks)?;
        }
        sent += 2;
    }
    device.reset()?;
    println!("hostile: sent {sent}, answered {sent}, restarted 0 times");
    Ok(())
}

fn send(
    device: &mut Device,
    queue: &mut Queue,
    code: u16,
    address: u64,
    blocks: u16,
) -> Result<()> {
    let mut request = [0; REQUEST_BYTES];
    request[..2].copy_from_slice(&code.to_le_bytes());
    request[8..16].copy_from_slice(&address.to_le_bytes());
    request[16..18].copy_from_slice(&blocks.to_le_bytes());
    queue.write_buffer(&request);
    let (request, answer) = (queue.buffer_address(0), queue.buffer_address(ANSWER_AT));
    let chain = [
        Descriptor { address: request, len: REQUEST_BYTES as u32, flags: NEXT, next: 1 },
        Descriptor { address: answer, len: ANSWER_BYTES as u32, flags: WRITE, next: 0 },
    ];
    queue.offer(&chain, 0, 1);
    device.notify(queue.index);
    ensure!(queue.wait_until_used(ANSWER_POLLS), "The device did not answer request {code}");
    let answer = queue.read_buffer(ANSWER_AT);
    ensure!(answer == ACK, "The device answered request {code} with {answer}");
    Ok(())
}
