//! Files that a thread may open, limited by Landlock (Linux
//! Documentation/userspace-api/landlock.rst). Files that are already open are not affected.

use std::path::PathBuf;

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, LandlockStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};
use thiserror::Error;

/// Newest version of the kernel's interface whose rights for files are used. A kernel with an older
/// version does not restrict what it does not know.
const NEWEST: ABI = ABI::V5;

/// Reading files and folders.
const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});
/// Writing files, and creating, renaming and removing them. Programs are never executed, and
/// devices, links and folders are never created.
const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    WriteFile | Truncate | IoctlDev | MakeReg | MakeSock | MakeFifo | RemoveFile | Refer
});

/// What threads may do with a file, or with all files below a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub path: PathBuf,
    pub reads: bool,
    pub writes: bool,
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
    for Rule { path, reads, writes } in rules {
        let mut access = BitFlags::empty();
        access |= if *reads { READ } else { BitFlags::empty() };
        access |= if *writes { WRITE } else { BitFlags::empty() };
        ruleset = ruleset.add_rules(path_beneath_rules([path], access))?;
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
