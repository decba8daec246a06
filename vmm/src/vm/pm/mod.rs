//! Persistent memory of a machine: its pools and volumes.

pub(super) mod attached_volumes;
pub(super) mod created_volumes;
pub(super) mod pools;
pub(super) mod volumes;
