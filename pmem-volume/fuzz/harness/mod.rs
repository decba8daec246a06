//! Bodies of the fuzz targets. The fuzzer's bytes describe edits of a valid pool or BTT, or replace
//! its first bytes. The tests run the same functions (`tests/fuzz.rs`), so that these remain
//! usable.
//!
//! A target panics if it fails. Add failing inputs to `fuzz/found/TARGET/`. The tests run all
//! inputs in this folder.

mod btt;
mod cursor;
mod image;
mod pool;

pub(crate) use btt::{btt_check, btt_engine};
pub(crate) use pool::{pool_open, repair};
