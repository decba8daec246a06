//! Atomic changes of several words or records.

pub(super) mod mirrored;
pub(super) mod redo_log;
