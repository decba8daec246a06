//! Shell completion and manual pages, made from the same description that parses the command line,
//! so that they cannot say something else.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use super::args::{Arguments, EXIT_STATUS};
use super::print::emit;

const PROGRAM: &str = "pmvol";
/// Every user of the host may read the documentation.
const PAGE_MODE: u32 = 0o644;

/// Prints what the shell needs to complete our commands and flags.
pub(crate) fn completion(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), PROGRAM, &mut script);
    emit(|out| out.write_all(&script))
}

/// Prints the main page, or writes one for each command into a folder.
pub(crate) fn pages(folder: Option<&Path>) -> anyhow::Result<()> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(described()).render(&mut page)?;
        let page = with_examples(&String::from_utf8(page)?);
        return emit(|out| out.write_all(page.as_bytes()));
    };
    let failed = || format!("cannot write manual pages to {}", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(described(), folder).with_context(failed)?;
    for entry in fs::read_dir(folder).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        if path.file_name().is_some_and(|name| is_ours(&name.to_string_lossy())) {
            let page = fs::read_to_string(&path).with_context(failed)?;
            fs::write(&path, with_examples(&page)).with_context(failed)?;
            fs::set_permissions(&path, Permissions::from_mode(PAGE_MODE)).with_context(failed)?;
        }
    }
    Ok(())
}

/// The commands that have pages: `pmvol help` says what they say.
fn described() -> clap::Command {
    Arguments::command()
        .disable_help_subcommand(true)
        .mut_subcommand("volume", |volume| volume.disable_help_subcommand(true))
        .mut_subcommand("btt", |btt| btt.disable_help_subcommand(true))
}

/// There may be pages of others in the folder.
fn is_ours(file_name: &str) -> bool {
    file_name
        .strip_prefix(PROGRAM)
        .is_some_and(|rest| rest == ".1" || rest.starts_with('-') && rest.ends_with(".1"))
}

/// What stands behind the help is examples, and clap_mangen cannot know (man-pages(7) calls the
/// section so); nor does it know how commands end.
fn with_examples(page: &str) -> String {
    let page = page.replace("\n.SH EXTRA\n", "\n.SH EXAMPLES\n");
    format!("{}\n.SH EXIT STATUS\n{EXIT_STATUS}\n", page.trim_end())
}
