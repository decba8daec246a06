//! Clients of Cloud Hypervisor, held against foreshore: one that is used by a crate of its own, and
//! others byte by byte as they send and read.
//!
//! Each is a function that is given a VMM without a VM, and leaves none. They run in tests against
//! an owner without machines, and in the guest tests against live guests.

#![forbid(unsafe_code)]

pub mod every_call;
pub mod replay;
pub mod vm;
mod wire;
