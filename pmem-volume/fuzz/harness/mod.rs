//! What the fuzz targets do with a fuzzer's bytes: they become edits of a valid pool or BTT, or its
//! first bytes. The same functions run in the tests (`tests/fuzz.rs`), so that they cannot rot.
//!
//! A target fails by a panic. Whoever finds one puts the input under `fuzz/found/TARGET/`, where
//! the tests try it again.

mod btt;
mod cursor;
mod image;
mod pool;

pub(crate) use btt::{btt_check, btt_engine};
pub(crate) use pool::{pool_open, repair};
