//! Users and groups of the host. They are looked up in /etc/passwd and /etc/group, because a static
//! binary has no other source.

use std::fs;
use std::io;

/// Entry of passwd(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
}

/// Returns the user with this name or number.
pub fn user(wanted: &str) -> io::Result<Option<User>> {
    Ok(find_user(&fs::read_to_string("/etc/passwd")?, wanted))
}

/// Returns the number of the group with this name or number. A number needs no entry.
pub fn group_id(wanted: &str) -> io::Result<Option<u32>> {
    match wanted.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Ok(find_group(&fs::read_to_string("/etc/group")?, wanted)),
    }
}

/// Returns the groups that have the user as a member.
pub fn supplementary_groups(user: &str) -> io::Result<Vec<u32>> {
    Ok(groups_of(&fs::read_to_string("/etc/group")?, user))
}

/// Searches text in the format `name:password:uid:gid:comment:folder:shell`.
fn find_user(text: &str, wanted: &str) -> Option<User> {
    text.lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let &[name, _, uid, gid, ..] = &*fields else { return None };
        let is_wanted = name == wanted || uid == wanted;
        is_wanted.then(|| {
            Some(User { name: name.to_owned(), uid: uid.parse().ok()?, gid: gid.parse().ok()? })
        })?
    })
}

/// Searches text in the format `name:password:gid:members`.
fn find_group(text: &str, wanted: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(wanted)).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn groups_of(text: &str, user: &str) -> Vec<u32> {
    let of_line = |line: &str| {
        let fields: Vec<_> = line.split(':').collect();
        let &[_, _, gid, members] = &*fields else { return None };
        members.split(',').any(|member| member == user).then(|| gid.parse().ok())?
    };
    text.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "root:x:0:\nkvm:x:104:alice,bob\nbroken:x\ndisk:x:6:bob\n";

    #[test]
    fn groups_are_found_by_name_and_number() {
        assert_eq!(find_group(GROUPS, "kvm"), Some(104));
        assert_eq!(find_group(GROUPS, "broken"), None);
        assert_eq!(find_group(GROUPS, "kv"), None);
        assert_eq!(group_id("1234").unwrap(), Some(1234));
    }

    #[test]
    fn groups_of_a_user_are_found_by_the_members() {
        assert_eq!(groups_of(GROUPS, "bob"), [104, 6]);
        assert_eq!(groups_of(GROUPS, "alice"), [104]);
        assert_eq!(groups_of(GROUPS, "bo"), []);
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        let text = "root:x:0:0:root:/root:/bin/sh\nbroken:x:y\nvm-web:x:998:997::/:/bin/false\n";
        let vm = User { name: "vm-web".to_owned(), uid: 998, gid: 997 };
        assert_eq!(find_user(text, "vm-web"), Some(vm.clone()));
        assert_eq!(find_user(text, "998"), Some(vm));
        assert_eq!(find_user(text, "broken"), None);
        assert_eq!(find_user(text, "997"), None);
    }
}
