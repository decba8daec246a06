//! What the fuzz targets run, for libFuzzer and for `cargo test`.

mod blk;
mod cursor;

pub use blk::{blk_request, blk_request_by};
