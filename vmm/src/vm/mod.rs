//! A VM's life: what may be asked of it, who builds it, and the one task that owns its state.

pub mod build;
pub(crate) mod devices;
mod error;
pub(crate) mod machine;
pub mod owner;
mod pm;
pub mod request;
mod resize_plan;

pub use balloon::governor::decision;

pub use self::build::named_twice::{NamedTwice, check_launch};
