//! Decoder of gzip files (RFC 1952) with one member.

use miniz_oxide::inflate::TINFLStatus as Status;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use thiserror::Error;

use crate::budget::{Budget, OverBudget};

/// Limit of the blocks. miniz_oxide builds tables for each, which takes about 3 µs. `gzip -9` ends
/// a block after 8 KiB of output or more (gzip's trees.c, `ct_tally`), and `pigz -R` after about
/// 4 KiB. `gzip --rsyncable` makes the smallest blocks: in pages of zeros, two blocks end with each
/// match of 258 bytes, so there are 7.9 blocks for each KiB of output.
const BLOCKS_PER_KIB: u64 = 8;
const HEADER_BYTES: usize = 10;

/// Flags of the header (RFC 1952, section 2.3.1).
mod flag {
    pub(super) const HEADER_CHECKSUM: u8 = 2;
    pub(super) const EXTRA: u8 = 4;
    pub(super) const NAME: u8 = 8;
    pub(super) const COMMENT: u8 = 16;
    pub(super) const RESERVED: u8 = 0xe0;
}

#[derive(Debug, Error)]
pub(crate) enum GzipError {
    #[error("it ends early")]
    Truncated,
    #[error("it does not start with a gzip header")]
    Header,
    #[error("its header uses reserved flags ({flags:#04x})")]
    Reserved { flags: u8 },
    #[error("the checksum of its header is {actual:#06x}, but the file has {expected:#06x}")]
    HeaderChecksum { expected: u16, actual: u16 },
    #[error("its deflate stream is invalid after {output_bytes} bytes of output")]
    Deflate { output_bytes: usize },
    #[error("the output exceeds {bytes} bytes")]
    OutputFull { bytes: usize },
    #[error("its checksum is {actual:#010x}, but the file has {expected:#010x}")]
    Checksum { expected: u32, actual: u32 },
    #[error("{bytes} bytes follow its end")]
    TrailingBytes { bytes: usize },
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}

/// Unpacks `file` into `output`, and returns the unpacked size. The caller compares it with the
/// size at the end of the file.
pub(crate) fn unpack(file: &[u8], output: &mut [u8]) -> Result<usize, GzipError> {
    unpack_within(file, output, &mut budget(file, output))
}

fn budget(file: &[u8], output: &[u8]) -> Budget {
    Budget::new("blocks", BLOCKS_PER_KIB, file.len(), output.len())
}

fn unpack_within(file: &[u8], output: &mut [u8], budget: &mut Budget) -> Result<usize, GzipError> {
    let (output_bytes, rest) = inflate(skip_header(file)?, output, budget)?;
    let (expected, rest) = rest.split_first_chunk().ok_or(GzipError::Truncated)?;
    let (_size, rest) = rest.split_first_chunk::<4>().ok_or(GzipError::Truncated)?;
    let expected = u32::from_le_bytes(*expected);
    let actual = crc32fast::hash(&output[..output_bytes]);
    match rest.len() {
        0 if actual == expected => Ok(output_bytes),
        0 => Err(GzipError::Checksum { expected, actual }),
        bytes => Err(GzipError::TrailingBytes { bytes }),
    }
}

/// Unpacks a deflate stream. Returns the unpacked size and the bytes after the stream.
fn inflate<'a>(
    mut input: &'a [u8],
    output: &mut [u8],
    budget: &mut Budget,
) -> Result<(usize, &'a [u8]), GzipError> {
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY;
    let mut decoder = Box::<DecompressorOxide>::default();
    let mut output_bytes = 0;
    loop {
        budget.spend(1)?;
        let (status, read, written) = decompress(&mut decoder, input, output, output_bytes, flags);
        input = &input[read..];
        output_bytes += written;
        match status {
            Status::BlockBoundary => {}
            Status::Done => return Ok((output_bytes, input)),
            Status::HasMoreOutput => return Err(GzipError::OutputFull { bytes: output.len() }),
            Status::FailedCannotMakeProgress => return Err(GzipError::Truncated),
            _ => return Err(GzipError::Deflate { output_bytes }),
        }
    }
}

/// Returns the bytes after the header.
fn skip_header(file: &[u8]) -> Result<&[u8], GzipError> {
    let (header, mut rest) =
        file.split_first_chunk::<HEADER_BYTES>().ok_or(GzipError::Truncated)?;
    let [0x1f, 0x8b, 8, flags, ..] = *header else { return Err(GzipError::Header) };
    if flags & flag::RESERVED != 0 {
        return Err(GzipError::Reserved { flags });
    }
    if flags & flag::EXTRA != 0 {
        let (len, after) = rest.split_first_chunk().ok_or(GzipError::Truncated)?;
        let len = usize::from(u16::from_le_bytes(*len));
        rest = after.get(len..).ok_or(GzipError::Truncated)?;
    }
    for text in [flag::NAME, flag::COMMENT] {
        if flags & text != 0 {
            let end = rest.iter().position(|byte| *byte == 0).ok_or(GzipError::Truncated)?;
            rest = &rest[end + 1..];
        }
    }
    if flags & flag::HEADER_CHECKSUM != 0 {
        let (expected, after) = rest.split_first_chunk().ok_or(GzipError::Truncated)?;
        let expected = u16::from_le_bytes(*expected);
        // The header's checksum is the lower 16 bits of its CRC-32 (RFC 1952, section 2.3.1).
        let actual = crc32fast::hash(&file[..file.len() - rest.len()]) as u16;
        if actual != expected {
            return Err(GzipError::HeaderChecksum { expected, actual });
        }
        rest = after;
    }
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use flate2::write::GzEncoder;
    use flate2::{Compression, GzBuilder};

    use super::*;

    const HEADER: [u8; HEADER_BYTES] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];

    fn blocks(file: &[u8], output_bytes: usize) -> Result<u64, GzipError> {
        let mut output = vec![0; output_bytes];
        let mut budget = budget(file, &output);
        unpack_within(file, &mut output, &mut budget).map(|_| budget.used_steps())
    }

    /// Four empty blocks with the predefined code. Each has 10 bits.
    const EMPTY_BLOCKS: [u8; 5] = [0x02, 0x08, 0x20, 0x80, 0x00];

    #[test]
    fn many_small_blocks_are_refused() {
        let file = |count: usize| [&HEADER[..], &EMPTY_BLOCKS.repeat(count)].concat();
        assert!(matches!(blocks(&file(2000), 0), Err(GzipError::Truncated)));
        let error = blocks(&file(3000), 0).unwrap_err();
        assert!(matches!(error, GzipError::OverBudget(_)), "{error}");
    }

    /// Compresses `data` with the program gzip.
    fn gzip(data: &[u8], arguments: &[&str]) -> Vec<u8> {
        let mut command = Command::new("gzip");
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut input = process.stdin.take().unwrap();
        let output = std::thread::scope(|scope| {
            scope.spawn(move || input.write_all(data).unwrap());
            process.wait_with_output().unwrap()
        });
        assert!(output.status.success(), "gzip {arguments:?}: {}", output.status);
        output.stdout
    }

    #[test]
    fn files_of_gzip_are_unpacked() {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let zeros = vec![0; 4 << 20];
        for arguments in [&["-1"][..], &["-9"], &["-1", "--rsyncable"], &["-9", "--rsyncable"]] {
            for data in [&program[..2 << 20], &zeros] {
                let file = gzip(data, arguments);
                let mut output = vec![1; data.len()];
                let mut budget = budget(&file, &output);
                let unpacked_bytes = unpack_within(&file, &mut output, &mut budget).unwrap();
                assert!(output[..unpacked_bytes] == *data, "{arguments:?}");
                // Without the spare blocks, a larger file is accepted as well.
                let kib = (file.len() + data.len()) as u64 >> 10;
                assert!(budget.used_steps() <= kib * BLOCKS_PER_KIB, "{arguments:?}: {budget:?}");
            }
        }
    }

    /// Returns `data` as a gzip file. The compressor flushes after each piece, which ends a block
    /// and adds an empty one.
    fn flushed(data: &[u8], level: u32, piece_bytes: usize) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        for piece in data.chunks(piece_bytes) {
            encoder.write_all(piece).unwrap();
            if piece.len() == piece_bytes {
                encoder.flush().unwrap();
            }
        }
        encoder.finish().unwrap()
    }

    /// The limit leaves room for compressors with smaller blocks. pigz flushes every 128 KiB, and
    /// with `-R` about every 4 KiB.
    #[test]
    fn compressed_data_has_few_blocks() {
        let mut seed = 1u64;
        let data: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 60) as u8 * (seed >> 52 & 15) as u8
        })
        .take(500_000)
        .collect();
        for (piece_bytes, divisor) in [(usize::MAX, 32), (128 << 10, 32), (4 << 10, 16)] {
            for level in [0, 1, 6, 9] {
                let file = flushed(&data, level, piece_bytes);
                let blocks = blocks(&file, data.len()).unwrap();
                let flushes = (data.len() / piece_bytes) as u64;
                assert!(blocks > 2 * flushes, "level {level}: {blocks} blocks");
                let kib = (file.len() + data.len()) as u64 >> 10;
                let max_blocks = kib * BLOCKS_PER_KIB / divisor;
                assert!(blocks <= max_blocks, "level {level}: {blocks} blocks");
            }
        }
    }

    #[test]
    fn optional_fields_of_the_header_are_skipped() {
        let builder = GzBuilder::new().extra(*b"extra").filename("name").comment("comment");
        let mut encoder = builder.write(Vec::new(), Compression::fast());
        encoder.write_all(b"data").unwrap();
        let mut file = encoder.finish().unwrap();
        let mut output = [0; 4];
        assert_eq!(unpack(&file, &mut output).unwrap(), 4);
        assert_eq!(&output, b"data");
        // Adds the checksum of the header.
        file[3] |= flag::HEADER_CHECKSUM;
        let header_bytes = HEADER_BYTES + 2 + b"extraname\0comment\0".len();
        let checksum = crc32fast::hash(&file[..header_bytes]) as u16;
        let add = |file: &[u8], checksum: u16| {
            let (header, rest) = file.split_at(header_bytes);
            [header, &checksum.to_le_bytes(), rest].concat()
        };
        assert_eq!(unpack(&add(&file, checksum), &mut output).unwrap(), 4);
        let error = unpack(&add(&file, !checksum), &mut output).unwrap_err();
        assert!(matches!(error, GzipError::HeaderChecksum { .. }), "{error}");
        file[3] |= 0x80;
        assert!(matches!(unpack(&file, &mut output), Err(GzipError::Reserved { flags: 0x9e })));
    }
}
