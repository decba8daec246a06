//! Governor of a VM's memory: policies, and the controller that turns reports of a guest into
//! plans.
//!
//! This crate is pure: it has no clock, I/O or KVM. The caller passes reports, the sizes of the
//! VM's zones and the time. The same calls always return the same plans.
//!
//! ```text
//!   line -> Intake -> Report -+
//!   HostView -----------------+-> Policy::decide -> Decision -> Controller -> Plan
//!   TimeMs -------------------+     (size that it needs)      (requests to zones)
//! ```
//!
//! A [`Policy`](policy::Policy) decides how much hotplugged memory the guest should have. The
//! [`Controller`](controller::Controller) applies to every policy. It divides that size among the
//! zones, and decides on the pace, the order, the bounds, and the reaction to a guest that does not
//! follow. The [`Governor`](governor::Governor) turns events of a VM into calls of the controller,
//! and plans into requests.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod host;
mod report;
mod units;

pub mod controller;
pub mod governor;
mod model;
pub mod params;
pub mod plan;
pub mod plug_filter;
pub mod policy;
pub mod sim;
pub mod statistics;
pub mod trace;

pub use foreshore_proto as proto;
pub use host::{
    Distances, DriverState, HostView, NodeDistance, Shortfall, Tier, UNSUPPORTED_DRIVER,
    UNSUPPORTED_DRIVER_REASON, ZoneId, ZoneSizes,
};
pub use params::ParamError;
pub use report::{Intake, parse_line};
pub use units::{BLOCK_BYTES, MIB, TimeMs};
