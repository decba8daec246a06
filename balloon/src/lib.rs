//! Sizes a VM's memory: policies decide on a size, and the controller turns the guest's reports
//! into plans.
//!
//! This crate is pure: it has no clock, I/O or KVM. The caller passes reports, the sizes of the
//! VM's zones and the time. The same sequence of calls always returns the same plans.
//!
//! ```text
//!   line -> Intake -> Report -+
//!   HostView -----------------+-> Policy::decide -> Decision -> Controller -> Plan
//!   TimeMs -------------------+     (size that it needs)      (requests to zones)
//! ```
//!
//! A [`Policy`](policy::Policy) decides how much hotplugged memory the guest should have. The
//! [`Controller`](controller::Controller) is the same for every policy. It divides that size among
//! the zones, sets the pace and order of changes, applies the bounds, and reacts to a guest that
//! does not follow requests. The [`Governor`](governor::Governor) calls the controller for each
//! event of the VM, and turns plans into requests.

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
    Distances, DriverState, HostView, NodeDistance, Shortfall, StorageSpace, Tier,
    UNSUPPORTED_DRIVER, UNSUPPORTED_DRIVER_REASON, ZoneId, ZoneSizes,
};
pub use params::ParamError;
pub use report::{Intake, parse_line};
pub use units::{BLOCK_BYTES, MIB, TimeMs};
