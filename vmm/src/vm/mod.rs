//! Requests to a VM, construction of its machine, and the task that owns its state.

pub(crate) mod build;
pub(crate) mod devices;
mod error;
mod kvm;
pub(crate) mod landlock;
pub(crate) mod machine;
pub(crate) mod named_twice;
mod numa_tables;
mod pm;
pub mod request;
mod resize_plan;
pub(crate) mod resources;
mod uses;
pub mod vm_task;

pub use balloon::governor::decision;

pub use self::named_twice::{NamedTwice, check_launch};
