//! Compares the decoders of kernels with those of C libraries.
//! `docs/design/decisions/0028-decoders.md` contains results.
//!
//! `FORESHORE_BENCH_KERNEL` is the path of an unpacked kernel, as `scripts/extract-vmlinux` of
//! Linux prints it. Without it, and in a short run (`cargo test`), the benchmark generates data.

use std::env;
use std::fs;
use std::io::Read;

use foreshore_decompress::{Compression, Packed};
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use rustix::time::{ClockId, clock_gettime};
use zstd::bulk::Compressor;

const ROUNDS: usize = 9;
/// Window of zstd and dictionary of xz in kernels (scripts/Makefile.lib and scripts/xz_wrap.sh).
const WINDOW_LOG: u32 = 27;

fn main() {
    // cargo bench passes --bench.
    let is_whole = env::args().any(|argument| argument == "--bench");
    let kernel = env::var_os("FORESHORE_BENCH_KERNEL").filter(|_| is_whole);
    let data = match kernel {
        Some(path) => fs::read(path).expect("FORESHORE_BENCH_KERNEL names a file"),
        None => generate(if is_whole { 60_000_000 } else { 600_000 }),
    };
    let level = if is_whole { 22 } else { 3 };
    let (zstd, xz) = (zstd_payload(&data, level), xz_payload(&data));
    println!("\n| {} bytes | packed | time | speed |\n|---|---|---|---|", data.len());
    let ours = |payload: &[u8], compression, output: &mut [u8]| {
        Packed::new(payload, compression).unwrap().unpack_into(output).unwrap();
    };
    measure("zstd, Foreshore", &zstd, &data, |payload, output| {
        ours(payload, Compression::Zstd, output);
    });
    measure("zstd, C library", &zstd, &data, |payload, output| {
        zstd::bulk::decompress_to_buffer(stream(payload), output).unwrap();
    });
    measure("zstd, ruzstd", &zstd, &data, |payload, output| {
        ruzstd::decoding::FrameDecoder::new().decode_all(stream(payload), output).unwrap();
    });
    measure("xz, lzma-rust2", &xz, &data, |payload, output| {
        ours(payload, Compression::Xz, output);
    });
    measure("xz, C library", &xz, &data, |payload, output| {
        liblzma::read::XzDecoder::new(stream(payload)).read_exact(output).unwrap();
    });
}

/// Payload without the size at its end.
fn stream(payload: &[u8]) -> &[u8] {
    &payload[..payload.len() - 4]
}

fn with_trailer(mut stream: Vec<u8>, len: usize) -> Vec<u8> {
    stream.extend(u32::try_from(len).unwrap().to_le_bytes());
    stream
}

fn zstd_payload(data: &[u8], level: i32) -> Vec<u8> {
    let mut compressor = Compressor::new(level).unwrap();
    compressor.include_checksum(true).unwrap();
    compressor.include_contentsize(false).unwrap();
    compressor.window_log(WINDOW_LOG).unwrap();
    with_trailer(compressor.compress(data).unwrap(), data.len())
}

fn xz_payload(data: &[u8]) -> Vec<u8> {
    let mut options = LzmaOptions::new_preset(6).unwrap();
    options.dict_size(1 << WINDOW_LOG);
    let mut filters = Filters::new();
    filters.x86().lzma2(&options);
    let stream = Stream::new_stream_encoder(&filters, Check::Crc32).unwrap();
    let mut encoder = liblzma::read::XzEncoder::new_stream(data, stream);
    let mut packed = Vec::new();
    encoder.read_to_end(&mut packed).unwrap();
    with_trailer(packed, data.len())
}

/// Data that compresses about as well as a kernel: short runs of symbols, and copies of earlier
/// bytes.
fn generate(len: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(len);
    let mut seed = 1u64;
    let mut random = |limit: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (seed >> 33) as usize % limit
    };
    while data.len() < len {
        data.extend((0..1 + random(6)).map(|_| (random(16) * random(16)) as u8));
        let distance = 1 + random(data.len()) % (1 << (1 + random(20)));
        for _ in 0..3 + random(20) {
            data.push(data[data.len() - distance]);
        }
    }
    data.truncate(len);
    data
}

fn measure(name: &str, payload: &[u8], data: &[u8], unpack: impl Fn(&[u8], &mut [u8])) {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            // The first access to each page is a part of the measured time.
            let start = cpu_ms();
            let mut output = vec![0; data.len()];
            unpack(payload, &mut output);
            let time = cpu_ms() - start;
            assert!(output == data, "{name}");
            time
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let (median, packed) = (times[ROUNDS / 2], payload.len());
    let speed = data.len() as f64 / median / 1e3;
    println!("| {name} | {packed} | {median:.0} ms | {speed:.0} MB/s |");
}

/// Returns the CPU time of this process. Elapsed time would include other processes on a busy
/// machine.
fn cpu_ms() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
