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

/// Writes a size in the largest unit that divides it, or with one decimal where none does.
pub fn display(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, scale) in UNITS {
        if bytes < scale {
            continue;
        }
        if bytes.is_multiple_of(scale) {
            return format!("{} {unit}", bytes / scale);
        }
        // An exact number of a smaller unit says more than a rounded one, as long as it is short.
        if bytes < 64 * scale && scale > 1 << 20 && bytes.is_multiple_of(1 << 20) {
            return format!("{} MiB", bytes >> 20);
        }
        return format!("{:.1} {unit}", bytes as f64 / scale as f64);
    }
    format!("{bytes} bytes")
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
    }
}
