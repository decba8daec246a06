//! Takes memory and keeps it.

use std::thread;

use anyhow::Result;

use guest_tests::content::Bytes;

const MIB: usize = 1 << 20;

/// Fills memory a MiB at a time, says `held N` after each sixteen and at the end, and keeps it until killed.
pub fn hog(mib: u64) -> Result<()> {
    let mut held = Vec::new();
    for index in 0..mib {
        let mut chunk = vec![0u8; MIB];
        // Zeros would shrink to nothing in a compressed swap.
        Bytes::new(index).fill(&mut chunk);
        held.push(chunk);
        if (index + 1) % 16 == 0 || index + 1 == mib {
            println!("held {}", index + 1);
        }
    }
    loop {
        // What is held must stay: the compiler may not free it before its last use.
        std::hint::black_box(&held);
        thread::park();
    }
}
