//! Borrows memory from a pool, fills it, and holds it until killed, like a VMM that is killed.
//!
//! `pool-hold POOL BYTES` prints `held` once it holds the memory.

#![forbid(unsafe_code)]

use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use guest_tests::lent_memory::LentMemory;
use pmem_volume::{OpenMode, Pool};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, bytes] = arguments.as_slice() else { anyhow::bail!("usage: pool-hold POOL BYTES") };
    let bytes = bytes.parse().with_context(|| format!("Not a number: {bytes:?}"))?;
    let pool = Pool::open(Path::new(path), OpenMode::ReadWrite)?;
    let mut lent = LentMemory::take(&pool, bytes)?;
    lent.fill()?;
    println!("held");
    loop {
        thread::park();
    }
}
