//! Tasks of this repository: `cargo xtask --help`.

mod names_resolve;
mod repository;
mod same_tokens;

use std::fmt::Display;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::repository::Repository;

/// Checks and tasks of the Foreshore repository
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compare the tokens of all Rust files with a commit, ignoring comments
    ///
    /// Prints each difference and exits with 1 if there is one. A commit that changes only words
    /// differs in string literals alone. Help texts from doc comments are not compared.
    SameTokens {
        /// Commit to compare with
        base: String,
    },
    /// Check that documents, anchors and included files that other files name exist
    NamesResolve,
}

fn main() -> Result<ExitCode> {
    let repository = Repository::here()?;
    let findings = match Arguments::parse().task {
        Task::SameTokens { base } => print(same_tokens::differences(&repository, &base)?),
        Task::NamesResolve => print(names_resolve::unresolved(&repository)?),
    };
    Ok(if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints `findings` and returns their number.
fn print(findings: Vec<impl Display>) -> usize {
    findings.iter().for_each(|finding| println!("{finding}"));
    findings.len()
}
