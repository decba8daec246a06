//! Files that a thread may open, limited by Landlock (Linux
//! Documentation/userspace-api/landlock.rst). Files that are already open are not affected.

use std::path::PathBuf;

use landlock::{
    ABI, Access as AccessSet, AccessFs, BitFlags, LandlockStatus, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};
use thiserror::Error;

/// Newest version of the kernel's interface whose rights for files are used. A kernel with an older
/// version does not restrict the rights that it does not know.
const NEWEST: ABI = ABI::V5;

/// Reading files, folders and properties of devices. Filters limit the requests to devices.
const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir | IoctlDev});
/// Writing files, and creating, renaming and removing them. Programs are never executed, and
/// devices, links and folders are never created.
const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    WriteFile | Truncate | IoctlDev | MakeReg | MakeSock | MakeFifo | RemoveFile | Refer
});

/// Access to a file, or to all files below a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Includes the creation and removal of files.
    Write,
    ReadWrite,
    /// Removal of files only.
    Remove,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Self::Read => READ,
            Self::Write => WRITE,
            Self::ReadWrite => READ | WRITE,
            Self::Remove => AccessFs::RemoveFile.into(),
        }
    }

    /// Returns true if this access includes `other`.
    pub fn includes(self, other: Self) -> bool {
        self.rights().contains(other.rights())
    }
}

/// Access that threads have to a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub path: PathBuf,
    pub access: Access,
}

/// The kernel refuses the rules.
#[derive(Debug, Error)]
#[error("the kernel refuses the rules of Landlock")]
pub struct LandlockError(#[from] RulesetError);

/// Rules that the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enforced {
    /// Version of the kernel's interface.
    pub abi: u32,
    /// False if the kernel does not know all rights, and does not restrict the others.
    pub is_full: bool,
}

/// Limits the calling thread, and the threads that it starts later, to the files in `rules`. A rule
/// for a path that does not exist is ignored. Returns `None` if the kernel has no Landlock.
pub fn restrict(rules: &[Rule]) -> Result<Option<Enforced>, LandlockError> {
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        // Signals are limited by filters of system calls. Landlock up to Linux 6.14 would also
        // refuse signals between threads of this process.
        .scope(Scope::AbstractUnixSocket)?;
    let mut ruleset = ruleset.create()?;
    for Rule { path, access } in rules {
        ruleset = ruleset.add_rules(path_beneath_rules([path], access.rights()))?;
    }
    let status = ruleset.restrict_self()?;
    Ok(match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Some(Enforced {
            abi: effective_abi as u32,
            is_full: status.ruleset == RulesetStatus::FullyEnforced,
        }),
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
    })
}
