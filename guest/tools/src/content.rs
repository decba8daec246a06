//! Random bytes that can be reproduced from a seed and cannot be compressed.

/// xorshift64* generator. It is fast under emulation, and its output differs between blocks.
#[derive(Debug, Clone)]
pub struct Bytes(u64);

impl Bytes {
    pub fn new(seed: u64) -> Self {
        // The state must not be zero, because xorshift would never leave that state. The
        // multiplication separates neighboring seeds.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns the next number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The upper bits are of better quality. Slightly uneven frequencies do not matter here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Fills a buffer whose length is a multiple of 8.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next_u64().to_le_bytes());
        }
    }
}

/// 64-bit FNV-1a hash. It detects wrong data but not forgeries.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_bytes() {
        let mut buffers = [[0u8; 64]; 3];
        for (buffer, seed) in buffers.iter_mut().zip([7, 7, 8]) {
            Bytes::new(seed).fill(buffer);
        }
        assert_eq!(buffers[0], buffers[1]);
        assert_ne!(buffers[0], buffers[2]);
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        // Test vectors of the FNV specification (draft-eastlake-fnv).
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
