//! Parser for /proc/pressure/memory.

use foreshore_proto::Stall;

use super::{ParseError, lines, number, required, words};

const FILE: &str = "/proc/pressure/memory";

/// Parses stall times. The file is missing on a kernel without pressure information, and the caller
/// handles that case.
pub(crate) fn pressure(text: &[u8]) -> Result<Stall, ParseError> {
    let mut stall = Stall::default();
    for line in lines(text) {
        let mut words = words(line);
        match words.next() {
            Some(b"some") => (stall.some_us, stall.some_avg10_basis_points) = fields(words)?,
            Some(b"full") => (stall.full_us, stall.full_avg10_basis_points) = fields(words)?,
            _ => {}
        }
    }
    Ok(stall)
}

/// Returns `total` and `avg10` of one line.
fn fields<'a>(words: impl Iterator<Item = &'a [u8]>) -> Result<(u64, u32), ParseError> {
    let (mut total, mut avg10) = (None, None);
    for word in words {
        if let Some(value) = word.strip_prefix(b"total=") {
            total = Some(required(Some(value), FILE, "total")?);
        } else if let Some(value) = word.strip_prefix(b"avg10=") {
            avg10 = Some(
                hundredths(value).ok_or(ParseError::NotANumber { file: FILE, field: "avg10" })?,
            );
        }
    }
    let total = total.ok_or(ParseError::Missing { file: FILE, field: "total" })?;
    Ok((total, avg10.ok_or(ParseError::Missing { file: FILE, field: "avg10" })?))
}

/// Parses `12.34` as 1234. The kernel always writes two decimals.
fn hundredths(value: &[u8]) -> Option<u32> {
    let dot = value.iter().position(|&byte| byte == b'.')?;
    let (whole, decimals) = (number(&value[..dot])?, &value[dot + 1..]);
    if decimals.len() != 2 {
        return None;
    }
    let all = whole.checked_mul(100)?.checked_add(number(decimals)?)?;
    u32::try_from(all).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines_are_read() {
        let text = b"some avg10=12.34 avg60=1.00 avg300=0.00 total=9876543\nfull avg10=0.05 avg60=0.00 avg300=0.00 total=17\n";
        let expected = Stall {
            some_us: 9_876_543,
            full_us: 17,
            some_avg10_basis_points: 1234,
            full_avg10_basis_points: 5,
        };
        assert_eq!(pressure(text), Ok(expected));
    }

    #[test]
    fn a_guest_at_rest() {
        assert_eq!(
            pressure(include_bytes!("../../tests/data/6.1-one-node/pressure")),
            Ok(Stall::default())
        );
    }

    #[test]
    fn missing_field_or_invalid_number_is_named() {
        assert!(pressure(b"some avg10=0.00 avg60=0.00\n").is_err());
        assert!(pressure(b"some avg10=0 total=1\n").is_err());
        assert!(pressure(b"some avg10=0.001 total=1\n").is_err());
        assert!(pressure(b"some avg10=99999999999.00 total=1\n").is_err());
    }
}
