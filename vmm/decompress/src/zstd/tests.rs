//! Tests of the limit of table entries.

use super::*;

const PREDEFINED_TABLES: u64 = 3;
/// Packed block without literals. Its only sequence copies 3 bytes with predefined tables.
const PREDEFINED: &[u8] = &[0, 1, 0, 0, 0, 2];
/// Packed block with the same sequence. It describes three tables of one symbol each.
const DESCRIBED: &[u8] = &[0, 1, 0xa8, 0xf4, 0x3f, 0xf3, 0x1f, 0xf4, 0x3f, 0, 0, 0, 4];
/// Packed block with a Huffman code and one literal.
const HUFFMAN: &[u8] = &[0x12, 0xc0, 0, 0x80, 0x10, 2, 0];

/// Returns a frame with 100 bytes and `count` copies of `block`.
fn frame(block: &[u8], count: usize) -> Vec<u8> {
    let header = |is_last: bool, kind: u32, len: usize| {
        let header = u32::from(is_last) | kind << 1 | (len as u32) << 3;
        header.to_le_bytes()[..3].to_vec()
    };
    let mut stream = [&MAGIC[..], &[0, 0x50], &header(false, 0, 100), &[7; 100]].concat();
    for nth in 1..=count {
        stream.extend(header(nth == count, 2, block.len()));
        stream.extend(block);
    }
    stream
}

/// Returns the number of entries of all tables.
fn table_entries(stream: &[u8], output_bytes: usize) -> Result<u64, ZstdError> {
    let mut output = vec![0; output_bytes];
    let mut budget = budget(stream, &output);
    assert_eq!(unpack_within(stream, &mut output, &mut budget)?, output_bytes);
    Ok(budget.used_steps())
}

#[test]
fn predefined_tables_are_built_once() {
    let one_block = table_entries(&frame(PREDEFINED, 1), 100 + 3).unwrap();
    assert_eq!(one_block, PREDEFINED_TABLES * fse::MAX_STATES as u64);
    let many_blocks = table_entries(&frame(PREDEFINED, 100_000), 100 + 3 * 100_000).unwrap();
    assert_eq!(many_blocks, one_block);
}

#[test]
fn tables_of_many_small_blocks_are_refused() {
    for (block, output_bytes) in [(DESCRIBED, 3), (HUFFMAN, 1)] {
        let entries = |count| table_entries(&frame(block, count), 100 + output_bytes * count);
        let per_block = entries(2).unwrap() - entries(1).unwrap();
        assert!(per_block >= 3 * fse::MAX_STATES as u64, "{per_block}");
        assert!(matches!(entries(1000), Err(ZstdError::OverBudget(_))), "{block:02x?}");
    }
}

/// Random numbers with 16 bits.
fn random() -> impl Iterator<Item = u64> {
    let mut seed = 1u64;
    std::iter::repeat_with(move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        seed >> 48
    })
}

/// Pieces of up to 32 KiB. Each consists of its own words with its own letters.
fn mixed_pieces(len: usize) -> Vec<u8> {
    let mut random = random();
    let mut next = |bound: usize| random.next().unwrap() as usize % bound;
    let mut data = Vec::new();
    while data.len() < len {
        let (first, letters) = (next(256), 1 + next(64));
        let mut word = |_| -> Vec<u8> {
            let len = 1 + next(12);
            (0..len).map(|_| (first + next(letters) * next(letters)) as u8).collect()
        };
        let words: Vec<_> = (0..200).map(&mut word).collect();
        let end = data.len() + next(32 << 10);
        while data.len() < end {
            data.extend(&words[next(words.len())]);
        }
    }
    data.truncate(len);
    data
}

/// The limit leaves room for compressors that describe more tables. Kernels are packed with level
/// 22 (scripts/Makefile.lib, `zstd22_with_size`). High levels split blocks where the data change.
#[test]
fn compressed_data_has_few_tables() {
    let product = |number: u64| (number >> 12) as u8 * (number >> 4 & 15) as u8;
    let uniform: Vec<u8> = random().map(product).take(200_000).collect();
    for (data, divisor) in [(uniform, 4), (mixed_pieces(200_000), 2)] {
        for level in [1, 3, 19, 22] {
            let stream = zstd::bulk::compress(&data, level).unwrap();
            let entries = table_entries(&stream, data.len()).unwrap();
            let kib = (stream.len() + data.len()) as u64 >> 10;
            let max_entries = kib * TABLE_ENTRIES_PER_KIB / divisor;
            assert!(entries <= max_entries, "level {level}: {entries}");
        }
    }
}
