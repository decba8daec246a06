//! Sizes as people write them: `4G`, `512M`, `2097152`.

use thiserror::Error;

/// Why a text is not a size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// Not digits with an optional unit.
    #[error(
        "{0:?} is not a size: write a whole number with an optional K, M, G or T (powers of 1024), as in 512M"
    )]
    Malformed(String),
    /// The number does not fit.
    #[error("{0:?} is larger than 2^64 - 1 bytes")]
    TooLarge(String),
}

/// Parses a size in bytes. The units K, M, G and T are powers of 1024; `KiB` and so on are accepted too.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    if digits.is_empty() {
        return Err(malformed());
    }
    let shift = match unit.strip_suffix("iB").unwrap_or(unit) {
        "" if unit.is_empty() => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(malformed()),
    };
    let number: u64 = digits.parse().map_err(|_| SizeError::TooLarge(text.to_owned()))?;
    number.checked_mul(1 << shift).ok_or_else(|| SizeError::TooLarge(text.to_owned()))
}

/// The largest first.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Writes a size in the largest unit that divides it, or with one decimal where none does that leaves it short. Rounded
/// down: of what is free, there is as much as it says.
pub fn display(bytes: u64) -> String {
    // An exact number of a smaller unit says more than a rounded one.
    for (unit, scale) in UNITS {
        if bytes >= scale && bytes.is_multiple_of(scale) && is_short(bytes, scale) {
            return format!("{} {unit}", bytes / scale);
        }
    }
    // Small tebibytes in gibibytes: 2047.9 GiB of 2 TiB are free, and not 1.9 TiB.
    let readable = |scale| bytes >= scale && (scale < 1 << 40 || !is_short(bytes, 1 << 30));
    match UNITS.into_iter().find(|(_, scale)| readable(*scale)) {
        Some((unit, scale)) => {
            let tenths = (u128::from(bytes % scale) * 10) / u128::from(scale);
            format!("{}.{tenths} {unit}", bytes / scale)
        }
        None => format!("{bytes} bytes"),
    }
}

/// Has the number of such units at most five digits? Bytes and kibibytes are never read at such length.
fn is_short(bytes: u64, scale: u64) -> bool {
    bytes / scale < if scale >= 1 << 20 { 64 << 10 } else { 1 << 10 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in
            [("0", 0), ("7", 7), ("1K", 1024), ("512M", 512 << 20), ("4GiB", 4 << 30), ("2t", 2 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_by_name() {
        for text in ["", "G", "-1", "1.5G", "1X", "1GB", "iB", "1iB", " 1", "1 G"] {
            assert_eq!(parse(text), Err(SizeError::Malformed(text.to_owned())), "{text:?}");
        }
        for text in ["18446744073709551616", "16777216T"] {
            assert_eq!(parse(text), Err(SizeError::TooLarge(text.to_owned())), "{text:?}");
        }
    }

    #[test]
    fn display_is_exact_where_it_can_be() {
        assert_eq!(display(4 << 30), "4 GiB");
        assert_eq!(display((4 << 30) - (4 << 20)), "4092 MiB");
        assert_eq!(display(6 << 20), "6 MiB");
        assert_eq!(display(12), "12 bytes");
        assert_eq!(display(1536 << 30), "1536 GiB");
        assert_eq!(display(3 << 10), "3 KiB");
        assert_eq!(display(512 << 40), "512 TiB");
    }

    #[test]
    fn display_is_short_and_says_no_more_than_there_is() {
        assert_eq!(display((1 << 40) - (10 << 20)), "1023.9 GiB");
        assert_eq!(display((2 << 40) - (18 << 20)), "2047.9 GiB");
        assert_eq!(display((100 << 40) - 1), "99.9 TiB");
        assert_eq!(display((5 << 20) + (5 << 10)), "5.0 MiB");
        assert_eq!(display(1025), "1.0 KiB");
        assert_eq!(display(u64::MAX), "16777215.9 TiB");
    }
}
