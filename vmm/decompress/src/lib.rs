//! Decoders of compressed kernels, without unsafe code.
//!
//! The payload of a bzImage is a single compressed stream. Its last four bytes contain the unpacked
//! size. They are gzip's own trailer, or appended by the kernel's build
//! (Documentation/arch/x86/boot.rst, payload_length; scripts/Makefile.lib, size_append). Because
//! the size is known in advance, every decoder writes into one buffer of that size. The buffer can
//! be guest memory. The decoders of zstd and lz4 also use that buffer as their window. Sharing the
//! buffer saves a second copy and a separate window of 128 MiB.

#![forbid(unsafe_code)]

mod budget;
mod gzip;
mod lz4;
mod xz;
mod zstd;

#[cfg(test)]
#[path = "../tests/payloads/mod.rs"]
#[allow(dead_code)]
mod payloads;

use std::fmt;

use thiserror::Error;

/// Upper limit of the size of a payload and of the unpacked size in its trailer. Kernels of
/// distributions unpack to about 60 MiB.
pub const MAX_KERNEL_BYTES: u32 = 1 << 30;
/// Size of the trailer at the end of the stream.
const TRAILER_BYTES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
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
    pub fn of(payload: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Compression); 8] = [
            (b"\x7fELF", Compression::None),
            (&zstd::MAGIC, Compression::Zstd),
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
pub enum DecompressError {
    #[error("the compression of the payload is unknown: it starts with {0:02x?}")]
    Unknown(Vec<u8>),
    #[error(
        "the kernel is compressed with {0}; zstd, lz4, xz and gzip are supported, or unpack it with extract-vmlinux"
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
}

/// Compressed payload with a plausible trailer.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    payload: &'a [u8],
    stream: &'a [u8],
    compression: Compression,
    claimed_bytes: u32,
}

impl<'a> Packed<'a> {
    /// Reads the trailer of `payload`, which must be compressed (not [`Compression::None`]).
    pub fn new(payload: &'a [u8], compression: Compression) -> Result<Self, DecompressError> {
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
    pub fn unpacked_bytes(&self) -> usize {
        self.claimed_bytes as usize
    }

    /// Unpacks into `output`, which must be [`unpacked_bytes`](Self::unpacked_bytes) long. After an
    /// error, the contents of `output` are undefined.
    pub fn unpack_into(&self, output: &mut [u8]) -> Result<(), DecompressError> {
        let Self { payload, stream, compression, claimed_bytes } = *self;
        assert_eq!(output.len(), self.unpacked_bytes(), "the buffer has the size in the trailer");
        let damaged = |reason: String| DecompressError::Damaged { compression, reason };
        let actual_bytes = match compression {
            Compression::Zstd => {
                zstd::unpack(stream, output).map_err(|e| damaged(e.to_string()))?
            }
            // The trailer is part of gzip's stream.
            Compression::Gzip => {
                gzip::unpack(payload, output).map_err(|e| damaged(e.to_string()))?
            }
            Compression::Xz => xz::unpack(stream, output).map_err(|e| damaged(e.to_string()))?,
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
}
