//! Protocol between the guest's agent and the VMM.
//!
//! The channel is a vsock stream to the host (CID 2), port [`VSOCK_PORT`]. Both sides write JSON
//! objects, one per line. Every object has a `type` and the protocol `version`. The agent sends a
//! [`Hello`] first, and then reports. The VMM sends [`VmmMessage`]s to change the agent's settings
//! or to request an action.
//!
//! Both sides treat their input as untrusted. [`LineReader`] limits the length of a line, and
//! [`decode_agent_message`] and [`decode_vmm_message`] check its shape. All values in a [`Report`]
//! or [`Hello`] are within their bounds. Readers skip unknown fields, so either side may be newer.
//! A change that older readers would misunderstand requires a higher [`PROTOCOL_VERSION`].
//!
//! Field names end in the unit of a size or a duration. Counters are totals since the guest booted.

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
mod trim;
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
    KERNEL_ZONES, LINUX_RESERVE_RATIOS, NodeMemory, descriptor_bytes, kernel_reserve_bytes,
    reserve_ratios, reserved_bytes, reserved_pages,
};
pub use scale::scale;
pub use trim::{
    MAX_RANGES_PER_LINE, MAX_TRIM_RANGES, TRIM_PORT, TrimAnswer, TrimMessage, decode_trim_answer,
    decode_trim_message,
};
pub use verify::{AgentMessage, Hello, Report};
pub use wire::{
    Blocks, Cause, Counters, KernelUse, Measure, Memory, NodeBlocks, NodeIdle, OnlinePolicy,
    RawAgentMessage, RawHello, RawReport, Settings, Stall, VmmMessage, Zone, ZoneKind,
    decode_agent_message, decode_vmm_message, encode_line, encode_report,
};

/// Vsock port on which the VMM listens for the agent.
pub const VSOCK_PORT: u32 = 9746;

/// OEM ID in the ACPI tables of every VM. The agent uses it to recognize a Foreshore guest.
pub const ACPI_OEM_ID: [u8; 6] = *b"FRSHOR";

/// Protocol version implemented by this crate.
pub const PROTOCOL_VERSION: u32 = 1;

/// Page size in which zones are measured. All guests are x86-64.
const PAGE_BYTES: u64 = 4096;

/// Size of the largest free blocks of Linux' page allocator on x86-64 (order 10).
pub const LARGEST_BLOCK_BYTES: u64 = 4 << 20;

/// Maximum line length that a reader accepts, without the newline. A report of 64 nodes needs about
/// half of it.
pub const MAX_LINE_BYTES: usize = 64 * 1024;
