//! XXH64, the checksum of zstd frames (doc/xxhash_spec.md of the xxHash project).

const PRIMES: [u64; 5] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x27d4_eb2f_1656_67c5,
];
const STRIPE_BYTES: usize = 32;

/// Hash of the bytes that were passed so far, with the seed 0.
pub(super) struct Xxh64 {
    lanes: [u64; 4],
    /// Number of bytes in the lanes, a multiple of a stripe.
    hashed: usize,
}

impl Xxh64 {
    pub(super) fn new() -> Self {
        let [one, two, ..] = PRIMES;
        let lanes = [one.wrapping_add(two), two, 0, one.wrapping_neg()];
        Self { lanes, hashed: 0 }
    }

    /// Adds the whole stripes of `data` that were not added before. `data` contains all bytes from
    /// the first one.
    pub(super) fn add_stripes(&mut self, data: &[u8]) {
        let stripes = data[self.hashed..].chunks_exact(STRIPE_BYTES);
        self.hashed += STRIPE_BYTES * stripes.len();
        for stripe in stripes {
            for (lane, word) in self.lanes.iter_mut().zip(stripe.as_chunks().0) {
                *lane = round(*lane, u64::from_le_bytes(*word));
            }
        }
    }

    /// Hash of `data`.
    pub(super) fn finish(mut self, data: &[u8]) -> u64 {
        self.add_stripes(data);
        let [one, two, three, four, five] = PRIMES;
        let mut hash = match data.len() < STRIPE_BYTES {
            true => five,
            false => {
                let rotated = self.lanes.iter().zip([1, 7, 12, 18]);
                let sum =
                    rotated.map(|(lane, bits)| lane.rotate_left(bits)).fold(0, u64::wrapping_add);
                self.lanes.iter().fold(sum, |hash, lane| {
                    (hash ^ round(0, *lane)).wrapping_mul(one).wrapping_add(four)
                })
            }
        };
        hash = hash.wrapping_add(data.len() as u64);
        let (words, rest) = data[self.hashed..].as_chunks::<8>();
        for word in words {
            hash ^= round(0, u64::from_le_bytes(*word));
            hash = hash.rotate_left(27).wrapping_mul(one).wrapping_add(four);
        }
        let (halves, bytes) = rest.as_chunks::<4>();
        for half in halves {
            hash ^= u64::from(u32::from_le_bytes(*half)).wrapping_mul(one);
            hash = hash.rotate_left(23).wrapping_mul(two).wrapping_add(three);
        }
        for byte in bytes {
            hash ^= u64::from(*byte).wrapping_mul(five);
            hash = hash.rotate_left(11).wrapping_mul(one);
        }
        hash = (hash ^ hash >> 33).wrapping_mul(two);
        hash = (hash ^ hash >> 29).wrapping_mul(three);
        hash ^ hash >> 32
    }
}

fn round(lane: u64, word: u64) -> u64 {
    let [one, two, ..] = PRIMES;
    lane.wrapping_add(word.wrapping_mul(two)).rotate_left(31).wrapping_mul(one)
}
