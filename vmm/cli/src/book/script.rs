//! Scripts of the blocks of commands, which the tests run.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use super::{Block, blocks, is_assignment, logical_lines, pages, simple_commands};

/// Values of the marker `<!-- needs: VALUE -->`. Blocks with a marker do not run in a test.
const NEEDS: [&str; 4] = ["guest", "network", "root", "space"];

/// Runnable blocks of a page.
pub struct PageScripts {
    /// Path of the page below the repository.
    pub page: PathBuf,
    /// Script of each block, a command per line.
    pub scripts: Vec<String>,
}

/// Returns the lines with commands of `program` in all blocks without a marker, by page.
///
/// Assignments and options of the shell are retained for them. Panics on an unknown marker.
pub fn scripts(program: &str) -> Vec<PageScripts> {
    let of_page = |(page, text): (PathBuf, String)| {
        let scripts = scripts_in(&text, program)
            .unwrap_or_else(|need| panic!("{}: unknown marker: {need}", page.display()));
        PageScripts { page, scripts }
    };
    pages().into_iter().map(of_page).filter(|page| !page.scripts.is_empty()).collect()
}

/// Returns the script of each block of `text`, or the value of an unknown marker.
fn scripts_in(text: &str, program: &str) -> Result<Vec<String>, String> {
    let mut scripts = Vec::new();
    for block in blocks(text) {
        match block.needs {
            None => scripts.extend(script_of(&block, program)),
            Some(need) if NEEDS.contains(&need) => {}
            Some(need) => return Err(need.to_owned()),
        }
    }
    Ok(scripts)
}

fn script_of(block: &Block<'_>, program: &str) -> Option<String> {
    let runs_program = |line: &str| {
        let commands = simple_commands(line).unwrap_or_default();
        commands.iter().any(|command| command.first().is_some_and(|first| first == program))
    };
    let sets_up = |line: &str| line.starts_with("set ") || is_assignment(line);
    let lines = logical_lines(&block.lines);
    lines.iter().any(|line| runs_program(line)).then(|| {
        let lines = lines.into_iter().filter(|line| runs_program(line) || sets_up(line));
        lines.collect::<Vec<_>>().join("\n")
    })
}

/// Runs a script with bash in `folder` until a command or a part of a pipe fails.
///
/// `paths` has paths of the book, each with its path below the folder. `program` is the path of our
/// program. Panics if the script fails or uses other absolute paths.
pub fn run(script: &str, program: &Path, folder: &Path, paths: &[(&str, &str)]) {
    let root = folder.to_str().expect("the path of the folder is UTF-8");
    let map = |text: String, (of_book, name): &(&str, &str)| {
        text.replace(of_book, &format!("{root}/{name}"))
    };
    let mapped = paths.iter().fold(script.to_owned(), map);
    let foreign = mapped
        .split([' ', '=', '>', '<', '"', '\'', '\n'])
        .find(|word| word.starts_with('/') && !word.starts_with(root) && *word != "/dev/null");
    assert_eq!(foreign, None, "a path is not mapped to the temporary directory: {script}");
    let programs = folder.join("programs");
    fs::create_dir_all(&programs).unwrap();
    let link = programs.join(program.file_name().expect("the program has a name"));
    if !link.exists() {
        symlink(program, &link).unwrap();
    }
    let path = format!("{}:{}", programs.display(), env::var("PATH").unwrap());
    let output = Command::new("bash")
        .args(["-e", "-o", "pipefail", "-c", &mapped])
        .current_dir(folder)
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {}: {error}", output.status);
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: &str = "\
Text:

    folder=/a
    pool info a
    other
    pool info b && cp a b

<!-- needs: root -->

    pool create /dev/a

Text:

    pool info c
";

    #[test]
    fn script_has_lines_of_the_program_in_blocks_without_marker() {
        let expected = ["folder=/a\npool info a\npool info b && cp a b", "pool info c"];
        assert_eq!(scripts_in(BLOCKS, "pool").unwrap(), expected);
    }

    #[test]
    fn unknown_marker_is_an_error() {
        let text = BLOCKS.replace("needs: root", "needs: money");
        assert_eq!(scripts_in(&text, "pool").unwrap_err(), "money");
    }
}
