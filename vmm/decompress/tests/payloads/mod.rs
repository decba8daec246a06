//! Payloads of kernels, compressed as the kernel's build compresses them.

use std::io::Write;

use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use liblzma::write::XzEncoder;

const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

pub(crate) fn with_trailer(mut stream: Vec<u8>, len: usize) -> Vec<u8> {
    stream.extend_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
    stream
}

pub(crate) fn zstd_payload(data: &[u8]) -> Vec<u8> {
    with_trailer(zstd::bulk::compress(data, 3).unwrap(), data.len())
}

pub(crate) fn lz4_payload(data: &[u8], block_bytes: usize) -> Vec<u8> {
    let mut stream = LZ4_MAGIC.to_vec();
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
    xz_payload_with(data, 1 << 20)
}

/// The encoder allocates several times the size of the dictionary.
pub(crate) fn xz_payload_with(data: &[u8], dictionary_bytes: u32) -> Vec<u8> {
    let mut options = LzmaOptions::new_preset(1).unwrap();
    options.dict_size(dictionary_bytes);
    let mut filters = Filters::new();
    filters.x86().lzma2(&options);
    let stream = Stream::new_stream_encoder(&filters, Check::Crc32).unwrap();
    let mut encoder = XzEncoder::new_stream(Vec::new(), stream);
    encoder.write_all(data).unwrap();
    with_trailer(encoder.finish().unwrap(), data.len())
}
