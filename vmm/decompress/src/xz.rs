//! Decoder of xz streams.

use std::io::{self, ErrorKind, Read};

use lzma_rust2::XzReader;

use crate::budget::Budget;

/// Memory limit of the decoder. Kernels use a dictionary of up to 128 MiB. The decoder doubles and
/// zero-fills its window when it is full (`LzDecoder::grow_slow`), so the window has at most twice
/// the unpacked size.
const MEMORY_KIB: u32 = 256 << 10;
/// Limit of the reads of the decoder. It makes up to 10 for each block and each chunk, and also
/// fills buffers of 64 KiB for each block, and tables of 28 KiB for a chunk. It makes
/// about 16 for each MiB of a kernel.
const READS_PER_KIB: u64 = 1;

/// Unpacks `stream` into `output`, and returns the unpacked size.
pub(crate) fn unpack(stream: &[u8], output: &mut [u8]) -> io::Result<usize> {
    unpack_within(stream, output, &mut budget(stream, output))
}

fn budget(stream: &[u8], output: &[u8]) -> Budget {
    Budget::new("input reads", READS_PER_KIB, stream.len(), output.len())
}

fn unpack_within(stream: &[u8], output: &mut [u8], budget: &mut Budget) -> io::Result<usize> {
    let source = CountedReads { rest: stream, budget };
    let mut decoder = XzReader::new_mem_limit(source, false, MEMORY_KIB);
    let unpacked_bytes = fill(&mut decoder, output)?;
    match decoder.into_inner().rest.len() {
        0 => Ok(unpacked_bytes),
        bytes => {
            Err(io::Error::new(ErrorKind::InvalidData, format!("{bytes} bytes follow its end")))
        }
    }
}

/// Input that fails when the decoder reads it too often.
struct CountedReads<'a> {
    rest: &'a [u8],
    budget: &'a mut Budget,
}

impl Read for CountedReads<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.budget.spend(1).map_err(io::Error::other)?;
        self.rest.read(buffer)
    }
}

/// Reads all of `source` into `output` and returns its length. Fails if `source` does not fit.
fn fill(source: &mut impl Read, output: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < output.len() {
        match source.read(&mut output[filled..])? {
            0 => return Ok(filled),
            count => filled += count,
        }
    }
    // The decoder verifies the stream's checksum only when its end is read.
    match source.read(&mut [0])? {
        0 => Ok(filled),
        _ => Err(io::Error::new(
            ErrorKind::InvalidData,
            "the output exceeds the size in the trailer",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payloads::xz_payload;

    /// Size of the header of a stream.
    const HEADER_BYTES: usize = 12;
    /// Size of the index and the footer of a stream with one small block.
    const END_BYTES: usize = 8 + 12;

    fn reads(stream: &[u8], output_bytes: usize) -> io::Result<u64> {
        let mut output = vec![0; output_bytes];
        let mut budget = budget(stream, &output);
        unpack_within(stream, &mut output, &mut budget).map(|_| budget.used_steps())
    }

    /// Stream of one block.
    fn stream(data: &[u8]) -> Vec<u8> {
        let mut stream = xz_payload(data);
        stream.truncate(stream.len() - 4);
        stream
    }

    fn refusal(stream: &[u8], output_bytes: usize) -> String {
        reads(stream, output_bytes).unwrap_err().to_string()
    }

    #[test]
    fn many_small_blocks_are_refused() {
        let one_block = stream(b"aaaaaaaa");
        let (header, rest) = one_block.split_at(HEADER_BYTES);
        let block = &rest[..rest.len() - END_BYTES];
        let blocks = |count| [header, &block.repeat(count)].concat();
        // The index is missing.
        assert_eq!(refusal(&blocks(10), 80), "failed to fill whole buffer");
        let error = refusal(&blocks(1000), 8000);
        assert!(error.contains("needs more than 1063 input reads"), "{error}");
    }

    #[test]
    fn many_small_chunks_are_refused() {
        let one_block = stream(b"aaaaaaaa");
        let block = HEADER_BYTES + 4 * (usize::from(one_block[HEADER_BYTES]) + 1);
        let (header, chunks) = one_block.split_at(block);
        // The chunk resets the state and the dictionary. Its header has the packed size minus 1.
        assert_eq!(chunks[0], 0xe0);
        let chunk = &chunks[..6 + 1 + usize::from(u16::from_be_bytes([chunks[3], chunks[4]]))];
        let stored = [1, 0, 0, 7];
        for chunk in [chunk, &stored[..]] {
            let chunks = |count| [header, &chunk.repeat(count)].concat();
            assert_eq!(refusal(&chunks(10), 80), "failed to fill whole buffer");
            let error = refusal(&chunks(2000), 16_000);
            assert!(error.contains("input reads"), "{error}");
        }
    }

    /// The limit leaves room for compressors with smaller chunks. Random bytes are stored, and have
    /// the most chunks.
    #[test]
    fn compressed_data_needs_few_reads() {
        let mut seed = 1u64;
        let random: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 56) as u8
        })
        .take(500_000)
        .collect();
        let repetitive = b"repetitive ".repeat(50_000);
        for data in [random, repetitive] {
            let stream = stream(&data);
            let reads = reads(&stream, data.len()).unwrap();
            let kib = (stream.len() + data.len()) as u64 >> 10;
            assert!(reads <= kib * READS_PER_KIB / 4, "{reads} reads for {kib} KiB");
        }
    }
}
