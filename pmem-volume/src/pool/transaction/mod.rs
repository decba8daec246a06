//! Changes of several words or records that count as a whole.

pub(super) mod mirrored;
pub(super) mod redo_log;
