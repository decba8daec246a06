//! Decompression of a bzImage's payload.
//!
//! The payload is a single compressed stream. Its last four bytes contain the unpacked size. They
//! are gzip's own trailer, or appended by the kernel's build (Documentation/arch/x86/boot.rst,
//! payload_length; scripts/Makefile.lib, size_append). Because the size is known in advance, every
//! decoder writes into one buffer of that size. The buffer can be guest memory. The decoders of
//! zstd and lz4 also use that buffer as their window. Sharing the buffer saves a second copy and a
//! separate window of 128 MiB.

use std::fmt;
use std::io::{self, ErrorKind, Read};

use flate2::read::GzDecoder;
use liblzma::read::XzDecoder;
use liblzma::stream::Stream;
use thiserror::Error;

use super::scratch::Scratch;

/// Upper limit of the unpacked size in a trailer. Kernels of distributions unpack to about 60 MiB.
const MAX_KERNEL_BYTES: u32 = 1 << 30;
/// Size of the trailer at the end of the stream.
const TRAILER_BYTES: usize = 4;
/// Memory limit of the xz decoder. Kernels use a dictionary of up to 128 MiB.
const XZ_MEMORY_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    /// The payload is an uncompressed ELF file.
    None,
    /// zstd (RFC 8878).
    Zstd,
    /// LZ4 with the legacy frame format, the only LZ4 format that kernels use.
    Lz4,
    /// gzip (RFC 1952).
    Gzip,
    /// xz with a filter for x86 branches.
    Xz,
    Lzma,
    Bzip2,
    Lzo,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no compression",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Lzma => "lzma",
            Self::Bzip2 => "bzip2",
            Self::Lzo => "lzo",
        })
    }
}

impl Compression {
    /// Detects the compression by the magic number at the start of a payload.
    pub(crate) fn of(payload: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Compression); 8] = [
            (b"\x7fELF", Compression::None),
            (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
            (&lz4::MAGIC, Compression::Lz4),
            (&[0x1f, 0x8b], Compression::Gzip),
            (b"\xfd7zXZ\0", Compression::Xz),
            (&[0x5d, 0x00, 0x00], Compression::Lzma),
            (b"BZh", Compression::Bzip2),
            (b"\x89LZO", Compression::Lzo),
        ];
        MAGICS
            .iter()
            .find(|(magic, _)| payload.starts_with(magic))
            .map(|&(_, compression)| compression)
    }
}

#[derive(Debug, Error)]
pub(crate) enum DecompressError {
    #[error("the compression of the payload is unknown: it starts with {0:02x?}")]
    Unknown(Vec<u8>),
    #[error(
        "the kernel is compressed with {0}; zstd and lz4 are supported, or unpack it with extract-vmlinux"
    )]
    Unsupported(Compression),
    #[error("the {compression} stream of {stream_bytes} bytes ends early")]
    Truncated { compression: Compression, stream_bytes: usize },
    #[error(
        "the payload has {claimed_bytes} bytes unpacked, according to its trailer, and must have at most {MAX_KERNEL_BYTES}"
    )]
    TooLarge {
        /// Unpacked size according to the trailer.
        claimed_bytes: u32,
    },
    #[error("{compression} unpacks to {actual_bytes} bytes, and the trailer has {claimed_bytes}")]
    SizeMismatch {
        compression: Compression,
        actual_bytes: usize,
        /// Unpacked size according to the trailer.
        claimed_bytes: u32,
    },
    #[error("the {compression} stream is damaged: {reason}")]
    Damaged {
        compression: Compression,
        /// Error text of the decoder.
        reason: String,
    },
    #[error("cannot allocate {bytes} bytes for the unpacked kernel")]
    NoMemory { bytes: u32, source: io::Error },
}

/// Compressed payload with a plausible trailer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed<'a> {
    payload: &'a [u8],
    stream: &'a [u8],
    compression: Compression,
    claimed_bytes: u32,
}

impl<'a> Packed<'a> {
    /// Reads the trailer of `payload`, which must be compressed (not [`Compression::None`]).
    pub(super) fn new(
        payload: &'a [u8],
        compression: Compression,
    ) -> Result<Self, DecompressError> {
        let Some((stream, trailer)) = payload.split_last_chunk::<TRAILER_BYTES>() else {
            return Err(DecompressError::Truncated { compression, stream_bytes: payload.len() });
        };
        let claimed_bytes = u32::from_le_bytes(*trailer);
        if claimed_bytes > MAX_KERNEL_BYTES {
            return Err(DecompressError::TooLarge { claimed_bytes });
        }
        Ok(Self { payload, stream, compression, claimed_bytes })
    }

    /// Size of the unpacked image.
    pub(super) fn unpacked_bytes(&self) -> usize {
        self.claimed_bytes as usize
    }

    /// Unpacks into a new buffer.
    pub(super) fn unpack(&self) -> Result<Scratch, DecompressError> {
        let mut output =
            Scratch::new(self.unpacked_bytes()).map_err(|source| self.no_memory(source))?;
        self.unpack_into(output.bytes_mut())?;
        Ok(output)
    }

    /// Unpacks into `output`, which must be [`unpacked_bytes`](Self::unpacked_bytes) long. After an
    /// error, the contents of `output` are undefined.
    pub(super) fn unpack_into(&self, output: &mut [u8]) -> Result<(), DecompressError> {
        let Self { payload, stream, compression, claimed_bytes } = *self;
        assert_eq!(output.len(), self.unpacked_bytes(), "the buffer has the size in the trailer");
        let damaged = |reason: String| DecompressError::Damaged { compression, reason };
        let actual_bytes = match compression {
            Compression::Zstd => unpack_zstd(stream, output).map_err(|e| damaged(e.to_string()))?,
            // The trailer is part of gzip's stream.
            Compression::Gzip => {
                fill(GzDecoder::new(payload), output).map_err(|e| damaged(e.to_string()))?
            }
            Compression::Xz => unpack_xz(stream, output).map_err(|e| damaged(e.to_string()))?,
            Compression::Lz4 => lz4::unpack(stream, output).map_err(|error| match error {
                lz4::Lz4Error::Truncated => {
                    DecompressError::Truncated { compression, stream_bytes: payload.len() }
                }
                lz4::Lz4Error::Block(e) => damaged(e.to_string()),
            })?,
            other => return Err(DecompressError::Unsupported(other)),
        };
        if actual_bytes != output.len() {
            return Err(DecompressError::SizeMismatch { compression, actual_bytes, claimed_bytes });
        }
        Ok(())
    }

    /// Error for a failed allocation of the output buffer.
    pub(super) fn no_memory(&self, source: io::Error) -> DecompressError {
        DecompressError::NoMemory { bytes: self.claimed_bytes, source }
    }
}

fn unpack_zstd(stream: &[u8], output: &mut [u8]) -> io::Result<usize> {
    zstd::bulk::Decompressor::new()?.decompress_to_buffer(stream, output)
}

fn unpack_xz(stream: &[u8], output: &mut [u8]) -> io::Result<usize> {
    fill(XzDecoder::new_stream(stream, Stream::new_stream_decoder(XZ_MEMORY_BYTES, 0)?), output)
}

/// Reads all of `source` into `output` and returns its length. Fails if `source` does not fit.
fn fill(mut source: impl Read, output: &mut [u8]) -> io::Result<usize> {
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

/// LZ4's legacy frame: a magic number, followed by blocks. Each block is preceded by its compressed
/// size, and unpacks to at most 8 MiB. The end of the file ends the frame. Implemented here because
/// lz4_flex supports only the block format.
mod lz4 {
    use lz4_flex::block::{DecompressError, decompress_into};

    pub(super) const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

    #[derive(Debug)]
    pub(super) enum Lz4Error {
        Truncated,
        Block(DecompressError),
    }

    /// Unpacks `stream` into `output` and returns the unpacked size.
    pub(super) fn unpack(stream: &[u8], output: &mut [u8]) -> Result<usize, Lz4Error> {
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
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use liblzma::stream::{Check, Filters, LzmaOptions};
    use liblzma::write::XzEncoder;

    use super::*;

    fn sample(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i / 7 % 251) as u8).collect()
    }

    pub(crate) fn with_trailer(mut stream: Vec<u8>, len: usize) -> Vec<u8> {
        stream.extend_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
        stream
    }

    pub(crate) fn zstd_payload(data: &[u8]) -> Vec<u8> {
        with_trailer(zstd::bulk::compress(data, 3).unwrap(), data.len())
    }

    pub(crate) fn lz4_payload(data: &[u8], block_bytes: usize) -> Vec<u8> {
        let mut stream = lz4::MAGIC.to_vec();
        for block in data.chunks(block_bytes) {
            let packed = lz4_flex::block::compress(block);
            stream.extend_from_slice(&u32::try_from(packed.len()).unwrap().to_le_bytes());
            stream.extend_from_slice(&packed);
        }
        with_trailer(stream, data.len())
    }

    pub(crate) fn gzip_payload(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    pub(crate) fn xz_payload(data: &[u8]) -> Vec<u8> {
        let mut options = LzmaOptions::new_preset(1).unwrap();
        options.dict_size(1 << 20);
        let mut filters = Filters::new();
        filters.x86().lzma2(&options);
        let stream = Stream::new_stream_encoder(&filters, Check::Crc32).unwrap();
        let mut encoder = XzEncoder::new_stream(Vec::new(), stream);
        encoder.write_all(data).unwrap();
        with_trailer(encoder.finish().unwrap(), data.len())
    }

    fn payloads(data: &[u8]) -> [Vec<u8>; 4] {
        [zstd_payload(data), lz4_payload(data, 4000), gzip_payload(data), xz_payload(data)]
    }

    fn unpack(payload: &[u8]) -> Result<Vec<u8>, DecompressError> {
        let packed = Packed::new(payload, Compression::of(payload).unwrap())?;
        packed.unpack().map(|scratch| scratch.bytes().to_vec())
    }

    #[test]
    fn every_compression_round_trips() {
        let data = sample(300_000);
        for payload in payloads(&data) {
            assert_eq!(unpack(&payload).unwrap(), data, "{:?}", Compression::of(&payload));
        }
        assert_eq!(unpack(&lz4_payload(&data, 1 << 20)).unwrap(), data);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let data = sample(10_000);
        for payload in payloads(&data) {
            for len in 6..payload.len() - 1 {
                // The trailer is correct, but the stream is too short.
                let cut = with_trailer(payload[..len - 4].to_vec(), data.len());
                if let Some(compression) = Compression::of(&cut) {
                    assert!(unpack(&cut).is_err(), "{compression} cut to {len}");
                }
            }
        }
        assert!(matches!(
            Packed::new(&[0, 0], Compression::Lz4),
            Err(DecompressError::Truncated { .. })
        ));
    }

    #[test]
    fn wrong_trailer_is_an_error() {
        let data = sample(10_000);
        for payload in payloads(&data) {
            let stream = payload[..payload.len() - 4].to_vec();
            for claim in [0, 9_999] {
                assert!(matches!(
                    unpack(&with_trailer(stream.clone(), claim)),
                    Err(DecompressError::Damaged { .. })
                ));
            }
            // gzip's decoder may detect the wrong trailer itself.
            assert!(matches!(
                unpack(&with_trailer(stream.clone(), 10_001)),
                Err(DecompressError::SizeMismatch { actual_bytes: 10_000, .. }
                    | DecompressError::Damaged { compression: Compression::Gzip, .. })
            ));
            assert!(matches!(
                unpack(&with_trailer(stream, u32::MAX as usize)),
                Err(DecompressError::TooLarge { claimed_bytes: u32::MAX })
            ));
        }
    }

    #[test]
    fn compression_is_detected_by_magic_number() {
        assert_eq!(Compression::of(b"\x7fELF\x02"), Some(Compression::None));
        assert_eq!(Compression::of(b"\x1f\x8b\x08\x00"), Some(Compression::Gzip));
        assert_eq!(Compression::of(b"#!/bin/sh"), None);
        let error = unpack(b"BZh91AY&SY\0\0\0\0").err().unwrap();
        assert!(error.to_string().contains("compressed with bzip2"), "{error}");
    }
}
