//! Tests that docs/reference/compatibility.md and docs/reference/openapi.json match the code.
//!
//! `cloud-hypervisor-0.3.0.names` lists every flag and key of Cloud Hypervisor's programs, and
//! every call and field in its API description, with sample values. The test tries each of them on
//! the parsers and on a server. The page should contain the resulting verdicts.
//! `UPDATE=1 cargo test -p foreshore --test compatibility` updates the page.

mod calls;
mod fields;
mod flags;
mod names;
mod openapi;
mod page;
mod verdict;
