//! Guest memory: where it lies, what backs it, and the one view through which the VMM reaches it.

pub mod layout;
pub mod view;
