//! Shell completion and manual pages for this program and for the VMM. Generating them here keeps
//! the VMM small.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory, Subcommand, ValueEnum};
use foreshore::config;
use foreshore_cli::{Manual, Shell, completion_script};

use crate::{Flags, completion};

/// Program that the shell runs to complete a command line.
const COMPLETER: &str = "foreshore-remote";

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Program {
    Foreshore,
    ForeshoreRemote,
}

impl Program {
    fn description(self) -> Command {
        match self {
            Self::Foreshore => config::description(),
            Self::ForeshoreRemote => Flags::command(),
        }
    }

    fn exit_status(self) -> &'static str {
        match self {
            Self::Foreshore => {
                "0: end of the VMM by its guest or a client. 1: failure, with the reason on standard error. 2: wrong command line."
            }
            Self::ForeshoreRemote => {
                "0: success. 1: failure of the call, or no answer of a VMM, with the reason on standard error. 2: wrong command line."
            }
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ManualVerb {
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  foreshore-remote completion bash > /usr/share/bash-completion/completions/foreshore-remote
  foreshore-remote completion bash foreshore > /usr/share/bash-completion/completions/foreshore
  source <(foreshore-remote completion bash)      for this shell alone")]
    Completion {
        /// Shell
        #[arg(value_enum)]
        shell: Shell,
        /// Program whose command line the script completes
        #[arg(value_enum, default_value = "foreshore-remote")]
        program: Program,
    },
    /// Print the manual page, or write the pages of foreshore and all commands
    #[command(after_help = "\
Examples:
  foreshore-remote man | man -l -
  foreshore-remote man /usr/share/man/man1")]
    Man {
        /// Folder for the pages, created if it is missing
        folder: Option<PathBuf>,
    },
}

impl ManualVerb {
    /// Executes the subcommand, and returns the text to print.
    pub(crate) fn execute(&self) -> Result<String> {
        match self {
            Self::Completion { shell, program } => {
                let description = program.description();
                let script = completion_script(*shell, description.get_name(), COMPLETER)
                    .context("cannot make the script")?;
                Ok(String::from_utf8(script)?)
            }
            Self::Man { folder } => {
                let page = |program: Program| {
                    let manual = Manual::new(program.description(), program.exit_status());
                    manual.page_or_write(folder.as_deref())
                };
                if folder.is_some() {
                    page(Program::Foreshore)?;
                }
                Ok(page(Program::ForeshoreRemote)?)
            }
        }
    }
}

/// Command line description of a program, which also completes values.
pub(crate) fn description(program: &str) -> Command {
    let vmm = Program::Foreshore.description();
    match vmm.get_name() == program {
        true => completion::of_vmm(vmm),
        false => completion::of_client(Program::ForeshoreRemote.description()),
    }
}
