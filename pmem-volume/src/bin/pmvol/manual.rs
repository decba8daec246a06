//! Shell completion and manual pages, made from the same description that parses the command line, so that they cannot
//! say something else.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use super::args::Arguments;

const PROGRAM: &str = "pmvol";

/// Prints what the shell needs to complete our commands and flags.
pub(crate) fn completion(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), PROGRAM, &mut script);
    print(&script)
}

/// Prints the main page, or writes one for each command into a folder.
pub(crate) fn pages(folder: Option<&Path>) -> anyhow::Result<()> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Arguments::command()).render(&mut page)?;
        return print(&page);
    };
    let failed = || format!("cannot write manual pages to {}", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(Arguments::command(), folder).with_context(failed)
}

fn print(text: &[u8]) -> anyhow::Result<()> {
    io::stdout().write_all(text).context("cannot print it")
}
