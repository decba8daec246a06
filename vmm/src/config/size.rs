//! Sizes as users write and read them, and the bounds that all of them share.

use std::fmt;

use super::error::ConfigError;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The unit of memory that comes and goes: virtio-mem's block and the pool's chunk.
pub const UNIT_BYTES: u64 = 2 * MIB;

/// The unit of memory that is there from boot on, or that ACPI adds: a page.
pub const PAGE_BYTES: u64 = 4 * KIB;

/// The most that one flag may ask for: all that 52 bits reach, the most that x86-64 has for physical addresses. How many a
/// guest has is only known when the VM is built, and what is too large for those is refused then.
pub const MAX_BYTES: u64 = 1 << 52;

/// A size in bytes, shown in the largest unit that divides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        if self.0 == 0 {
            return f.write_str("0");
        }
        match UNITS.iter().find(|(shift, _)| self.0.is_multiple_of(1 << shift)) {
            Some((shift, unit)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Reads `1234`, `512M`, `4G`: bytes, or with one of K, M, G, T in powers of 1024.
pub fn parse(text: &str) -> Option<u64> {
    let (digits, unit) = match text.char_indices().last()? {
        (at, 'K' | 'k') => (&text[..at], KIB),
        (at, 'M' | 'm') => (&text[..at], MIB),
        (at, 'G' | 'g') => (&text[..at], 1 << 30),
        (at, 'T' | 't') => (&text[..at], 1 << 40),
        _ => (text, 1),
    };
    // `u64::from_str` takes a sign, which a size has not.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Checks a size of memory: not nothing, whole units, at most [`MAX_BYTES`].
pub fn check(flag: &'static str, key: &'static str, bytes: u64) -> Result<(), ConfigError> {
    check_in(flag, key, bytes, UNIT_BYTES)
}

/// The same of memory that need not come and go: whole pages.
pub fn check_pages(flag: &'static str, key: &'static str, bytes: u64) -> Result<(), ConfigError> {
    check_in(flag, key, bytes, PAGE_BYTES)
}

/// The same in whole units of `unit_bytes`.
pub fn check_in(
    flag: &'static str,
    key: &'static str,
    bytes: u64,
    unit_bytes: u64,
) -> Result<(), ConfigError> {
    let value = Size(bytes);
    if bytes == 0 {
        return Err(ConfigError::TooSmall { flag, key, value, least: Size(unit_bytes) });
    }
    if bytes > MAX_BYTES {
        return Err(ConfigError::TooLarge { flag, key, value, most: Size(MAX_BYTES), because: "" });
    }
    if !bytes.is_multiple_of(unit_bytes) {
        return Err(ConfigError::NotMultiple { flag, key, value, unit: Size(unit_bytes) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        assert_eq!(parse("0"), Some(0));
        assert_eq!(parse("4096"), Some(4096));
        assert_eq!(parse("4K"), Some(4096));
        assert_eq!(parse("512M"), Some(512 << 20));
        assert_eq!(parse("2g"), Some(2 << 30));
        assert_eq!(parse("1T"), Some(1 << 40));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in
            ["", "M", "-1", "+1", "1.5G", "1GB", "0x10", "1 G", "16777216T", "18446744073709551616", "é"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        assert_eq!(Size(0).to_string(), "0");
        assert_eq!(Size(1).to_string(), "1 bytes");
        assert_eq!(Size(3 << 20).to_string(), "3 MiB");
        assert_eq!(Size(1536 << 20).to_string(), "1536 MiB");
        assert_eq!(Size(u64::MAX).to_string(), "18446744073709551615 bytes");
    }

    #[test]
    fn bounds_are_named() {
        let message = |bytes| check("--memory", "size", bytes).unwrap_err().to_string();
        assert_eq!(message(0), "--memory: size is 0, and must be at least 2 MiB");
        assert_eq!(message(3 << 20), "--memory: size is 3 MiB, which is not a multiple of 2 MiB");
        assert_eq!(message(8 << 50), "--memory: size is 8192 TiB, and must be at most 4096 TiB");
        assert!(check("--memory", "size", UNIT_BYTES).is_ok());
        assert!(check("--memory", "size", MAX_BYTES).is_ok());
        let pages = |bytes| check_pages("--memory", "size", bytes);
        assert!(pages(3 << 20).is_ok() && pages(PAGE_BYTES).is_ok());
        assert_eq!(
            pages(5000).unwrap_err().to_string(),
            "--memory: size is 5000 bytes, which is not a multiple of 4 KiB"
        );
    }
}
