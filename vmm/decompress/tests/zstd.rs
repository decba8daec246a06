//! Tests of the zstd decoder. The reference is the C library, which also compresses.

use foreshore_decompress::{Compression, DecompressError, Packed};
use proptest::prelude::*;
use zstd::bulk::{Compressor, Decompressor};

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Settings of the compressor.
#[derive(Clone, Copy, Debug)]
struct Settings {
    level: i32,
    has_checksum: bool,
    has_content_size: bool,
    window_log: u32,
}

/// Blocks of 128 KiB need this window. A smaller window has smaller blocks, whose tables can exceed
/// the limit.
const MIN_WINDOW_LOG: u32 = 17;
const KERNEL: Settings =
    Settings { level: 19, has_checksum: true, has_content_size: false, window_log: 27 };

fn compress(data: &[u8], settings: Settings) -> Vec<u8> {
    let mut compressor = Compressor::new(settings.level).unwrap();
    compressor.include_checksum(settings.has_checksum).unwrap();
    compressor.include_contentsize(settings.has_content_size).unwrap();
    compressor.window_log(settings.window_log).unwrap();
    compressor.compress(data).unwrap()
}

fn unpack(stream: &[u8], bytes: usize) -> Result<Vec<u8>, String> {
    let payload = [stream, &(bytes as u32).to_le_bytes()].concat();
    let mut output = vec![0; bytes];
    match Packed::new(&payload, Compression::Zstd).unwrap().unpack_into(&mut output) {
        Ok(()) => Ok(output),
        Err(DecompressError::Damaged { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    }
}

fn unpack_by_reference(stream: &[u8], bytes: usize) -> Option<Vec<u8>> {
    let unpacked = Decompressor::new().unwrap().decompress(stream, bytes).ok()?;
    (unpacked.len() == bytes).then_some(unpacked)
}

/// Run of bytes in compressible data.
#[derive(Clone, Debug)]
enum Run {
    /// Bytes of an alphabet with `count` symbols.
    Symbols {
        count: u16,
        seed: u64,
        len: usize,
    },
    /// Copy of earlier bytes, from a position that is relative to the length so far.
    Copy {
        from: u16,
        len: usize,
    },
    Same {
        byte: u8,
        len: usize,
    },
}

fn append(data: &mut Vec<u8>, run: &Run) {
    match *run {
        Run::Symbols { count, mut seed, len } => data.extend((0..len).map(|_| {
            // Multiplying two bytes makes some symbols more frequent than others.
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            let (a, b) = (seed >> 56, seed >> 48 & 0xff);
            (a * b / 256 % u64::from(count)) as u8
        })),
        Run::Copy { from, len } => {
            let start = data.len() * usize::from(from) / (1 << 16);
            for at in start..start + if data.is_empty() { 0 } else { len } {
                data.push(data[at]);
            }
        }
        Run::Same { byte, len } => data.resize(data.len() + len, byte),
    }
}

fn run() -> impl Strategy<Value = Run> {
    let len = || prop_oneof![4 => 0..40usize, 2 => 0..3000usize, 1 => 0..200_000usize];
    prop_oneof![
        3 => (1..257u16, any::<u64>(), len()).prop_map(|(count, seed, len)| Run::Symbols { count, seed, len }),
        4 => (any::<u16>(), len()).prop_map(|(from, len)| Run::Copy { from, len }),
        1 => (any::<u8>(), len()).prop_map(|(byte, len)| Run::Same { byte, len }),
    ]
}

fn data(runs: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(run(), runs).prop_map(|runs| {
        let mut data = Vec::new();
        runs.iter().for_each(|run| append(&mut data, run));
        data
    })
}

fn settings() -> impl Strategy<Value = Settings> {
    let level = prop_oneof![-20..0i32, 1..20i32];
    (level, any::<bool>(), any::<bool>(), MIN_WINDOW_LOG..28).prop_map(
        |(level, has_checksum, has_content_size, window_log)| Settings {
            level,
            has_checksum,
            has_content_size,
            window_log,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn compressed_data_is_restored(data in data(0..60), settings in settings()) {
        let unpacked = unpack(&compress(&data, settings), data.len());
        prop_assert!(unpacked.as_ref() == Ok(&data), "{settings:?}: {:?}", unpacked.err());
    }

    /// The reference refuses some damaged streams that this decoder accepts. Without a checksum,
    /// neither can detect all damage.
    #[test]
    fn damaged_stream_has_the_result_of_the_reference_if_both_accept_it(
        data in data(1..20),
        settings in settings(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), 0..8u32), 1..4),
    ) {
        let settings = Settings { has_checksum: false, ..settings };
        let mut stream = compress(&data, settings);
        for (at, bit) in damages {
            let at = at.index(stream.len());
            stream[at] ^= 1 << bit;
        }
        if let Ok(unpacked) = unpack(&stream, data.len()) {
            let reference = unpack_by_reference(&stream, data.len());
            prop_assert!(reference.is_none_or(|reference| reference == unpacked));
        }
    }

    #[test]
    fn damaged_stream_with_a_checksum_is_never_unpacked_to_other_bytes(
        data in data(1..20),
        damages in prop::collection::vec((any::<prop::sample::Index>(), 0..8u32), 1..4),
    ) {
        let mut stream = compress(&data, Settings { level: 3, ..KERNEL });
        for (at, bit) in damages {
            // The flag of the checksum stays set.
            let at = MAGIC.len() + 1 + at.index(stream.len() - MAGIC.len() - 1);
            stream[at] ^= 1 << bit;
        }
        if let Ok(unpacked) = unpack(&stream, data.len()) {
            prop_assert!(unpacked == data);
        }
    }

    #[test]
    fn any_bytes_after_the_magic_number_are_refused_or_unpacked(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        unpacked_bytes in 0..3000usize,
    ) {
        let stream = [&MAGIC[..], &bytes].concat();
        if let Ok(unpacked) = unpack(&stream, unpacked_bytes) {
            prop_assert!(unpack_by_reference(&stream, unpacked_bytes) == Some(unpacked));
        }
    }
}

fn sample() -> Vec<u8> {
    let mut data = Vec::new();
    for seed in 0..40 {
        append(&mut data, &Run::Symbols { count: 200, seed, len: 300 });
        append(&mut data, &Run::Copy { from: 20_000, len: 50 });
    }
    data
}

#[test]
fn every_truncation_and_every_flipped_bit_is_detected() {
    let data = sample();
    let stream = compress(&data, KERNEL);
    for len in 0..stream.len() {
        assert!(unpack(&stream[..len], data.len()).is_err(), "cut to {len}");
    }
    for bit in 0..8 * stream.len() {
        let mut damaged = stream.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let unpacked = unpack(&damaged, data.len());
        // Some fields have spare values, such as those of the window.
        assert!(unpacked.is_err() || unpacked == Ok(data.clone()), "bit {bit}");
    }
}

#[test]
fn header_beyond_the_limits_is_refused() {
    let frame = |descriptor: u8, rest: &[u8]| [&MAGIC[..], &[descriptor], rest].concat();
    let refusal = |stream: &[u8]| unpack(stream, 1).unwrap_err();
    // The last block is raw, and has one byte.
    let block = [0b1001, 0, 0, 7];
    let ok = frame(0, &[&[0x88][..], &block].concat());
    assert_eq!(unpack(&ok, 1), Ok(vec![7]), "a window of 128 MiB");
    let window = frame(0, &[&[0x89][..], &block].concat());
    assert_eq!(refusal(&window), "its window of 150994944 bytes exceeds 134217728 bytes");
    let dictionary = frame(1, &[&[0, 0x2a][..], &block].concat());
    assert_eq!(refusal(&dictionary), "it requires the dictionary 0x2a");
    assert_eq!(refusal(&frame(8, &block)), "a reserved bit or value is used");
    let size = frame(0x20, &[&[2][..], &block].concat());
    assert_eq!(refusal(&size), "it has 1 bytes unpacked, and its header has 2");
    let checksum = frame(4, &[&[0][..], &block, &[1, 2, 3, 4]].concat());
    assert!(refusal(&checksum).starts_with("its checksum is 0x"), "{}", refusal(&checksum));
    assert_eq!(refusal(&[&ok[..], &[0]].concat()), "1 bytes follow its end");
    assert_eq!(refusal(&ok[1..]), "it does not start with a zstd frame");
    // The block is packed, and its header claims 2^21 - 1 bytes. Windows have 1 KiB and 1 MiB.
    for (window, max_bytes) in [(0, 1024), (0x50, 131_072)] {
        let error = refusal(&frame(0, &[window, 0xfd, 0xff, 0xff]));
        assert_eq!(error, format!("a block has 2097151 bytes, more than {max_bytes}"));
    }
    // A run of 2 bytes exceeds the output.
    assert_eq!(refusal(&frame(0, &[0, 0b1_0011, 0, 0, 7])), "the output exceeds 1 bytes");
}
