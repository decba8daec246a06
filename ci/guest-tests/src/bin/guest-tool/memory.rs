//! Takes memory and keeps it.

use std::thread;
use std::time::Duration;

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

/// Holds that much memory, and reads every page of it several times a second until killed. Says `touching` once it does.
pub fn touch(mib: u64) -> Result<()> {
    const PAGE: usize = 4096;
    let held = vec![1u8; usize::try_from(mib)? * MIB];
    println!("touching");
    loop {
        let sum =
            held.iter().step_by(PAGE).fold(0u64, |sum, byte| sum + u64::from(*std::hint::black_box(byte)));
        std::hint::black_box(sum);
        thread::sleep(Duration::from_millis(200));
    }
}
