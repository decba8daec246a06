//! Sequences of a block: copies of literals and of earlier output (RFC 8878, section 3.1.1.3.2).

use super::bits::BackwardBits;
use super::fse::{Distribution, MAX_STATES};
use super::output::Output;
use super::{MAX_BLOCK_BYTES, ZstdError};
use crate::budget::{Budget, OverBudget};

const LITERAL_LENGTHS: Alphabet = Alphabet {
    max_log: 9,
    max_symbol: 35,
    default: &[
        4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1,
        1, 1, -1, -1, -1, -1,
    ],
    default_log: 6,
    value: |symbol| {
        const RANGES: [(u32, u8); 20] = [
            (16, 1),
            (18, 1),
            (20, 1),
            (22, 1),
            (24, 2),
            (28, 2),
            (32, 3),
            (40, 3),
            (48, 4),
            (64, 6),
            (128, 7),
            (256, 8),
            (512, 9),
            (1024, 10),
            (2048, 11),
            (4096, 12),
            (8192, 13),
            (16_384, 14),
            (32_768, 15),
            (65_536, 16),
        ];
        match symbol.checked_sub(16) {
            None => (u32::from(symbol), 0),
            Some(nth) => RANGES[usize::from(nth)],
        }
    },
};
const MATCH_LENGTHS: Alphabet = Alphabet {
    max_log: 9,
    max_symbol: 52,
    default: &[
        1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1,
    ],
    default_log: 6,
    value: |symbol| {
        const RANGES: [(u32, u8); 21] = [
            (35, 1),
            (37, 1),
            (39, 1),
            (41, 1),
            (43, 2),
            (47, 2),
            (51, 3),
            (59, 3),
            (67, 4),
            (83, 4),
            (99, 5),
            (131, 7),
            (259, 8),
            (515, 9),
            (1027, 10),
            (2051, 11),
            (4099, 12),
            (8195, 13),
            (16_387, 14),
            (32_771, 15),
            (65_539, 16),
        ];
        match symbol.checked_sub(32) {
            None => (u32::from(symbol) + 3, 0),
            Some(nth) => RANGES[usize::from(nth)],
        }
    },
};
const OFFSETS: Alphabet = Alphabet {
    max_log: 8,
    max_symbol: 31,
    default: &[
        1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1,
    ],
    default_log: 5,
    value: |symbol| (1 << symbol, symbol),
};

/// Symbols of a kind of value.
struct Alphabet {
    max_log: u32,
    max_symbol: u8,
    /// Probabilities of the predefined table.
    default: &'static [i16],
    default_log: u32,
    /// Base value of a symbol, and the number of extra bits that are added to it.
    value: fn(u8) -> (u32, u8),
}

/// State of a table with the value of its symbol.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    base: u32,
    /// Next state, if the bits for it are 0.
    next: u16,
    extra_bits: u8,
    state_bits: u8,
}

/// Entries of a table for a kind of value.
struct Table {
    entries: Box<[Entry; MAX_STATES]>,
    log: u8,
}

impl Table {
    fn new() -> Self {
        Self { entries: Box::new([Entry::default(); MAX_STATES]), log: 0 }
    }

    fn fill(
        &mut self,
        distribution: &Distribution,
        alphabet: &Alphabet,
        budget: &mut Budget,
    ) -> Result<(), OverBudget> {
        let states = distribution.states(budget)?;
        self.log = distribution.log() as u8;
        for (entry, state) in self.entries.iter_mut().zip(&states[..1 << self.log]) {
            let (base, extra_bits) = (alphabet.value)(state.symbol);
            *entry = Entry { base, extra_bits, next: state.next, state_bits: state.bits };
        }
        Ok(())
    }

    #[inline(always)]
    fn at(&self, state: usize) -> Entry {
        self.entries[state % MAX_STATES]
    }
}

/// Table that a block uses.
#[derive(Clone, Copy)]
enum Selected {
    Predefined,
    /// Table that this block or an earlier one describes.
    Described,
}

/// Tables of a kind of value, which later blocks may use again.
struct Tables {
    alphabet: Alphabet,
    predefined: Table,
    described: Table,
    selected: Option<Selected>,
}

impl Tables {
    fn new(alphabet: Alphabet, budget: &mut Budget) -> Result<Self, OverBudget> {
        let mut predefined = Table::new();
        let distribution = Distribution::new(alphabet.default, alphabet.default_log);
        predefined.fill(&distribution, &alphabet, budget)?;
        Ok(Self { alphabet, predefined, described: Table::new(), selected: None })
    }

    /// Reads the table that `mode` selects, and returns the rest of the block.
    fn read<'a>(
        &mut self,
        mode: u8,
        block: &'a [u8],
        budget: &mut Budget,
    ) -> Result<&'a [u8], ZstdError> {
        let Self { alphabet, described, selected, .. } = self;
        match mode & 3 {
            0 => {
                *selected = Some(Selected::Predefined);
                Ok(block)
            }
            1 => {
                let (&symbol, rest) = block.split_first().ok_or(ZstdError::Truncated)?;
                if symbol > alphabet.max_symbol {
                    return Err(ZstdError::Symbols { max_symbol: alphabet.max_symbol });
                }
                let (base, extra_bits) = (alphabet.value)(symbol);
                described.entries[0] = Entry { base, extra_bits, next: 0, state_bits: 0 };
                described.log = 0;
                *selected = Some(Selected::Described);
                Ok(rest)
            }
            2 => {
                let (distribution, rest) =
                    Distribution::parse(block, alphabet.max_log, alphabet.max_symbol)?;
                described.fill(&distribution, alphabet, budget)?;
                *selected = Some(Selected::Described);
                Ok(rest)
            }
            _ if selected.is_some() => Ok(block),
            _ => Err(ZstdError::NothingToRepeat),
        }
    }

    /// Table of the current block.
    fn selected(&self) -> &Table {
        match self.selected {
            Some(Selected::Described) => &self.described,
            Some(Selected::Predefined) | None => &self.predefined,
        }
    }
}

/// Tables and offsets that carry over from one block to the next.
pub(super) struct Sequences {
    literal_lengths: Tables,
    offsets: Tables,
    match_lengths: Tables,
    /// The last three offsets.
    recent: [u32; 3],
}

impl Sequences {
    pub(super) fn new(budget: &mut Budget) -> Result<Self, OverBudget> {
        Ok(Self {
            literal_lengths: Tables::new(LITERAL_LENGTHS, budget)?,
            offsets: Tables::new(OFFSETS, budget)?,
            match_lengths: Tables::new(MATCH_LENGTHS, budget)?,
            recent: [1, 4, 8],
        })
    }

    /// Decodes the sequences in `data`, and carries them out. The first `literal_bytes` of
    /// `literals` are the block's literals.
    pub(super) fn carry_out(
        &mut self,
        data: &[u8],
        literals: &[u8],
        literal_bytes: usize,
        output: &mut Output,
        budget: &mut Budget,
    ) -> Result<(), ZstdError> {
        let (count, data) = read_count(data)?;
        let mut next_literal = 0;
        if count > 0 {
            let bits = self.read_tables(data, budget)?;
            next_literal = self.run(count, bits, literals, literal_bytes, output)?;
        } else if !data.is_empty() {
            return Err(ZstdError::TrailingBytes { bytes: data.len() });
        }
        output.push(&literals[next_literal..literal_bytes])
    }

    fn read_tables<'a>(
        &mut self,
        data: &'a [u8],
        budget: &mut Budget,
    ) -> Result<BackwardBits<'a>, ZstdError> {
        let (&modes, data) = data.split_first().ok_or(ZstdError::Truncated)?;
        if modes & 3 != 0 {
            return Err(ZstdError::Reserved);
        }
        let data = self.literal_lengths.read(modes >> 6, data, budget)?;
        let data = self.offsets.read(modes >> 4, data, budget)?;
        let data = self.match_lengths.read(modes >> 2, data, budget)?;
        BackwardBits::new(data)
    }

    /// Carries out `count` sequences. Returns the number of literals that they have used.
    fn run(
        &mut self,
        count: usize,
        mut bits: BackwardBits,
        literals: &[u8],
        literal_bytes: usize,
        output: &mut Output,
    ) -> Result<usize, ZstdError> {
        /// Bits for the next three states.
        const STATE_BITS: u32 = 9 + 9 + 8;
        let start = output.len();
        let mut next_literal = 0;
        let [literal_lengths, offsets, match_lengths] =
            [&self.literal_lengths, &self.offsets, &self.match_lengths].map(Tables::selected);
        let mut literal_state = bits.read(literal_lengths.log) as usize;
        let mut offset_state = bits.read(offsets.log) as usize;
        let mut match_state = bits.read(match_lengths.log) as usize;
        let mut recent = self.recent;
        for left in (0..count).rev() {
            let literal = literal_lengths.at(literal_state);
            let offset = offsets.at(offset_state);
            let matched = match_lengths.at(match_state);
            bits.refill();
            let value = offset.base.wrapping_add(bits.read(offset.extra_bits) as u32);
            let extra_bits = u32::from(offset.extra_bits)
                + u32::from(matched.extra_bits)
                + u32::from(literal.extra_bits);
            let is_long = extra_bits + STATE_BITS > BackwardBits::REFILLED;
            if is_long {
                bits.refill();
            }
            let match_len = matched.base as usize + bits.read(matched.extra_bits) as usize;
            let literal_len = literal.base as usize + bits.read(literal.extra_bits) as usize;
            if is_long {
                bits.refill();
            }
            if left > 0 {
                literal_state = usize::from(literal.next) + bits.read(literal.state_bits) as usize;
                match_state = usize::from(matched.next) + bits.read(matched.state_bits) as usize;
                offset_state = usize::from(offset.next) + bits.read(offset.state_bits) as usize;
            }
            let distance = distance(&mut recent, value, literal_len);
            let literal_end = next_literal + literal_len;
            if literal_end > literal_bytes {
                return Err(ZstdError::TooFewLiterals { bytes: literal_bytes });
            }
            output.push_with_slack(literals, next_literal, literal_len)?;
            output.repeat(distance as usize, match_len)?;
            next_literal = literal_end;
            // The caller compares the block with its own limit.
            let (bytes, max_bytes) = (output.len() - start, MAX_BLOCK_BYTES);
            if bytes > max_bytes {
                return Err(ZstdError::BlockBytes { bytes, max_bytes });
            }
        }
        self.recent = recent;
        bits.check_end()?;
        Ok(next_literal)
    }
}

/// Converts an offset value to a distance, and updates the recent distances (RFC 8878, section
/// 3.1.1.5). Values up to 3 select a recent distance. A distance of 0 is refused when it is used.
#[inline(always)]
fn distance(recent: &mut [u32; 3], value: u32, literal_len: usize) -> u32 {
    let [first, second, third] = *recent;
    if value > 3 {
        let distance = value - 3;
        *recent = [distance, first, second];
        return distance;
    }
    // Without literals, the last distance cannot occur again, and the values select the next one.
    match value + u32::from(literal_len == 0) {
        0 | 1 => {}
        2 => *recent = [second, first, third],
        3 => *recent = [third, first, second],
        _ => *recent = [first.wrapping_sub(1), first, second],
    }
    recent[0]
}

/// Reads the number of sequences, and returns the rest of the block.
fn read_count(data: &[u8]) -> Result<(usize, &[u8]), ZstdError> {
    match *data {
        [count @ 0..128, ref rest @ ..] => Ok((usize::from(count), rest)),
        [255, low, high, ref rest @ ..] => {
            Ok((0x7f00 + usize::from(u16::from_le_bytes([low, high])), rest))
        }
        [high, low, ref rest @ ..] if (128..255).contains(&high) => {
            Ok((usize::from(high - 128) << 8 | usize::from(low), rest))
        }
        _ => Err(ZstdError::Truncated),
    }
}
