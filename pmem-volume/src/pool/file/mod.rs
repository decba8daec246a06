//! File or device below a pool: its blocks, and foreign content that no pool may overwrite.

pub(super) mod blocks;
pub mod formats;
pub(super) mod free_space;
pub mod mark;
pub(super) mod open_steps;
pub mod signature;
