//! Literals of a block (RFC 8878, section 3.1.1.3.1).

use super::huffman::Codes;
use super::{MAX_BLOCK_BYTES, ZstdError};
use crate::budget::Budget;

/// Bytes after the literals that a copy of a constant length may read.
pub(super) const SLACK_BYTES: usize = 32;

/// Literals of the current block, and the codes that a later block may use again.
pub(super) struct Literals {
    bytes: Box<[u8; MAX_BLOCK_BYTES + SLACK_BYTES]>,
    codes: Option<Codes>,
}

impl Literals {
    pub(super) fn new() -> Self {
        Self { bytes: Box::new([0; MAX_BLOCK_BYTES + SLACK_BYTES]), codes: None }
    }

    /// Decodes the literals at the start of a block. Returns them with slack bytes after them,
    /// their number, and the rest of the block.
    pub(super) fn decode<'a>(
        &mut self,
        block: &'a [u8],
        budget: &mut Budget,
    ) -> Result<(&[u8], usize, &'a [u8]), ZstdError> {
        let header = Header::parse(block)?;
        let rest = block.get(header.len..).ok_or(ZstdError::Truncated)?;
        let literals = self
            .bytes
            .get_mut(..header.literal_bytes)
            .filter(|literals| literals.len() <= MAX_BLOCK_BYTES);
        let literals =
            literals.ok_or(ZstdError::TooManyLiterals { bytes: header.literal_bytes })?;
        let (data, rest) =
            rest.split_at_checked(header.packed_bytes).ok_or(ZstdError::Truncated)?;
        match header.kind {
            Kind::Raw => literals.copy_from_slice(data),
            Kind::Repeated => literals.fill(*data.first().ok_or(ZstdError::Truncated)?),
            Kind::Packed { is_split, has_codes } => {
                let data = match has_codes {
                    true => {
                        let (codes, data) = Codes::parse(data, budget)?;
                        self.codes = Some(codes);
                        data
                    }
                    false => data,
                };
                let codes = self.codes.as_ref().ok_or(ZstdError::NothingToRepeat)?;
                match is_split {
                    true => codes.decode_4_streams(data, literals)?,
                    false => codes.decode_stream(data, literals)?,
                }
            }
        }
        Ok((&self.bytes[..], header.literal_bytes, rest))
    }
}

enum Kind {
    Raw,
    Repeated,
    Packed { is_split: bool, has_codes: bool },
}

struct Header {
    kind: Kind,
    len: usize,
    literal_bytes: usize,
    packed_bytes: usize,
}

impl Header {
    fn parse(block: &[u8]) -> Result<Self, ZstdError> {
        let first = *block.first().ok_or(ZstdError::Truncated)?;
        let (kind, format) = (first & 3, first >> 2 & 3);
        if kind < 2 {
            let (len, shift) = match format {
                0 | 2 => (1, 3),
                1 => (2, 4),
                _ => (3, 4),
            };
            let literal_bytes = (little_endian(block, len)? >> shift) as usize;
            return Ok(match kind {
                0 => Self { kind: Kind::Raw, len, literal_bytes, packed_bytes: literal_bytes },
                _ => Self { kind: Kind::Repeated, len, literal_bytes, packed_bytes: 1 },
            });
        }
        let (len, bits) = match format {
            0 | 1 => (3, 10),
            2 => (4, 14),
            _ => (5, 18),
        };
        let sizes = little_endian(block, len)? >> 4;
        let mask = (1 << bits) - 1;
        Ok(Self {
            kind: Kind::Packed { is_split: format != 0, has_codes: kind == 2 },
            len,
            literal_bytes: (sizes & mask) as usize,
            packed_bytes: (sizes >> bits & mask) as usize,
        })
    }
}

fn little_endian(data: &[u8], len: usize) -> Result<u64, ZstdError> {
    let bytes = data.get(..len).ok_or(ZstdError::Truncated)?;
    Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}
