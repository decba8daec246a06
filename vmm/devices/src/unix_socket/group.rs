//! Lookup of the host's groups by name or number.

use std::fs;
use std::io;

/// Returns the number of a group. Names are looked up in /etc/group, because a static binary has no
/// other source.
pub(super) fn id_of(group: &str) -> io::Result<u32> {
    match group.parse() {
        Ok(number) => Ok(number),
        Err(_) => find(&fs::read_to_string("/etc/group")?, group)
            .ok_or_else(|| io::Error::other(format!("the host has no group {group:?}"))),
    }
}

/// Returns the number of a group in text in the format of group(5): `name:password:number:members`.
fn find(text: &str, group: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name_and_number() {
        let text = "root:x:0:\nkvm:x:104:alice,bob\nbroken:x\n";
        assert_eq!(find(text, "kvm"), Some(104));
        assert_eq!(find(text, "broken"), None);
        assert_eq!(find(text, "kv"), None);
        assert_eq!(id_of("1234").unwrap(), 1234);
    }
}
