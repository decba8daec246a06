//! Seeded inputs for running fuzz targets without a fuzzer.

use std::path::Path;

/// xorshift64*.
pub(crate) struct Random(pub u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    /// Returns an input. Most have few edits, because a pool with many edits does not open.
    pub(crate) fn input(&mut self) -> Vec<u8> {
        let length = 1 << self.below(8);
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

/// Runs inputs with typical lengths of fuzzer inputs, then mutations of inputs, and then inputs
/// that the fuzzer of the crate has found.
pub(crate) fn try_all(target: &str, run: fn(&[u8]), inputs: u64) {
    let mut random = Random(0x5eed_0000 + inputs);
    let mut failing = FailingInput { target, input: vec![] };
    for _ in 0..inputs / 2 {
        failing.input = random.input();
        run(&failing.input);
        let at = random.below(failing.input.len() as u64) as usize;
        failing.input[at] ^= 1 << random.below(8);
        run(&failing.input);
    }
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/found").join(target);
    for entry in std::fs::read_dir(found).into_iter().flatten() {
        failing.input = std::fs::read(entry.unwrap().path()).unwrap();
        run(&failing.input);
    }
}

/// Prints the input if the target panics, so that it can be added to fuzz/found.
struct FailingInput<'a> {
    target: &'a str,
    input: Vec<u8>,
}

impl Drop for FailingInput<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} panics with {:02x?}", self.target, self.input);
        }
    }
}
