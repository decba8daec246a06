//! Parser for /proc/meminfo.

use foreshore_proto::{KernelUse, Memory};

use super::{ParseError, lines, number, words};

const FILE: &str = "/proc/meminfo";

/// Parses sizes. Missing fields are zero.
pub(crate) fn meminfo(text: &[u8]) -> Result<(Memory, KernelUse), ParseError> {
    let (mut memory, mut kernel) = (Memory::default(), KernelUse::default());
    let (mut total, mut free, mut available) = (None, None, None);
    for line in lines(text) {
        // Only twelve of about fifty lines are needed.
        if !matches!(line.first(), Some(b'M' | b'B' | b'C' | b'A' | b'S' | b'K' | b'P')) {
            continue;
        }
        let mut words = words(line);
        let Some(key) = words.next() else { continue };
        // The value is parsed only after the key has matched.
        let mut bytes = |field| kib(words.next(), field);
        match key {
            b"MemTotal:" => total = Some(bytes("MemTotal")?),
            b"MemFree:" => free = Some(bytes("MemFree")?),
            b"MemAvailable:" => available = Some(bytes("MemAvailable")?),
            b"Buffers:" => {
                memory.cached_bytes = memory.cached_bytes.saturating_add(bytes("Buffers")?)
            }
            b"Cached:" => {
                memory.cached_bytes = memory.cached_bytes.saturating_add(bytes("Cached")?)
            }
            b"AnonPages:" => memory.anon_bytes = bytes("AnonPages")?,
            b"SwapTotal:" => memory.swap_total_bytes = bytes("SwapTotal")?,
            b"SwapFree:" => memory.swap_free_bytes = bytes("SwapFree")?,
            b"SReclaimable:" => kernel.slab_reclaimable_bytes = bytes("SReclaimable")?,
            b"SUnreclaim:" => kernel.slab_unreclaimable_bytes = bytes("SUnreclaim")?,
            b"KernelStack:" => kernel.stack_bytes = bytes("KernelStack")?,
            b"PageTables:" => kernel.page_table_bytes = bytes("PageTables")?,
            _ => {}
        }
    }
    let required =
        |value: Option<u64>, field| value.ok_or(ParseError::Missing { file: FILE, field });
    memory.total_bytes = required(total, "MemTotal")?;
    memory.free_bytes = required(free, "MemFree")?;
    memory.available_bytes = required(available, "MemAvailable")?;
    Ok((memory, kernel))
}

/// Parses a size in units of 1024 bytes. The kernel calls this unit kB.
fn kib(word: Option<&[u8]>, field: &'static str) -> Result<u64, ParseError> {
    let kib = word.and_then(number).and_then(|kib| kib.checked_mul(1024));
    kib.ok_or(ParseError::NotANumber { file: FILE, field })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_of_6_12_with_plugged_memory() {
        let (memory, kernel) =
            meminfo(include_bytes!("../../tests/data/6.12-two-nodes/meminfo")).expect("parses");
        assert_eq!(memory.total_bytes, 803_532 * 1024);
        assert_eq!(memory.free_bytes, 768_980 * 1024);
        assert_eq!(memory.available_bytes, 762_648 * 1024);
        assert_eq!(memory.cached_bytes, 3276 * 1024);
        assert_eq!(memory.anon_bytes, 60 * 1024);
        assert_eq!((memory.swap_total_bytes, memory.swap_free_bytes), (0, 0));
        let expected = KernelUse {
            slab_unreclaimable_bytes: 7820 * 1024,
            slab_reclaimable_bytes: 640 * 1024,
            page_table_bytes: 48 * 1024,
            stack_bytes: 1056 * 1024,
            ..KernelUse::default()
        };
        assert_eq!(kernel, expected);
    }

    #[test]
    fn missing_field_or_invalid_number_is_named() {
        let missing = meminfo(b"MemTotal: 5 kB\nMemFree: 1 kB\n").expect_err("no MemAvailable");
        assert_eq!(missing.to_string(), "/proc/meminfo has no MemAvailable");
        let wrong = meminfo(b"MemTotal: many kB\n").expect_err("no number");
        assert_eq!(wrong.to_string(), "/proc/meminfo has a MemTotal that is not a number");
        assert!(meminfo(b"MemTotal: 18446744073709551615 kB\n").is_err(), "does not fit");
    }
}
