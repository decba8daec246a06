//! Tables of finite state entropy codes (RFC 8878, section 4.1).

use super::ZstdError;
use super::bits::ForwardBits;
use crate::budget::{Budget, OverBudget};

/// Upper limit of the number of symbols: weights of Huffman codes are at most 255.
const MAX_SYMBOLS: usize = 256;
/// Number of states of the largest table.
pub(super) const MAX_STATES: usize = 1 << 9;

/// Decoded symbol and transition of a state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State {
    pub(super) symbol: u8,
    /// Number of bits to read for the next state.
    pub(super) bits: u8,
    /// Next state, if these bits are 0.
    pub(super) next: u16,
}

/// Probabilities of symbols, in units of 1/2^`log`. A probability of -1 is below one unit.
pub(super) struct Distribution {
    probabilities: [i16; MAX_SYMBOLS],
    len: usize,
    log: u32,
}

impl Distribution {
    pub(super) fn new(given: &[i16], log: u32) -> Self {
        let mut probabilities = [0; MAX_SYMBOLS];
        probabilities[..given.len()].copy_from_slice(given);
        Self { probabilities, len: given.len(), log }
    }

    /// Parses the description of a table, and returns the bytes after it.
    pub(super) fn parse(
        data: &[u8],
        max_log: u32,
        max_symbol: u8,
    ) -> Result<(Self, &[u8]), ZstdError> {
        let mut bits = ForwardBits::new(data);
        let log = bits.read(4) + 5;
        if log > max_log {
            return Err(ZstdError::TableLog { log, max_log });
        }
        let mut distribution = Self::new(&[], log);
        let mut left = 1i32 << log;
        while left > 0 {
            let probability = read_probability(&mut bits, left as u32 + 1);
            left -= probability.abs();
            distribution.push(probability as i16, max_symbol)?;
            if probability == 0 {
                loop {
                    let zeros = bits.read(2);
                    for _ in 0..zeros {
                        distribution.push(0, max_symbol)?;
                    }
                    if zeros != 3 {
                        break;
                    }
                }
            }
        }
        Ok((distribution, bits.rest()?))
    }

    fn push(&mut self, probability: i16, max_symbol: u8) -> Result<(), ZstdError> {
        if self.len > usize::from(max_symbol) {
            return Err(ZstdError::Symbols { max_symbol });
        }
        self.probabilities[self.len] = probability;
        self.len += 1;
        Ok(())
    }

    pub(super) fn log(&self) -> u32 {
        self.log
    }

    /// Distributes the states over the symbols.
    pub(super) fn states(&self, budget: &mut Budget) -> Result<[State; MAX_STATES], OverBudget> {
        budget.spend(MAX_STATES as u64)?;
        let mut states = [State::default(); MAX_STATES];
        let size = 1usize << self.log;
        let probabilities = &self.probabilities[..self.len];
        let mut high = size;
        for (symbol, _) in probabilities.iter().enumerate().filter(|(_, value)| **value == -1) {
            high -= 1;
            states[high].symbol = symbol as u8;
        }
        let (step, mut at) = ((size >> 1) + (size >> 3) + 3, 0);
        for (symbol, &probability) in probabilities.iter().enumerate() {
            for _ in 0..probability {
                states[at].symbol = symbol as u8;
                at = (at + step) & (size - 1);
                while at >= high {
                    at = (at + step) & (size - 1);
                }
            }
        }
        let mut counts = self.probabilities.map(i16::unsigned_abs);
        for state in &mut states[..size] {
            let count = &mut counts[usize::from(state.symbol)];
            let bits = self.log - count.ilog2();
            state.bits = bits as u8;
            state.next = (*count << bits) - size as u16;
            *count += 1;
        }
        Ok(states)
    }
}

/// Reads a probability below `values`, or -1. Lower values need one bit less.
fn read_probability(bits: &mut ForwardBits, values: u32) -> i32 {
    let count = values.ilog2() + 1;
    let (low_mask, spare) = ((1 << (count - 1)) - 1, (1 << count) - 1 - values);
    let bits_read = bits.peek(count);
    let low = bits_read & low_mask;
    let value = if low < spare {
        bits.skip(count - 1);
        low
    } else {
        bits.skip(count);
        if bits_read > low_mask { bits_read - spare } else { bits_read }
    };
    value as i32 - 1
}
