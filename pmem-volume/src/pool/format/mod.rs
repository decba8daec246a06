//! Format of a pool on the media, as verified types.

pub mod layout;
pub(super) mod superblock;
pub(super) mod table;
pub(super) mod volume_record;
