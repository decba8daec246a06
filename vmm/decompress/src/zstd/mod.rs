//! Decoder of zstd (RFC 8878).
//!
//! The decoders on crates.io are slow or contain much unsafe code
//! (docs/design/decisions/0028-decoders.md). This one is neither slow nor unsafe, because it
//! decodes only the form of a kernel: one frame of a known size, without a dictionary. The frame is
//! decoded into one buffer, which is also the window. Apart from that buffer, the decoder uses
//! about 150 KiB.

mod bits;
mod fse;
mod huffman;
mod literals;
mod output;
mod sequences;
mod xxh64;

use thiserror::Error;

use crate::budget::{Budget, OverBudget};
use literals::Literals;
use output::Output;
use sequences::Sequences;
use xxh64::Xxh64;

pub(crate) const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Upper limit of the size of a block (RFC 8878, section 3.1.1.2.4).
const MAX_BLOCK_BYTES: usize = 128 << 10;
/// Upper limit of the window that a frame requests. Linux has the same limit
/// (ZSTD_WINDOWSIZE_MAX in lib/decompress_unzstd.c).
const MAX_WINDOW_BYTES: u64 = 128 << 20;
/// Limit of the entries of tables. A compressor describes a table only if it shortens a block.
/// Debian's kernel 6.12 needs 18 to 25 entries for each KiB at levels 1 to 22, and small files of
/// many kinds need up to 91. Frames with windows below 128 KiB can need more, because a block is
/// no larger than the window. Kernels have larger windows (`zstd22_with_size` in
/// scripts/Makefile.lib).
const TABLE_ENTRIES_PER_KIB: u64 = 512;

#[derive(Debug, Error)]
pub(crate) enum ZstdError {
    #[error("it ends early")]
    Truncated,
    #[error("it does not start with a zstd frame")]
    Magic,
    #[error("a reserved bit or value is used")]
    Reserved,
    #[error("its window of {bytes} bytes exceeds {MAX_WINDOW_BYTES} bytes")]
    Window { bytes: u64 },
    #[error("it requires the dictionary {id:#x}")]
    Dictionary { id: u64 },
    #[error("a block has {bytes} bytes, more than {max_bytes}")]
    BlockBytes { bytes: usize, max_bytes: usize },
    #[error("a block has {bytes} bytes of literals, more than {MAX_BLOCK_BYTES}")]
    TooManyLiterals { bytes: usize },
    #[error("a sequence uses more than the {bytes} literals of its block")]
    TooFewLiterals { bytes: usize },
    #[error("a block repeats a table, and no block before it has one")]
    NothingToRepeat,
    #[error("a table has 2^{log} states, more than 2^{max_log}")]
    TableLog { log: u32, max_log: u32 },
    #[error("a table has symbols above {max_symbol}")]
    Symbols { max_symbol: u8 },
    #[error("a Huffman code has a weight of {weight}")]
    Weight { weight: u8 },
    #[error("the weights of a Huffman code have the sum {sum}")]
    Weights { sum: u32 },
    #[error("a Huffman code has more than 256 symbols")]
    TooManyWeights,
    #[error("a bit stream has no end mark")]
    NoEndMark,
    #[error("a bit stream has {left_bits} bits left after its last symbol")]
    BitsLeft {
        /// Negative if the stream ends before its last symbol.
        left_bits: i64,
    },
    #[error("a match starts {distance} bytes back in {output_bytes} bytes of output")]
    Distance { distance: usize, output_bytes: usize },
    #[error("the output exceeds {bytes} bytes")]
    OutputFull { bytes: usize },
    #[error("it has {actual_bytes} bytes unpacked, and its header has {claimed_bytes}")]
    ContentSize { claimed_bytes: u64, actual_bytes: usize },
    #[error("its checksum is {actual:#010x}, and {expected:#010x} in the frame")]
    Checksum { expected: u32, actual: u32 },
    #[error("{bytes} bytes follow its end")]
    TrailingBytes { bytes: usize },
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}

/// Unpacks the frame in `stream` into `output`, and returns the unpacked size.
pub(crate) fn unpack(stream: &[u8], output: &mut [u8]) -> Result<usize, ZstdError> {
    unpack_within(stream, output, &mut budget(stream, output))
}

fn budget(stream: &[u8], output: &[u8]) -> Budget {
    Budget::new("table entries", TABLE_ENTRIES_PER_KIB, stream.len(), output.len())
}

fn unpack_within(
    stream: &[u8],
    output: &mut [u8],
    budget: &mut Budget,
) -> Result<usize, ZstdError> {
    let (header, mut input) = FrameHeader::parse(stream)?;
    let (mut literals, mut sequences) = (Literals::new(), Sequences::new(budget)?);
    let mut output = Output::new(output);
    let mut hash = Xxh64::new();
    loop {
        let (block, rest) = Block::parse(input, header.max_block_bytes)?;
        input = rest;
        match block.content {
            Content::Raw(data) => output.push(data)?,
            Content::Repeated { byte, len } => output.fill(byte, len)?,
            Content::Packed(data) => {
                let start = output.len();
                let (literals, literal_bytes, data) = literals.decode(data, budget)?;
                sequences.carry_out(data, literals, literal_bytes, &mut output, budget)?;
                let bytes = output.len() - start;
                let max_bytes = header.max_block_bytes;
                if bytes > max_bytes {
                    return Err(ZstdError::BlockBytes { bytes, max_bytes });
                }
            }
        }
        if header.has_checksum {
            // Hashed now, because this block is still in the processor's cache.
            hash.add_stripes(output.written());
        }
        if block.is_last {
            break;
        }
    }
    if let Some(claimed_bytes) = header.content_bytes
        && claimed_bytes != output.len() as u64
    {
        return Err(ZstdError::ContentSize { claimed_bytes, actual_bytes: output.len() });
    }
    if header.has_checksum {
        let (expected, rest) = input.split_first_chunk().ok_or(ZstdError::Truncated)?;
        let expected = u32::from_le_bytes(*expected);
        // The frame has the lower half.
        let actual = hash.finish(output.written()) as u32;
        if actual != expected {
            return Err(ZstdError::Checksum { expected, actual });
        }
        input = rest;
    }
    match input.len() {
        0 => Ok(output.len()),
        bytes => Err(ZstdError::TrailingBytes { bytes }),
    }
}

/// Header of a frame (RFC 8878, section 3.1.1.1).
struct FrameHeader {
    content_bytes: Option<u64>,
    /// The window, but at most [`MAX_BLOCK_BYTES`] (RFC 8878, section 3.1.1.2.4).
    max_block_bytes: usize,
    has_checksum: bool,
}

impl FrameHeader {
    /// Parses the header, and returns the bytes after it.
    fn parse(stream: &[u8]) -> Result<(Self, &[u8]), ZstdError> {
        let stream = stream.strip_prefix(&MAGIC).ok_or(ZstdError::Magic)?;
        let (&descriptor, mut rest) = stream.split_first().ok_or(ZstdError::Truncated)?;
        if descriptor & 8 != 0 {
            return Err(ZstdError::Reserved);
        }
        let is_single_segment = descriptor & 0x20 != 0;
        let mut window_bytes = None;
        if !is_single_segment {
            let window = take_number(&mut rest, 1)?;
            let base = 1u64 << (10 + (window >> 3));
            let bytes = base + base / 8 * (window & 7);
            if bytes > MAX_WINDOW_BYTES {
                return Err(ZstdError::Window { bytes });
            }
            window_bytes = Some(bytes);
        }
        match take_number(&mut rest, [0, 1, 2, 4][usize::from(descriptor & 3)])? {
            0 => {}
            id => return Err(ZstdError::Dictionary { id }),
        }
        let content_bytes = match descriptor >> 6 {
            0 if !is_single_segment => None,
            0 => Some(take_number(&mut rest, 1)?),
            1 => Some(take_number(&mut rest, 2)? + 256),
            2 => Some(take_number(&mut rest, 4)?),
            _ => Some(take_number(&mut rest, 8)?),
        };
        // The window of a single segment is its content.
        let window_bytes = window_bytes.or(content_bytes).unwrap_or(u64::MAX);
        let max_block_bytes =
            MAX_BLOCK_BYTES.min(usize::try_from(window_bytes).unwrap_or(usize::MAX));
        Ok((Self { content_bytes, max_block_bytes, has_checksum: descriptor & 4 != 0 }, rest))
    }
}

struct Block<'a> {
    is_last: bool,
    content: Content<'a>,
}

enum Content<'a> {
    Raw(&'a [u8]),
    Repeated { byte: u8, len: usize },
    Packed(&'a [u8]),
}

impl<'a> Block<'a> {
    /// Parses a block (RFC 8878, section 3.1.1.2), and returns the bytes after it.
    fn parse(mut input: &'a [u8], max_bytes: usize) -> Result<(Self, &'a [u8]), ZstdError> {
        let header = take_number(&mut input, 3)?;
        let (kind, bytes) = (header >> 1 & 3, (header >> 3) as usize);
        if bytes > max_bytes {
            return Err(ZstdError::BlockBytes { bytes, max_bytes });
        }
        let data_bytes = if kind == 1 { 1 } else { bytes };
        let (data, rest) = input.split_at_checked(data_bytes).ok_or(ZstdError::Truncated)?;
        let content = match kind {
            0 => Content::Raw(data),
            1 => Content::Repeated { byte: data[0], len: bytes },
            2 => Content::Packed(data),
            _ => return Err(ZstdError::Reserved),
        };
        Ok((Self { is_last: header & 1 != 0, content }, rest))
    }
}

/// Takes a number of `len` bytes, the least significant one first.
fn take_number(input: &mut &[u8], len: usize) -> Result<u64, ZstdError> {
    let (bytes, rest) = input.split_at_checked(len).ok_or(ZstdError::Truncated)?;
    *input = rest;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests;
