//! Huffman codes of literals (RFC 8878, section 4.2).

use super::ZstdError;
use super::bits::BackwardBits;
use super::fse::Distribution;
use crate::budget::Budget;

/// Maximum length of a code.
const MAX_BITS: u32 = 11;
/// Maximum accuracy of the table for weights.
const MAX_WEIGHTS_LOG: u32 = 6;
/// Number of symbols that can be decoded after one refill.
const SYMBOLS_PER_REFILL: usize = (BackwardBits::REFILLED / MAX_BITS) as usize;

/// Symbol, and the length of its code.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    symbol: u8,
    bits: u8,
}

/// Table with an entry for each possible value of the next [`MAX_BITS`] bits.
pub(super) struct Codes(Box<[Entry; 1 << MAX_BITS]>);

impl Codes {
    /// Parses the description of a tree, and returns the bytes after it.
    pub(super) fn parse<'a>(
        data: &'a [u8],
        budget: &mut Budget,
    ) -> Result<(Self, &'a [u8]), ZstdError> {
        let (&header, data) = data.split_first().ok_or(ZstdError::Truncated)?;
        let mut weights = [0; 256];
        let (count, rest) = match header {
            0..128 => {
                let (data, rest) =
                    data.split_at_checked(usize::from(header)).ok_or(ZstdError::Truncated)?;
                (read_weights(data, &mut weights, budget)?, rest)
            }
            128.. => {
                let count = usize::from(header) - 127;
                let (data, rest) =
                    data.split_at_checked(count.div_ceil(2)).ok_or(ZstdError::Truncated)?;
                for (pair, byte) in weights.chunks_mut(2).zip(data) {
                    pair.copy_from_slice(&[byte >> 4, byte & 15]);
                }
                (count, rest)
            }
        };
        budget.spend(1 << MAX_BITS)?;
        Ok((Self::new(&mut weights, count)?, rest))
    }

    /// Builds the table from the weights of all symbols but the last one. Its weight completes the
    /// sum to a power of two.
    fn new(weights: &mut [u8; 256], count: usize) -> Result<Self, ZstdError> {
        let used =
            |weights: &[u8]| -> u32 { weights.iter().map(|&weight| (1 << weight) >> 1).sum() };
        if let Some(&weight) = weights[..count].iter().find(|weight| u32::from(**weight) > MAX_BITS)
        {
            return Err(ZstdError::Weight { weight });
        }
        let sum = used(&weights[..count]);
        let bits = sum.checked_ilog2().ok_or(ZstdError::Weights { sum })? + 1;
        let left = (1 << bits) - sum;
        if bits > MAX_BITS || !left.is_power_of_two() {
            return Err(ZstdError::Weights { sum });
        }
        // At most 255 weights are given.
        weights[count] = left.ilog2() as u8 + 1;
        let weights = &weights[..=count];
        let mut entries = Box::new([Entry::default(); 1 << MAX_BITS]);
        let mut at = 0;
        for weight in 1..=bits as u8 {
            let entry_count = 1 << (u32::from(weight) - 1 + MAX_BITS - bits);
            for (symbol, _) in weights.iter().enumerate().filter(|(_, other)| **other == weight) {
                let bits = bits as u8 + 1 - weight;
                entries[at..at + entry_count].fill(Entry { symbol: symbol as u8, bits });
                at += entry_count;
            }
        }
        Ok(Self(entries))
    }

    #[inline(always)]
    fn decode(&self, bits: &mut BackwardBits) -> u8 {
        let Entry { symbol, bits: count } = self.0[bits.peek::<MAX_BITS>() as usize];
        bits.skip(u32::from(count));
        symbol
    }

    /// Decodes a stream into the whole of `output`.
    pub(super) fn decode_stream(&self, data: &[u8], output: &mut [u8]) -> Result<(), ZstdError> {
        self.finish(BackwardBits::new(data)?, output)
    }

    /// Decodes four streams of the same length, except that the last one may be shorter. Decoding
    /// them in turn lets the processor work on all of them at once.
    pub(super) fn decode_4_streams(&self, data: &[u8], output: &mut [u8]) -> Result<(), ZstdError> {
        let (lengths, mut data) = data.split_first_chunk::<6>().ok_or(ZstdError::Truncated)?;
        let mut next = |len: usize| {
            let (stream, rest) = data.split_at_checked(len).ok_or(ZstdError::Truncated)?;
            data = rest;
            Ok::<_, ZstdError>(stream)
        };
        let length = |nth: usize| usize::from(u16::from_le_bytes([lengths[nth], lengths[nth + 1]]));
        let streams = [next(length(0))?, next(length(2))?, next(length(4))?];
        let [mut a, mut b, mut c] = [
            BackwardBits::new(streams[0])?,
            BackwardBits::new(streams[1])?,
            BackwardBits::new(streams[2])?,
        ];
        let mut d = BackwardBits::new(data)?;
        let quarter = output.len().div_ceil(4);
        let mut parts = output.chunks_mut(quarter.max(1));
        let mut part = || parts.next().unwrap_or_default();
        let [for_a, for_b, for_c, for_d] = [part(), part(), part(), part()];
        let rounds = for_d.len() / SYMBOLS_PER_REFILL;
        let together = rounds * SYMBOLS_PER_REFILL;
        let chunks = for_a
            .chunks_exact_mut(SYMBOLS_PER_REFILL)
            .zip(for_b.chunks_exact_mut(SYMBOLS_PER_REFILL))
            .zip(for_c.chunks_exact_mut(SYMBOLS_PER_REFILL))
            .zip(for_d.chunks_exact_mut(SYMBOLS_PER_REFILL));
        for (((to_a, to_b), to_c), to_d) in chunks {
            a.refill();
            b.refill();
            c.refill();
            d.refill();
            for nth in 0..SYMBOLS_PER_REFILL {
                to_a[nth] = self.decode(&mut a);
                to_b[nth] = self.decode(&mut b);
                to_c[nth] = self.decode(&mut c);
                to_d[nth] = self.decode(&mut d);
            }
        }
        for (bits, part) in [(a, for_a), (b, for_b), (c, for_c), (d, for_d)] {
            self.finish(bits, &mut part[together..])?;
        }
        Ok(())
    }

    fn finish(&self, mut bits: BackwardBits, output: &mut [u8]) -> Result<(), ZstdError> {
        for chunk in output.chunks_mut(SYMBOLS_PER_REFILL) {
            bits.refill();
            for byte in chunk {
                *byte = self.decode(&mut bits);
            }
        }
        bits.check_end()
    }
}

/// Reads weights that two interleaved states encode. Returns their number.
fn read_weights(
    data: &[u8],
    weights: &mut [u8; 256],
    budget: &mut Budget,
) -> Result<usize, ZstdError> {
    let (distribution, rest) = Distribution::parse(data, MAX_WEIGHTS_LOG, MAX_BITS as u8)?;
    let (states, log) = (distribution.states(budget)?, distribution.log() as u8);
    let mut bits = BackwardBits::new(rest)?;
    let mut pair = [bits.read(log), bits.read(log)];
    if bits.left() < 0 {
        return Err(ZstdError::Truncated);
    }
    let mut count = 0;
    let mut push = |weight: u8| {
        // The last symbol has no weight of its own.
        *weights[..255].get_mut(count).ok_or(ZstdError::TooManyWeights)? = weight;
        count += 1;
        Ok(count)
    };
    loop {
        bits.refill();
        for nth in 0..2 {
            let state = states[pair[nth] as usize];
            push(state.symbol)?;
            if i64::from(state.bits) > bits.left() {
                // All bits have been read. Only the symbol of the other state remains.
                return push(states[pair[1 - nth] as usize].symbol);
            }
            pair[nth] = u64::from(state.next) + bits.read(state.bits);
        }
    }
}
