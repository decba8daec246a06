//! File or device of a pool: its blocks, and detection of other content that a pool must not
//! overwrite.

pub(super) mod blocks;
pub mod formats;
pub(super) mod free_space;
pub mod mark;
pub(super) mod open_steps;
pub mod signature;
