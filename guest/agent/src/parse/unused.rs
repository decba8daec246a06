//! Parser for /proc/sys/fs/dentry-state and /proc/sys/fs/inode-nr.

use super::{number, words};

/// Returns the number of objects on LRU lists, which is the second number in each file. `None` if
/// the file has no second number.
pub(crate) fn unused(text: &[u8]) -> Option<u64> {
    words(text).nth(1).and_then(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_number_is_read() {
        assert_eq!(unused(b"164829\t139103\t45\t0\t93217\t0\n"), Some(139_103));
        assert_eq!(unused(b"120413\t507\n"), Some(507));
        for wrong in [&b""[..], b"5\n", b"5\t-1\n", b"5\tmany\n"] {
            assert_eq!(unused(wrong), None, "{wrong:?}");
        }
    }
}
