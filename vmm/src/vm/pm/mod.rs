//! Volumes of a machine.

pub(super) mod attached_volumes;
pub(super) mod created_volumes;
pub(super) mod volumes;
