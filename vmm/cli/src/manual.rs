//! Manual pages. They are generated from the clap description that parses the command line, so that
//! the two always agree.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::builder::Resettable;
use clap_mangen::Man;
use thiserror::Error;

/// File mode of a manual page. All users of the host may read it.
const PAGE_MODE: u32 = 0o644;

/// Manual pages of the programs.
const PROGRAMS: [&str; 5] =
    ["foreshore(1)", "foreshore-remote(1)", "foreshore-sim(1)", "pmvol(1)", "foreshore-agent(8)"];

#[derive(Debug, Error)]
pub enum ManualError {
    #[error("cannot make a manual page")]
    Render(#[source] io::Error),
    #[error("cannot write manual pages to {folder:?}")]
    Write {
        folder: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Generator of a program's manual pages.
pub struct Manual {
    command: Command,
    exit_status: &'static str,
}

impl Manual {
    /// Creates the manual of `command`. `help` subcommands have no page, because they show the same
    /// text.
    pub fn new(command: Command, exit_status: &'static str) -> Self {
        let mut command = without_help(command).long_version(Resettable::Reset);
        // Gives subcommands their full names.
        command.build();
        Self { command, exit_status }
    }

    /// Without a folder, returns the program's main page. With a folder, writes a page for each
    /// command into it and returns an empty text. The folder is created if it does not exist.
    pub fn page_or_write(&self, folder: Option<&Path>) -> Result<String, ManualError> {
        let Some(folder) = folder else {
            return self.render(&self.command).map_err(ManualError::Render);
        };
        let written = fs::create_dir_all(folder);
        written
            .and_then(|()| self.write_command(&self.command, folder))
            .map_err(|source| ManualError::Write { folder: folder.to_owned(), source })?;
        Ok(String::new())
    }

    fn write_command(&self, command: &Command, folder: &Path) -> io::Result<()> {
        for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            self.write_command(subcommand, folder)?;
        }
        let path = folder.join(Man::new(command.clone()).get_filename());
        fs::write(&path, self.render(command)?)?;
        fs::set_permissions(&path, Permissions::from_mode(PAGE_MODE))
    }

    /// Renders a page with sections of man-pages(7) that clap_mangen does not support. clap_mangen
    /// puts the text after the help into a section EXTRA, and has no sections for the exit status
    /// and for related pages.
    fn render(&self, command: &Command) -> io::Result<String> {
        let man = Man::new(command.clone());
        let mut page = Vec::new();
        man.render_title(&mut page)?;
        man.render_name_section(&mut page)?;
        writeln!(page, ".SH SYNOPSIS\n{}", synopsis(command))?;
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
        if command.get_subcommands().any(|subcommand| !subcommand.is_hide_set()) {
            man.render_subcommands_section(&mut page)?;
        }
        if command.get_after_help().is_some() || command.get_after_long_help().is_some() {
            man.render_extra_section(&mut page)?;
        }
        if command.get_version().is_some() {
            man.render_version_section(&mut page)?;
        }
        let mut page = String::from_utf8_lossy(&page).into_owned();
        for (found, section) in [
            // The heading in the help becomes that of the section.
            ("\n.SH EXTRA\nExamples:\n", "\n.SH EXAMPLES\n"),
            ("\n.SH EXTRA\nExample:\n", "\n.SH EXAMPLES\n"),
            ("\n.SH EXTRA\n", "\n.SH NOTES\n"),
            ("\nExamples:\n", "\n.SH EXAMPLES\n"),
            // clap_mangen puts a `v` before the version, which begins with one already.
            ("\n.SH VERSION\nvv", "\n.SH VERSION\nv"),
        ] {
            page = page.replace(found, section);
        }
        let see_also = Self::see_also(&man.get_filename());
        let page = page.trim_end();
        Ok(format!("{page}\n.SH EXIT STATUS\n{}\n.SH SEE ALSO\n{see_also}\n", self.exit_status))
    }

    /// Lists the pages of all programs, except for the page itself.
    fn see_also(file_name: &str) -> String {
        let is_other = |page: &&str| {
            let (name, _) = page.split_once('(').expect("a page has a section");
            file_name.strip_suffix(".1") != Some(name)
        };
        let pages: Vec<_> = PROGRAMS.iter().copied().filter(is_other).collect();
        pages.join(", ").replace('-', "\\-")
    }
}

/// Returns the usage of the help. The synopsis of clap_mangen lists flags without their values.
fn synopsis(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    let lines = usage.trim_start_matches("Usage:").lines().map(str::trim);
    lines.collect::<Vec<_>>().join("\n.br\n").replace('-', "\\-")
}

fn without_help(command: Command) -> Command {
    if command.has_subcommands() {
        command.disable_help_subcommand(true).mut_subcommands(without_help)
    } else {
        command
    }
}

#[cfg(test)]
mod tests {
    use clap::Arg;
    use tempfile::TempDir;

    use super::*;

    fn manual() -> Manual {
        let rise = Command::new("rise").about("Raise the level");
        let command = Command::new("tide")
            .version("1.2")
            .long_version("1.2\ncommit 3")
            .about("Set the tide")
            .after_help("Examples:\n  tide rise")
            .arg(Arg::new("moon").long("moon").help("Phase of the moon"))
            .subcommand(Command::new("level").about("Change the level").subcommand(rise))
            .subcommand(Command::new("secret").hide(true));
        Manual::new(command, "0: done.")
    }

    #[test]
    fn page_has_options_examples_and_exit_status() {
        let page = manual().page_or_write(None).unwrap();
        for text in [
            ".TH tide 1  \"tide 1.2\"",
            "tide \\- Set the tide",
            "Phase of the moon",
            "tide\\-level(1)",
            "\n.SH EXAMPLES\n  tide rise\n",
            "\n.SH SYNOPSIS\ntide [OPTIONS] [COMMAND]\n",
            "\n.SH EXIT STATUS\n0: done.\n.SH SEE ALSO\nforeshore(1), foreshore\\-remote(1), ",
        ] {
            assert!(page.contains(text), "{text} is not in {page}");
        }
        for text in ["EXTRA", "Examples:", "subcommands", "tide\\-help", "secret", "commit"] {
            assert!(!page.contains(text), "{text} is in {page}");
        }
    }

    /// The page of the agent is a file, because its command line is not described with clap.
    #[test]
    fn page_of_the_agent_refers_to_all_other_programs() {
        let page = include_str!("../../../guest/systemd/foreshore-agent.8");
        let (_, see_also) = page.split_once("\n.Sh SEE ALSO\n").unwrap();
        let pages = see_also.lines().map(|line| {
            let line = line.strip_prefix(".Xr ").unwrap().trim_end_matches(" ,");
            line.replace(' ', "(") + ")"
        });
        let others = PROGRAMS.iter().filter(|page| **page != "foreshore-agent(8)");
        assert_eq!(pages.collect::<Vec<_>>(), others.copied().collect::<Vec<_>>());
    }

    #[test]
    fn every_command_has_a_page_that_all_users_can_read() {
        let folder = TempDir::new().unwrap();
        let pages = folder.path().join("man1");
        assert_eq!(manual().page_or_write(Some(&pages)).unwrap(), "");
        let entries = fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap());
        let mut found: Vec<_> = entries
            .map(|page| {
                let mode = page.metadata().unwrap().permissions().mode() & 0o777;
                (page.file_name().into_string().unwrap(), mode)
            })
            .collect();
        found.sort();
        let names = ["tide-level-rise.1", "tide-level.1", "tide.1"];
        assert_eq!(found, names.map(|name| (name.to_owned(), PAGE_MODE)));
        let file = pages.join("tide.1");
        let error = manual().page_or_write(Some(&file)).unwrap_err().to_string();
        assert_eq!(error, format!("cannot write manual pages to {file:?}"));
    }
}
