//! Parsers for the kernel's text files. Each parser is a pure function of one file's bytes.

mod buddyinfo;
mod meminfo;
mod pressure;
mod unused;
mod vmstat;
mod zoneinfo;

use std::io::BufRead;

pub(crate) use buddyinfo::{buddyinfo, free_pages};
pub(crate) use meminfo::meminfo;
pub(crate) use pressure::pressure;
use thiserror::Error;
pub(crate) use unused::unused;
pub(crate) use vmstat::vmstat;
pub(crate) use zoneinfo::zoneinfo;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum ParseError {
    /// A field is missing although every supported kernel has it.
    #[error("{file} has no {field}")]
    Missing { file: &'static str, field: &'static str },
    /// A field is not a number, or does not fit into the type.
    #[error("{file} has a {field} that is not a number")]
    NotANumber { file: &'static str, field: &'static str },
}

/// Returns the lines of a text. std finds line ends several bytes at a time.
fn lines(mut text: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let all = text;
        let length = text.skip_until(b'\n').ok().filter(|length| *length > 0)?;
        let line = &all[..length];
        Some(line.strip_suffix(b"\n").unwrap_or(line))
    })
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty())
}

fn number(word: &[u8]) -> Option<u64> {
    if word.is_empty() {
        return None;
    }
    word.iter().try_fold(0u64, |sum, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

fn required(
    word: Option<&[u8]>,
    file: &'static str,
    field: &'static str,
) -> Result<u64, ParseError> {
    word.and_then(number).ok_or(ParseError::NotANumber { file, field })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use foreshore_proto::Zone;
    use proptest::prelude::*;

    use super::*;

    /// Reads a guest's file from tests/data.
    pub(super) fn text_of(guest: &str, name: &str) -> Vec<u8> {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        fs::read(data.join(guest).join(name)).expect("a text of this guest")
    }

    #[test]
    fn lines_end_at_newlines() {
        let of =
            |text: &'static str| lines(text.as_bytes()).map(<[u8]>::to_vec).collect::<Vec<_>>();
        assert_eq!(of(""), [b""; 0]);
        assert_eq!(of("a\n\nbc"), [&b"a"[..], b"", b"bc"]);
        assert_eq!(of("a\nb\n"), [b"a", b"b"]);
    }

    #[test]
    fn numbers_are_whole_words_that_fit() {
        assert_eq!(number(b"0"), Some(0));
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for wrong in [&b"18446744073709551616"[..], b"", b"-1", b"1k", b"0x1", b"\xff"] {
            assert_eq!(number(wrong), None, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut zones = Vec::new();
            let _ = meminfo(&text);
            let _ = pressure(&text);
            let _ = unused(&text);
            let _ = vmstat(&text);
            let _ = zoneinfo(&text, &mut zones);
            let _ = buddyinfo(&text, &mut [Zone::default()]);
            let _ = free_pages(&text, &mut [Zone::default()]);
        }

        #[test]
        fn no_cut_of_a_real_text_panics(cut in 0usize..20_000) {
            let mut zones = Vec::new();
            for (guest, name) in [
                ("6.12-filled", "zoneinfo"),
                ("6.12-two-nodes", "meminfo"),
                ("6.12-swapped", "vmstat"),
                ("6.12-filled", "buddyinfo"),
            ] {
                let text = text_of(guest, name);
                let cut = &text[..cut.min(text.len())];
                let _ = meminfo(cut);
                let _ = vmstat(cut);
                let _ = zoneinfo(cut, &mut zones);
                let _ = buddyinfo(cut, &mut zones);
                let _ = free_pages(cut, &mut zones);
            }
        }
    }
}
