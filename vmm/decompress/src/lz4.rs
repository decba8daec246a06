//! LZ4's legacy frame: a magic number, followed by blocks. Each block is preceded by its compressed
//! size, and unpacks to at most 8 MiB. The end of the file ends the frame. Implemented here because
//! lz4_flex supports only the block format.

use lz4_flex::block::{DecompressError, decompress_into};

pub(crate) const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

#[derive(Debug)]
pub(crate) enum Lz4Error {
    Truncated,
    Block(DecompressError),
}

/// Unpacks `stream` into `output` and returns the unpacked size.
pub(crate) fn unpack(stream: &[u8], output: &mut [u8]) -> Result<usize, Lz4Error> {
    let mut input = stream.strip_prefix(&MAGIC).ok_or(Lz4Error::Truncated)?;
    let mut written = 0;
    while !input.is_empty() {
        let (size, rest) = input.split_first_chunk::<4>().ok_or(Lz4Error::Truncated)?;
        // If a build has several images, their frames may be concatenated.
        if *size == MAGIC {
            input = rest;
            continue;
        }
        let size = u32::from_le_bytes(*size) as usize;
        let (block, rest) = rest.split_at_checked(size).ok_or(Lz4Error::Truncated)?;
        written += decompress_into(block, &mut output[written..]).map_err(Lz4Error::Block)?;
        input = rest;
    }
    Ok(written)
}
