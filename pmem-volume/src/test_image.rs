//! Text form of media images for golden files. Each line contains 16 bytes, and lines of zeros are
//! omitted.

use std::fmt::Write;

pub(crate) fn to_text(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (at, line) in bytes.chunks(16).enumerate().filter(|(_, line)| line.iter().any(|b| *b != 0))
    {
        let _ = write!(text, "{:08x} ", at * 16);
        line.iter().for_each(|b| {
            let _ = write!(text, "{b:02x}");
        });
        text.push('\n');
    }
    text
}

/// Inverse of [`to_text`].
pub(crate) fn from_text(text: &str, len_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes as usize];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (at, hex) = line.split_once(' ').expect("an offset and bytes");
        let at = usize::from_str_radix(at, 16).expect("an offset");
        for (i, digits) in hex.as_bytes().chunks(2).enumerate() {
            let digits = std::str::from_utf8(digits).expect("digits");
            bytes[at + i] = u8::from_str_radix(digits, 16).expect("a byte");
        }
    }
    bytes
}
