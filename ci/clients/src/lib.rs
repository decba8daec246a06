//! Clients of Cloud Hypervisor, for tests of Foreshore: one uses a crate, the others are replayed
//! byte by byte.
//!
//! Each client is a function that receives a VMM without a VM, and leaves none. The clients run in
//! tests with an owner without machines, and in the guest tests with live guests.

#![forbid(unsafe_code)]

pub mod every_call;
pub mod replay;
pub mod vm;
mod wire;
