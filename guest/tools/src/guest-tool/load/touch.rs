//! Load that fills memory with incompressible data and then touches random pages.

use anyhow::{Result, ensure};
use guest_tools::content::Bytes;

use super::{MIB, Phases, mixed};

const PAGE_WORDS: usize = 4096 / 8;
const TOUCHES: u64 = 60_000;

/// Runs the phases `fill` and `touch`.
pub(super) fn run(mib: u64, phases: &mut Phases) -> Result<u64> {
    let pages = mib * MIB / 4096;
    let mut memory = vec![0u64; pages as usize * PAGE_WORDS];
    phases.begin();
    let mut words = Bytes::new(1);
    for (number, page) in memory.chunks_exact_mut(PAGE_WORDS).enumerate() {
        page.fill_with(|| words.next_u64());
        page[0] = number as u64;
    }
    phases.end("fill");
    let mut places = Bytes::new(2);
    let mut sum = 0;
    for touch in 0..TOUCHES {
        let number = places.below(pages);
        let page = &mut memory[number as usize * PAGE_WORDS..][..PAGE_WORDS];
        ensure!(page[0] == number, "Page {number} contains the number {}", page[0]);
        sum = mixed(sum, page[1]);
        page[1] = touch;
    }
    phases.end("touch");
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_is_reproducible() {
        assert_eq!(run(4, &mut Phases::new()).unwrap(), run(4, &mut Phases::new()).unwrap());
    }
}
