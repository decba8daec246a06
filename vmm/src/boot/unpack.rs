//! Unpacking of a kernel into a buffer outside guest memory.

use std::io;

use foreshore_decompress::{DecompressError, Packed};
use thiserror::Error;

use super::scratch::Scratch;

#[derive(Debug, Error)]
pub(crate) enum UnpackError {
    #[error(transparent)]
    Decompress(#[from] DecompressError),
    #[error("cannot allocate {bytes} bytes for the unpacked kernel")]
    NoMemory { bytes: usize, source: io::Error },
}

pub(super) fn unpack(packed: &Packed) -> Result<Scratch, UnpackError> {
    let mut output = buffer_for(packed)?;
    packed.unpack_into(output.bytes_mut())?;
    Ok(output)
}

/// Allocates a buffer for the unpacked image.
pub(super) fn buffer_for(packed: &Packed) -> Result<Scratch, UnpackError> {
    let bytes = packed.unpacked_bytes();
    Scratch::new(bytes).map_err(|source| UnpackError::NoMemory { bytes, source })
}
