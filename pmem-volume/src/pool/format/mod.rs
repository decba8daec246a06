//! Format of a pool on the media, as verified types.

pub(super) mod chunk;
pub(super) mod format_plan;
pub mod layout;
pub(super) mod mirrored;
pub(super) mod superblock;
pub(super) mod table;
pub(super) mod volume_record;
