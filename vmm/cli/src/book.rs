//! Command lines that the book and the README show, for the tests of the programs.

use std::fs;
use std::path::{Path, PathBuf};

/// Command line of a program, as a page shows it.
#[derive(Debug, PartialEq)]
pub struct BookCommand {
    /// Path of the page below the repository.
    pub page: PathBuf,
    /// Words of the command, without the name of the program.
    pub arguments: Vec<String>,
}

/// Returns all command lines of `program` in the book and the README. Ellipses are left out.
///
/// Lines that a shell could not split are ignored. Panics if a page cannot be read.
pub fn commands(program: &str) -> Vec<BookCommand> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![PathBuf::from("README.md")];
    add_pages(&root, Path::new("docs"), &mut pages);
    pages.sort();
    let of_page = |page: PathBuf| {
        let text = fs::read_to_string(root.join(&page)).expect("a page of the book is readable");
        let commands = commands_in(&text, program);
        commands.into_iter().map(move |arguments| BookCommand { page: page.clone(), arguments })
    };
    pages.into_iter().flat_map(of_page).collect()
}

fn add_pages(root: &Path, folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(folder)).expect("the book exists") {
        let name = entry.expect("the book is readable").file_name();
        let path = folder.join(name);
        if root.join(&path).is_dir() {
            add_pages(root, &path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

/// Returns the arguments of each command of `program` in the indented blocks of `text`.
fn commands_in(text: &str, program: &str) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(line) = line.strip_prefix("    ") else { continue };
        let mut command = line.trim_start().to_owned();
        while command.ends_with('\\') {
            command.pop();
            command.push_str(lines.next().unwrap_or_default().trim_start());
        }
        for command in simple_commands(&command) {
            if let Some((first, arguments)) = command.split_first()
                && first == program
            {
                commands.push(arguments.to_vec());
            }
        }
    }
    commands
}

/// Splits a line at the operators of the shell, and each command into words. Redirections and
/// comments are left out.
fn simple_commands(line: &str) -> Vec<Vec<String>> {
    const OPERATORS: [&str; 5] = ["|", "||", "&&", "&", ";"];
    // shlex splits only at spaces.
    let words = shlex::split(&line.replace("; ", " ; ")).unwrap_or_default();
    let commands = words.split(|word| OPERATORS.contains(&word.as_str()));
    let kept = |command: &[String]| {
        let words = command.iter().filter(|word| *word != "..." && !word.contains('>'));
        // `while` and `then` precede a command.
        let words = words.skip_while(|word| ["while", "do", "then"].contains(&word.as_str()));
        words.cloned().collect()
    };
    commands.map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_blocks_only() {
        let text = "\
Run `pool create`:

    # A comment with pool create /c
    pool create /a --size 1G \\
        --reserve 4M    # as said
    while pool ping >/dev/null 2>&1; do sleep 1; done
    pool check POOL && cp POOL POOL.bak
    other ... pool
    pool ... --name \"a b\" &
";
        let expected: [&[&str]; 4] = [
            &["create", "/a", "--size", "1G", "--reserve", "4M"],
            &["ping"],
            &["check", "POOL"],
            &["--name", "a b"],
        ];
        assert_eq!(commands_in(text, "pool"), expected);
    }
}
