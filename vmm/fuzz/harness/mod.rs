//! Code of the fuzz targets, which libFuzzer and `cargo test` run.

mod agent;
mod balloon;
mod blk;
mod cursor;
mod kernel;
mod net;

pub(crate) use agent::{agent_report, agent_report_by};
pub(crate) use balloon::{balloon_request, balloon_request_by};
pub(crate) use blk::{blk_request, blk_request_by};
pub(crate) use kernel::{kernel_payload, kernel_payload_by};
pub(crate) use net::{net_request, net_request_by};
