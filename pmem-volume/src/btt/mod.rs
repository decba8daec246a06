//! Block Translation Table (UEFI 2.10, chapter 6): sectors that do not tear, on memory that does.
//!
//! A volume has the layout that Linux's nd_btt driver expects from a namespace without labels:
//! version 1.1, the first 4 KiB unused, then one or more arenas. In an arena, each sector that the
//! guest sees (pre-map LBA) is mapped to a block (post-map LBA). A write stores data in a free
//! block, records the exchange in the log (flog), and changes the map entry by one aligned store.
//! After a crash, recovery finishes exchanges from the log.
//!
//! [`Layout`] writes an empty table, and [`check()`] proves from the media alone that a table is
//! consistent. [`Reader`] reads sectors of a volume that is not being written, and [`Engine`]
//! serves a volume. All use [`Media`](crate::media::Media), so that the chunks of a volume may be
//! anywhere.

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
pub use content::{holds_data, usable_bytes};
pub use engine::{ArenaStatus, Engine, EngineError, Fault, Load};
pub use extend::{ExtendError, Extension, extend};
pub use layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, GeometryError, InfoBytes, Layout, MIN_VOLUME_BYTES,
    SECTOR_BYTES, START_BYTES, volume_bytes_for,
};
pub use reader::{Lost, Reader, Sector};
pub use repair::{GiveUp, Mending, Repair, plan_repair};
