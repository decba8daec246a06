//! Command lines of Foreshore's programs: errors, manual pages and completion.
//!
//! The crate depends on no other crate of the workspace.

#![forbid(unsafe_code)]

#[cfg(any(test, feature = "book"))]
pub mod book;
#[cfg(test)]
#[path = "../build_info.rs"]
mod build_info;
mod completion;
mod manual;
#[cfg(any(test, feature = "book"))]
pub mod misspelled;
mod usage;

pub use clap_complete::Shell;

pub use self::completion::{
    FlagOption, GivenOptions, Values, answer_completion, complete_options, complete_paths,
    complete_values, completion_script,
};
pub use self::manual::{Manual, ManualError};
pub use self::usage::{WRONG_COMMAND_LINE, report, usage_line};
