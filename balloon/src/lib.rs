//! Pressure policies, and the controller that turns a guest's reports into plans.
//!
//! Everything here is pure: no clock, no I/O, nothing of KVM. The caller brings reports, the sizes
//! of the VM's zones and the time; the same calls give the same plans.
//!
//! ```text
//!   line -> Intake -> Report -+
//!   HostView -----------------+-> Policy::decide -> Decision -> Controller -> Plan
//!   TimeMs -------------------+     (what the guest needs)     (what is asked of it)
//! ```
//!
//! A [`Policy`](policy::Policy) says how much hotplugged memory the guest should have. The
//! [`Controller`](controller::Controller) stands above every policy: it splits that over the zones,
//! and decides how fast, in which order, within which bounds, and what to do when the guest does
//! not follow. The [`Governor`](governor::Governor) turns events of a VM into calls of the
//! controller, and its plans into requests.

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
