//! Types that all programs of Foreshore share.
//!
//! The crate depends on no other crate of the workspace.

#![forbid(unsafe_code)]

pub mod size;
