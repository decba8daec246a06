//! Confinement of the VMM. A guest that breaks out of its VM runs code in the VMM's process. This
//! crate limits what the code finds there.

pub mod accounts;
pub mod capabilities;
pub mod descriptors;
pub mod identity;
pub mod landlock;
pub mod process;
pub mod seccomp;
pub mod thread;
