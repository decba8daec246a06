//! User, groups and root folder of the process.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Gid, Uid, chdir, chroot};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use thiserror::Error;

use crate::accounts;

/// Identity that a process started by root takes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Name or number.
    pub user: Option<String>,
    /// Name or number. The default is the primary group of the user.
    pub group: Option<String>,
    pub root: Option<PathBuf>,
}

#[derive(Debug, Error)]
pub enum IdentityError {
    #[error("--user: the host has no user {0:?}")]
    NoUser(String),
    #[error("--user: the user {0} has no entry in /etc/passwd, so --group is required")]
    NoPrimaryGroup(String),
    #[error("--group: the host has no group {0:?}")]
    NoGroup(String),
    #[error("--chroot: cannot make {root:?} the root folder{hint}")]
    Chroot {
        root: PathBuf,
        /// Remedy, preceded by a semicolon. May be empty.
        hint: &'static str,
        #[source]
        source: Errno,
    },
    #[error("--user, --group: cannot change the user and its groups; run the VMM as root")]
    Change(#[from] Errno),
    /// This number means "unchanged" in setresuid(2).
    #[error("{flag}: {} is not a valid number", u32::MAX)]
    Reserved { flag: &'static str },
    #[error("cannot read the users and groups of the host")]
    Lookup(#[source] io::Error),
}

/// Users and groups that an [`Identity`] names.
#[derive(Clone, Debug, Default)]
pub struct Ids {
    user: Option<Uid>,
    group: Option<Gid>,
    /// Supplementary groups.
    groups: Vec<Gid>,
}

/// Changes the root folder of the process. Must be called before other threads are started. Files
/// that are open remain accessible.
pub fn enter_root(root: &Path) -> Result<(), IdentityError> {
    chroot(root).and_then(|()| chdir("/")).map_err(|source| {
        let hint = if source == Errno::PERM { "; run the VMM as root" } else { "" };
        IdentityError::Chroot { root: root.to_owned(), hint, source }
    })
}

impl Ids {
    /// Changes the groups and the user of the process. Must be called before other threads are
    /// started. A user other than root has no capabilities afterwards.
    pub fn assume(&self) -> Result<(), IdentityError> {
        if let Some(group) = self.group {
            set_thread_groups(&self.groups)?;
            set_thread_res_gid(group, group, group)?;
        }
        if let Some(user) = self.user {
            set_thread_res_uid(user, user, user)?;
            if !user.is_root() {
                give_up_capabilities()?;
            }
        }
        Ok(())
    }

    /// User that the process becomes. `None` if it remains the same.
    pub fn user(&self) -> Option<u32> {
        self.user.map(Uid::as_raw)
    }

    /// Primary group that the process gets. `None` if it remains the same.
    pub fn group(&self) -> Option<u32> {
        self.group.map(Gid::as_raw)
    }
}

/// Removes the capabilities that a service manager may have given to the process.
fn give_up_capabilities() -> Result<(), Errno> {
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

impl Identity {
    /// Looks up the user and the group. Must be called before the root folder is changed, because
    /// the files with users and groups are those of the host.
    pub fn look_up(&self) -> Result<Ids, IdentityError> {
        let mut ids = Ids::default();
        if let Some(wanted) = &self.user {
            match accounts::user(wanted).map_err(IdentityError::Lookup)? {
                Some(user) => {
                    let groups = accounts::supplementary_groups(&user.name);
                    let groups = groups.map_err(IdentityError::Lookup)?;
                    ids.groups = groups.into_iter().map(gid).collect::<Result<_, _>>()?;
                    ids.user = Some(uid(user.uid)?);
                    ids.group = Some(gid(user.gid)?);
                }
                None => {
                    let number =
                        wanted.parse().map_err(|_| IdentityError::NoUser(wanted.clone()))?;
                    ids.user = Some(uid(number)?);
                    if self.group.is_none() {
                        return Err(IdentityError::NoPrimaryGroup(wanted.clone()));
                    }
                }
            }
        }
        if let Some(wanted) = &self.group {
            let number = accounts::group_id(wanted).map_err(IdentityError::Lookup)?;
            let number = number.ok_or_else(|| IdentityError::NoGroup(wanted.clone()))?;
            ids.group = Some(gid(number)?);
        }
        Ok(ids)
    }
}

fn uid(number: u32) -> Result<Uid, IdentityError> {
    let is_valid = number != u32::MAX;
    is_valid.then(|| Uid::from_raw(number)).ok_or(IdentityError::Reserved { flag: "--user" })
}

fn gid(number: u32) -> Result<Gid, IdentityError> {
    let is_valid = number != u32::MAX;
    is_valid.then(|| Gid::from_raw(number)).ok_or(IdentityError::Reserved { flag: "--group" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(user: Option<&str>, group: Option<&str>) -> String {
        let text = |name: &str| name.to_owned();
        let identity = Identity { user: user.map(text), group: group.map(text), root: None };
        identity.look_up().err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn users_and_groups_are_found_by_name_and_number() {
        let identity = Identity { user: Some("root".to_owned()), ..Identity::default() };
        let ids = identity.look_up().unwrap();
        assert_eq!((ids.user, ids.group), (Some(Uid::from_raw(0)), Some(Gid::from_raw(0))));
        let identity =
            Identity { user: Some("0".to_owned()), group: Some("12345".to_owned()), root: None };
        let ids = identity.look_up().unwrap();
        assert_eq!((ids.user, ids.group), (Some(Uid::from_raw(0)), Some(Gid::from_raw(12345))));
        assert_eq!(error(Some("no-such"), None), "--user: the host has no user \"no-such\"");
        assert_eq!(error(None, Some("no-such")), "--group: the host has no group \"no-such\"");
        assert!(error(Some("4000000000"), None).contains("--group is required"));
        assert_eq!(error(Some("4000000000"), Some("0")), "");
        // These numbers would change nothing.
        assert_eq!(
            error(Some("4294967295"), Some("0")),
            "--user: 4294967295 is not a valid number"
        );
        assert_eq!(error(None, Some("4294967295")), "--group: 4294967295 is not a valid number");
    }

    #[test]
    fn missing_root_folder_is_refused() {
        let error = enter_root(Path::new("/nonexistent")).unwrap_err();
        let expected = "--chroot: cannot make \"/nonexistent\" the root folder";
        assert_eq!(error.to_string(), expected);
    }
}
