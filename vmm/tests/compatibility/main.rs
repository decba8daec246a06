//! docs/reference/compatibility.md, docs/reference/openapi.json, and what is really so.
//!
//! `cloud-hypervisor-0.3.0.names` lists what Cloud Hypervisor has: every flag and key of its
//! programs, every call and field of its API's description, with values to try them with. Each is
//! tried, on the parsers and on a server, and what comes of it is what the page says. `UPDATE=1
//! cargo test -p foreshore --test compatibility` writes the page anew.

mod calls;
mod fields;
mod flags;
mod names;
mod openapi;
mod page;
mod verdict;
