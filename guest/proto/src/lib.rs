//! What the guest's agent and the VMM say to each other.
//!
//! The channel is a vsock stream to the host (CID 2), port [`VSOCK_PORT`]. Both sides write JSON
//! objects, one per line. Every object names its `type` and the protocol `version`. The agent
//! speaks first, with a [`Hello`], and then sends reports; the VMM answers with [`VmmMessage`]s
//! when it wants the agent to do something else.
//!
//! Each side treats what it reads as untrusted: [`LineReader`] bounds a line's length,
//! [`decode_agent_message`] and [`decode_vmm_message`] bound its shape, and [`Report`] and
//! [`Hello`] exist only with every value inside its bound. Fields that a reader does not know are
//! skipped, so that either side may be the newer one; a change that an older reader would
//! misunderstand raises [`PROTOCOL_VERSION`].
//!
//! Sizes are in bytes or pages as the name says; durations in the unit that the name ends in;
//! counters are totals since the guest booted.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod boot_memory;
mod demotion;
mod kernel_blocks;
mod kernel_memory;
mod line;
mod pace;
mod refusal;
mod reserve;
mod scale;
mod verify;
mod wire;

pub use boot_memory::{BootMemory, LOW_BOOT_BYTES};
pub use demotion::full_pm_pages;
pub use kernel_blocks::{
    CONVERSION_MS, KernelBlockGrowth, KernelBlockPace, OFFLINE_LIMIT_MS, short_node,
};
pub use kernel_memory::{KernelGrowth, KernelMemory, ZoneGrowth};
pub use line::{LineReader, NextLine};
pub use pace::Pace;
pub use refusal::{Bound, Refusal};
pub use reserve::{
    KERNEL_ZONES, LINUX_RESERVE_RATIOS, NodeMemory, descriptor_bytes, kept_bytes, kept_pages,
    kernel_reserve_bytes, reserve_ratios,
};
pub use scale::scale;
pub use verify::{AgentMessage, Hello, Report};
pub use wire::{
    Blocks, Cause, Counters, KernelUse, Measure, Memory, NodeBlocks, NodeIdle, OnlinePolicy,
    RawAgentMessage, RawHello, RawReport, Settings, Stall, VmmMessage, Zone, ZoneKind,
    decode_agent_message, decode_vmm_message, encode_line, encode_report,
};

/// The vsock port on which the VMM listens for the agent.
pub const VSOCK_PORT: u32 = 9746;

/// The version of the protocol that this crate speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// Page size in which zones are counted. All guests are x86-64.
const PAGE_BYTES: u64 = 4096;

/// The size of the largest blocks in which Linux' page allocator keeps free memory on x86-64 (order
/// 10).
pub const LARGEST_BLOCK_BYTES: u64 = 4 << 20;

/// The longest line that a reader accepts, without its newline. A report of 64 nodes needs about
/// half of it.
pub const MAX_LINE_BYTES: usize = 64 * 1024;
