//! A VM's life: what may be asked of it, who builds it, and the one task that owns its state.

mod attached;
mod builder;
mod cached;
mod clock;
mod created_volumes;
mod devices;
mod dimms;
pub mod error;
mod governing;
mod hotplug;
pub(crate) mod hotplug_metrics;
pub mod kvm;
mod lost;
pub(crate) mod machine;
mod named_twice;
pub mod owner;
mod pools;
pub mod request;
mod resident;
mod resize_plan;
pub(crate) mod resources;
pub mod state;
pub(crate) mod taps;
mod vcpus;
mod volumes;
pub mod zone_metrics;
mod zones;

pub use balloon::governor::decision;

pub use self::named_twice::{NamedTwice, check_launch};
