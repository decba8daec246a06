//! Block Translation Table (UEFI 2.10, chapter 6): sectors that do not tear, on memory that does.
//!
//! A volume is laid out as Linux's nd_btt driver expects a namespace without labels: version 1.1,
//! the first 4 KiB unused, then one or more arenas. In an arena, each sector that the guest sees
//! (pre-map LBA) is mapped to a block (post-map LBA). A write goes to a block that nobody uses; the
//! log (flog) records the exchange; then the map entry changes, by one aligned store. What a crash
//! leaves half done, the log says how to finish.
//!
//! [`Layout`] writes an empty table, [`check()`] proves from the media alone that a table is
//! consistent, [`Reader`] reads sectors of a volume that nobody writes, and [`Engine`] serves one.
//! All work on a [`Media`](crate::media::Media), so that the chunks of a volume may lie anywhere.

mod arena;
mod arena_walk;
mod check;
mod content;
mod engine;
mod extend;
mod flog;
mod layout;
mod reader;
mod repair;
#[cfg(test)]
mod tests;
mod torn_entry;

pub use arena::{ArenaInfo, InfoError, InfoSource};
pub use arena_walk::{Missing, Place, arenas, is_replaced};
pub use check::{ArenaReport, Finding, Report, check, check_with};
pub use content::holds_data;
pub use engine::{ArenaStatus, Engine, EngineError, Fault};
pub use extend::{ExtendError, Extension, extend};
pub use layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, GeometryError, InfoBytes, Layout, MIN_VOLUME_BYTES,
    SECTOR_BYTES, START_BYTES,
};
pub use reader::{Lost, Reader, Sector};
pub use repair::{GiveUp, Mending, Repair, plan_repair};
