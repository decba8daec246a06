//! Clients of Cloud Hypervisor, for tests of Foreshore. One client uses the crate
//! cloud-hypervisor-client. The requests of the others are replayed byte by byte.
//!
//! Each client is a function that receives a VMM without a VM, and leaves it without a VM. Clients
//! run in tests with a fake VM task without machines, and in guest tests with real guests.

#![forbid(unsafe_code)]

pub mod every_call;
pub mod replay;
pub mod vm;
mod wire;
