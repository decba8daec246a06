//! Manual pages. They are generated from the clap description that parses the command line, so that
//! the two always agree.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::builder::Resettable;
use clap_mangen::Man;
use thiserror::Error;

/// File mode of a manual page. All users of the host may read it.
const PAGE_MODE: u32 = 0o644;

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
            return self.render(&Man::new(self.command.clone())).map_err(ManualError::Render);
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
        let man = Man::new(command.clone());
        let path = folder.join(man.get_filename());
        fs::write(&path, self.render(&man)?)?;
        fs::set_permissions(&path, Permissions::from_mode(PAGE_MODE))
    }

    /// Renders a page with sections of man-pages(7) that clap_mangen does not support. clap_mangen
    /// puts the text after the help into a section EXTRA, and has no section for the exit status.
    fn render(&self, man: &Man) -> io::Result<String> {
        let mut page = Vec::new();
        man.render(&mut page)?;
        let page = String::from_utf8_lossy(&page).replace("\n.SH EXTRA\n", "\n.SH EXAMPLES\n");
        // clap_mangen adds a letter v.
        let page = page.replace("\n.SH VERSION\nvv", "\n.SH VERSION\nv");
        Ok(format!("{}\n.SH EXIT STATUS\n{}\n", page.trim_end(), self.exit_status))
    }
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
            "\n.SH EXAMPLES\n",
            "\n.SH EXIT STATUS\n0: done.\n",
        ] {
            assert!(page.contains(text), "{text} is not in {page}");
        }
        for text in ["EXTRA", "tide\\-help", "secret", "commit"] {
            assert!(!page.contains(text), "{text} is in {page}");
        }
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
