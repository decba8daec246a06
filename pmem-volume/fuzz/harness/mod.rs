//! Bodies of the fuzz targets. A fuzzer's bytes are edits of a valid pool or BTT, or its first
//! bytes. The same functions run in the tests (`tests/fuzz.rs`), so that they stay usable.
//!
//! A target fails by a panic. Put failing inputs into `fuzz/found/TARGET/`, where the tests run
//! them again.

mod btt;
mod cursor;
mod image;
mod pool;

pub(crate) use btt::{btt_check, btt_engine};
pub(crate) use pool::{pool_open, repair};
