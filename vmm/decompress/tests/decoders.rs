//! Tests of all decoders.

mod payloads;

use foreshore_decompress::{Compression, DecompressError, Packed};

use payloads::{
    gzip_payload, lz4_payload, with_trailer, xz_payload, xz_payload_with, zstd_payload,
};

fn sample(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7 % 251) as u8).collect()
}

fn payloads(data: &[u8]) -> [Vec<u8>; 4] {
    [zstd_payload(data), lz4_payload(data, 4000), gzip_payload(data), xz_payload(data)]
}

fn unpack(payload: &[u8]) -> Result<Vec<u8>, DecompressError> {
    let packed = Packed::new(payload, Compression::of(payload).unwrap())?;
    let mut output = vec![0; packed.unpacked_bytes()];
    packed.unpack_into(&mut output)?;
    Ok(output)
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
fn bytes_after_the_end_of_a_stream_are_refused() {
    let data = sample(10_000);
    for payload in payloads(&data) {
        let mut stream = payload[..payload.len() - 4].to_vec();
        if Compression::of(&payload) == Some(Compression::Gzip) {
            stream = payload;
        }
        stream.extend_from_slice(b"trailing");
        assert!(unpack(&with_trailer(stream.clone(), data.len())).is_err(), "{stream:02x?}");
    }
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

/// A stream with a checksum is refused, or unpacks to the same bytes. Streams of lz4 and zstd have
/// none here.
#[test]
fn every_flipped_bit_is_refused_or_without_effect() {
    let data = sample(3000);
    for payload in payloads(&data) {
        let compression = Compression::of(&payload).unwrap();
        let stream_bytes = payload.len() - 4;
        for bit in 0..8 * stream_bytes {
            let mut damaged = payload.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let unpacked = Packed::new(&damaged, compression).and_then(|packed| {
                let mut output = vec![0; packed.unpacked_bytes()];
                packed.unpack_into(&mut output).map(|()| output)
            });
            if matches!(compression, Compression::Gzip | Compression::Xz)
                && let Ok(unpacked) = unpacked
            {
                assert!(unpacked == data, "{compression}, bit {bit}");
            }
        }
    }
}

/// The header of the first block requests a dictionary. The decoder must not allocate it.
#[test]
fn xz_dictionary_above_the_limit_is_refused() {
    let data = sample(10_000);
    let refusal = |dictionary_bytes| unpack(&xz_payload_with(&data, dictionary_bytes));
    assert_eq!(refusal(128 << 20).unwrap(), data);
    let error = refusal(512 << 20).unwrap_err().to_string();
    assert!(error.contains("memory"), "{error}");
}
