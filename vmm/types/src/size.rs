//! Sizes in bytes. Flags, parameters and output use the same syntax and format.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Description of a size's syntax, for errors.
pub const SYNTAX: &str = "bytes, or a number with K, M, G or T";

/// Description of a size's syntax, for `--help`.
pub const HELP: &str = "Sizes are in bytes, or take K, M, G or T (also KiB to TiB), powers of 1024: 512M, 1.5G, 64MiB.";

/// Maximum number of significant digits after the decimal point. A multiple of 2^-40 has at most 40
/// such digits. Truncating a number after them therefore does not change its number of whole bytes,
/// in T or in a smaller unit.
const FRACTION_DIGITS: usize = 40;

/// Unit of a size: 1024 to the power of `power`.
#[derive(Clone, Copy)]
struct Unit {
    letter: char,
    name: &'static str,
    power: u32,
}

/// Units, largest first.
const UNITS: [Unit; 4] = [
    Unit { letter: 'T', name: "TiB", power: 4 },
    Unit { letter: 'G', name: "GiB", power: 3 },
    Unit { letter: 'M', name: "MiB", power: 2 },
    Unit { letter: 'K', name: "KiB", power: 1 },
];

impl Unit {
    fn bytes(self) -> u64 {
        1 << (10 * self.power)
    }

    /// Returns true if `bytes` is short in this unit: at most five digits, or less than 1,024 KiB.
    fn is_short(self, bytes: u64) -> bool {
        bytes / self.bytes() < if self.power > 1 { 100_000 } else { 1 << 10 }
    }
}

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    #[error("{text:?} is not a size: {SYNTAX}")]
    Malformed { text: String },
    #[error("{text:?} is not a whole number of bytes")]
    NotWhole { text: String },
    /// The number of bytes does not fit into 64 bits.
    #[error("{text:?} is more than {most_bytes} bytes")]
    TooLarge { text: String, most_bytes: u64 },
    /// The unit is KB, MB, GB or TB. Some users mean powers of 1000 by these, others powers of
    /// 1024.
    #[error(
        "{text:?} could be {decimal_bytes} or {binary_bytes} bytes; \
         use {0}, {0}iB or the number of bytes",
        without_b(text)
    )]
    Ambiguous {
        text: String,
        /// Number of whole bytes if the unit is a power of 1000.
        decimal_bytes: u64,
        /// Number of whole bytes if the unit is a power of 1024.
        binary_bytes: u64,
    },
}

/// Converts `64mb` to `64M`.
fn without_b(text: &str) -> String {
    text.strip_suffix(['B', 'b']).unwrap_or(text).to_ascii_uppercase()
}

/// Parses a size and returns its number of bytes.
///
/// The units are K, M, G and T, in upper or lower case, and KiB, MiB, GiB and TiB. All are powers
/// of 1024. The number may have a fraction if the size is a whole number of bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed { text: text.to_owned() };
    let too_large = || SizeError::TooLarge { text: text.to_owned(), most_bytes: u64::MAX };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (integer, fraction) = split_number(number).ok_or_else(malformed)?;
    let unit = match suffix.chars().next() {
        Some(letter) => Some(find_unit(letter).ok_or_else(malformed)?),
        None => None,
    };
    let integer: u64 = integer.parse().map_err(|_| too_large())?;
    // Every unit begins with one ASCII letter.
    let (power, is_ambiguous) = match (unit, suffix.get(1..)) {
        (None, _) => (0, false),
        (Some(unit), Some("" | "iB")) => (unit.power, false),
        (Some(unit), Some("B" | "b")) => (unit.power, true),
        _ => return Err(malformed()),
    };
    let (bytes, is_whole) = scale(integer, fraction, 2, 10 * power);
    let bytes = u64::try_from(bytes).map_err(|_| too_large())?;
    if is_ambiguous {
        let (decimal_bytes, _) = scale(integer, fraction, 10, 3 * power);
        return Err(SizeError::Ambiguous {
            text: text.to_owned(),
            decimal_bytes: u64::try_from(decimal_bytes).map_err(|_| too_large())?,
            binary_bytes: bytes,
        });
    }
    match is_whole {
        true => Ok(bytes),
        false => Err(SizeError::NotWhole { text: text.to_owned() }),
    }
}

/// Splits a number into the digits before and after the decimal point. A point must have digits on
/// both sides.
fn split_number(number: &str) -> Option<(&str, &str)> {
    let (integer, fraction) = match number.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (number, ""),
    };
    (!integer.is_empty() && !fraction.contains('.')).then_some((integer, fraction))
}

fn find_unit(letter: char) -> Option<Unit> {
    UNITS.into_iter().find(|unit| unit.letter.eq_ignore_ascii_case(&letter))
}

/// Computes `integer.fraction` times `base` to the power of `exponent`. Returns the integer part,
/// and true if the result is an integer. No argument exceeds what the unit T needs, so nothing
/// overflows.
fn scale(integer: u64, fraction: &str, base: u8, exponent: u32) -> (u128, bool) {
    let (kept, rest) = fraction.split_at(fraction.len().min(FRACTION_DIGITS));
    let mut digits: Vec<u8> = kept.bytes().map(|digit| digit - b'0').collect();
    let mut whole = u128::from(integer);
    for _ in 0..exponent {
        let mut carry = 0;
        for digit in digits.iter_mut().rev() {
            let product = base * *digit + carry;
            (*digit, carry) = (product % 10, product / 10);
        }
        whole = u128::from(base) * whole + u128::from(carry);
    }
    let is_whole =
        digits.iter().all(|digit| *digit == 0) && rest.bytes().all(|digit| digit == b'0');
    (whole, is_whole)
}

/// Size in bytes. The size is displayed in the largest unit that divides it, for example `512 MiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Size {
    /// Formats the size for [`parse`], in the largest unit that divides it, for example `512M`.
    pub fn compact(self) -> String {
        match self.unit() {
            Some(unit) => format!("{}{}", self.0 / unit.bytes(), unit.letter),
            None => self.0.to_string(),
        }
    }

    /// Formats the size as short text. The text is exact if a unit divides the size and the result
    /// has at most five digits. Otherwise it has one decimal and is rounded down, so that it never
    /// shows more free space than there is.
    pub fn rounded(self) -> String {
        let bytes = self.0;
        let fits = |unit: &Unit| bytes >= unit.bytes();
        let is_exact = |unit: &Unit| bytes.is_multiple_of(unit.bytes()) && unit.is_short(bytes);
        if let Some(unit) = UNITS.iter().find(|unit| fits(unit) && is_exact(unit)) {
            return format!("{} {}", bytes / unit.bytes(), unit.name);
        }
        // A few tebibytes are shown in gibibytes: just below 2 TiB, the text is 2047.9 GiB instead
        // of 1.9 TiB.
        let [tib, gib, ..] = UNITS;
        let unit = UNITS
            .iter()
            .find(|unit| fits(unit) && (unit.power < tib.power || !gib.is_short(bytes)));
        match unit {
            Some(unit) => {
                let tenths = u128::from(bytes % unit.bytes()) * 10 / u128::from(unit.bytes());
                format!("{}.{tenths} {}", bytes / unit.bytes(), unit.name)
            }
            None => self.to_string(),
        }
    }

    /// Largest unit that divides the size. `None` for 0 and if no unit divides the size.
    fn unit(self) -> Option<Unit> {
        UNITS.into_iter().find(|unit| self.0 != 0 && self.0.is_multiple_of(unit.bytes()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit() {
            Some(unit) => write!(f, "{} {}", self.0 / unit.bytes(), unit.name),
            None if self.0 == 0 => f.write_str("0"),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        parse(text).map(Self)
    }
}

#[cfg(test)]
mod tests;
