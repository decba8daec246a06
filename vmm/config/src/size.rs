//! Bounds that several sizes in a configuration share.

use foreshore_types::size::Size;
use foreshore_types::{PAGE_BYTES, UNIT_BYTES};

use crate::error::ConfigError;

/// Largest size in a flag: x86-64 has at most 52 physical address bits. A guest may have fewer,
/// which is checked when the VM is built.
pub const MAX_BYTES: u64 = 1 << 52;

/// Checks a memory size: a multiple of [`UNIT_BYTES`], greater than 0, and at most [`MAX_BYTES`].
pub fn check(flag: &'static str, key: &'static str, bytes: u64) -> Result<(), ConfigError> {
    check_in(flag, key, bytes, UNIT_BYTES)
}

/// Checks the size of memory that is never plugged or unplugged. It must be a multiple of the page
/// size.
pub fn check_pages(flag: &'static str, key: &'static str, bytes: u64) -> Result<(), ConfigError> {
    check_in(flag, key, bytes, PAGE_BYTES)
}

/// Checks a size that must be a multiple of `unit_bytes`.
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
    check_most(flag, key, bytes, MAX_BYTES, "")?;
    if !bytes.is_multiple_of(unit_bytes) {
        return Err(ConfigError::NotMultiple { flag, key, value, unit: Size(unit_bytes) });
    }
    Ok(())
}

/// Checks that a size is at most `most_bytes`. `because` explains this limit.
pub fn check_most(
    flag: &'static str,
    key: &'static str,
    bytes: u64,
    most_bytes: u64,
    because: &'static str,
) -> Result<(), ConfigError> {
    match bytes <= most_bytes {
        true => Ok(()),
        false => Err(ConfigError::TooLarge {
            flag,
            key,
            value: Size(bytes),
            most: Size(most_bytes),
            because,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
