//! Block Translation Table (UEFI 2.10, chapter 6), which provides atomic sectors on memory that can
//! tear larger writes.
//!
//! A volume has the layout that the Linux driver nd_btt expects from a namespace without labels.
//! The version is 1.1, and the first 4 KiB are unused. One or more arenas follow. In an arena, each
//! sector that the guest sees (pre-map LBA) is mapped to a block (post-map LBA). A write stores
//! data in a free block, records the exchange in the log (flog), and changes the map entry with a
//! single aligned store. After a crash, recovery completes the exchanges in the log.
//!
//! [`Layout`] writes an empty BTT, and [`check()`] verifies that a BTT is consistent, based only on
//! the media. [`Reader`] reads sectors of a volume that is not being written, and [`Engine`] serves
//! a volume. All use [`Media`](crate::media::Media), so that the chunks of a volume may be
//! anywhere.

mod arena;
mod arena_walk;
mod check;
mod content;
mod engine;
mod error;
mod extend;
mod flog;
mod free_report;
mod layout;
mod map_reader;
mod reader;
mod reduce;
mod repair;
#[cfg(test)]
mod tests;
mod torn_entry;

pub use arena::{ArenaInfo, InfoError, InfoSource};
pub use arena_walk::{ArenaResult, MissingArena, arenas, is_replaced};
pub use check::{ArenaReport, Finding, Report, check, check_with};
pub use content::{holds_data, live_bytes, usable_bytes};
pub use engine::{ArenaStatus, BulkLoad, Engine, Fault};
pub use error::BttError;
pub use extend::{Extension, extend};
pub use free_report::{GuestAccess, release_reported};
pub use layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, InfoBytes, Layout, MIN_VOLUME_BYTES, SECTOR_BYTES,
    START_BYTES, volume_bytes_for,
};
pub use reader::{ReadFailure, Reader, Sector};
pub use reduce::reduce;
pub use repair::{Fix, GiveUp, Repair, plan_repair};
