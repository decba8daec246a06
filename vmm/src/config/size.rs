//! Bounds that the sizes of a configuration share.

pub use foreshore_types::size::Size;

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
