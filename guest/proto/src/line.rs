//! Splits a byte stream into lines of limited length.

use crate::{MAX_LINE_BYTES, Refusal};

/// Splits a byte stream into lines. The buffer never exceeds [`MAX_LINE_BYTES`].
#[derive(Debug, Default)]
pub struct LineReader {
    buffer: Vec<u8>,
    /// Number of bytes in `buffer` that have already been returned.
    taken: usize,
    /// Set while skipping the rest of a line that is too long.
    skipping: bool,
}

/// Result of [`LineReader::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum NextLine<'a> {
    /// Complete line without its newline.
    Line(&'a [u8]),
    /// Line that was too long. The line has been dropped.
    Refused(Refusal),
}

impl LineReader {
    /// Creates an empty reader.
    pub fn new() -> Self {
        Self::default()
    }

    /// Consumes bytes from `input`, and returns the next line once it is complete. Returns `None`
    /// if all of `input` has been consumed but the line is still incomplete.
    pub fn next<'a>(&'a mut self, input: &mut &[u8]) -> Option<NextLine<'a>> {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        let end = input.iter().position(|&byte| byte == b'\n');
        let (piece, rest) = match end {
            Some(end) => (&input[..end], &input[end + 1..]),
            None => (*input, &input[input.len()..]),
        };
        *input = rest;
        if self.skipping {
            self.skipping = end.is_none();
            return if end.is_some() { self.next(input) } else { None };
        }
        if self.buffer.len() + piece.len() > MAX_LINE_BYTES {
            self.buffer.clear();
            self.skipping = end.is_none();
            return Some(NextLine::Refused(Refusal::TooLong { bound_bytes: MAX_LINE_BYTES }));
        }
        self.buffer.extend_from_slice(piece);
        end?;
        self.taken = self.buffer.len();
        Some(NextLine::Line(&self.buffer))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns all lines that `reader` finds in `input`. A rejected line is `None`.
    fn read_all(reader: &mut LineReader, mut input: &[u8]) -> Vec<Option<Vec<u8>>> {
        let mut lines = Vec::new();
        while let Some(next) = reader.next(&mut input) {
            lines.push(match next {
                NextLine::Line(line) => Some(line.to_vec()),
                NextLine::Refused(_) => None,
            });
        }
        assert!(input.is_empty());
        lines
    }

    #[test]
    fn endless_line_is_refused_once_and_not_stored() {
        let mut reader = LineReader::new();
        let chunk = [b'x'; 4096];
        let mut refused = 0;
        for _ in 0..1000 {
            refused += read_all(&mut reader, &chunk).len();
            assert!(reader.buffer.len() <= MAX_LINE_BYTES);
        }
        assert_eq!(refused, 1);
        assert_eq!(read_all(&mut reader, b"tail\nnext\n"), vec![Some(b"next".to_vec())]);
    }

    #[test]
    fn the_longest_line_is_accepted_and_one_byte_more_is_not() {
        let mut line = vec![b'x'; MAX_LINE_BYTES];
        line.push(b'\n');
        assert_eq!(
            read_all(&mut LineReader::new(), &line),
            vec![Some(line[..MAX_LINE_BYTES].to_vec())]
        );
        line.insert(0, b'x');
        line.extend_from_slice(b"ok\n");
        assert_eq!(read_all(&mut LineReader::new(), &line), vec![None, Some(b"ok".to_vec())]);
    }

    proptest! {
        #[test]
        fn the_cut_between_reads_does_not_matter(
            lines in prop::collection::vec("[a-z]{0,9}", 0..9),
            cuts in prop::collection::vec(1usize..20, 1..40),
        ) {
            let stream: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect();
            let mut reader = LineReader::new();
            let mut seen = Vec::new();
            let mut rest = &stream[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                seen.extend(read_all(&mut reader, now));
                rest = later;
            }
            let expected: Vec<_> = lines.iter().map(|line| Some(line.clone().into_bytes())).collect();
            prop_assert_eq!(seen, expected);
        }
    }
}
