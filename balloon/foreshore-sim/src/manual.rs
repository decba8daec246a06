//! Shell completion and the manual page, generated from the definition of the command line.

use clap::CommandFactory;
use clap_complete::Shell;

use super::args::{Arguments, EXIT_STATUS};

pub(crate) fn completion(shell: Shell) -> anyhow::Result<Vec<u8>> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "foreshore-sim", &mut script);
    Ok(script)
}

pub(crate) fn page() -> anyhow::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Arguments::command().disable_help_subcommand(true)).render(&mut page)?;
    // clap_mangen does not know that the text after the help has examples, or the exit status.
    let page = String::from_utf8(page)?.replace("\n.SH EXTRA\n", "\n.SH EXAMPLES\n");
    Ok(format!("{}\n.SH EXIT STATUS\n{EXIT_STATUS}\n", page.trim_end()).into_bytes())
}
