//! Shell completion and manual pages.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::Context;
use clap::{Arg, Command, CommandFactory};
use foreshore_cli::{Manual, Shell, complete_values, completion_script};
use pmem_volume::{OpenMode, Pool};

use super::args::{Arguments, EXIT_STATUS};
use super::print::emit;

const PROGRAM: &str = "pmvol";
/// Arguments that name a volume of the pool that precedes them.
const VOLUME_ARGUMENTS: [&str; 3] = ["name", "volume", "give_up_volume"];
/// Command whose argument is a new name.
const CREATE: &str = "create";

/// Prints the completion script of a shell.
pub(crate) fn completion(shell: Shell) -> anyhow::Result<()> {
    let script = completion_script(shell, PROGRAM, PROGRAM).context("cannot create the script")?;
    emit(|out| out.write_all(&script))
}

/// Prints the main page, or writes one page for each command to a folder.
pub(crate) fn pages(folder: Option<&Path>) -> anyhow::Result<()> {
    let page = Manual::new(Arguments::command(), EXIT_STATUS).page_or_write(folder)?;
    emit(|out| out.write_all(page.as_bytes()))
}

/// Returns the description of the command line with completion of volume names.
pub(crate) fn description() -> Command {
    with_volumes(Arguments::command())
}

fn with_volumes(command: Command) -> Command {
    if command.get_name() == CREATE {
        return command;
    }
    let is_volume = |arg: &Arg| VOLUME_ARGUMENTS.contains(&arg.get_id().as_str());
    let command = command.mut_args(|arg| match is_volume(&arg) {
        true => arg.add(complete_values(volumes)),
        false => arg,
    });
    command.mut_subcommands(with_volumes)
}

/// Returns the volumes of the first pool that the command line names.
fn volumes(words: &[OsString]) -> Vec<String> {
    let is_option = |word: &OsStr| word.as_encoded_bytes().starts_with(b"-");
    let paths = words.iter().skip(1).filter(|word| !is_option(word));
    let pool = paths.filter_map(|path| Pool::open(Path::new(path), OpenMode::Peek).ok()).next();
    pool.map_or_else(Vec::new, |pool| {
        pool.volumes().into_iter().map(|volume| volume.name).collect()
    })
}
